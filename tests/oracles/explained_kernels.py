"""Kernels in plain PyTorch that each make one mistake, for tests of what is said about them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.kernels import eager
from attnfuzz.problems.cases import Problem
from attnfuzz.problems.supports import Supports

State = tuple[Tensor, Tensor]
Mistake = Callable[[Any], Any]


def right(inputs: Any) -> State:
    """No mistake."""
    if hasattr(inputs, "block_table"):
        names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "scale", "block_size", "layout")
        return eager.paged_decode(**{name: getattr(inputs, name) for name in names})
    return eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)


def altered(**changes: Callable[[Any], Any]) -> Mistake:
    """The right answer to a question in which each named input is replaced by what is made of all inputs."""
    return lambda inputs: right(dataclasses.replace(inputs, **{name: make(inputs) for name, make in changes.items()}))


def _scaled_output(inputs: Any) -> State:
    out, lse = right(inputs)
    return out * 0.5, lse


def _first_token_added(inputs: Any) -> State:
    """With half a weight more, whatever its own is."""
    out, lse = right(inputs)
    return out + 0.5 * inputs.v[:, 0], lse


def _base_two(inputs: Any) -> State:
    out, lse = right(inputs)
    return out, lse * math.log2(math.e)


def _lse_off(inputs: Any) -> State:
    out, lse = right(inputs)
    return out, lse + 1


def _upper_half_doubled(inputs: Any) -> State:
    out, lse = right(inputs)
    out[..., out.shape[-1] // 2 :] *= 2
    return out, lse


def _squared(inputs: Any) -> State:
    out, lse = right(inputs)
    return out * out, lse


def _plus_a_little_of_keys(inputs: Any) -> State:
    """What a sum's last digits that go astray leave, where weights are unlike each other."""
    out, lse = right(inputs)
    return out + 1e-5 * inputs.k.abs().amax().to(out.dtype), lse


def _plus_one(inputs: Any) -> State:
    out, lse = right(inputs)
    return out + 1, lse


def _random(inputs: Any) -> State:
    out, lse = right(inputs)
    return out + torch.rand_like(out), lse


def _first_row_only(inputs: Any) -> State:
    out, lse = right(inputs)
    inputs.out[0], inputs.lse[0] = out[0], lse[0]
    return inputs.out, inputs.lse


def _adds_to_out(inputs: Any) -> State:
    """As if somebody had cleared the output."""
    out, lse = right(inputs)
    inputs.out += out
    return inputs.out, lse


def _not_masked(inputs: Any) -> State:
    """0 times what lies past the end of each sequence is added."""
    out, lse = right(inputs)
    return out + (0 * inputs.v[:, -1].sum(1, keepdim=True)).expand_as(out), lse


def _raises(inputs: Any) -> State:
    raise ValueError(f"cannot take {len(inputs.seq_lens)} sequences")


def _scales_q(inputs: Any) -> State:
    inputs.q.mul_(2)
    return right(inputs)


def _rows_exchanged(inputs: Any) -> State:
    out, lse = right(inputs)
    return out.flip(0), lse.flip(0)


def _entries_before(inputs: Any) -> Tensor:
    table: Tensor = inputs.block_table.clone()
    table[:, 1:] = inputs.block_table[:, :-1]
    return table


MISTAKES: dict[str, Mistake] = {
    "right": right,
    "last_token_dropped": altered(seq_lens=lambda inputs: inputs.seq_lens - 1),
    "one_token_too_many": altered(seq_lens=lambda inputs: inputs.seq_lens + 1),
    "kv_heads_exchanged": altered(k=lambda inputs: inputs.k.flip(2), v=lambda inputs: inputs.v.flip(2)),
    "no_lse": lambda inputs: right(inputs)[0],
    "no_lse_and_no_tokens": lambda inputs: torch.zeros_like(inputs.q),
    "no_lse_and_kv_heads_exchanged": lambda inputs: MISTAKES["kv_heads_exchanged"](inputs)[0],
    "v_heads_exchanged": altered(v=lambda inputs: inputs.v.flip(2)),
    "entry_before": altered(block_table=_entries_before),
    "scale_off": altered(scale=lambda inputs: 1.01 * inputs.scale),
    "query_of_another_head": altered(q=lambda inputs: inputs.q.flip(1)),
    "another_sequence": altered(k=lambda inputs: inputs.k.flip(0), v=lambda inputs: inputs.v.flip(0)),
    "scaled_output": _scaled_output,
    "first_token_added": _first_token_added,
    "base_two": _base_two,
    "lse_off": _lse_off,
    "upper_half_doubled": _upper_half_doubled,
    "squared": _squared,
    "plus_one": _plus_one,
    "plus_a_little_of_keys": _plus_a_little_of_keys,
    "k_for_v": altered(v=lambda inputs: inputs.k),
    "random": _random,
    "first_row_only": _first_row_only,
    "adds_to_out": _adds_to_out,
    "not_masked": _not_masked,
    "raises": _raises,
    "scales_q": _scales_q,
    "rows_exchanged": _rows_exchanged,
}


def kernel(mistake: str, problem: Problem = "dense_decode") -> Kernel:
    """The kernel with this mistake."""
    declaration = Declaration(name=mistake, problem=problem, supports=Supports(layouts=("NHD",)))
    return Kernel(MISTAKES[mistake], declaration)
