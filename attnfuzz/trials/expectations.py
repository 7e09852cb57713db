"""Expected results and error bounds of many cases at once, without waiting for the device.

Sequences and merges of all cases are padded to a few sizes (`row_batches`), fetched by index and computed together
(`attnfuzz.numerics.rows`). One case alone is the special case.

What takes a GPU a few launches for all cases of a batch together takes the host longer than anything else about a case.
So numbers on the host may make the way to a GPU and back (`DistantExpectations`). Tiny cases go along with larger ones:
they hardly ever need launches of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.reference import ExactResult, unmasked
from attnfuzz.memory.image import Fetch
from attnfuzz.numerics import Bound
from attnfuzz.problems.cases import AttentionCase, Case
from attnfuzz.problems.declared_numerics import FixedTolerance, Tolerance
from attnfuzz.trials.expected_rows import changes_scores, expect_attention, expect_merges
from attnfuzz.trials.row_batches import Place, Results
from attnfuzz.values.tokens import all_on_device

_LARGEST_KEPT = 31 << 20


@cache
def keep_freed_memory() -> None:
    """Let this process keep up to 64 MiB of freed memory; once is enough.

    The error bound makes tensors of a few MiB and drops them. By default glibc gives such memory back to the system at
    once, and most of the bound's time goes into page faults when it is asked for again. Dropping one large piece raises
    both limits, as mallopt(3) says of M_MMAP_THRESHOLD: that of what is mapped by itself to the piece's size, 32 MiB at
    most, and that of what is given back to twice as much. No page of the piece is ever touched.
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8, device="cpu")


class Expect(Protocol):
    """Results of cases of one kind, and where each case's are."""

    def __call__(self, requests: Sequence[Any], *, one_copy: bool) -> tuple[Results, list[Place]]: ...


@dataclass(frozen=True, slots=True)
class Expectation:
    """The right logical result of a case, and how far each element may be off: float64, axes of the reference."""

    expected: ExactResult
    bound: Bound


def expectations(
    requests: Sequence[tuple[Declaration, Case, Any]], *, tolerance: Tolerance, one_copy: bool
) -> list[Expectation]:
    """Expectation of each (declaration, case, logical values), in order, on the device of the values.

    Cases of all problems may be mixed; the values of all of them are on one device. `one_copy`: as for
    `attention_bound`, which is so on a CPU.
    """
    keep_freed_memory()
    requests = [
        (declaration, *unmasked(case, values)) if isinstance(case, AttentionCase) else (declaration, case, values)
        for declaration, case, values in requests
    ]
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
            parts = (results.of_case(*place) for place in places)
            found |= {i: _expectation(*of_case) for i, of_case in zip(chosen, parts, strict=True)}
    return [found[i] for i in range(len(requests))]


def _kind(case: Case) -> str:
    if not isinstance(case, AttentionCase):
        return "merge"
    return "variant" if changes_scores(case) else "plain"


def on_device(expectation: Expectation, device: str) -> Expectation:
    """This expectation in the memory of `device`."""
    return _expectation(*(part.to(device) for part in _parts(expectation)))


def bound_of(declaration: Declaration, case: Case, values: Any, *, one_copy: bool) -> Bound:
    """Axes as the reference's: `out [rows num_q_heads head_size]`, `lse [rows num_q_heads]`.

    `one_copy`: as for `attention_bound`.
    """
    (found,) = expectations([(declaration, case, values)], tolerance="bound", one_copy=one_copy)
    return found.bound


_HOST_WORK = 1 << 15
"""Query heads times tokens times head size, up to which a batch is not worth the way to a GPU."""

Request = tuple[Declaration, Case, Any]


@dataclass
class DistantExpectations:
    """Expectations of `requests`, with values where `fetch` has its home; made at once, `at_home` after the device."""

    requests: Sequence[Request]
    device: str
    tolerance: Tolerance
    one_copy: bool
    fetch: Fetch

    def __post_init__(self) -> None:
        is_away = self.device != self.fetch.home
        is_worth_it = is_away and sum(case.work for _, case, _ in self.requests) > _HOST_WORK
        requests = self._sent() if is_worth_it else self.requests
        self._found = expectations(requests, tolerance=self.tolerance, one_copy=self.one_copy)
        for expectation in self._found:
            for part in _parts(expectation):
                self.fetch.start_storage(part)

    def at_home(self) -> list[Expectation]:
        """All of them in the memory of the values."""
        return [_expectation(*map(self.fetch.at_home, _parts(one))) for one in self._found]

    def _sent(self) -> list[Request]:
        """Requests with values on the device. Not every case has all of them: scales are those of 8-bit caches."""
        tensors = [_tensors(values) for *_, values in self.requests]
        sent = iter(all_on_device([tensor for of_case in tensors for tensor in of_case.values()], self.device))
        return [
            (declaration, case, replace(values, **{name: next(sent) for name in names}))
            for (declaration, case, values), names in zip(self.requests, tensors, strict=True)
        ]


def _tensors(values: Any) -> dict[str, Tensor]:
    parts = {field.name: getattr(values, field.name) for field in fields(values)}
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}


def _parts(expectation: Expectation) -> Iterator[Tensor]:
    yield from (expectation.expected.out, expectation.expected.lse, expectation.bound.out, expectation.bound.lse)


def _expectation(out: Tensor, lse: Tensor, out_bound: Tensor, lse_bound: Tensor) -> Expectation:
    """The expectation of the parts that `_parts` gives."""
    return Expectation(ExactResult(out, lse), Bound(out=out_bound, lse=lse_bound))
