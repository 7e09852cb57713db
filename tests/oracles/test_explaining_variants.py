"""What is said of kernels that mistake a variant, and of other mistakes where a case has one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from torch import Tensor

from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.explaining.explain import explain_case
from attnfuzz.judging.judge import judge
from attnfuzz.kernels import eager, eager_attention
from attnfuzz.problems.cases import PagedAttentionCase, PagedDecodeCase
from attnfuzz.problems.recipes import Pages, Values
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import VARIANTS, Variant

DECODE = PagedDecodeCase(
    num_q_heads=4,
    num_kv_heads=2,
    head_size=8,
    scale=0.5,
    dtype="float32",
    block_size=4,
    seq_lens=(9, 0, 6),
    values=Values(keys="normal", values="normal"),
    pages=Pages(order="shuffled", spare_blocks=1),
)
WIDE = msgspec.structs.replace(DECODE, num_q_heads=6)
QUERIES = PagedAttentionCase(
    **{name: getattr(DECODE, name) for name in DECODE.__struct_fields__} | {"seq_lens": (9, 2, 6)},
    query_lens=(3, 0, 6),
)
OTHER_LONGEST = msgspec.structs.replace(QUERIES, seq_lens=(9, 7, 6), query_lens=(1, 5, 3))
EACH = (
    Variant(window=4),
    Variant(soft_cap=0.5),
    Variant(alibi="scattered"),
    Variant(sinks="level"),
    Variant(window=3, alibi="geometric", sinks="level"),
)

State = tuple[Tensor, Tensor]
Case = PagedDecodeCase | PagedAttentionCase


def right(inputs: Any) -> State:
    names = ["q", "k_cache", "v_cache", "block_table", "seq_lens", "scale", "block_size", "layout"]
    names += ["window", "soft_cap", "alibi_slopes", "sinks"]
    if not hasattr(inputs, "cu_seqlens_q"):
        return eager.paged_decode(**{name: getattr(inputs, name) for name in names})
    names += ["cu_seqlens_q", "max_query_len", "max_seq_len"]
    return eager_attention.paged_attention(**{name: getattr(inputs, name) for name in names})


def altered(**changes: Callable[[Any], Any]) -> Callable[[Any], State]:
    """The right answer to a question in which each named input is replaced by what is made of all inputs."""
    return lambda inputs: right(dataclasses.replace(inputs, **{name: make(inputs) for name, make in changes.items()}))


def before_own_entries(inputs: Any) -> Tensor:
    table: Tensor = inputs.block_table.clone()
    table[:, 1:] = inputs.block_table[:, :-1]
    return table


no_window = altered(window=lambda inputs: None)
longer_window = altered(window=lambda inputs: inputs.window + 1)
shorter_window = altered(window=lambda inputs: inputs.window - 1)
much_longer_window = altered(window=lambda inputs: inputs.window + 2)
no_cap = altered(soft_cap=lambda inputs: None)
no_bias = altered(alibi_slopes=lambda inputs: None)
slopes_of_kv_heads = altered(alibi_slopes=lambda inputs: inputs.alibi_slopes[[0, 0, 1, 1]])
slopes_by_group = altered(alibi_slopes=lambda inputs: inputs.alibi_slopes.view(3, 2).T.flatten())
slopes_in_reverse = altered(alibi_slopes=lambda inputs: inputs.alibi_slopes.flip(0))
no_sinks = altered(sinks=lambda inputs: None)
heads_exchanged = altered(k_cache=lambda inputs: inputs.k_cache.flip(2), v_cache=lambda inputs: inputs.v_cache.flip(2))
entry_before = altered(block_table=before_own_entries)
other_query = altered(q=lambda inputs: inputs.q.flip(1))


window_at_the_first_key = altered(
    seq_lens=lambda inputs: inputs.seq_lens.clamp(max=inputs.window), window=lambda inputs: None
)


def sink_for(*tokens: int) -> Callable[[Any], State]:
    """The weight of the sink goes to these tokens, as far as there are so many."""

    def kernel(inputs: Any) -> State:
        out, lse = right(inputs)
        group = out.shape[1] // inputs.v_cache.shape[2]
        for seq, length in enumerate(inputs.seq_lens.tolist()):
            chosen = [token for token in tokens if token < length]
            for token in chosen:
                page, offset = inputs.block_table[seq, token // inputs.block_size], token % inputs.block_size
                v = inputs.v_cache[page, offset].repeat_interleave(group, 0)
                out[seq] += (inputs.sinks - lse[seq]).exp()[:, None] * v / len(chosen)
        return out, lse

    return kernel


def positions_by_the_last_queries(inputs: Any) -> State:
    """Each sequence's queries are placed as if there were as many as the last sequence has."""
    counts = inputs.cu_seqlens_q.diff()
    return right(dataclasses.replace(inputs, seq_lens=(inputs.seq_lens + counts - counts[-1]).clamp(min=0)))


def halved(inputs: Any) -> State:
    out, lse = right(inputs)
    return out * 0.5, lse


def explained(kernel: Callable[[Any], State], case: Case, variant: Variant) -> tuple[str, ...]:
    supports = Supports(layouts=("NHD",), variants=VARIANTS)
    declaration = Declaration(name="kernel", problem=case.problem, supports=supports)
    chosen = msgspec.structs.replace(case, variant=variant)
    return explain_case(Kernel(kernel, declaration), chosen, device="cpu", seconds=60.0).lines


@pytest.mark.parametrize(
    ("mistake", "case", "variant", "line"),
    [
        (
            no_window, DECODE, Variant(window=4),
            r"^sequence 0, query head 0: tokens 0-4 \(pages 0-1\) have weight 0\.\d+, expected 0$",
        ),
        (longer_window, DECODE, Variant(window=4), r"token 4 \(page 1, offset 0\) has weight 0\.\d+, expected 0$"),
        (longer_window, DECODE, Variant(window=4), r"^the window is one key too long$"),
        (shorter_window, DECODE, Variant(window=4), r"^the window is one key too short"),
        (much_longer_window, DECODE, Variant(window=4), r"tokens 3-4 \(pages 0-1\) have weight 0\.\d+, expected 0$"),
        (window_at_the_first_key, DECODE, Variant(window=4), r"^the window lies at the first key of the sequence"),
        (sink_for(0), DECODE, Variant(sinks="level"), r"^the weight of the sink goes to the first key, too$"),
        (
            positions_by_the_last_queries, OTHER_LONGEST, Variant(soft_cap=64.0),
            r"^the query sees the first \d keys only, its position is computed with the query length of the last",
        ),
        (no_cap, DECODE, Variant(soft_cap=0.5), r"the soft cap is left out$"),
        (no_bias, DECODE, Variant(alibi="scattered"), r"ALiBi is left out$"),
        (slopes_of_kv_heads, DECODE, Variant(alibi="scattered"), r"slope is that of query head \d \(the KV head"),
        (slopes_by_group, WIDE, Variant(alibi="scattered"), r"slope is that of query head \d \(numbered by group\)"),
        (slopes_in_reverse, DECODE, Variant(alibi="scattered"), r"that of query head \d \(in reverse order\)"),
        (no_sinks, DECODE, Variant(sinks="level"), r"the sink is left out$"),
        (no_sinks, DECODE, Variant(sinks="level"), r"sequence 1, .*: the sequence is empty: got .* lse = -inf"),
        (no_window, QUERIES, Variant(window=3), r"query 0 of sequence 0, query head 0: tokens 0-3 \(page 0\) have"),
        (longer_window, QUERIES, Variant(window=4), r"the window is one key too long$"),
        (no_sinks, QUERIES, Variant(sinks="level"), r"^the sink is left out$"),
        (no_cap, QUERIES, Variant(soft_cap=0.5), r"the soft cap is left out$"),
        (heads_exchanged, DECODE, Variant(window=4), r"query head 0 reads KV head 1, expected 0$"),
        (heads_exchanged, QUERIES, Variant(sinks="level"), r"query head 0 reads KV head 1, expected 0$"),
        (entry_before, DECODE, Variant(alibi="scattered"), r"a page is read through the entry before its own"),
        (other_query, DECODE, Variant(soft_cap=0.5), r"the query of sequence 0, head 3 is read$"),
        (halved, DECODE, Variant(sinks="level"), r"all weights are 0\.5 x the right ones$"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(mistake: Callable[[Any], State], case: Case, variant: Variant, line: str) -> None:
    """The explanation would compare with plain attention: every weight of a right kernel would be called wrong."""
    lines = explained(mistake, case, variant)
    assert any(re.search(line, one) for one in lines), "\n".join(lines)


def test_what_fits_one_token_alone_is_not_told() -> None:
    """Of one token a factor is all that can be seen, which several mistakes give that no longer sequence shows."""
    variant = Variant(sinks="level")
    case = PagedDecodeCase(
        num_q_heads=1, num_kv_heads=1, head_size=16, scale=0.25, block_size=1, seq_lens=(1,), variant=variant
    )
    declaration = Declaration(
        name="kernel", problem=case.problem, supports=Supports(layouts=("NHD",), variants=VARIANTS)
    )
    for kernel, is_told in ((sink_for(0, 1), False), (no_sinks, True)):
        failure = judge(Kernel(kernel, declaration), case, device="cpu", oracles=("accuracy",), relations=()).failure
        assert failure is not None
        assert bool(failure.causes) == is_told, failure.message


@pytest.mark.by_day
@pytest.mark.parametrize("variant", EACH, ids=lambda variant: "+".join(variant.names))
@pytest.mark.parametrize("case", [DECODE, QUERIES], ids=["decode", "queries"])
def test_nothing_is_said_of_the_right_kernel(case: Case, variant: Variant) -> None:
    """A word about a correct kernel would be believed."""
    assert [line.partition(":")[0] for line in explained(right, case, variant)] == [
        "every weight is right, and so is the LSE"
    ]
