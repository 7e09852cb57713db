"""attnfuzz.campaign.tally: what workers report adds up to what they did."""

from __future__ import annotations

import math

from attnfuzz.campaign.messages import Progress
from attnfuzz.campaign.tally import Tally
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import Failure, Verdict
from attnfuzz.problems.cases import DenseDecodeCase

KERNEL = Declaration(name="k", problem="dense_decode", target="k")
CASE = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(1,), scale=0.25)


def test_reports_add_up() -> None:
    """The final table is the sum of these reports; a case lost between two of them is a wrong number."""
    sent: list[Progress] = []
    now = [0.0]
    tally = Tally(sent.append, clock=lambda: now[0])
    for _ in range(10):
        now[0] += 0.1
        tally.judged(KERNEL, CASE, 0.1, Verdict(error_ratio=0.25))
    tally.flush()
    tally.flush()
    assert 1 < len(sent) < 10
    assert sum(progress.cases for progress in sent) == tally.cases("k") == 10
    assert math.isclose(sum(progress.seconds for progress in sent), 1.0)
    assert max(progress.max_error_ratio for progress in sent) == 0.25


def test_an_infinite_ratio_is_left_out() -> None:
    """JSON has no infinity, and a wrong NaN is a finding and no measure of accuracy."""
    sent: list[Progress] = []
    tally = Tally(sent.append)
    failure = Failure(oracle="accuracy", kind="out:nan", message="NaN")
    tally.judged(KERNEL, CASE, 0.1, Verdict(failure=failure, error_ratio=math.inf))
    tally.flush()
    assert sent[0].max_error_ratio == 0.0


def test_the_share_of_known_deaths_is_measured_in_time() -> None:
    """It decides when cases that would crash again are skipped."""
    tally = Tally(lambda progress: None)
    assert tally.share_of_known_deaths("k") == 0.0
    for _ in range(4):
        tally.judged(KERNEL, CASE, 1.0, Verdict())
    tally.known("k", 1.0)
    tally.skipped("k")
    assert tally.share_of_known_deaths("k") == 0.25
