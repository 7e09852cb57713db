"""Expected results and error bounds of many cases at once, without waiting for the device.

Sequences and merges of all cases are padded to a few sizes (`row_buckets`), fetched by index (`row_batches`) and
computed together (`attnfuzz.numerics.rows`). One case alone is the special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from attnfuzz.declaration import Declaration
from attnfuzz.judging.expected_attention import changes_scores, expect_attention
from attnfuzz.judging.expected_merges import expect_merges
from attnfuzz.judging.host_memory import keep_freed_memory
from attnfuzz.judging.row_batches import Place, Results
from attnfuzz.numerics import Bound
from attnfuzz.problems.cases import AttentionCase, Case
from attnfuzz.problems.reference import Expected
from attnfuzz.problems.tolerance import FixedTolerance, Tolerance

__all__ = ["Expectation", "expectations", "on_device"]


class Expect(Protocol):
    """Results of cases of one kind, and where each case's are."""

    def __call__(self, requests: Sequence[Any], *, one_copy: bool) -> tuple[Results, list[Place]]: ...


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a case's logical result should be, and how far each element may be off: float64, axes of the reference."""

    expected: Expected
    bound: Bound


def expectations(
    requests: Sequence[tuple[Declaration, Case, Any]], *, tolerance: Tolerance, one_copy: bool
) -> list[Expectation]:
    """Expectation of each (declaration, case, logical values), in order, on the device of the values.

    Cases of all problems may be mixed; the values of all of them are on one device. `one_copy`: as for
    `attention_bound`, which is so on a CPU.
    """
    keep_freed_memory()
    found: dict[int, Expectation] = {}
    kinds: tuple[tuple[Expect, str], ...] = (
        (expect_attention, "plain"),
        (expect_attention, "variant"),
        (expect_merges, "merge"),
    )
    kind_of = [_kind(case) for _, case, _ in requests]
    for expect, kind in kinds:
        chosen = [i for i, own in enumerate(kind_of) if own == kind]
        chosen.sort(key=lambda i: requests[i][1].dtype)  # numbers of one dtype are joined in one operation
        if chosen:
            results, places = expect([requests[i] for i in chosen], one_copy=one_copy)
            if isinstance(tolerance, FixedTolerance):
                results.bound_all(tolerance.bound)
            found |= {i: _expectation(results, place) for i, place in zip(chosen, places, strict=True)}
    return [found[i] for i in range(len(requests))]


def _kind(case: Case) -> str:
    if not isinstance(case, AttentionCase):
        return "merge"
    return "variant" if changes_scores(case) else "plain"


def _expectation(results: Results, place: Place) -> Expectation:
    out, lse, out_bound, lse_bound = results.of_case(*place)
    return Expectation(Expected(out, lse), Bound(out=out_bound, lse=lse_bound))


def on_device(expectation: Expectation, device: str) -> Expectation:
    """The same in the memory of `device`."""
    expected, bound = expectation.expected, expectation.bound
    return Expectation(
        Expected(expected.out.to(device), expected.lse.to(device)), Bound(bound.out.to(device), bound.lse.to(device))
    )
