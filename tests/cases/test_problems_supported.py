"""What kernels declare, and which cases follow from that."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

from attnfuzz.cases.supported import adapt_options, supports_case, translate, why_unsupported
from attnfuzz.problems.cases import Case, MergeStatesCase, Problem
from attnfuzz.problems.declared_numerics import FixedTolerance, Numerics
from attnfuzz.problems.recipes import Pages
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import Variant


def case_of(problem: Problem, **fields: Any) -> Case:
    return msgspec.structs.replace(simplest_case(problem, Supports(), {}), **fields)


PROMISES = ("empty_sequences", "deterministic", "batch_invariant", "graph_replay")
MERGE = MergeStatesCase(num_q_heads=1, num_tokens=1, head_size=16)


@pytest.mark.parametrize(
    ("supports", "case", "reason"),
    [
        (Supports(dtypes=("float32",)), case_of("dense_decode"), "dtype='float16'"),
        (Supports(head_sizes=(64, 128)), case_of("dense_decode"), "head_size=16"),
        (Supports(gqa_ratios=(2,)), case_of("dense_decode"), "gqa_ratio=1"),
        (Supports(), case_of("dense_decode", v_head_size=40), "v_head_size=40 beside head_size=16"),
        (Supports(v_head_sizes=(40,)), case_of("paged_decode", v_head_size=13), r"v_head_size=13.*\(40,\)"),
        (Supports(v_head_sizes=(40,)), case_of("paged_decode"), "v_head_size=16"),
        (Supports(max_seq_len=8), case_of("dense_decode", seq_lens=(5,), extra_rows=4), "max_seq_len=9"),
        (Supports(max_seq_len=8), case_of("paged_decode", seq_lens=(1, 9)), "max_seq_len=9"),
        (Supports(empty_sequences=False), case_of("paged_decode", seq_lens=(1, 0)), r"seq_lens\[1\]=0"),
        (Supports(block_sizes=(16,)), case_of("paged_decode"), "block_size=1"),
        (Supports(layouts=("HND",)), case_of("paged_decode"), "layout='NHD'"),
        (Supports(), case_of("paged_decode", pages=Pages(padding="garbage")), "pages.padding='garbage'"),
        (Supports(max_num_splits=4), case_of("split_decode", num_splits=5), "num_splits=5"),
        (Supports(strides="contiguous"), case_of("dense_decode", strides={"q": "offset"}), r"strides\['q'\]='offset'"),
        (
            Supports(strides="last_contiguous"),
            case_of("dense_decode", seq_lens=(1, 1), num_q_heads=2, strides={"lse": "transposed"}),
            r"strides\['lse'\]='transposed'",
        ),
        (
            Supports(strides="last_contiguous"),
            case_of("paged_decode", layout="interleaved", strides={"k_cache": "every_other"}),
            r"strides\['kv_cache'\]='every_other'",
        ),
        (Supports(), case_of("dense_decode", strides={"q": "padded_rows"}), r"strides\['q'\]='padded_rows'"),
        (Supports(), case_of("paged_decode", strides={"block_table": "outer_gap"}), "strides='hybrid'"),
        (Supports(), case_of("split_decode", strides={"partial_out": "outer_gap"}), "strides='hybrid'"),
        (Supports(strides="contiguous"), case_of("dense_decode", strides={"q": "outer_gap"}), "strides='contiguous'"),
        (Supports(lse_layout="TH"), MERGE, "lse_layout='HT'"),
        (
            Supports(empty_sequences=False),
            msgspec.structs.replace(MERGE, lse_pairs=(("finite", "+inf"),)),
            r"lse_pairs='\+inf'",
        ),
        (Supports(), case_of("dense_decode", options={"tile": 16}), "has no such option"),
    ],
)
def test_each_declared_limit_is_held_against_the_case(supports: Supports, case: Case, reason: str) -> None:
    """A kernel would be called wrong on a case that it never claimed to take."""
    sentence = why_unsupported(supports, {}, case)
    assert sentence is not None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(sentence)
    assert not supports_case(supports, {}, case)


def test_limits_that_a_case_keeps_are_no_objection() -> None:
    """Replay would skip kernels that support a saved case."""
    supports = Supports(strides="last_contiguous", max_seq_len=16, unused_table_entries="garbage")
    case = case_of(
        "paged_decode", seq_lens=(16,), strides={"q": "transposed", "out": "offset"}, pages=Pages(padding="wrong_page")
    )
    assert why_unsupported(supports, {}, case) is None
    gaps = {name: "outer_gap" for name in ("q", "out", "k_cache")}
    for allowed in ("serving", "last_contiguous", "any"):
        case = case_of("paged_decode", layout="interleaved", strides=gaps)
        assert why_unsupported(Supports(strides=allowed), {}, case) is None


def test_options_must_be_offered_and_complete() -> None:
    """A kernel would be called with an option that it does not offer, or without one that it needs."""

    def why(options: dict[str, Any]) -> str | None:
        return why_unsupported(Supports(), {"tile": (1, 32)}, case_of("dense_decode", options=options))

    assert why({"tile": 32}) is None
    assert "offers (1, 32)" in str(why({"tile": 64}))
    assert "leaves out options['tile']" in str(why({}))
    assert why({"tile": True}) is not None  # no number


def test_adapted_options_keep_what_the_kernel_offers() -> None:
    """A saved case could not be replayed on another kernel, or would lose the setting that matters."""
    case = case_of("dense_decode", options={"tile": 32, "variant": "a"})
    adapted = adapt_options(case, {"tile": (16, 32), "num_splits": (2, 4)})
    assert adapted.options == {"tile": 32, "num_splits": 2}
    assert why_unsupported(Supports(), {"tile": (16, 32), "num_splits": (2, 4)}, adapted) is None
    fits = case_of("dense_decode", options={"tile": 32})
    assert adapt_options(fits, {"tile": (16, 32)}) is fits  # compared by identity


def test_a_case_is_translated_where_that_changes_its_description_only() -> None:
    """A case found in one engine would run on none that has another layout, table or problem."""
    case = case_of(
        "paged_decode",
        num_q_heads=4,
        seq_lens=(5, 0, 9),
        block_size=4,
        layout="HND",
        pages=Pages(padding="garbage", order="shuffled"),
        strides={"q": "every_other", "k_cache": "outer_gap"},
    )
    found = translate(case, "paged_attention", Supports(layouts=("interleaved",)), {})
    assert found is not None
    assert found.changes == (
        "as paged_attention", "layout interleaved", "unused table entries wrong_page", "q contiguous",
    )  # fmt: skip
    made: Any = found.case
    assert (made.query_lens, made.seq_lens, made.num_q_heads, made.block_size) == ((1, 0, 1), (5, 0, 9), 4, 4)
    assert dict(made.strides) == {"k_cache": "outer_gap"}
    assert why_unsupported(Supports(layouts=("interleaved",)), {}, made) is None

    dense = translate(case, "dense_decode", Supports(strides="serving"), {})
    assert dense is not None
    assert dense.changes == ("as dense_decode", "q contiguous", "k contiguous")
    again = translate(dense.case, "paged_decode", Supports(block_sizes=(32, 64)), {})
    assert again is not None
    assert getattr(again.case, "block_size", None) == 32


def test_a_case_that_another_problem_does_not_have_is_not_translated() -> None:
    """Its result would be that of another question."""
    prefill = case_of("paged_attention", seq_lens=(4,), query_lens=(3,))
    assert translate(prefill, "paged_decode", Supports(), {}) is None
    decode = translate(case_of("paged_attention", seq_lens=(4,), query_lens=(1,)), "paged_decode", Supports(), {})
    assert decode is not None
    assert decode.case.problem == "paged_decode"
    assert translate(case_of("paged_decode", variant=Variant(window=2)), "dense_decode", Supports(), {}) is None
    assert translate(case_of("paged_decode", variant=Variant(sinks="level")), "split_decode", Supports(), {}) is None
    assert translate(case_of("paged_decode", seq_lens=(0,)), "paged_attention", Supports(), {}) is None
    assert translate(MERGE, "paged_decode", Supports(), {}) is None


def test_empty_states_are_marked_as_the_kernel_takes_them() -> None:
    """A merge that is only ever handed -inf would be put to no case of a kernel that takes both."""
    case = msgspec.structs.replace(MERGE, lse_pairs=(("finite", "+inf"), ("-inf", "high")))
    found = translate(case, "merge_states", Supports(empty_state_lse=("-inf",), lse_layout="TH"), {})
    assert found is not None
    assert getattr(found.case, "lse_pairs", None) == (("finite", "-inf"), ("-inf", "high"))
    assert found.changes == ("LSE as TH", "empty states as -inf")


@pytest.mark.parametrize(
    ("declare", "fields", "rule"),
    [
        *((Supports, {name: "no"}, rf"Supports\({name}='no'\): must be True or False") for name in PROMISES),
        (Supports, {"empty_state_outputs": "nan"}, r"Supports\(empty_state_outputs="),
        (Supports, {"empty_state_lse": "-inf"}, r"Supports\(empty_state_lse="),
        (Supports, {"strides": "gaps"}, r"Supports\(strides="),
        *(
            (Supports, {"v_head_sizes": sizes}, r"Supports\(v_head_sizes")
            for sizes in ("some", (), (0,), (2048,), [64], None)
        ),
        (Supports, {"kv_dtypes": ("float8_e4m3",)}, r"kv_dtypes='float8_e4m3'"),
        (Supports, {"kv_scales": ()}, "kv_scales"),
        *(
            (Numerics, {name: "fp32"}, rf"Numerics: {name}='fp32' must be one of '\w+'")
            for name in ("probabilities", "partials", "matmul")
        ),
        *(
            (FixedTolerance, {"atol": 0.0, "rtol": 0.0, name: wrong}, rf"{name}=.* must be a finite number >= 0")
            for name in ("atol", "rtol")
            for wrong in (-1e-9, math.nan, math.inf, "1e-2", True, None)
        ),
    ],
    ids=str,
)
def test_what_means_nothing_cannot_be_declared(declare: Any, fields: dict[str, Any], rule: str) -> None:
    """A misspelt word would be taken for a promise or the default, or a tolerance of NaN accept everything."""
    with pytest.raises(ValueError, match=rule):
        declare(**fields)


@pytest.mark.parametrize("declared", [Numerics(probabilities="float32", matmul="tf32"), FixedTolerance(1, 1e-2)])
def test_a_declaration_survives_json_and_unknown_fields_do_not(declared: Any) -> None:
    """Declarations cross a pipe as JSON; a field from another version must be an error, not be dropped."""
    assert msgspec.json.decode(msgspec.json.encode(declared), type=type(declared)) == declared
    unknown = {**msgspec.to_builtins(declared), "accumulator": "float16"}
    with pytest.raises(msgspec.ValidationError, match="unknown field `accumulator`"):
        msgspec.convert(unknown, type(declared))


def test_what_was_saved_before_a_field_came_is_read() -> None:
    """A campaign begun with an older version could not be resumed."""
    new = {"empty_state_outputs", "empty_state_lse"}
    saved = {name: value for name, value in msgspec.to_builtins(Supports(strides="any")).items() if name not in new}
    assert msgspec.convert(saved, Supports) == Supports(strides="any")


def test_a_default_that_is_passed_is_a_promise() -> None:
    """Who writes down that sequences may be empty would have it inferred that they may not."""
    said = Supports(empty_sequences=True, dtypes=("float16",))
    assert [said.leaves_open(name) for name in ("empty_sequences", "dtypes", "strides")] == [False, False, True]
    assert said.declared() == {"dtypes": ("float16",), "empty_sequences": True}
    copied = msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(said, lse="none")), type=Supports)
    assert not copied.leaves_open("empty_sequences")
    assert Supports().declared() == {}


def test_undeclared_means_the_loosest_but_not_tf32_and_no_graph() -> None:
    """A kernel that declares nothing would be blamed for rounding weights or for waiting, or excused for TF32."""
    assert (Numerics().probabilities, Numerics().partials, Numerics().matmul) == ("input", "input", "tensor_core")
    assert not Supports().graph_replay


def test_bound_is_absolute_plus_relative() -> None:
    """The formula is `torch.testing.assert_close`'s: atol + rtol |expected|, on numbers and tensors."""
    tolerance = FixedTolerance(atol=0.5, rtol=0.25)
    assert tolerance.bound(-2.0) == 1.0
    assert tolerance.bound(torch.tensor([0.0, -2.0, 4.0])).tolist() == [0.5, 1.0, 1.5]
