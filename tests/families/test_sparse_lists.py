"""What a sparse kernel declares of empty lists, and what is made of the places that a top-k names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families import IndexerTopk, SparseDecode
from attnfuzz.families.indexer_topk import chosen_scores
from tests.families.searched import smallest_cases
from tests.families.sparse_decode_kernels import attend

_INF, _NONE = torch.inf, torch.finfo(torch.float32).min


def _finite(inputs: Any) -> tuple[Tensor, Tensor]:
    out, lse = attend(inputs)
    return out, torch.where(lse == -torch.inf, -6.9e29, lse)


def _highest(inputs: Any) -> Tensor:
    indices = torch.full(inputs.chosen.shape, -1, dtype=torch.int32, device=inputs.chosen.device)
    for row, length in enumerate(inputs.lengths_of_rows.tolist()):
        found = inputs.scores[row, :length].topk(min(inputs.topk, length)).indices
        indices[row, : len(found)] = found.int()
    return chosen_scores(inputs, indices)


@attnfuzz.kernel(SparseDecode())
def finite(inputs: Any) -> tuple[Tensor, Tensor]:
    return _finite(inputs)


@attnfuzz.kernel(SparseDecode(empty_lse=attnfuzz.Choice(("any",))))
def finite_as_declared(inputs: Any) -> tuple[Tensor, Tensor]:
    return _finite(inputs)


@attnfuzz.kernel(SparseDecode(empty_lse=attnfuzz.Choice(("any",))))
def doubled(inputs: Any) -> tuple[Tensor, Tensor]:
    out, lse = _finite(inputs)
    return out, lse * 2


@attnfuzz.kernel(IndexerTopk(nans=attnfuzz.Choice(("absent", "highest"))))
def nan_first_as_declared(inputs: Any) -> Tensor:
    return _highest(inputs)


@pytest.mark.parametrize("kernel", [finite_as_declared, nan_first_as_declared], ids=["empty_lse", "nans"])
def test_declared_conventions_are_no_findings(kernel: Any) -> None:
    """What a kernel's callers do not take, or its documentation says of NaN, would be called a bug."""
    attnfuzz.fuzz(kernel, max_examples=60, device="cpu")(lambda: None)()


def test_a_finite_sum_of_an_empty_list_is_found_unless_declared() -> None:
    """A merge that takes it would give weight to nothing."""
    assert [case.named for case in smallest_cases(finite)] == [(0,)]


def test_other_rows_are_judged_where_empty_ones_are_not() -> None:
    """A wrong log-sum-exp would hide behind the declaration of empty lists."""
    assert all(any(case.named) for case in smallest_cases(doubled))


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([2, 0, -1], [3.0, 1.0, _NONE]),
        ([0, 2, -1], [3.0, 1.0, _NONE]),
        ([1, 1, 0], [_INF, 1.0, -_INF]),
        ([3, 0, -1], [_INF, 1.0, _NONE]),
        ([-2, 0, -1], [_INF, 1.0, _NONE]),
    ],
    ids=["order", "other order", "repeat", "behind the row", "below -1"],
)
def test_named_places_become_scores(indices: list[int], expected: list[float]) -> None:
    """A place that is named twice, or is none of the row's, would pass for one more score."""
    scores = torch.tensor([[1.0, torch.nan, 3.0, 4.0]])
    inputs = SimpleNamespace(scores=scores, lengths_of_rows=torch.tensor([3], dtype=torch.int32))
    assert chosen_scores(inputs, torch.tensor([indices], dtype=torch.int32)).tolist() == [expected]
