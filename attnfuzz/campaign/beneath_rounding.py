"""What is beneath a failure that shows in the last digit alone.

The oracles that compare bits see a plainly wrong number too, where the values are so large that it stays within the
error bound. That is the bug then, and not a mistake of rounding beside it.
"""

from __future__ import annotations

from collections.abc import Callable

from attnfuzz.campaign.aspects import ROUNDING_ORACLES, SILENT_ORACLES
from attnfuzz.campaign.behind_known import simpler_in_one_respect, with_simplest_values
from attnfuzz.campaign.signature import KnownFindings, case_features
from attnfuzz.campaign.suspect import Suspect
from attnfuzz.problems.cases import Case

__all__ = ["is_sight_of_known", "plainly_wrong", "shows_in_rounding"]

FailingOne = Callable[[Case], Suspect | None]
"""Runs a case of the same kernel; what it shows, if anything."""


def shows_in_rounding(suspect: Suspect) -> bool:
    """Whether only bits differ, within the error bound."""
    return suspect.failure.oracle in ROUNDING_ORACLES and suspect.failure.kind == "bits"


def is_sight_of_known(suspect: Suspect, known: KnownFindings, failing: FailingOne) -> bool:
    """Whether the bits differ only where a bug is at work that is known for its wrong numbers.

    A mistake of rounding shows as well in cases that lack what that bug needs.
    """
    features = case_features(suspect.declaration, suspect.case)
    wrong_numbers = known.of_oracles(suspect.symptom.kernel, SILENT_ORACLES)
    at_work = [signature.features for signature in wrong_numbers if signature.features <= features]
    if not at_work:
        return False
    for case in simpler_in_one_respect(suspect):
        its = case_features(suspect.declaration, case)
        if not any(needed <= its for needed in at_work):
            other = failing(case)
            if other is not None and other.symptom == suspect.symptom:
                return False
    return True


def plainly_wrong(suspect: Suspect, failing: FailingOne) -> Suspect | None:
    """The case with the simplest values, if its numbers are wrong by more than rounding."""
    plain = with_simplest_values(suspect)
    found = None if plain is None else failing(plain)
    return found if found is not None and found.symptom.oracle in SILENT_ORACLES else None
