"""Legitimate designs of attention kernels, emulated: `python -m tests.quality.designs` prints error over bound of each.

Each computes in float32 but for what its design rounds, on cases as a search draws them. A design must stay below the
bound if it is declared, and if it needs no declaration, without one. The last line says which design comes closest and
which stays furthest below, of the output as declared; the exit status is 1 if that is less than `TARGET`.
"""

from __future__ import annotations

import argparse
import datetime
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnfuzz.numerics import attention_bound, error_ratio
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies.sizes import CPU_SIZES, GPU_SIZES
from attnfuzz.values import attention_values
from tests.common.drawing import drawn_cases
from tests.common.tensor_cores import HOPPER, VOLTA, Unit

Result = tuple[Tensor, Tensor]
TARGET = 0.2
"""Of its bound, what the largest error of the output comes to at least, in each dtype: a bound that is five times as
large as the errors that occur hides bugs of that size."""
_UNDECLARED = Numerics()
_LOG2_E = torch.tensor(math.log2(math.e), dtype=torch.float32)


def _scores(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    return torch.einsum("hd,hnd->hn", q.float(), k.float()) * scale


def _scaled_query(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    return torch.einsum("hd,hnd->hn", (q.float() * scale).to(q.dtype).float(), k.float())


def _scaled_query_in_base_2(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    scaled = (q.float() * (scale * _LOG2_E)).to(q.dtype).float()
    return torch.einsum("hd,hnd->hn", scaled, k.float()) / _LOG2_E


def _scaled_both(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    root = scale.abs().sqrt()
    scaled_q, scaled_k = ((part.float() * root).to(q.dtype).float() for part in (q, k))
    return scale.sign() * torch.einsum("hd,hnd->hn", scaled_q, scaled_k)


def _short_query(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    return _scores(q.float().to(torch.float8_e4m3fn), k, scale)


def _stored_scores(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    stored = torch.einsum("hd,hnd->hn", q.float(), k.float()).to(q.dtype).float()
    return (stored * scale).to(q.dtype).float()


def _cubic_exp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The polynomial of FlashAttention 4 on the fraction, and the whole part as an exponent."""
    del dtype
    x = (x * _LOG2_E).clamp(min=-126.0)
    whole = x.floor()
    fraction = x - whole
    polynomial = 0.077119089663028717 * fraction + 0.227564394474029541
    polynomial = (polynomial * fraction + 0.695146143436431885) * fraction + 1.0
    return torch.ldexp(polynomial, whole)


def _short_exp(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.exp2((x * _LOG2_E).to(dtype).float()).to(dtype).float()


def _exp(x: Tensor, dtype: torch.dtype) -> Tensor:
    del dtype
    return x.exp()


def _tile_sum(weights: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("hn,hnd->hd", weights, v.float())


def _rounded_tile_sum(weights: Tensor, v: Tensor) -> Tensor:
    return _tile_sum(weights, v).to(v.dtype).float()


def _sum_of_eights(weights: Tensor, v: Tensor) -> Tensor:
    """Products of eight keys in four registers of two numbers, which are added one after the other."""
    heads, tokens, size = v.shape
    padding = -tokens % 8
    values = torch.nn.functional.pad(v, (0, 0, 0, padding)).reshape(heads, -1, 4, 2, size)
    shares = torch.nn.functional.pad(weights, (0, padding)).to(v.dtype).reshape(heads, -1, 4, 2)
    total, *registers = (shares[..., None] * values).unbind(2)
    for register in registers:
        total = total + register
    return total.float().sum((1, 2))


@dataclass(frozen=True)
class Design:
    """Online softmax over tiles. ``numerics``: what it has to declare; the default if nothing.

    ``weights_dtype``: of weights before they multiply V, None for the dtype of q. ``sums_rounded``: these are summed.
    ``tile_sum``: of a tile's weights and V, without tensor cores. ``splits``: how many states are made, each stored in
    the dtype of q, and merged in a chain; or in float32 with weights exp(lse_s - lse), if ``lse`` makes that number of
    the exact one. ``unit``: the tensor cores that multiply matrices.
    """

    name: str
    used_by: str
    numerics: Numerics = _UNDECLARED
    scores: Callable[[Tensor, Tensor, Tensor], Tensor] = _scores
    exp: Callable[[Tensor, torch.dtype], Tensor] = _exp
    weights_dtype: torch.dtype | None = None
    sums_rounded: bool = False
    tile_sum: Callable[[Tensor, Tensor], Tensor] = _tile_sum
    lse: Callable[[Tensor], Tensor] | None = None
    splits: int = 1
    unit: Unit | None = None

    def run(self, q: Tensor, k: Tensor, v: Tensor, scale: float, tile: int) -> Result:
        """One sequence: ``q [heads, head_size]``, ``k`` and ``v [heads, num_tokens, ...]``, in their dtype."""
        per_split = -(-k.shape[1] // self.splits)
        states = [
            self._state(q, k[:, start : start + per_split], v[:, start : start + per_split], scale, tile)
            for start in range(0, k.shape[1], per_split)
        ]
        if self.lse is not None:
            outs, lses = (torch.stack(parts) for parts in zip(*states, strict=True))
            total = self.lse(lses.logsumexp(0))
            return ((lses - total).exp()[..., None] * outs).sum(0).to(q.dtype), total
        out, lse = states[0]
        for other, other_lse in states[1:]:
            out, lse = _merged(out, lse, other, other_lse, q.dtype)
        return out.to(q.dtype), lse

    def _state(self, q: Tensor, k: Tensor, v: Tensor, scale: float, tile: int) -> Result:
        scores = self._all_scores(q, k, scale)
        dtype = self.weights_dtype or q.dtype
        top = scores.new_full(scores.shape[:1], -torch.inf)
        total, out = torch.zeros_like(top), scores.new_zeros(len(scores), v.shape[-1])
        for start in range(0, k.shape[1], tile):
            part = scores[:, start : start + tile]
            higher = torch.maximum(top, part.amax(-1))
            weights = self.exp(part - higher[:, None], q.dtype)
            rounded = weights.to(dtype).float()
            rescale = (top - higher).exp()
            total = total * rescale + (rounded if self.sums_rounded else weights).sum(-1)
            out = self._added(out * rescale[:, None], rounded, v[:, start : start + tile])
            top = higher
        return out / total[:, None], top + total.log()

    def _all_scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        if self.unit is not None:
            return self.unit.dot(q, k) * torch.tensor(scale, dtype=torch.float32)
        return self.scores(q, k, torch.tensor(scale, dtype=torch.float32))

    def _added(self, out: Tensor, weights: Tensor, v: Tensor) -> Tensor:
        """``out [heads, v_head_size]`` and, added to it, the values of a tile times their ``weights``."""
        if self.unit is None:
            return out + self.tile_sum(weights, v)
        return self.unit.total((weights.double()[..., None] * v.double()).transpose(1, 2), start=out).float()


def _merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, dtype: torch.dtype) -> Result:
    top = torch.maximum(lse, other_lse)
    own, new = (lse - top).exp(), (other_lse - top).exp()
    states = (out.to(dtype).float(), other.to(dtype).float())
    return (own[:, None] * states[0] + new[:, None] * states[1]) / (own + new)[:, None], top + (own + new).log()


DESIGNS = (
    Design("weights rounded, summed before", "FlashAttention 2 and 3, vLLM"),
    *(Design(f"on tensor cores of {unit.name}", "the same", unit=unit) for unit in (VOLTA, HOPPER)),
    Design("sum of rounded weights", "FlashInfer, SageAttention, TensorRT-LLM's XQA", sums_rounded=True),
    Design("q x scale rounded", "older Triton kernels", Numerics(query="scaled"), scores=_scaled_query),
    Design(
        "q x scale x log2(e) rounded",
        "FlexAttention's PRESCALE_QK, an old Triton tutorial",
        Numerics(query="scaled"),
        scores=_scaled_query_in_base_2,
    ),
    Design("root of the scale on q and k", "torch's math SDPA", Numerics(query="scaled_both"), scores=_scaled_both),
    Design("q in e4m3", "SGLang with an 8-bit cache", Numerics(query="float8_e4m3fn"), scores=_short_query),
    Design("scores in 16 bits", "eager attention in 16 bits", Numerics(scores="input"), scores=_stored_scores),
    Design("cubic exp2", "FlashAttention 4", Numerics(exponential="cubic"), exp=_cubic_exp),
    Design("16-bit exp2", "ex2.approx.f16x2", Numerics(exponential="input"), exp=_short_exp, sums_rounded=True),
    Design(
        "weights in e4m3",
        "FlashAttention 3 with an 8-bit cache",
        Numerics(probabilities="float8_e4m3fn"),
        weights_dtype=torch.float8_e4m3fn,
    ),
    Design("tiles rounded", "eager online softmax", Numerics(tile_sums="rounded"), tile_sum=_rounded_tile_sum),
    Design("eight keys in 16 bits", "vLLM's CUDA kernels", Numerics(tile_sums="input"), tile_sum=_sum_of_eights),
    Design("weights of splits by LSE", "FlashAttention 2's combine, vLLM's DCP", lse=torch.clone, splits=4),
    Design("chain of five merges", "cascades, chunked prefill", Numerics(partials="chained"), splits=6),
)
"""Those without ``numerics`` are normal paths of engines."""


def drawn_of(dtype: str, count: int, device: str = "cpu") -> list[DenseDecodeCase]:
    """The same at each call, as large as a campaign on ``device`` draws them."""
    supports = Supports(dtypes=(dtype,))  # type: ignore[arg-type]  # any str
    sizes = GPU_SIZES if device == "cuda" else CPU_SIZES
    return drawn_cases("dense_decode", count, supports=supports, sizes=sizes)


def largest_ratios(design: Design, drawn: list[DenseDecodeCase], *declarations: Numerics) -> list[tuple[float, float]]:
    """Largest error over bound of out and of the LSE, of a kernel with each of these declarations.

    Rows with products beyond a 16-bit number are left out: a score that overflows is no rounding.
    """
    largest = [(0.0, 0.0)] * len(declarations)
    for case in drawn:
        for of_row in ratios(design, case, declarations):
            largest = [(max(a, c), max(b, d)) for (a, b), (c, d) in zip(largest, of_row, strict=True)]
    return largest


def ratios(
    design: Design, case: DenseDecodeCase, declarations: Sequence[Numerics], device: str = "cpu"
) -> Iterator[list[tuple[float, float]]]:
    """Of each sequence with tokens, error over bound of out and of the LSE, by declaration."""
    values, dtype = attention_values(case, device), getattr(torch, case.dtype)
    for i, length in enumerate(case.seq_lens):
        if not length:
            continue
        q, (k, v) = values.q[i], values.sequence(i)
        own_k, own_v = (part.repeat_interleave(case.gqa_ratio, 1).transpose(0, 1) for part in (k, v))
        products = torch.einsum("hd,hnd->hn", q.double().abs(), own_k.double().abs())
        if not bool(products.max() * max(1.0, abs(case.scale)) < torch.finfo(dtype).max):
            continue
        out, lse = design.run(q, own_k, own_v, case.scale, tile=(16, 64, 128)[length % 3])
        scores = case.scale * torch.einsum("hd,hnd->hn", q.double(), own_k.double())
        exact = torch.einsum("hn,hnd->hd", scores.softmax(-1), own_v.double())
        exact_lse = scores.logsumexp(-1)
        inputs, types = (q.double(), k.double(), v.double()), {"in_dtype": dtype, "out_dtype": dtype}
        partials = max(2, design.splits)
        bounds = [
            attention_bound(
                *inputs, case.scale, **types, numerics=numerics, num_partials=partials, one_copy=design.unit is None
            )
            for numerics in declarations
        ]
        yield [
            (float(error_ratio(out, exact, one.out).max()), float(error_ratio(lse, exact_lse, one.lse).max()))
            for one in bounds
        ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.quality.designs", description=__doc__)
    parser.add_argument("--cases", type=int, default=300, help="of each dtype")
    count = parser.parse_args().cases
    today = datetime.date.today().isoformat()
    print(f"`python -m tests.quality.designs --cases {count}`, torch {torch.__version__}, {today}\n")
    print("| design | used by | out, undeclared | LSE, undeclared | declared as | out | LSE |")
    print("|---|---|---:|---:|---|---:|---:|")
    drawn = [drawn_of(dtype, count) for dtype in ("float16", "bfloat16")]
    reached: dict[str, float] = {}
    for design in DESIGNS:
        of_dtypes = [largest_ratios(design, of_dtype, _UNDECLARED, design.numerics) for of_dtype in drawn]
        columns = [" / ".join(f"{found[i][j]:.3g}" for found in of_dtypes) for i in range(2) for j in range(2)]
        reached[design.name] = min(found[1][0] for found in of_dtypes)
        fields = [f"{name}={value!r}" for name, value in design.numerics.declared().items()]
        said = f"`Numerics({', '.join(fields)})`" if fields else "nothing"
        print("|", " | ".join([design.name, design.used_by, *columns[:2], said, *columns[2:]]), "|", flush=True)
    (most, of_most), *_, (least, of_least) = sorted(reached.items(), key=lambda one: -one[1])
    told = f"{of_most:.3g} ({most}) to {of_least:.3g} ({least})"
    print(f"\nout as declared, in the dtype with less: {told}; the least is to be {TARGET}")
    sys.exit(of_least < TARGET)


if __name__ == "__main__":
    main()
