"""Changes to a case that keep the rest of it meaningful."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from attnfuzz.cases.facets import changed
from attnfuzz.cases.facets.sequences import keep_sequences, rescaled_length
from attnfuzz.problems.cases import MergeStatesCase, PagedDecodeCase
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.recipes import Needle, Values

CASE = PagedDecodeCase(
    num_q_heads=6,
    num_kv_heads=3,
    head_size=64,
    seq_lens=(17, 5, 9),
    scale=default_scale(64),
    block_size=16,
    values=Values(
        needles=(
            Needle(seq=0, position=16, kv_head=2),
            Needle(seq=2, position=3, kv_head=0),
            Needle(seq=2, position=8, kv_head=1),
        )
    ),
)


def needles_of(case: PagedDecodeCase | None) -> list[tuple[int, int, int]]:
    assert case is not None
    return [(needle.seq, needle.position, needle.kv_head) for needle in case.values.needles]


def test_needles_follow_their_sequence() -> None:
    """After dropping a sequence, needles would point to another one or to none."""
    assert needles_of(keep_sequences(CASE, [2])) == [(0, 3, 0), (0, 8, 1)]
    assert needles_of(keep_sequences(CASE, [1])) == []
    assert needles_of(keep_sequences(CASE, [2, 0])) == [(0, 3, 0), (0, 8, 1), (1, 16, 2)]


MEETING = Values(needles=(Needle(seq=0, position=1, kv_head=0), Needle(seq=0, position=1, kv_head=1)))


@pytest.mark.parametrize(
    ("changes", "needles"),
    [
        ({"seq_lens": (3, 5, 4)}, [(0, 2, 2), (2, 3, 0), (2, 3, 1)]),  # the last token stays the last
        ({"seq_lens": (17, 5, 0)}, [(0, 16, 2)]),
        ({"num_kv_heads": 2, "num_q_heads": 2}, [(0, 16, 1), (2, 3, 0), (2, 8, 1)]),  # to heads that are left
        ({"num_kv_heads": 1, "num_q_heads": 1, "values": MEETING}, [(0, 1, 0)]),
    ],
)
def test_needles_move_to_where_they_can_be(changes: dict[str, Any], needles: list[tuple[int, int, int]]) -> None:
    """A failure at the end of a sequence would be lost when that gets shorter, or the case be invalid."""
    values = changes.pop("values", CASE.values)
    assert needles_of(changed(msgspec.structs.replace(CASE, values=values), **changes)) == needles


def test_other_head_sizes_keep_the_case_usual() -> None:
    """A smaller head size would come with an unusual scale, be refused for states to merge, or end in an error."""
    smaller, other = (changed(msgspec.structs.replace(CASE, scale=scale), head_size=16) for scale in (0.125, 0.5))
    assert smaller is not None
    assert other is not None
    assert (smaller.head_size, smaller.scale, other.scale) == (16, 0.25, 0.5)
    merged = changed(MergeStatesCase(num_q_heads=1, num_tokens=1, head_size=64), head_size=13)
    assert merged is not None
    assert merged.head_size == 13
    assert changed(CASE, layout="packed", head_size=13) is None


@pytest.mark.parametrize(
    ("length", "old", "new", "expected"),
    [
        (16, 16, 2, 2),
        (17, 16, 2, 3),
        (31, 16, 2, 3),
        (31, 16, 4, 7),
        (48, 16, 1, 3),
        (20, 16, 8, 12),
        (30, 16, 4, 7),
        (0, 16, 4, 0),
        (1, 16, 4, 1),
    ],
)
def test_rescaled_lengths_end_at_the_same_place(length: int, old: int, new: int, expected: int) -> None:
    """A boundary failure would be lost when pages or tiles get smaller."""
    assert rescaled_length(length, old, new) == expected
