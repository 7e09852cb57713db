"""What shrinking makes of each field, and which of two cases is smaller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from attnfuzz.cases.facets import changed
from attnfuzz.cases.facets.sequences import keep_sequences, rescaled_length
from attnfuzz.minimise import minimise, simplifications, size_key
from attnfuzz.problems.block_table import freed_tokens
from attnfuzz.problems.cases import (
    PROBLEMS,
    Case,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    Problem,
    encode_case,
)
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.quantised_kv import KV_DTYPES, QuantisedKv
from attnfuzz.problems.recipes import Needle, Pages, Values
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import OptionValue, Supports
from attnfuzz.problems.variants import PLAIN_VARIANT, VARIANTS, Variant
from attnfuzz.strategies.cases import cases
from tests.sample_cases import attention_case, paged_case

Fails = Callable[[Any], bool]
DECODE = paged_case(num_q_heads=4, num_kv_heads=2, head_size=64, seq_lens=(40, 7), scale=0.125, block_size=16)
ALL = Supports(variants=VARIANTS, kv_dtypes=KV_DTYPES)
SCALED = QuantisedKv(dtype="float8_e5m2", per="head", scales="scattered")
IN_8_BITS = {"kv": SCALED, "strides": {"v_scale": "every_other"}}
FREED = {"variant": Variant(window=17, freed_pages=True)}
SEVERAL = {"variant": Variant(window=17, alibi="scattered", sinks="high"), "strides": {"sinks": "every_other"}}
NEEDED: dict[str, tuple[dict[str, Any], Fails, dict[str, Any]]] = {
    "variants that do not matter go": (
        SEVERAL, lambda case: case.num_seqs >= 1, {"variant": PLAIN_VARIANT, "strides": {}},
    ),
    "one of several stays with its simplest number": (
        SEVERAL, lambda case: case.variant.sinks is not None, {"variant": Variant(sinks="level")},
    ),
    "pages that need not be freed are kept": (
        FREED, lambda case: case.variant.window is not None, {"variant": Variant(window=1)},
    ),
    "freed pages shrink to one": (
        FREED,
        lambda case: any(freed_tokens(case)),
        {"seq_lens": (2,), "block_size": 1, "variant": Variant(window=1, freed_pages=True)},
    ),
    "a window shrinks with the lengths that leave it": (
        {"variant": Variant(window=17)},
        lambda case: case.variant.window is not None and max(case.seq_lens) > case.variant.window,
        {"variant": Variant(window=1), "seq_lens": (2,)},
    ),
    "a cap becomes a simple one": (
        {"variant": Variant(soft_cap=0.5)},
        lambda case: case.variant.soft_cap is not None,
        {"variant": Variant(soft_cap=1.0)},
    ),
    "a cache that does not matter becomes plain": (
        IN_8_BITS, lambda case: case.num_seqs >= 1, {"kv": None, "strides": {}},
    ),
    "an 8-bit cache keeps its simplest scales": (
        IN_8_BITS, lambda case: case.kv is not None, {"kv": QuantisedKv(dtype="float8_e4m3fn"), "strides": {}},
    ),
    "scales per head stay where they are needed": (
        IN_8_BITS,
        lambda case: case.kv is not None and case.kv.per == "head" and case.kv.scales != "one",
        {"kv": QuantisedKv(dtype="float8_e4m3fn", per="head", scales="powers")},
    ),
    "packed heads shrink to one piece": (
        IN_8_BITS | {"layout": "packed"},
        lambda case: case.kv is not None and case.layout == "packed",
        {"head_size": 16},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_what_a_failure_needs_is_left_and_no_more(name: str) -> None:
    """A report would name a window, a scale or a number for a bug that has nothing to do with it."""
    fields, fails, left = NEEDED[name]
    case = msgspec.structs.replace(DECODE, **fields)
    assert fails(case)
    found = minimise(case, fails, supports=ALL, options={})
    assert {one: getattr(found, one) for one in left} == left


@pytest.mark.parametrize(
    ("fails", "sizes", "expected"),
    [
        (lambda case: case.seq_lens, (128, 40), (16, 16)),
        (lambda case: case.value_size > 16, (40, 192), (40, 40)),
        (lambda case: case.value_size > 16, (16, 80), (40, 40)),
        (lambda case: case.v_head_size is not None, (40, 192), (16, 13)),
        (lambda case: case.v_head_size is not None, (13, 16), (16, 13)),
        (lambda case: case.value_size < case.head_size, (40, 16), (16, 13)),
        (lambda case: case.value_size > case.head_size, (40, 192), (16, 40)),
        (lambda case: case.value_size > 2 * case.head_size, (40, 192), (16, 40)),
        (lambda case: case.head_size >= 96 and case.value_size < 64, (128, 40), (96, 16)),
        (lambda case: True, (192, 128), (192, 128)),  # for which a kernel has been written
    ],
)
def test_heads_of_v_become_those_of_k_or_the_smallest_such_pair(
    fails: Fails, sizes: tuple[int, int], expected: tuple[int, int]
) -> None:
    """A report would name two sizes for a bug of one, or sizes that mean nothing."""
    k, v = sizes
    case = msgspec.structs.replace(DECODE, head_size=k, v_head_size=v, scale=default_scale(k))
    one_pair = {"head_sizes": (192,), "v_head_sizes": (128,)} if k == 192 else {"v_head_sizes": "any"}
    found = minimise(case, fails, supports=Supports(**one_pair), options={})
    assert isinstance(found, PagedDecodeCase)
    assert (found.head_size, found.value_size, found.scale) == (*expected, default_scale(found.head_size))


QUERIES = attention_case(
    num_q_heads=6,
    num_kv_heads=2,
    head_size=64,
    scale=0.125,
    block_size=16,
    seq_lens=(40, 33, 5, 0, 21),
    query_lens=(37, 1, 5, 0, 0),
    query_slack=3,
    padding_tokens=5,
    seq_slack=9,
    values=Values(needles=(Needle(0, 2, 1), Needle(0, 39, 0))),
)


def lens(case: PagedAttentionCase) -> list[tuple[int, int]]:
    return list(zip(case.query_lens, case.seq_lens, strict=True))


@pytest.mark.parametrize(
    ("fails", "left"),
    [
        (lambda case: True, [(1, 1)]),
        (lambda case: max(case.query_lens) > 16, [(17, 17)]),
        (lambda case: any(0 < n < length for n, length in lens(case)), [(1, 2)]),
        (lambda case: any(2 <= n <= length - 3 for n, length in lens(case)), [(2, 5)]),
        (lambda case: 0 in case.query_lens, [(0, 1), (1, 1)]),
        (lambda case: (0, 0) in lens(case), [(0, 0), (1, 1)]),
        (lambda case: case.query_lens[0] % 16 == 5, [(5, 5)]),
    ],
    ids=["anything", "second tile", "context", "chunk behind a context", "no query", "no token", "place in its tile"],
)
def test_query_tokens_and_contexts_are_those_that_the_failure_needs(fails: Fails, left: list[tuple[int, int]]) -> None:
    """A reader would wonder about query tokens, or context, that the bug does not need."""
    found = minimise(QUERIES, fails, supports=Supports(), options={})
    assert isinstance(found, PagedAttentionCase)
    assert sorted(lens(found)) == left
    assert (found.query_slack, found.seq_slack, found.padding_tokens, found.num_q_heads) == (0, 0, 0, 1)


def test_bounds_stay_loose_only_where_that_matters() -> None:
    """A bug that takes a bound for a length would lose what shows it, or shrinking go round in circles."""
    is_loose: Fails = lambda case: case.max_seq_len > max(case.seq_lens)  # noqa: E731 - a typed lambda, as above
    found = minimise(QUERIES, is_loose, supports=Supports(), options={})
    assert isinstance(found, PagedAttentionCase)
    assert (found.seq_slack, found.query_slack, found.seq_lens) == (1, 0, (1,))
    key = size_key(QUERIES)
    assert all(size_key(one) < key for one in simplifications(QUERIES, supports=Supports(), options={}))


CASE = paged_case(
    num_q_heads=6,
    num_kv_heads=3,
    head_size=64,
    seq_lens=(17, 5, 9),
    scale=default_scale(64),
    block_size=16,
    values=Values(
        needles=(
            Needle(seq=0, position=16, kv_head=2),
            Needle(seq=2, position=3, kv_head=0),
            Needle(seq=2, position=8, kv_head=1),
        )
    ),
)


def needles_of(case: PagedDecodeCase | None) -> list[tuple[int, int, int]]:
    assert case is not None
    return [(needle.seq, needle.position, needle.kv_head) for needle in case.values.needles]


def test_needles_follow_their_sequence() -> None:
    """After dropping a sequence, needles would point to another one or to none."""
    assert needles_of(keep_sequences(CASE, [2])) == [(0, 3, 0), (0, 8, 1)]
    assert needles_of(keep_sequences(CASE, [1])) == []
    assert needles_of(keep_sequences(CASE, [2, 0])) == [(0, 3, 0), (0, 8, 1), (1, 16, 2)]


MEETING = Values(needles=(Needle(seq=0, position=1, kv_head=0), Needle(seq=0, position=1, kv_head=1)))


@pytest.mark.parametrize(
    ("changes", "needles"),
    [
        ({"seq_lens": (3, 5, 4)}, [(0, 2, 2), (2, 3, 0), (2, 3, 1)]),  # the last token stays the last
        ({"seq_lens": (17, 5, 0)}, [(0, 16, 2)]),
        ({"num_kv_heads": 2, "num_q_heads": 2}, [(0, 16, 1), (2, 3, 0), (2, 8, 1)]),  # to heads that are left
        ({"num_kv_heads": 1, "num_q_heads": 1, "values": MEETING}, [(0, 1, 0)]),
    ],
)
def test_needles_move_to_where_they_can_be(changes: dict[str, Any], needles: list[tuple[int, int, int]]) -> None:
    """A failure at the end of a sequence would be lost when that gets shorter, or the case be invalid."""
    values = changes.pop("values", CASE.values)
    assert needles_of(changed(msgspec.structs.replace(CASE, values=values), **changes)) == needles


def test_other_head_sizes_keep_the_case_usual() -> None:
    """A smaller head size would come with an unusual scale, be refused for states to merge, or end in an error."""
    smaller, other = (changed(msgspec.structs.replace(CASE, scale=scale), head_size=16) for scale in (0.125, 0.5))
    assert smaller is not None
    assert other is not None
    assert (smaller.head_size, smaller.scale, other.scale) == (16, 0.25, 0.5)
    merged = changed(MergeStatesCase(num_q_heads=1, num_tokens=1, head_size=64), head_size=13)
    assert merged is not None
    assert merged.head_size == 13
    assert changed(CASE, layout="packed", head_size=13) is None


@pytest.mark.parametrize(
    ("length", "old", "new", "expected"),
    [
        (16, 16, 2, 2),
        (17, 16, 2, 3),
        (31, 16, 2, 3),
        (31, 16, 4, 7),
        (48, 16, 1, 3),
        (20, 16, 8, 12),
        (30, 16, 4, 7),
        (0, 16, 4, 0),
        (1, 16, 4, 1),
    ],
)
def test_rescaled_lengths_end_at_the_same_place(length: int, old: int, new: int, expected: int) -> None:
    """A boundary failure would be lost when pages or tiles get smaller."""
    assert rescaled_length(length, old, new) == expected


OPTIONS: dict[str, tuple[OptionValue, ...]] = {"tile": (32, 16), "variant": ("b", "a")}
PAGED = simplest_case("paged_decode", Supports(), OPTIONS)


def paged(**fields: Any) -> Case:
    return msgspec.structs.replace(PAGED, **fields)


@pytest.mark.parametrize("problem", PROBLEMS)
@settings(max_examples=60, phases=[Phase.generate], database=None, derandomize=True, deadline=None)
@given(data=st.data())
def test_order_is_total_and_ends_at_the_simplest_case(problem: Problem, data: st.DataObject) -> None:
    """Two workers would keep different cases of one bug, or reduction would not know where to stop."""
    strategy = cases(problem, options=OPTIONS)
    one, other = data.draw(strategy), data.draw(strategy)
    sizes = [size_key(case, options=OPTIONS) for case in (one, other)]
    assert (sizes[0] == sizes[1]) == (encode_case(one) == encode_case(other))
    assert sizes[0] <= sizes[1] or sizes[1] <= sizes[0]
    assert size_key(simplest_case(problem, Supports(), OPTIONS), options=OPTIONS) <= min(sizes)


@pytest.mark.parametrize(
    ("simpler", "other"),
    [
        (paged(seq_lens=(900,)), paged(seq_lens=(1, 1))),
        (paged(seq_lens=(1,)), paged(seq_lens=(0,))),
        (paged(seq_lens=(0,)), paged(seq_lens=(2,))),
        (paged(num_q_heads=2), paged(num_q_heads=3)),
        (paged(head_size=16, scale=0.25), paged(head_size=13, scale=13**-0.5)),
        (paged(seq_lens=(17,), block_size=32), paged(seq_lens=(17,), block_size=16)),
        (paged(block_size=8), paged(block_size=3)),
        (paged(dtype="float16"), paged(dtype="bfloat16")),
        (paged(layout="HND"), paged(layout="packed")),
        (paged(pages=Pages(order="reversed")), paged(pages=Pages(order="shuffled"))),
        (paged(pages=Pages(padding="zero")), paged(pages=Pages(padding="wrong_page"))),
        (paged(strides={"q": "padded_rows"}), paged(strides={"q": "every_other"})),
        (paged(strides={"q": "every_other"}), paged(strides={"q": "padded_rows", "out": "padded_rows"})),
        (paged(options={"tile": 32, "variant": "b"}), paged(options={"tile": 16, "variant": "b"})),
        (paged(values=Values(keys="integers")), paged(values=Values(keys="negative"))),
        (paged(values=Values(logit_exponent=-1)), paged(values=Values(logit_exponent=2))),
        (paged(values=Values(seed=1)), paged(values=Values(needles=(Needle(seq=0, position=0, kv_head=0),)))),
        (paged(scale=0.25), paged(scale=1.0)),
        (paged(scale=1.0), paged(scale=0.125)),
    ],
)
def test_what_a_reader_would_call_simpler_is_smaller(simpler: Case, other: Case) -> None:
    """Reduction would end in a case that is harder to understand."""
    assert size_key(simpler, options=OPTIONS) < size_key(other, options=OPTIONS)


def test_without_the_kernels_choices_the_smaller_option_is_simpler() -> None:
    """Cases of unknown kernels could not be compared."""
    small = paged(options={"tile": 16, "variant": "a"})
    assert size_key(small) < size_key(paged(options={"tile": 32, "variant": "a"}))
    assert size_key(small) < size_key(paged(options={"tile": "large", "variant": "a"}))
