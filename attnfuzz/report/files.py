"""Writing a report where the user wants it: as text, as JSON, as an HTML page of a template."""

from __future__ import annotations

from pathlib import Path

import jinja2
import msgspec

from attnfuzz.campaign.stopping import format_duration
from attnfuzz.own_files import write_file
from attnfuzz.report.findings import count
from attnfuzz.untrusted_text import only_printable

TEMPLATES = Path(__file__).parent / "templates"


def as_json(document: object) -> bytes:
    """Indented, for people and programs."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def write_json(path: Path, document: object) -> None:
    """Write ``document`` as indented JSON. Raises OSError."""
    write_file(path, as_json(document))


def rendered(template: str, **context: object) -> str:
    """A template of this package with ``context`` in it, whose texts are escaped and cleaned."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": format_duration, "percent": _percent}
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
