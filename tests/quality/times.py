"""`python -m tests.quality.times [REPORT...]`: the table of docs/kernels.md, from one JSON file a GPU in docs/times/.

REPORTs are what one GPU's runs of `attnfuzz bench kernels --json` wrote. Of them the file of that GPU is made anew: of
each shape the median, from memory in a CUDA graph, of the kernel that was named first, and of the fastest beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from attnfuzz.bench.kernels.shapes import SUITES, Report, Result, Timed
from tests.quality.compiled import replace_part

ROOT = Path(__file__).parents[2]
PAGE, FOLDER = ROOT / "docs" / "kernels.md", ROOT / "docs" / "times"
MARKS = ("<!-- times: begin -->", "<!-- times: end -->")


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """``us``: microseconds of ``kernel``, ``copy_us`` of a copy of as many bytes, ``beside_us`` of ``beside``.

    ``beside``: the fastest of an engine's kernels; of an 8-bit cache, ``kernel`` itself over one of 16 bits.
    """

    suite: str
    shape: str
    kernel: str
    us: float
    copy_us: float | None = None
    beside: str = ""
    beside_us: float | None = None


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is kept of the runs on one GPU."""

    gpu: str
    date: str
    copy_gb_s: int
    versions: dict[str, str]
    rows: list[Row]

    @property
    def short(self) -> str:
        """ "H200", of "NVIDIA H200"."""
        return self.gpu.split()[1]


def condensed(reports: Sequence[Report]) -> Times:
    """What is kept of runs on one GPU; a shape on which nothing right was timed is left out."""
    first = reports[0]
    if any(one.machine.name != first.machine.name for one in reports):
        raise ValueError(f"{[one.machine.name for one in reports]} must be one GPU; give the reports of one at a time")
    timed = [one for report in reports for one in report.results if one.chosen and _timed(one) is not None]
    versions = {name: text for report in reports for name, text in report.machine.versions.items()}
    versions |= {name.partition(":")[0]: text for report in reports for name, text in report.references.items()}
    return Times(
        gpu=first.machine.name,
        date=max(one.started for one in reports)[:10],
        copy_gb_s=round(max(one.peak_gb_s for one in reports)),
        versions=versions,
        rows=list(_rows(timed)),
    )


def _rows(timed: Sequence[Result]) -> Iterator[Row]:
    seen: set[tuple[str, str]] = set()
    for one in timed:
        place = one.suite, one.shape.label
        if one.is_reference or place in seen:
            continue
        seen.add(place)
        others = [it for it in timed if it.is_reference and (it.suite, it.shape) == (one.suite, one.shape)]
        if one.shape.kv_dtype is not None:
            plain = msgspec.structs.replace(one.shape, kv_dtype=None, label="")
            others = [it for it in timed if it.contender == one.contender and _unnamed(it) == plain]
        beside = min(others, key=_median, default=None)
        yield Row(
            suite=one.suite,
            shape=one.shape.label,
            kernel=_name(one),
            us=round(_median(one), 2),
            copy_us=None if one.shape.kind == "mixed" or one.copy_us is None else round(one.copy_us, 2),
            beside="" if beside is None else _name(beside),
            beside_us=None if beside is None else round(_median(beside), 2),
        )


def _unnamed(result: Result) -> object:
    return msgspec.structs.replace(result.shape, label="")


def _median(result: Result) -> float:
    timed = _timed(result)
    assert timed is not None
    return timed.median_us


def _timed(result: Result) -> Timed | None:
    return result.time("graph", "cold")


def _name(result: Result) -> str:
    module, _, name = result.contender.rpartition(":")
    return name if module.startswith("attnfuzz.") else result.contender


def encoded(times: Times) -> bytes:
    """As JSON, a line for each row."""
    return msgspec.json.encode(times).replace(b"},{", b"},\n{") + b"\n"


def known() -> list[Times]:
    """What is kept of each GPU."""
    return [msgspec.json.decode(path.read_bytes(), type=Times) for path in sorted(FOLDER.glob("*.json"))]


def page(of_gpus: Sequence[Times]) -> list[str]:
    """The table, of all that is kept, with three columns for each GPU."""
    lines = [
        f"- {one.gpu}, {one.date}: a copy moves {one.copy_gb_s / 1000:.2f} TB/s; "
        f"{', '.join(text if name in text else f'{name} {text}' for name, text in one.versions.items())}"
        for one in of_gpus
    ]
    columns = [part for one in of_gpus for part in (f"{one.short}, µs", "of a copy", "times")]
    lines += ["", f"| suite | shape | kernel | {' | '.join(columns)} |", f"|---|---|---|{'---:|' * len(columns)}"]
    for suite, shapes in SUITES.items():
        begun = ""
        for shape in shapes():
            found = [next((r for r in t.rows if (r.suite, r.shape) == (suite, shape.label)), None) for t in of_gpus]
            kernels = dict.fromkeys(f"`{row.kernel}`" for row in found if row is not None)
            if not kernels:
                continue
            cells = [cell for row in found for cell in _cells(row)]
            lines.append(f"| {'' if begun else suite} | {shape.label} | {', '.join(kernels)} | {' | '.join(cells)} |")
            begun = suite
    return lines


def _cells(row: Row | None) -> tuple[str, str, str]:
    if row is None:
        return "", "", ""
    us = f"{row.us:,.1f}" if row.us < 1000 else f"{row.us:,.0f}"
    of_copy, times = (
        "" if over is None else f"{over:.2f}"
        for over in (
            row.copy_us and row.copy_us / row.us,
            row.beside_us and row.us / row.beside_us,
        )
    )
    return us, of_copy, times


def main(reports: Sequence[Path]) -> None:
    """Make the file of the GPU that ``reports`` are of anew, if there are any, and the table."""
    if reports:
        times = condensed([msgspec.json.decode(path.read_bytes(), type=Report) for path in reports])
        (FOLDER / f"{times.short.lower()}.json").write_bytes(encoded(times))
    replace_part(PAGE, MARKS, page(known()))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
