"""The designs of `tests.quality.designs` as kernels that declare none of it, but no empty sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import attnfuzz
from attnfuzz import Supports
from tests.planted import planted
from tests.quality.designs import DESIGNS, Design, Result

halves = Supports(dtypes=("float16", "bfloat16"), empty_sequences=False)
DESIGN = {design.name: design for design in DESIGNS}


def run(inputs: Any, design: Design) -> Result:
    """``design`` on each sequence of a dense case."""
    group = inputs.q.shape[1] // inputs.k.shape[2]
    for i, length in enumerate(inputs.seq_lens.tolist()):
        k, v = (
            part[i, :length].repeat_interleave(group, 1).transpose(0, 1).contiguous() for part in (inputs.k, inputs.v)
        )
        inputs.out[i], inputs.lse[i] = design.run(inputs.q[i], k, v, inputs.scale, tile=64)
    return inputs.out, inputs.lse


exact_products = planted("exact_products", lambda i: run(i, DESIGN["weights rounded, summed before"]), supports=halves)
sum_of_rounded_weights = planted(
    "sum_of_rounded_weights", lambda i: run(i, DESIGN["sum of rounded weights"]), supports=halves
)
scaled_query = planted("scaled_query", lambda i: run(i, DESIGN["q x scale rounded"]), supports=halves)


def _scaled_query_where(inputs: Any, is_scaled: Callable[[int], bool]) -> Result:
    """No design: one of two paths rounds q times the scale, and the other does not."""
    longest = int(inputs.seq_lens.max())
    return run(inputs, DESIGN["q x scale rounded" if is_scaled(longest) else "weights rounded, summed before"])


@attnfuzz.kernel("dense_decode", supports=halves)
def scaled_query_of_short(inputs: Any) -> Result:
    return _scaled_query_where(inputs, lambda longest: longest <= 64)


@attnfuzz.kernel("dense_decode", supports=halves)
def scaled_query_of_long(inputs: Any) -> Result:
    return _scaled_query_where(inputs, lambda longest: longest > 64)


@attnfuzz.kernel("dense_decode", supports=halves)
def scaled_query_of_single_heads(inputs: Any) -> Result:
    scaled = inputs.k.shape[2] == 1
    return run(inputs, DESIGN["q x scale rounded" if scaled else "weights rounded, summed before"])


scaled_query_in_base_2 = planted(
    "scaled_query_in_base_2", lambda i: run(i, DESIGN["q x scale x log2(e) rounded"]), supports=halves
)
scaled_both = planted("scaled_both", lambda i: run(i, DESIGN["root of the scale on q and k"]), supports=halves)
cubic_exp = planted("cubic_exp", lambda i: run(i, DESIGN["cubic exp2"]), supports=halves)
short_exp = planted("short_exp", lambda i: run(i, DESIGN["16-bit exp2"]), supports=halves)
short_weights = planted("short_weights", lambda i: run(i, DESIGN["weights in e4m3"]), supports=halves)
stored_scores = planted("stored_scores", lambda i: run(i, DESIGN["scores in 16 bits"]), supports=halves)
sums_of_eight = planted("sums_of_eight", lambda i: run(i, DESIGN["eight keys in 16 bits"]), supports=halves)


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """As a matrix unit reads float32: without its low 13 bits."""
    return x if x.dtype != torch.float32 else (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def _tf32_design(prescaled: bool) -> Design:
    def scores(q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        factor = scale * math.log2(math.e) if prescaled else torch.ones(())
        made = (q.float() * factor).to(q.dtype)
        dots = torch.einsum("hd,hnd->hn", _tf32(made).float(), _tf32(k).float())
        return dots / math.log2(math.e) if prescaled else dots * scale

    def tile_sum(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hn,hnd->hd", _tf32(weights), _tf32(v).float())

    return Design("", "", scores=scores, tile_sum=tile_sum)


tf32_in_tiles = planted(
    "tf32_in_tiles", lambda i: run(i, _tf32_design(prescaled=False)), supports=Supports(empty_sequences=False)
)
scaled_tf32 = planted(
    "scaled_tf32", lambda i: run(i, _tf32_design(prescaled=True)), supports=Supports(empty_sequences=False)
)


def _of_float32(change: Callable[[torch.Tensor], torch.Tensor], result: torch.Tensor) -> None:
    if result.dtype == torch.float32:
        result.copy_(change(result))


@attnfuzz.kernel("dense_decode", supports=Supports(empty_sequences=False))
def short_outputs(inputs: Any) -> Result:
    """No design: float32 results lose as many bits as operands in TF32."""
    out, lse = run(inputs, DESIGN["weights rounded, summed before"])
    _of_float32(_tf32, out)
    return out, lse


@attnfuzz.kernel("dense_decode", supports=Supports(empty_sequences=False))
def short_constant(inputs: Any) -> Result:
    """Neither: the logarithm of 2 has five digits."""
    out, lse = run(inputs, DESIGN["weights rounded, summed before"])
    if out.dtype == torch.float32:
        lse *= 0.69317 / math.log(2)
    return out, lse


@attnfuzz.kernel("dense_decode", supports=halves)
def rounded_products(inputs: Any) -> Result:
    """No design: SGLang's `(q * k).to(float32)`."""
    scores = lambda q, k, scale: (q[:, None] * k).float().sum(-1) * scale  # noqa: E731
    return run(inputs, Design("products rounded", "", scores=scores))


exact_weights = planted("exact_weights", lambda i: run(i, Design("", "", weights_dtype=torch.float32)), supports=halves)
rounded_partials = planted(
    "rounded_partials", lambda i: run(i, Design("", "", weights_dtype=torch.float32, splits=2)), supports=halves
)


@attnfuzz.kernel("dense_decode", supports=halves, options={"num_splits": (1, 2)})
def splits_by_option(inputs: Any, *, num_splits: int) -> Result:
    return run(inputs, Design("", "", weights_dtype=torch.float32, splits=num_splits))
