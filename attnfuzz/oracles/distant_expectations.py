"""Expectations of cases whose numbers are on the host, worked out where that is soonest.

What takes a GPU a few launches for all cases of a batch together takes the host longer than anything else about a case,
unless the case is tiny.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.memory.fetch import Fetch
from attnfuzz.numerics import Bound
from attnfuzz.oracles.expectations import Expectation, expectations
from attnfuzz.problems.cases import AttentionCase, Case
from attnfuzz.problems.reference import Expected
from attnfuzz.problems.tolerance import Tolerance
from attnfuzz.values.transfer import all_on_device

__all__ = ["DistantExpectations"]

_HOST_WORK = 1 << 15
"""Query heads times tokens times head size, up to which a case is not worth the way to a GPU."""

Request = tuple[Declaration, Case, Any]


@dataclass
class DistantExpectations:
    """Those of `requests`, with values in host memory. Made at once; `at_home` once the device is done."""

    requests: Sequence[Request]
    device: str
    tolerance: Tolerance
    interpreted: bool
    fetch: Fetch

    def __post_init__(self) -> None:
        distant = [
            i for i, (_, case, _) in enumerate(self.requests) if self.device != "cpu" and _work(case) > _HOST_WORK
        ]
        near = sorted(set(range(len(self.requests))) - set(distant))
        self._found = dict(zip(distant, self._expect(self._sent(distant)), strict=True))
        for expectation in self._found.values():
            for part in _parts(expectation):
                self.fetch.start_storage(part)
        self._found |= zip(near, self._expect([self.requests[i] for i in near]), strict=True)

    def at_home(self) -> list[Expectation]:
        """All of them in host memory."""
        return [_mapped(self._found[i], self.fetch.at_home) for i in range(len(self.requests))]

    def _expect(self, requests: Sequence[Request]) -> list[Expectation]:
        return expectations(requests, tolerance=self.tolerance, interpreted=self.interpreted) if requests else []

    def _sent(self, chosen: Sequence[int]) -> list[Request]:
        """Requests with values on the device."""
        names = [
            [field.name for field in fields(self.requests[i][2]) if _is_tensor(self.requests[i][2], field.name)]
            for i in chosen
        ]
        hosts = [
            getattr(self.requests[i][2], name) for i, of_case in zip(chosen, names, strict=True) for name in of_case
        ]
        sent = iter(all_on_device(hosts, self.device))
        return [
            (*self.requests[i][:2], replace(self.requests[i][2], **{name: next(sent) for name in of_case}))
            for i, of_case in zip(chosen, names, strict=True)
        ]


def _is_tensor(values: Any, name: str) -> bool:
    return isinstance(getattr(values, name), Tensor)


def _work(case: Case) -> int:
    tokens = sum(case.seq_lens) if isinstance(case, AttentionCase) else case.num_tokens
    return case.num_q_heads * tokens * case.head_size


def _parts(expectation: Expectation) -> Iterator[Tensor]:
    yield from (expectation.expected.out, expectation.expected.lse, expectation.bound.out, expectation.bound.lse)


def _mapped(expectation: Expectation, function: Callable[[Tensor], Tensor]) -> Expectation:
    out, lse, out_bound, lse_bound = map(function, _parts(expectation))
    return Expectation(Expected(out, lse), Bound(out=out_bound, lse=lse_bound))
