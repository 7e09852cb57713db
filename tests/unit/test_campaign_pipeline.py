"""attnfuzz.campaign.judge.judging: a batch is judged while its submitter goes on, and comes back whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from attnfuzz.campaign.judge import judging as module
from attnfuzz.campaign.judge.judging import Pipeline
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import Timing, Verdict
from attnfuzz.problems.cases import Case, DenseDecodeCase

DECLARATION = Declaration(name="k", problem="dense_decode", target="k")
CASES = [DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(n,), scale=0.25) for n in (1, 2, 3)]


def content(declaration: Declaration, cases: Sequence[Case]) -> list[Verdict]:
    return [Verdict(error_ratio=float(i)) for i, _ in enumerate(cases)]


def test_the_submitter_goes_on_while_the_batch_is_judged() -> None:
    """Otherwise either the drawing or the device waits all the time."""
    drawn = threading.Event()

    def judge(declaration: Declaration, cases: Sequence[Case]) -> list[Verdict]:
        assert drawn.wait(10.0)
        return content(declaration, cases)

    pipeline = Pipeline(judge)
    pipeline.submit(DECLARATION, CASES)
    assert pipeline.collect(0.0) is None
    drawn.set()
    batch = pipeline.collect()
    assert batch is not None
    assert batch.verdicts == content(DECLARATION, CASES)
    assert batch.cases == CASES
    assert pipeline.collect() is None


def test_a_batch_is_sent_off_before_the_submitter_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor would wait for its batch while the interpreter is busy with drawing the next."""
    monkeypatch.setattr(module, "_HEAD_START_S", 10.0)
    sent = threading.Event()

    def judge(declaration: Declaration, cases: Sequence[Case]) -> list[Verdict]:
        time.sleep(0.02)  # lets go of the interpreter, as each file of a journal does
        sent.set()
        return content(declaration, cases)

    Pipeline(judge).submit(DECLARATION, CASES)
    assert sent.is_set()


def test_a_batch_that_was_not_collected_is_not_overwritten() -> None:
    """Its verdicts, findings among them, would be lost without a trace."""
    pipeline = Pipeline(content)
    pipeline.submit(DECLARATION, CASES)
    with pytest.raises(RuntimeError, match="collect"):
        pipeline.submit(DECLARATION, CASES)


@pytest.mark.parametrize("error", [ValueError("bug"), SystemExit(3)])
def test_an_error_in_the_background_is_raised_where_it_is_collected(error: BaseException) -> None:
    """An error that dies with its thread leaves a worker that searches on and judges nothing."""

    def judge(declaration: Declaration, cases: Sequence[Case]) -> list[Verdict]:
        raise error

    pipeline = Pipeline(judge)
    pipeline.submit(DECLARATION, CASES)
    with pytest.raises(type(error)) as caught:
        pipeline.collect()
    assert caught.value is error
    assert pipeline.collect() is None


def test_a_compilation_is_charged_to_the_case_that_caused_it() -> None:
    """A share of all would let formats that were compiled long ago look slow."""
    pipeline = Pipeline(lambda declaration, cases: [Verdict(timing=Timing(compile_s=1.0)), Verdict(), Verdict()])
    pipeline.submit(DECLARATION, CASES)
    batch = pipeline.collect()
    assert batch is not None
    assert batch.verdicts is not None
    batch.seconds = 1.6
    assert [batch.case_seconds(verdict) for verdict in batch.verdicts] == pytest.approx([1.2, 0.2, 0.2])
    assert batch.warm_seconds == pytest.approx(0.6)
