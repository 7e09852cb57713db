"""Right kernels of `attnfuzz.families.MergeRanks`: the bundled one in Triton, and the same in plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families.merge_ranks import MergeRanks
from attnfuzz.kernels.merge import launch


@attnfuzz.kernel(MergeRanks())
def merge_ranks(inputs: Any) -> tuple[Tensor, Tensor]:
    """``launch.merge_many``, with natural logarithms, and -inf for what ``local_lens`` says is empty."""
    natural = 1.0 if inputs.base == "e" else math.log(2.0)
    out, lse = launch.merge_many(inputs.outs, _lses(inputs) * natural, lse_layout="TH", output=inputs.out)
    return out, lse / natural


@attnfuzz.kernel(MergeRanks())
def merge_ranks_eager(inputs: Any) -> tuple[Tensor, Tensor]:
    """A softmax over ranks."""
    natural = 1.0 if inputs.base == "e" else math.log(2.0)
    lses = _lses(inputs)
    lse = torch.logsumexp(lses * natural, dim=0) / natural
    weights = ((lses - lse.nan_to_num(neginf=0.0)) * natural).exp()[..., None]
    return torch.where(weights > 0, weights * inputs.outs.float(), 0.0).sum(0).to(inputs.out.dtype), lse


def _lses(inputs: Any) -> Tensor:
    lses: Tensor = torch.where(inputs.lses == math.inf, -math.inf, inputs.lses)
    if inputs.empty != "unknown":
        return lses
    owns = (inputs.local_lens > 0).repeat_interleave(inputs.query_len, dim=1)
    lses[:, : owns.shape[1]][~owns] = -math.inf
    return lses
