"""attnfuzz.campaign.relatives: relatives of a known failure that the known bug cannot explain."""

from __future__ import annotations

import msgspec

from attnfuzz.campaign.identity.signature import KnownFindings, Signature, case_features
from attnfuzz.campaign.relatives import relatives_beyond, with_simplest_values
from attnfuzz.campaign.triage.failing import FailingCase
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import DenseDecodeCase, MergeStatesCase
from attnfuzz.problems.features import KV_STRIDES_DIFFER
from attnfuzz.problems.supports import Supports

KERNEL = Declaration(name="k", problem="dense_decode", supports=Supports(strides="any"), target="k")
CASE = DenseDecodeCase(num_q_heads=3, head_size=16, num_kv_heads=1, seq_lens=(40, 7), scale=0.25)
SUSPECT = FailingCase(KERNEL, CASE, Failure(oracle="accuracy", kind="out:value", message="wrong"))


def test_relatives_lack_what_the_known_bug_needs() -> None:
    """Only where the known bug cannot be at work does a failure say something new."""
    known = KnownFindings()
    known.add(Signature(SUSPECT.symptom, frozenset({"seq_len>1"})))
    relatives = relatives_beyond(known, SUSPECT)
    assert all("seq_len>1" not in case_features(KERNEL, case) for case in relatives)
    assert "gqa_ratio not pow2" in case_features(KERNEL, relatives[0])


def test_a_bug_that_needs_nothing_explains_every_relative() -> None:
    """A kernel that is always wrong hides everything, and looking further would only cost time."""
    known = KnownFindings()
    known.add(Signature(SUSPECT.symptom, frozenset()))
    assert relatives_beyond(known, SUSPECT) == []


def test_the_first_relative_lacks_only_what_the_known_bug_is_about() -> None:
    """A bug of V's strides would stay behind one that takes K's strides for V's: both go when all strides go."""
    case = msgspec.structs.replace(CASE, strides={"v": "every_other"})
    suspect = FailingCase(KERNEL, case, SUSPECT.failure)
    known = KnownFindings()
    known.add(Signature(suspect.symptom, frozenset({KV_STRIDES_DIFFER})))
    first = relatives_beyond(known, suspect)[0]
    assert first == msgspec.structs.replace(case, strides={"k": "every_other", "v": "every_other"})


def test_states_to_merge_have_simpler_numbers_too() -> None:
    """A merge that is wrong by little beside large states would never be tried on plain ones."""
    case = MergeStatesCase(num_q_heads=1, head_size=16, num_tokens=1, outputs="fine")
    kernel = Declaration(name="k", problem="merge_states", target="k")
    suspect = FailingCase(kernel, case, Failure(oracle="merge_laws", kind="bits", message="differs"))
    plain = msgspec.structs.replace(case, outputs="normal")
    assert with_simplest_values(suspect) == plain
    assert with_simplest_values(FailingCase(kernel, plain, suspect.failure)) is None
