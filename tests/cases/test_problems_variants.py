"""Windows, soft caps, ALiBi and sinks, and the pages that a window frees."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import find

from attnfuzz.cases.supported import why_unsupported
from attnfuzz.inputs.reference import attention_reference, row_weights
from attnfuzz.inputs.writing import placements, write_pages
from attnfuzz.problems.block_table import freed_tokens
from attnfuzz.problems.cases import (
    DenseDecodeCase,
    PagedAttentionCase,
    PagedDecodeCase,
    SplitDecodeCase,
    decode_case,
    encode_case,
)
from attnfuzz.problems.recipes import Pages, Values
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import PLAIN_VARIANT, VARIANTS, Variant, alibi_slopes, sink_logits
from attnfuzz.strategies.cases import cases
from attnfuzz.values import attention_values
from attnfuzz.values.tokens import token_table

SHAPE: dict[str, Any] = {"num_q_heads": 6, "num_kv_heads": 2, "head_size": 8, "seq_lens": (4, 0, 7), "scale": 0.7}


def paged(**fields: Any) -> PagedDecodeCase:
    values = Values(keys="normal", values="normal", seed=1)
    return PagedDecodeCase(**{**SHAPE, "block_size": 4, "values": values, "variant": Variant(**fields)})


def test_a_plain_case_says_nothing_of_variants() -> None:
    """Saved cases would change, and equal cases no longer have equal bytes."""
    assert b"variant" not in encode_case(paged())
    assert paged().variant is PLAIN_VARIANT


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window": 0}, "window=0 must be between 1"),
        ({"soft_cap": 0.0}, r"soft_cap=0.0 must be in \(0"),
        ({"soft_cap": math.nan}, "soft_cap=nan must be in"),
        ({"soft_cap": 1.0, "alibi": "geometric"}, "exclude each other"),
    ],
)
def test_what_means_nothing_is_refused(fields: dict[str, Any], words: str) -> None:
    """A case without a defined result would be judged against one."""
    with pytest.raises(ValueError, match=words):
        Variant(**fields)


def test_problems_without_a_meaning_for_them_refuse_variants() -> None:
    """A variant would be ignored silently, or a partial state be asked for a sink."""
    with pytest.raises(ValueError, match="in dense_decode"):
        DenseDecodeCase(**SHAPE, variant=Variant(window=2))
    with pytest.raises(ValueError, match="a sink belongs to a row"):
        SplitDecodeCase(**SHAPE, block_size=4, num_splits=2, variant=Variant(sinks="level"))


def test_a_kernel_is_not_replayed_on_what_it_does_not_declare() -> None:
    """`attnfuzz replay` would blame a kernel for a variant that it never promised."""
    reason = why_unsupported(Supports(variants=("window",)), {}, paged(window=2, sinks="low"))
    assert reason == "variant.sinks='low', but the kernel declares ('window',)"


def test_published_slopes() -> None:
    """ALiBi would be tested with slopes that no model has."""
    assert alibi_slopes("geometric", 8, 0) == tuple(2.0 ** -(h + 1) for h in range(8))
    assert alibi_slopes("geometric", 6, 0) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)
    assert alibi_slopes("geometric", 16, 0)[0] == pytest.approx(2**-0.5, rel=1e-7)


def test_slopes_and_sinks_are_float32_numbers_that_differ_between_heads() -> None:
    """The reference would compute with other numbers than the kernel, or a wrong head's not be told apart."""
    for numbers in (
        alibi_slopes("geometric", 12, 0),
        alibi_slopes("scattered", 12, 3),
        *(sink_logits(recipe, 12, 3) for recipe in ("level", "high", "low")),
    ):
        assert torch.tensor(numbers, dtype=torch.float32).double().tolist() == list(numbers)
        assert len(set(numbers)) > 6


@pytest.mark.parametrize("recipe", ["level", "high", "low", "absent"])
def test_bfloat16_holds_sinks(recipe: Any) -> None:
    """FlashAttention 3, which takes them in bfloat16, would be accused of what the adapter rounds."""
    for seed in range(20):
        numbers = sink_logits(recipe, 12, seed)
        assert torch.tensor(numbers).bfloat16().tolist() == list(numbers)


def by_definition(case: PagedDecodeCase, seq: int, head: int) -> tuple[list[float], float]:
    """In plain Python; query heads 0, 1, 2 read KV head 0, the others KV head 1."""
    values, variant = attention_values(case), case.variant
    numbers = variant.per_head_numbers(case.num_q_heads, case.values.seed)
    k, v = (part[:, head // 3].double().tolist() for part in values.sequence(seq))
    q, query = values.q[seq, head].double().tolist(), case.seq_lens[seq] - 1
    terms: list[tuple[float, list[float]]] = []
    for t, (key, value) in enumerate(zip(k, v, strict=True)):
        if variant.window is None or query - variant.window < t <= query:
            score = case.scale * math.fsum(a * b for a, b in zip(q, key, strict=True))
            if variant.soft_cap is not None:
                score = variant.soft_cap * math.tanh(score / variant.soft_cap)
            if variant.alibi is not None:
                score += numbers["alibi_slopes"][head] * (t - query)
            terms.append((score, value))
    if variant.sinks not in (None, "absent"):
        terms.append((numbers["sinks"][head], [0.0] * case.head_size))
    if not terms:
        return [0.0] * case.head_size, -math.inf
    top = max(score for score, _ in terms)
    total = math.fsum(math.exp(score - top) for score, _ in terms)
    out = [math.fsum(math.exp(s - top) * value[d] for s, value in terms) / total for d in range(case.head_size)]
    return out, top + math.log(total)


@pytest.mark.parametrize(
    "fields",
    [
        {"window": 1},
        {"window": 3, "soft_cap": 0.5},
        {"window": 100, "alibi": "scattered"},
        {"alibi": "geometric", "sinks": "level"},
        {"soft_cap": 2.0, "sinks": "high"},
        {"sinks": "low"},
        {"sinks": "absent"},
    ],
    ids=str,
)
def test_the_reference_is_the_definition(fields: dict[str, Any]) -> None:
    """Every verdict on a variant would be measured against something else."""
    case = paged(**fields)
    values = attention_values(case)
    expected = attention_reference(case, values)
    for seq in range(3):
        for head in range(6):
            out, lse = by_definition(case, seq, head)
            assert expected.out[seq, head].tolist() == pytest.approx(out, rel=1e-12, abs=1e-12)
            assert expected.lse[seq, head].item() == pytest.approx(lse, rel=1e-12)
            k, v = (part[:, head // 3].double() for part in values.sequence(seq))
            weights, row_lse = row_weights(case, seq, head, case.scale * (k @ values.q[seq, head].double()))
            assert (weights @ v).nan_to_num(0.0).tolist() == pytest.approx(out, rel=1e-12, abs=1e-12)
            assert row_lse.item() == pytest.approx(lse, rel=1e-12)


ONE_HEAD: dict[str, Any] = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 8, "scale": 1.0, "block_size": 4}


def windowed(*seq_lens: int, window: int = 3, **fields: Any) -> PagedDecodeCase:
    return PagedDecodeCase(**ONE_HEAD, seq_lens=seq_lens, variant=Variant(window=window, freed_pages=True), **fields)


def test_only_whole_pages_before_the_window_are_freed() -> None:
    """A token that the query sees would be dead memory, and a right kernel accused."""
    # windows of 3 begin with tokens 3, 4 and 8
    assert freed_tokens(windowed(6, 7, 11, 0)) == (0, 4, 8, 0)
    assert freed_tokens(windowed(40, window=40)) == (0,)


def test_the_first_query_token_decides() -> None:
    """What a prompt's first token sees would be dead since its last one does not."""
    variant = Variant(window=3, freed_pages=True)
    case = PagedAttentionCase(**ONE_HEAD, seq_lens=(12, 12, 12), query_lens=(1, 4, 0), variant=variant)
    # the first query tokens stand at 11 and 8
    assert freed_tokens(case) == (8, 4, 8)


def test_nothing_is_freed_without_a_window() -> None:
    """All of a plain sequence would be dead, or equal cases have unequal bytes."""
    assert Variant(freed_pages=True) == Variant()
    kept = PagedDecodeCase(**ONE_HEAD, seq_lens=(40,), variant=Variant(window=3))
    assert freed_tokens(kept) == (0,)
    assert b"freed" not in encode_case(kept)
    assert decode_case("paged_decode", encode_case(windowed(40))) == windowed(40)


@pytest.mark.parametrize("shared_blocks", [0, 1])
def test_freed_pages_are_not_written_unless_another_sequence_keeps_them(shared_blocks: int) -> None:
    """A kernel that reads them would find the right numbers there; or one that shares them would lose its own."""
    case = windowed(11, 6, pages=Pages(shared_blocks=shared_blocks))
    tensors = {
        name: torch.full((1, *shape), torch.nan, dtype=torch.float16)
        for name, shape in {"q": (2, 1, 8), "k_cache": (5, 4, 1, 8), "v_cache": (5, 4, 1, 8)}.items()
    }
    tensors["block_table"] = torch.zeros((1, 2, 3), dtype=torch.int32)
    tensors["seq_lens"] = torch.zeros((1, 2), dtype=torch.int32)
    (placement,) = placements([case], token_table([case], "cpu"))
    write_pages(case, tensors, attention_values(case, "cpu"), placement)
    first, second = tensors["block_table"][0, :, 0].tolist()
    assert (first == second) is bool(shared_blocks)
    for cache in ("k_cache", "v_cache"):
        written = ~tensors[cache][0].isnan().any(-1).any(-1)  # [page, offset]
        assert written[first].tolist() == [bool(shared_blocks)] * 4
        assert written[second].all()
        assert written[tensors["block_table"][0, 0, 1]].sum() == 0
        assert written[tensors["block_table"][0, 0, 2]].tolist() == [True] * 3 + [False]


def test_a_kernel_may_decline_them() -> None:
    """Who keeps all pages would be shown findings that cannot happen there, with no word to end them."""
    declining = Supports(variants=VARIANTS, freed_pages=False)
    why = why_unsupported(declining, {}, windowed(40))
    assert why == "variant.freed_pages=True, but the kernel declares freed_pages=False"
    assert why_unsupported(Supports(variants=VARIANTS), {}, windowed(40)) is None


def test_they_are_drawn() -> None:
    """Kernels that leak what a freed page holds would pass."""
    found = find(
        cases("paged_decode", supports=Supports(variants=VARIANTS)),
        lambda case: isinstance(case, PagedDecodeCase) and any(freed_tokens(case)),
    )
    assert isinstance(found, PagedDecodeCase)
    assert found.variant.freed_pages
