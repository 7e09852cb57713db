"""Reducing a failing case to the smallest one that still fails. Torch-free.

Its facets know what a case means: they drop sequences, move lengths to the next boundary, rescale pages and lengths
together. Hypothesis only sees choices, and needs many more runs of a kernel that may take seconds to fail.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from attnfuzz.cases.facets import Domain, Facet, changed, facets_of
from attnfuzz.cases.facets.facet import Options
from attnfuzz.cases.facets.sequences import keep_sequences
from attnfuzz.cases.supported import supports_case
from attnfuzz.problems.cases import PROBLEMS, AttentionCase, Case, encode_case
from attnfuzz.problems.choices import gqa_ratios_of
from attnfuzz.problems.combinations import QUERIES, fields_of, fits
from attnfuzz.problems.fields import Proposal, Seed, first_of
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.recipes import MAX_LOGIT_EXPONENT, Values
from attnfuzz.problems.simplest import simplest_cases
from attnfuzz.problems.supports import Combination, Supports

_FIELDS_OF = {
    "gqa_ratio": ("num_q_heads", "num_kv_heads"),
    "num_q_heads": ("num_q_heads", "num_kv_heads"),
    "num_kv_heads": ("num_q_heads", "num_kv_heads"),
    "v_head_size": ("head_size", "v_head_size"),
    "kv_dtype": ("dtype", "kv"),
    **dict.fromkeys(QUERIES, ("seq_lens", "query_lens")),
}
"""Fields to change for another value of something in a combination that is no field by itself."""
_MOST_COMBINATIONS = 16
_SEEDS = 5
_SEEDS_OF_A_FIELD = 3
_LOUDER = (0, 1, 2)


def size_key(case: Case, *, options: Options | None = None) -> tuple[Any, ...]:
    """Compare these to compare cases: the smaller is the simpler. A total order over the cases of one problem.

    What a reader must keep in mind comes first: sequences, heads, tokens, then how they are stored, then what they
    hold. Given the kernel's ``options``, their first choices are simplest; else the smallest value is.
    """
    sizes = [size for facet in facets_of(type(case)) for size in facet.size(case, options or {})]
    problem = PROBLEMS.index(case.problem) if case.problem in PROBLEMS else len(PROBLEMS)
    return (problem, *(value for _, value in sorted(sizes, key=lambda size: size[0])))


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
    search = _Search(case, Domain(case.problem, supports, options), still_fails, deadline, max_calls, on_smaller)
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

    search = _Search(case, Domain(case.problem, supports, options), refuse)
    for propose in _proposals(case):
        search.drive(propose(case, search.domain))
        yield from tried
        tried.clear()


def _proposals(case: Case) -> Iterator[Callable[[Any, Domain], Proposal[Any]]]:
    """Big jumps, then one facet after another, then other numbers."""
    yield _jump
    yield from (facet.shrink for facet in facets_of(type(case)))
    yield _renumber


def _jump(case: Any, domain: Domain) -> Proposal[Any]:
    """Everything simplest; everything but lengths and tiles; facets that seldom matter together; combinations."""
    each = simplest_cases(case.problem, domain.supports, domain.options)
    groups: dict[str, list[Facet[Any]]] = {}
    for facet in facets_of(type(case)):
        groups.setdefault(facet.jumps_with, []).append(facet)
    groups.pop("", None)
    all_but_options = [facet for name, group in groups.items() if name != "options" for facet in group]
    case = yield from first_of(case, [each[0][1], _simplified(case, domain, all_but_options)])
    for group in groups.values():
        case = yield from first_of(case, [_simplified(case, domain, group)])
    others = [(one.combinations[0], own) for one, own in each[:_MOST_COMBINATIONS] if one.combinations]
    return (yield from first_of(case, [_onto(case, combination, own) for combination, own in others]))


def _simplified(case: Any, domain: Domain, facets: Iterable[Facet[Any]]) -> Any:
    """``case`` with all of ``facets`` as they are in the simplest case."""
    fields: dict[str, Any] = {}
    for facet in facets:
        fields |= facet.simplest(case, domain)
    return changed(case, **fields)


def _onto(case: Case, combination: Combination, simplest: Case) -> Case | None:
    """``case`` with what ``combination`` does not permit of it as in that one's simplest case; the rest stays."""
    misfits = [name for name, values in combination.items() if not fits(case, {name: values})]
    own = [name for name in misfits if name in fields_of(case.problem)]
    changes = {field for name in own for field in _FIELDS_OF.get(name, (name,))} & set(simplest.__struct_fields__)
    fields = {field: getattr(simplest, field) for field in changes}
    options = {name: simplest.options[name] for name in misfits if name not in own}
    return changed(case, **fields, options={**case.options, **options})


def _renumber(case: Any, domain: Domain) -> Proposal[Any]:
    """One sequence and one head with other seeds and larger scores, where the numbers matter at all.

    What a row holds depends on its place. Where a failure depends on the numbers, the row that fails may not be the
    first, and would stop failing in its place: then the rows before it stay for nothing. Of a user's problem nobody
    knows which fields its numbers depend on: each that is not at its simplest is tried so, with other seeds.
    """
    if isinstance(case, OpenCase):
        seeds = [name for name, field in case.problem.fields.items() if isinstance(field, Seed)]
        for facet in facets_of(type(case)) if seeds else ():
            simple = _simplified(case, domain, [facet])
            if simple is not None and simple != case:
                others = (changed(simple, **dict.fromkeys(seeds, seed)) for seed in range(_SEEDS_OF_A_FIELD))
                case = yield from first_of(case, others)
        return case
    if not isinstance(case, AttentionCase) or case.values == Values():
        return case
    if case.num_seqs > 1:
        case = yield from first_of(case, _renumbered(keep_sequences(case, [case.num_seqs - 1])))
    if case.num_kv_heads > 1:
        case = yield from first_of(case, _renumbered(changed(case, num_kv_heads=1, num_q_heads=case.gqa_ratio)))
    if case.gqa_ratio > 1:
        fewer = case.num_kv_heads * gqa_ratios_of(domain.supports)[0]
        case = yield from first_of(case, _renumbered(changed(case, num_q_heads=fewer)))
    return case


def _renumbered(case: AttentionCase | None) -> Iterator[AttentionCase | None]:
    if case is None:
        return
    for louder in _LOUDER:
        exponent = min(case.values.logit_exponent + louder, MAX_LOGIT_EXPONENT)
        for seed in range(_SEEDS):
            values = msgspec.structs.replace(case.values, seed=seed, logit_exponent=exponent)
            yield changed(case, values=values)


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
