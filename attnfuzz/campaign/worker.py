"""A worker process: ``python -m attnfuzz.campaign.worker CHANNEL_FD BROKER_FD``, started by the coordinator."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import msgspec
from hypothesis.strategies import SearchStrategy

from attnfuzz.campaign.channel import Channel, ChannelClosed
from attnfuzz.campaign.explained import explain_failure, shortened
from attnfuzz.campaign.formats import WorkingSets
from attnfuzz.campaign.generation import derive_seed
from attnfuzz.campaign.history import History
from attnfuzz.campaign.journal import Journal
from attnfuzz.campaign.judging import GRACE_S, TimedJudge
from attnfuzz.campaign.memory_watch import MemoryWatch
from attnfuzz.campaign.messages import Begin, Ready, Setup, Stop, ToWorker, Trouble
from attnfuzz.campaign.search import Search
from attnfuzz.campaign.zygote_broker import BorrowedZygote
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.isolation.devices import DeviceLease
from attnfuzz.isolation.outcomes import DeviceLost, ExecutorUnavailable
from attnfuzz.isolation.process import die_with_parent, why_starved
from attnfuzz.isolation.zygote_client import Zygote
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.verdict import Failure, Relations, Verdict
from attnfuzz.problems.cases import Case
from attnfuzz.problems.formats import Format
from attnfuzz.strategies.cases import case_lists
from attnfuzz.strategies.formats import draw_formats, first_formats
from attnfuzz.strategies.sizes import CPU_SIZES, GPU_SIZES, Sizes

__all__ = ["main", "work"]

_SETUP_WAIT_S = 60.0
_WAIT_FOR_BATCH_S = 0.5
_FIRST_FORMATS = 16


def main(arguments: list[str]) -> int:
    """Work until the coordinator is content or gone; the exit status."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel_fd, broker_fd = (int(argument) for argument in arguments)
    channel = Channel(socket.socket(fileno=channel_fd), msgspec.json.Decoder(ToWorker))
    try:
        (setup,) = channel.receive(_SETUP_WAIT_S, most=1)  # what follows is for the search
        if not isinstance(setup, Setup):
            raise TypeError(f"the first message is {setup!r}; it must be a Setup")
        work(setup, channel, socket.socket(fileno=broker_fd))
    except ChannelClosed:
        return 1
    except (ExecutorUnavailable, KernelLoadError) as error:
        lost = isinstance(error, DeviceLost)
        channel.send(Trouble(message=str(error), environment=True, device_lost=lost))
        return 1
    except Exception as error:  # noqa: BLE001 - a process boundary: the coordinator is told everything
        starved = why_starved(error)
        channel.send(Trouble(message=starved or traceback.format_exc(), environment=starved is not None))
        return 1
    return 0


def work(setup: Setup, channel: Channel[ToWorker], broker: socket.socket) -> None:
    """Search as ``setup`` says, with executors from the zygote behind ``broker``."""
    sizes = GPU_SIZES if setup.device == "cuda" else CPU_SIZES
    zygote = cast(Zygote, BorrowedZygote(broker))  # all that an executor asks of a zygote
    runner = Runner(
        device=setup.device,
        oracles=setup.oracles,
        tolerance=setup.tolerance,
        timeout_s=setup.timeout_s,
        memory_limit_bytes=setup.memory_limit_bytes,
        environment=DeviceLease(setup.device_id).environment if setup.device_id else None,
        zygote=zygote,
    )
    with contextlib.closing(_Executors(runner, setup)) as executors, contextlib.closing(_journal(setup)) as journal:
        runner.start_device()
        if setup.kernels:  # or the first is still being built
            runner.declarations([declaration.target for declaration in setup.kernels])
        channel.send(Ready())
        begin = channel.wait_for(Begin, Stop, timeout_s=_SETUP_WAIT_S)
        if not isinstance(begin, Begin):
            return
        setup = msgspec.structs.replace(setup, deadline=begin.deadline)
        runner.give_up_builds(lambda builds: time.monotonic() >= begin.deadline + GRACE_S)
        judge = TimedJudge(
            executors.judge,
            judge_together=executors.judge_together,
            find_leak=executors.find_leak,
            explain=executors.explain,
            deadline=setup.deadline,
            longest_s=runner.timeout_s,
            journal=journal,
            complain=lambda text: channel.send(Trouble(message=text)),
            process=lambda: executors.pid,
        )

        Search(
            setup,
            judge=judge,
            strategy_for=partial(_strategy, sizes),
            channel=channel,
            history=executors.history,
            memory=executors.memory,
            formats=WorkingSets(partial(_formats, setup)) if setup.device == "cuda" else None,
        ).run()


def _strategy(
    sizes: Sizes, declaration: Declaration, formats: Sequence[Format], length: int
) -> SearchStrategy[list[Case]]:
    supports, options = declaration.supports, declaration.options
    return case_lists(
        declaration.problem, length=length, supports=supports, options=options, sizes=sizes, formats=formats
    )


def _formats(setup: Setup, declaration: Declaration) -> Iterator[Format]:
    """What a worker compiles: each begins at its own place among the first, and goes on with some of its own."""
    domain: dict[str, Any] = {"supports": declaration.supports, "options": declaration.options, "sizes": GPU_SIZES}
    first = first_formats(declaration.problem, count=_FIRST_FORMATS, **domain)
    place = setup.worker * len(first) // setup.num_workers
    own = derive_seed(setup.seed, setup.worker, declaration.name, "formats")
    return chain(first[place:], first[:place], draw_formats(declaration.problem, seed=own, **domain))


class _Executors:
    """One runner at a time, replaced by its sibling where a fresh process is asked for, or memory runs short."""

    def __init__(self, runner: Runner, setup: Setup) -> None:
        self._runner = runner
        self._in_use = threading.Lock()
        self._siblings = 0
        self.history = History()
        self.memory = MemoryWatch(setup.memory_limit_bytes, sharing_gpu=setup.sharing)

    def judge(
        self,
        declaration: Declaration,
        case: Case,
        *,
        timeout_s: float,
        afresh: bool = False,
        relations: Relations = None,
    ) -> Verdict:
        """The verdict on ``case``; see `Judge`."""
        with self._in_use:
            if afresh:
                self._renew()
            with self._watched(declaration, [case]):
                return self._runner.judge(declaration, case, timeout_s=timeout_s, relations=relations)

    def judge_together(
        self, declaration: Declaration, cases: Sequence[Case], *, timeout_s: float
    ) -> list[Verdict] | None:
        """The verdicts on ``cases``; see `JudgeTogether`."""
        verdicts: list[Verdict] = []
        with self._in_use:
            for part in self.memory.batches(declaration, cases):
                with self._watched(declaration, part):
                    found = self._runner.judge_together(declaration, part, timeout_s=timeout_s)
                if found is None:
                    return None
                verdicts += found
        return verdicts

    def find_leak(self, declaration: Declaration, case: Case, *, timeout_s: float) -> Failure | None:
        """What there is to say of a kernel that leaks; see `FindLeak`."""
        with self._in_use:
            return self._runner.find_leak(declaration, case, timeout_s=timeout_s)

    def explain(
        self, declaration: Declaration, case: Case, failure: Failure, *, weighing_s: float, total_s: float
    ) -> Explanation:
        """What is wrong with a case that failed; see `Explain`."""
        with self._in_use, self._watched(declaration, [case]):
            found = explain_failure(self._runner, declaration, case, failure, weighing_s=weighing_s, total_s=total_s)
        return shortened(found)

    @contextlib.contextmanager
    def _watched(self, declaration: Declaration, cases: Sequence[Case]) -> Iterator[None]:
        """While ``cases`` run: what they do to the process is noted, and one that is too full is replaced before."""
        if self.memory.wants_fresh(declaration):
            self._renew()
        self.memory.look_before(self._process, self._runner.memory_bytes)
        try:
            yield
        finally:
            process = self._process
            self.history.record(process, declaration, cases)
            taken, gpu_share = self._runner.memory_bytes, self._runner.gpu_share
            self.memory.look_after(process, declaration, cases, memory_bytes=taken, gpu_share=gpu_share)

    def _renew(self) -> None:
        old, self._runner = self._runner, self._runner.sibling()
        old.close()
        self._siblings += 1

    @property
    def pid(self) -> int | None:
        """The process that the next case runs in; None for a new one."""
        return self._runner.pid

    @property
    def _process(self) -> tuple[int, int]:
        """Tells the process that judged last from those before it."""
        return self._siblings, self._runner.restarts

    def close(self) -> None:
        """End the executor. One that hangs in the background ends with this process, which holds its connection."""
        if self._in_use.acquire(timeout=_WAIT_FOR_BATCH_S):
            self._runner.close()


def _journal(setup: Setup) -> Journal:
    return Journal(Path(setup.journal) if setup.journal else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
