"""Trying proposals until none helps. Torch-free."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attnfuzz.minimise.common import lower_dtype, lower_head_size, lower_options, lower_strides
from attnfuzz.minimise.contents import lower_needles, lower_pages, lower_quantised_kv, lower_values, lower_variant
from attnfuzz.minimise.domain import Domain
from attnfuzz.minimise.jumps import jump
from attnfuzz.minimise.numbers import renumber
from attnfuzz.minimise.queries import lower_queries
from attnfuzz.minimise.search import Proposal, first_of
from attnfuzz.minimise.shape import (
    drop_sequences,
    follow_step,
    lower_block_size,
    lower_heads,
    lower_layout,
    lower_lengths,
    lower_num_splits,
    lower_v_head_size,
)
from attnfuzz.minimise.size import size_key
from attnfuzz.minimise.states import lower_pairs, lower_states, single_pair
from attnfuzz.problems.cases import Case, MergeStatesCase, encode_case
from attnfuzz.problems.open_cases import OpenCase, simpler_open_cases
from attnfuzz.problems.supported import supports_case
from attnfuzz.problems.supports import OptionValue, Supports

__all__ = ["minimise", "simplifications"]

Propose = Callable[[Any, Domain], Proposal[Any]]
Options = Mapping[str, tuple[OptionValue, ...]]


def _lower_step_options(case: Any, domain: Domain) -> Proposal[Any]:
    return (yield from lower_options(case, domain, follow_step))


_ATTENTION: tuple[Propose, ...] = (
    jump,
    drop_sequences,
    lower_lengths,
    lower_queries,
    lower_heads,
    lower_num_splits,
    _lower_step_options,
    lower_block_size,
    lower_v_head_size,
    lower_head_size,
    lower_dtype,
    lower_layout,
    lower_pages,
    lower_strides,
    lower_needles,
    lower_variant,
    lower_quantised_kv,
    lower_values,
    renumber,
)
_STATES: tuple[Propose, ...] = (
    jump,
    single_pair,
    lower_states,
    lower_pairs,
    lower_head_size,
    lower_dtype,
    lower_options,
    lower_strides,
)


def minimise(
    case: Case,
    still_fails: Callable[[Case], bool],
    *,
    supports: Supports,
    options: Options,
    deadline: float = math.inf,
    max_calls: int | None = None,
    on_smaller: Callable[[Case], None] | None = None,
) -> Case:
    """The smallest case found that ``still_fails``: none of its ``simplifications`` does, unless time ran out.

    ``case`` itself is taken to fail and is not run. No case is run twice. ``deadline`` (of ``time.monotonic``) and
    ``max_calls`` of ``still_fails`` end the search early, a call that has begun is waited for. ``on_smaller`` is told
    of each smaller failing case, so that nothing is lost when the search is interrupted.
    """
    search = _Search(case, Domain(supports, options), still_fails, deadline, max_calls, on_smaller)
    while True:
        before = search.current
        for propose in _proposals(case):
            search.drive(propose(search.current, search.domain))
        if search.current is before:
            return before


def simplifications(case: Case, *, supports: Supports, options: Options) -> Iterator[Case]:
    """Supported cases that are smaller than ``case`` by one change or one jump, each once, big jumps first."""
    tried: list[Case] = []

    def refuse(candidate: Case) -> bool:
        tried.append(candidate)
        return False

    search = _Search(case, Domain(supports, options), refuse)
    for propose in _proposals(case):
        search.drive(propose(case, search.domain))
        yield from tried
        tried.clear()


def _proposals(case: Case) -> tuple[Propose, ...]:
    if isinstance(case, OpenCase):
        return (_lower_open,)
    return _STATES if isinstance(case, MergeStatesCase) else _ATTENTION


def _lower_open(case: OpenCase, domain: Domain) -> Proposal[OpenCase]:
    """One field after another, and all at once."""
    return (yield from first_of(case, simpler_open_cases(case, domain.options)))


class _Search:
    """The smallest failing case so far, and what has been run."""

    def __init__(
        self,
        case: Case,
        domain: Domain,
        still_fails: Callable[[Case], bool],
        deadline: float = math.inf,
        max_calls: int | None = None,
        on_smaller: Callable[[Case], None] | None = None,
    ) -> None:
        self.current = case
        self.domain = domain
        self._size = size_key(case, options=domain.options)
        self._still_fails = still_fails
        self._deadline = deadline
        self._calls_left = math.inf if max_calls is None else max_calls
        self._on_smaller = on_smaller
        self._run: set[bytes] = set()

    def drive(self, proposal: Proposal[Any]) -> None:
        """Answer a proposal until it has nothing more to propose."""
        try:
            candidate = next(proposal)
            while True:
                candidate = proposal.send(self._accepts(candidate))
        except StopIteration:
            return

    def _accepts(self, candidate: Case | None) -> bool:
        if candidate is None or not self._is_worth_running(candidate) or not self._still_fails(candidate):
            return False
        self.current = candidate
        self._size = size_key(candidate, options=self.domain.options)
        if self._on_smaller is not None:
            self._on_smaller(candidate)
        return True

    def _is_worth_running(self, candidate: Case) -> bool:
        """Counts the run that follows."""
        if self._calls_left < 1 or time.monotonic() >= self._deadline:
            return False
        if size_key(candidate, options=self.domain.options) >= self._size:
            return False
        if not supports_case(self.domain.supports, self.domain.options, candidate):
            return False
        encoded = encode_case(candidate)
        if encoded in self._run:
            return False
        self._run.add(encoded)
        self._calls_left -= 1
        return True
