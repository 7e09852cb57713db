"""Cases whose heads of V have another size than those of K: one way to write each, and what they exclude."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from attnfuzz.problems.cases import MergeStatesCase, PagedDecodeCase, decode_case, encode_case


def paged(**more: Any) -> PagedDecodeCase:
    fields: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 16, "seq_lens": (3,), "scale": 0.25}
    return PagedDecodeCase(**{**fields, "block_size": 4, **more})


def test_a_case_with_heads_of_one_size_says_nothing_of_v() -> None:
    """Saved cases would change, and equal cases no longer have equal bytes."""
    assert b"v_head_size" not in encode_case(paged())
    assert encode_case(paged(v_head_size=16)) == encode_case(paged())
    assert encode_case(msgspec.structs.replace(paged(v_head_size=40), head_size=40)) == encode_case(paged(head_size=40))


def test_the_size_of_v_survives_json() -> None:
    """A saved case would be replayed with heads of V as large as K's."""
    case = paged(v_head_size=13)
    assert decode_case("paged_decode", encode_case(case)) == case
    assert (case.head_size, case.value_size) == (16, 13)
    assert MergeStatesCase(num_q_heads=1, num_tokens=1, head_size=8).value_size == 8


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"v_head_size": 0}, "v_head_size=0 must be between 1 and 1024"),
        ({"v_head_size": 1025}, "v_head_size=1025 must be between 1 and 1024"),
        ({"v_head_size": 8, "layout": "interleaved"}, "v_head_size=8 must be left out in the interleaved layout"),
    ],
)
def test_sizes_that_no_tensor_has_are_refused(fields: dict[str, Any], words: str) -> None:
    """Memory would be allocated for a cache that cannot be."""
    with pytest.raises(ValueError, match=words):
        paged(**fields)


def test_heads_of_v_need_not_fill_the_vectors_of_the_packed_layout() -> None:
    """Only K is kept in pieces of 16 bytes there."""
    assert paged(v_head_size=13, layout="packed").value_size == 13
