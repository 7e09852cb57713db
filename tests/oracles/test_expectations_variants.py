"""Expectations of cases with variants, many at once: the reference of each, and a fixed number of operations."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.registry import problem_of
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.recipes import Values
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import ALIBI_RECIPES, SINK_RECIPES, VARIANTS, Variant
from attnfuzz.trials.expectations import expectations
from tests.cases import paged_case
from tests.oracles.test_expectations import Operations

DECLARATION = Declaration(name="any", problem="paged_decode", supports=Supports(variants=VARIANTS), options={})


def request(case: PagedDecodeCase) -> tuple[Declaration, PagedDecodeCase, Any]:
    return DECLARATION, case, problem_of(case).values(case, "cpu", Supports())


def drawn(source: random.Random, seed: int) -> PagedDecodeCase:
    fields: dict[str, Any] = {
        "window": source.choice([None, 1, 2, 5, 40]),
        "sinks": source.choice([None, *SINK_RECIPES]),
    }
    fields |= source.choice([{}, {"soft_cap": source.choice([0.5, 30.0])}, {"alibi": source.choice(ALIBI_RECIPES)}])
    num_kv_heads = source.choice([1, 2, 3])
    return paged_case(
        num_q_heads=num_kv_heads * source.choice([1, 2, 5]),
        num_kv_heads=num_kv_heads,
        head_size=source.choice([8, 20]),
        v_head_size=source.choice([None, 5, 24]),
        dtype=source.choice(["float16", "float32"]),
        seq_lens=tuple(source.choice([0, 1, 5, 9, 33]) for _ in range(source.choice([1, 2, 3]))),
        values=Values(
            keys=source.choice(["normal", "rising", "negative"]), logit_exponent=source.choice([0, 6]), seed=seed
        ),
        variant=Variant(**fields),
    )


def test_they_are_the_reference_whatever_is_beside_them() -> None:
    """A verdict would be on another case's slopes, on a sink that padding moved, or on keys outside of the window."""
    source = random.Random(0)
    requests = [request(drawn(source, seed)) for seed in range(120)]
    found = expectations(requests, tolerance="bound", one_copy=False)
    for (_, case, values), one in zip(requests, found, strict=True):
        expected = problem_of(case).reference(case, values)
        torch.testing.assert_close(one.expected.out, expected.out, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(one.expected.lse, expected.lse, rtol=1e-10, atol=1e-10)
        assert bool(one.bound.out.isfinite().all())
        assert bool((one.bound.lse >= 0).all() & one.bound.lse.isfinite().all())


def operations(cases: Iterable[PagedDecodeCase]) -> int:
    requests = [request(case) for case in cases]
    expectations(requests, tolerance="bound", one_copy=False)  # what a process makes once does not count
    with Operations() as counted:
        expectations(requests, tolerance="bound", one_copy=False)
    return int(counted.found.total())


def case_of_one_size(**fields: Any) -> PagedDecodeCase:
    shape: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 8, "seq_lens": (9,), "scale": 0.25}
    return PagedDecodeCase(**shape, block_size=4, variant=Variant(**fields))


def test_a_window_costs_no_operation_and_other_variants_a_fixed_number() -> None:
    """Plain cases would pay for variants, or a batch take longer with each case that has one."""
    plain, window, sinks = (case_of_one_size(**fields) for fields in ({}, {"window": 5}, {"sinks": "level"}))
    assert operations([window] * 8) == operations([plain] * 8)
    assert operations([sinks]) == operations([sinks] * 20) < 475


def test_a_lone_sequence_without_keys_has_its_sinks() -> None:
    """A batch of nothing but empty sequences with sinks would be looked up outside of all values."""
    case = paged_case(num_q_heads=6, num_kv_heads=3, head_size=8, seq_lens=(0, 0), variant=Variant(sinks="level"))
    (found,) = expectations([request(case)], tolerance="bound", one_copy=False)
    expected = problem_of(case).reference(case, problem_of(case).values(case, "cpu", Supports()))
    assert torch.equal(found.expected.out, expected.out)
    torch.testing.assert_close(found.expected.lse, expected.lse, rtol=1e-10, atol=0.0)
