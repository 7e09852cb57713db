"""attnfuzz.campaign.identity.signature: which failures are presumed to be a bug that is known."""

from __future__ import annotations

from attnfuzz.campaign.aspects import ANY_CASE
from attnfuzz.campaign.identity.signature import KnownFindings, Signature, Symptom, case_features, failure_features
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.supports import Supports

SYMPTOM = Symptom("kernel", "accuracy", "out:value")


def test_a_case_with_all_features_of_a_finding_is_known() -> None:
    """Otherwise one bug is reported again for every case that hits it."""
    known = KnownFindings()
    known.add(Signature(SYMPTOM, frozenset({"ragged"})))
    assert known.explains(SYMPTOM, frozenset({"ragged", "num_seqs>1"}))


def test_a_case_that_lacks_a_feature_is_another_bug() -> None:
    """A known bug must not hide one that needs less."""
    known = KnownFindings()
    known.add(Signature(SYMPTOM, frozenset({"ragged", "layout=HND"})))
    assert not known.explains(SYMPTOM, frozenset({"ragged"}))


def test_another_symptom_is_another_bug() -> None:
    """A crash must not be taken for a wrong value, nor one kernel's bug for another's."""
    known = KnownFindings()
    known.add(Signature(SYMPTOM, frozenset()))
    assert not known.explains(Symptom("kernel", "crash", "SIGSEGV"), frozenset())
    assert not known.explains(Symptom("other", "accuracy", "out:value"), frozenset())


def test_busy_counts_the_workers_at_it() -> None:
    """When one of two workers is done with a symptom, the other still is at it."""
    known = KnownFindings()
    for busy in (True, True, False):
        known.set_busy(SYMPTOM, busy)
    assert known.is_busy(SYMPTOM)
    known.set_busy(SYMPTOM, False)
    assert not known.is_busy(SYMPTOM)


def test_features_that_every_case_has_do_not_count() -> None:
    """For a kernel that takes only head size 64, "head_size>16" says nothing about a bug."""
    case = DenseDecodeCase(num_q_heads=1, head_size=64, num_kv_heads=1, seq_lens=(1,), scale=0.125)
    failure = Failure(oracle="accuracy", kind="out:value", message="wrong")
    only_64 = Declaration(name="k", problem="dense_decode", supports=Supports(head_sizes=(64,)), target="k")
    anything = Declaration(name="k", problem="dense_decode", target="k")
    assert case_features(only_64, case) == frozenset()
    assert "head_size>16" in case_features(anything, case)
    assert str(Signature(Symptom.of("k", failure), frozenset({"b", "a"}))) == "accuracy/out:value [a, b]"
    assert str(Signature(Symptom.of("k", failure), frozenset())) == "accuracy/out:value [any case]"


def test_a_flaky_failure_is_put_down_to_a_flaky_bug_of_its_kernel() -> None:
    """A race is judged now by one oracle and now by another."""
    known = KnownFindings()
    flaky, solid = Signature(SYMPTOM, frozenset({"ragged"})), Signature(SYMPTOM, frozenset())
    known.add(solid)
    known.add(flaky, flaky=True)
    assert known.flaky_one("kernel", frozenset({"ragged", "needles"})) == flaky
    assert known.flaky_one("kernel", frozenset({"needles"})) is None
    assert known.flaky_one("other", frozenset({"ragged"})) is None


def test_a_case_may_be_a_bug_that_is_known_by_another_symptom() -> None:
    """A wrong address would be a bug where another token lies, and a second one where dead memory lies."""
    known = KnownFindings()
    wrong = [Signature(SYMPTOM, frozenset(features)) for features in ({"strides:k", "ragged"}, {"ragged"}, {"needles"})]
    for signature in (*wrong, Signature(SYMPTOM, frozenset()), Signature(SYMPTOM, frozenset({ANY_CASE}))):
        known.add(signature)
    dead = Symptom(SYMPTOM.kernel, "dead_memory", "out")
    assert known.alike(dead, frozenset({"ragged", "strides:k"})) == wrong[:2]
    assert known.alike(SYMPTOM, frozenset({"ragged"})) == []
    assert known.alike(Symptom("other.py:f", "dead_memory", "out"), frozenset({"ragged"})) == []
    assert known.alike(Symptom(SYMPTOM.kernel, "exception", "ValueError in f"), frozenset({"ragged"})) == []


def test_bits_that_a_relation_compares_need_nothing_of_the_case() -> None:
    """One order of additions would be another finding for every recipe, length and head size that rounds otherwise."""
    declaration = Declaration(name="k", problem="dense_decode", target="kernel")
    case = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=16, seq_lens=(3, 1), scale=0.25)
    bits = Failure(oracle="value_affinity", kind="bits", message="no")
    raised = Failure(oracle="value_affinity", kind="raised ValueError", message="no")
    assert failure_features(declaration, case, bits) == {"any case"}
    assert failure_features(declaration, case, raised) == case_features(declaration, case)
