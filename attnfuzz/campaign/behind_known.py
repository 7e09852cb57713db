"""Looking behind a known bug: simpler relatives of a failing case that the known bug cannot explain.

A bug that shows in most cases hides every other one with the same symptom. If a case that the known bug explains still
fails once it has been simplified to where that bug needs more, a second bug is at work.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from attnfuzz.campaign.pursuit import Suspect
from attnfuzz.campaign.signature import KnownFindings, case_features
from attnfuzz.minimise import simplifications
from attnfuzz.problems.cases import Case

__all__ = ["relatives_beyond"]

_LOOKED_AT = 64


def relatives_beyond(known: KnownFindings, suspect: Suspect) -> Iterator[Case]:
    """Simplifications of the suspect's case that would be news if they failed in the same way, big steps first."""
    declaration = suspect.declaration
    simpler = simplifications(suspect.case, supports=declaration.supports, options=declaration.options)
    for case in islice(simpler, _LOOKED_AT):
        if not known.explains(suspect.symptom, case_features(declaration, case)):
            yield case
