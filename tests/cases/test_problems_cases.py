"""Cases: their fields, where their tokens lie, their formats, the facets of each field, and the memory they take."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from attnfuzz.cases.facets import Domain, changed, facets_of
from attnfuzz.cases.features import InputSpace, features
from attnfuzz.cases.supported import why_unsupported
from attnfuzz.inputs.allocation import PlainAllocator, allocate
from attnfuzz.minimise import simplifications
from attnfuzz.problems.block_table import block_table_rows
from attnfuzz.problems.cases import (
    CASE_TYPES,
    PROBLEMS,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    Problem,
    SplitDecodeCase,
    case_type_of,
    decode_case,
    encode_case,
)
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.fields import Choice, Integer
from attnfuzz.problems.formats import Format, format_key, format_of
from attnfuzz.problems.limits import (
    DEFAULT_LIMIT_BYTES,
    CaseTooLarge,
    case_nbytes,
    check_size,
    list_nbytes,
    tensor_nbytes,
)
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.recipes import STRIDE_KINDS, Pages, StrideKind, Values
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports
from tests.common.named_features import words
from tests.sample_cases import paged_case


def paged(**more: Any) -> PagedDecodeCase:
    fields: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 16, "seq_lens": (3,), "scale": 0.25}
    return PagedDecodeCase(**{**fields, "block_size": 4, **more})


def test_a_case_with_heads_of_one_size_says_nothing_of_v() -> None:
    """Saved cases would change or be replayed with V as large as K, or equal cases no longer have equal bytes."""
    assert b"v_head_size" not in encode_case(paged())
    assert encode_case(paged(v_head_size=16)) == encode_case(paged())
    assert encode_case(msgspec.structs.replace(paged(v_head_size=40), head_size=40)) == encode_case(paged(head_size=40))
    case = paged(v_head_size=13)
    assert decode_case("paged_decode", encode_case(case)) == case
    assert (case.head_size, case.value_size) == (16, 13)
    assert MergeStatesCase(num_q_heads=1, num_tokens=1, head_size=8).value_size == 8
    assert paged(v_head_size=13, layout="packed").value_size == 13  # only K is kept in pieces of 16 bytes there


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"v_head_size": 0}, "v_head_size=0 must be between 1 and 1024"),
        ({"v_head_size": 1025}, "v_head_size=1025 must be between 1 and 1024"),
        ({"v_head_size": 8, "layout": "interleaved"}, "v_head_size=8 must be left out in the interleaved layout"),
    ],
)
def test_sizes_that_no_tensor_has_are_refused(fields: dict[str, Any], words: str) -> None:
    """Memory would be allocated for a cache that cannot be."""
    with pytest.raises(ValueError, match=words):
        paged(**fields)


FIELDS = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "scale": 0.25, "block_size": 4}
DECODE = PagedDecodeCase(**FIELDS, seq_lens=(4, 9, 1))  # type: ignore[arg-type]  # ints and a float
QUERIES = PagedAttentionCase(**FIELDS, seq_lens=(4, 9, 1), query_lens=(4, 3, 1))  # type: ignore[arg-type]  # as above


def test_relatives_keep_their_queries() -> None:
    """A shorter or longer relative would be no case or of another kind, or have another sequence's query tokens."""
    assert QUERIES.with_seq_lens((6, 2, 5)) == {"seq_lens": (6, 2, 5), "query_lens": (6, 2, 1)}
    assert msgspec.structs.replace(QUERIES, **QUERIES.with_seq_lens((0, 9, 9))).query_lens == (0, 3, 1)
    assert QUERIES.of_sequences([2, 0]) == {"seq_lens": (1, 4), "query_lens": (1, 4)}
    assert DECODE.with_seq_lens((1, 2, 3)) == {"seq_lens": (1, 2, 3)}
    assert DECODE.of_sequences([1]) == {"seq_lens": (9,)}


AT_RUN_TIME = {
    "seq_lens", "scale", "values", "pages", "extra_rows", "num_tokens", "lse_pairs", "outputs", "seed", "lse_layout",
    "query_lens", "query_slack", "seq_slack", "padding_tokens", "mask",
    "causal",  # a kernel may well compile for it: for twice as many formats, of the few that declare non_causal
}  # fmt: skip


def simplest(problem: Problem) -> Case:
    return simplest_case(problem, Supports(), {"tile": (16, 32)})


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_field_of_a_case_is_part_of_its_format_or_read_at_run_time(problem: Problem) -> None:
    """A new field would be drawn freely, and compiled for each value; or a format be another one in another worker."""
    fields = {*CASE_TYPES[problem].__struct_fields__}
    assert fields - AT_RUN_TIME == fields & {*Format.__struct_fields__}
    found = format_of(simplest(problem))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Format) == found
    assert found.options == {"tile": 16}


def test_cases_that_differ_at_run_time_share_a_format() -> None:
    """A working set is worth what is drawn around each of its formats."""
    case = simplest("paged_decode")
    other = msgspec.structs.replace(case, seq_lens=(5, 7), scale=0.5, values=Values(seed=3))
    strided = msgspec.structs.replace(case, strides={"v_cache": "offset", "q": "offset"})
    same = msgspec.structs.replace(case, strides={"q": "offset", "v_cache": "offset"})
    assert format_key(format_of(case)) == format_key(format_of(other))
    assert format_key(format_of(case)) != format_key(format_of(strided))
    assert format_key(format_of(strided)) == format_key(format_of(same))


CASE = paged_case(head_size=64, v_head_size=128, seq_lens=(1,), scale=default_scale(64), block_size=1)


OPEN = OpenProblem(place="x.py:Copy", fields={"n": Integer(0, 100), "kind": Choice(("a", "b"))})


@pytest.mark.parametrize("problem", [*PROBLEMS, OPEN], ids=str)
def test_each_field_of_a_case_is_that_of_one_facet(problem: Problem) -> None:
    """A field of no facet would be drawn, and never shrunk or told; one of two would be told twice."""
    case_type = case_type_of(problem)
    owned = [name for facet in facets_of(case_type) for name in facet.fields]
    assert sorted(owned) == sorted(case_type.__struct_fields__)


def test_types_that_derive_from_a_case_have_its_facets() -> None:
    """A new kind of attention would lose what is said of the fields that it inherits."""

    class Derived(PagedDecodeCase, frozen=True, kw_only=True):
        pass

    assert facets_of(Derived) == facets_of(PagedDecodeCase) != ()


def test_one_facet_is_told_everywhere() -> None:
    """A size of V that matters would be missing from a finding, from the coverage or from what shrinking tries."""
    supports = Supports(v_head_sizes="any")
    assert {"v_head_size", "v_head_size>head_size"} <= words(features(CASE))
    assert "V head size" in [axis.name for axis in InputSpace("paged_decode", supports, {}).axes]
    assert "V head size" not in [axis.name for axis in InputSpace("paged_decode", Supports(), {}).axes]
    assert "v_head_size=128" in str(why_unsupported(Supports(), {}, CASE))
    domain = Domain("paged_decode", supports, {})
    told = dict(change for facet in facets_of(type(CASE)) for change in facet.changes(CASE, domain))
    smaller = changed(CASE, **told["v_head_size 64 instead of 128"])
    assert smaller in list(simplifications(CASE, supports=supports, options={}))


def attention(**more: Any) -> dict[str, Any]:
    return {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 16, "seq_lens": (5, 0, 9), "scale": 0.25} | more


CASES: list[Case] = [
    DenseDecodeCase(**attention(extra_rows=3)),
    PagedDecodeCase(**attention(block_size=4, pages=Pages(spare_blocks=3, shared_blocks=1, extra_columns=2))),
    PagedDecodeCase(**attention(block_size=4, layout="interleaved", dtype="bfloat16")),
    SplitDecodeCase(**attention(block_size=3, layout="packed", num_splits=5, dtype="float32")),
    SplitDecodeCase(**attention(block_size=3, layout="packed", num_splits=5, v_head_size=40)),
    DenseDecodeCase(**attention(v_head_size=5)),
    MergeStatesCase(num_q_heads=3, head_size=5, num_tokens=7, lse_layout="TH"),
]


@pytest.mark.parametrize("kind", STRIDE_KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.problem)
def test_tensor_bytes_are_exact(case: Case, kind: StrideKind) -> None:
    """A case could take more memory than its limit allows, or be refused although it fits."""
    one_cache = getattr(case, "layout", "") == "interleaved"
    strides = {name: kind for name in case.tensor_names if not (one_cache and name == "v_cache")}
    case = msgspec.structs.replace(case, strides=strides)
    tensors = allocate(case, PlainAllocator()).values()
    assert tensor_nbytes(case) == sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert case_nbytes(case) > tensor_nbytes(case)


HUGE: list[Case] = [
    DenseDecodeCase(**attention(seq_lens=(1 << 24,) * 20000)),
    DenseDecodeCase(**attention(extra_rows=1 << 24, num_kv_heads=4, seq_lens=(1,) * 40000)),
    PagedDecodeCase(**attention(block_size=1, seq_lens=(1 << 24,) * 20000)),
    PagedDecodeCase(**attention(block_size=1 << 20, num_kv_heads=4, head_size=1024, pages=Pages(spare_blocks=1 << 20))),
    PagedDecodeCase(**attention(block_size=1 << 20, head_size=1, v_head_size=1024, pages=Pages(spare_blocks=1 << 20))),
    PagedDecodeCase(**attention(block_size=1, seq_lens=(1,) * 65536, pages=Pages(extra_columns=1 << 16))),
    MergeStatesCase(num_q_heads=1024, head_size=1024, num_tokens=1 << 20),
]


@pytest.mark.parametrize("case", HUGE, ids=lambda case: case.problem)
def test_huge_case_is_refused_at_once(case: Case) -> None:
    """A regression file that asks for terabytes would fill the memory, or list 10^11 pages, before it is refused."""
    with pytest.raises(CaseTooLarge, match=r"the case needs [\d.e+]+ [GTP]iB .* but the limit is 1 GiB; shorten"):
        check_size(case)


LISTED: list[Case] = [
    PagedDecodeCase(**attention(block_size=16, seq_lens=(1,) * 2048, pages=Pages(extra_columns=1 << 14))),
    PagedDecodeCase(
        **attention(block_size=16, seq_lens=(1,) * 64, pages=Pages(extra_columns=1 << 16, padding="wrong_page"))
    ),
    PagedDecodeCase(**attention(num_q_heads=2, head_size=1, block_size=1, seq_lens=(1 << 21,))),
    PagedDecodeCase(
        **attention(num_q_heads=2, head_size=1, block_size=1, pages=Pages(spare_blocks=1 << 20, order="shuffled"))
    ),
]


@pytest.mark.parametrize("case", LISTED, ids=["columns", "wrong pages", "pages", "spare pages"])
def test_a_case_of_small_tensors_and_long_lists_is_refused(case: Case) -> None:
    """Python makes a block table out of lists, of 4.5 GiB and half a minute, where the tensors took 0.5 GiB."""
    assert tensor_nbytes(case) < DEFAULT_LIMIT_BYTES
    with pytest.raises(CaseTooLarge, match=r"pages and block tables take .* as lists but the limit is 128 MiB; lower"):
        check_size(case)


def test_the_block_table_of_a_large_server_is_taken() -> None:
    """256 sequences of up to 128 Ki tokens are no attack."""
    check_size(PagedDecodeCase(**attention(block_size=16, seq_lens=(1,) * 256, pages=Pages(extra_columns=8192))))


def test_lists_take_no_more_than_is_counted() -> None:
    """The limit would be of something else than memory."""
    for pages in (
        Pages(extra_columns=4000),
        Pages(extra_columns=500, padding="wrong_page", spare_blocks=2000),
        Pages(order="shuffled", spare_blocks=50_000),
    ):
        case = PagedDecodeCase(**attention(block_size=1, seq_lens=(100,) * 200, pages=pages))
        tracemalloc.start()
        entries = [entry for row in block_table_rows(case) for entry in row]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(entries) == case.num_seqs * case.max_blocks_per_seq
        assert peak < list_nbytes(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.problem)
def test_limit_is_inclusive(case: Case) -> None:
    """A case of exactly the limit would be refused, or one a byte above it accepted."""
    needed = case_nbytes(case)
    check_size(case, needed)
    with pytest.raises(CaseTooLarge, match=f"{needed} bytes"):
        check_size(case, needed - 1)
