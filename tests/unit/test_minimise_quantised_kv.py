"""8-bit caches shrink: to a plain cache, or to the simplest scales that still fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnfuzz.minimise import minimise
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.quantised_kv import KV_DTYPES, QuantisedKv
from attnfuzz.problems.supports import Layout, Supports


def shrunk(still_fails: Callable[[Any], bool], layout: Layout = "NHD") -> PagedDecodeCase:
    case = PagedDecodeCase(
        num_q_heads=4,
        num_kv_heads=2,
        head_size=64,
        seq_lens=(40, 7),
        scale=0.125,
        block_size=16,
        layout=layout,
        strides={"v_scale": "every_other"},
        kv=QuantisedKv(dtype="float8_e5m2", per="head", scales="scattered"),
    )
    assert still_fails(case)
    supports = Supports(kv_dtypes=KV_DTYPES, layouts=(layout,))
    found = minimise(case, still_fails, supports=supports, options={})
    assert isinstance(found, PagedDecodeCase)
    return found


def test_a_cache_that_does_not_matter_becomes_plain() -> None:
    """A report would name scales for a bug that has nothing to do with them."""
    case = shrunk(lambda case: case.num_seqs >= 1)
    assert (case.kv, case.strides) == (None, {})


def test_an_8_bit_cache_keeps_its_simplest_scales() -> None:
    """Numbers that mean nothing would be taken for part of the bug."""
    case = shrunk(lambda case: case.kv is not None)
    assert (case.kv, case.strides) == (QuantisedKv(dtype="float8_e4m3fn"), {})


def test_scales_per_head_stay_where_they_are_needed() -> None:
    """The bug would be reported without the heads that differ."""
    case = shrunk(lambda case: case.kv is not None and case.kv.per == "head" and case.kv.scales != "one")
    assert case.kv == QuantisedKv(dtype="float8_e4m3fn", per="head", scales="powers")


def test_packed_heads_shrink_to_one_piece() -> None:
    """Head sizes that the packed cache cannot hold would be tried, and end the search."""
    assert shrunk(lambda case: case.kv is not None, layout="packed").head_size == 16
