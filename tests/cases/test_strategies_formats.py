"""Formats that are compiled first, and their strides."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, islice

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from attnfuzz.cases.supported import why_unsupported
from attnfuzz.problems.cases import PROBLEMS, Problem
from attnfuzz.problems.choices import lying_alike, stride_kinds_of, strided_tensors_of
from attnfuzz.problems.formats import Format, format_key, format_of
from attnfuzz.problems.limits import DEFAULT_LIMIT_BYTES, case_nbytes
from attnfuzz.problems.quantised_kv import KV_SCALE_TENSORS
from attnfuzz.problems.recipes import StrideKind
from attnfuzz.problems.supports import Strides, Supports
from attnfuzz.problems.variants import VARIANT_TENSORS
from attnfuzz.strategies import GPU_SIZES, cases, draw_formats
from attnfuzz.strategies.formats import first_formats
from attnfuzz.strategies.storage import strides_everywhere
from tests.common.drawing import drawn_cases

OPTIONS = {"tile": (16, 32, 64), "num_splits": (1, 2, 8)}
SUPPORTS = Supports(strides="any", unused_table_entries="garbage", block_sizes=(1, 16, 24), max_seq_len=300)


def drawn(problem: Problem, count: int, *, seed: int = 0) -> tuple[Format, ...]:
    found = draw_formats(problem, supports=SUPPORTS, options=OPTIONS, sizes=GPU_SIZES, seed=seed)
    return tuple(islice(found, count))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_seed_decides(problem: Problem) -> None:
    """Runs that begin with the same formats find them compiled in the cache on disk."""
    assert drawn(problem, 20) == drawn(problem, 20)
    assert drawn(problem, 20) != drawn(problem, 20, seed=1)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_first_formats_hold_every_kind(problem: Problem) -> None:
    """They are all that a short campaign sees."""
    formats = first_formats(problem, supports=SUPPORTS, options=OPTIONS, sizes=GPU_SIZES, count=16)
    assert formats == first_formats(problem, supports=SUPPORTS, options=OPTIONS, sizes=GPU_SIZES, count=16)
    assert len({format_key(one) for one in formats}) == 16
    assert {one.dtype for one in formats} == {"float16", "bfloat16", "float32"}
    for option, choices in OPTIONS.items():
        assert {one.options[option] for one in formats} == {*choices}
    assert len({one.head_size for one in formats}) >= 5
    assert sum(not one.strides for one in formats) == 8
    if problem in ("paged_decode", "split_decode"):
        assert {one.layout for one in formats} == {"NHD", "HND", "packed", "interleaved"}
        assert {one.block_size for one in formats} == {1, 16, 24}


def test_the_first_three_formats_have_groups_of_each_kind() -> None:
    """Released kernels are wrong where each query head has its own KV head, or more than 16 share one.

    One worker has a handful of formats compiled in a quarter of a minute.
    """
    for supports in (SUPPORTS, Supports(dtypes=("float16", "bfloat16"), layouts=("NHD",), strides="serving")):
        formats = first_formats("paged_decode", supports=supports, sizes=GPU_SIZES, count=16)
        blocks, one, block = (of.num_q_heads // (of.num_kv_heads or 0) for of in formats[:3])
        assert one == 1 < block <= 16 < blocks
        assert formats[0].num_kv_heads != 1


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_first_strided_formats_are_so_all_over(problem: Problem) -> None:
    """A kernel that ignores the stride of one tensor would pass until a format happens to have just that one."""
    formats = first_formats(problem, supports=SUPPORTS, options=OPTIONS, sizes=GPU_SIZES, count=16)
    for turn, one in enumerate(formats[1::4]):
        assert one.strides == strides_everywhere(problem, SUPPORTS, one.layout, turn=turn)
        assert {*strided_tensors_of(problem, SUPPORTS, one.layout)} - {*one.strides} <= {"seq_lens", "cu_seqlens_q"}


def test_formats_that_differ_in_strides_alone_are_not_made_alike() -> None:
    """One would be compiled for nothing, and another never be chosen."""
    supports = Supports(strides="any", dtypes=("float16",), head_sizes=(64,), gqa_ratios=(1,))
    formats = first_formats("dense_decode", supports=supports, sizes=replace(GPU_SIZES, max_heads=1), count=16)
    assert len({format_key(one) for one in formats}) == len(formats) == 16


@pytest.mark.parametrize(
    ("allowed", "kinds"), [("last_contiguous", {"outer_gap", "padded_rows", "transposed"}), ("contiguous", set())]
)
def test_strides_that_a_kernel_refuses_are_in_none_of_the_first(allowed: Strides, kinds: set[StrideKind]) -> None:
    """Its check of them would be called a failure."""
    supports = msgspec.structs.replace(SUPPORTS, strides=allowed)
    formats = first_formats("paged_decode", supports=supports, options=OPTIONS, sizes=GPU_SIZES, count=16)
    assert {kind for one in formats[1::4] for kind in one.strides.values()} == kinds
    assert {one.strides.get("seq_lens") for one in formats} <= {None, "offset"}


def test_tensors_that_a_case_lacks_have_no_strides() -> None:
    """A case that names them is not valid."""
    supports = msgspec.structs.replace(SUPPORTS, variants=("sinks", "alibi"), kv_dtypes=("float8_e4m3fn",))
    for one in first_formats("paged_decode", supports=supports, options=OPTIONS, sizes=GPU_SIZES, count=32)[1::4]:
        assert one.variant is not None or {*one.strides}.isdisjoint(VARIANT_TENSORS)
        assert one.kv is not None or {*one.strides}.isdisjoint(KV_SCALE_TENSORS)


def test_a_kernel_with_few_formats_gets_those_that_there_are() -> None:
    """Looking for more of them would never end."""
    supports = Supports(dtypes=("float16",), head_sizes=(64,), gqa_ratios=(1,), strides="contiguous")
    formats = first_formats("dense_decode", supports=supports, sizes=replace(GPU_SIZES, max_heads=2), count=16)
    assert {(one.num_q_heads, one.num_kv_heads) for one in formats} == {(1, 1), (2, 2)}
    assert len(formats) == 2


@pytest.mark.parametrize("problem", PROBLEMS)
@settings(max_examples=60, phases=[Phase.generate], database=None, derandomize=True, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_cases_keep_to_the_formats_given(problem: Problem, data: st.DataObject, seed: int) -> None:
    """A format of its own for each case is what takes a GPU's time; one that the kernel does not take is no bug."""
    formats = drawn(problem, 3, seed=seed)
    strategy = cases(problem, supports=SUPPORTS, options=OPTIONS, sizes=GPU_SIZES, formats=formats)
    case = data.draw(strategy)
    assert format_of(case) in formats
    assert why_unsupported(SUPPORTS, OPTIONS, case) is None
    assert case_nbytes(case) < DEFAULT_LIMIT_BYTES


def test_around_one_format_everything_else_varies() -> None:
    """What is drawn once for the whole working set would not be searched at all."""
    one = next(format_ for format_ in drawn("paged_decode", 20) if format_.num_q_heads <= 8)  # more leave few tokens
    found = drawn_cases("paged_decode", 200, supports=SUPPORTS, options=OPTIONS, sizes=GPU_SIZES, formats=(one,))
    assert len({case.seq_lens for case in found}) > 100
    assert len({case.values for case in found}) > 150
    assert len({case.scale for case in found}) >= 5
    assert {case.num_seqs for case in found} >= {1, 2, 3, 4}


def test_more_formats_than_can_be_told_apart_are_refused() -> None:
    """Those beyond would never be drawn, without a word."""
    with pytest.raises(ValueError, match="formats has 257 entries"):
        cases("dense_decode", formats=drawn("dense_decode", 257))


TURNS = range(3)


def supports_of(problem: Problem, strides: Strides) -> Supports:
    """All that a kernel can take."""
    if not str(problem).startswith("paged"):
        return Supports(strides=strides)
    return Supports(strides=strides, variants=("alibi", "sinks"), kv_dtypes=("float8_e4m3fn",))


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("strides", ["any", "last_contiguous"])
def test_each_two_tensors_differ_in_some_turn(problem: Problem, strides: Strides) -> None:
    """What takes the strides of K for V's would be right in all of them."""
    supports = supports_of(problem, strides)
    turns = [strides_everywhere(problem, supports, None, turn=turn) for turn in TURNS]
    of = {name: stride_kinds_of(strides, name) for name in strided_tensors_of(problem, supports)}
    alike = [(one, other) for one, other in combinations(of, 2) if of[one] == of[other] and len(of[one]) > 2]
    assert alike
    for one, other in alike:
        assert any(turn.get(one) != turn.get(other) for turn in turns), (one, other)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_nearly_all_are_strided_in_one_of_the_first_two_turns(problem: Problem) -> None:
    """Its stride would be ignored unseen for as long as it takes to compile a dozen formats."""
    supports = supports_of(problem, "any")
    first, second = (strides_everywhere(problem, supports, None, turn=turn) for turn in (0, 1))
    late = {*strided_tensors_of(problem, supports)} - {*first} - {*second}
    assert len(late) <= 1  # the fourth of those that can be strided in one way only
    assert not {"contiguous", "offset"} & {*first.values(), *second.values()}


@pytest.mark.parametrize("allowed", ["hybrid", "serving"])
@pytest.mark.parametrize("problem", ["dense_decode", "paged_decode", "split_decode", "paged_attention"])
def test_each_gap_of_an_engine_comes_alone_in_some_turn(problem: Problem, allowed: Strides) -> None:
    """What takes the strides of one tensor for another's would be right in all of them, or a gap never be met."""
    supports = Supports(strides=allowed)
    turns = [strides_everywhere(problem, supports, None, turn=turn) for turn in TURNS]
    gapped = [name for name in strided_tensors_of(problem, supports) if len(stride_kinds_of(allowed, name)) > 1]
    assert {name for turn in turns for name in turn} == set(gapped)
    for one, other in combinations(gapped, 2):
        alone = [turn for turn in turns if (one in turn) != (other in turn)]
        assert bool(alone) == (other not in lying_alike(allowed, one)), (one, other)


@pytest.mark.parametrize("turn", TURNS)
def test_a_kernel_for_contiguous_tensors_gets_no_others(turn: int) -> None:
    """Its refusal would be called a failure."""
    assert strides_everywhere("paged_decode", Supports(strides="contiguous"), "NHD", turn=turn) == {}
