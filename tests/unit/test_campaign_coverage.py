"""attnfuzz.campaign.statistics: every pair of a case is counted once."""

from __future__ import annotations

from collections import Counter

from attnfuzz.campaign.statistics import by_axis, coverage_of, pairs_of
from attnfuzz.cases.features import InputSpace
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.supports import Supports

KERNEL = Declaration(
    name="k",
    problem="paged_decode",
    target="k",
    supports=Supports(dtypes=("float16", "float32"), head_sizes=(16, 64), layouts=("NHD",), strides="contiguous"),
)
CASE = PagedDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, scale=0.25, block_size=4, seq_lens=(5, 0))


def on(axis: str, level: str) -> Feature:
    return Feature(axis, f"={level}")


def counts_of(case: PagedDecodeCase) -> dict[int, int]:
    space = InputSpace(KERNEL.problem, KERNEL.supports, KERNEL.options)
    return Counter(pairs_of(space.place(case)))


def test_two_sequences_do_not_make_one_that_has_both() -> None:
    """A batch with an empty sequence and one that ends a page has no sequence that does both."""
    coverage = coverage_of(KERNEL, counts_of(CASE))
    assert coverage.cases(on("length", "2 to 15"), on("last page", "1 token")) == 1
    assert coverage.cases(on("length", "1"), on("last page", "full")) == 0
    assert coverage.cases(on("length", "0"), on("last page", "1 token")) == 0
    assert coverage.cases(on("dtype", "float16"), on("length", "0")) == 1
    assert coverage.cases_on(on("length", "0")) == 1


def test_what_was_met_and_what_never_was_are_told() -> None:
    """They are what a maintainer looks for in the report."""
    counts = counts_of(CASE)
    coverage = coverage_of(KERNEL, counts)
    assert by_axis(coverage.levels)["dtype"] == (on("dtype", "float16"),)
    assert by_axis(coverage.levels)["length"] == (on("length", "0"), on("length", "2 to 15"))
    assert on("dtype", "float32") in coverage.unmet
    assert 0 < coverage.met == len(counts) - len(coverage.levels)


def test_options_that_are_equal_in_python_are_told_apart() -> None:
    """1 == True, so that what was found out for one kernel would be taken for another's."""
    for choices, names in (((1, 2), ("1", "2")), ((True, 2), ("True", "2"))):
        declaration = Declaration(name="k", problem="dense_decode", options={"mode": choices})
        assert by_axis(coverage_of(declaration, {}).unmet)["option mode"] == tuple(
            on("option mode", name) for name in names
        )
