"""attnfuzz.campaign.triage.known_deaths: which cases go on without the relation that they fault in."""

from __future__ import annotations

from attnfuzz.campaign.identity.signature import Signature, Symptom, case_features
from attnfuzz.campaign.triage.known_deaths import KnownDeaths, KnownFaults
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import DrawnWithout, Failure
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.supports import Supports

KERNEL = Declaration(
    name="k", problem="dense_decode", supports=Supports(head_sizes=(16, 32)), target="kernels.py:reaches_at_32"
)
PLAIN = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(1,), scale=1.0)
WIDE = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=32, seq_lens=(1,), scale=1.0)
WITHOUT = DrawnWithout(("guard_page",))
SYMPTOM = Symptom(KERNEL.target, "guard_page", "read past k")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def at_32(clock: Clock) -> KnownFaults:
    faults = KnownFaults(clock=clock)
    faults.learn(Signature(SYMPTOM, case_features(KERNEL, WIDE)))
    return faults


def test_only_what_a_finding_explains_goes_without() -> None:
    """Accesses outside of other cases would not be found any more, or known ones cost a process each time."""
    assert KnownFaults().relations_for(KERNEL, WIDE) is None
    faults = at_32(Clock())
    assert faults.relations_for(KERNEL, PLAIN) is None
    assert faults.relations_for(KERNEL, WIDE) == WITHOUT
    assert faults.covers(KERNEL, WIDE)
    assert not faults.covers(KERNEL, PLAIN)


def test_each_relation_is_left_out_for_its_own_faults_only() -> None:
    """A page id that overflows would keep accesses outside from being found, and the other way round."""
    faults = at_32(Clock())
    mismatch = Symptom(KERNEL.target, "page_relocation", "page ids")
    faults.learn(Signature(mismatch, case_features(KERNEL, WIDE)))
    assert faults.relations_for(KERNEL, WIDE) == WITHOUT
    faults.learn(Signature(Symptom(KERNEL.target, "page_relocation", "read before k"), case_features(KERNEL, WIDE)))
    assert faults.relations_for(KERNEL, WIDE) == DrawnWithout(("page_relocation", "guard_page"))


def test_now_and_then_such_a_case_is_tried() -> None:
    """A second access outside, which the same cases show, would never be seen once the first is repaired."""
    clock = Clock()
    faults = at_32(clock)
    clock.now = 11.0
    assert faults.relations_for(KERNEL, WIDE) is None
    assert faults.relations_for(KERNEL, WIDE) == WITHOUT


def test_crashes_are_not_learned_from_accesses_outside() -> None:
    """Cases that pass every ordinary run would be skipped."""
    deaths = KnownDeaths(clock=Clock())
    for _ in range(5):
        deaths.judged(KERNEL, WIDE, Failure(oracle="guard_page", kind="read past k", message="outside"))
    deaths.learn(Signature(SYMPTOM, case_features(KERNEL, WIDE)))
    assert not deaths.forbids(KERNEL, WIDE)
    assert deaths.faults.covers(KERNEL, WIDE)
    deaths.learn(Signature(Symptom(KERNEL.target, "crash", "SIGSEGV"), case_features(KERNEL, PLAIN)))
    assert not deaths.faults.covers(KERNEL, PLAIN)
