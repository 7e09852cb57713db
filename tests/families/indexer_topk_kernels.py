"""Kernels of `attnfuzz.families.IndexerTopk` with a bug each, of the kinds that indexers had."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families import IndexerTopk
from attnfuzz.families.indexer_topk import chosen_scores

PLANTED = {
    "no_length": "what lies behind a row's scores is chosen, too",
    "first_length": "the first row's length is that of all",
    "one_short": "the last score of a row is left out",
    "zero_fill": "a row of fewer scores has 0, which names the first, in the other places",
    "last_again": "a row of fewer scores names its last one again",
    "unwritten": "the other places of such a row are left as they were",
    "float16": "scores are compared in 16 bits",
    "ties_lost": "only scores above the k-th largest are named",
    "ties_first": "places fill up with scores equal to the k-th largest before larger ones are seen",
    "sign_of_bits": "the bits of negative scores are compared as those of positive ones",
    "minus_zero": "-0 turns the sign of the score that it changes places with",
    "nan_first": "NaN is above all other scores",
    "nan_is_none": "NaN ends a row",
    "tiles": "each tile of 64 gives at most 16 scores",
}


def _key(scores: Tensor, bug: str) -> Tensor:
    if bug == "float16":
        scores = scores.to(torch.float16).float()
    if bug == "sign_of_bits":
        scores = scores.contiguous().view(torch.int32)
    if bug == "minus_zero" and bool(((scores == 0) & scores.signbit()).any()):
        scores = torch.where(scores == scores.max(), -scores, scores)
    return scores.double().nan_to_num(torch.inf if bug == "nan_first" else -torch.inf, torch.inf, -torch.inf)


def _chosen(inputs: Any, bug: str = "") -> Tensor:
    indices = torch.full(inputs.chosen.shape, -1, dtype=torch.int32, device=inputs.chosen.device)
    lengths, k = inputs.lengths_of_rows.tolist(), inputs.topk
    for row, length in enumerate(lengths):
        length = {"no_length": inputs.scores.shape[1], "first_length": lengths[0]}.get(bug, length)
        scores = inputs.scores[row, : max(0, length - (bug == "one_short"))]
        if bug == "nan_is_none" and bool(scores.isnan().any()):
            scores = scores[: int(scores.isnan().nonzero()[0])]
        keys = _key(scores, bug)
        order = keys.sort(descending=True, stable=True).indices
        if bug == "tiles":
            rank = torch.zeros_like(order)
            for start in range(0, len(keys), 64):
                tile = keys[start : start + 64].sort(descending=True, stable=True).indices
                rank[start + tile] = torch.arange(len(tile), device=rank.device)
            order = order[rank[order] < 16]
        found = order[:k]
        if bug in ("ties_lost", "ties_first") and len(keys) > k:
            least = keys[found[-1]]
            found = found[keys[found] > least] if bug == "ties_lost" else (keys >= least).nonzero()[:k, 0]
        indices[row, : len(found)] = found.int()
        if bug == "zero_fill":
            indices[row, len(found) :] = 0
        if bug == "last_again" and len(found):
            indices[row, len(found) :] = found[-1].int()
        if bug == "unwritten":
            indices[row, len(found) :] = torch.empty(k, dtype=torch.int32, device=indices.device)[len(found) :]
    return chosen_scores(inputs, indices)


@attnfuzz.kernel(IndexerTopk())
def right(inputs: Any) -> Tensor:
    return _chosen(inputs)


def _planted(bug: str) -> Any:
    def choose(inputs: Any) -> Tensor:
        return _chosen(inputs, bug)

    choose.__name__ = choose.__qualname__ = bug
    return attnfuzz.kernel(IndexerTopk())(choose)


for _bug in PLANTED:
    globals()[_bug] = _planted(_bug)
