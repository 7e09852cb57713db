"""attnfuzz.campaign.draw.compiled_fields: most cases of an open problem are of values for which all is compiled."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from attnfuzz.campaign.draw.compiled_fields import CompiledFields, CompiledValues
from attnfuzz.campaign.draw.sampling import CaseSource, WorkingSets
from attnfuzz.campaign.messages import FormatCompiled
from attnfuzz.declaration import Declaration
from attnfuzz.problems.fields import Choice, Integer, Integers, Seed
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.supports import Supports
from attnfuzz.strategies.cases import case_lists
from tests.common.drawing import drawn_from

COMPILED_S, WARM_S = 1.0, 0.01
PROBLEM = OpenProblem(
    place="own.py:Own",
    fields={
        "lengths": Integers(0, 100),
        "heads": Choice((1, 2, 3, 4, 6, 8)),
        "size": Choice((16, 32, 64, 128, 256)),
        "dtype": Choice(("float16", "bfloat16", "float32")),
        "order": Choice(("identity", "reversed", "shuffled")),
        "spare": Integer(0, 8),
        "seed": Seed(),
    },
)
KERNEL = Declaration(name="own", problem=PROBLEM, target="own.py:own", options={"tile": (16, 32, 64)})


def drawn(declaration: Declaration, known: dict[bytes, list[Any]] = {}) -> list[Any]:  # noqa: B006 - for all tests
    wanted: dict[str, Any] = {"supports": declaration.supports, "options": declaration.options}
    if (key := msgspec.json.encode(declaration)) not in known:
        lists = drawn_from(case_lists(PROBLEM, length=100, **wanted), draws=60)
        known[key] = [case for cases in lists for case in cases]
    return [*known[key]]


class Worker:
    """Searches a kernel that is compiled for what ``compiled_for`` says of a case; the clock is its own.

    ``number`` of ``workers``, which share the ``compiled``, as they do Triton's cache. ``batch``: cases that are drawn
    before the first of them is judged.
    """

    def __init__(
        self,
        compiled_for: Callable[[Any], Any],
        declaration: Declaration = KERNEL,
        *,
        number: int = 0,
        workers: int = 1,
        batch: int = 1,
        compiled: set[Any] | None = None,
    ) -> None:
        self.compiled_for = compiled_for
        self.compiled: set[Any] = set() if compiled is None else compiled
        self.cases: list[Any] = []
        self.batch = batch
        self._drawn = drawn(declaration)
        if number:
            random.Random(number).shuffle(self._drawn)
        self.learned = CompiledFields(declaration, turn=number / workers, workers=workers)
        self.compiling_s = 0.0
        self.seconds = 0.0

    def search(self, seconds: float, others: Sequence[Worker] = ()) -> Worker:
        until = self.seconds + seconds
        while self.seconds < until:
            for case in [self.learned.fitted(self._drawn.pop(0)) for _ in range(self.batch)]:
                key = self.compiled_for(case)
                compile_s = 0.0 if key in self.compiled else COMPILED_S
                self.compiled.add(key)
                self.cases.append(case)
                published = self.learned.judged(case, compile_s + WARM_S, compile_s)
                for other in others:
                    if published is not None and other is not self:
                        other.learned.learn(published, compile_s)
                self.compiling_s += compile_s
                self.seconds += compile_s + WARM_S
        return self


@pytest.mark.parametrize(
    "compiled_for",
    [
        lambda case: (case.size, case.dtype, case.heads),
        lambda case: (case.size, case.dtype, case.options["tile"]),
        lambda case: (case.heads == 1, case.size, case.spare % 4 == 0, case.order),
        lambda case: (len(case.lengths) == 1, case.size, case.dtype, case.heads),
    ],
    ids=["sizes", "an option", "some values", "lengths as well"],
)
def test_most_of_the_time_goes_into_cases(compiled_for: Callable[[Any], Any]) -> None:
    """A search of a problem with six formats and three head sizes spent nine tenths of its time in the compiler."""
    worker = Worker(compiled_for).search(60.0)
    assert worker.compiling_s <= 0.2 * worker.seconds + 3 * COMPILED_S
    assert len(worker.compiled) >= 8


def test_what_is_not_compiled_for_is_drawn_as_ever() -> None:
    """A bug of one order of pages and one size of a pool is met in cases that differ in all but what is compiled."""
    worker = Worker(lambda case: (case.size, case.dtype, case.heads)).search(60.0)
    later = worker.cases[len(worker.cases) // 2 :]
    assert len({(case.order, case.spare, case.options["tile"]) for case in later}) >= 60  # of 81


def test_a_kernel_for_which_nothing_is_compiled_gets_what_is_drawn() -> None:
    """A kernel in plain PyTorch would see a few values of each field, over and over."""
    learned = CompiledFields(KERNEL)
    for case in drawn(KERNEL):
        assert learned.fitted(case) is case
        learned.judged(case, WARM_S, 0.0)


def test_once_all_is_compiled_cases_are_what_is_drawn() -> None:
    """Compilers have nothing left to do after a minute; nothing need be held as it was any more."""
    worker = Worker(lambda case: case.dtype).search(60.0)
    assert len(worker.compiled) == 3
    assert [worker.learned.fitted(case) for case in drawn(KERNEL)[:200]] == drawn(KERNEL)[:200]


def test_what_a_kernel_does_not_take_together_is_not_put_together() -> None:
    """A case whose fields come from two others would be one that the kernel refuses, and be told as a defect."""
    table = ({"size": (16, 32)}, {"dtype": ("float16",)})
    declaration = msgspec.structs.replace(KERNEL, supports=Supports(where=table))
    worker = Worker(lambda case: (case.size, case.dtype, case.heads), declaration).search(30.0)
    assert len(worker.cases) > 1000
    assert all(case.size <= 32 or case.dtype == "float16" for case in worker.cases)


def test_a_worker_on_a_gpu_draws_by_what_it_has_learned() -> None:
    """What is learned and not asked leaves a search as slow as it was."""
    sets = WorkingSets(lambda declaration: iter(()))
    source = CaseSource(
        lambda declaration, formats, length: case_lists(PROBLEM, length=length, options=KERNEL.options),
        seeds=(0,),
        formats=sets,
    )
    compiled: set[Any] = set()

    def visit(case: Any) -> bool:
        key = (case.size, case.dtype, case.heads)
        compile_s = 0.0 if key in compiled else COMPILED_S
        compiled.add(key)
        sets.judged(KERNEL, case, compile_s + WARM_S, compile_s=compile_s)
        return True

    for _ in range(5):
        source.round(KERNEL, visit, until=float("inf"))
    assert 8 <= len(compiled) < 20  # of 90, in 1,000 cases


@pytest.mark.parametrize("batch", [1, 16])
def test_workers_learn_of_each_other(batch: int) -> None:
    """Each of nine waited for a compiler once for every field that decides, which was nine tenths of their time."""
    together: Any = {"workers": 9, "batch": batch, "compiled": set()}

    def compiled_for(case: Any) -> Any:
        return (case.size, case.dtype, case.heads, case.order, case.options["tile"], case.spare % 4 == 0)

    workers = [Worker(compiled_for, number=number, **together) for number in range(9)]
    for seconds in (1.0, 3.0, 3.0, 3.0):
        for worker in workers:
            worker.search(seconds, others=workers)
    seconds = sum(worker.seconds for worker in workers)
    assert sum(worker.compiling_s for worker in workers) <= 0.3 * seconds
    assert len({compiled_for(case) for worker in workers for case in worker.cases}) >= 10


def test_a_case_that_finds_its_program_clears_nothing() -> None:
    """Where another worker had all dtypes compiled, every case would say that dtypes decide nothing."""
    worker = Worker(lambda case: case.dtype, compiled={"float16", "bfloat16", "float32"})
    first = drawn(KERNEL)[0]
    for dtype in worker.compiled:
        case = msgspec.structs.replace(first, dtype=dtype)
        worker.learned.learn(CompiledValues(worker.learned._values_of(case)), COMPILED_S)
    worker.search(5.0)
    fields = dict(zip(worker.learned._names, worker.learned._fields, strict=False))
    assert [name for name, field in fields.items() if not field.is_free] == ["dtype"]


def test_what_one_worker_had_compiled_another_draws_from() -> None:
    """Its first case would wait for a compiler, though thousands in a format that another had compiled would not."""
    first, second = (WorkingSets(lambda declaration: iter(()), turn=turn, workers=2) for turn in (0.0, 0.5))
    cases = drawn(KERNEL)
    theirs = next(case for case in cases if case.size == 64 and case.dtype == "float32" and case.heads == 6)
    mine = next(case for case in cases if case.size == 16 and case.dtype == "float16" and case.heads == 1)
    published = first.judged(KERNEL, first.fitted(KERNEL, theirs), COMPILED_S + WARM_S, compile_s=COMPILED_S)
    assert published is not None
    message = FormatCompiled(kernel=KERNEL.target, format=published, seconds=COMPILED_S)
    sent = msgspec.json.decode(msgspec.json.encode(message), type=FormatCompiled)
    second.offer(KERNEL, sent.format, sent.seconds)
    case: Any = second.fitted(KERNEL, mine)
    unlike = [name for name in PROBLEM.fields if getattr(case, name) != getattr(theirs, name)]
    assert len({*unlike} - {"lengths", "spare", "seed"}) <= 1
