"""Another number of splits: the same result, within bounds.

Not bit for bit: each split rounds its own sums, and so does their reduction.
"""

from __future__ import annotations

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.judging.trial import Trial
from attnfuzz.oracles.relations.bounded import too_far_apart
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.oracles.relations.transformed import Changed, fits
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import Case, SplitDecodeCase
from attnfuzz.problems.choices import split_counts_of
from attnfuzz.problems.supported import supports_case

__all__ = ["SPLIT_COUNT"]

_OPTION = "num_splits"


def _applies(declaration: Declaration, case: Case) -> bool:
    return bool(_others(declaration, case))


def _check(trial: Trial) -> Failure | None:
    for count, case in _others(trial.kernel.declaration, trial.case).items():
        words = f"in {count} split{'s' * (count != 1)}"
        changed = Changed(words, case, trial.reference.values_on(trial.device))
        failure = too_far_apart("split_count", trial, changed)
        if failure is not None:
            return failure
    return None


def _others(declaration: Declaration, case: Case) -> dict[int, Case]:
    """The case with the fewest and the most splits, by their number, without its own."""
    if isinstance(case, SplitDecodeCase):
        counts = split_counts_of(declaration.supports)
        found: dict[int, Case] = {
            count: msgspec.structs.replace(case, num_splits=count) for count in counts if count != case.num_splits
        }
    else:
        choices = [one for one in declaration.options.get(_OPTION, ()) if type(one) is int]
        own = case.options.get(_OPTION, choices[0] if choices else None)
        found = {
            count: msgspec.structs.replace(case, options={**case.options, _OPTION: count})
            for count in choices
            if count != own
        }
    supported = [
        count for count, other in found.items() if supports_case(declaration.supports, declaration.options, other)
    ]
    ends = {min(supported), max(supported)} if supported else set()
    return {count: found[count] for count in sorted(ends) if fits(found[count])}


SPLIT_COUNT = Relation("split_count", _applies, _check, by_bounds=True)
