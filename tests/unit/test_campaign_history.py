"""attnfuzz.campaign.judge.executor: which cases ran before a failing one in its process."""

from __future__ import annotations

import msgspec

from attnfuzz.campaign.judge.executor import History
from attnfuzz.corpus import MAX_PRECEDING
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import DenseDecodeCase

KERNEL = Declaration(name="k", problem="dense_decode", target="k")
OTHER = msgspec.structs.replace(KERNEL, target="other")
CASES = [
    DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(n,), scale=0.25) for n in range(1, 1000)
]


def test_cases_of_the_same_kernel_and_process_come_before() -> None:
    """A sequence with a case of another process would not be what led to the failure."""
    history = History()
    history.record(1, KERNEL, CASES[:3])
    history.record(2, KERNEL, CASES[3:5])
    history.record(2, OTHER, CASES[5:6])
    history.record(2, KERNEL, CASES[6:8])
    assert history.before(KERNEL, CASES[7]) == (CASES[3], CASES[4], CASES[6])
    assert history.before(KERNEL, CASES[6]) == (CASES[3], CASES[4])
    assert history.before(OTHER, CASES[5]) == ()


def test_a_case_that_ran_elsewhere_has_nothing_before_it() -> None:
    """Another process's cases would be blamed for it."""
    history = History()
    history.record(1, KERNEL, CASES[:3])
    assert history.before(KERNEL, CASES[9]) == ()


def test_the_first_case_of_a_batch_has_as_much_before_it_as_any() -> None:
    """The history of a long campaign must not grow, and must reach back behind the batch."""
    history = History()
    for start in range(0, 900, 30):
        history.record(1, KERNEL, CASES[start : start + 30])
    assert history.before(KERNEL, CASES[899]) == tuple(CASES[899 - MAX_PRECEDING : 899])
    assert history.before(KERNEL, CASES[870]) == tuple(CASES[870 - MAX_PRECEDING : 870])
