"""attnfuzz.campaign.identity.signature: which findings are reported as one."""

from __future__ import annotations

from typing import Any

import pytest

from attnfuzz.campaign.identity.finding import Finding
from attnfuzz.campaign.identity.signature import are_same_bug
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import IDENTIFYING_CAUSES, Failure, OracleName
from attnfuzz.problems.features import KV_STRIDES_DIFFER
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports

CASE = simplest_case("paged_decode", Supports(), {})


def a_finding(
    oracle: OracleName,
    kind: str,
    *features: str,
    kernel: str = "k",
    cause: str = "",
    tensor: str = "",
    maybe: tuple[str, ...] = (),
) -> Finding:
    declaration = Declaration(name="k", problem="paged_decode", target=kernel)
    failure = Failure(oracle=oracle, kind=kind, message="wrong", cause=cause, tensor=tensor, maybe=maybe)
    return Finding(
        "0-1",
        declaration,
        CASE,
        failure,
        0.0,
        failed=3,
        runs=3,
        features=frozenset() if cause in IDENTIFYING_CAUSES else frozenset(features),
    )


STRIDES = a_finding("dead_memory", "out", KV_STRIDES_DIFFER, "seq_len>1", "block_size>1")


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (a_finding("unwritten", "out", KV_STRIDES_DIFFER, "num_seqs>1"), True),
        (a_finding("accuracy", "out:value", KV_STRIDES_DIFFER, "dtype=bfloat16"), True),
        (a_finding("dead_memory", "out", KV_STRIDES_DIFFER, "pages=shuffled"), True),
        (a_finding("accuracy", "out:value", "seq_len>1", "block_size>1"), False),
        (a_finding("accuracy", "out:nan", "empty sequence"), False),
        (a_finding("exception", "IndexError in f", KV_STRIDES_DIFFER), False),
        (a_finding("unwritten", "out", KV_STRIDES_DIFFER, kernel="other"), False),
    ],
)
def test_what_a_bug_is_about_decides(other: Finding, same: bool) -> None:
    """One bug would be read eight times, or of two bugs only one."""
    assert are_same_bug(STRIDES, other) is are_same_bug(other, STRIDES) is same


def test_bugs_that_each_need_something_of_their_own_stay_apart() -> None:
    """A shared data type is too little to call two bugs one."""
    half = a_finding("accuracy", "out:value", "dtype=bfloat16", "empty sequence")
    assert not are_same_bug(half, a_finding("unwritten", "out", "dtype=bfloat16", "gqa_ratio>1"))


def test_a_rounding_is_one_bug_by_whatever_oracle_it_shows() -> None:
    """A row sum in 16 bits would be read as a wrong LSE, as errors too large together, and as an overflow."""
    sums = a_finding("accuracy", "lse:value", cause="sums_rounded")
    together = a_finding("residuals", "lse:size", cause="sums_rounded")
    overflow = a_finding("value_affinity", "bits", "seq_len>1", maybe=("sums_rounded",))
    for other in (together, overflow):
        assert are_same_bug(sums, other)
        assert are_same_bug(other, sums)
    assert not are_same_bug(together, a_finding("residuals", "out:lean", cause="cut_off"))


def test_small_errors_that_one_rounding_may_give_are_one_finding() -> None:
    """Errors hardly beyond their bounds, of which nothing is sure, would be told once for each recipe."""
    one = a_finding("accuracy", "out:value", "keys=fine", "seq_len>1", maybe=("scores_rounded", "sums_rounded"))
    assert are_same_bug(one, a_finding("accuracy", "out:value", "gqa_ratio>1", maybe=("sums_rounded",)))
    assert not are_same_bug(one, a_finding("accuracy", "out:value", "gqa_ratio>1", maybe=("cut_off",)))
    assert not are_same_bug(one, a_finding("accuracy", "out:value", "gqa_ratio>1"))


def test_a_cause_decides_whatever_the_cases_need() -> None:
    """Scores in 16 bits, or offsets in 32, would be reported once for each tensor, recipe and size that shows them."""
    one = a_finding("page_relocation", "strides of q", "strides:q", cause="narrow_offsets")
    same = a_finding("page_relocation", "strides of out", "empty sequence", cause="narrow_offsets")
    other = a_finding("page_relocation", "ignored stride of q", "strides:q", cause="ignored_stride")
    assert are_same_bug(one, same)
    assert not are_same_bug(one, other)
    assert not are_same_bug(other, one)
    rounded = a_finding("accuracy", "out:value", "seq_len>1", cause="scores_rounded")
    assert are_same_bug(rounded, a_finding("accuracy", "lse:value", "head_size not pow2", cause="scores_rounded"))
    assert not are_same_bug(rounded, a_finding("page_permutation", "bits", "any case"))
    assert not are_same_bug(rounded, a_finding("accuracy", "out:value", "seq_len>1"))


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (("crash", "SIGSEGV", "strides:k=outer_gap"), ("crash", "SIGBUS", "strides:k=outer_gap", "seq_len>1"), True),
        (("crash", "cuda:illegal memory access", "empty sequence"), ("crash", "cuda:misaligned address",
          "empty sequence", "num_seqs>1"), True),
        (("crash", "SIGSEGV", "empty sequence"), ("guard_page", "raised cuda:unspecified launch failure",
          "empty sequence"), True),
        (("crash", "SIGSEGV", "empty sequence"), ("crash", "SIGSEGV", "gqa_ratio>1"), False),
        (("crash", "SIGSEGV", "strides:k=outer_gap"), ("crash", "memory", "strides:k=outer_gap"), False),
        (("crash", "SIGSEGV", "strides:k=outer_gap"), ("hang", "timeout", "strides:k=outer_gap"), False),
    ],
)  # fmt: skip
def test_one_fault_of_memory_is_one_bug_at_whatever_address(a: Any, b: Any, same: bool) -> None:
    """One wrong stride would be read as three crashes, one for each thing that happened to lie there."""
    assert are_same_bug(a_finding(*a), a_finding(*b)) is are_same_bug(a_finding(*b), a_finding(*a)) is same


def test_a_crash_is_told_with_the_stride_that_is_named() -> None:
    """Whoever repairs the stride would look for a second bug behind the crash."""
    named = a_finding("page_relocation", "ignored stride of k", "seq_len>1", cause="ignored_stride", tensor="k")
    crash = a_finding("crash", "SIGSEGV", "strides:k=outer_gap")
    assert are_same_bug(named, crash)
    assert are_same_bug(crash, named)
    assert not are_same_bug(named, a_finding("crash", "SIGSEGV", "strides:v=outer_gap"))
    assert not are_same_bug(named, a_finding("crash", "SIGSEGV", "seq_len>1"))


WRONG_BLOCK_STRIDE = (
    a_finding("dead_memory", "out", "block_size>1", "partial last page", "pages=shuffled", "spare blocks"),
    a_finding("accuracy", "out:value", "block_size>1", "seq_len>1", "seq_len>block_size"),
    a_finding("dead_memory", "out", "block_size>1", "num_seqs>1", "partial last page"),
    a_finding("accuracy", "out:value", "block_size>1", "num_seqs>1", "seq_len>1"),
    a_finding("dead_memory", "out", "block_size>1", "pages=reversed", "partial last page", "seq_len>1",
              "seq_len>block_size"),
)  # fmt: skip
"""What a kernel was reported with that takes 8 tokens for the distance between blocks of 16."""


@pytest.mark.parametrize("other", WRONG_BLOCK_STRIDE[1:])
def test_a_wrong_address_is_one_bug_wherever_it_leads(other: Finding) -> None:
    """One mistake with pages would be read six times, told apart only by what lay where it reads."""
    first = WRONG_BLOCK_STRIDE[0]
    assert are_same_bug(first, other)
    assert are_same_bug(other, first)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("dead_memory", "out", "block_size>1", "partial last page"), ("accuracy", "out:value", "seq_len>1")),
        (("dead_memory", "out"), ("accuracy", "out:value", "seq_len>1", "seq_len>block_size")),
        (("accuracy", "out:value", "num_seqs>1", "ragged"), ("dead_memory", "out", "seq_len>1", "seq_len>block_size")),
        (("accuracy", "out:inf", "logit_exponent>0"), ("accuracy", "out:value", "seq_len>1")),
        (("accuracy", "lse:value", "seq_len>1"), ("accuracy", "out:value", "seq_len>1", "num_seqs>1")),
        (("crash", "SIGSEGV", "seq_len>1"), ("accuracy", "out:value", "seq_len>1", "num_seqs>1")),
    ],
)
def test_bugs_with_different_needs_stay_apart(a: tuple[OracleName, str], b: tuple[OracleName, str]) -> None:
    """Of two bugs that are both about lengths or pages only one would be reported."""
    assert not are_same_bug(a_finding(*a), a_finding(*b))
    assert not are_same_bug(a_finding(*b), a_finding(*a))


def test_wrong_addresses_seen_by_accuracy_and_in_the_last_digit_are_one_bug() -> None:
    """A stray page would be reported once for its numbers and once more for the bits that it changes."""
    moved = a_finding("page_permutation", "bits", "any case")
    assert are_same_bug(moved, a_finding("accuracy", "out:value", "seq_len>block_size"))
    assert are_same_bug(moved, a_finding("block_table_slack", "bits", "any case"))
    assert not are_same_bug(moved, a_finding("accuracy", "out:value", "strides:q"))
    assert not are_same_bug(moved, a_finding("value_affinity", "bits", "any case"))
