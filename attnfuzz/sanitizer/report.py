"""Reads the output of compute-sanitizer: each report with the kernel, the source line, the thread and the address.

The format is that of NVIDIA's "Compute Sanitizer User Manual", Understanding Memcheck Errors and the chapters on the
other tools; the lines that say where, and at which address, have had three forms each since CUDA 11.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_PREFIX = re.compile(r"^={8,9}(?: (?P<text>.*))?$")
_HEADERS = (
    re.compile(r"(?P<what>Invalid __\w+__ \w+(?: \w+)? of size \d+ bytes)"),
    re.compile(r"(?P<what>Uninitialized (?:__\w+__ )?memory read of size \d+ bytes)"),
    re.compile(r"(?P<what>Malloc/Free error encountered) ?: (?P<more>[\w /]+)"),
    re.compile(r"(?P<what>Barrier error detected)\. (?P<more>[^.]+)"),
    re.compile(r"Error: (?:Potential )?(?P<what>(?:RAW|WAR|WAW) hazard) detected at (?P<more>__\w+__)"),
    re.compile(r"Error: (?P<what>Race) reported between (?P<first>\w+) access (?P<place>at .+)"),
)
_SECOND_ACCESS = re.compile(r"^and (?P<second>\w+) access at ")
_NOT_ABOUT_KERNELS = ("COMPUTE-SANITIZER", "Target application", "Program hit", "Warning", "Info", "Saved host")
_SUMMARY = re.compile(r"^(?:\w+ )?(?:ERROR|RACECHECK|LEAK|INITCHECK|SYNCCHECK) SUMMARY:")
_PLACES = (
    re.compile(r"^at (?P<kernel>.+?)[+:]0x[0-9a-f]+(?: in (?P<source>\S.*?:\d+))?\b"),
    re.compile(r"^at 0x[0-9a-f]+ in (?P<source>.+?:\d+):(?P<kernel>.+)$"),
    re.compile(r"^at 0x[0-9a-f]+ in (?P<kernel>.+)$"),
)
_THREAD = re.compile(r"^by thread \((?P<thread>[\d,]+)\) in block \((?P<block>[\d,]+)\)")
_ADDRESS = re.compile(r"^(?:Address|Access (?:at|to)) (?P<address>0x[0-9a-f]+)(?: is (?P<state>[a-z ]+))?")


@dataclass(frozen=True, slots=True)
class SanitizerReport:
    """One report. `what` keeps different bugs apart; `lines` are those of the report, without the host's stack."""

    what: str
    lines: tuple[str, ...]
    kernel: str = ""
    source: str = ""
    thread: str = ""
    block: str = ""
    address: int | None = None
    state: str = ""


def read_reports(log: str) -> list[SanitizerReport]:
    """The reports in `log`, in their order; those on API calls and warnings are left out."""
    return [_report(match, lines) for match, lines in _blocks(log) if match is not None]


def unread_headers(log: str) -> list[str]:
    """First lines of what may be a report and has a form that is not known."""
    return [lines[0] for match, lines in _blocks(log) if match is None and not lines[0].startswith(_NOT_ABOUT_KERNELS)]


def is_complete(log: str) -> bool:
    """Whether the tool has come to its end."""
    return any(_SUMMARY.match(text.strip()) for text in _texts(log))


def _texts(log: str) -> Iterator[str]:
    """The tool's own lines: others, of the command, may be between them."""
    for line in log.splitlines():
        match = _PREFIX.match(line.rstrip())
        if match is not None:
            yield match["text"] or ""


def _blocks(log: str) -> Iterator[tuple[re.Match[str] | None, list[str]]]:
    """A first line and those that belong to it; they are indented."""
    lines: list[str] = []
    for text in _texts(log):
        if text.startswith(" "):
            if lines:
                lines.append(text.strip())
            continue
        yield from _finished(lines)
        lines = [text.strip()] if text.strip() and not _SUMMARY.match(text.strip()) else []
    yield from _finished(lines)


def _finished(lines: list[str]) -> Iterator[tuple[re.Match[str] | None, list[str]]]:
    if lines:
        yield next(filter(None, (header.match(lines[0]) for header in _HEADERS)), None), lines


def _report(header: re.Match[str], lines: list[str]) -> SanitizerReport:
    own = tuple(_without_host_stack(lines))
    found = header.groupdict()
    where = [found["place"]] if found.get("place") else []
    place = _first(_PLACES, [*where, *own[1:]])
    by, at = _first((_THREAD,), own[1:]), _first((_ADDRESS,), own[1:])
    return SanitizerReport(
        what=_what(found, own),
        lines=own,
        kernel=_name(place.get("kernel") or ""),
        source=place.get("source") or "",
        thread=by.get("thread") or "",
        block=by.get("block") or "",
        address=int(at["address"] or "0", 16) if at else None,
        state=(at.get("state") or "").strip(),
    )


def _what(found: dict[str, str | None], lines: tuple[str, ...]) -> str:
    if found.get("first"):
        second = _first((_SECOND_ACCESS,), lines[1:]).get("second") or "another"
        return f"{found['what']} between {found['first']} and {second} access"
    more = found.get("more")
    return f"{found['what']}: {more.strip()}" if more else str(found["what"])


def _without_host_stack(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if line.startswith("Saved host backtrace"):
            return
        yield line


def _first(patterns: tuple[re.Pattern[str], ...], lines: tuple[str, ...] | list[str]) -> dict[str, str | None]:
    """The groups of the first line that one of `patterns` matches."""
    for line in lines:
        for pattern in patterns:
            match = pattern.match(line)
            if match is not None:
                return match.groupdict()
    return {}


def _name(kernel: str) -> str:
    """Without its parameters' types."""
    return kernel.partition("(")[0].strip()
