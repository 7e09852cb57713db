"""The top-k of a sparse layer's indexer: of each row of scores, the places of the k largest.

Which of two equal scores is named is nobody's concern, nor is the order. So what is judged is the multiset of the
scores whose places a kernel names: its function returns `chosen_scores` of its indices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float32, Int
from torch import Tensor

import attnfuzz
from attnfuzz import Choice, Expected, Integer, Integers, Seed, TensorSpec

_NO_PLACE = torch.finfo(torch.float32).min
"""In place of a sentinel; NaN counts as -inf, and an index that is none, or stands there for a second time, as inf."""


class IndexerTopk(attnfuzz.Problem):
    """``lengths``: by row, how many scores it has; what lies behind them is no score. ``topk``: how many places are to
    be named; a row of fewer scores has -1 in the other places. ``values``: of the scores: "usual"; "ties", few
    different ones; "signed_zeros", the same with -0, which is no less than 0; "equal", one in each row; "near", which
    differ in the last bits only; "negative"; or "wide", up to the largest. ``nans``: "absent", or "lowest": some scores
    are NaN, and are named where others are too few; of a kernel that names these first ``Choice(("absent",
    "highest"))``. ``spare_scores``: how many each row has room for behind the longest one.
    """

    lengths = Integers(
        0, 1200, likely=(0, 1, 2, 15, 16, 17, 63, 64, 65, 128, 512, 513, 1025), least=1, most=4, total=2400
    )
    topk = Choice((16, 64, 512))
    values = Choice(("usual", "ties", "signed_zeros", "equal", "near", "negative", "wide"))
    nans = Choice(("absent", "lowest"))
    spare_scores = Integer(0, 40)
    strides = Choice(("contiguous", "padded_rows"))
    seed = Seed()

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """``chosen`` is what `chosen_scores` gives."""
        rows, width = len(case.lengths), max(1, *case.lengths) + case.spare_scores
        return {
            "scores": TensorSpec((rows, width), "float32", "input", case.strides, ("row", "token")),
            "lengths_of_rows": TensorSpec((rows,), "int32", axes=("row",)),
            "chosen": TensorSpec((rows, case.topk), "float32", "output", axes=("row", "by size,")),
        }

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """Scores alone."""
        tensors["lengths_of_rows"].copy_(torch.tensor(case.lengths, dtype=torch.int32, device="cpu"))
        generator = torch.Generator("cpu").manual_seed(case.seed)
        for row, length in enumerate(case.lengths):
            scores = attnfuzz.numbers((length,), seed=case.seed, name=f"scores{row}").float()
            scores = _shaped(scores, case.values)
            if case.nans != "absent":
                drawn = torch.rand(length, generator=generator, dtype=torch.float32, device="cpu")
                scores = scores.masked_fill(drawn < 1 / 4, torch.nan)
            tensors["scores"][row, :length] = scores

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
        """The largest scores of each row."""
        chosen = torch.full((len(case.lengths), case.topk), _NO_PLACE, dtype=torch.float32, device="cpu")
        for row, length in enumerate(case.lengths):
            highest = torch.inf if case.nans == "highest" else -torch.inf
            scores = tensors["scores"][row, :length].nan_to_num(highest, torch.inf, -torch.inf)
            largest = scores.topk(min(case.topk, length)).values
            chosen[row, : len(largest)] = largest.masked_fill(largest == torch.inf, -torch.inf)
        return {"chosen": Expected(chosen.sort(dim=1, descending=True).values, bound=0.0)}

    def where_is(self, case: Any, name: str, index: tuple[int, ...]) -> str:
        """How many scores the row has."""
        return f"its row has {case.lengths[index[0]]} scores" if name == "chosen" else ""


def _shaped(scores: Tensor, values: str) -> Tensor:
    if values in ("ties", "signed_zeros"):
        few = (scores * 2).round() / 2  # of numbers between -1/4 and 0 it is -0
        return few if values == "signed_zeros" else few + 0.0
    if values == "equal":
        return torch.full_like(scores, float(scores[0]) if len(scores) else 0.0)
    if values == "near":
        return 1 + scores.abs() * 2.0**-20
    if values == "negative":
        return -scores.abs() + 0.0
    return scores.sign() * torch.exp2((scores.abs() * 40).clamp(max=126)) if values == "wide" else scores


def chosen_scores(inputs: Any, indices: Int[Tensor, "rows topk"]) -> Float32[Tensor, "rows topk"]:
    """The scores whose places a kernel names, largest first: equal for all that are right.

    A sentinel, -1, gives the smallest number of float32, NaN -inf, and what names no score of its row, or names one for
    a second time, inf.
    """
    indices = indices.long()
    ordered = indices.sort(dim=1)
    again = torch.zeros_like(indices, dtype=torch.bool)
    again.scatter_(
        1, ordered.indices[:, 1:], (ordered.values[:, 1:] == ordered.values[:, :-1]) & (ordered.values[:, 1:] >= 0)
    )
    is_place = (indices >= 0) & (indices < inputs.lengths_of_rows.long()[:, None])
    found = inputs.scores.gather(1, torch.where(is_place, indices, 0)).masked_fill(indices == -1, _NO_PLACE)
    found = torch.where(found.isnan(), -torch.inf, found + 0.0)
    found = found.masked_fill(indices == -1, _NO_PLACE).masked_fill((~is_place & (indices != -1)) | again, torch.inf)
    return found.sort(dim=1, descending=True).values
