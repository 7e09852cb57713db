"""What of the hard kind is among drawn cases: `python -m tests.quality.drawn` prints a share of 3,000 of each column.

A kernel takes keys in tiles, and query tokens in blocks. A row of a block gets tiles that another row of it sees and
that hold no key of its own: before its window, behind its causal edge, where a mask hides them. What becomes of its
running maximum there shows only if all its scores lie far below 0, or far above. Tiles have 16 to 128 keys and begin at
multiples of that, blocks have 16 query tokens, and segments are halves, thirds and quarters of what a block sees, in
whole tiles.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from attnfuzz.problems.cases import Problem
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies import CPU_SIZES, GPU_SIZES
from tests.common.drawing import drawn_cases

TILES = (16, 32, 64, 128)
BLOCK = 16
SEGMENTS = (2, 3, 4)
_CACHES = Supports(variants=("window",), kv_dtypes=("float8_e4m3fn",), kv_scales=("tensor", "head"))
_COLUMNS: dict[str, tuple[Problem, Supports]] = {
    "paged_decode": ("paged_decode", _CACHES),
    "split_decode": ("split_decode", Supports(variants=("window",))),
    "paged_attention": ("paged_attention", Supports(variants=("window",))),
    "masked_attention": ("masked_attention", Supports()),
    **{f"mask of {kind}": ("masked_attention", Supports(masks=(kind,))) for kind in ("chunks", "pages", "tree")},
}
"""Of masks, those of chunked local attention, of skipped blocks and of speculative decoding also alone."""


def of_case(case: Any) -> Iterator[str]:
    """The features of one case, each once."""
    if (length := max(case.seq_lens)) > 1:
        yield "more than one token"
        yield from (f"sequences of {most} tokens or more" for most in (128, 300, 1024, 2048) if length >= most)
    found = set[str]()
    for block in _blocks(case):
        found.update(_of_block(block))
    yield from found
    scores = _scores(case)
    if scores:
        yield f"all scores {scores}"
        yield from (f"{one}, all scores {scores}" for one in found)
    if case.kv is not None:
        scales = case.kv.head_scales(case.num_kv_heads, case.values.seed)
        yield "8-bit cache"
        if min(*scales.k, *scales.v) < 2**-4:
            yield "8-bit cache with a scale below 2^-4"
        if max(*scales.k, *scales.v) > 2**4:
            yield "8-bit cache with a scale above 2^4"


def _scores(case: Any) -> str:
    """Whether those of all rows lie far from 0, and to which side."""
    values = case.values
    if values.needles:
        return ""
    if values.keys == "negative":
        return "far below 0"
    return "far above 0" if values.keys == "equal" and values.logit_exponent >= 2 else ""


def _blocks(case: Any) -> Iterator[list[_Row]]:
    """Of each block of query tokens, what each row sees; a row that sees nothing is left out."""
    for seq in range(case.num_seqs):
        rows = [_seen(case, row) for row in case.rows_of(seq)]
        for start in range(0, len(rows), BLOCK):
            yield [row for row in rows[start : start + BLOCK] if row.tiles(1)]


class _Row:
    """The keys that a query token sees: all from ``first`` up to ``end``, or those of a mask."""

    def __init__(self, first: int, end: int, mask: bytes | None) -> None:
        self.first, self.end, self._mask = first, end, mask

    def tiles(self, size: int) -> Collection[int]:
        """The numbers of those that hold a key."""
        if self._mask is None:
            return range(self.first // size, -(-self.end // size))
        return {key // size for key, is_seen in enumerate(self._mask) if is_seen}


def _seen(case: Any, row: int) -> _Row:
    window, length = case.variant.window, case.row_lens[row]
    return _Row(0 if window is None else max(0, length - window), length, case.seen(row))


def _of_block(rows: Sequence[_Row]) -> Iterator[str]:
    for size in TILES if rows else ():
        of_rows = [row.tiles(size) for row in rows]
        begin, end = min(map(min, of_rows)), max(map(max, of_rows)) + 1
        if any(min(tiles) > 0 for tiles in of_rows):
            yield f"keys of {size} before all that a row sees"
        if any(min(tiles) > begin for tiles in of_rows):
            yield f"first tile of {size} seen by other rows only"
        if any(max(tiles) + 1 < end for tiles in of_rows):
            yield f"last tile of {size} seen by other rows only"
        if any(len(tiles) < max(tiles) + 1 - min(tiles) for tiles in of_rows):
            yield f"a tile of {size} between others hidden"
        for count in SEGMENTS:
            width = -(-(end - begin) // count)
            starts = range(begin, end, width)
            if any(not any(start <= tile < start + width for tile in tiles) for tiles in of_rows for start in starts):
                yield f"a segment of tiles of {size} seen by other rows only"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.quality.drawn", description=__doc__)
    parser.add_argument("--cases", type=int, default=3000, help="of each problem")
    parser.add_argument("--sizes", choices=("cpu", "gpu"), default="cpu")
    options = parser.parse_args()
    sizes = GPU_SIZES if options.sizes == "gpu" else CPU_SIZES
    shares: dict[str, dict[str, int]] = {}
    for column, (problem, supports) in _COLUMNS.items():
        drawn = drawn_cases(problem, options.cases, supports=supports, sizes=sizes)
        counted = Counter(one for case in drawn for one in of_case(case))
        for name, count in counted.items():
            shares.setdefault(name, {})[column] = count
    print(f"`python -m tests.quality.drawn --cases {options.cases} --sizes {options.sizes}`\n")
    print("|", " | ".join(["of the cases", *_COLUMNS]), "|")
    print("|---|" + "---:|" * len(_COLUMNS))
    for name in sorted(shares):
        columns = [f"{100 * shares[name].get(column, 0) / options.cases:.1f} %" for column in _COLUMNS]
        print("|", " | ".join([name, *columns]), "|")


if __name__ == "__main__":
    main()
