"""What kernels declare, and which cases follow from that."""

from __future__ import annotations

import math
import sys
from subprocess import run
from typing import Any

import msgspec
import pytest
import torch

import attnfuzz
from attnfuzz.cases.supported import adapt_options, supports_case, translate, why_unsupported
from attnfuzz.problems.cases import Case, MergeStatesCase, Problem
from attnfuzz.problems.declared_numerics import FixedTolerance, Numerics
from attnfuzz.problems.recipes import Pages
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import Variant


def case_of(problem: Problem, **fields: Any) -> Case:
    return msgspec.structs.replace(simplest_case(problem, Supports(), {}), **fields)


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
    options: dict[str, tuple[int, ...]] = {"tile": (16, 32)}
    offered = case_of("dense_decode", options={"tile": 32})
    assert why_unsupported(Supports(), options, offered) is None
    assert "offers (16, 32)" in str(why_unsupported(Supports(), options, case_of("dense_decode", options={"tile": 64})))
    assert "leaves out options['tile']" in str(why_unsupported(Supports(), options, case_of("dense_decode")))


def test_a_flag_is_not_a_number() -> None:
    """True would pass for the choice 1, and the replayed kernel would take another path."""
    assert why_unsupported(Supports(), {"fast": (0, 1)}, case_of("dense_decode", options={"fast": True})) is not None


def test_adapted_options_keep_what_the_kernel_offers() -> None:
    """A saved case could not be replayed on another kernel, or would lose the setting that matters."""
    case = case_of("dense_decode", options={"tile": 32, "variant": "a"})
    adapted = adapt_options(case, {"tile": (16, 32), "num_splits": (2, 4)})
    assert adapted.options == {"tile": 32, "num_splits": 2}
    assert why_unsupported(Supports(), {"tile": (16, 32), "num_splits": (2, 4)}, adapted) is None


def test_a_case_that_fits_is_not_copied() -> None:
    """Comparing by identity would see a change where there is none."""
    case = case_of("dense_decode", options={"tile": 32})
    assert adapt_options(case, {"tile": (16, 32)}) is case


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


@pytest.mark.parametrize("name", ["empty_sequences", "deterministic", "batch_invariant", "graph_replay"])
def test_promises_are_true_or_false(name: str) -> None:
    """ "no" would count as a promise, and the kernel be blamed for not keeping it."""
    promise: dict[str, Any] = {name: "no"}
    with pytest.raises(ValueError, match=rf"Supports\({name}='no'\): must be True or False"):
        attnfuzz.Supports(**promise)


@pytest.mark.parametrize("declared", [{"empty_state_outputs": "nan"}, {"empty_state_lse": "-inf"}, {"strides": "gaps"}])
def test_contracts_are_one_of_a_few_words(declared: dict[str, Any]) -> None:
    """A misspelt contract would be held to be the default."""
    with pytest.raises(ValueError, match=rf"Supports\({next(iter(declared))}="):
        attnfuzz.Supports(**declared)


def test_what_was_saved_before_a_field_came_is_read() -> None:
    """A campaign begun with an older version could not be resumed."""
    new = {"empty_state_outputs", "empty_state_lse"}
    saved = {
        name: value for name, value in msgspec.to_builtins(attnfuzz.Supports(strides="any")).items() if name not in new
    }
    assert msgspec.convert(saved, attnfuzz.Supports) == attnfuzz.Supports(strides="any")


def test_a_graph_is_promised_by_those_only_who_say_so() -> None:
    """Kernels that wait for the device, as many do, would all fail."""
    assert not attnfuzz.Supports().graph_replay


@pytest.mark.parametrize("sizes", ["some", (), (0,), (2048,), [64], None])
def test_sizes_of_v_are_equal_any_or_numbers(sizes: Any) -> None:
    """Cases would be drawn for a kernel by a word that means nothing."""
    with pytest.raises(ValueError, match=r"Supports\(v_head_sizes"):
        attnfuzz.Supports(v_head_sizes=sizes)


def test_a_default_that_is_passed_is_a_promise() -> None:
    """Who writes down that sequences may be empty would have it inferred that they may not."""
    said = Supports(empty_sequences=True, dtypes=("float16",))
    assert [said.leaves_open(name) for name in ("empty_sequences", "dtypes", "strides")] == [False, False, True]
    assert said.declared() == {"dtypes": ("float16",), "empty_sequences": True}
    copied = msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(said, lse="none")), type=Supports)
    assert not copied.leaves_open("empty_sequences")
    assert Supports().declared() == {}


def test_undeclared_means_the_loosest_but_not_tf32() -> None:
    """A kernel that declares nothing must not be reported for rounding its weights, nor excused for TF32."""
    assert (Numerics().probabilities, Numerics().partials, Numerics().matmul) == ("input", "input", "tensor_core")


@pytest.mark.parametrize("field", ["probabilities", "partials", "matmul"])
def test_unknown_values_are_refused_with_the_choices(field: str) -> None:
    """A misspelt declaration must not silently mean something else."""
    wrong: dict[str, Any] = {field: "fp32"}
    with pytest.raises(ValueError, match=rf"Numerics: {field}='fp32' must be one of '\w+'"):
        Numerics(**wrong)


def test_a_declaration_survives_json_and_unknown_fields_do_not() -> None:
    """Declarations cross a pipe as JSON; a field from another version must be an error, not be dropped."""
    declared = Numerics(probabilities="float32", matmul="tf32")
    assert msgspec.json.decode(msgspec.json.encode(declared), type=Numerics) == declared
    with pytest.raises(msgspec.ValidationError, match="unknown field `accumulator`"):
        msgspec.json.decode(b'{"accumulator": "float16"}', type=Numerics)


def test_declarations_do_not_import_torch() -> None:
    """The driver and the command line read declarations and must start without loading torch."""
    code = "import sys, attnfuzz.problems.declared_numerics; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0


def test_bound_is_absolute_plus_relative() -> None:
    """The formula is `torch.testing.assert_close`'s: atol + rtol |expected|, on numbers and tensors."""
    tolerance = FixedTolerance(atol=0.5, rtol=0.25)
    assert tolerance.bound(-2.0) == 1.0
    assert tolerance.bound(torch.tensor([0.0, -2.0, 4.0])).tolist() == [0.5, 1.0, 1.5]


@pytest.mark.parametrize("field", ["atol", "rtol"])
@pytest.mark.parametrize("wrong", [-1e-9, math.nan, math.inf, "1e-2", True, None])
def test_tolerances_that_are_not_finite_and_non_negative_are_refused(field: str, wrong: Any) -> None:
    """A NaN or infinite tolerance would accept everything, a negative one nothing."""
    arguments: dict[str, Any] = {"atol": 0.0, "rtol": 0.0} | {field: wrong}
    with pytest.raises(ValueError, match=rf"FixedTolerance: {field}=.* must be a finite number >= 0"):
        FixedTolerance(**arguments)


def test_a_tolerance_survives_json() -> None:
    """Declarations cross a pipe as JSON."""
    tolerance = FixedTolerance(atol=1, rtol=1e-2)
    assert msgspec.json.decode(msgspec.json.encode(tolerance), type=FixedTolerance) == tolerance
