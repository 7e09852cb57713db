"""What Supports leaves to draw from, and what of it is simplest."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from attnfuzz.cases.features import features
from attnfuzz.cases.supported import why_unsupported
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import PROBLEMS
from attnfuzz.problems.choices import (
    BLOCK_SIZES,
    GQA_RATIOS,
    HEAD_SIZES,
    block_sizes_of,
    default_scale,
    dtypes_of,
    gqa_ratios_of,
    head_sizes_of,
    layouts_of,
    lse_kinds_of,
    paddings_of,
    split_counts_of,
    stride_kinds_of,
    strided_tensors_of,
    v_head_sizes_of,
)
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports
from tests.common.named_features import words

ANY_V = Supports(v_head_sizes="any")


def test_unlimited_kernels_meet_the_sizes_that_break_kernels() -> None:
    """A head size, ratio or page size that real bugs needed would never be drawn."""
    assert {13, 16, 40, 64, 72, 80, 96, 128, 192, 256} <= set(HEAD_SIZES)
    assert {1, 2, 3, 4, 5, 7, 8, 16, 17, 24} <= set(GQA_RATIOS)
    assert {1, 16, 256, 3, 24} <= set(BLOCK_SIZES)


@pytest.mark.parametrize(
    ("choices", "args", "expected"),
    [
        (head_sizes_of, (Supports(), "float16"), (16, 13, 40, 64, 72, 80, 96, 128, 192, 256)),  # 13 is padded to 16
        (head_sizes_of, (Supports(head_sizes=(128, 80)), "float16"), (80, 128)),
        (head_sizes_of, (Supports(head_sizes=(40, 13, 12, 8, 4)), "float16", "packed"), (8, 40)),
        (head_sizes_of, (Supports(head_sizes=(40, 13, 12, 8, 4)), "float32", "packed"), (4, 8, 12, 40)),
        (dtypes_of, (Supports(dtypes=("float32", "float16")),), ("float16", "float32")),
        (layouts_of, (Supports(layouts=("HND", "NHD")),), ("NHD", "HND")),
        (gqa_ratios_of, (Supports(gqa_ratios=(7, 1)),), (1, 7)),
        (block_sizes_of, (Supports(block_sizes=(24, 16, 1)),), (1, 16, 24)),
        (split_counts_of, (Supports(max_num_splits=6),), (1, 2, 3, 4, 5, 6)),
        (lse_kinds_of, (Supports(),), ("finite", "equal", "high", "low", "-inf", "+inf")),
        (lse_kinds_of, (Supports(empty_sequences=False),), ("finite", "equal", "high", "low")),
        (lse_kinds_of, (Supports(empty_state_lse=("-inf",)),), ("finite", "equal", "high", "low", "-inf")),
        (lse_kinds_of, (Supports(empty_state_lse=("+inf",)),), ("finite", "equal", "high", "low", "+inf")),
        (paddings_of, (Supports(unused_table_entries="zero"),), ("zero",)),
        (paddings_of, (Supports(unused_table_entries="valid"),), ("zero", "wrong_page")),
        (paddings_of, (Supports(unused_table_entries="garbage"),), ("zero", "wrong_page", "garbage")),
        (v_head_sizes_of, (Supports(), 64, "NHD"), (64,)),
        (v_head_sizes_of, (ANY_V, 64, "NHD"), (64, 16, 13, 40, 72, 80, 96, 128, 192, 256)),
        (v_head_sizes_of, (ANY_V, 64, "interleaved"), (64,)),
        (v_head_sizes_of, (Supports(v_head_sizes=(128, 64, 40)), 64, "HND"), (64, 40, 128)),
        (v_head_sizes_of, (Supports(v_head_sizes=(128, 40)), 64, None), (40, 128)),
        (stride_kinds_of, ("contiguous", "q"), ("contiguous",)),
        (stride_kinds_of, ("last_contiguous", "q"), ("contiguous", "outer_gap", "padded_rows", "transposed", "offset")),
        (stride_kinds_of, ("last_contiguous", "block_table"), ("contiguous", "padded_rows", "offset")),
        (stride_kinds_of, ("last_contiguous", "seq_lens"), ("contiguous", "offset")),
    ],
)
def test_what_is_declared_leaves_these_choices_the_simplest_first(choices: Any, args: Any, expected: Any) -> None:
    """A kernel would get what it does not take, never what it claims, or shrink to a case that is not simplest."""
    assert choices(*args) == expected


def test_default_scale_is_a_float32() -> None:
    """A kernel that takes the scale as float32 would compute with another number than the reference."""
    scale = default_scale(80)
    assert struct.unpack("f", struct.pack("f", scale))[0] == scale
    assert scale == pytest.approx(80**-0.5, rel=1e-7)


def test_engines_leave_gaps_between_tokens_and_pages_only() -> None:
    """A kernel that declares nothing would be asked for strides that no engine hands over."""
    gapped = {
        name
        for problem in PROBLEMS
        for name in strided_tensors_of(problem, Supports(variants=("alibi", "sinks"), kv_dtypes=("float8_e4m3fn",)))
        if stride_kinds_of("serving", name) != ("contiguous",)
    }
    assert gapped == {"q", "out", "k", "v", "k_cache", "v_cache", "kv_cache"}
    assert {stride_kinds_of("serving", name) for name in gapped} == {("contiguous", "outer_gap")}


def test_strides_of_ignored_tensors_are_not_drawn() -> None:
    """Cases would differ in something that the kernel never sees."""
    assert "lse" not in strided_tensors_of("paged_decode", Supports(lse="none"))
    assert "v_cache" not in strided_tensors_of("paged_decode", Supports(), "interleaved")
    assert {"k_cache", "v_cache", "lse", "out"} <= set(strided_tensors_of("paged_decode", Supports(), "NHD"))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_simplest_case_has_no_feature_and_is_supported(problem: str) -> None:
    """Shrinking would end in a case that needs explaining."""
    options = {"tile": (32, 16)}
    case = simplest_case(problem, Supports(), options)
    assert words(features(case)) == {"option tile=32"}
    assert features(case, options=options) == frozenset()
    assert why_unsupported(Supports(), options, case) is None


def test_simplest_case_passes_over_a_format_that_holds_no_head_size() -> None:
    """A kernel whose float16 head sizes cannot be packed would be refused although float32 ones can."""
    case = simplest_case("paged_decode", Supports(head_sizes=(4,), layouts=("packed",)), {})
    assert case.dtype == "float32"


def test_a_kernel_for_one_pair_of_sizes_has_a_simplest_case() -> None:
    """A kernel for multi-head latent attention could not be declared: its K and V never have the same size."""
    supports = Supports(head_sizes=(192,), v_head_sizes=(128,), layouts=("interleaved", "NHD"))
    case = simplest_case("paged_decode", supports, {})
    assert (case.head_size, case.value_size, case.layout) == (192, 128, "NHD")  # type: ignore[union-attr]  # it is paged
    assert why_unsupported(supports, {}, case) is None


def test_no_format_at_all_is_an_error_that_says_what_to_do() -> None:
    """A declaration that no case fits would fail somewhere else, later."""
    with pytest.raises(ValueError, match=r"head_sizes=\(13,\).*multiples of 8.*add such a size"):
        simplest_case("paged_decode", Supports(head_sizes=(13,), layouts=("packed",)), {})


def test_partial_states_without_a_log_sum_exp_cannot_be_declared() -> None:
    """Nothing can merge them: every case would end in an error of attnfuzz itself."""
    with pytest.raises(ValueError, match=r"lse=\"none\".*merged by their log-sum-exp; leave it out"):
        Declaration(name="states", problem="split_decode", supports=Supports(lse="none"))
