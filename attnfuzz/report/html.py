"""The result of a campaign as one HTML page that needs nothing else: no network, no other file, no script to be read.

What it shows is put together by ``attnfuzz.report.html_parts`` and drawn by the modules that end in ``_svg``; the
template gives it its place, and escapes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2

from attnfuzz.campaign.result import CampaignResult
from attnfuzz.campaign.stopping import format_duration
from attnfuzz.report.coverage_svg import shade
from attnfuzz.report.files import write_file
from attnfuzz.report.headline import count
from attnfuzz.report.html_parts import page_of
from attnfuzz.report.inline_scripts import Script, scripts_of
from attnfuzz.said import only_printable

__all__ = ["html_page", "rendered", "write_html"]

_TEMPLATES = Path(__file__).parent / "templates"


def write_html(result: CampaignResult, path: Path) -> None:
    """Write the page, with scripts that show its findings. Raises OSError."""
    write_file(path, html_page(result, scripts_of(result)).encode())


def html_page(result: CampaignResult, scripts: Sequence[Script] = ()) -> str:
    """The page; without ``scripts``, or with one for each finding in the order of all reports."""
    return rendered("campaign.html.jinja", page=page_of(result, scripts))


def rendered(template: str, **context: object) -> str:
    """A template of this package with ``context`` in it, whose texts are escaped and cleaned."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": format_duration, "shade": shade, "percent": _percent}
    environment.globals |= {"count": count}
    return environment.get_template(template).render(**context)


def _clean(value: object) -> object:
    """Text, which is yet to be escaped, without characters that a browser would obey; drawings are attnfuzz's own."""
    return only_printable(value) if type(value) is str else value


def _percent(share: float) -> str:
    """Never 100 % of something that is not complete, nor 0 % of something that is there."""
    percent = 100 * share
    if 0 < percent < 0.5 or 99.5 <= percent < 100:
        return f"{percent:.1f}%" if 0.05 <= percent < 99.95 else "<0.1%" if percent < 1 else ">99.9%"
    return f"{percent:.0f}%"
