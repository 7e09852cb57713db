"""attnfuzz.identity.bug: which failures are presumed to be known bugs, and which findings are one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from attnfuzz.campaign.finding import Finding
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import Bug, FailingCase, KnownBugs, Signature, Symptom, are_one, is_alike
from attnfuzz.identity.features import case_features
from attnfuzz.mistake import WITHOUT_WEIGHT
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import Cause, Failure, SourceLine
from tests.common.named_features import named, words

CASE = simplest_case("paged_decode", Supports(), {})


def a_failure(
    oracle: OracleName, kind: str, *, cause: str = "", maybe: tuple[str, ...] = (), tensor: str = "", lines: str = ""
) -> Failure:
    """``lines``: as "engine/ops.py:621 engine/ops.py:7"."""
    causes = (Cause(mistake=cause),) if cause else ()
    places = [one.rpartition(":") for one in lines.split()]
    sources = tuple(SourceLine(file=file, line=int(line)) for file, _, line in places)
    return Failure(
        oracle=oracle, kind=kind, message="wrong", causes=causes, maybe=maybe, tensor=tensor, sources=sources
    )


def a_bug(
    *features: str,
    kernel: str = "k",
    oracle: OracleName = "accuracy",
    kind: str = "out:value",
    flaky: bool = False,
    **said: Any,
) -> Bug:
    return Bug.shown_by(kernel, a_failure(oracle, kind, **said), named(*features), flaky=flaky)


AFTER_OTHERS = a_bug("preceding cases", oracle="determinism", kind="lse")
KEPT = a_bug("block_size>1", "preceding cases", oracle="dead_memory", kind="out", cause="kept_between_calls")
OUT_OF_ORDER = a_bug("window", "dtype=bfloat16", oracle="batch_invariance", kind="bits")
SINK = a_bug("sinks", "head_size other than 128", cause="variant")
NOISE = (
    a_bug(oracle="determinism", kind="lse", flaky=True),
    a_bug(oracle="page_permutation", kind="bits"),
)
NO_NOISE = (a_bug(oracle="accuracy", kind="out:value"), a_bug(oracle="crash", kind="SIGSEGV", flaky=True))
MISSING = Failure(oracle="unwritten", kind="lse", message="no", remedy={"lse": "none"})
PREDICTED: dict[str, tuple[Bug, tuple[Bug, ...], tuple[Bug, ...]]] = {
    "a case with all that a bug needs, or one bug is told for each case that hits it": (
        a_bug("ragged"), (a_bug("ragged", "num_seqs>1"),), (),
    ),
    "not one that lacks something, which would hide a bug that needs less": (
        a_bug("ragged", "layout=HND"), (), (a_bug("ragged"),),
    ),
    "not a crash for a wrong value, nor one kernel's bug for another's": (
        a_bug(), (), (a_bug(oracle="crash", kind="SIGSEGV"), a_bug(kernel="other")),
    ),
    "a told cause, whatever a case has: a sink was told again for a head size with which it nearly vanishes": (
        SINK,
        (a_bug("sinks", "head_size>64", cause="variant"), a_bug("sinks", "head_size>64", maybe=("variant",))),
        (
            a_bug("sinks", "head_size other than 128", cause="head_map"),
            a_bug("soft_cap", cause="variant"),  # another option, of which as much is said
        ),
    ),
    "relations, of what is kept between calls: a plan was told again as page ids that are ignored": (
        KEPT,
        (
            a_bug(oracle="page_relocation", kind="ignored page ids", cause="ignored_page_ids"),
            a_bug(oracle="page_permutation", kind="bits"),
        ),
        (a_bug(oracle="page_relocation", kind="strides of k", cause="narrow_offsets"), a_bug()),
    ),
    "what a relation adds to a case: a scale was told again for a case with a scale of 1": (
        a_bug("fp8 cache", "scales", cause="kv_scales"),
        (a_bug("fp8 cache", oracle="value_affinity", kind="bits", cause="kv_scales"),),
        (a_bug("fp8 cache", cause="kv_scales"),),
    ),
    "a scale of K by no bug of that of V: another head's was put down to a tail that is not scaled": (
        a_bug("fp8 cache", "scales", cause="v_scale"),
        (
            a_bug("fp8 cache", "scales", "seq_len>1", cause="v_scale"),
            a_bug("fp8 cache", "scales", cause="kv_scales"),
            a_bug("fp8 cache", "scales", "seq_len>1", maybe=("k_scale", "v_scale")),
        ),
        (a_bug("fp8 cache", "scales", "seq_len>1", cause="k_scale"),),
    ),
    "what is wrong with both scales where it shows in one, the other being 1": (
        a_bug("fp8 cache", "scales", cause="kv_scales"),
        (a_bug("fp8 cache", "scales", cause="k_scale"), a_bug("fp8 cache", "scales", cause="v_scale")),
        (),
    ),
    "by a rounding no large errors: a token that is lost would be put down to scores in 16 bits": (
        a_bug("seq_len>1", cause="scores_rounded"), (a_bug(maybe=("scores_rounded",)),), (a_bug("seq_len>1"),),
    ),
    "by what any case shows whatever causes some fit: padding with weight was told a second time, as TF32": (
        a_bug(cause="past_the_end"), (a_bug("head_size>16", cause="tf32"),), (),
    ),
    "runs that differ, whichever run they are of": (a_bug(oracle="call_sequence", kind="bits"), NOISE, NO_NOISE),
    "and where other cases came before": (
        AFTER_OTHERS,
        (*NOISE, a_bug(oracle="call_sequence", kind="bits")),
        (*NO_NOISE, a_bug(oracle="accuracy", kind="lse:value")),
    ),
    "bits of any case, by an order of summing that goes by the batch, once it was told": (
        msgspec.structs.replace(OUT_OF_ORDER, case=b"{}"),
        (a_bug("seq_len>1", oracle="batch_invariance", kind="bits"),),
        (),
    ),
    "and not before": (OUT_OF_ORDER, (), (a_bug(oracle="batch_invariance", kind="bits"),)),
    "a missing result, whatever else the case needs to show it": (
        Bug.shown_by("k", MISSING, named("seq_len>1")),
        (Bug.shown_by("k", MISSING, named("empty sequence")),),
        (a_bug(oracle="unwritten", kind="lse"),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PREDICTED)
def test_a_known_bug_predicts(name: str) -> None:
    """A bug would be told once more for each way in which it shows, or hide another one."""
    known, same, others = PREDICTED[name]
    assert [one for one in same if not known.predicts(one)] == []
    assert [one for one in others if known.predicts(one)] == []


OUTSIDE = a_bug("context", "query_len>1", oracle="guard_page", kind="read past block_table")
WEIGHTLESS = a_bug("partial last page", oracle="dead_memory", kind="out", cause=WITHOUT_WEIGHT)
MAY_BE_KNOWN: dict[str, tuple[Bug, tuple[Bug, ...], tuple[Bug, ...]]] = {
    "a wrong log-sum-exp is no wrong output": (
        a_bug("seq_len>1", kind="lse:value", tensor="lse"), (), (a_bug("seq_len>1", "window", tensor="out"),),
    ),
    "memory that is read where its weight is 0 makes no other number than NaN": (
        WEIGHTLESS,
        (a_bug("partial last page", "seq_len>1", kind="out:nan"),),
        (a_bug("partial last page", "seq_len>1"),),
    ),
    "nor are wrong numbers behind it, unless scores are so large that they leave no weight to what lies there": (
        a_bug("partial last page"),
        (a_bug("partial last page", "logit_exponent>0", oracle="dead_memory", kind="out", cause=WITHOUT_WEIGHT),),
        (WEIGHTLESS,),
    ),
    "numbers of a formula are no read outside: a window whose keys weigh exp(-10000) is none of a block table": (
        OUTSIDE,
        (a_bug("context", "window", maybe=("tokens_dropped",)),),
        (a_bug("context", "window", maybe=("hidden_keys",)),),
    ),
    "unless it is of that very part": (
        a_bug("window", oracle="guard_page", kind="read past k_cache"), (a_bug("window", cause="hidden_keys"),), (),
    ),
    "what a relation adds to any case counts as had: merging with an empty state was a second finding": (
        a_bug("one state empty", oracle="dead_memory", kind="output"),
        (a_bug(oracle="merge_laws", kind="bits"),),
        (a_bug(oracle="value_affinity", kind="bits"),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MAY_BE_KNOWN)
def test_nearby_cases_are_run_for_a_bug_that_a_failure_may_be(name: str) -> None:
    """What has another reason would be looked for in the wrong bug, or one bug be told twice."""
    known, same, others = MAY_BE_KNOWN[name]
    assert all(known.predicts(one) or known.may_be_behind(one) for one in same)
    assert not any(known.predicts(one) or known.may_be_behind(one) for one in others)


def test_errors_that_no_time_was_left_for_may_be_a_rounding_that_is_known() -> None:
    """A large case, in which no replay gives a rounding, would be told beside it whenever a campaign ends too early."""
    known, unnamed = a_bug(cause="weights_rounded"), a_bug("seq_len>1")
    assert not msgspec.structs.replace(unnamed, rough=True).is_told_apart_from(known)
    assert unnamed.is_told_apart_from(known)


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


def test_a_mistake_that_the_problem_knows_is_one_bug_whatever_else_a_case_has() -> None:
    """A number read of the sequence before was told with two sequences, and again with one and a row of padding."""
    several, padded, other = (
        Bug.shown_by(
            "k",
            Failure(oracle="unwritten", kind="out", message="no", causes=(Cause(mistake="mistaken", way=way),)),
            named(feature, "keeps=each"),
        )
        for way, feature in (("before", "len(tokens)>1"), ("before", "padded>0"), ("last", "padded>0"))
    )
    assert several.predicts(padded)
    assert padded.predicts(several)
    assert not padded.predicts(other)
    assert padded.is_told_apart_from(other)


def test_an_index_out_of_range_at_one_line_is_one_bug() -> None:
    """One wrong index raised with two sequences, and again with one and a row of padding, and was told twice."""
    several, padded, elsewhere, raised = (
        Bug.shown_by(
            "k",
            Failure(
                oracle="exception",
                kind=f"{error} in k",
                message="no",
                raised_at=SourceLine(file="k.py", line=line),
            ),
            named(feature),
        )
        for error, line, feature in (
            ("IndexError", 7, "len(tokens)>1"),
            ("IndexError", 7, "padded>0"),
            ("IndexError", 9, "padded>0"),
            ("ValueError", 7, "padded>0"),
        )
    )
    assert several.predicts(padded)
    assert padded.predicts(several)
    assert not several.predicts(elsewhere)
    assert padded.predicts(elsewhere)  # a case with all that it needs
    assert not several.predicts(raised)
    also_raised = msgspec.structs.replace(raised, features=several.features)
    assert not raised.predicts(also_raised)  # a check of many things may lie at one line


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


def found(
    oracle: OracleName,
    kind: str,
    *features: str,
    kernel: str = "k",
    **said: Any,
) -> Finding:
    declaration = Declaration(name="k", problem="paged_decode", target=kernel)
    failure, needed = a_failure(oracle, kind, **said), named(*features)
    return Finding("0-1", declaration, CASE, failure, 0.0, failed=3, runs=3, features=needed, shrunk_s=1.0)


LINE = "engine/ops.py:621"
OTHER_LINE = "engine/ops.py:622"
BITS_OF_PAGES = found("page_permutation", "bits", "seq_len>1", "seq_len>block_size")
ROUNDED = found("accuracy", "out:value", "seq_len>1", cause="scores_rounded")
ONE_BUG: dict[str, tuple[Finding, tuple[Finding, ...], tuple[Finding, ...]]] = {
    "what a bug is about decides": (
        found("dead_memory", "out", "K and V strides differ", "seq_len>1", "block_size>1"),
        (
            found("unwritten", "out", "K and V strides differ", "num_seqs>1"),
            found("accuracy", "out:value", "K and V strides differ", "dtype=bfloat16"),
            found("dead_memory", "out", "K and V strides differ", "pages=shuffled"),
        ),
        (
            found("accuracy", "out:value", "seq_len>1", "block_size>1"),
            found("accuracy", "out:nan", "empty sequence"),
            found("exception", "IndexError in f", "K and V strides differ"),
            found("unwritten", "out", "K and V strides differ", kernel="other"),
        ),
    ),
    "a shared data type is too little where each needs something of its own": (
        found("accuracy", "out:value", "dtype=bfloat16", "empty sequence"),
        (),
        (found("unwritten", "out", "dtype=bfloat16", "gqa_ratio>1"),),
    ),
    "a row sum in 16 bits is a wrong LSE, errors too large together, and an overflow": (
        found("accuracy", "lse:value", cause="sums_rounded"),
        (
            found("residuals", "lse:size", cause="sums_rounded"),
            found("value_affinity", "bits", "seq_len>1", maybe=("sums_rounded",)),
        ),
        (found("residuals", "out:lean", cause="cut_off"),),
    ),
    "small errors that one rounding may give, of which nothing is sure": (
        found("accuracy", "out:value", "keys=fine", "seq_len>1", maybe=("scores_rounded", "sums_rounded")),
        (found("accuracy", "out:value", "gqa_ratio>1", maybe=("sums_rounded",)),),
        (
            found("accuracy", "out:value", "gqa_ratio>1", maybe=("cut_off",)),
            found("accuracy", "out:value", "gqa_ratio>1"),
        ),
    ),
    "a cause decides whatever the cases need: offsets in 32 bits": (
        found("page_relocation", "strides of q", "strides:q", cause="narrow_offsets"),
        (found("page_relocation", "strides of out", "empty sequence", cause="narrow_offsets"),),
        (found("page_relocation", "ignored stride of q", "strides:q", cause="ignored_stride"),),
    ),
    "scores in 16 bits": (
        ROUNDED,
        (found("accuracy", "lse:value", "head_size not pow2", cause="scores_rounded"),),
        (found("page_permutation", "bits", "any case"), found("accuracy", "out:value", "seq_len>1")),
    ),
    "a fault at whatever address: one wrong stride was three crashes, one for each thing that lay there": (
        found("crash", "SIGSEGV", "strides:k=outer_gap"),
        (found("crash", "SIGBUS", "strides:k=outer_gap", "seq_len>1"),),
        (found("crash", "memory", "strides:k=outer_gap"), found("hang", "timeout", "strides:k=outer_gap")),
    ),
    "by whatever name of it": (
        found("crash", "cuda:illegal memory access", "empty sequence"),
        (
            found("crash", "cuda:misaligned address", "empty sequence", "num_seqs>1"),
            found("crash", "SIGSEGV", "empty sequence"),
            found("guard_page", "raised cuda:unspecified launch failure", "empty sequence"),
        ),
        (found("crash", "SIGSEGV", "gqa_ratio>1"),),
    ),
    "accesses of one line, and others are told apart by more than that": (
        found("red_zone", "write after out", "num_q_heads>1", lines=LINE),
        (
            found("red_zone", "write after lse", "strides:q", lines=LINE),
            found("crash", "SIGSEGV", "empty sequence", lines=f"/packages/{LINE}"),
            found("guard_page", "write past out", "empty sequence", lines=LINE),
            found("red_zone", "write after out", "num_q_heads>1", lines=OTHER_LINE),
            found("red_zone", "write after out", "num_q_heads>1"),
        ),
        (
            found("red_zone", "write after out", "strides:q", lines=OTHER_LINE),
            found("red_zone", "write after out", "strides:q", lines=f"other_{LINE}"),
            found("red_zone", "write after out", "strides:q", lines=f"{LINE} engine/ops.py:7"),
            found("accuracy", "out:value", "strides:q", lines=LINE),
        ),
    ),
    "writes behind one tensor where no line is known, as on a GPU": (
        found("red_zone", "write after out", "num_q_heads>1"),
        (found("red_zone", "write after out", "strides:q"),),
        (
            found("red_zone", "write before out", "strides:q"),
            found("red_zone", "write after lse", "strides:q"),
            found("red_zone", "q modified", "strides:q"),
        ),
    ),
    "a crash and the stride that is named": (
        found("page_relocation", "ignored stride of k", "seq_len>1", cause="ignored_stride", tensor="k"),
        (found("crash", "SIGSEGV", "strides:k", "strides:k=outer_gap"),),
        (found("crash", "SIGSEGV", "strides:v", "strides:v=outer_gap"), found("crash", "SIGSEGV", "seq_len>1")),
    ),
    "one mistake that is told of both: a forgotten scale was told for each way in which small numbers show it": (
        found("accuracy", "out:value", "keys", "seq_len>1", cause="scale"),
        (
            found("accuracy", "out:value", "dtype=bfloat16", "seq_len>1", "values=integers", cause="scale"),
            found("accuracy", "out:value", "dtype=bfloat16", "seq_len>1", maybe=("weights_rounded", "scale")),
        ),
        (
            found("accuracy", "out:value", "dtype=bfloat16", "seq_len>1", cause="head_map"),
            found("accuracy", "out:value", "dtype=bfloat16", "seq_len>1"),
        ),
    ),
    "what only some may be is that which others are, unless each says what it is": (
        found("accuracy", "out:value", cause="tf32", maybe=("weights_rounded",)),
        (found("accuracy", "out:value", "dtype=bfloat16", maybe=("weights_rounded", "scale")),),
        (found("accuracy", "out:value", cause="sums_rounded", maybe=("weights_rounded",)),),
    ),
    "a read past the end: there lies dead memory, another's token, or nothing": (
        found("dead_memory", "out", cause="past_the_end"),
        (
            found("crash", "SIGSEGV", "seq_len>1"),
            found("guard_page", "read past block_table", "seq_len>1"),
            found("accuracy", "out:value", "extra columns", "seq_len>1", cause="past_the_end"),
        ),
        (found("crash", "SIGSEGV", "gqa_ratio>1"), found("exception", "ZeroDivisionError in f", "seq_len>1")),
    ),
    "whatever is read where page ids are ignored: that was six findings": (
        found("page_relocation", "ignored page ids", cause="ignored_page_ids"),
        (
            found("determinism", "out", "dtype=float32", "extra columns", "num_seqs>1"),
            found("unwritten", "out", "gqa_ratio>1", "seq_len>1"),
            found("accuracy", "out:value", "gqa_ratio>1", cause="another_page"),
        ),
        (
            found("accuracy", "out:value", "gqa_ratio>1", cause="head_map"),
            found("hang", "timeout", "gqa_ratio>1"),
        ),
    ),
    "a wrong address wherever it leads: 8 tokens for the distance between blocks of 16": (
        found("dead_memory", "out", "block_size>1", "partial last page", "pages=shuffled", "spare blocks"),
        (
            found("accuracy", "out:value", "block_size>1", "seq_len>1", "seq_len>block_size"),
            found("dead_memory", "out", "block_size>1", "num_seqs>1", "partial last page"),
            found("accuracy", "out:value", "block_size>1", "num_seqs>1", "seq_len>1"),
            found("dead_memory", "out", "block_size>1", "pages=reversed", "partial last page", "seq_len>1",
                  "seq_len>block_size"),
        ),
        (),
    ),
    "and seen in the last digit": (
        BITS_OF_PAGES,
        (
            found("accuracy", "out:value", "seq_len>block_size"),
            found("block_table_slack", "bits", "seq_len>1", "seq_len>block_size"),
        ),
        (found("accuracy", "out:value", "strides:q"), found("value_affinity", "bits", "seq_len>1")),
    ),
    "apart are two that are both about lengths or pages": (
        found("accuracy", "out:value", "seq_len>1"),
        (),
        (
            found("dead_memory", "out", "block_size>1", "partial last page"),
            found("accuracy", "out:inf", "logit_exponent>0"),
        ),
    ),
    "and of lengths beyond a page": (
        found("accuracy", "out:value", "seq_len>1", "seq_len>block_size"), (), (found("dead_memory", "out"),),
    ),
    "and of ragged lengths": (
        found("accuracy", "out:value", "num_seqs>1", "ragged"),
        (),
        (found("dead_memory", "out", "seq_len>1", "seq_len>block_size"),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_BUG)
def test_findings_are_one_bug_or_several(name: str) -> None:
    """One bug would be read eight times, or of two bugs only one."""
    one, same, others = ONE_BUG[name]
    told = [[are_one(one, other), are_one(other, one)] for other in (*same, *others)]
    assert told == [[True, True]] * len(same) + [[False, False]] * len(others)


@pytest.mark.parametrize(
    ("cause", "same"),
    [("partial_lse", True), ("other_strides", True), ("scores_rounded", False), ("narrow_offsets", False)],
)
def test_a_mistake_that_is_made_everywhere_is_told_with_what_its_cases_show_besides(cause: str, same: bool) -> None:
    """Whatever cause is not told of a larger case was a bug of its own, as is right where luck decides what shows."""
    one = found("accuracy", "out:value", "strides:out", "num_seqs>1", cause=cause)
    more = found("residuals", "out:nan", "strides:out", "dtype=bfloat16", maybe=("weights_rounded",))
    assert are_one(one, more) is are_one(more, one) is same
    alike = found("accuracy", "out:value", "strides:out", "num_seqs>1", "scale")
    assert one.bug.predicts(alike.bug) is same
    assert not are_one(one, found("residuals", "out:nan", "strides:out", "num_seqs>1", cause="read_before_written"))
    assert one.bug.is_told_apart_from(found("unwritten", "out", cause="read_before_written").bug)
    anywhere = found("accuracy", "out:value", cause=cause)
    assert not are_one(anywhere, found("accuracy", "out:value", "strides:out", cause="scale"))
    assert not are_one(one, found("accuracy", "out:value", "dtype=bfloat16"))


def test_an_error_beyond_its_bound_is_a_wrong_number_whoever_sees_it() -> None:
    """The runs of ``residuals`` with other numbers would tell every wrong number a second time."""
    assert Symptom.of("k", Failure(oracle="residuals", kind="out:value", message="")).oracle == "accuracy"
    assert Symptom.of("k", Failure(oracle="residuals", kind="out:size", message="")).oracle == "residuals"


def test_causes_of_one_scale_and_of_both_are_a_mistake_with_scales() -> None:
    """Where the other scale is 1, a finding would have no cause, and a saved one be told again."""
    causes = tuple(Cause(mistake=one) for one in ("v_scale", "kv_scales"))
    told = msgspec.structs.replace(a_failure("accuracy", "out:value"), causes=causes)
    assert told.cause == "kv_scales"
    known = Bug.shown_by("k", told, named("fp8 cache", "scales"))
    assert known.predicts(a_bug("fp8 cache", "scales", cause="v_scale"))
    assert not known.predicts(a_bug("fp8 cache", "scales", cause="k_scale"))
