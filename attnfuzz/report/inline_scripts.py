"""Repro scripts for a report that shows them: made in a process of their own, as the driver never imports torch.

``python -m attnfuzz.report.inline_scripts`` reads what `_Asked` describes and answers with one line for each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from attnfuzz import safe_start
from attnfuzz.campaign.identity.finding import Finding
from attnfuzz.campaign.result import CampaignResult
from attnfuzz.corpus import decode_regression, encode_regression
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.oracles.verdict import RELATION_ORACLES
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.report.findings import in_order
from attnfuzz.said import printable, text_of

__all__ = ["Script", "scripts_of"]

_PATIENCE_S = 60.0
"""For all of them together; most of it goes into importing torch."""
_MOST_CHARACTERS = 200_000
_MOST_IN_ALL = 4_000_000


class _Asked(msgspec.Struct, frozen=True):
    """A regression file that is to become a script, and the declaration of its kernel."""

    regression: msgspec.Raw
    declaration: Declaration


class Script(msgspec.Struct, frozen=True):
    """A script, or why there is none."""

    text: str = ""
    why_not: str = ""


def scripts_of(result: CampaignResult) -> list[Script]:
    """Of each finding, in the order of all reports, its script or the sentence that stands in its place."""
    ordered = in_order(result)
    why_none = [_why_none(finding, result) for finding in ordered]
    asked = [finding for finding, why in zip(ordered, why_none, strict=True) if not why]
    made = iter(_made(asked, result.statistics.device_name) if asked else ())
    return list(_within_bounds(Script(why_not=why) if why else next(made) for why in why_none))


def _within_bounds(scripts: Iterable[Script]) -> Iterator[Script]:
    room = _MOST_IN_ALL
    for script in scripts:
        length = len(script.text)
        if length > min(room, _MOST_CHARACTERS):
            yield Script(why_not=f"a script of {length:,} characters is left out; attnfuzz repro writes it")
        else:
            room -= length
            yield script


def _why_none(finding: Finding, result: CampaignResult) -> str:
    """Why none is asked for."""
    oracle = finding.failure.oracle
    if oracle in RELATION_ORACLES:
        return (
            f"{oracle} compares runs on several inputs, and a script holds only those of the case: use attnfuzz replay"
        )
    if oracle == "sanitizer":
        return "a script compares results, which need not show what compute-sanitizer found: replay it with --sanitizer"
    if result.stop_reason == "interrupted":
        return "the search was interrupted, so no script was made; attnfuzz repro writes it"
    return ""


def _made(findings: Sequence[Finding], device: str) -> list[Script]:
    """What the process made of ``findings``, as far as it came."""
    asked = [
        _Asked(msgspec.Raw(encode_regression(finding.regression(device))), finding.declaration) for finding in findings
    ]
    try:
        run = subprocess.run(
            safe_start.command(__name__),
            input=msgspec.json.encode(asked),
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        answer, why = run.stdout, f"the process that makes scripts ended ({_last_line(run.stderr) or run.returncode})"
    except subprocess.TimeoutExpired as slow:
        answer, why = slow.stdout or b"", f"there was no time for a script within {_PATIENCE_S:.0f} s"
    except OSError as error:
        answer, why = b"", f"no process can be started to make scripts ({error.strerror})"
    lines = answer[: answer.rfind(b"\n") + 1].splitlines()[: len(findings)]
    scripts = [msgspec.json.decode(line, type=Script) for line in lines]
    missing = Script(why_not=f"{why}; attnfuzz repro writes it")
    return scripts + [missing] * (len(findings) - len(scripts))


def _last_line(text: bytes) -> str:
    return printable((text.decode(errors="replace").strip().splitlines() or [""])[-1])


def _answer(asked: _Asked) -> Script:
    from attnfuzz.report.repro import repro_script  # loads torch

    try:
        return Script(text=repro_script(decode_regression(bytes(asked.regression), "report"), asked.declaration))
    except (CaseTooLarge, KernelLoadError) as error:
        return Script(why_not=str(error))
    except Exception as error:  # noqa: BLE001 - told in its place; those of other findings are wanted
        return Script(why_not=f"no script could be made ({text_of(error)}); use attnfuzz replay")


def _main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what torch prints is no answer
    for asked in msgspec.json.decode(sys.stdin.buffer.read(), type=list[_Asked]):
        answers.write(msgspec.json.encode(_answer(asked)) + b"\n")
        answers.flush()


if __name__ == "__main__":
    _main()
