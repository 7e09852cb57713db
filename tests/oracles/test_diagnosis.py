"""Mistakes planted in a correct kernel, and the words that must name them."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.declaration import Kernel
from attnfuzz.explaining.diagnose import given_by_all
from attnfuzz.explaining.explain import explain_case
from attnfuzz.explaining.row import AttentionRow
from attnfuzz.identity.bug import Bug
from attnfuzz.inputs.layouts import token_views
from attnfuzz.judging.judge import judge
from attnfuzz.mistake import PAST_THE_END, mistake_of
from attnfuzz.problems.cases import (
    Case,
    DenseDecodeCase,
    LatentDecodeCase,
    MergeStatesCase,
    PagedDecodeCase,
    SplitDecodeCase,
)
from attnfuzz.problems.recipes import Needle, Pages, Values
from attnfuzz.problems.variants import Variant
from attnfuzz.values import LogicalAttention
from attnfuzz.verdict import Failure
from tests.oracles.conftest import paged_tokens
from tests.quality.reaching_kernels import gaps_of_k_for_v


def without(*positions: int) -> Any:
    """Step ``score``: these tokens have no weight."""

    def mask(scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[[p for p in positions if p < len(scores) - 1 or len(scores) > 20]] = -torch.inf
        return scores

    return mask


def doubled(*positions: int) -> Any:
    """Step ``score``: these tokens have twice their weight."""

    def add(scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[list(positions)] += math.log(2)
        return scores

    return add


@pytest.fixture
def long_paged(paged: PagedDecodeCase) -> PagedDecodeCase:
    """One sequence of 21 tokens on three pages."""
    return msgspec.structs.replace(paged, seq_lens=(21,))


DROPS = [
    (without(20), "token 20 (page 2, offset 4) of sequence 0 is dropped"),
    (without(19, 20), "tokens 19-20 (page 2) of sequence 0 are dropped"),
    (without(*range(8, 16)), "tokens 8-15 (page 1) of sequence 0 are dropped"),
    (doubled(16), "token 16 (page 2, offset 0) of sequence 0 is counted twice"),
    (doubled(*range(8, 16)), "tokens 8-15 (page 1) of sequence 0 are counted twice"),
    (without(7, 15), "tokens 7, 15 of sequence 0 are dropped"),
]


@pytest.mark.parametrize(("score", "words"), DROPS, ids=[words for _, words in DROPS])
@pytest.mark.by_day("token 20*", "tokens 8-15 (page 1) of sequence 0 are dropped", "token 16*")
def test_tokens(score: Any, words: str, plant: Any, long_paged: PagedDecodeCase, failure_of: Any) -> None:
    """The token at fault, or its page, would not be named."""
    assert words in failure_of(plant("paged_decode", score=score), long_paged).message


@pytest.mark.parametrize("keys", ["equal", "normal", "fine"])
@pytest.mark.parametrize(("seq_len", "block_size"), [(33, 32), (17, 16)])
@pytest.mark.by_day("33-32-normal")
def test_the_last_token_where_errors_are_small(
    keys: Any, seq_len: int, block_size: int, plant: Any, long_paged: PagedDecodeCase, failure_of: Any
) -> None:
    """Another mistake would be named that comes near to a small error, since leaving its neighbour out does, too."""
    recipe = Values(keys=keys, values="normal", seed=3)
    case = msgspec.structs.replace(
        long_paged, seq_lens=(seq_len,), block_size=block_size, values=recipe, dtype="bfloat16"
    )

    assert failure_of(plant("paged_decode", score=without_last), case).cause == "tokens_dropped"


def unseen(tokens_of: Callable[[int], range]) -> Any:
    """Step ``score``: of so many tokens, these have no weight, unless they are all there are."""

    def mask(scores: Tensor) -> Tensor:
        chosen = list(tokens_of(len(scores)))
        return scores if len(chosen) == len(scores) else without_all(scores, chosen)

    return mask


def without_all(scores: Tensor, chosen: list[int]) -> Tensor:
    return scores.index_fill(0, torch.tensor(chosen, dtype=torch.int64), -torch.inf)


PAGES_OF_8 = attnfuzz.Supports(block_sizes=(8,))
BY_RULES = [
    (lambda n: range(8, n, 8), "(the first token of each page but the first)"),
    (lambda n: range(3, n, 8), "(token 3 of each page)"),
    (lambda n: range(13, n, 8), "(token 5 of each page but the first)"),
    (lambda n: range(2, n, 3), "(every third token, from token 2 on)"),
    (lambda n: range(8, min(n, 16)), "(page number 1)"),
    (lambda n: range(max(n - 3, 0), n), "(the last 3 tokens)"),
    (lambda n: range(n // 4 * 4, n), "(what is left over of 4 equal parts)"),
    (lambda n: range(18, n, 16), "(token 2 of each tile of 16 but the first)"),
]


def of_parts(scores: Tensor, *, number: int, chosen: slice) -> Tensor:
    """The log-sum-exp of some of so many parts of the keys, if there are several, or of all."""
    parts = scores.split(-(-len(scores) // number))  # type: ignore[no-untyped-call]  # torch has no types
    return torch.cat(parts[chosen] if len(parts) > 1 else parts).logsumexp(0)


@pytest.mark.parametrize(
    ("number", "chosen", "words"),
    [
        (3, slice(None, -1), "lse leaves out tokens 14-20 (pages 1-2) of sequence 0 (the last of 3 parts)"),
        (4, slice(1, None), "lse leaves out tokens 0-5 (page 0) of sequence 0 (the first of 4 parts)"),
        (3, slice(1), "lse is that of tokens 0-6 (page 0) of sequence 0 alone (the first of 3 parts)"),
    ],
)
def test_a_split_that_lse_leaves_out_is_told(
    number: int, chosen: slice, words: str, plant: Any, long_paged: PagedDecodeCase, failure_of: Any
) -> None:
    """A log-sum-exp that merges all splits but one would be a number without a cause: the output is right."""
    kernel = plant("paged_decode", lse=partial(of_parts, number=number, chosen=chosen))
    assert words in failure_of(kernel, long_paged).message


@pytest.mark.parametrize("tile", [0, 16])
def test_a_last_token_that_is_lost_where_the_last_page_is_full_is_told_so(
    tile: int, plant: Any, long_paged: PagedDecodeCase, failure_of: Any
) -> None:
    """The token would be named, and not what it takes: of most lengths the last one is there.

    Where tiles decide, as long as the pages of this case, pages would be looked at.
    """

    def tokens(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
        is_full = n > 1 and n % (tile or inputs.block_size) == 0
        return paged_tokens(inputs, seq, n - is_full, kv_head)

    case = msgspec.structs.replace(long_paged, seq_lens=(32,), block_size=16)
    message = failure_of(plant("paged_decode", tokens=tokens), case).message
    assert "token 31 (page 1, offset 15) of sequence 0 is dropped" in message
    assert ("(the last token, where the last page is full)" in message) is not bool(tile)


@pytest.mark.parametrize(("tokens_of", "rule"), BY_RULES, ids=[rule for _, rule in BY_RULES])
@pytest.mark.by_day("(token 3 of each page)", "(the last 3 tokens)", "(page number 1)", "(what is left over*")
def test_the_rule_is_told_by_which_several_tokens_are_dropped(
    tokens_of: Any, rule: str, plant: Any, long_paged: PagedDecodeCase, failure_of: Any
) -> None:
    """A bug in the step from page to page would be told by the tokens of one case, as another bug in the next."""
    case = msgspec.structs.replace(long_paged, seq_lens=(43, 5))
    message = failure_of(plant("paged_decode", score=unseen(tokens_of), supports=PAGES_OF_8), case).message
    assert "dropped" in message
    assert rule in message


@pytest.mark.parametrize(
    ("step", "block_sizes", "ending"),
    [
        (32, (16, 32), "token 31 (page 0, offset 31) of sequence 0 is dropped (the last token of each tile of 32)"),
        (64, (16, 32), "token 31 (page 0, offset 31) of sequence 0 is dropped (token 31 of each tile of 64)"),
        (128, (16, 32), "token 31 (page 0, offset 31) of sequence 0 is dropped"),
        (32, (32,), "token 31 (page 0, offset 31) of sequence 0 is dropped"),
        (48, (16, 32), "token 31 (page 0, offset 31) of sequence 0 is dropped"),
    ],
)
@pytest.mark.by_day("32-*each tile*", "128-*")
def test_a_tile_is_told_by_its_size_where_longer_cases_tell_it_from_others(
    step: int, block_sizes: tuple[int, ...], ending: str, plant: Any, long_paged: PagedDecodeCase, failure_of: Any
) -> None:
    """In a case of 32 tokens, tiles of 32 and of 64 and pages of 32 lose the same one: any would be named."""
    case = msgspec.structs.replace(long_paged, seq_lens=(32,), block_size=32, values=Values())
    kernel = plant(
        "paged_decode",
        score=unseen(lambda n: range(31, n, step)),
        supports=attnfuzz.Supports(block_sizes=block_sizes),
    )
    assert failure_of(kernel, case).message.endswith(ending)


def test_a_rule_about_pages_is_not_told_of_what_goes_by_other_steps(
    plant: Any, long_paged: PagedDecodeCase, failure_of: Any
) -> None:
    """A bug in tiles of 8 would be told as one in pages, which have as many tokens in this case alone."""
    case = msgspec.structs.replace(long_paged, seq_lens=(43, 5))
    message = failure_of(plant("paged_decode", score=unseen(lambda n: range(3, n, 8))), case).message
    assert "dropped" in message
    assert "page)" not in message


def test_where_the_result_is_nan_pages_of_other_sizes_tell(plant: Any, paged: PagedDecodeCase, failure_of: Any) -> None:
    """With pages of one token, one of which is left with none, any mistake would do, and one about tokens be told."""
    page: list[int] = []

    def without_one(scores: Tensor) -> Tensor:
        last = (len(scores) - 1) // page[-1] * page[-1]
        if not last:
            return scores
        masked = without_all(scores, [last - 1])
        return masked * math.nan if page[-1] == 1 and len(scores) < 4 else masked

    kernel = plant("paged_decode", before=lambda inputs: page.append(inputs.block_size), score=without_one)
    case = msgspec.structs.replace(paged, seq_lens=(2,), block_size=1)
    message = failure_of(kernel, case).message
    assert " = nan, expected " in message
    assert message.endswith(
        "token 0 (page 0, offset 0) of sequence 0 is dropped (the last token of the page before the last)"
    )


def test_a_last_page_of_one_token_is_told_by_that_rule(
    plant: Any, long_paged: PagedDecodeCase, failure_of: Any
) -> None:
    """Beside longer last pages, which are right, it would be told as the last token of any sequence."""
    case = msgspec.structs.replace(long_paged, seq_lens=(43, 17, 33))
    lost = unseen(lambda n: range(n - 1, n) if n % 8 == 1 else range(0))
    message = failure_of(plant("paged_decode", score=lost), case).message
    assert message.endswith("is dropped (the last page, of one token)")


def test_a_mistake_is_not_told_of_rows_that_are_right(plant: Any, dense: DenseDecodeCase, failure_of: Any) -> None:
    """A mistake under a condition would be told as one that is made in every row."""

    def doubled_if_long(scores: Tensor) -> Tensor:
        return 2 * scores if len(scores) % 2 else scores

    case = msgspec.structs.replace(dense, seq_lens=(9, 12))
    message = failure_of(plant(score=doubled_if_long), case).message
    assert message.endswith("the scores are doubled, though not always")


def test_rows_that_fill_pages_up_to_a_tile_are_told_as_that(
    plant: Any, long_paged: PagedDecodeCase, failure_of: Any
) -> None:
    """A kernel that scores zeros behind each of its small pages would be told by their number in one case."""

    def diluted(scores: Tensor) -> Tensor:
        zeros = -(-len(scores) // 8) * 8
        return torch.cat((scores, scores.new_zeros(zeros))).softmax(0)[: len(scores)]

    def lse(scores: Tensor) -> Tensor:
        return torch.cat((scores, scores.new_zeros(-(-len(scores) // 8) * 8))).logsumexp(0)

    kernel = plant("paged_decode", weights=diluted, lse=lse, supports=PAGES_OF_8)
    message = failure_of(kernel, long_paged).message
    assert message.endswith("24 rows of zeros take weight: those that fill each page of 8 up to 16")


def test_measured_weights_decide_where_values_do_not(plant: Any, dense: DenseDecodeCase, failure_of: Any) -> None:
    """Of two tokens with the same value either might be dropped, and nothing would be told where neighbours pass."""

    def without_one_of_equals(scores: Tensor) -> Tensor:
        return without_all(scores, [3]) if len(scores) > 5 and float(scores.max() - scores.min()) == 0 else scores

    recipe = Values(keys="equal", values="integers", seed=0)
    case = msgspec.structs.replace(dense, seq_lens=(10,), extra_rows=0, v_head_size=1, values=recipe)
    supports = attnfuzz.Supports(lse="none")
    kernel = plant(score=without_one_of_equals, supports=supports, after=lambda inputs, out, lse: out)
    assert failure_of(kernel, case).message.endswith("); token 3 of sequence 0 is dropped")


def with_row_strides(pad: int) -> Kernel:
    """Weights of all heads lie one row after another, and are read as if there were ``pad`` more columns."""

    @attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(lse="none"))
    def strided(inputs: Any) -> Tensor:
        out, heads = torch.zeros_like(inputs.out), inputs.q.shape[1]
        for seq, length in enumerate(inputs.seq_lens.tolist()):
            k, v = (x[seq, :length].repeat_interleave(heads // x.shape[2], 1) for x in (inputs.k, inputs.v))
            weights = (torch.einsum("hd,thd->ht", inputs.q[seq], k) * inputs.scale).softmax(-1)
            plane = torch.nn.functional.pad(weights.flatten(), (0, heads * pad))
            for head in range(heads if length else 0):
                start = head * (length + pad)
                out[seq, head] = plane[start : start + length] @ v[:, head]
        return out

    return strided


@pytest.mark.parametrize("pad", [8, 16])
def test_weights_that_are_read_with_another_row_stride(pad: int, dense: DenseDecodeCase, failure_of: Any) -> None:
    """Each row of weights but the first would be told as numbers, though all are off by the same step."""
    message = failure_of(with_row_strides(pad), dense).message
    assert f"{pad} places behind their own" in message or f"{3 * pad} places behind their own" in message


@pytest.mark.parametrize("pad", [8, 16])
def test_weights_beside_their_own_are_told_where_all_are_equal(
    pad: int, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """What lies past the last row of weights would be told as values that are left out."""
    case = msgspec.structs.replace(dense, num_q_heads=2, num_kv_heads=1, seq_lens=(64,), values=Values(keys="equal"))
    assert f"{pad} places behind their own" in failure_of(with_row_strides(pad), case).message


@pytest.mark.parametrize("shift", [3, 5])
def test_what_only_equal_keys_bear_out_is_no_cause(
    shift: int, plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """Weights that are shifted would be told as values that are left out, as ordinary keys show that none are."""

    def shifted(scores: Tensor) -> Tensor:
        return torch.nn.functional.pad(scores.softmax(0)[shift:], (0, min(shift, len(scores))))

    case = msgspec.structs.replace(dense, num_q_heads=1, num_kv_heads=1, seq_lens=(64,), values=Values(keys="equal"))
    kernel = plant(weights=shifted, supports=attnfuzz.Supports(lse="none"), after=lambda inputs, out, lse: out)
    failure = failure_of(kernel, case)
    assert failure.message.endswith(")")
    assert failure.cause == ""


def test_what_a_longer_case_shows_is_no_cause_of_what_this_one_shows(
    plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """Of two bugs, the one that has a name would be told of a case that shows the other alone."""

    def average(weights: Tensor, v: Tensor) -> Tensor:
        if len(v) > 5:
            return weights[:-1] @ v[:-1] / weights[:-1].sum()
        return weights @ v + torch.linspace(-3, 2, v.shape[1]).roll(3)

    case = msgspec.structs.replace(dense, num_q_heads=1, num_kv_heads=1, seq_lens=(5,))
    kernel = plant(average=average, supports=attnfuzz.Supports(lse="none"), after=lambda inputs, out, lse: out)
    failure = failure_of(kernel, case)
    assert (failure.cause, failure.message[-1]) == ("", ")")


@pytest.mark.night
@pytest.mark.parametrize(("seq_lens", "block_size"), [((8192, 95), 1), ((3656,), 128), ((8192,), 256)])
def test_long_sequences_without_a_cause(
    seq_lens: tuple[int, ...], block_size: int, plant: Any, paged: PagedDecodeCase, failure_of: Any
) -> None:
    """A failing case would be reported as hanging, or as out of memory, while its cause is sought among all pages."""
    case = msgspec.structs.replace(
        paged, num_q_heads=1, num_kv_heads=1, head_size=96, seq_lens=seq_lens, block_size=block_size
    )
    message = failure_of(plant("paged_decode", average=lambda w, v: w @ v + torch.linspace(0, 9, 96)), case).message
    assert "; " not in message


@pytest.mark.by_day
@pytest.mark.parametrize("keys", ["equal", "rising", "falling", "integers"])
@pytest.mark.parametrize("values", ["positions", "integers", "normal"])
def test_dropped_token_under_other_recipes(
    keys: Any, values: Any, plant: Any, long_paged: PagedDecodeCase, failure_of: Any
) -> None:
    """The diagnosis would work for one kind of numbers only."""
    recipe = Values(keys=keys, values=values, seed=2, logit_exponent=1)
    case = msgspec.structs.replace(long_paged, values=recipe, dtype="float16")
    position = 3 if keys == "falling" else 20
    message = failure_of(plant("paged_decode", score=without(position)), case).message
    assert f"token {position} (page {position // 8}, offset {position % 8}) of sequence 0 is dropped" in message


def test_a_weight_that_the_divisor_leaves_out(plant: Any, long_paged: PagedDecodeCase, failure_of: Any) -> None:
    """A lane that the sum of a tile lacks would be told as some factor, or as one of four roundings."""

    def average(weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v / (1 - weights[-1] if len(v) > 1 else 1.0)

    message = failure_of(plant("paged_decode", average=average), long_paged).message
    assert "token 20 (page 2, offset 4) of sequence 0 is averaged, but its weight is left out of the sum" in message


def test_another_kv_head(plant: Any, dense: Case, failure_of: Any) -> None:
    """A wrong head mapping would not be named."""
    message = failure_of(plant(kv_head=lambda head, group: head % 2), dense).message
    assert (
        "query head 1 reads KV head 1, expected 0" in message or "query head 2 reads KV head 0, expected 1" in message
    )


def test_a_kv_head_modulo_the_group(plant: Any, dense: DenseDecodeCase, failure_of: Any) -> None:
    """Each head would be read from a place that no single formula gives, and nothing would be told."""
    case = msgspec.structs.replace(dense, num_q_heads=15, num_kv_heads=5)
    failure = failure_of(plant(kv_head=lambda head, group: head // group % group), case)
    assert {(one.mistake, one.way) for one in failure.causes} == {("head_map", "h // group size % group size")}


def of_the_next_sequence(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
    other = (seq + 1) % len(inputs.seq_lens)
    return paged_tokens(inputs, seq, n, kv_head)[0], paged_tokens(inputs, other, n, kv_head)[1]


def last_of_a_page_from_the_one_before(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
    places = [*range(n - 1), n - 2 if n % inputs.block_size == 1 and n > 1 else n - 1]
    k, v = paged_tokens(inputs, seq, n, kv_head)
    return k[places], v[places]


def of_sequence_0(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
    return inputs.k[0, :n, kv_head], inputs.v[0, :n, kv_head]


def k_for_v(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
    return inputs.k[seq, :n, kv_head], inputs.k[seq, :n, kv_head]


def v_of_the_token_before(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
    before = [max(i - 1, 0) for i in range(n)]
    return inputs.k[seq, :n, kv_head], inputs.v[seq, before, kv_head]


def at(places: Callable[[Any, int], tuple[int, int]]) -> Any:
    """Step ``tokens``: ``places(inputs, i)`` is the column of the block table and the offset of token i."""

    def tokens(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
        k_slots, v_slots = token_views(inputs.k_cache, inputs.v_cache, inputs.layout)
        found = [
            (int(inputs.block_table[seq, column]), offset) for column, offset in map(partial(places, inputs), range(n))
        ]
        parts = ([slots[page, offset, kv_head].flatten() for page, offset in found] for slots in (k_slots, v_slots))
        return tuple(map(torch.stack, parts))  # type: ignore[return-value]  # two of them

    return tokens


def page_1_for_page_0(inputs: Any) -> None:
    inputs.block_table = inputs.block_table.clone()
    inputs.block_table[1, 1] = inputs.block_table[1, 0]


def merged_in_pairs(scores: Tensor) -> Tensor:
    every = torch.eye(len(scores))
    pages = (slice(start, start + 8) for start in range(0, len(scores), 8))
    states = [scores[page].softmax(0) @ every[page] for page in pages]
    while len(states) > 1:
        states = [torch.stack(states[i : i + 2]).mean(0) for i in range(0, len(states), 2)]
    return states[0]


def padded(scores: Tensor) -> Tensor:
    return torch.cat((scores, torch.zeros(-len(scores) % 8)))


SHARED = {"pages": Pages(shared_blocks=1), "seq_lens": (2, 3), "block_size": 4}
NAMED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("dense", {"seq_lens": (21, 5)}, {"tokens": of_sequence_0}, "sequence 1 reads the first 5 tokens of sequence 0"),
    ("dense", {}, {"tokens": k_for_v}, "K is read in place of V"),
    ("dense", {}, {"tokens": v_of_the_token_before}, "V is read one token before its K"),
    (
        "dense",
        {"values": Values(keys="rising", logit_exponent=6)},
        {"score": lambda s: s.clamp(-20, 20)},
        "scores beyond 20.0 are clipped to that",
    ),
    ("dense", {}, {"supports": attnfuzz.Supports(lse="base2")}, "lse is a natural logarithm, not one in base 2"),
    (
        "dense",
        {},
        {"score": padded, "average": lambda w, v: w[: len(v)] @ v},
        "3 tokens past the end of the sequence take weight (K and V masked to zero, the score not",
    ),
    (
        "dense",
        {},
        {"store_empty": lambda out, lse: (out.fill_(1), lse.fill_(0))},
        "sequence 1 is empty: expected out = 0 and lse = -inf",
    ),
    (
        "paged",
        {"seq_lens": (21, 19, 18)},
        {"tokens": of_the_next_sequence},
        "pages of sequence 0 are read through sequence 1's row of the block table, for V alone",
    ),
    (
        "paged",
        {"seq_lens": (17, 9)},
        {"tokens": last_of_a_page_from_the_one_before},
        "token 8 (page 1, offset 0) of sequence 1 is read from token 7 (page 0, offset 7), in place of its own",
    ),
    (
        "paged",
        {"seq_lens": (5, 21)},
        {"before": page_1_for_page_0},
        "page 1 of sequence 1 is read from page 0 of sequence 1",
    ),
    (  # an offset that is cut to fewer bits than a page has
        "paged",
        {"seq_lens": (6,)},
        {"tokens": at(lambda inputs, i: (i // 8, i % 8 % 4))},
        "tokens 4-5 (page 0) of sequence 0 are read from tokens 0-1 (page 0), in place of their own",
    ),
    (  # pages of six tokens that a shift takes for eight
        "paged",
        {"seq_lens": (21,), "block_size": 6},
        {"tokens": at(lambda inputs, i: (i // 8, i % inputs.block_size))},
        "the entry of the block table is that of position // 8, not // 6",
    ),
    ("paged", SHARED, {"after": lambda inputs, out, lse: (2 * out, lse)}, "the output is 2.0 x the right one"),
    (  # a step one token short of the tile
        "paged",
        {"seq_lens": (50,)},
        {"score": lambda s: doubled(*range(15, len(s), 15))(s)},
        "(the first token of each 15 but the first)",
    ),
    (  # a tile that is masked for V and not for K
        "paged",
        {"seq_lens": (21,)},
        {"average": lambda w, v: w[:-1] @ v[:-1]},
        "token 20 (page 2, offset 4) of sequence 0 has weight, but its V is left out",
    ),
    (
        "paged",
        {"seq_lens": (21,)},
        {"weights": merged_in_pairs},
        "partial states are merged in pairs, each time with equal weights",
    ),
]


@pytest.mark.parametrize(("fixture", "changes", "bugs", "words"), NAMED, ids=[words for *_, words in NAMED])
def test_what_has_a_name_is_told_by_it(
    fixture: str, changes: dict[str, Any], bugs: dict[str, Any], words: str, plant: Any, request: Any, failure_of: Any
) -> None:
    """A wrong index, mask or step would be told as numbers only, or as another mistake that comes near to it."""
    case = msgspec.structs.replace(request.getfixturevalue(fixture), **changes)
    assert words in failure_of(plant(case.problem, **bugs), case).message


@pytest.mark.parametrize(
    ("which", "words"), [("k", "query head 2 reads K of KV head 0"), ("v", "query head 2 reads V of KV head 0")]
)
def test_another_kv_head_for_one_tensor(
    which: str, words: str, plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """K's strides used for V, say, would be blamed on both."""

    def tokens(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
        k_head, v_head = (0 if which == "k" else kv_head), (0 if which == "v" else kv_head)
        return inputs.k[seq, :n, k_head], inputs.v[seq, :n, v_head]

    case = msgspec.structs.replace(dense, num_q_heads=4, seq_lens=(21,))
    message = failure_of(plant(tokens=tokens), case).message
    assert words in message or words.replace("head 2", "head 3", 1) in message


def test_a_mistake_is_seen_beside_the_errors_of_large_scores(
    plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """A bug that is known would be told again of float32: a score of 1,000 is off by more than what it multiplies."""

    recipe = Values(keys="normal", values="small", logit_exponent=6, seed=4)
    case = msgspec.structs.replace(dense, seq_lens=(21,), values=recipe, dtype="float32")
    kernel = plant(tokens=k_for_v, weights=lambda scores: (scores - scores.logsumexp(0)).exp())
    assert "K is read in place of V" in failure_of(kernel, case).message


def test_another_head_of_many_is_named_wherever_it_lies(plant: Any, paged: PagedDecodeCase, failure_of: Any) -> None:
    """The last of 12 would be told as weighing partial states wrongly, which gives the same in parts of a token."""

    def last_as_first(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        if out.shape[1] % 3 == 0:
            out[:, -1] = out[:, 0]
        return out, lse

    case = msgspec.structs.replace(paged, num_q_heads=12, num_kv_heads=1, seq_lens=(1, 2))
    failure = failure_of(plant("paged_decode", after=last_as_first), case)
    assert "another_row" in {one.mistake for one in failure.causes}


def test_tokens_that_two_of_many_splits_have_are_named(paged: PagedDecodeCase, failure_of: Any) -> None:
    """With as many splits as a case may have they would be nameless, and a known bug be told again."""

    @attnfuzz.kernel("split_decode")
    def overlapping(inputs: Any) -> Any:
        out, lse = inputs.partial_out.clone(), inputs.partial_lse.clone()
        group = inputs.q.shape[1] // token_views(inputs.k_cache, inputs.v_cache, inputs.layout).k.shape[2]
        for seq, n in enumerate(inputs.seq_lens.tolist()):
            size = max(1, -(-n // inputs.num_splits))
            for head, number in itertools.product(range(inputs.q.shape[1]), range(inputs.num_splits)):
                k, v = paged_tokens(inputs, seq, n, head // group) if n else (torch.zeros(0, 8), torch.zeros(0, 8))
                part = slice(max(0, number * size - 1) if number * size < n else n, (number + 1) * size)
                scores = k[part].float() @ inputs.q[seq, head].float() * inputs.scale
                lse[seq, head, number] = scores.logsumexp(0)
                out[seq, head, number] = scores.softmax(0) @ v[part].float()
        return out, lse

    fields = {name: getattr(paged, name) for name in paged.__struct_fields__}
    case = SplitDecodeCase(**{**fields, "seq_lens": (32,)}, num_splits=16)
    message = failure_of(overlapping, case).message
    assert message.endswith("are counted twice (the last token of each part of 16 but the last)")


@pytest.mark.parametrize(
    ("page_of", "says"),
    [
        (
            lambda table, seq, needed, page: int(table.flatten()[seq * needed + page]),
            "rows of the block table are taken to be 3 long, as the longest sequence needs, not 4",
        ),
        (
            lambda table, seq, needed, page: seq * table.shape[1] + page,
            "the place of an entry in the block table, 4 x the sequence + the page, is taken for what it holds",
        ),
    ],
    ids=["rows as long as needed", "ids not read"],
)
def test_pages_that_the_table_does_not_name(
    page_of: Any, says: str, plant: Any, paged: PagedDecodeCase, failure_of: Any
) -> None:
    """What is read in place of an entry would be told as tokens of others, one page at a time."""

    def tokens(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
        k_slots, v_slots = token_views(inputs.k_cache, inputs.v_cache, inputs.layout)
        needed = -(-int(inputs.seq_lens.max()) // 8)
        pages = [page_of(inputs.block_table, seq, needed, i // 8) % len(k_slots) for i in range(n)]
        places = [(page, i % 8) for i, page in enumerate(pages)]
        parts = ([slots[page, offset, kv_head].flatten() for page, offset in places] for slots in (k_slots, v_slots))
        return tuple(map(torch.stack, parts))  # type: ignore[return-value]  # two of them

    case = msgspec.structs.replace(paged, seq_lens=(21, 9, 5))
    assert says in failure_of(plant("paged_decode", tokens=tokens), case).message


def test_places_past_the_last_page_that_are_read_on_page_0(plant: Any, paged: PagedDecodeCase, failure_of: Any) -> None:
    """Where a load of the table gives 0 past its end, a token too many would have no cause, and be a second bug."""

    def tokens(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
        k, v = paged_tokens(inputs, seq, n, kv_head)
        if n % inputs.block_size:
            return k, v
        of_k, of_v = (cache[0, :1, kv_head] for cache in (inputs.k_cache, inputs.v_cache))
        return torch.cat((k, of_k)), torch.cat((v, of_v))

    case = msgspec.structs.replace(paged, pages=Pages(), seq_lens=(5, 16))
    failure = failure_of(plant("paged_decode", tokens=tokens), case)
    assert failure.cause == PAST_THE_END
    assert "1 token past the end of the sequence takes weight (from page 0" in failure.message


@pytest.mark.parametrize("values", [Values(keys="normal"), Values(keys="negative", logit_exponent=4)])
def test_a_split_without_tokens_that_has_lse_0(
    values: Values, plant: Any, split: SplitDecodeCase, failure_of: Any
) -> None:
    """One line of a kernel would be told as a maximum that begins at 0, and as padding where scores are not low."""

    def store(out: Tensor, lse: Tensor) -> None:
        out.fill_(0)
        lse.fill_(0)

    case = msgspec.structs.replace(split, seq_lens=(1, 3), values=values)
    failure = failure_of(plant("split_decode", store_empty=store), case)
    assert failure.cause == "idle_splits"
    assert failure.message.endswith("a split without tokens has lse = 0, expected -inf")


FORMULAS = [
    ({"score": lambda s: s / 0.125}, "the scale is left out"),
    ({"score": lambda s: s * 0.125}, "the scale is applied twice"),
    ({"score": lambda s: s * math.log(2)}, "exponentiated in base 2 without being multiplied by log2(e)"),
    ({"score": lambda s: -s}, "the scores have the wrong sign"),
    ({"score": lambda s: 1.013 * s}, "the scores are 1.013 x the right ones"),
    ({"weights": lambda s: (s - s.max()).exp()}, "the output is not divided by the sum of the weights"),
    ({"average": lambda w, v: 1.01 * (w @ v)}, "the output is 1.01 x the right one"),
    ({"average": lambda w, v: v[w.argmax()]}, "the output is V of token "),
    (
        {
            "weights": lambda s: (math.log(2) * s).softmax(0),
            "lse": lambda s: s.max() + (math.log(2) * (s - s.max())).exp().sum().log(),
        },
        "the weights are powers of 2, not of e, of scores less their maximum",
    ),
    (
        {
            "weights": lambda s: (s - s.max()).exp() / ((s - s.max()).exp().sum() + 0.25),
            "lse": lambda s: s.max() + ((s - s.max()).exp().sum() + 0.25).log(),
        },
        "0.25 is added to the sum of the weights",
    ),
    ({"average": lambda w, v: w @ v * 0, "lse": lambda s: -math.inf}, "out and lse are those of a row without keys"),
    ({"average": lambda w, v: w @ v * 0}, "the output is 0"),
]


@pytest.mark.parametrize(("bugs", "words"), FORMULAS, ids=[words for _, words in FORMULAS])
@pytest.mark.by_day(
    "the scale is left out",
    "exponentiated in base 2*",
    "the scores have the wrong sign",
    "the output is 1.01*",
    "0.25 is added*",
    "out and lse are*",
    "the output is V*",
)
def test_formulas(bugs: dict[str, Any], words: str, plant: Any, dense: Case, failure_of: Any) -> None:
    """A mistake in the formula would be shown as numbers only."""
    assert words in failure_of(plant(**bugs), dense).message


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_a_scale_left_out_is_not_told_as_doubled_or_halved_scores(
    scale: float, plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """The reader would look for a factor that stands nowhere."""

    def leave_out(inputs: Any) -> None:
        inputs.scale = 1.0

    case = msgspec.structs.replace(dense, scale=scale)
    assert failure_of(plant(before=leave_out), case).message.endswith("; the scale is left out")


def test_dims_that_are_left_out_of_the_scores(plant: Any, dense: DenseDecodeCase, failure_of: Any) -> None:
    """A head size that is no multiple of a vector would be two bugs without a cause."""
    case = msgspec.structs.replace(dense, head_size=24, values=Values(keys="normal", values="normal", seed=3))
    kernel = plant(dots=lambda k, q, scale: k[:, :16].float() @ q[:16].float() * scale)
    failure = failure_of(kernel, case)
    assert failure.cause == "scored_dims"
    assert failure.message.endswith("; dims 16-23 of q and k are left out of the scores")


WIDENED = [
    (lambda t, begins: t >= begins // 8 * 8, "the window begins with the page in which its first key lies"),
    (lambda t, begins: t >= begins // 16 * 16, "the window begins with the tile of 16 in which its first key lies"),
    (lambda t, begins: (t >= begins) | (t < 4), "the first 4 tokens are seen beside the window"),
]


@pytest.mark.parametrize(("sees", "words"), WIDENED, ids=[words for _, words in WIDENED])
def test_windows_that_see_more(sees: Any, words: str, plant: Any, paged: PagedDecodeCase, failure_of: Any) -> None:
    """Of short sequences these look like a window that is left out, and would be told so."""
    given: list[Any] = []

    def score(scores: Tensor) -> Tensor:
        seen = sees(torch.arange(len(scores)), max(0, len(scores) - given[-1].window))
        return scores.masked_fill(~seen, -torch.inf)

    supports = attnfuzz.Supports(variants=("window",))
    kernel = plant("paged_decode", before=given.append, score=score, supports=supports)
    case = msgspec.structs.replace(paged, seq_lens=(5, 21), variant=Variant(window=2))
    assert failure_of(kernel, case).message.endswith(f"; {words}")


def test_hidden_keys_with_a_score_of_its_own(plant: Any, paged: PagedDecodeCase, failure_of: Any) -> None:
    """Only numbers that many kernels have would be told, and of any other that the window is left out, or nothing."""
    given: list[Any] = []

    def score(scores: Tensor) -> Tensor:
        hidden = torch.arange(len(scores)) < len(scores) - given[-1].window
        return scores.masked_fill(hidden, -7.5)

    kernel = plant("paged_decode", before=given.append, score=score, supports=attnfuzz.Supports(variants=("window",)))
    case = msgspec.structs.replace(paged, seq_lens=(5, 21), variant=Variant(window=2))
    assert "have the finite score -7.5" in failure_of(kernel, case).message


@pytest.mark.parametrize("tile", [1, 16])
def test_what_a_tile_adds_is_rescaled_with_the_rest(tile: int, plant: Any, dense: Case, failure_of: Any) -> None:
    """A factor that is applied after the sum in place of before would be told as weights that are wrong somehow."""

    def average(weights: Tensor, v: Tensor) -> Tensor:
        acc, top, logs = torch.zeros(v.shape[1]), torch.tensor(-torch.inf), weights.log()
        for start in range(0, len(v), tile):
            new = torch.maximum(top, logs[start : start + tile].max())
            acc = (acc + (logs[start : start + tile] - new).exp() @ v[start : start + tile]) * (top - new).exp()
            top = new
        return acc * top.exp()

    message = failure_of(plant(average=average), dense).message
    assert "what a tile adds to the sum of weights x V is multiplied by exp(old - new maximum), too" in message


LSES = [
    (lambda s: s.logsumexp(0) / math.log(2), "lse is in base 2, not a natural logarithm"),
    (lambda s: (s - s.max()).logsumexp(0), "lse is the logarithm of the sum, without the maximum"),
    (lambda s: s.max(), "lse is the maximum of the scores alone"),
    (
        lambda s: s.max() + math.log(2) * (s - s.max()).logsumexp(0),
        "lse adds a natural maximum to a natural logarithm of the sum that is taken for one in base 2",
    ),
    (
        lambda s: math.log(2) * s.max() + (s - s.max()).logsumexp(0),
        "lse adds a natural maximum that is taken for one in base 2 to a natural logarithm of the sum",
    ),
    (lambda s: s.exp().sum(), "lse is the sum of exp(score) itself, not its logarithm"),
    (lambda s: (s / 0.125).logsumexp(0), "lse is that of the scores before they are scaled"),
    (lambda s: 0.125 * s.logsumexp(0), "lse is multiplied by the scale"),
    (lambda s: s.logsumexp(0) - math.log(len(s)), "lse is the logarithm of the mean of exp(score), not of the sum"),
    (lambda s: s.logsumexp(0).bfloat16().float(), "lse is rounded to bfloat16"),
    (
        lambda s: s.logsumexp(0) + s.max() - s[0],
        "lse adds the largest score to a sum that is still relative to that of the first key",
    ),
    (
        lambda s: s.max() + torch.stack([(part - part.max()).exp().sum() for part in s.split(16)]).sum().log(),
        "lse adds the sums of parts of the keys without rescaling them to one maximum",
    ),
]


@pytest.mark.parametrize(("lse", "words"), LSES, ids=[words for _, words in LSES])
@pytest.mark.by_day(
    "lse is in base 2*",
    "lse is the maximum*",
    "lse adds a natural maximum to*",
    "lse is rounded*",
    "lse adds the largest*",
    "lse adds the sums*",
)
def test_log_sum_exps(lse: Any, words: str, plant: Any, dense: Case, failure_of: Any) -> None:
    """A wrong log-sum-exp beside a right output would be shown as numbers only."""
    failure = failure_of(plant(lse=lse), dense)
    assert failure.kind == "lse:value"
    assert words in failure.message


def test_doubled_token_that_only_lse_shows(plant: Any, dense: DenseDecodeCase, failure_of: Any) -> None:
    """Where only one token has weight, its doubling leaves the output right and would be shown as a number only."""
    case = msgspec.structs.replace(dense, seq_lens=(1,))
    failure = failure_of(plant(score=doubled(0)), case)
    assert failure.kind == "lse:value"
    assert "token 0 of sequence 0 is counted twice" in failure.message


def test_fault_in_the_diagnosis_costs_no_finding(
    plant: Any, dense: Case, failure_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finding would be lost to an error in its explanation."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(sys.modules["attnfuzz.explaining.diagnose"], "_matched", fail)
    message = failure_of(plant(average=lambda w, v: w @ v + 1), dense).message
    assert message.endswith("; (attnfuzz could not diagnose this: ZeroDivisionError: planted)")


def without_last(scores: Tensor) -> Tensor:
    """Step ``score``: the last token has no weight."""
    scores = scores.clone()
    scores[-1] = -torch.inf
    return scores


def test_a_token_left_out_of_one_is_told_by_a_longer_sequence(
    plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """0 / 0 would be a second bug beside the lost token."""
    case = msgspec.structs.replace(dense, seq_lens=(1,), values=Values())
    failure = failure_of(plant(score=without_last), case, "accuracy")
    assert (failure.kind, failure.cause) == ("out:nan", "tokens_dropped")
    assert "token 0 of sequence 0 is dropped" in failure.message


def test_nan_that_comes_with_plain_numbers_too_is_put_down_to_no_large_ones(
    plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """A lost token beside low scores was told as a maximum that is not subtracted."""
    case = msgspec.structs.replace(dense, seq_lens=(1,), values=Values(keys="negative", logit_exponent=6))
    failure = failure_of(plant(score=without_last), case, "accuracy")
    assert failure.kind == "out:nan"
    assert not mistake_of(failure.cause).is_everywhere


LOW = Values(keys="negative", logit_exponent=4)
WITHOUT_LSE = attnfuzz.Supports(lse="none")


@pytest.mark.parametrize(
    ("of_empty", "filled_to", "cause"),
    [(math.log(16), 16, PAST_THE_END), (0.0, 16, ""), (0.0, 1, "")],
    ids=["zeros up to a tile", "0 beside zeros up to a tile", "0 beside right rows"],
)
def test_the_log_sum_exp_of_an_empty_row_is_that_of_zeros_only_if_others_count_them(
    of_empty: float, filled_to: int, cause: str, plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """A tail masked to 0 was a second bug where nothing is before it; an LSE of 0 by itself would be told as a tail."""

    def filled(scores: Tensor) -> Tensor:
        return torch.cat((scores, torch.zeros(-len(scores) % filled_to)))

    def store_empty(out: Tensor, lse: Tensor) -> None:
        out.zero_()
        lse.fill_(of_empty)

    kernel = plant(score=filled, average=lambda w, v: w[: len(v)] @ v, store_empty=store_empty)
    failure = failure_of(kernel, msgspec.structs.replace(dense, seq_lens=(0,)), "accuracy")
    assert failure.cause == cause
    assert "; sequence 0 is empty" in failure.message
    assert ("16 tokens past the end of the sequence take weight" in failure.message) is bool(cause)


def test_masked_scores_that_are_finite_are_told_beside_a_finite_beginning(
    plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """Padding masked with -1e4 was told as a running maximum, of which there was none in the kernel."""
    low = Values(keys="negative", values="positions", logit_exponent=8)
    case = msgspec.structs.replace(dense, seq_lens=(3,), extra_rows=0, values=low, dtype="float16")
    kernel = plant(
        score=lambda s: torch.cat((s, torch.full((5,), -100.0))),
        average=lambda w, v: w[: len(v)] @ v,
        supports=WITHOUT_LSE,
    )
    assert "begins at a finite number, or masked scores are one, " in failure_of(kernel, case, "accuracy").message


def test_zeros_beside_low_scores_are_told_apart_by_higher_ones(
    plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """A maximum that begins at 0 and a tail masked to 0 both make 0 of all: each had findings of the other's cause."""
    case = msgspec.structs.replace(dense, seq_lens=(3,), values=LOW, dtype="float16")

    def from_zero(scores: Tensor) -> Tensor:
        exp = (scores - scores.max().clamp(min=0)).exp()
        return exp / exp.sum().clamp(min=1e-30)

    def padded(scores: Tensor) -> Tensor:
        return torch.cat((scores, torch.zeros(5)))

    begins = failure_of(plant(weights=from_zero, supports=WITHOUT_LSE), case, "accuracy")
    assert begins.cause == "maximum_begins_finite"
    kernel = plant(score=padded, average=lambda w, v: w[: len(v)] @ v, supports=WITHOUT_LSE)
    assert failure_of(kernel, case, "accuracy").cause == "past_the_end"


def test_a_lost_weight_is_put_down_to_what_shows_beside_other_numbers(
    plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """Small numbers become 0 with a scale that is left out as with short weights, and one would be named by chance."""
    needle = Needle(seq=0, position=0, kv_head=0)
    values = Values(keys="integers", values="integers", seed=0, needles=(needle,), logit_exponent=1)
    shape: Any = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "scale": 0.25, "dtype": "bfloat16"}
    case = DenseDecodeCase(**shape, seq_lens=(2,), values=values)
    failure = failure_of(plant(score=lambda scores: 4 * scores, supports=WITHOUT_LSE), case, "accuracy")
    assert failure.cause == "scale"


def test_what_a_row_without_tokens_has_read_is_told(plant: Any, paged: PagedDecodeCase, failure_of: Any) -> None:
    """One token too many would be another bug where a sequence is empty and an unused entry names a page in use."""
    pages = msgspec.structs.replace(paged.pages, order="identity", padding="zero", spare_blocks=0)
    case = msgspec.structs.replace(paged, seq_lens=(8, 0), pages=pages)
    failure = failure_of(plant("paged_decode", length=lambda n: n or 1), case, "accuracy")
    assert failure.cause == PAST_THE_END
    assert "1 token past the end of the sequence takes weight (where its row of the block table" in failure.message


def test_an_unused_entry_that_is_followed_is_told(plant: Any, paged: PagedDecodeCase, failure_of: Any) -> None:
    """The first token of the cache would be called counted twice, and another one lost."""
    pages = msgspec.structs.replace(paged.pages, order="identity", padding="zero")
    values = Values(keys="equal", values="positions")
    case = msgspec.structs.replace(paged, seq_lens=(8,), pages=pages, values=values, dtype="float16")
    failure = failure_of(plant("paged_decode", length=lambda n: n + 1), case, "accuracy")
    assert PAST_THE_END in {one.mistake for one in failure.causes}


def test_exponential_without_maximum(plant: Any, dense: DenseDecodeCase, failure_of: Any) -> None:
    """NaN would not be traced to overflow."""
    case = msgspec.structs.replace(dense, values=Values(keys="rising", logit_exponent=7))
    failure = failure_of(plant(weights=lambda s: s.exp() / s.exp().sum(), lse=lambda s: s.exp().sum().log()), case)
    assert failure.kind == "out:nan"
    assert "exp overflows float32 at 88.7: the maximum, " in failure.message
    assert "perhaps" not in failure.message  # larger and smaller scores were asked for


def test_very_negative_scores(plant: Any, dense: DenseDecodeCase, failure_of: Any) -> None:
    """0 / 0 would not be traced to underflow."""
    case = msgspec.structs.replace(dense, values=Values(keys="negative", logit_exponent=4))
    failure = failure_of(plant(weights=lambda s: s.exp() / s.exp().sum(), lse=lambda s: s.exp().sum().log()), case)
    assert failure.kind == "out:nan"
    assert "exp underflows float32: the maximum, -1287, is not subtracted from the scores" in failure.message
    assert "perhaps" not in failure.message  # larger and smaller scores were asked for


def of_each_tile(scores: Tensor) -> Tensor:
    """Weights, not yet divided by their sum: what lies before a tile is multiplied by exp(its maximum - the tile's)."""
    top, weights = scores[0], scores[:0].float()
    for start in range(0, len(scores), 16):
        part = scores[start : start + 16].float()
        weights = torch.cat((weights * (top - part.max()).exp(), (part - part.max()).exp()))
        top = part.max()
    return weights


def test_maximum_that_is_not_kept(plant: Any, dense: DenseDecodeCase, failure_of: Any) -> None:
    """NaN where later scores are lower would be told as weights that are NaN, and each case as a bug of its own."""
    falling = Values(keys="falling", logit_exponent=7)
    case = msgspec.structs.replace(dense, seq_lens=(40,), values=falling)
    planted = plant(
        weights=lambda s: of_each_tile(s) / of_each_tile(s).sum(),
        lse=lambda s: s.split(16)[-1].max() + of_each_tile(s).sum().log(),
    )
    failure = failure_of(planted, case)
    assert failure.kind == "out:nan"
    assert "the maximum is that of each tile, not the largest so far" in failure.message
    assert "perhaps" not in failure.message  # larger and smaller scores were asked for


def beside_tiles(scores: Tensor) -> Tensor:
    """exp of scores minus the largest up to the end of their tile of 16: what is summed before the maximum grows."""
    tops = torch.tensor([float(scores[: at // 16 * 16 + 16].max()) for at in range(len(scores))])
    return (scores - tops.to(scores)).exp()


def beside_all(scores: Tensor) -> Tensor:
    return (scores - scores.max()).exp()


@pytest.mark.parametrize(
    ("weights", "total", "words"),
    [
        (beside_tiles, beside_all, "the sum of weights x V is not rescaled when the maximum grows"),
        (beside_all, beside_tiles, "the sum of the weights is not rescaled when the maximum grows"),
        (beside_tiles, beside_tiles, "neither the sum of the weights nor that of weights x V is rescaled"),
    ],
    ids=["weights x V", "weights", "both"],
)
@pytest.mark.by_day("both", "weights")
def test_sums_that_are_not_rescaled(
    weights: Any, total: Any, words: str, plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """The commonest mistake in an online softmax would be shown as numbers only, or as a constant factor."""
    case = msgspec.structs.replace(dense, seq_lens=(40, 5), values=Values(keys="rising"))
    planted = plant(weights=lambda s: weights(s) / total(s).sum(), lse=lambda s: s.max() + total(s).sum().log())
    failure = failure_of(planted, case)
    assert failure.cause == "not_rescaled"
    assert words in failure.message
    falling = msgspec.structs.replace(case, values=Values(keys="falling"))
    assert judge(planted, falling, device="cpu").failure is None


@pytest.mark.parametrize(("kept", "which"), [(0, "second"), (1, "other, from the first on,")])
@pytest.mark.parametrize("tile", [8, 16])
def test_a_maximum_that_every_second_tile_keeps_is_told(
    tile: int, kept: int, which: str, plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """What was summed before would be told as weights that are wrong somehow, or as rounded scores."""

    def weights(scores: Tensor) -> Tensor:
        top, found = torch.tensor(-torch.inf), torch.zeros_like(scores)
        for number, start in enumerate(range(0, len(scores), tile)):
            part = scores[start : start + tile]
            higher = torch.maximum(top, part.max())
            found = found * (top - higher).exp()
            found[start : start + tile] = (part - higher).exp()
            top = higher if number % 2 == kept else top
        return found / found.sum()

    case = msgspec.structs.replace(dense, seq_lens=(60, 40), values=Values(keys="normal", values="normal", seed=2))
    kernel = plant(weights=weights, supports=attnfuzz.Supports(lse="none"), after=lambda inputs, out, lse: out)
    failure = failure_of(kernel, case)
    assert f"the running maximum is not kept after every {which} tile of {tile} keys" in failure.message
    assert failure.cause == "not_rescaled"


@pytest.mark.parametrize("seed", [1, 2])
def test_a_factor_with_a_limit_is_told_by_cases_that_stay_below_it(
    seed: int, plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """Whether the cause is named would depend on how large the scores of the first case are that fails."""

    def average(scores: Tensor, v: Tensor) -> Tensor:
        top, out, total = torch.tensor(-torch.inf), torch.zeros(v.shape[1]), torch.zeros(())
        for score, value in zip(scores, v, strict=True):
            higher = torch.maximum(top, score)
            added, rescale = (score - higher).exp(), (top - higher).exp()
            inverted = (higher - top).exp().clamp(max=1e4) if top > -torch.inf else rescale
            out, total, top = out * inverted + added * value, total * rescale + added, higher
        return out / total

    needle = Values(needles=(Needle(seq=0, position=2, kv_head=0),), seed=seed)
    case = msgspec.structs.replace(
        dense, num_q_heads=1, num_kv_heads=1, head_size=16, scale=0.25, dtype="float16", seq_lens=(3,), values=needle
    )
    supports = attnfuzz.Supports(lse="none")
    kernel = plant(weights=lambda s: s, average=average, supports=supports, after=lambda inputs, out, lse: out)
    failure = failure_of(kernel, case)
    assert float(failure.message.split(" = ")[1].split(",")[0]) > 5000  # e^16 times as much is more than there is
    assert failure.cause == "not_rescaled"
    assert "is multiplied by exp(new - old maximum), not exp(old - new)" in failure.message


def test_a_needle_in_the_second_tile_does_not_tell_that_of_another_size(
    plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """Of tiles of half the size it would be the third: a larger score in each tile tells."""

    def beside_tiles_of_32(scores: Tensor) -> Tensor:
        tops = torch.stack([scores[: at // 32 * 32 + 32].max() for at in range(len(scores))])
        return (scores - tops).exp()

    needle = Needle(seq=0, position=32, kv_head=0)
    values = Values(keys="equal", needles=(needle,))
    case = msgspec.structs.replace(
        dense, num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(33,), scale=0.25, values=values
    )
    total = beside_tiles_of_32
    planted = plant(weights=lambda s: beside_all(s) / total(s).sum(), lse=lambda s: s.max() + total(s).sum().log())
    message = failure_of(planted, case).message
    assert message.endswith("the sum of the weights is not rescaled when the maximum grows")


@pytest.mark.parametrize("seed", [1, 4])
def test_a_sum_that_is_not_rescaled_in_some_steps_is_told(
    seed: int, plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """What is left out by a condition that is rarely met would be shown as numbers, and each case as another bug."""

    def average(scores: Tensor, v: Tensor) -> Tensor:
        top, out, total = torch.tensor(-torch.inf), torch.zeros(v.shape[1]), beside_all(scores).sum()
        for number, start in enumerate(range(0, len(v), 16)):
            part = scores[start : start + 16].float()
            higher = torch.maximum(top, part.max())
            rescale = (top - higher).exp()
            out = out * (1.0 if number % 2 and rescale < 0.001 else rescale)
            out = out + (part - higher).exp() @ v[start : start + 16].float()
            top = higher
        return out / total

    rising = Values(keys="rising", values="normal", logit_exponent=6, seed=seed)
    case = msgspec.structs.replace(dense, seq_lens=(60,), values=rising)
    failure = failure_of(plant(weights=lambda s: s, average=average), case)
    assert failure.cause == "not_rescaled"
    assert "the sum of weights x V is not rescaled in some of the steps in which the maximum grows" in failure.message


@pytest.mark.parametrize("keys", ["normal", "equal"])
@pytest.mark.parametrize("exponent", [0, 3])
@pytest.mark.by_day("0-normal", "3-equal")
def test_a_token_that_has_all_weight_is_missed(
    keys: Any, exponent: int, plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """Without it the others have what was nothing beside it: the scores would be said to have the wrong sign."""
    planted = plant(length=lambda n: n - 1, after=lambda inputs, out, lse: out, supports=WITHOUT_LSE)
    for length in (2, 5):
        values = Values(keys=keys, logit_exponent=exponent, needles=(Needle(0, length - 1, 0),))
        case = msgspec.structs.replace(dense, seq_lens=(length,), num_q_heads=1, num_kv_heads=1, values=values)
        failure = failure_of(planted, case)
        assert failure.cause == "tokens_dropped", failure.message
        assert f"token {length - 1} of sequence 0 is dropped" in failure.message


def test_nothing_is_claimed_of_noise(plant: Any, dense: Case, failure_of: Any) -> None:
    """A wrong row that no mistake explains would be given a confident explanation."""
    noise = torch.linspace(-3, 2, 8).roll(3)
    message = failure_of(plant(average=lambda w, v: w @ v + noise), dense).message
    assert message.endswith(")")
    assert "; " not in message


MERGES = [
    ({"store_empty": lambda out, lse: (out.fill_(1), lse.fill_(0))}, "both sides are empty, ", "expected 0 and -inf"),
    ({"weights": lambda s: s.flip(0).softmax(0)}, "the weights of prefix and suffix are exchanged", ""),
    ({"weights": lambda s: torch.ones_like(s) / len(s)}, "prefix and suffix have equal weights", ""),
    ({"weights": lambda s: (s - s.max()).exp()}, "the output is not divided by the sum of the weights", ""),
    ({"average": lambda w, v: v[0]}, "the output is the prefix alone", ""),
    ({"lse": lambda s: s.max()}, "lse is the larger of the two, not their sum", ""),
    ({"lse": lambda s: s.logsumexp(0) / math.log(2)}, "lse is in base 2", ""),
    (
        {"lse": lambda s: s.max() + (s - s.max()).exp().sum().log2()},
        "lse is the larger of the two plus a base-2 logarithm of the sum",
        "",
    ),
    (
        {"lse": lambda s: s.max() + (s[-1] - s[0]).exp().log1p() if len(s) > 1 else s[0]},
        "lse is the larger of the two plus log(1 + exp(suffix - prefix))",
        "",
    ),
    (
        {"lse": lambda s: s[0] + (s - s.max()).exp().sum().log()},
        "lse adds the logarithm of the sum to that of the prefix, not to the larger of the two",
        "",
    ),
]


@pytest.mark.parametrize(("bugs", "words", "more"), MERGES, ids=[words for _, words, _ in MERGES])
def test_merges(
    bugs: dict[str, Any], words: str, more: str, plant: Any, states: MergeStatesCase, failure_of: Any
) -> None:
    """A mistake in a merge would be shown as numbers only."""
    message = failure_of(plant("merge_states", **bugs), states).message
    assert words in message
    assert more in message


def test_a_state_that_is_left_out_for_being_far_from_the_other_is_told(plant: Any, failure_of: Any) -> None:
    """Weights of 0 and 1 would be told to be powers of a base of which no other pair of states knows anything."""

    def weights(lses: Tensor) -> Tensor:
        return (lses == lses.max()).float() if float(lses.max() - lses.min()) > 4 else lses.softmax(0)

    case = MergeStatesCase(num_q_heads=1, head_size=16, num_tokens=2, seed=42)
    message = failure_of(plant("merge_states", weights=weights), case).message
    assert message.endswith("; the output is that of the larger log-sum-exp alone, though not always")


def test_log_sum_exps_of_the_head_before_are_named(states: MergeStatesCase, failure_of: Any) -> None:
    """Off by one around the end, the first head's would be taken for another mistake than the others'."""

    @attnfuzz.kernel("merge_states")
    def kernel(inputs: Any) -> Any:
        lses = [side if inputs.lse_layout == "TH" else side.T for side in (inputs.prefix_lse, inputs.suffix_lse)]
        lses[1] = lses[1].roll(1, 1)
        weights = torch.stack([lse.double() for lse in lses]).softmax(0)[..., None]
        outputs = torch.stack((inputs.prefix_output, inputs.suffix_output)).double()
        out, lse = (weights * outputs).sum(0).to(inputs.output.dtype), torch.logaddexp(*lses)
        return out, (lse if inputs.lse_layout == "TH" else lse.T.contiguous())

    case = msgspec.structs.replace(states, lse_pairs=(("finite", "finite"),))
    assert ("merge", "suffix LSE, the head before") in {
        (one.mistake, one.way) for one in failure_of(kernel, case).causes
    }


def test_a_merge_that_is_stored_in_16_bits(plant: Any, states: MergeStatesCase, failure_of: Any) -> None:
    """A mistake would have to give an output that rounding has moved by more than the bound of its sum."""
    exchanged = plant("merge_states", weights=lambda s: s.flip(0).softmax(0))
    for dtype in ("float16", "bfloat16"):
        failure = failure_of(exchanged, msgspec.structs.replace(states, dtype=dtype))
        assert failure.message.endswith("the weights of prefix and suffix are exchanged")
        assert failure.cause == "merge"


def test_an_infinite_lse_of_a_merge_is_told_from_one_of_another_base(plant: Any, states: MergeStatesCase) -> None:
    """Beside an LSE of -inf, any other would pass for near, and whoever reads it would look for a wrong base."""
    kernel = plant("merge_states", lse=lambda s: s.logsumexp(0) if len(s) == 2 else torch.tensor(-math.inf))
    lines = explain_case(kernel, states, device="cpu", seconds=60.0).lines
    assert any("lse shows it: -inf, " in line for line in lines), lines
    assert not any("in base 2" in line for line in lines)


def test_one_empty_side(plant: Any, states: MergeStatesCase, failure_of: Any) -> None:
    """That the result is simply the other side would not be said."""

    def lose(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        out[0, 1] = 0
        return out, lse

    message = failure_of(plant("merge_states", after=lose), states).message
    assert "the suffix (lse = -inf) is empty, so the result is the other side; the output is 0" in message


def test_a_dropped_token_that_a_conversion_of_v_gives_nearly_too(plant: Any) -> None:
    """A reader would look for a conversion to float8_e5m2, of which there is none in the kernel."""

    def without_the_last_page_of_one_token(scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[48:] = -torch.inf
        return scores

    kernel = plant("paged_decode", score=without_the_last_page_of_one_token, supports=attnfuzz.Supports(lse="none"))
    shape: Any = {"num_q_heads": 3, "num_kv_heads": 1, "head_size": 16, "scale": 0.125, "dtype": "float16"}
    values = Values(keys="falling", values="positions", seed=28)
    case = PagedDecodeCase(**shape, seq_lens=(49,), block_size=16, values=values)
    failure = judge(kernel, case, device="cpu", oracles=("accuracy",), relations=()).failure
    assert failure is not None
    assert failure.cause == "tokens_dropped"
    assert "token 48 (page 3, offset 0) of sequence 0 is dropped" in failure.message


def test_nothing_read_is_no_maximum_that_begins_at_a_finite_number(plant: Any) -> None:
    """Without an LSE both give zeros where all scores are low: runs with others must tell them apart."""

    def average(weights: Tensor, v: Tensor) -> Tensor:
        return 0 * (weights @ v)

    kernel = plant(average=average, supports=attnfuzz.Supports(lse="none"))
    shape: Any = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 16, "scale": 1.0, "dtype": "float16"}
    case = DenseDecodeCase(**shape, seq_lens=(2,), values=Values(keys="negative", values="positions", logit_exponent=6))
    failure = judge(kernel, case, device="cpu", oracles=("accuracy",), relations=()).failure
    assert failure is not None
    assert float(failure.message.split(" = ")[1].split(",")[0]) == 0
    assert "maximum_begins_finite" not in (failure.cause, *failure.maybe)


def test_measured_weights_of_keys_that_are_values_are_diagnosed() -> None:
    """An MLA kernel's finding would say that attnfuzz could not diagnose it, once its weights are measured."""
    case = LatentDecodeCase(
        num_q_heads=1, num_kv_heads=1, head_size=16, v_head_size=8, seq_lens=(12,), scale=0.25, block_size=16
    )
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(size, 1, 16, generator=draw, dtype=torch.float64) for size in (1, 12))
    scores = 0.25 * (k[:, 0] @ q[0, 0])
    scores[0] = -torch.inf
    row = AttentionRow(
        case=case,
        values=LogicalAttention(q, k, torch.eye(12, dtype=torch.float64)[:, None], (0, 12)),
        row=0,
        head=0,
        got=scores.softmax(0),
        got_lse=float(scores.logsumexp(0)),
        bound=torch.full((12,), 1e-9, dtype=torch.float64),
        lse_bound=1e-9,
        poison=float("nan"),
    )
    assert {one.words for one in given_by_all([row])} == {"token 0 (page 0, offset 0) of sequence 0 is dropped"}


@pytest.mark.parametrize("seq_lens", [(5, 0, 21), (5, 0, 21, 7)])
def test_a_transposed_lse_is_one_mistake_whatever_the_shape(
    seq_lens: tuple[int, ...], plant: Any, dense: DenseDecodeCase, failure_of: Any
) -> None:
    """An LSE of heads by sequences would be wrong shapes and wrong numbers, three findings without a name."""
    case = msgspec.structs.replace(dense, seq_lens=seq_lens)
    failure = failure_of(plant(after=lambda inputs, out, lse: (out, lse.T.contiguous())), case)
    assert failure.cause == "lse_transposed"
    assert "transposed" in failure.message
    one, other = (
        Bug.shown_by("k", told, frozenset())
        for told in (failure, Failure(oracle="residuals", kind="raised result", message="", causes=failure.causes))
    )
    assert one.predicts(other)


def test_an_lse_that_is_wrong_in_one_row_is_not_transposed(plant: Any, dense: DenseDecodeCase, failure_of: Any) -> None:
    """Any wrong square would be told as one of exchanged axes."""
    case = msgspec.structs.replace(dense, seq_lens=(5, 0, 21, 7))

    def swap(inputs: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        lse[0, 3], lse[3, 0] = lse[3, 0].clone(), lse[0, 3].clone()
        return out, lse

    assert failure_of(plant(after=swap), case).cause != "lse_transposed"


def test_a_read_of_dead_memory_alone_bears_out_no_place() -> None:
    """A V that is read with the strides of K was told as a block table that is not followed: dead memory is alike."""
    case = PagedDecodeCase(
        num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(1,), scale=0.25, block_size=1,
        pages=Pages(order="shuffled", spare_blocks=1), strides={"v_cache": "outer_gap"},
    )  # fmt: skip
    failure = judge(gaps_of_k_for_v, case, device="cpu").failure
    assert failure is not None
    assert failure.oracle == "dead_memory"
    assert "physical page" not in failure.message
    assert failure.cause != "block_table"


@attnfuzz.kernel("paged_decode", supports=attnfuzz.Supports(strides="contiguous", layouts=("NHD",)))
def as_long_as_the_next(inputs: Any) -> Any:
    out, lse = torch.zeros_like(inputs.out), torch.full_like(inputs.lse, -torch.inf)
    for seq, length in enumerate(inputs.seq_lens.roll(-1).tolist()):
        if length:
            tokens = torch.arange(length)
            pages = inputs.block_table[seq].long()[
                (tokens // inputs.block_size).clamp(max=inputs.block_table.shape[1] - 1)
            ]
            k, v = (one[pages, tokens % inputs.block_size].double() for one in (inputs.k_cache, inputs.v_cache))
            scores = inputs.scale * torch.einsum("hd,thd->ht", inputs.q[seq].double(), k)
            out[seq] = torch.einsum("ht,thd->hd", scores.softmax(-1), v).to(out.dtype)
            lse[seq] = scores.logsumexp(-1)
    return out, lse


@pytest.mark.parametrize(
    ("lengths", "oracle", "words"),
    [
        ((9, 4), "dead_memory", "sequence 0 is taken to be as long as sequence 1: 4 tokens, not 9"),
        ((1, 0), "accuracy", "sequence 1 is taken to be as long as sequence 0: 1 token, not 0"),
        ((3, 5), "dead_memory", "sequence 0 is taken to be as long as sequence 1: 5 tokens, not 3"),
    ],
)
def test_the_length_of_another_sequence_is_named(
    lengths: tuple[int, ...], oracle: str, words: str, failure_of: Any
) -> None:
    """It would be told as tokens that are dropped, as others past the end and as memory that is dead: three bugs."""
    case = PagedDecodeCase(
        num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=lengths, scale=0.25, block_size=8,
        values=Values(keys="normal", values="normal", seed=5),
    )  # fmt: skip
    failure = failure_of(as_long_as_the_next, case)
    assert (failure.oracle, failure.cause) == (oracle, "another_length")
    assert failure.message.endswith(words)
