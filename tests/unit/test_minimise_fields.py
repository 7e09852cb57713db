"""Each field of a failing case shrinks to what the failure needs, and no further than what the kernel takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attnfuzz.minimise import minimise, simplifications, size_key
from attnfuzz.problems.block_table import freed_tokens
from attnfuzz.problems.cases import PagedAttentionCase, PagedDecodeCase
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.quantised_kv import KV_DTYPES, QuantisedKv
from attnfuzz.problems.recipes import Needle, StrideKind, Values
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import PLAIN_VARIANT, VARIANTS, Variant

Fails = Callable[[Any], bool]
Row = tuple[Any, Supports, Fails, dict[str, Any]]
"""A case, what the kernel takes, when it fails, and fields of the smallest case."""

LENGTHS: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "seq_lens": (40, 7), "block_size": 16}
ANY_VARIANT = Supports(variants=VARIANTS)
PACKED = Supports(kv_dtypes=KV_DTYPES, layouts=("packed",))


def plain(**fields: Any) -> PagedDecodeCase:
    strides: dict[str, StrideKind] = {"sinks": "every_other"} if "sinks" in fields else {}
    return PagedDecodeCase(**LENGTHS, head_size=16, scale=0.25, strides=strides, variant=Variant(**fields))


def cached(**fields: Any) -> PagedDecodeCase:
    kv = QuantisedKv(dtype="float8_e5m2", per="head", scales="scattered")
    return PagedDecodeCase(**LENGTHS, head_size=64, scale=0.125, strides={"v_scale": "every_other"}, kv=kv, **fields)


def of_cache(fails: Fails, **expected: Any) -> Row:
    return cached(), Supports(kv_dtypes=KV_DTYPES, layouts=("NHD",)), fails, expected


def of_variant(fails: Fails, expected: Variant, *, seq_lens: tuple[int, ...] | None = None, **fields: Any) -> Row:
    more: dict[str, Any] = {"seq_lens": seq_lens} if seq_lens else {}
    return plain(**fields), ANY_VARIANT, fails, {"variant": expected, "strides": {}, **more}


def of_sizes(fails: Fails, sizes: tuple[int, int], expected: tuple[int, int], **supports: Any) -> Row:
    """Sizes of heads of K and V."""
    shape: dict[str, Any] = {**LENGTHS, "num_q_heads": 1, "num_kv_heads": 1, "seq_lens": (3,)}
    case = PagedDecodeCase(**shape, head_size=sizes[0], v_head_size=sizes[1], scale=default_scale(sizes[0]))
    smallest = {"head_size": expected[0], "value_size": expected[1], "scale": default_scale(expected[0])}
    return case, Supports(**{"v_head_sizes": "any"} | supports), fails, smallest


QUERIES = PagedAttentionCase(
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


def of_queries(fails: Fails, seq_lens: tuple[int, ...], query_lens: tuple[int, ...], **more: Any) -> Row:
    smallest = {"query_slack": 0, "seq_slack": 0, "padding_tokens": 0, "num_q_heads": 1, **more}
    return QUERIES, Supports(), fails, {"seq_lens": seq_lens, "query_lens": query_lens, **smallest}


ROWS: dict[str, Row] = {
    "a cache that does not matter": of_cache(lambda case: case.num_seqs >= 1, kv=None, strides={}),
    "a cache of 8 bits": of_cache(
        lambda case: case.kv is not None, kv=QuantisedKv(dtype="float8_e4m3fn"), strides={}
    ),
    "scales that differ by head": of_cache(
        lambda case: case.kv is not None and case.kv.per == "head" and case.kv.scales != "one",
        kv=QuantisedKv(dtype="float8_e4m3fn", per="head", scales="powers"),
    ),
    "packed heads of one piece": (cached(layout="packed"), PACKED, lambda case: case.kv is not None, {"head_size": 16}),
    "variants that do not matter": of_variant(
        lambda case: case.num_seqs >= 1, PLAIN_VARIANT, window=17, alibi="scattered", sinks="high"
    ),
    "pages that need not be freed": of_variant(
        lambda case: case.variant.window is not None, Variant(window=1), window=17, freed_pages=True
    ),
    "a freed page": of_variant(
        lambda case: any(freed_tokens(case)), Variant(window=1, freed_pages=True),
        seq_lens=(2,), window=17, freed_pages=True,
    ),
    "one variant of several": of_variant(
        lambda case: case.variant.sinks is not None, Variant(sinks="level"),
        window=17, alibi="scattered", sinks="high",
    ),
    "a window and tokens before it": of_variant(
        lambda case: case.variant.window is not None and max(case.seq_lens) > case.variant.window, Variant(window=1),
        seq_lens=(2,), window=17,
    ),
    "a cap": of_variant(lambda case: case.variant.soft_cap is not None, Variant(soft_cap=1.0), soft_cap=0.5),
    "sizes that do not matter": of_sizes(lambda case: bool(case.seq_lens), (128, 40), (16, 16)),
    "heads of V above 16": of_sizes(lambda case: case.value_size > 16, (40, 192), (40, 40)),
    "heads of V above 16, from below": of_sizes(lambda case: case.value_size > 16, (16, 80), (40, 40)),
    "other heads of V": of_sizes(lambda case: case.v_head_size is not None, (40, 192), (16, 13)),
    "other heads of V, the larger ones": of_sizes(lambda case: case.v_head_size is not None, (13, 16), (16, 13)),
    "smaller heads of V": of_sizes(lambda case: case.value_size < case.head_size, (40, 16), (16, 13)),
    "larger heads of V": of_sizes(lambda case: case.value_size > case.head_size, (40, 192), (16, 40)),
    "far larger heads of V": of_sizes(lambda case: case.value_size > 2 * case.head_size, (40, 192), (16, 40)),
    "large heads of K": of_sizes(lambda case: case.head_size >= 96 and case.value_size < 64, (128, 40), (96, 16)),
    "the one pair of a kernel": of_sizes(
        lambda case: True, (192, 128), (192, 128), head_sizes=(192,), v_head_sizes=(128,)
    ),
    "any queries": of_queries(lambda case: True, (1,), (1,)),
    "a second tile of queries": of_queries(lambda case: max(case.query_lens) > 16, (17,), (17,)),
    "a context": of_queries(lambda case: any(0 < n < length for n, length in lens(case)), (2,), (1,)),
    "a chunk behind a context": of_queries(
        lambda case: any(2 <= n <= length - 3 for n, length in lens(case)), (5,), (2,)
    ),
    "no query": of_queries(lambda case: 0 in case.query_lens, (1, 1), (0, 1)),
    "no token": of_queries(lambda case: (0, 0) in lens(case), (1, 0), (1, 0)),
    "the same place in its tile": of_queries(lambda case: case.query_lens[0] % 16 == 5, (5,), (5,)),
    "a loose bound": of_queries(lambda case: case.max_seq_len > max(case.seq_lens), (1,), (1,), seq_slack=1),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_only_what_the_failure_needs_is_left(row: Row) -> None:
    """A report would name scales, variants or sizes for a bug of none of them, or numbers that mean nothing."""
    case, supports, fails, expected = row
    assert fails(case)
    found = minimise(case, fails, supports=supports, options={})
    assert {name: getattr(found, name) for name in expected} == expected


def test_every_step_is_a_smaller_case() -> None:
    """Shrinking would go round in circles."""
    key = size_key(QUERIES)
    assert all(size_key(one) < key for one in simplifications(QUERIES, supports=Supports(), options={}))
