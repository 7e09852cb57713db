"""Mistakes about query tokens, planted in a correct kernel, and the words that must name them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.judging.judge import judge
from attnfuzz.kernels.bundled import masked_attention_eager
from attnfuzz.problems.cases import MaskedAttentionCase, PagedAttentionCase
from attnfuzz.problems.masks import Mask
from attnfuzz.problems.recipes import Values
from tests.oracles.conftest import paged_tokens


def test_the_correct_kernel_passes(plant: Any, queries: PagedAttentionCase) -> None:
    """Nothing that the others find would mean anything."""
    assert judge(plant("paged_attention"), queries, device="cpu").failure is None


@pytest.mark.parametrize(
    ("bugs", "words"),
    [
        (
            {"length": lambda n: n + 1 if n == 4 else n},
            "token 4 (page 0, offset 4) of sequence 2, behind the query, takes",
        ),
        ({"length": lambda n: n + 3 if n == 6 else n}, "tokens 6-8 (pages 0-1) of sequence 2, behind the query, take"),
        ({"length": lambda n: n - 1 if n == 4 else n}, "token 3 (page 0, offset 3) of sequence"),
    ],
    ids=["one behind", "three behind", "one short"],
)
@pytest.mark.by_day("one behind", "one short")
def test_which_tokens_a_query_reads(
    bugs: Any, words: str, plant: Any, queries: PagedAttentionCase, failure_of: Any
) -> None:
    """A causal limit that is off would be shown as numbers, or blamed on a neighbour."""
    assert words in failure_of(plant("paged_attention", **bugs), queries, "accuracy").message


def test_a_query_that_is_never_written(plant: Any, queries: PagedAttentionCase, failure_of: Any) -> None:
    """A reader would take the number of the query token for that of a sequence."""

    def leave(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        fresh = torch.empty_like(out)
        fresh[1:] = out[1:]
        return fresh, lse

    failure = failure_of(plant("paged_attention", after=leave), queries)
    assert failure.message == "out[token 0, head 0, dim 0] was never written"
    assert "token 0 of the batch is query 0 of sequence 0 and attends to 4 keys" in failure.details


def test_a_mask_that_is_ignored_in_some_sequences_is_not_taken_for_one_that_begins_elsewhere(failure_of: Any) -> None:
    """Where a table begins would be looked into, which longer sequences bear out no more."""

    @attnfuzz.kernel("masked_attention", supports=masked_attention_eager.declaration.supports)
    def kernel(inputs: Any) -> Any:
        starts, tables = inputs.cu_seqlens_q.tolist(), inputs.mask_indptr.tolist()
        inputs.mask = inputs.mask.clone()
        for seq, (first, end) in enumerate(pairwise(starts)):
            if seq and end - first == 1:
                inputs.mask[tables[seq] : tables[seq + 1]] = True
        return masked_attention_eager.function(inputs)

    case = MaskedAttentionCase(
        num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(1, 1), query_lens=(1, 1), scale=0.25, block_size=1,
        mask=Mask(kind="bits", seqs=((1,),)),
    )  # fmt: skip
    assert "begins where" not in failure_of(kernel, case).message
    wider = msgspec.structs.replace(case, seq_lens=(70, 70), values=Values(keys="normal", values="normal", seed=1))
    assert "the table of the mask begins" not in failure_of(kernel, wider).message


def test_a_maximum_of_hidden_keys_is_told(failure_of: Any) -> None:
    """Weights that become 0 beside a key that is masked too late would be told to begin at a finite maximum."""

    @attnfuzz.kernel("masked_attention", supports=attnfuzz.Supports(layouts=("NHD",)))
    def kernel(inputs: Any) -> Any:
        out, lse = torch.zeros_like(inputs.out), torch.zeros_like(inputs.lse)
        starts, tables = inputs.cu_seqlens_q.tolist(), inputs.mask_indptr.tolist()
        lens = inputs.seq_lens.tolist()
        for row in range(starts[-1]):
            seq = max(i for i, start in enumerate(starts[:-1]) if start <= row)
            n = lens[seq]
            k, v = (part.float() for part in paged_tokens(inputs, seq, n, 0))
            first = tables[seq] + (row - starts[seq]) * n
            scores = inputs.scale * (k @ inputs.q[row, 0].float())
            weights = (scores - scores.max()).exp() * inputs.mask[first : first + n]
            out[row, 0] = (weights @ v) / weights.sum().clamp(min=1e-37)
            lse[row, 0] = scores.max() + weights.sum().log()
        return out, lse

    case = MaskedAttentionCase(
        num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(6,), query_lens=(6,), scale=0.25, block_size=4,
        values=Values(keys="negative", values="normal", logit_exponent=8, seed=1),
    )  # fmt: skip
    failure = failure_of(kernel, case)
    assert "maximum_of_hidden_keys" in {one.mistake for one in failure.causes}
    assert "the maximum is taken of hidden keys, too" in failure.message


def test_memory_that_is_dead_for_a_query(plant: Any, queries: PagedAttentionCase, failure_of: Any) -> None:
    """The sequence of the query decides what is dead, not its number in the batch."""
    kernel = plant("paged_attention", length=lambda n: n + 1 if n == 11 else n)
    failure = failure_of(kernel, queries, "dead_memory")
    assert any(line.startswith("sequence 2 (length 11) has no token in: ") for line in failure.details)


def test_a_query_that_is_found_by_its_sequence(plant: Any, queries: PagedAttentionCase, failure_of: Any) -> None:
    """The same wrong index leads one row back here and two there, and would be a bug without a cause in each case."""

    def by_sequence(inputs: Any) -> None:
        starts, q = inputs.cu_seqlens_q.tolist(), inputs.q.clone()
        for seq, start in enumerate(starts[:-1]):
            if starts[seq + 1] - start == 1:
                q[start] = inputs.q[seq]
        inputs.q = q

    case = msgspec.structs.replace(queries, seq_lens=(4, 6, 5), query_lens=(3, 1, 1))
    failure = failure_of(plant("paged_attention", before=by_sequence), case)
    assert failure.cause == "another_query"
    assert "is read" in failure.message


def test_a_tile_that_only_later_queries_see_is_told(plant: Any, queries: PagedAttentionCase, failure_of: Any) -> None:
    """A loop that ends with what the first query of a block sees would be told as a token that is dropped."""

    def tokens(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
        starts = inputs.cu_seqlens_q.tolist()
        context = int(inputs.seq_lens[seq]) - (starts[seq + 1] - starts[seq])
        first = context + (n - 1 - context) // 8 * 8
        return paged_tokens(inputs, seq, min(n, first // 16 * 16 + 16), kv_head)

    case = msgspec.structs.replace(queries, seq_lens=(17,), query_lens=(2,), block_size=32, values=Values())
    failure = failure_of(plant("paged_attention", tokens=tokens), case)
    assert failure.message.endswith(
        "the query sees the first 16 keys only, up to the tile of 16 in which the first query of its block lies"
    )


def test_a_query_that_is_read_from_a_padding_row(plant: Any, queries: PagedAttentionCase, failure_of: Any) -> None:
    """The wrong row would be one bug where it holds a query, and another without a cause where it holds none."""

    def by_sequence(inputs: Any) -> None:
        starts, q = inputs.cu_seqlens_q.tolist(), inputs.q.clone()
        for seq, start in enumerate(starts[:-1]):
            if starts[seq + 1] - start == 1:
                q[start] = inputs.q[min(seq, len(q) - 1)]
        inputs.q = q

    case = msgspec.structs.replace(queries, seq_lens=(4, 6), query_lens=(0, 1), padding_tokens=1)
    failure = failure_of(plant("paged_attention", before=by_sequence), case)
    assert (failure.oracle, failure.cause) == ("dead_memory", "another_query")
    assert failure.message.endswith("row 1 of q is read, which holds no query")


def test_sequences_without_a_query_may_be_more_than_there_are_rows(
    plant: Any, queries: PagedAttentionCase, failure_of: Any
) -> None:
    """A rule that takes a sequence's number for a row's would end what looks for a cause."""
    case = msgspec.structs.replace(queries, seq_lens=(1, 3, 5), query_lens=(0, 0, 1))
    failure = failure_of(plant("paged_attention", average=lambda w, v: 1.25 * (w @ v)), case)
    assert failure.message.endswith("the output is 1.25 x the right one")
