"""Right kernels of `attnfuzz.families.IndexerTopk`: the bundled one in Triton, and one in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families.indexer_topk import IndexerTopk, chosen_scores
from attnfuzz.kernels.latent import launch


@attnfuzz.kernel(IndexerTopk())
def indexer_topk(inputs: Any) -> Tensor:
    """``launch.indexer_topk``."""
    indices = torch.empty(inputs.chosen.shape, dtype=torch.int32, device=inputs.chosen.device)
    launch.indexer_topk(inputs.scores, inputs.lengths_of_rows, indices)
    return chosen_scores(inputs, indices)


@attnfuzz.kernel(IndexerTopk())
def indexer_topk_eager(inputs: Any) -> Tensor:
    """Row by row."""
    indices = torch.full(inputs.chosen.shape, -1, dtype=torch.int32, device=inputs.chosen.device)
    for row, length in enumerate(inputs.lengths_of_rows.tolist()):
        scores = inputs.scores[row, :length].nan_to_num(-torch.inf, torch.inf, -torch.inf)
        found = scores.topk(min(inputs.topk, length)).indices
        indices[row, : len(found)] = found.int()
    return chosen_scores(inputs, indices)
