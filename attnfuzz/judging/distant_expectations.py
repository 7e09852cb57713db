"""Expectations of cases whose numbers are on the host, worked out where that is soonest.

What takes a GPU a few launches for all cases of a batch together takes the host longer than anything else about a case.
Tiny cases go along with larger ones: they hardly ever need launches of their own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.judging.expectations import Expectation, expectations
from attnfuzz.memory.fetch import Fetch
from attnfuzz.numerics import Bound
from attnfuzz.problems.cases import AttentionCase, Case
from attnfuzz.problems.reference import Expected
from attnfuzz.problems.tolerance import Tolerance
from attnfuzz.values.transfer import all_on_device

__all__ = ["DistantExpectations"]

_HOST_WORK = 1 << 15
"""Query heads times tokens times head size, up to which a batch is not worth the way to a GPU."""

Request = tuple[Declaration, Case, Any]


@dataclass
class DistantExpectations:
    """Those of `requests`, with values in host memory. Made at once; `at_home` once the device is done."""

    requests: Sequence[Request]
    device: str
    tolerance: Tolerance
    one_copy: bool
    fetch: Fetch

    def __post_init__(self) -> None:
        is_worth_it = self.device != "cpu" and sum(_work(case) for _, case, _ in self.requests) > _HOST_WORK
        requests = self._sent() if is_worth_it else self.requests
        self._found = expectations(requests, tolerance=self.tolerance, one_copy=self.one_copy)
        for expectation in self._found:
            for part in _parts(expectation):
                self.fetch.start_storage(part)

    def at_home(self) -> list[Expectation]:
        """All of them in host memory."""
        return [_mapped(expectation, self.fetch.at_home) for expectation in self._found]

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


def _work(case: Case) -> int:
    if isinstance(case, AttentionCase):
        return case.num_q_heads * sum(case.row_lens) * max(case.head_size, case.value_size)
    return case.num_q_heads * case.num_tokens * case.head_size


def _parts(expectation: Expectation) -> Iterator[Tensor]:
    yield from (expectation.expected.out, expectation.expected.lse, expectation.bound.out, expectation.bound.lse)


def _mapped(expectation: Expectation, function: Callable[[Tensor], Tensor]) -> Expectation:
    out, lse, out_bound, lse_bound = map(function, _parts(expectation))
    return Expectation(Expected(out, lse), Bound(out=out_bound, lse=lse_bound))
