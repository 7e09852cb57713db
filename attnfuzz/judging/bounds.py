"""The error bound of a case, from what its kernel declares about its arithmetic."""

from typing import Any

from attnfuzz.declaration import Declaration
from attnfuzz.judging.expectations import expectations
from attnfuzz.numerics import Bound
from attnfuzz.problems.cases import Case

__all__ = ["bound_of"]


def bound_of(declaration: Declaration, case: Case, values: Any, *, one_copy: bool) -> Bound:
    """Axes as the reference's: `out [rows num_q_heads head_size]`, `lse [rows num_q_heads]`.

    `one_copy`: as for `attention_bound`.
    """
    (found,) = expectations([(declaration, case, values)], tolerance="bound", one_copy=one_copy)
    return found.bound
