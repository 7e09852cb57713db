"""Mistakes in variants are named, and right rows are not accused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.declaration import load_kernels
from attnfuzz.explaining.diagnose import given_by_all
from attnfuzz.explaining.explanation import in_words
from attnfuzz.explaining.low_precision import roundings
from attnfuzz.explaining.row import AttentionRow
from attnfuzz.inputs.reference import row_weights
from attnfuzz.problems.cases import DenseDecodeCase, MaskedAttentionCase, PagedAttentionCase, PagedDecodeCase
from attnfuzz.problems.masks import Mask
from attnfuzz.problems.recipes import Values
from attnfuzz.problems.variants import Variant
from attnfuzz.values import attention_values


def told(row: AttentionRow) -> set[str]:
    """All that would give this row."""
    return {one.words for one in given_by_all([row])}


def case_with(**fields: Any) -> PagedDecodeCase:
    return PagedDecodeCase(
        num_q_heads=4,
        num_kv_heads=2,
        head_size=16,
        seq_lens=(9,),
        scale=0.5,
        block_size=4,
        values=Values(keys="normal", values="normal", seed=5),
        variant=Variant(**fields),
    )


def row_that_got(case: PagedDecodeCase, wrong: PagedDecodeCase, *, head: int = 1, as_head: int = 1) -> AttentionRow:
    """The row of `case` for a kernel that computed `wrong`, with the numbers of query head `as_head`."""
    values = attention_values(case)
    k, v = (part[:, head // 2].double() for part in values.sequence(0))
    weights, lse = row_weights(wrong, 0, as_head, wrong.scale * (k @ values.q[0, head].double()))
    small = torch.full((16,), 1e-6, dtype=torch.float64)
    got = weights @ v
    return AttentionRow(
        case=case, values=values, row=0, head=head, got=got, got_lse=float(lse), bound=small, lse_bound=1e-7, poison=0.0
    )


@pytest.mark.parametrize(
    ("asked", "computed", "words"),
    [
        ({"window": 4}, {}, "the window is left out"),
        ({"window": 4}, {"window": 5}, "the window is one key too long"),
        ({"window": 4}, {"window": 3}, "the window is one key too short"),
        ({"soft_cap": 1.0}, {}, "the soft cap is left out"),
        ({"alibi": "scattered"}, {}, "ALiBi is left out"),
        ({"sinks": "level"}, {}, "the sink is left out"),
        ({"window": 4, "sinks": "level"}, {"window": 4}, "the sink is left out"),
    ],
    ids=str,
)
def test_a_variant_that_is_left_out_or_off_by_one_is_named(
    asked: dict[str, Any], computed: dict[str, Any], words: str
) -> None:
    """A reader would be told a wrong number and have to guess which variant it comes from."""
    assert words in told(row_that_got(case_with(**asked), case_with(**computed)))


def test_another_heads_numbers_are_named() -> None:
    """Slopes indexed by the KV head, the usual slip, would not be told from a wrong formula."""
    case = case_with(alibi="scattered")
    found = given_by_all([row_that_got(case, case, head=3, as_head=1)])
    assert ("the slope is that of query head 1", "the KV head's number") in {(one.words, one.rule) for one in found}


def test_another_heads_slope_is_named_where_several_rules_lead_to_that_head() -> None:
    """Of two heads, head 0 is also the one before and that of the KV head's number: none of it would be told."""
    case = msgspec.structs.replace(case_with(alibi="scattered"), num_q_heads=2, num_kv_heads=1)
    causes = given_by_all([row_that_got(case, case, head=1, as_head=0)])
    assert len({one.way for one in causes}) > 1
    assert in_words(causes) == "the slope is that of query head 0"


def test_a_sink_that_passes_through_the_soft_cap_is_named() -> None:
    """Where the sink is a column of the scores that are capped, all weights would be told to be some constant off."""
    case = case_with(sinks="level", soft_cap=0.5)
    row = row_that_got(case, case)
    capped = 0.5 * torch.tanh(row.sink / 0.5)
    out, lse = row.averaged(row.log_weights, sink=float(capped))
    assert "the soft cap is applied to the sink, too" in told(replace(row, got=out, got_lse=lse))


def test_a_soft_cap_in_base_2_is_named() -> None:
    """Kernels multiply scores by log2(e) for exp2, and where the cap comes behind that it would be a wrong number."""
    case = case_with(soft_cap=1.0)
    other = math.log2(math.e)
    wrong = row_that_got(case, case_with(soft_cap=1.0 / other))
    assert "the soft cap is applied to scores that are already multiplied by log2(e)" in told(wrong)


def test_a_sink_that_each_split_adds_is_named() -> None:
    """The number of times would have to be worked out by hand."""
    case = case_with(sinks="level")
    row = row_that_got(case, case)
    weights, lse = row_weights(case, 0, 1, row.scores)
    larger = 1 + 2 * (1 - float(weights.sum()))
    wrong = replace(row, got=weights @ row.v / larger, got_lse=float(lse) + math.log(larger))
    assert "the sink is counted 3 times" in told(wrong)


def test_a_score_is_not_made_up_for_an_lse_that_the_output_says_nothing_of() -> None:
    """A sink that is counted often would be told as keys with whatever score gives the same log-sum-exp."""
    case = case_with(sinks="level")
    row = row_that_got(case, case)
    large = replace(row, got=row.expected, got_lse=row.lse + math.log(9), bound=torch.full_like(row.bound, 1e3))
    assert not any("finite score" in words for words in told(large))


def test_an_lse_without_the_sink_is_named() -> None:
    """Libraries disagree on it, so it is the first thing to ask where the output is right."""
    case = case_with(sinks="level")
    right, without = row_that_got(case, case), row_that_got(case, case_with())
    assert "the LSE leaves out the sink" in told(replace(right, got_lse=without.got_lse))


def test_a_sum_that_begins_with_the_sink_and_is_not_rescaled_is_named() -> None:
    """Without a sink it was told, and with one it was another bug, of weights that are some constant off."""
    row = row_that_got(case_with(sinks="level"), case_with(sinks="level"))
    assert row.log_weights.max() > row.sink
    total = 1 + (row.log_weights - row.log_weights.max()).exp().sum()
    out = (row.log_weights - row.log_weights.max()).exp() @ row.v / total
    words = "the sum of the weights, which begins with that of the sink, is not rescaled when the maximum grows"
    assert words in told(replace(row, got=out, got_lse=float(row.log_weights.max() + total.log())))
    assert words not in told(row)


def test_an_output_without_the_sink_is_told_in_one_way() -> None:
    """A reader would be told two mistakes, one or the other, which are one."""
    case = case_with(sinks="level")
    right, without = row_that_got(case, case), row_that_got(case, case_with())
    of_sink = {words for words in told(replace(right, got=without.got)) if "sink" in words}
    assert of_sink == {"the sink is left out, for out alone: lse is right"}


def test_an_lse_without_the_sink_is_named_where_scores_are_low() -> None:
    """As float32 keeps it, an LSE of some thousand is off by more than a right one near 0 may be."""
    values = Values(keys="negative", values="normal", logit_exponent=6)
    case, bare = (msgspec.structs.replace(one, values=values) for one in (case_with(sinks="level"), case_with()))
    right, without = row_that_got(case, case), row_that_got(bare, bare)
    kept = float(torch.tensor(without.got_lse, dtype=torch.float32))
    assert kept < -1000
    assert "the LSE leaves out the sink" in told(replace(right, got_lse=kept))


def test_alibi_that_counts_from_the_first_key_is_named() -> None:
    """FlashAttention 2 shifts a row's scores by a constant, which in the smallest case looks like a wrong sign."""
    case = case_with(alibi="scattered")
    row = row_that_got(case, case)
    slope = case.variant.per_head_numbers(4, case.values.seed)["alibi_slopes"][1]
    found = told(replace(row, got_lse=row.lse + 8 * slope))
    assert "ALiBi counts from the first key, not from the query" in found


def test_a_sink_that_overflows_is_named() -> None:
    """The log-sum-exp would be infinite for no reason; SGLang 0.5.23 subtracts the maximum of the scores alone."""
    case = case_with(sinks="level")
    case = msgspec.structs.replace(case, scale=64.0, values=Values(keys="negative", logit_exponent=3))
    row = row_that_got(case, case)
    found = told(replace(row, got_lse=math.inf))
    assert "the sink is not in the maximum that is subtracted, and overflows" in found


def test_plain_mistakes_are_replayed_beside_a_variant() -> None:
    """A capped row would be explained with a scale that happens to fit, or a dropped token not at all."""
    case = case_with(soft_cap=1.0)
    row = row_that_got(case, case)
    assert told(replace(row, got=row.got * 3)) == {"the output is 3.0 x the right one"}
    out, lse = row.average(row.log_weights[:-1], row.v[:-1])
    assert told(replace(row, got=out, got_lse=float(lse))) == {"token 8 (page 2, offset 0) of sequence 0 is dropped"}


@attnfuzz.kernel(
    "paged_decode",
    supports=attnfuzz.Supports(variants=("window",), lse="none", strides="contiguous", layouts=("NHD",)),
)
def skips_a_partial_tile(inputs: Any) -> torch.Tensor:
    """Begins with the first tile of 16 keys that lies in the window with all of its keys."""
    out = torch.zeros_like(inputs.q)
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        first = -(-max(length - (inputs.window or length), 0) // 16) * 16
        pages = inputs.block_table[seq, : -(-length // inputs.block_size)].long()
        k, v = (one[pages].flatten(0, 1)[first:length].double() for one in (inputs.k_cache, inputs.v_cache))
        if first < length:
            k, v = (one.repeat_interleave(inputs.q.shape[1] // one.shape[1], 1) for one in (k, v))
            weights = torch.einsum("hd,thd->ht", inputs.q[seq].double(), k).mul(inputs.scale).softmax(-1)
            out[seq] = torch.einsum("ht,thd->hd", weights, v).to(out.dtype)
    return out


def test_a_tile_that_a_window_begins_in_is_named_where_nothing_else_is_seen(failure_of: Any) -> None:
    """Of a window of one key nothing is left, which a hundred mistakes give: none would be told, or a wrong one."""
    case = msgspec.structs.replace(case_with(window=1), seq_lens=(2,), num_q_heads=1, num_kv_heads=1, values=Values())
    message = failure_of(skips_a_partial_tile, case).message
    assert message.endswith(
        "token 1 (page 0, offset 1) of sequence 0 is dropped (the first, partial tile of 16 of the window)"
    )


def decoded(inputs: Any, begins: Callable[[int], int], position: Callable[[Tensor, int], Tensor]) -> None:
    """A decode whose window begins and whose ALiBi counts as it is told to, of a sequence's length."""
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        pages = inputs.block_table[seq, : -(-length // inputs.block_size)].long()
        k, v = (one[pages].flatten(0, 1)[:length].double() for one in (inputs.k_cache, inputs.v_cache))
        k, v = (one.repeat_interleave(inputs.q.shape[1] // one.shape[1], 1) for one in (k, v))
        scores = torch.einsum("hd,thd->ht", inputs.q[seq].double(), k) * inputs.scale
        keys = torch.arange(length)
        if inputs.alibi_slopes is not None:
            scores += inputs.alibi_slopes.double()[:, None] * position(keys, length - 1)
        if inputs.window is not None:
            scores[:, : max(begins(length), 0)] = -torch.inf
        lse = scores.logsumexp(-1)
        weights = (scores - lse.nan_to_num(neginf=0.0)[:, None]).exp()
        inputs.out[seq], inputs.lse[seq] = torch.einsum("ht,thd->hd", weights, v).to(inputs.out.dtype), lse


PLAIN = attnfuzz.Supports(variants=("window", "alibi"), strides="contiguous", layouts=("NHD",))


@pytest.mark.parametrize("off", [0, 1])
def test_alibi_that_counts_within_tiles_is_named(off: int, failure_of: Any) -> None:
    """It would be taken for ALiBi that counts from the first key, which leaves the weights right, as it does not."""

    @attnfuzz.kernel("paged_decode", supports=PLAIN)
    def within_tiles(inputs: Any) -> None:
        decoded(inputs, lambda length: length - inputs.window, lambda t, last: t % 32 - (last % 32 if off else last))

    values = Values(keys="equal", values="positions")
    case = msgspec.structs.replace(
        case_with(alibi="geometric"), seq_lens=(33,), num_q_heads=1, num_kv_heads=1, block_size=64, values=values
    )
    words = "ALiBi counts each key from the beginning of its tile of 32"
    assert failure_of(within_tiles, case).message.endswith(words + (", and the query, too" if off else ""))


@pytest.mark.parametrize(("lengths", "which"), [((1, 2), ""), ((2, 9, 7), " (the longest sequence)")])
def test_a_window_of_another_sequence_is_named(lengths: tuple[int, ...], which: str, failure_of: Any) -> None:
    """A shorter sequence would be told to have lost its keys, without a word on whose length they were counted from."""

    @attnfuzz.kernel("paged_decode", supports=PLAIN)
    def of_the_longest(inputs: Any) -> None:
        longest = int(inputs.seq_lens.max())
        decoded(inputs, lambda length: longest - inputs.window, lambda t, last: t - last)

    case = msgspec.structs.replace(case_with(window=1), seq_lens=lengths, num_q_heads=1, num_kv_heads=1, block_size=2)
    words = f"the window counts from the end of sequence 1, not from that of each{which}"
    assert failure_of(of_the_longest, case).message.endswith(words)


MASKED = MaskedAttentionCase(
    num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(1, 2), query_lens=(1, 2), scale=0.25, block_size=16
)


def test_a_mask_of_which_one_row_is_inverted_is_named(failure_of: Any) -> None:
    """It would be told as a key that is dropped in one case, and as one too many in the next."""
    (right,) = load_kernels("masked_attention_eager")

    @attnfuzz.kernel("masked_attention", supports=attnfuzz.Supports(strides="contiguous"))
    def last_row_inverted(inputs: Any) -> Any:
        inputs.mask = inputs.mask.clone()
        counts = inputs.cu_seqlens_q.diff().tolist()
        for start, count, length in zip(inputs.mask_indptr.tolist(), counts, inputs.seq_lens.tolist(), strict=False):
            if count > 1:
                rows = inputs.mask[start : start + count * length].view(count, length)
                rows[-1] = ~rows[-1].bool()
        return right.function(inputs)

    case = msgspec.structs.replace(MASKED, seq_lens=(1, 3))
    assert failure_of(last_row_inverted, case).message.endswith("the last row of the mask is inverted")


def test_a_mask_that_is_read_elsewhere_is_told_beside_rows_of_which_nothing_follows(failure_of: Any) -> None:
    """It would be told as a mistake that is made at times, where some rows are right since no mask lies there."""
    (right,) = load_kernels("masked_attention_eager")

    @attnfuzz.kernel("masked_attention", supports=attnfuzz.Supports(strides="contiguous"))
    def at_twice_its_offset(inputs: Any) -> Any:
        inputs.mask = torch.cat((inputs.mask, torch.ones_like(inputs.mask)))
        inputs.mask_indptr = 2 * inputs.mask_indptr
        sizes = inputs.cu_seqlens_q.diff() * inputs.seq_lens
        starts = inputs.mask_indptr[:-1].tolist()
        tables = [inputs.mask[start : start + size] for start, size in zip(starts, sizes.tolist(), strict=True)]
        inputs.mask = torch.cat(tables)
        inputs.mask_indptr = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
        return right.function(inputs)

    case = MASKED
    hidden = msgspec.structs.replace(case, seq_lens=(1, 1), query_lens=(1, 1), mask=Mask(kind="bits", seqs=((1,),)))
    for one in (case, hidden):
        assert failure_of(at_twice_its_offset, one).message.endswith("the table of the mask begins at twice its offset")


@pytest.mark.parametrize(
    ("up", "words"),
    [
        (0, "the table of the mask begins at a multiple of 8 entries, as where so many lie in a byte"),
        (7, "the table of the mask begins where each one before it takes a multiple of 8 entries"),
    ],
)
def test_a_mask_whose_offset_is_one_of_bytes_is_named(up: int, words: str, failure_of: Any) -> None:
    """A reader would see weights on other keys, and would not think of the bits that a mask is packed to."""
    (right,) = load_kernels("masked_attention_eager")

    @attnfuzz.kernel("masked_attention", supports=attnfuzz.Supports(strides="contiguous"))
    def at_a_byte(inputs: Any) -> Any:
        sizes = (inputs.cu_seqlens_q.diff() * inputs.seq_lens).tolist()
        mask = torch.nn.functional.pad(inputs.mask, (0, 16 * len(sizes)), value=True)
        starts = inputs.mask_indptr[:-1].tolist()
        if up:
            starts = list(itertools.accumulate(((size + 7) // 8 * 8 for size in sizes[:-1]), initial=0))
        inputs.mask = torch.cat([mask[start // 8 * 8 :][:size] for start, size in zip(starts, sizes, strict=True)])
        return right.function(inputs)

    values = Values(keys="normal", values="normal", seed=4)
    case = msgspec.structs.replace(MASKED, seq_lens=(6, 7), query_lens=(2, 3), values=values)
    assert words in failure_of(at_a_byte, case).message


@pytest.mark.parametrize(("size", "unit"), [(16, "tile of 16"), (0, "page")])
def test_a_window_that_is_rounded_up_is_named(size: int, unit: str, failure_of: Any) -> None:
    """It would be told to be left out, where a multiple of some size is longer than a short sequence."""

    @attnfuzz.kernel("paged_decode", supports=PLAIN)
    def rounded_up(inputs: Any) -> None:
        step, window = size or inputs.block_size, inputs.window or 0
        decoded(inputs, lambda length: length - -(-window // step) * step, lambda t, last: t - last)

    case = msgspec.structs.replace(
        case_with(window=1), seq_lens=(2,), num_q_heads=1, num_kv_heads=1, block_size=2, values=Values()
    )
    assert failure_of(rounded_up, case).message.endswith(f"; the window is rounded up to a multiple of a {unit}")


def test_a_mistake_of_one_head_is_not_told_of_all(failure_of: Any) -> None:
    """Of a case with one head, "the scale is left out" would be said of all heads of any case."""
    (right,) = load_kernels("paged_eager")

    @attnfuzz.kernel("paged_decode", supports=PLAIN)
    def last_head_unscaled(inputs: Any) -> Any:
        inputs.q = inputs.q.clone()
        inputs.q[:, -1] /= inputs.scale
        return right.function(inputs)

    values = Values(keys="normal", values="normal", seed=5)
    case = msgspec.structs.replace(case_with(), num_q_heads=1, num_kv_heads=1, values=values)
    assert failure_of(last_head_unscaled, case).message.endswith("; the scale is left out, though not always")


WINDOW = PagedAttentionCase(
    num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(30,), query_lens=(7,), scale=0.25, block_size=16,
    variant=Variant(window=9), values=Values(keys="normal", values="normal", seed=5),
)  # fmt: skip
SMALLEST_WINDOW = msgspec.structs.replace(
    WINDOW, seq_lens=(2,), query_lens=(2,), block_size=2, variant=Variant(window=1), values=Values()
)


@pytest.mark.parametrize(
    ("which", "block", "case"), [("last", 4, WINDOW), ("first", 4, WINDOW), ("first", 16, SMALLEST_WINDOW)]
)
def test_a_window_that_counts_from_a_block_of_queries_is_named(
    which: str, block: int, case: PagedAttentionCase, failure_of: Any
) -> None:
    """A row without keys, or with all of them, would not say that a tile's one limit serves all of its queries."""
    (right,) = load_kernels("paged_attention_eager")

    @attnfuzz.kernel("paged_attention", supports=attnfuzz.Supports(strides="contiguous", variants=("window",)))
    def by_blocks(inputs: Any) -> Any:
        if inputs.window is None:
            return right.function(inputs)
        out, lse, window = torch.zeros_like(inputs.out), torch.full_like(inputs.lse, -torch.inf), inputs.window
        for start, end in itertools.pairwise(inputs.cu_seqlens_q.tolist()):
            for row in range(start, end):
                number = row - start
                inputs.window = window - (block - 1 - number % block if which == "last" else -(number % block))
                if inputs.window > 0:
                    other, of_other = right.function(inputs)
                    out[row], lse[row] = other[row], of_other[row]
        return out, lse

    words = f"; the window counts from the {which} query of a block of {block}, not from each"
    assert words in failure_of(by_blocks, case).message


def test_a_rule_about_the_last_token_is_not_told_of_padding(failure_of: Any) -> None:
    """The last token would be told to be dropped in any case, where as many are as there are rows of padding."""
    (right,) = load_kernels("paged_attention_eager")

    @attnfuzz.kernel("paged_attention", supports=attnfuzz.Supports(strides="contiguous"))
    def padding_is_queries(inputs: Any) -> Any:
        padding = len(inputs.q) - int(inputs.cu_seqlens_q[-1])
        inputs.seq_lens = inputs.seq_lens.clone()
        inputs.seq_lens[-1] -= padding
        return right.function(inputs)

    case = msgspec.structs.replace(
        WINDOW, seq_lens=(4,), query_lens=(1,), padding_tokens=1, variant=Variant(), values=Values()
    )
    words = "; the query sees the first 3 keys only, "
    words += "its position is computed with rows of padding as queries of its sequence"
    assert failure_of(padding_is_queries, case).message.endswith(words)


def test_a_position_by_the_longest_query_is_named(failure_of: Any) -> None:
    """A shorter prompt's query that sees no key would be told to have lost its last token."""
    (right,) = load_kernels("paged_attention_eager")

    @attnfuzz.kernel("paged_attention", supports=attnfuzz.Supports(strides="contiguous"))
    def by_the_longest(inputs: Any) -> Any:
        inputs.seq_lens = inputs.seq_lens - (int(inputs.cu_seqlens_q.diff().max()) - inputs.cu_seqlens_q.diff()).int()
        return right.function(inputs)

    case = msgspec.structs.replace(WINDOW, seq_lens=(4, 6, 5), query_lens=(1, 3, 2), variant=Variant(), values=Values())
    words = "; the query sees the first 2 keys only, its position is computed with the query length of the longest"
    assert failure_of(by_the_longest, case).message.endswith(words)


def test_a_log_sum_exp_that_is_taken_to_be_0_is_named(failure_of: Any) -> None:
    """All weights would be some number times the right ones, whose logarithm a reader does not see at once."""

    @attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(strides="contiguous", empty_sequences=False))
    def exponentials(inputs: Any) -> Any:
        out, group = torch.empty_like(inputs.out), inputs.q.shape[1] // inputs.k.shape[2]
        for seq, length in enumerate(inputs.seq_lens.tolist()):
            k, v = (part[seq, :length].double().repeat_interleave(group, 1) for part in (inputs.k, inputs.v))
            scores = inputs.scale * torch.einsum("hd,thd->ht", inputs.q[seq].double(), k)
            out[seq] = torch.einsum("ht,thd->hd", scores.exp(), v)
        return out, torch.zeros_like(inputs.lse)

    case = DenseDecodeCase(
        num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(3,), scale=0.25,
        values=Values(keys="normal", values="normal", seed=5),
    )  # fmt: skip
    words = "values are multiplied with exp(score), as if the log-sum-exp were 0"
    assert words in failure_of(exponentials, case).message


def test_a_mask_that_is_applied_to_new_tokens_alone_is_not_told_as_none(failure_of: Any) -> None:
    """A reader would look for a mask that is never read, where that of a tree of drafts is read and the rest is not."""
    (right,) = load_kernels("masked_attention_eager")

    @attnfuzz.kernel("masked_attention", supports=attnfuzz.Supports(strides="contiguous"))
    def without_the_context(inputs: Any) -> Any:
        inputs.mask = inputs.mask.clone()
        counts = inputs.cu_seqlens_q.diff().tolist()
        for start, count, length in zip(inputs.mask_indptr.tolist(), counts, inputs.seq_lens.tolist(), strict=False):
            inputs.mask[start : start + count * length].view(count, length)[:, : length - count] = True
        return right.function(inputs)

    values = Values(keys="normal", values="normal", seed=4)
    fields: dict[str, Any] = {"seq_lens": (9,), "query_lens": (3,), "values": values}
    fields["mask"] = Mask(kind="bits", seqs=((3, 5, 6),))
    message = failure_of(without_the_context, msgspec.structs.replace(MASKED, **fields)).message
    assert message.endswith("the mask is not applied to keys before the first query token's")


def test_alibi_that_counts_from_the_last_query_token_is_named(failure_of: Any) -> None:
    """Outputs are right then, and a log-sum-exp of the smallest case would be told as one key too many."""
    (right,) = load_kernels("paged_attention_eager")

    @attnfuzz.kernel("paged_attention", supports=attnfuzz.Supports(strides="contiguous", variants=("alibi",)))
    def from_the_last(inputs: Any) -> Any:
        out, lse = right.function(inputs)
        starts = inputs.cu_seqlens_q.tolist()
        for first, end in itertools.pairwise(starts):
            behind = torch.arange(end - first - 1, -1, -1, dtype=torch.float32)
            lse[first:end] -= behind[:, None] * inputs.alibi_slopes
        return out, lse

    case = PagedAttentionCase(
        num_q_heads=2, num_kv_heads=1, head_size=16, seq_lens=(2,), query_lens=(2,), scale=0.25, block_size=16,
        variant=Variant(alibi="scattered"), values=Values(keys="normal", values="normal", seed=5),
    )  # fmt: skip
    assert "; ALiBi counts from the last query token, not from each" in failure_of(from_the_last, case).message


def test_a_query_is_not_converted_to_its_own_dtype() -> None:
    """K and V of 8 bits in q's dtype, which a kernel may declare, would be two roundings of which neither is told."""
    case = case_with()
    made = roundings(row_that_got(case, case), one_copy=True, causes={"converted"})
    names = {one.name for one in made if one.name.endswith(f" {case.dtype}")}
    assert names == {f"K to {case.dtype}", f"V to {case.dtype}", f"K V to {case.dtype}"}
