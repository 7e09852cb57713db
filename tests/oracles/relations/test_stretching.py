"""Which strides are made wide."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from attnfuzz.declaration import Declaration
from attnfuzz.oracles.relations.stretching import stretched_axes
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.supports import Supports

ANY = Declaration(name="any", problem="dense_decode")
CASE = DenseDecodeCase(num_q_heads=4, num_kv_heads=4, head_size=16, seq_lens=(5, 3, 7), scale=0.25)


def supporting(**fields: Any) -> Declaration:
    return msgspec.structs.replace(ANY, supports=Supports(**fields))


def test_each_index_of_a_kernel_meets_a_wide_stride_in_two_turns() -> None:
    """A 32-bit product of one index would never overflow."""
    first, second = (stretched_axes(ANY, CASE, turn) for turn in range(2))
    assert first == {"q": 0, "k": 1, "v": 2, "seq_lens": 0, "out": 1, "lse": 0}
    assert second == {"q": 1, "k": 2, "v": 1, "seq_lens": 0, "out": 2, "lse": 1}


def test_only_what_the_kernel_takes_is_changed() -> None:
    """A kernel would be blamed for what it never promised."""
    assert stretched_axes(supporting(strides="contiguous"), CASE, 0) == {}
    assert stretched_axes(supporting(strides="last_contiguous"), CASE, 1) == {
        "q": 1,
        "k": 2,
        "v": 1,
        "out": 0,
        "lse": 0,
    }
    assert "lse" not in stretched_axes(supporting(lse="none"), CASE, 0)
    assert "q" not in stretched_axes(ANY, msgspec.structs.replace(CASE, strides={"q": "offset"}), 0)


@pytest.mark.parametrize(
    ("fields", "axis"),
    [({"seq_lens": (5,)}, 1), ({"seq_lens": (5, 5), "num_q_heads": 1, "num_kv_heads": 1}, 2)],
)
def test_dimensions_of_three_come_first(fields: dict[str, Any], axis: int) -> None:
    """A stride that does not fit into 32 bits itself makes the product a 64-bit one."""
    assert stretched_axes(ANY, msgspec.structs.replace(CASE, **fields), 0)["q"] == axis


def test_many_rows_stay_together() -> None:
    """Each row that lies apart takes a page of memory."""
    long = msgspec.structs.replace(CASE, seq_lens=(2000,))
    assert stretched_axes(ANY, long, 0).keys() == {"q", "out", "lse"}
