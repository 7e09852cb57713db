"""A float64 number beside the largest error of what a kernel that computes in float32 may have in its place.

A reference that is written with such numbers has its bound at the end, whatever the formula: each operation adds its
own rounding to the errors of its operands (a running error analysis: Higham, Accuracy and Stability of Numerical
Algorithms, section 3.3). Bounds add up in the worst way, so they are for formulas of a few steps; attention has closer
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnfuzz.numerics.arithmetic import EXP_ERROR, FLOAT32_ROUNDOFF, LOG_ERROR, SMALLEST_NORMAL_FLOAT32, gamma
from attnfuzz.numerics.own import rounding

_U = FLOAT32_ROUNDOFF
_QUOTIENT = 4 * _U
"""Error of a division, 2 ulp."""
_ROOT = 8 * _U
"""Error of 1 / sqrt(x): 2 ulp of `rsqrt.approx`, or 1 of a root and 2 of a division."""


class Rounded(NamedTuple):
    """``value`` and ``error`` have one shape."""

    value: Tensor
    error: Tensor

    def __add__(self, other: Rounded) -> Rounded:  # type: ignore[override]  # not what a tuple adds
        return _rounded(self.value + other.value, self.error + other.error, _U)

    def __sub__(self, other: Rounded) -> Rounded:
        return self + other.map(torch.neg, torch.clone)

    def __mul__(self, other: Rounded) -> Rounded:  # type: ignore[override]  # likewise
        value, error = self._product(other)
        return _rounded(value, error, _U)

    def __truediv__(self, other: Rounded) -> Rounded:
        """Raises ValueError where the divisor may be 0."""
        least = other.value.abs() - other.error
        if bool((least <= 0).any()):
            raise ValueError("a divisor may be 0: nothing bounds the quotient")
        value = self.value / other.value
        return _rounded(value, (self.error + value.abs() * other.error) / least, _QUOTIENT)

    def exp(self) -> Rounded:
        """Triton's is 2^x of a product with log2(e), a rounded constant: two roundings of the argument more."""
        argument = self.error + 2 * _U * (self.value.abs() + self.error)
        value = self.value.exp()
        return _rounded(value, value * torch.expm1(argument), EXP_ERROR)

    def log(self) -> Rounded:
        """The natural logarithm; minus infinity without an error for 0. Raises ValueError if it may be 0, or not."""
        least = self.value - self.error
        if bool(((least <= 0) & ((self.value != 0) | (self.error != 0))).any()):
            raise ValueError("a number may be 0: nothing bounds its logarithm")
        value = self.value.log()
        error = torch.log(self.value / least) + LOG_ERROR * (1 + value.abs())
        return Rounded(value, torch.where(self.value == 0, 0.0, error))

    def rsqrt(self) -> Rounded:
        """1 / sqrt(x), of what is larger than its error."""
        value = self.value.rsqrt()
        return _rounded(value, (self.value - self.error).rsqrt() - value, _ROOT)

    def sum(self, dim: int) -> Rounded:
        """In any order."""
        error = self.error.sum(dim) + float(gamma(self.value.shape[dim], _U)) * (self.value.abs() + self.error).sum(dim)
        return Rounded(self.value.sum(dim), error)

    def dot(self, other: Rounded) -> Rounded:
        """The dot product over the last dimension, broadcast. A product may be rounded before it is added, or not."""
        value, error = self._product(other)
        error = error.sum(-1) + float(gamma(value.shape[-1] + 1, _U)) * (value.abs() + error).sum(-1)
        return Rounded(value.sum(-1), error + value.shape[-1] * SMALLEST_NORMAL_FLOAT32)

    def stored(self, dtype: str) -> Rounded:
        """As a tensor of this dtype holds it."""
        return Rounded(self.value, self.error + rounding(self.value.abs() + self.error, dtype))

    def map(self, of_value: Callable[[Tensor], Tensor], of_error: Callable[[Tensor], Tensor] | None = None) -> Rounded:
        """Apply a function that takes places to others: an index, a view. ``of_error``: another one for the error."""
        return Rounded(of_value(self.value), (of_error or of_value)(self.error))

    def _product(self, other: Rounded) -> tuple[Tensor, Tensor]:
        x, y = self.value.abs(), other.value.abs()
        return self.value * other.value, x * other.error + (y + other.error) * self.error


def exactly(value: Tensor | float) -> Rounded:
    """A number that a kernel is given, as it is given."""
    number = torch.as_tensor(value, dtype=torch.float64, device="cpu")
    return Rounded(number, torch.zeros_like(number))


def _rounded(value: Tensor, error: Tensor, relative: float) -> Rounded:
    """With one rounding more; a GPU may flush to zero what is smaller than any normal number."""
    return Rounded(value, error + relative * (value.abs() + error) + SMALLEST_NORMAL_FLOAT32)
