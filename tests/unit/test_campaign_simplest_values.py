"""attnfuzz.campaign.relatives: the case with the simplest numbers."""

from __future__ import annotations

import msgspec

from attnfuzz.campaign.identity.finding import FailingCase
from attnfuzz.campaign.relatives import with_simplest_values
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import MergeStatesCase
from attnfuzz.verdict import Failure


def test_states_to_merge_have_simpler_numbers_too() -> None:
    """A merge that is wrong by little beside large states would never be tried on plain ones."""
    case = MergeStatesCase(num_q_heads=1, head_size=16, num_tokens=1, outputs="fine")
    kernel = Declaration(name="k", problem="merge_states", target="k")
    suspect = FailingCase(kernel, case, Failure(oracle="merge_laws", kind="bits", message="differs"))
    plain = msgspec.structs.replace(case, outputs="normal")
    assert with_simplest_values(suspect) == plain
    assert with_simplest_values(FailingCase(kernel, plain, suspect.failure)) is None
