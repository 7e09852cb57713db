"""`python -m tests.plain.one_line_bugs`: how often a newcomer is told of one bug, as a table in Markdown.

The kernel of docs/first-finding.md with its bug repaired is right; each of `BUGS` changes a line or two of it, as
people do by mistake. Every copy is searched with each seed. The exit status is 1 if one has not exactly one finding.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.plain.pairs import explore

PAGE = Path(__file__).parents[2] / "docs" / "first-finding.md"
Edit = tuple[str, str]
REPAIR: Edit = ("tl.load(v_cache + offsets).to", "tl.load(v_cache + offsets, mask=live[:, None], other=0.0).to")


@dataclass(frozen=True)
class OneLineBug:
    """`edits` of the right kernel, and what a report should `say` of them, as a regular expression."""

    name: str
    says: str
    edits: tuple[Edit, ...]


def _bug(name: str, says: str, *edits: Edit) -> OneLineBug:
    return OneLineBug(name, says, edits)


BUGS = (
    _bug("one token too many", "1 token past the end", ("+ t < seq_len", "+ t <= seq_len")),
    _bug(
        "one token too many, on the next page too",
        "1 token past the end",
        ("+ t < seq_len", "+ t <= seq_len"),
        ("tl.cdiv(seq_len, BLOCK_SIZE)", "seq_len // BLOCK_SIZE + 1"),
    ),
    _bug("tail of a page not masked", "past the end", ("live = page * BLOCK_SIZE + t < seq_len", "live = t >= 0")),
    _bug("last page lost", "dropped|without keys", ("tl.cdiv(seq_len, BLOCK_SIZE)", "seq_len // BLOCK_SIZE")),
    _bug("last token lost", "is dropped", ("+ t < seq_len", "+ t < seq_len - 1")),
    _bug("another KV head", "KV head", ("head // group_size", "head % num_kv_heads")),
    _bug("accumulator not rescaled", "weight", ("acc = acc * alpha +", "acc = acc +")),
    _bug("sum not rescaled", "weight", ("l = l * alpha +", "l = l +")),
    _bug("scale left out", "the scale is left out", ("axis=1) * scale", "axis=1)")),
    _bug("exp2 without log2(e)", "base 2", ("tl.exp(score - m_new), tl.exp(", "tl.exp2(score - m_new), tl.exp2(")),
    _bug("width of the table", "page", ("seq * table_width + page", "seq * tl.cdiv(seq_len, BLOCK_SIZE) + page")),
    _bug(
        "page ids ignored",
        "read each page where its row of the block table says",
        ("tl.load(block_table + seq * table_width + page)", "(seq * table_width + page)"),
    ),
    _bug(
        "weights in float16",
        "weights are rounded to float16",
        ("tl.sum(p[:, None] * value", "tl.sum(p.to(tl.float16).to(tl.float32)[:, None] * value"),
    ),
    _bug("maximum begins at 0", "maximum begins at a finite number", ('acc = float("-inf")', "acc = 0.0")),
    _bug("masked scores are 0", "masked to zero", ('* scale, float("-inf")', "* scale, 0.0")),
    _bug("masked scores are -10000", "finite number", ('* scale, float("-inf")', "* scale, -10000.0")),
    _bug(
        "head size written as 64",
        "head_size other than 64",
        ("offsets = slot[:, None] * HEAD_SIZE", "offsets = slot[:, None] * 64"),
    ),
    _bug(
        "running maximum forgotten",
        "the maximum is that of each tile",
        ("tl.maximum(m, tl.max(score, axis=0))", "tl.max(score, axis=0)"),
    ),
    _bug(
        "rows transposed",
        "result (is that|of) |is read from page 0 of sequence",
        ("(seq * tl.num_programs(1) + head)", "(head * tl.num_programs(0) + seq)"),
    ),
    _bug("KV head by their number", "KV head", ("head // group_size", "head // num_kv_heads")),
    _bug("first length for all", "dropped|past the end", ("tl.load(seq_lens + seq)", "tl.load(seq_lens)")),
)


def source_with(*edits: Edit) -> str:
    """The kernel of the page, repaired and then edited. Raises ValueError if it no longer has what is to be edited."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    source = found[1] if found else ""
    for old, new in (REPAIR, *edits):
        if source.count(old) != 1:
            raise ValueError(f"{PAGE.name} has {old!r} {source.count(old)} times, expected once")
        source = source.replace(old, new)
    return source


def findings(bug: OneLineBug, *, budget: str, seed: int) -> tuple[int, str]:
    """How many findings a search has, and all that it prints."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "my_decode.py").write_text(source_with(*bug.edits))
        options = ("--seed", str(seed), "--workers", "2")
        told, printed = explore(folder, "my_decode.py", budget=budget, options=options)
    return len(told["my_decode"].findings), printed


def _rows(budget: str, seeds: list[int]) -> Iterator[tuple[str, bool]]:
    for bug in BUGS:
        found = [findings(bug, budget=budget, seed=seed) for seed in seeds]
        said = [bool(re.search(bug.says, printed.partition("\n1. ")[2])) for _, printed in found]
        counts = [number for number, _ in found]
        cells = [bug.name, ", ".join(map(str, counts)), f"{sum(said)} of {len(said)}"]
        yield f"| {' | '.join(cells)} |", set(counts) == {1}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.plain.one_line_bugs", description=__doc__)
    parser.add_argument("--budget", default="25s", help="of each search")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    print(f"| bug | findings with seeds {', '.join(map(str, arguments.seeds))} | its cause is told |")
    print("|---|---|---|")
    all_right = True
    for row, is_right in _rows(arguments.budget, arguments.seeds):
        print(row, flush=True)
        all_right &= is_right
    sys.exit(not all_right)


if __name__ == "__main__":
    main()
