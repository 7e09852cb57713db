"""How far a result may be from the reference: the derived bound, or a fixed tolerance. Torch-free."""

import math
from typing import Any, Literal

import msgspec

__all__ = ["FixedTolerance", "Tolerance"]


class FixedTolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`|got - expected| <= atol + rtol * |expected|`, for those who must match another suite.

    Raises `ValueError` for a negative, NaN or infinite `atol` or `rtol`.
    """

    atol: float
    rtol: float

    def __post_init__(self) -> None:
        _require_finite_non_negative("atol", self.atol)
        _require_finite_non_negative("rtol", self.rtol)

    def bound(self, expected: Any) -> Any:
        """The largest error allowed at each element of `expected` (a number or a tensor), in its shape and dtype."""
        return self.atol + self.rtol * abs(expected)


Tolerance = Literal["bound"] | FixedTolerance
"""`"bound"`: the derived bounds of `attnfuzz.numerics`, the default."""


def _require_finite_non_negative(field: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]  # narrowed by is_number
        raise ValueError(
            f"FixedTolerance: {field}={value!r} must be a finite number >= 0; "
            'use tolerance="bound" for the derived error bounds'
        )
