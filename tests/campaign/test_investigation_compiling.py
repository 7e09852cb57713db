"""campaign.triage.investigation of a kernel that compiles for seconds: few formats are compiled to shrink a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from attnfuzz import minimise
from attnfuzz.campaign.messages import Minimised, Smaller
from attnfuzz.campaign.triage import investigation
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.identity.bug import FailingCase
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import Case, DenseDecodeCase, decode_case
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.formats import format_key, format_of
from attnfuzz.problems.recipes import Values
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import Timing, Verdict
from tests.campaign import pretended_process
from tests.campaign.pretended_process import looked_into
from tests.common.scripted_runner import judging, scripted
from tests.common.search_bench import WRONG

KERNEL = Declaration(
    name="compiling",
    problem="dense_decode",
    supports=Supports(head_sizes=(16, 32, 64, 80)),
    target="kernels.py:compiling",
)
LARGE = DenseDecodeCase(
    num_q_heads=6,
    head_size=80,
    num_kv_heads=2,
    seq_lens=(5, 0, 33),
    scale=0.5,
    dtype="bfloat16",
    extra_rows=3,
    strides={"q": "padded_rows", "out": "padded_rows"},
    values=Values(seed=3),
)
Fails = Callable[[DenseDecodeCase], bool]


def by_group(case: DenseDecodeCase) -> bool:
    """What the interpreter shows, too."""
    return case.num_q_heads == 3 * case.num_kv_heads


@dataclass
class Machine:
    """A GPU, whose compiler takes ``compile_s`` for a format that is new, and an interpreter beside it; pretended.

    The interpreter has started once ``starts_for`` formats have been compiled.
    """

    on_gpu: Fails
    interpreted: Fails | None
    compile_s: float = 2.0
    starts_for: int = 0
    compiled: set[bytes] = field(default_factory=set)
    now: float = 0.0
    complaints: list[str] = field(default_factory=list)
    asked_early: bool = False

    def _judge_on_gpu(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        assert isinstance(case, DenseDecodeCase)
        key = format_key(format_of(case))
        compile_s = 0.0 if key in self.compiled else self.compile_s
        self.compiled.add(key)
        self.now += compile_s
        return Verdict(failure=WRONG if self.on_gpu(case) else None, timing=Timing(compile_s=compile_s))

    def _interpret(self, declaration: Declaration, case: Case, **how: Any) -> Verdict:
        assert isinstance(case, DenseDecodeCase)
        self.asked_early |= not self._has_started
        if self.interpreted is None:
            raise KernelLoadError("it needs CUDA")
        return Verdict(failure=WRONG if self.interpreted(case) else None)

    @property
    def _has_started(self) -> bool:
        return len(self.compiled) >= self.starts_for

    def _interpreter(self) -> Runner:
        return scripted(self._interpret, is_ready=lambda: self._has_started)

    def shrunk(self) -> tuple[DenseDecodeCase, Minimised]:
        """The case that is left of a large one, and how that is told."""
        judge = judging(scripted(self._judge_on_gpu), interpret=self._interpreter, complain=self.complaints.append)
        assert judge(KERNEL, LARGE).failure == WRONG
        is_bug, sent = looked_into(FailingCase(KERNEL, LARGE, WRONG), judge)
        assert is_bug
        smaller = [message for message in sent if isinstance(message, Smaller)]
        case = decode_case("dense_decode", bytes(smaller[-1].case))
        assert isinstance(case, DenseDecodeCase)
        for step in smaller:  # what is told may be all that is left of a campaign that is cut off
            told = decode_case("dense_decode", bytes(step.case))
            assert isinstance(told, DenseDecodeCase)
            assert self.on_gpu(told)
        (minimised,) = (message for message in sent if isinstance(message, Minimised))
        return case, minimised


SMALLEST = DenseDecodeCase(num_q_heads=3, head_size=16, num_kv_heads=1, seq_lens=(1,), scale=default_scale(16))


def test_what_the_interpreter_shows_is_shrunk_there_and_compiled_once() -> None:
    """Each step would compile anew: a kernel that takes seconds for that has no second finding in its first minute."""
    quick, interpreted = Machine(by_group, by_group, compile_s=0.0), Machine(by_group, by_group)
    assert quick.shrunk()[0] == SMALLEST
    smallest, minimised = interpreted.shrunk()
    assert smallest == SMALLEST
    assert minimised.complete
    assert len(quick.compiled) > 8
    assert len(interpreted.compiled) == 2


def test_an_interpreter_that_is_still_starting_is_not_waited_for() -> None:
    """Importing torch takes as long as a compiler does for several formats."""
    machine = Machine(by_group, by_group, starts_for=4)
    smallest, minimised = machine.shrunk()
    assert smallest == SMALLEST
    assert minimised.complete
    assert not machine.asked_early
    assert len(machine.compiled) >= 4


def test_what_only_the_interpreter_shows_is_not_told() -> None:
    """A saved case would pass where the bug was seen."""

    def on_gpu(case: DenseDecodeCase) -> bool:
        return by_group(case) and case.head_size > 32

    smallest, minimised = Machine(on_gpu, by_group).shrunk()
    assert on_gpu(smallest)
    assert minimised.complete
    assert msgspec.structs.replace(smallest, head_size=16, scale=default_scale(16)) == SMALLEST


@pytest.mark.parametrize("interpreted", [lambda case: False, None], ids=["passes there", "cannot be interpreted"])
def test_what_the_interpreter_does_not_show_compiles_for_a_part_of_the_time(
    interpreted: Fails | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bug of compiled code would take all that is left of a short campaign, and be the only one found."""
    machine = Machine(by_group, interpreted)
    for module in (investigation, minimise, pretended_process):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: machine.now))
    smallest, minimised = machine.shrunk()
    assert by_group(smallest)
    assert not minimised.complete
    assert (smallest.seq_lens, smallest.values) == ((1,), Values())  # which takes no compiler
    assert machine.now <= 0.25 * 60.0 + 2 * machine.compile_s
    assert bool(machine.complaints) is (interpreted is None)
