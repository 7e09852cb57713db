"""Output of ``attnfuzz ci`` for a CI: Markdown for a job or a build, and GitHub's annotations.

Both are made of the JSON files that the commands wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from attnfuzz.report.findings import count
from attnfuzz.untrusted_text import only_printable

_MOST_TOLD = 10
"""More annotations than these GitHub leaves out."""
_MEANINGS = {0: "nothing new found", 2: "not everything could be tested"}


def summary_in_markdown(folder: Path, status: int, *, title: str) -> str:
    """The findings of the commands whose results lie in ``folder``, and their outcomes. Raises OSError."""
    return "\n".join([*_lines(folder, status, title), ""])


def github_annotations(folder: Path) -> list[str]:
    """GitHub's commands for what is new, at the line of the kernel that is named first. Raises OSError."""
    told = [
        *(
            _command(one["path"], 1, f"saved case of {one['kernel']}", f"{_why(one)} {one['message'] or ''}".strip())
            for one in _cases(folder)
        ),
        *(
            _command(*_place(kernel, finding), f"{kernel['name']}: {finding['signature']}", _message(finding, others))
            for kernel, finding, others in _entries(folder)
        ),
    ]
    return told[:_MOST_TOLD]


def _lines(folder: Path, status: int, title: str) -> Iterator[str]:
    replay, explore = _read(folder / "replay.json"), _read(folder / "explore.json")
    cases, found = _cases(folder), list(_entries(folder))
    reasons = ["new findings"] if found else []
    reasons += ["saved cases that are not as expected"] if cases else []
    meaning = " and ".join(reasons) if status == 1 else _MEANINGS.get(status, "interrupted")
    yield f"### {_text(title)}: {meaning or 'a command failed; see the log'}\n"
    if replay is not None:
        unlike = f"{len(cases)} of them not as expected" if cases else "all as expected"
        yield f"{count(len(replay['results']), 'run')} of saved cases: {unlike}.\n"
        for one in cases:
            yield f"- **{_code(one['kernel'])}** {_why(one)}: {_code(one['path'])} {_text(one['message'] or '')}"
        if cases:
            yield ""
    if explore is None:
        yield "The search came to no result; see the log.\n"
        return
    known = sum(one.get("known", False) for kernel in explore["kernels"] for one in kernel["findings"])
    yield (
        f"{count(explore['cases'], 'case')} searched on {_text(explore['device'])}: {count(len(found), 'new finding')}"
        f"{f', {known} known' if known else ''}.\n"
    )
    for remark in explore.get("remarks", ()):
        if remark["weight"] != "note":
            yield f"{_text(remark['text'])}.\n"
    for kernel, finding, others in found:
        yield f"- **{_code(kernel['target'])}** {_code(finding['signature'])}: {_text(finding['message'])}"
        if others:
            yield f"  shown by {len(others) + 1} kernels:"
        for path in filter(None, (finding["path"], *(other["path"] for _, other in others))):
            yield f"  {_code('attnfuzz replay ' + path)}"


def _read(path: Path) -> dict[str, Any] | None:
    """The results of a command; None where it did not come to writing them."""
    try:
        document: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    return document


def _cases(folder: Path) -> list[dict[str, Any]]:
    """Saved cases that came to something else than their status says."""
    return [one for one in (_read(folder / "replay.json") or {}).get("results", ()) if one.get("unexpected")]


def _why(result: dict[str, Any]) -> str:
    if result["outcome"] == "pass":
        return f"passes now; once repaired: attnfuzz triage --fixed FILE {result.get('issue', '')}".rstrip()
    return "fails again" if result["status"] == "fixed" else "fails"


_InKernel = tuple[dict[str, Any], dict[str, Any]]
"""A kernel and a finding of it."""


def _entries(folder: Path) -> list[tuple[dict[str, Any], dict[str, Any], list[_InKernel]]]:
    """The findings that count, in the order of all reports, each with its kernel and those of other kernels that come
    of the same code."""
    entries: dict[int, list[_InKernel]] = {}
    for kernel in (_read(folder / "explore.json") or {}).get("kernels", ()):
        for finding in kernel["findings"]:
            if finding["in_contract"] and not finding.get("known"):
                entries.setdefault(finding["entry"], []).append((kernel, finding))
    return [(*first, others) for _, (first, *others) in sorted(entries.items())]


def _message(finding: dict[str, Any], others: list[_InKernel]) -> str:
    beside = ", ".join(kernel["name"] for kernel, _ in others)
    return (
        f"{finding['message']}; {beside} show{'s' if len(others) == 1 else ''} it, too"
        if others
        else finding["message"]
    )


def _place(kernel: dict[str, Any], finding: dict[str, Any]) -> tuple[str, int]:
    """A line that the finding names, or that of the kernel's function."""
    for source in finding.get("sources", ()):
        return source["file"], source["line"]
    file, _, name = kernel["target"].rpartition(":")
    return (file, _line_of(Path(file), name)) if file.endswith(".py") else ("", 1)


def _line_of(file: Path, function: str) -> int:
    """Where ``function`` begins, as its source says now; 1 where it does not say."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 1
    return next((number for number, line in enumerate(lines, 1) if line.startswith(f"def {function}(")), 1)


def _command(file: str, line: int, title: str, message: str) -> str:
    where = f"file={_property(file)},line={line}," if file else ""
    return f"::error {where}title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    """Escaped as GitHub reads it; what a kernel says must not become a command of its own."""
    return only_printable(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


_MARKUP = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>|#@!"})


def _text(text: str) -> str:
    return " ".join(only_printable(text.replace("\n", " ")).translate(_MARKUP).split())


def _code(text: str) -> str:
    return f"`` {only_printable(text.replace(chr(10), ' ')).replace('`', chr(39))} ``"
