"""What the test run itself checks."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

from attnfuzz.bundled.merge_states import MergeStatesInputs
from attnfuzz.explaining import low_precision
from tests.shape_checks import check_shapes


def test_inputs_of_bundled_problems_are_checked() -> None:
    """A tensor of a wrong shape in what kernels get would be seen by no test."""
    check_shapes("this test", by_day=False)
    states, lses = torch.zeros(2, 3, 8), torch.zeros(3, 2)
    with pytest.raises(TypeCheckError, match="suffix_output"):
        MergeStatesInputs(states, lses, states[1:], lses, "HT", states, lses)


def test_functions_that_state_a_shape_are_checked_and_no_others() -> None:
    """Shapes behind a name would go unchecked, or each call of another function take longer for nothing."""
    assert all(hasattr(one, "__wrapped__") for one in (low_precision._in_tiles, low_precision._sums))
    assert not hasattr(low_precision._rounding_to, "__wrapped__")
    assert not hasattr(low_precision._rounding_to("float16"), "__wrapped__")
