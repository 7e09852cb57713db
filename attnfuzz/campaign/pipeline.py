"""One batch is judged in the background while the cases of the next are drawn."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from attnfuzz.campaign.judging import JudgeBatch
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import Verdict
from attnfuzz.problems.cases import Case

__all__ = ["Batch", "Pipeline"]

_HEAD_START_S = 0.003
"""Time for the thread to send off a batch by itself. Every file that it writes lets go of the interpreter, and a thread
that draws meanwhile takes 5 ms to give it back: the executor would have nothing to do for 5 to 12 ms a batch."""


@dataclass(slots=True)
class Batch:
    """Cases judged together in ``seconds``.

    Without ``verdicts``, all that is known is that something is wrong with one of them. ``error`` was raised instead.
    """

    declaration: Declaration
    cases: Sequence[Case]
    verdicts: Sequence[Verdict] | None = None
    seconds: float = 0.0
    error: BaseException | None = None

    @property
    def warm_seconds(self) -> float:
        """Without compilations."""
        return max(0.0, self.seconds - sum(verdict.timing.compile_s for verdict in self.verdicts or ()))

    def case_seconds(self, verdict: Verdict) -> float:
        """What one of the cases took: its own compilations and an equal share of the rest."""
        return verdict.timing.compile_s + self.warm_seconds / len(self.cases)


class Pipeline:
    """Holds at most one batch, which ``judge`` judges in a thread of its own."""

    def __init__(self, judge: JudgeBatch) -> None:
        self._judge = judge
        self._batch: Batch | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether there is a batch to collect, now or later."""
        return self._batch is not None

    def submit(self, declaration: Declaration, cases: Sequence[Case]) -> None:
        """Begin to judge ``cases``. Raises RuntimeError if the last batch has not been collected."""
        if self._batch is not None:
            raise RuntimeError("the last batch has not been collected: collect() it first")
        self._batch = Batch(declaration, cases)
        # a daemon, so that a kernel which hangs cannot keep a worker that was told to stop from ending
        self._thread = threading.Thread(target=self._run, args=(self._batch,), daemon=True)
        self._thread.start()
        self._thread.join(_HEAD_START_S)

    def collect(self, timeout_s: float | None = None) -> Batch | None:
        """The batch, once it has been judged; None if there is none, or not within ``timeout_s``. Raises its error."""
        if self._thread is None or self._batch is None:
            return None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        batch, self._batch, self._thread = self._batch, None, None
        if batch.error is not None:
            raise batch.error
        return batch

    def _run(self, batch: Batch) -> None:
        started = time.monotonic()
        try:
            batch.verdicts = self._judge(batch.declaration, batch.cases)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that collects
            batch.error = error
        batch.seconds = time.monotonic() - started
