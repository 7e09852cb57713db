"""Relations that compare two runs by their error bounds: they judge where they are asked for by name."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from torch import Tensor

import attnfuzz
from attnfuzz.declaration import Kernel
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.registry import DEFAULT_ORACLES, OracleName
from attnfuzz.problems.cases import Case, DenseDecodeCase, PagedDecodeCase, SplitDecodeCase
from attnfuzz.verdict import Failure

BY_BOUNDS: tuple[OracleName, ...] = ("layout", "repaging", "gqa_expansion", "split_count", "compose")


def objection(name: OracleName, kernel: Kernel, case: Case) -> Failure:
    """What the relation says, if it is asked for."""
    failure = judge(kernel, case, device="cpu", oracles=(name,), relations=(name,)).failure
    assert failure is not None
    assert failure.error_ratio is not None
    assert failure.error_ratio > 1
    assert any(line.startswith("both should be ") for line in failure.details)
    return failure


def wrong_if(plant: Any, problem: str, is_wrong: Any, **declared: Any) -> Any:
    """A kernel that doubles its output for some inputs."""
    return plant(problem, after=lambda inputs, out, lse: (out * (2 if is_wrong(inputs) else 1), lse), **declared)


def test_they_judge_only_if_named(plant: Any, dense: DenseDecodeCase) -> None:
    """Two runs within their bounds are within the sum of both: what accuracy finds would be told once more."""
    assert not set(BY_BOUNDS) & set(DEFAULT_ORACLES)
    kernel = wrong_if(plant, "dense_decode", lambda inputs: not inputs.k.is_contiguous())
    assert judge(kernel, dense, device="cpu", relations="all").failure is None


def test_a_saved_finding_names_its_relation(plant: Any, dense: DenseDecodeCase) -> None:
    """A replay asks the usual oracles and the finding's relation: it would pass without having been judged by that."""
    kernel = wrong_if(plant, "dense_decode", lambda inputs: not inputs.k.is_contiguous())
    failure = judge(kernel, dense, device="cpu", relations=("layout",)).failure
    assert failure is not None
    assert failure.oracle == "layout"


@pytest.mark.by_day
@pytest.mark.parametrize("fixture", ["dense", "paged", "split"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_correct_kernels_are_within_bounds(
    fixture: str, dtype: Any, plant: Any, request: pytest.FixtureRequest
) -> None:
    """A false alarm: the changed case has another result, or its bound was not that of its own numbers."""
    case: Case = msgspec.structs.replace(request.getfixturevalue(fixture), dtype=dtype)
    kernel = plant(case.problem, supports=attnfuzz.Supports(unused_table_entries="garbage"))
    assert judge(kernel, case, device="cpu", relations=BY_BOUNDS).failure is None


def test_shared_pages_are_told_apart(plant: Any, paged: PagedDecodeCase) -> None:
    """Pages of another size share other tokens: a false alarm wherever sequences share a prefix."""
    pages = msgspec.structs.replace(paged.pages, shared_blocks=1)
    case = msgspec.structs.replace(paged, seq_lens=(20, 9, 21), pages=pages)
    assert judge(plant("paged_decode"), case, device="cpu", relations=BY_BOUNDS).failure is None


def test_layout(plant: Any, dense: DenseDecodeCase, paged: PagedDecodeCase) -> None:
    """A kernel that only takes contiguous tensors would pass on those."""
    failure = objection("layout", wrong_if(plant, "dense_decode", lambda inputs: not inputs.k.is_contiguous()), dense)
    assert "with rows that have gaps between them: " in failure.message
    strided = msgspec.structs.replace(dense, strides={"q": "every_other"})
    failure = objection("layout", wrong_if(plant, "dense_decode", lambda inputs: inputs.q.is_contiguous()), strided)
    assert "with contiguous tensors: " in failure.message
    failure = objection("layout", wrong_if(plant, "paged_decode", lambda inputs: inputs.layout == "HND"), paged)
    assert "in the layout HND: " in failure.message


def test_repaging(plant: Any, paged: PagedDecodeCase) -> None:
    """A kernel that knows only one size of pages would pass on it."""
    kernel = wrong_if(plant, "paged_decode", lambda inputs: inputs.block_size != 8)
    assert "on pages of 12 tokens instead of 8: " in objection("repaging", kernel, paged).message


def test_gqa_expansion(plant: Any, dense: DenseDecodeCase) -> None:
    """A kernel whose heads share the wrong keys would pass."""
    kernel = plant(kv_head=lambda head, group: head // group if group == 1 else 0)
    failure = objection("gqa_expansion", kernel, dense)
    assert "with K and V repeated for 4 KV heads instead of 2: " in failure.message


def test_split_count(plant: Any, split: SplitDecodeCase) -> None:
    """A kernel that loses tokens between splits would pass as long as there is one."""
    kernel = wrong_if(plant, "split_decode", lambda inputs: inputs.num_splits > 4)
    assert "in 32 splits: " in objection("split_count", kernel, split).message


def test_split_count_as_an_option(dense: DenseDecodeCase) -> None:
    """Most kernels take the number of splits as an option, and would not be looked at."""
    case = msgspec.structs.replace(dense, seq_lens=(0, 0), options={"num_splits": 2})
    failure = objection("split_count", stores_its_splits, case)
    assert "in 8 splits: " in failure.message


@attnfuzz.kernel("dense_decode", options={"num_splits": (1, 2, 8)})
def stores_its_splits(inputs: Any, *, num_splits: int) -> tuple[Tensor, Tensor]:
    return inputs.out.fill_(num_splits > 2), inputs.lse.fill_(-math.inf)


def test_compose(plant: Any, dense: DenseDecodeCase) -> None:
    """An LSE to base 2 that is declared natural would give other weights wherever results are merged."""
    kernel = plant(lse=lambda scores: scores.logsumexp(0) / math.log(2))
    failure = objection("compose", kernel, dense)
    assert "merged from runs on the first and the last half of its tokens: " in failure.message


def test_compose_has_ranks_without_tokens(plant: Any, dense: DenseDecodeCase) -> None:
    """The state of a rank without tokens would outweigh those of others, where no sequence of the case is empty."""
    kernel = plant(after=lambda inputs, out, lse: (out, lse.masked_fill(inputs.seq_lens[:, None] == 0, 9.0)))
    case = msgspec.structs.replace(dense, seq_lens=(5, 2, 21))
    failure = objection("compose", kernel, case)
    assert "merged from runs of 4 ranks that have one block of its tokens each: " in failure.message


def test_compose_has_tokens_by_turns(plant: Any, dense: DenseDecodeCase) -> None:
    """A kernel that is wrong for the lengths which ranks have of interleaved tokens would pass by itself."""
    kernel = wrong_if(plant, "dense_decode", lambda inputs: 7 in inputs.seq_lens)
    failure = objection("compose", kernel, dense)
    assert "merged from runs of 3 ranks that have every third of its tokens: " in failure.message


def test_compose_leaves_no_rank_empty_that_may_not_be(plant: Any, dense: DenseDecodeCase) -> None:
    """A kernel that takes no empty sequences would be blamed for what it gives for one."""
    supports = attnfuzz.Supports(empty_sequences=False)
    kernel = wrong_if(plant, "dense_decode", lambda inputs: 0 in inputs.seq_lens, supports=supports)
    case = msgspec.structs.replace(dense, seq_lens=(5, 2, 21))
    assert judge(kernel, case, device="cpu", oracles=("compose",), relations=("compose",)).failure is None


def test_compose_needs_an_lse(plant: Any, dense: DenseDecodeCase) -> None:
    """A kernel that returns none would be merged with what it did not return."""
    kernel = plant(supports=attnfuzz.Supports(lse="none"), after=lambda inputs, out, lse: out)
    assert judge(kernel, dense, device="cpu", oracles=("compose",)).failure is None
