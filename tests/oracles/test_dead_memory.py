"""Reads of memory that no sequence owns."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from attnfuzz.explaining.row import AttentionRow
from attnfuzz.explaining.tokens import past_the_end
from attnfuzz.judging.judge import judge, judge_batch
from attnfuzz.mistake import PAST_THE_END, WITHOUT_WEIGHT
from attnfuzz.problems.cases import Case, DenseDecodeCase, MergeStatesCase, PagedDecodeCase
from attnfuzz.problems.supports import Supports
from attnfuzz.values import LogicalAttention


def one_more(n: int) -> int:
    return n + 1 if n else 0


def test_row_past_the_end_of_a_dense_sequence(plant: Any, dense: Case, failure_of: Any) -> None:
    """A token too many would not be noticed where the row behind the end holds a harmless number."""
    failure = failure_of(plant(length=one_more), dense)
    assert (failure.oracle, failure.kind) == ("dead_memory", "out")
    assert "1 token past the end of the sequence takes weight (read from memory that holds no token)" in failure.message
    assert "sequence 0 has no token in rows 5 and up of k and v (its length is 5)" in failure.details


def test_a_number_of_tokens_that_the_result_does_not_show_is_not_told() -> None:
    """Of a result that is all dead memory's, the report would count 512 tokens that nobody has read."""
    case = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=8, seq_lens=(1,), scale=1.0)
    key, query = torch.zeros(1, 1, 8, dtype=torch.float64), torch.full((1, 1, 8), 40.0, dtype=torch.float64)
    row = AttentionRow(
        case=case,
        values=LogicalAttention(query, key, key, (0, 1)),
        row=0,
        head=0,
        got=torch.ones(8, dtype=torch.float64),
        got_lse=None,
        bound=torch.full((8,), 1e-3, dtype=torch.float64),
        lse_bound=0.0,
        poison=1.0,
    )
    of_memory = list(past_the_end(row))[1]
    assert torch.allclose(of_memory.out, torch.ones_like(of_memory.out))
    assert of_memory.words(len(of_memory.out) - 1).startswith(
        "512 or more tokens past the end of the sequence take weight"
    )
    assert any(of_memory.words(i).startswith("2 tokens past the end") for i in range(len(of_memory.out)))


def test_tail_of_a_page(plant: Any, paged: PagedDecodeCase, failure_of: Any) -> None:
    """A token too many would not be noticed in the unused rest of a page."""
    failure = failure_of(plant("paged_decode", length=one_more), paged)
    assert (failure.oracle, failure.kind) == ("dead_memory", "out")
    assert "offsets 5-7 of its page 0" in failure.details[1]


def test_past_the_end_of_a_shared_page(plant: Any, paged: PagedDecodeCase, failure_of: Any) -> None:
    """Another sequence's token is no dead memory: the wrong number would be told without what was read."""
    pages = msgspec.structs.replace(paged.pages, shared_blocks=1)
    case = msgspec.structs.replace(paged, seq_lens=(5, 8), block_size=8, pages=pages)
    failure = failure_of(plant("paged_decode", length=lambda n: n + (n == 5)), case)
    assert failure.oracle == "accuracy"
    words = "1 token past the end of the sequence takes weight (where its row of the block table leads)"
    assert (PAST_THE_END, words) in {(one.mistake, one.words) for one in failure.causes}


def test_masked_scores_but_unmasked_values(plant: Any, dense: DenseDecodeCase, failure_of: Any) -> None:
    """0 * NaN: a kernel that masks K and not V would pass as long as dead rows hold finite numbers."""

    def whole_rows(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
        dead = (torch.arange(inputs.k.shape[1]) >= n)[:, None]
        return inputs.k[seq, :, kv_head].float().masked_fill(dead, -1e9 / 8), inputs.v[seq, :, kv_head]

    case = msgspec.structs.replace(dense, values=msgspec.structs.replace(dense.values, keys="equal"))
    kernel = plant(tokens=whole_rows, score=lambda scores: scores.where(scores.abs() < 1e3, -torch.inf))
    failure = failure_of(kernel, case)
    assert (failure.oracle, failure.kind) == ("dead_memory", "out")
    assert "where that holds NaN" in failure.message


@pytest.mark.parametrize("weight", [0.0, 3e-5])
def test_whether_dead_memory_has_weight_is_tried(
    weight: float, plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """A maintainer would look for tokens that take weight, where 0 x NaN is NaN, or the other way round."""

    def add_a_dead_row(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        out[0, 0] += weight * inputs.v[0, 5, 0]
        return out, lse

    failure = failure_of(plant(after=add_a_dead_row), msgspec.structs.replace(dense, dtype="float32"))
    assert failure.oracle == "dead_memory"
    assert (failure.cause == WITHOUT_WEIGHT) is (weight == 0.0)
    assert failure.message.endswith("mask the load") is (weight == 0.0)


def test_no_mask_is_proposed_where_a_gap_between_elements_is_read(
    plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """Whose kernel ignores a stride of q would look for a load without a mask: equal keys hide what was read."""

    def take_q_for_contiguous(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        read = torch.as_strided(inputs.q, inputs.q.shape, torch.empty(inputs.q.shape, device="meta").stride())
        return out + (read * 0).to(out.dtype), lse

    case = msgspec.structs.replace(dense, strides={"q": "outer_gap"})
    failure = failure_of(plant(after=take_q_for_contiguous), case)
    assert failure.oracle == "dead_memory"
    assert failure.message.endswith("with small numbers the result is right")


def test_empty_side_of_a_merge(plant: Any, states: MergeStatesCase, failure_of: Any) -> None:
    """The output of an empty state could be multiplied by a weight of 0 and still bring in its NaN."""

    def average_both(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        return out + inputs.prefix_output * 0 + inputs.suffix_output * 0, lse

    anything = Supports(empty_state_outputs="anything")
    failure = failure_of(plant("merge_states", supports=anything, after=average_both), states)
    assert (failure.oracle, failure.kind) == ("dead_memory", "output")
    assert failure.details[1].startswith("what must not matter here: outputs of states whose LSE is -inf or +inf")


def test_empty_side_of_a_merge_is_zeros_unless_declared(plant: Any, states: MergeStatesCase) -> None:
    """A textbook merge, right on what engines write for an empty state, would be full of NaN."""

    def average_both(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        return out + inputs.prefix_output * 0 + inputs.suffix_output * 0, lse

    kernel = plant("merge_states", after=average_both)
    for verdict in (judge(kernel, states, device="cpu"), *judge_batch(kernel, [states], device="cpu")):
        assert verdict.failure is None


def test_page_that_an_unused_table_entry_names(plant: Any, paged: PagedDecodeCase, failure_of: Any) -> None:
    """Following an unused block-table entry to another page would go unnoticed."""

    def follow(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        out[0] += inputs.v_cache[inputs.block_table[0, 1].long()][5:].sum() * 0
        return out, lse

    case = msgspec.structs.replace(paged, pages=msgspec.structs.replace(paged.pages, order="identity"))
    failure = failure_of(plant("paged_decode", after=follow), case)
    assert failure.oracle == "dead_memory"


def test_space_between_strided_elements(plant: Any, dense: Case, failure_of: Any) -> None:
    """A kernel that takes a padded query for contiguous would read the gap unnoticed."""

    def read_flat(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        flat = inputs.q.as_strided((96,), (1,), inputs.q.storage_offset())
        return out + flat.view(3, 4, 8) * 0, lse

    case = msgspec.structs.replace(dense, strides={"q": "padded_rows"})
    assert failure_of(plant(after=read_flat), case).oracle == "dead_memory"


def test_dead_memory_that_changes_nothing_is_no_failure(plant: Any, dense: Case) -> None:
    """Reading past the end and discarding what was read would be reported."""

    def read_and_discard(inputs: Any) -> None:
        inputs.k.sum()

    assert judge(plant(before=read_and_discard), dense, device="cpu").failure is None
