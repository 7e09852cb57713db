"""attnfuzz.identity.bug: which failures are presumed to be known bugs, and which findings are one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from attnfuzz.campaign.finding import Finding
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import Bug, FailingCase, KnownBugs, Signature, Symptom, are_one, is_alike
from attnfuzz.identity.features import case_features
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import WITHOUT_WEIGHT, Cause, Failure, SourceLine
from tests.unit.named_features import named, words


def a_bug(
    *features: str,
    kernel: str = "k",
    oracle: OracleName = "accuracy",
    kind: str = "out:value",
    cause: str = "",
    maybe: tuple[str, ...] = (),
    tensor: str = "",
    flaky: bool = False,
) -> Bug:
    causes = (Cause(mistake=cause),) if cause else ()
    failure = Failure(oracle=oracle, kind=kind, message="wrong", causes=causes, maybe=maybe, tensor=tensor)
    return Bug.shown_by(kernel, failure, named(*features), flaky=flaky)


def test_a_case_with_all_features_of_a_finding_is_known() -> None:
    """Otherwise one bug is reported again for every case that hits it."""
    assert a_bug("ragged").predicts(a_bug("ragged", "num_seqs>1"))


def test_a_case_that_lacks_a_feature_is_another_bug() -> None:
    """A known bug must not hide one that needs less."""
    assert not a_bug("ragged", "layout=HND").predicts(a_bug("ragged"))


def test_another_symptom_is_looked_into() -> None:
    """A crash must not be taken for a wrong value, nor one kernel's bug for another's."""
    assert not a_bug().predicts(a_bug(oracle="crash", kind="SIGSEGV"))
    assert not a_bug().predicts(a_bug(kernel="other"))


def test_a_told_cause_predicts_whatever_a_case_has() -> None:
    """A sink that is left out was told a second time for a head size with which it nearly vanishes."""
    known = a_bug("sinks", "head_size other than 128", cause="variant")
    assert known.predicts(a_bug("sinks", "head_size>64", cause="variant"))
    assert known.predicts(a_bug("sinks", "head_size>64", maybe=("variant",)))
    assert not known.predicts(a_bug("sinks", "head_size other than 128", cause="head_map"))
    assert not known.predicts(a_bug("soft_cap", cause="variant"))  # another option, of which as much is said


def test_relations_see_what_is_kept_between_calls() -> None:
    """A plan that is kept from call to call was told again as page ids that are ignored: a relation moves pages."""
    kept = a_bug("block_size>1", "preceding cases", oracle="dead_memory", kind="out", cause="kept_between_calls")
    assert kept.predicts(a_bug(oracle="page_relocation", kind="ignored page ids", cause="ignored_page_ids"))
    assert kept.predicts(a_bug(oracle="page_permutation", kind="bits"))
    assert not kept.predicts(a_bug(oracle="page_relocation", kind="strides of k", cause="narrow_offsets"))
    assert not kept.predicts(a_bug())


def test_what_a_relation_adds_to_a_case_counts_as_had() -> None:
    """A scale that is left out was told again of a case with a scale of 1, which a relation had multiplied."""
    known = a_bug("fp8 cache", "scales", cause="kv_scales")
    assert known.predicts(a_bug("fp8 cache", oracle="value_affinity", kind="bits", cause="kv_scales"))
    assert not known.predicts(a_bug("fp8 cache", cause="kv_scales"))


def test_a_rounding_does_not_predict_large_errors() -> None:
    """A token that is lost would be put down to scores in 16 bits, which hardly any case is without."""
    known = a_bug("seq_len>1", cause="scores_rounded")
    assert not known.predicts(a_bug("seq_len>1"))
    assert known.predicts(a_bug(maybe=("scores_rounded",)))


def test_errors_that_no_time_was_left_for_may_be_a_rounding_that_is_known() -> None:
    """A large case, in which no replay gives a rounding, would be told beside it whenever a campaign ends too early."""
    known, unnamed = a_bug(cause="weights_rounded"), a_bug("seq_len>1")
    assert not msgspec.structs.replace(unnamed, rough=True).is_told_apart_from(known)
    assert unnamed.is_told_apart_from(known)


def test_where_any_case_fails_a_cause_of_some_says_nothing() -> None:
    """Padding that takes weight in every case was told a second time, as TF32, for a case that TF32 happens to fit."""
    assert a_bug(cause="past_the_end").predicts(a_bug("head_size>16", cause="tf32"))


def test_a_wrong_log_sum_exp_is_no_wrong_output() -> None:
    """A log-sum-exp to another base would hide whatever is wrong with the output."""
    known = a_bug("seq_len>1", kind="lse:value", tensor="lse")
    assert not are_known(known, a_bug("seq_len>1", "window", tensor="out"))


def are_known(known: Bug, seen: Bug) -> bool:
    return known.predicts(seen) or known.may_be_behind(seen)


def test_what_has_no_weight_makes_no_other_number() -> None:
    """Memory that is read where its weight is 0 would stand for numbers that are wrong for another reason."""
    known = a_bug("partial last page", oracle="dead_memory", kind="out", cause=WITHOUT_WEIGHT)
    assert not are_known(known, a_bug("partial last page", "seq_len>1"))
    assert are_known(known, a_bug("partial last page", "seq_len>1", kind="out:nan"))


def test_numbers_of_a_formula_are_no_read_outside() -> None:
    """A window whose keys weigh exp(-10000) would be one more sign of a block table read past its end."""
    outside = a_bug("context", "query_len>1", oracle="guard_page", kind="read past block_table")
    assert not are_known(outside, a_bug("context", "window", maybe=("hidden_keys",)))
    assert are_known(outside, a_bug("context", "window", maybe=("tokens_dropped",)))
    assert are_known(
        a_bug("window", oracle="guard_page", kind="read past k_cache"), a_bug("window", cause="hidden_keys")
    )


def test_what_a_relation_adds_to_any_case_counts_as_had() -> None:
    """Merging with an empty state, which a relation does by itself, was a second finding beside cases of empty ones."""
    known = a_bug("one state empty", oracle="dead_memory", kind="output")
    assert known.may_be_behind(a_bug(oracle="merge_laws", kind="bits"))
    assert not known.may_be_behind(a_bug(oracle="value_affinity", kind="bits"))


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (a_bug(oracle="determinism", kind="lse", flaky=True), True),
        (a_bug(oracle="page_permutation", kind="bits"), True),
        (a_bug(oracle="accuracy", kind="out:value"), False),
        (a_bug(oracle="crash", kind="SIGSEGV", flaky=True), False),
    ],
)
def test_runs_that_differ_are_one_bug(other: Bug, same: bool) -> None:
    """Noise was two findings: bits differ between two runs of a case, and before and after another call."""
    assert a_bug(oracle="call_sequence", kind="bits").predicts(other) is same
    assert a_bug("preceding cases", oracle="determinism", kind="lse").predicts(other) is same


def test_bits_that_are_told_to_differ_explain_those_of_any_case() -> None:
    """An order of summing that goes by the batch was a finding for each type and length in which it shows."""
    told = msgspec.structs.replace(
        a_bug("window", "dtype=bfloat16", oracle="batch_invariance", kind="bits"), case=b"{}"
    )
    assert told.predicts(a_bug("seq_len>1", oracle="batch_invariance", kind="bits"))
    assert not msgspec.structs.replace(told, case=b"").predicts(a_bug(oracle="batch_invariance", kind="bits"))


def test_noise_between_calls_is_that_which_needs_others_before_it() -> None:
    """Noise was two findings: of a case that needs another one before it, and of calls between two runs."""
    after_others = a_bug("preceding cases", oracle="determinism", kind="lse")
    assert after_others.predicts(a_bug(oracle="call_sequence", kind="bits"))
    assert not after_others.predicts(a_bug(oracle="accuracy", kind="lse:value"))


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (("accuracy", "out:value", "out"), ("dead_memory", "out", "out"), True),
        (("value_affinity", "bits", "out"), ("accuracy", "out:value", "out"), True),
        (("accuracy", "out:value", "out"), ("value_affinity", "bits", "out"), False),
        (("accuracy", "out:value", "out"), ("accuracy", "lse:value", "lse"), False),
        (("crash", "SIGSEGV", ""), ("accuracy", "out:value", "out"), False),
        (("exception", "ValueError in f", ""), ("exception", "IndexError in f", ""), False),
        (("hang", "timeout", ""), ("crash", "SIGSEGV", ""), False),
    ],
)
def test_shrinking_goes_on_with_what_shows_no_less(one: Any, other: Any, alike: bool) -> None:
    """A bug would be several findings, by the oracles that see it; or a crash be told as a wrong digit."""
    a, b = (Failure(oracle=oracle, kind=kind, message="", tensor=tensor) for oracle, kind, tensor in (one, other))
    assert is_alike(a, b) is alike


def test_busy_counts_the_workers_at_it() -> None:
    """When one of two workers is done with a symptom, the other still is at it."""
    known, symptom = KnownBugs(), Symptom("kernel", "accuracy", "out:value")
    for busy in (True, True, False):
        known.set_busy(symptom, busy)
    assert known.is_busy(symptom)
    known.set_busy(symptom, False)
    assert not known.is_busy(symptom)


def test_features_that_every_case_has_do_not_count() -> None:
    """For a kernel that takes only head size 64, "head_size>16" says nothing about a bug."""
    case = DenseDecodeCase(num_q_heads=1, head_size=64, num_kv_heads=1, seq_lens=(1,), scale=0.125)
    failure = Failure(oracle="accuracy", kind="out:value", message="wrong")
    only_64 = Declaration(name="k", problem="dense_decode", supports=Supports(head_sizes=(64,)), target="k")
    anything = Declaration(name="k", problem="dense_decode", target="k")
    assert case_features(only_64, case) == frozenset()
    assert "head_size>16" in words(case_features(anything, case))
    assert str(Signature.of("k", failure, named("b", "a"))) == "accuracy/out:value [a, b]"
    assert str(Signature.of("k", failure, frozenset())) == "accuracy/out:value"


def test_a_flaky_failure_is_put_down_to_a_flaky_bug_of_its_kernel() -> None:
    """A race is judged now by one oracle and now by another."""
    declaration = Declaration(name="k", problem="dense_decode", target="k")
    case = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(1,), scale=0.25)
    dead = FailingCase(declaration, case, Failure(oracle="dead_memory", kind="out", message="no"))
    known = KnownBugs([a_bug("gqa_ratio>1", flaky=True)])
    assert known.predicting(dead, flaky=True) is not None
    assert known.predicting(dead) is None


def test_one_order_of_additions_has_one_name() -> None:
    """It would be another one for every recipe, length and head size that rounds otherwise."""
    bits = Failure(oracle="value_affinity", kind="bits", message="no")
    rounded = Failure(oracle="accuracy", kind="out:value", message="no", causes=(Cause(mistake="scores_rounded"),))
    assert str(Signature.of("k", bits, named("seq_len>1", "dtype=float32"))) == "value_affinity/bits"
    assert str(Signature.of("k", rounded, named("seq_len>1"))) == "accuracy/scores_rounded"


def test_bits_that_differ_only_with_a_window_are_told_with_it() -> None:
    """Whoever looks for a result that goes by its batch would look at all paths, and it is that of the window."""
    bits = Failure(oracle="batch_invariance", kind="bits", message="no")
    told = Signature.of("k", bits, named("window", "num_seqs>1", "seq_len>1", "dtype=float32", "dtype"))
    assert str(told) == "batch_invariance/bits [window]"


def test_a_missing_result_is_one_bug_whatever_the_case_needs_to_show_it() -> None:
    """Where the output is wrong as well, that is told, so what is left needs one thing here and another there."""
    missing = Failure(oracle="unwritten", kind="lse", message="no", remedy={"lse": "none"})
    known = Bug.shown_by("k", missing, named("seq_len>1"))
    assert known.predicts(Bug.shown_by("k", missing, named("empty sequence")))
    assert not known.predicts(msgspec.structs.replace(a_bug(oracle="unwritten", kind="lse"), missing=frozenset()))


CASE = simplest_case("paged_decode", Supports(), {})


def a_finding(
    oracle: OracleName,
    kind: str,
    *features: str,
    kernel: str = "k",
    cause: str = "",
    tensor: str = "",
    maybe: tuple[str, ...] = (),
    lines: tuple[str, ...] = (),
) -> Finding:
    declaration = Declaration(name="k", problem="paged_decode", target=kernel)
    causes = (Cause(mistake=cause),) if cause else ()
    places = [one.rpartition(":") for one in lines]
    sources = tuple(SourceLine(file=file, line=int(line)) for file, _, line in places)
    failure = Failure(
        oracle=oracle, kind=kind, message="wrong", causes=causes, tensor=tensor, maybe=maybe, sources=sources
    )
    return Finding(
        "0-1",
        declaration,
        CASE,
        failure,
        0.0,
        failed=3,
        runs=3,
        features=named(*features),
        shrunk_s=1.0,
    )


STRIDES = a_finding("dead_memory", "out", "K and V strides differ", "seq_len>1", "block_size>1")


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (a_finding("unwritten", "out", "K and V strides differ", "num_seqs>1"), True),
        (a_finding("accuracy", "out:value", "K and V strides differ", "dtype=bfloat16"), True),
        (a_finding("dead_memory", "out", "K and V strides differ", "pages=shuffled"), True),
        (a_finding("accuracy", "out:value", "seq_len>1", "block_size>1"), False),
        (a_finding("accuracy", "out:nan", "empty sequence"), False),
        (a_finding("exception", "IndexError in f", "K and V strides differ"), False),
        (a_finding("unwritten", "out", "K and V strides differ", kernel="other"), False),
    ],
)
def test_what_a_bug_is_about_decides(other: Finding, same: bool) -> None:
    """One bug would be read eight times, or of two bugs only one."""
    assert are_one(STRIDES, other) is are_one(other, STRIDES) is same


def test_bugs_that_each_need_something_of_their_own_stay_apart() -> None:
    """A shared data type is too little to call two bugs one."""
    half = a_finding("accuracy", "out:value", "dtype=bfloat16", "empty sequence")
    assert not are_one(half, a_finding("unwritten", "out", "dtype=bfloat16", "gqa_ratio>1"))


def test_a_rounding_is_one_bug_by_whatever_oracle_it_shows() -> None:
    """A row sum in 16 bits would be read as a wrong LSE, as errors too large together, and as an overflow."""
    sums = a_finding("accuracy", "lse:value", cause="sums_rounded")
    together = a_finding("residuals", "lse:size", cause="sums_rounded")
    overflow = a_finding("value_affinity", "bits", "seq_len>1", maybe=("sums_rounded",))
    for other in (together, overflow):
        assert are_one(sums, other)
        assert are_one(other, sums)
    assert not are_one(together, a_finding("residuals", "out:lean", cause="cut_off"))


def test_small_errors_that_one_rounding_may_give_are_one_finding() -> None:
    """Errors hardly beyond their bounds, of which nothing is sure, would be told once for each recipe."""
    one = a_finding("accuracy", "out:value", "keys=fine", "seq_len>1", maybe=("scores_rounded", "sums_rounded"))
    assert are_one(one, a_finding("accuracy", "out:value", "gqa_ratio>1", maybe=("sums_rounded",)))
    assert not are_one(one, a_finding("accuracy", "out:value", "gqa_ratio>1", maybe=("cut_off",)))
    assert not are_one(one, a_finding("accuracy", "out:value", "gqa_ratio>1"))


def test_a_cause_decides_whatever_the_cases_need() -> None:
    """Scores in 16 bits, or offsets in 32, would be reported once for each tensor, recipe and size that shows them."""
    one = a_finding("page_relocation", "strides of q", "strides:q", cause="narrow_offsets")
    same = a_finding("page_relocation", "strides of out", "empty sequence", cause="narrow_offsets")
    other = a_finding("page_relocation", "ignored stride of q", "strides:q", cause="ignored_stride")
    assert are_one(one, same)
    assert not are_one(one, other)
    assert not are_one(other, one)
    rounded = a_finding("accuracy", "out:value", "seq_len>1", cause="scores_rounded")
    assert are_one(rounded, a_finding("accuracy", "lse:value", "head_size not pow2", cause="scores_rounded"))
    assert not are_one(rounded, a_finding("page_permutation", "bits", "any case"))
    assert not are_one(rounded, a_finding("accuracy", "out:value", "seq_len>1"))


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (("crash", "SIGSEGV", "strides:k=outer_gap"), ("crash", "SIGBUS", "strides:k=outer_gap", "seq_len>1"), True),
        (("crash", "cuda:illegal memory access", "empty sequence"), ("crash", "cuda:misaligned address",
          "empty sequence", "num_seqs>1"), True),
        (("crash", "SIGSEGV", "empty sequence"), ("guard_page", "raised cuda:unspecified launch failure",
          "empty sequence"), True),
        (("crash", "SIGSEGV", "empty sequence"), ("crash", "SIGSEGV", "gqa_ratio>1"), False),
        (("crash", "SIGSEGV", "strides:k=outer_gap"), ("crash", "memory", "strides:k=outer_gap"), False),
        (("crash", "SIGSEGV", "strides:k=outer_gap"), ("hang", "timeout", "strides:k=outer_gap"), False),
    ],
)  # fmt: skip
def test_one_fault_of_memory_is_one_bug_at_whatever_address(a: Any, b: Any, same: bool) -> None:
    """One wrong stride would be read as three crashes, one for each thing that happened to lie there."""
    assert are_one(a_finding(*a), a_finding(*b)) is are_one(a_finding(*b), a_finding(*a)) is same


STRAY = a_finding("red_zone", "write after out", "num_q_heads>1", lines=("engine/ops.py:621",))


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (a_finding("red_zone", "write after lse", "strides:q", lines=("engine/ops.py:621",)), True),
        (a_finding("crash", "SIGSEGV", "empty sequence", lines=("/packages/engine/ops.py:621",)), True),
        (a_finding("guard_page", "write past out", "empty sequence", lines=("engine/ops.py:621",)), True),
        (a_finding("red_zone", "write after out", "strides:q", lines=("engine/ops.py:622",)), False),
        (a_finding("red_zone", "write after out", "strides:q", lines=("other_engine/ops.py:621",)), False),
        (a_finding("red_zone", "write after out", "strides:q", lines=("engine/ops.py:621", "engine/ops.py:7")), False),
        (a_finding("accuracy", "out:value", "strides:q", lines=("engine/ops.py:621",)), False),
        (a_finding("red_zone", "write after out", "num_q_heads>1", lines=("engine/ops.py:622",)), True),
        (a_finding("red_zone", "write after out", "num_q_heads>1"), True),
    ],
)
def test_accesses_of_one_line_are_one_bug_and_others_are_told_apart_by_more_than_that(
    other: Finding, same: bool
) -> None:
    """One store without a mask would be read once for each thing that cases have, or two stores as one."""
    assert are_one(STRAY, other) is are_one(other, STRAY) is same


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (a_finding("red_zone", "write after out", "strides:q"), True),
        (a_finding("red_zone", "write before out", "strides:q"), False),
        (a_finding("red_zone", "write after lse", "strides:q"), False),
        (a_finding("red_zone", "q modified", "strides:q"), False),
    ],
)
def test_writes_behind_one_tensor_are_one_bug_where_no_line_is_known(other: Finding, same: bool) -> None:
    """On a GPU, where compiled code tells no line, one store would be read once for each thing that cases have."""
    stray = a_finding("red_zone", "write after out", "num_q_heads>1")
    assert are_one(stray, other) is are_one(other, stray) is same


@pytest.mark.parametrize(
    ("cause", "same"),
    [("partial_lse", True), ("other_strides", True), ("scores_rounded", False), ("narrow_offsets", False)],
)
def test_a_mistake_that_is_made_everywhere_is_told_with_what_its_cases_show_besides(cause: str, same: bool) -> None:
    """Whatever cause is not told of a larger case was a bug of its own, as is right where luck decides what shows."""
    one = a_finding("accuracy", "out:value", "strides:out", "num_seqs>1", cause=cause)
    more = a_finding("residuals", "out:nan", "strides:out", "dtype=bfloat16", maybe=("weights_rounded",))
    assert are_one(one, more) is are_one(more, one) is same
    alike = a_finding("accuracy", "out:value", "strides:out", "num_seqs>1", "scale")
    assert one.bug.predicts(alike.bug) is same
    assert not are_one(one, a_finding("residuals", "out:nan", "strides:out", "num_seqs>1", cause="read_before_written"))
    assert one.bug.is_told_apart_from(a_finding("unwritten", "out", cause="read_before_written").bug)
    anywhere = a_finding("accuracy", "out:value", cause=cause)
    assert not are_one(anywhere, a_finding("accuracy", "out:value", "strides:out", cause="scale"))
    assert not are_one(one, a_finding("accuracy", "out:value", "dtype=bfloat16"))


def test_a_crash_is_told_with_the_stride_that_is_named() -> None:
    """Whoever repairs the stride would look for a second bug behind the crash."""
    named = a_finding("page_relocation", "ignored stride of k", "seq_len>1", cause="ignored_stride", tensor="k")
    crash = a_finding("crash", "SIGSEGV", "strides:k", "strides:k=outer_gap")
    assert are_one(named, crash)
    assert are_one(crash, named)
    assert not are_one(named, a_finding("crash", "SIGSEGV", "strides:v", "strides:v=outer_gap"))
    assert not are_one(named, a_finding("crash", "SIGSEGV", "seq_len>1"))


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (a_finding("accuracy", "out:value", "dtype=bfloat16", "seq_len>1", "values=integers", cause="scale"), True),
        (a_finding("accuracy", "out:value", "dtype=bfloat16", "seq_len>1", maybe=("weights_rounded", "scale")), True),
        (a_finding("accuracy", "out:value", "dtype=bfloat16", "seq_len>1", cause="head_map"), False),
        (a_finding("accuracy", "out:value", "dtype=bfloat16", "seq_len>1"), False),
    ],
)
def test_one_mistake_that_is_told_of_both_is_one_bug(other: Finding, same: bool) -> None:
    """A kernel that forgets the scale had three findings, one for each way in which small numbers show it."""
    scale = a_finding("accuracy", "out:value", "keys", "seq_len>1", cause="scale")
    assert are_one(scale, other) is are_one(other, scale) is same


def test_what_only_some_may_be_is_that_which_others_are() -> None:
    """Weights in float16 look like TF32 in some cases of float32, and like either where they are lost."""
    tf32 = a_finding("accuracy", "out:value", cause="tf32", maybe=("weights_rounded",))
    lost = a_finding("accuracy", "out:value", "dtype=bfloat16", maybe=("weights_rounded", "scale"))
    assert are_one(tf32, lost)
    assert are_one(lost, tf32)
    other = a_finding("accuracy", "out:value", cause="sums_rounded", maybe=("weights_rounded",))
    assert not are_one(tf32, other)  # each says what it is


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (a_finding("crash", "SIGSEGV", "seq_len>1"), True),
        (a_finding("guard_page", "read past block_table", "seq_len>1"), True),
        (a_finding("accuracy", "out:value", "extra columns", "seq_len>1", cause="past_the_end"), True),
        (a_finding("crash", "SIGSEGV", "gqa_ratio>1"), False),
        (a_finding("exception", "ZeroDivisionError in f", "seq_len>1"), False),
    ],
)
def test_a_read_past_the_end_is_one_bug_wherever_the_sequence_ends(other: Finding, same: bool) -> None:
    """Past the end lies dead memory, another's token, or nothing: one token too many was four findings."""
    dead = a_finding("dead_memory", "out", cause="past_the_end")
    assert are_one(dead, other) is are_one(other, dead) is same


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (a_finding("determinism", "out", "dtype=float32", "extra columns", "num_seqs>1"), True),
        (a_finding("unwritten", "out", "gqa_ratio>1", "seq_len>1"), True),
        (a_finding("accuracy", "out:value", "gqa_ratio>1", cause="another_page"), True),
        (a_finding("accuracy", "out:value", "gqa_ratio>1", cause="head_map"), False),
        (a_finding("hang", "timeout", "gqa_ratio>1"), False),
    ],
)
def test_whatever_is_read_where_page_ids_are_ignored_is_one_bug(other: Finding, same: bool) -> None:
    """A kernel that takes pages for contiguous had six findings, by what lay where it read."""
    ignored = a_finding("page_relocation", "ignored page ids", cause="ignored_page_ids")
    assert are_one(ignored, other) is are_one(other, ignored) is same


def test_an_error_beyond_its_bound_is_a_wrong_number_whoever_sees_it() -> None:
    """The runs of ``residuals`` with other numbers would tell every wrong number a second time."""
    assert Symptom.of("k", Failure(oracle="residuals", kind="out:value", message="")).oracle == "accuracy"
    assert Symptom.of("k", Failure(oracle="residuals", kind="out:size", message="")).oracle == "residuals"


WRONG_BLOCK_STRIDE = (
    a_finding("dead_memory", "out", "block_size>1", "partial last page", "pages=shuffled", "spare blocks"),
    a_finding("accuracy", "out:value", "block_size>1", "seq_len>1", "seq_len>block_size"),
    a_finding("dead_memory", "out", "block_size>1", "num_seqs>1", "partial last page"),
    a_finding("accuracy", "out:value", "block_size>1", "num_seqs>1", "seq_len>1"),
    a_finding("dead_memory", "out", "block_size>1", "pages=reversed", "partial last page", "seq_len>1",
              "seq_len>block_size"),
)  # fmt: skip


"""What a kernel was reported with that takes 8 tokens for the distance between blocks of 16."""


@pytest.mark.parametrize("other", WRONG_BLOCK_STRIDE[1:])
def test_a_wrong_address_is_one_bug_wherever_it_leads(other: Finding) -> None:
    """One mistake with pages would be read six times, told apart only by what lay where it reads."""
    first = WRONG_BLOCK_STRIDE[0]
    assert are_one(first, other)
    assert are_one(other, first)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("dead_memory", "out", "block_size>1", "partial last page"), ("accuracy", "out:value", "seq_len>1")),
        (("dead_memory", "out"), ("accuracy", "out:value", "seq_len>1", "seq_len>block_size")),
        (("accuracy", "out:value", "num_seqs>1", "ragged"), ("dead_memory", "out", "seq_len>1", "seq_len>block_size")),
        (("accuracy", "out:inf", "logit_exponent>0"), ("accuracy", "out:value", "seq_len>1")),
    ],
)
def test_bugs_with_different_needs_stay_apart(a: tuple[OracleName, str], b: tuple[OracleName, str]) -> None:
    """Of two bugs that are both about lengths or pages only one would be reported."""
    assert not are_one(a_finding(*a), a_finding(*b))
    assert not are_one(a_finding(*b), a_finding(*a))


def test_wrong_addresses_seen_by_accuracy_and_in_the_last_digit_are_one_bug() -> None:
    """A stray page would be reported once for its numbers and once more for the bits that it changes."""
    moved = a_finding("page_permutation", "bits", "seq_len>1", "seq_len>block_size")
    assert are_one(moved, a_finding("accuracy", "out:value", "seq_len>block_size"))
    assert are_one(moved, a_finding("block_table_slack", "bits", "seq_len>1", "seq_len>block_size"))
    assert not are_one(moved, a_finding("accuracy", "out:value", "strides:q"))
    assert not are_one(moved, a_finding("value_affinity", "bits", "seq_len>1"))
