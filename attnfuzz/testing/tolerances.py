"""How many mistakes a fixed tolerance lets through, and how often a right kernel fails it, beside the derived bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, cast

import torch
from torch import Tensor

from attnfuzz.numerics.own import attention
from attnfuzz.problems.declared_numerics import Numerics

Design = Literal["flash", "eager", "split"]
DESIGNS: dict[Design, tuple[Numerics, int]] = {
    "flash": (Numerics(), 1),
    "eager": (Numerics(scores="input"), 1),
    "split": (Numerics(), 8),
}
"""How a right kernel rounds, and how many partial results it merges. Weights times V have 16 bits in each; "eager" has
scores in 16 bits too, and "split" keeps partial results in them."""
_FLASH_ATTENTION = 3.0
_LEAST = 1e-5


@dataclass(frozen=True)
class Setting:
    """Decode of one sequence, with numbers drawn from N(0, 1) as engines' suites draw them."""

    seq_len: int = 512
    head_size: int = 128
    num_q_heads: int = 8
    num_kv_heads: int = 2
    dtype: str = "float16"
    design: Design = "flash"
    draws: int = 32
    seed: int = 0


@dataclass(frozen=True)
class Suite:
    """A tolerance of a suite: ``|got - expected| <= atol + rtol |expected|`` of all elements.

    Without ``atol`` it is flash-attention's: three times the largest error of the same attention in 16 bits, and 1e-5.
    """

    name: str
    atol: float | None = None
    rtol: float = 0.0


SUITES = (
    Suite("vLLM, unified attention", 1.5e-2, 1e-2),
    Suite("vLLM, paged attention", 1e-3, 1e-5),
    Suite("SGLang, decode", 1e-2, 1e-2),
    Suite("SGLang, grouped decode", 3e-2, 1e-5),
    Suite("FlashInfer", 1e-3, 1e-3),
    Suite("flash-attention"),
)


@dataclass(frozen=True)
class Weighed:
    """Counts of draws: in how many a right kernel fails, and in how many each mistake passes."""

    name: str
    right_fails: int
    passes: dict[str, int]


@dataclass(frozen=True)
class Told:
    """``bound`` and ``error``: the median of the derived bound, and of the largest errors of the right kernel;
    ``size``: of the outputs, root mean square."""

    bound: float
    error: float
    size: float
    weighed: tuple[Weighed, ...]


def _zeros(setting: Setting, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    del setting, k
    return q.new_zeros(*q.shape[:-1], v.shape[-1])


def _lost(setting: Setting, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _exact(setting, q, k[:-1], v[:-1], scale=_scale(setting))


def _scaled(setting: Setting, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _exact(setting, q, k, v, scale=1.01 * _scale(setting))


MISTAKES: dict[str, Callable[[Setting, Tensor, Tensor, Tensor], Tensor]] = {
    "zeros": _zeros,
    "one token lost": _lost,
    "scale off by 1 %": _scaled,
}


def weigh(setting: Setting, suites: Sequence[Suite] = SUITES) -> Told:
    """Try the derived bound and ``suites`` on a right kernel of a design, and on kernels with each mistake.

    The right kernel is worked out here, in PyTorch, with the roundings of its design and no others. Kernels with a
    mistake are exact but for it and for the last rounding.
    """
    dtype = getattr(torch, setting.dtype)
    numerics, partials = DESIGNS[setting.design]
    names = ["derived bound", *(suite.name for suite in suites)]
    fails = dict.fromkeys(names, 0)
    passes = {name: dict.fromkeys(MISTAKES, 0) for name in names}
    bounds, errors, sizes = [], [], []
    for draw in range(setting.draws):
        q, k, v = _drawn(setting, draw, dtype)
        both = attention(
            q[None], [k], [v], scale=_scale(setting), dtype=setting.dtype, numerics=numerics, num_partials=partials
        )
        expected = both["out"]
        exact, bound = expected.value[0], cast(Tensor, expected.bound)[0]
        of_suites = [
            _of_flash_attention(setting, q, k, v, exact)
            if suite.atol is None
            else suite.atol + suite.rtol * exact.abs()
            for suite in suites
        ]
        right = _right(setting.design, setting, q, k, v)
        wrong = {name: mistake(setting, q, k, v).to(dtype) for name, mistake in MISTAKES.items()}
        for name, allowed in zip(names, [bound, *of_suites], strict=True):
            fails[name] += not _within(right, exact, allowed)
            for mistake, got in wrong.items():
                passes[name][mistake] += _within(got, exact, allowed)
        bounds.append(float(bound.median()))
        errors.append(float((right.double() - exact).abs().max()))
        sizes.append(float(exact.square().mean().sqrt()))
    of_all = tuple(Weighed(name, fails[name], passes[name]) for name in names)
    return Told(median(bounds), median(errors), median(sizes), of_all)


def _scale(setting: Setting) -> float:
    return 1 / math.sqrt(setting.head_size)


def _drawn(setting: Setting, draw: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed((setting.seed << 16) + draw)
    shapes = (
        (setting.num_q_heads, setting.head_size),
        (setting.seq_len, setting.num_kv_heads, setting.head_size),
        (setting.seq_len, setting.num_kv_heads, setting.head_size),
    )
    q, k, v = (torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype) for shape in shapes)
    return q, k, v


def _grouped(setting: Setting, part: Tensor) -> Tensor:
    """K or V of each query head, ``[heads, tokens, size]``."""
    return part.repeat_interleave(setting.num_q_heads // setting.num_kv_heads, 1).transpose(0, 1)


def _exact(setting: Setting, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    keys, values = (_grouped(setting, part).double() for part in (k, v))
    scores = (keys @ q.double()[..., None])[..., 0] * scale
    return (scores.softmax(-1)[:, None] @ values)[:, 0]


def _right(design: Design, setting: Setting, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = (_grouped(setting, part).float() for part in (k, v))
    scores = (keys @ q.float()[..., None])[..., 0]
    if design == "eager":
        scores = (scores.to(q.dtype).float() * _scale(setting)).to(q.dtype).float()
        return (scores.softmax(-1).to(q.dtype).float()[:, None] @ values)[:, 0].to(q.dtype)
    scores = scores * _scale(setting)
    outs, lses = [], []
    for of, part in zip(scores.tensor_split(DESIGNS[design][1], 1), values.tensor_split(DESIGNS[design][1], 1),
                        strict=True):  # fmt: skip
        top = of.amax(-1, keepdim=True)
        weights = (of - top).exp()
        total = weights.sum(-1, keepdim=True)
        out = (weights.to(q.dtype).float()[:, None] @ part)[:, 0] / total
        outs.append(out.to(q.dtype).float())
        lses.append(top + total.log())
    shares = torch.stack(lses).softmax(0)
    return (torch.stack(outs) * shares).sum(0).to(q.dtype)


def _of_flash_attention(setting: Setting, q: Tensor, k: Tensor, v: Tensor, exact: Tensor) -> Tensor:
    error = (_right("eager", setting, q, k, v).double() - exact).abs().max()
    return (_FLASH_ATTENTION * error + _LEAST).expand_as(exact)


def _within(got: Tensor, exact: Tensor, allowed: Tensor) -> bool:
    return bool(((got.double() - exact).abs() <= allowed).all())
