"""Sums as NVIDIA's tensor cores take them: blocks of products and an accumulator, aligned to the largest and cut.

After Khattak and Mikaitis, Accurate models of NVIDIA tensor cores, arXiv:2512.07004 (2025). Of two terms in one binade
the larger decides the exponent here; the units take that of a product from its factors' exponents, which is no larger.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Unit:
    """``block`` products are added at once, aligned to ``bits`` after the point of the largest term's significand."""

    name: str
    block: int
    bits: int

    def total(self, terms: Tensor, start: Tensor | None = None) -> Tensor:
        """Sum over the last axis of float64 ``terms``, block by block, from ``start``."""
        total = terms.new_zeros(terms.shape[:-1]) if start is None else start.double()
        for first in range(0, terms.shape[-1], self.block):
            together = torch.cat([terms[..., first : first + self.block], total[..., None]], -1)
            unit = torch.ldexp(torch.ones_like(total), _exponent(together.abs().amax(-1)) - self.bits)[..., None]
            aligned = (together / unit).trunc() * unit
            total = _cut(aligned.sum(-1), min(23, self.bits))
        return total

    def dot(self, q: Tensor, k: Tensor) -> Tensor:
        """``q [heads, head_size]`` times ``k [heads, num_tokens, head_size]``, in 16 bits: products are exact."""
        return self.total(q.double()[:, None] * k.double()).float()


def _exponent(x: Tensor) -> Tensor:
    """E with 2^E <= x < 2^(E+1); some small number for 0."""
    return torch.frexp(x.clamp(min=2.0**-160)).exponent - 1


def _cut(x: Tensor, bits: int) -> Tensor:
    """``x`` less all but ``bits`` bits after the point of its significand."""
    unit = torch.ldexp(torch.ones_like(x), _exponent(x.abs()) - bits)
    return (x / unit).trunc() * unit


VOLTA = Unit("sm_70", block=4, bits=23)
AMPERE = Unit("sm_80", block=8, bits=24)
HOPPER = Unit("sm_90 and sm_100", block=16, bits=25)
HOPPER_FP8 = Unit("8-bit operands on sm_90", block=32, bits=13)
