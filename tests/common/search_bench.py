"""A search over a pretended kernel, with the coordinator's side of it pretended too."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import msgspec
import pytest
from hypothesis.strategies import SearchStrategy

from attnfuzz.campaign.draw.larger_cases import LargerCases
from attnfuzz.campaign.draw.sampling import WorkingSets
from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.finding_book import FindingBook
from attnfuzz.campaign.judge.case_judge import CaseJudge
from attnfuzz.campaign.messages import (
    Channel,
    Confirmed,
    Duplicate,
    Found,
    Minimised,
    Setup,
    Smaller,
    Stop,
    ToWorker,
    Unconfirmed,
)
from attnfuzz.campaign.result import Reporter
from attnfuzz.campaign.saved.saving import SaveFolder
from attnfuzz.campaign.worker import WorkerLoop
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.registry import DEFAULT_ORACLES
from attnfuzz.problems.cases import Case, DenseDecodeCase
from attnfuzz.problems.formats import Format
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies.cases import case_lists
from attnfuzz.verdict import Failure, Verdict
from tests.common.scripted_runner import judging, scripted

KERNEL = Declaration(
    name="pretended",
    problem="dense_decode",
    supports=Supports(dtypes=("float16",), head_sizes=(16, 32), strides="contiguous"),
    target="kernels.py:pretended",
)
WRONG = Failure(oracle="accuracy", kind="out:value", message="out is wrong")
HANG = Failure(oracle="hang", kind="timeout", message="still running")
CRASH = Failure(oracle="crash", kind="SIGSEGV", message="the process died")

Bug = Callable[[Any], Failure | None]
Message = TypeVar("Message", bound=msgspec.Struct)


@dataclass
class Bench:
    """A search over a kernel that fails where ``bug`` says so, with the coordinator's side of it pretended too.

    It ends when ``enough`` says so of what was sent, after ``most_cases``, and after ``budget_s`` at the latest.
    """

    bug: Bug
    budget_s: float = 600.0
    seed: int = 1
    enough: Callable[[list[msgspec.Struct]], bool] = lambda sent: False
    most_cases: int | None = None
    kernels: tuple[Declaration, ...] = (KERNEL,)
    mail: list[ToWorker] = field(default_factory=list)
    sent: list[msgspec.Struct] = field(default_factory=list)
    judged: list[Case] = field(default_factory=list)
    afresh: int = 0
    most_together: int = 1
    adopting: bool = False
    device: str = "cpu"

    def run(self) -> Self:
        deadline = time.monotonic() + self.budget_s
        setup = Setup(
            worker=0,
            num_workers=1,
            seed=self.seed,
            kernels=self.kernels,
            deadline=deadline,
            device=self.device,
            oracles=DEFAULT_ORACLES,
            adopting=self.adopting,
        )
        channel = cast(Channel[ToWorker], self)
        judge, formats = self.timed(deadline), self.formats()
        loop = WorkerLoop(
            setup,
            judge=judge,
            strategy_for=drawn,
            channel=channel,
            formats=formats,
            larger=self.larger(),
            most_together=self.most_together,
        )
        loop.run()
        return self

    def formats(self) -> WorkingSets | None:
        return None

    def larger(self) -> LargerCases | None:
        return None

    def timed(self, deadline: float) -> CaseJudge:
        return judging(scripted(self.judge), deadline=deadline)

    def judge(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        self.note([case])
        self.afresh += how["afresh"]
        return Verdict(failure=self.bug(case), error_ratio=0.5)

    def note(self, cases: Sequence[Case]) -> None:
        self.judged += cases
        if self.most_cases is not None and len(self.judged) >= self.most_cases:
            self.mail.append(Stop())

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)
        if self.enough(self.sent):
            self.mail.append(Stop())

    def receive(self, timeout_s: float = 0.0) -> list[ToWorker]:
        mail, self.mail = self.mail, []
        return mail

    def of(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.sent if isinstance(message, kind)]


def drawn(declaration: Declaration, formats: Sequence[Format], length: int) -> SearchStrategy[list[Case]]:
    supports, options = declaration.supports, declaration.options
    return case_lists(declaration.problem, length=length, supports=supports, options=options, formats=formats)


def after(kind: type[msgspec.Struct], count: int = 1) -> Callable[[list[msgspec.Struct]], bool]:
    return lambda sent: sum(isinstance(message, kind) for message in sent) >= count


def grouped(case: DenseDecodeCase) -> Failure | None:
    return WRONG if case.gqa_ratio == 3 else None


def long(case: DenseDecodeCase) -> Failure | None:
    return WRONG if max(case.seq_lens) > 16 else None


def findings(kernel: Declaration, folder: Path, *bugs: Bug, cases: int = 1000) -> list[Finding]:
    """What a campaign reports of a kernel with ``bugs``, of which the first that shows is seen."""
    campaign = Bench(
        lambda case: next((seen for bug in bugs if (seen := bug(case)) is not None), None),
        kernels=(kernel,),
        most_cases=cases,
    )
    saver = SaveFolder(folder, device="cpu", warn=pytest.fail)
    book = FindingBook({kernel.target: kernel}, started=time.monotonic(), folder=saver, reporter=Reporter())
    for message in campaign.run().sent:
        match message:
            case Found():
                book.found(message)
            case Confirmed():
                book.confirmed(message)
            case Unconfirmed():
                book.unconfirmed_by(message)
            case Smaller():
                book.smaller(message)
            case Minimised():
                book.minimised(message)
            case Duplicate():
                book.duplicate(message)
    book.abandon(0)
    return book.findings
