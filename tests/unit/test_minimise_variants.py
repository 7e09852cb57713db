"""Variants shrink: what a failure does not need is left out, a window becomes small with the lengths around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnfuzz.minimise import minimise
from attnfuzz.problems.block_table import freed_tokens
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import PLAIN_VARIANT, VARIANTS, Variant


def shrunk(still_fails: Callable[[Any], bool], **fields: Any) -> PagedDecodeCase:
    case = PagedDecodeCase(
        num_q_heads=4,
        num_kv_heads=2,
        head_size=16,
        seq_lens=(40, 7),
        scale=0.25,
        block_size=16,
        strides={"sinks": "every_other"} if "sinks" in fields else {},
        variant=Variant(**fields),
    )
    assert still_fails(case)
    found = minimise(case, still_fails, supports=Supports(variants=VARIANTS), options={})
    assert isinstance(found, PagedDecodeCase)
    return found


def test_variants_that_do_not_matter_go() -> None:
    """A report would name a window and a sink for a bug that has nothing to do with either."""
    case = shrunk(lambda case: case.num_seqs >= 1, window=17, alibi="scattered", sinks="high")
    assert case.variant == PLAIN_VARIANT
    assert case.strides == {}


def test_pages_that_need_not_be_freed_are_kept() -> None:
    """A report would tell of freed pages where any window shows the bug."""
    case = shrunk(lambda case: case.variant.window is not None, window=17, freed_pages=True)
    assert case.variant == Variant(window=1)


def test_freed_pages_shrink_to_one() -> None:
    """A finding of freed pages would come with a window and lengths that mean nothing."""
    case = shrunk(lambda case: any(freed_tokens(case)), window=17, freed_pages=True)
    assert (case.seq_lens, case.block_size, case.variant) == ((2,), 1, Variant(window=1, freed_pages=True))


def test_one_of_several_stays_with_its_simplest_number() -> None:
    """The variant that the bug needs would be lost among the others, or keep a number that means nothing."""
    case = shrunk(lambda case: case.variant.sinks is not None, window=17, alibi="scattered", sinks="high")
    assert case.variant == Variant(sinks="level")


def test_a_window_shrinks_with_the_lengths_that_leave_it() -> None:
    """A window of 17 in 40 tokens would be reported where one of 1 in 2 shows the same."""
    case = shrunk(lambda case: case.variant.window is not None and max(case.seq_lens) > case.variant.window, window=17)
    assert (case.variant, case.seq_lens) == (Variant(window=1), (2,))


def test_a_cap_becomes_a_simple_one() -> None:
    """A cap of 0.5 would be taken for part of the bug."""
    assert shrunk(lambda case: case.variant.soft_cap is not None, soft_cap=0.5).variant == Variant(soft_cap=1.0)
