"""One run of a kernel on one case, and everything it left behind."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnfuzz.declaration import Kernel
from attnfuzz.memory.allocations import TrackedAllocations
from attnfuzz.memory.arena import Arena
from attnfuzz.memory.patterns import Fill
from attnfuzz.oracles.results import named_results
from attnfuzz.oracles.unfinished import check_finished, check_joined, living_threads
from attnfuzz.problems.allocation import allocate
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.problems.placement import Placement
from attnfuzz.problems.registry import problem_of
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.problems.supports import OptionValue

__all__ = ["KernelRaised", "Observation", "call", "call_options", "observe", "results_of_call"]

_ZONES_PER_TENSOR = 4 * 256
"""Room for alignment and both red zones; a tensor with wider ones goes to a chunk of its own."""


class KernelRaised(Exception):  # noqa: N818 - says what happened, and is caught by the judge alone
    """A run of the kernel ended in `error`. `poison` tells which one, `changed` what a relation did to the case.

    `maybe`: causes that are likely where such a run ends so. `fatal`: the process must not be used again, whatever the
    error is.
    """

    def __init__(self, error: BaseException, poison: Fill, changed: str = "", *, fatal: bool = False) -> None:
        super().__init__(error)
        self.error = error
        self.poison = poison
        self.changed = changed
        self.maybe: tuple[str, ...] = ()
        self.fatal = fatal

    def is_a(self, kind: type[BaseException]) -> bool:
        """Whether the error is of ``kind``; its ``__class__``, which may be the kernel's code, is not asked."""
        return issubclass(type(self.error), kind)


@dataclass
class Observation:
    """`results` by name, as returned (raw dtype and base of the LSE).

    `given` holds inputs and offered outputs, `allocated` what the kernel allocated. `poison` is what everything outside
    the live inputs held, `prefill` what outputs and workspaces held.
    """

    poison: Fill
    prefill: Fill
    inputs: Any
    given: Arena
    allocated: Arena
    results: dict[str, Tensor] = field(default_factory=dict)
    build_s: float = 0.0
    compile_s: float = 0.0
    kernel_s: float = 0.0

    def on_host(self) -> "Observation":
        """The same in host memory; itself if it is there."""
        results = {name: result.cpu() for name, result in self.results.items()}
        return replace(self, given=self.given.on_host(), allocated=self.allocated.on_host(), results=results)


def observe(
    kernel: Kernel,
    case: Case,
    values: Any,
    *,
    device: str,
    poison: Fill,
    prefill: Fill,
    placement: Placement | None = None,
    arenas: tuple[Arena, Arena] | None = None,
    wait: bool = True,
    compile_clock: Callable[[], float] = lambda: 0.0,
) -> Observation:
    """Build the inputs in poisoned memory, run the kernel and collect its results.

    Raises `KernelRaised` for whatever the kernel raised, and for results that cannot be any.
    `values`: the case's logical values, as `problem_of(case).values` draws them. `placement`: where they go, on
    `device`, if not where the case says. `arenas`: for what the kernel is given and for what it allocates, if not new
    ones of `device` with `poison` and `prefill`. Unless told to `wait` for a GPU, what a launch did wrong there shows
    later. `compile_clock`: seconds that Triton has spent compiling so far.
    """
    started = time.perf_counter()
    supports = kernel.declaration.supports
    arena, workspaces = arenas or (_arena_for(case, device, poison, prefill), None)
    problem = problem_of(case)
    if placement is None:
        inputs = problem.build(case, arena, supports, values)
    else:
        tensors = allocate(case, arena)
        problem.write(case, {name: tensor[None] for name, tensor in tensors.items()}, values, placement)
        inputs = problem.inputs(case, tensors)
    arena.seal()
    allocations = TrackedAllocations(device, poison=poison, prefill=prefill, arena=workspaces)
    seen = Observation(poison, prefill, inputs, given=arena, allocated=allocations.arena)
    built, compiled = time.perf_counter(), compile_clock()
    seen.results = call(kernel, case, inputs, allocations, wait=wait)
    seen.build_s, seen.compile_s = built - started, compile_clock() - compiled
    seen.kernel_s = time.perf_counter() - built - seen.compile_s
    for name, result in seen.results.items():
        seen.allocated.rename(result, name)
    return seen


def _arena_for(case: Case, device: str, poison: Fill, prefill: Fill) -> Arena:
    capacity = tensor_nbytes(case) + _ZONES_PER_TENSOR * len(tensor_specs(case))
    return Arena(device, poison=poison, prefill=prefill, capacity=capacity)


def call(
    kernel: Kernel, case: Case, inputs: Any, allocations: TrackedAllocations, *, wait: bool = False
) -> dict[str, Tensor]:
    """Run `kernel` on `inputs`; its results by name. `wait` for a GPU to be done. Raises `KernelRaised`."""
    threads = living_threads()
    try:
        with allocations:
            returned = kernel(inputs, **call_options(kernel, case))
        is_awaited = wait and allocations.arena.device.type == "cuda"
        results = (_after_waiting if is_awaited else results_of_call)(kernel, case, inputs, returned)
        check_finished(results, threads)
        return results
    except BaseException as error:  # whatever a kernel raises, SystemExit included, is its verdict
        raise KernelRaised(error, allocations.arena.poison) from error


def _after_waiting(kernel: Kernel, case: Case, inputs: Any, returned: object) -> dict[str, Tensor]:
    """The results once a GPU is done; they may not change after what the current stream has been given to do."""
    try:
        results = results_of_call(kernel, case, inputs, returned)
        copies = {name: result.clone() for name, result in results.items()}
    finally:
        torch.cuda.synchronize()  # what that raises counts more
    check_joined(copies, results)
    return results


def results_of_call(kernel: Kernel, case: Case, inputs: Any, returned: object) -> dict[str, Tensor]:
    """What a call `returned` or changed, by name, without what nobody looks at. Raises `ResultError`."""
    problem, supports = problem_of(case), kernel.declaration.supports
    wanted = problem.returned_names(case, supports)
    found = named_results(returned, inputs, problem.results or wanted, wanted)
    return problem.owned(case, found | {name: getattr(inputs, name) for name in problem.changed_names(case)})


def call_options(kernel: Kernel, case: Case) -> dict[str, OptionValue]:
    """The case's options; for those it leaves out, the first choice that the kernel declares."""
    return {name: choices[0] for name, choices in kernel.declaration.options.items()} | dict(case.options)
