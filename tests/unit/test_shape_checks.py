"""What the test run itself checks."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

from attnfuzz.bundled.merge_states import MergeStatesInputs
from tests.shape_checks import check_shapes


def test_inputs_of_bundled_problems_are_checked() -> None:
    """A tensor of a wrong shape in what kernels get would be seen by no test."""
    check_shapes("this test", by_day=False)
    states, lses = torch.zeros(2, 3, 8), torch.zeros(3, 2)
    with pytest.raises(TypeCheckError, match="suffix_output"):
        MergeStatesInputs(states, lses, states[1:], lses, "HT", states, lses)
