"""Which single changes of a failing case make it pass. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from attnfuzz.cases.facets import Domain, changed, facets_of
from attnfuzz.cases.facets.facet import Options
from attnfuzz.cases.supported import supports_case
from attnfuzz.problems.cases import Case, encode_case
from attnfuzz.problems.supports import Supports

_SHOWN = 5


def changes_of(case: Case, *, supports: Supports, options: Options) -> Iterator[tuple[str, Case]]:
    """Supported cases that differ from ``case`` in one respect, the most telling first, with words for what differs."""
    seen = {encode_case(case)}
    domain = Domain(case.problem, supports, options)
    for facet in sorted(facets_of(type(case)), key=lambda facet: facet.asked):
        for words, changes in facet.changes(case, domain):
            candidate = changed(case, **changes)
            if candidate is None or encode_case(candidate) in seen or not supports_case(supports, options, candidate):
                continue
            seen.add(encode_case(candidate))
            yield words, candidate


def ablate(
    case: Case, fails: Callable[[Case], bool | None], *, supports: Supports, options: Options, until: float
) -> tuple[str, ...]:
    """At most one line: with which changes ``case`` passes.

    With all others it ``fails`` still, which says little, or in another way (None). Begins no run after ``until`` (of
    ``time.monotonic``).
    """
    passes: list[str] = []
    for words, candidate in changes_of(case, supports=supports, options=options):
        if time.monotonic() >= until or len(passes) >= _SHOWN:
            break
        if fails(candidate) is False:
            passes.append(words)
    return (f"passes if changed to: {'; '.join(passes)}",) if passes else ()
