"""One run of a kernel on one case, and everything it left behind: memory, and results by name.

Results are checked for shape, dtype and device. What a thread or a stream goes on writing when the call has returned is
no result: nobody waits for it, and nobody times it.

A run on a CPU may be made in guarded memory (`observe_guarded`): it says what an ordinary run says, and does not return
from an access outside. On a GPU, inputs may be written on the host first (`build_through_host`): to write them there
takes a hundred launches and more, of which processes that share a GPU get through a limited number in all.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Thread
from threading import enumerate as living_threads
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnfuzz.declaration import Kernel
from attnfuzz.inputs.allocation import Allocator, allocate, role_of
from attnfuzz.inputs.registry import problem_of
from attnfuzz.inputs.writing import Placement
from attnfuzz.internal_errors import gpu_memory_ran_out
from attnfuzz.isolation.memory_faults import installed
from attnfuzz.isolation.progress import run_is_over
from attnfuzz.memory.allocations import TrackedAllocations
from attnfuzz.memory.arena import Arena
from attnfuzz.memory.guarded import Guard, GuardedArena, guarded_memory
from attnfuzz.memory.patterns import Fill, bits
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import tensor_nbytes
from attnfuzz.problems.shapes import strides_of, tensor_specs
from attnfuzz.problems.supports import OptionValue, Supports
from attnfuzz.triton_compat.configurations import tuned_calls
from attnfuzz.triton_compat.interpreter_objects import launches_begun
from attnfuzz.untrusted_text import text_of

_PLAIN = (Tensor, torch.nn.Parameter)


class ResultError(Exception):
    """The kernel returned something that cannot be a result; the message names what is wrong and what was expected."""


class TransposedError(ResultError):
    """The kernel returned a log-sum-exp of the transposed shape."""


class WrongDeviceError(ResultError):
    """The kernel returned a tensor that is not on the device of its inputs, where nothing looks at it."""


def named_results(returned: object, inputs: Any, names: tuple[str, ...], wanted: tuple[str, ...]) -> dict[str, Tensor]:
    """The results `names` that are `wanted`, the first of them; what was not returned is taken from `inputs`.

    Raises `ResultError`.
    """
    given = {name: getattr(inputs, name) for name in wanted}
    parts = _parts(returned, names)
    shapes = [part.shape if isinstance(part, Tensor) else None for part in parts]
    if len(wanted) == 2 and shapes == [given[name].shape for name in reversed(wanted)] and shapes[0] != shapes[1]:
        first, second = wanted
        raise ResultError(
            f"the kernel returned ({second}, {first}), by their shapes; it must return ({first}, {second})"
        )
    results = given | {name: part for name, part in zip(wanted, parts, strict=False) if part is not None}
    return {name: _checked(name, result, given[name]) for name, result in results.items()}


def _parts(returned: object, names: tuple[str, ...]) -> Sequence[object]:
    if returned is None or (isinstance(returned, Tensor) and names):
        return (returned,)
    if isinstance(returned, tuple | list) and 1 <= len(returned) <= len(names):
        return returned
    if len(names) != 2:
        raise ResultError(
            f"the kernel returned {returned!r:.80}; it must return {', '.join(names) or 'nothing'}, or None after "
            f"writing into {', '.join(f'inputs.{name}' for name in names) or 'its inputs'}"
        )
    if isinstance(returned, dict):
        shown = f"a dict of {', '.join(map(str, returned))}"
    else:
        several = len(returned) if isinstance(returned, tuple | list) else None
        shown = repr(returned) if several is None else f"{type(returned).__name__} of {several}"
    raise ResultError(
        f"the kernel returned {shown[:80]}; it must return ({names[0]}, {names[1]}), only {names[0]}, "
        f"or None after writing into inputs.{names[0]} and inputs.{names[1]}"
    )


def _checked(name: str, result: object, given: Tensor) -> Tensor:
    if not isinstance(result, Tensor) or not issubclass(type(result), Tensor):  # __class__ may be the kernel's code
        raise ResultError(f"the kernel returned {result!r:.80} as {name}; it must be a tensor")
    if type(result) not in _PLAIN:
        raise ResultError(
            f"{name} is a {type(result).__name__:.80}, a subclass of torch.Tensor, which may compute what it holds "
            "only when somebody looks; return a plain tensor"
        )
    if name.endswith("lse") and given.ndim == 2 and result.shape == given.shape[::-1] != given.shape:
        raise TransposedError(
            f"the kernel returned {name} transposed, of shape {tuple(result.shape)}; it must be {tuple(given.shape)}"
        )
    if result.shape != given.shape:
        raise ResultError(f"the kernel returned {name} of shape {tuple(result.shape)}; it must be {tuple(given.shape)}")
    if result.dtype != given.dtype and not (name == "partial_out" and result.dtype is torch.float32):
        wanted = _short(given.dtype)
        raise ResultError(
            f"the kernel returned {name} in {_short(result.dtype)}; inputs.{name} is {wanted}, return that"
        )
    if result.device.type != given.device.type:
        raise WrongDeviceError(f"the kernel returned {name} on {result.device}; it must be on {given.device}")
    return result.detach()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_PATIENCE_S = 0.25
"""For a thread that a call has left behind. One that waits for more to do may go on for ever."""


def check_finished(results: Mapping[str, Tensor], before: Collection[Thread]) -> None:
    """Raise `ResultError` if a thread that was not there `before` the call writes its `results` after it.

    Costs nothing where no thread was left. Threads that Python does not know of are not seen.
    """
    left = [thread for thread in living_threads() if thread not in before]
    if not left:
        return
    returned = {name: result.clone() for name, result in results.items()}
    until = monotonic() + _PATIENCE_S
    for thread in left:
        thread.join(max(0.0, until - monotonic()))
    if any(result.is_cuda for result in results.values()):
        torch.cuda.synchronize()
    _check_equal(returned, results, "a thread that it has started; join it before returning")


_TIMERS = {
    "ITIMER_REAL": signal.ITIMER_REAL,
    "ITIMER_VIRTUAL": signal.ITIMER_VIRTUAL,
    "ITIMER_PROF": signal.ITIMER_PROF,
}


def _running_timers() -> set[str]:
    return {name for name, timer in _TIMERS.items() if any(signal.getitimer(timer))}


def _check_timers(before: Collection[str]) -> None:
    """Raise `ResultError` if a timer runs that did not `before` the call, and stop it: it would interrupt others."""
    left = sorted(_running_timers().difference(before))
    for name in left:
        signal.setitimer(_TIMERS[name], 0.0)
    if left:
        raise ResultError(
            f"the kernel has returned with a timer running ({left[0]}), whose signal would interrupt its caller; stop "
            "it before returning"
        )


def check_joined(returned: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> None:
    """Raise `ResultError` if copies that the caller's stream made of `results` are not what they are at last."""
    _check_equal(returned, results, "a stream that the current one does not wait for; have it wait before returning")


def _check_equal(returned: Mapping[str, Tensor], results: Mapping[str, Tensor], by: str) -> None:
    """On the host: a GPU that others share too copies at once, and takes milliseconds to come to a comparison."""
    for name, result in results.items():
        changed = int((bits(returned[name].cpu()) != bits(result.cpu())).sum())
        if changed:
            elements = "element" if changed == 1 else "elements"
            raise ResultError(f"{changed} {elements} of {name} were written after the kernel had returned, by {by}")


_ZONES_PER_TENSOR = 4 * 256
"""Room for alignment and both red zones; a tensor with wider ones goes to a chunk of its own."""


class KernelRaised(Exception):  # noqa: N818 - says what happened, and is caught by the judge alone
    """A run of the kernel ended in `error`. `poison` tells which one, `changed` what a relation did to the case.

    Where a GPU had no room to load or launch what was compiled, `error` is torch's for memory that ran out: Triton
    raises no more than a RuntimeError.

    `maybe`: causes that are likely where such a run ends so, and `tensor` the one that is concerned, if it is known.
    `remedy`: what a kernel declares that is not meant for such a run.
    `fatal`: the process must not be used again, whatever the error is.
    """

    def __init__(self, error: BaseException, poison: Fill, changed: str = "", *, fatal: bool = False) -> None:
        super().__init__(error)
        if issubclass(type(error), RuntimeError) and gpu_memory_ran_out(said := text_of(error)):
            error = torch.OutOfMemoryError(said).with_traceback(error.__traceback__)
        self.error = error
        self.poison = poison
        self.changed = changed
        self.maybe: tuple[str, ...] = ()
        self.tensor = ""
        self.remedy: dict[str, Any] = {}
        self.fatal = fatal

    def is_a(self, kind: type[BaseException]) -> bool:
        """Whether the error is of ``kind``; its ``__class__``, which may be the kernel's code, is not asked."""
        return issubclass(type(self.error), kind)


class Times(NamedTuple):
    """Seconds that a run took: to make its inputs, to compile, and the call."""

    build_s: float
    compile_s: float
    kernel_s: float


@dataclass
class Observation:
    """`results` by name, as returned (raw dtype and base of the LSE).

    `given` holds inputs and offered outputs, `allocated` what the kernel allocated, and `kept` are dtype and shape of
    what it keeps of earlier calls and has not written to everywhere. `poison` is what everything outside the live
    inputs held, `prefill` what outputs and workspaces held.
    """

    poison: Fill
    prefill: Fill
    inputs: Any
    given: Arena
    allocated: Arena
    results: dict[str, Tensor] = field(default_factory=dict)
    kept: tuple[tuple[torch.dtype, torch.Size], ...] = ()
    build_s: float = 0.0
    compile_s: float = 0.0
    kernel_s: float = 0.0

    @property
    def times(self) -> Times:
        """The times of the run, without the memory that it holds."""
        return Times(self.build_s, self.compile_s, self.kernel_s)

    def on_host(self) -> "Observation":
        """This observation in host memory; itself if it is there."""
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
    kept: Fill | None = None,
    compile_clock: Callable[[], float] = lambda: 0.0,
) -> Observation:
    """Build the inputs in poisoned memory, run the kernel and collect its results.

    Raises `KernelRaised` for whatever the kernel raised, and for results that cannot be any.
    `values`: the case's logical values, as `problem_of(case).values` draws them. `placement`: where they go, on
    `device`, if not where the case says. `arenas`: for what the kernel is given and for what it allocates, if not new
    ones of `device` with `poison` and `prefill`. `kept`: see `TrackedAllocations`. `compile_clock`: seconds that Triton
    has spent compiling so far.
    """
    started = time.perf_counter()
    supports = kernel.declaration.supports
    capacity = tensor_nbytes(case) + _ZONES_PER_TENSOR * len(tensor_specs(case))
    arena, workspaces = arenas or (Arena(device, poison=poison, prefill=prefill, capacity=capacity), None)
    problem = problem_of(case)
    if placement is None:
        inputs = problem.build(case, arena, supports, values)
    else:
        tensors = allocate(case, arena)
        problem.write(case, {name: tensor[None] for name, tensor in tensors.items()}, values, placement)
        inputs = problem.inputs(case, tensors)
    arena.seal()
    allocations = TrackedAllocations(device, poison=poison, prefill=prefill, arena=workspaces, kept=kept)
    seen = Observation(poison, prefill, inputs, given=arena, allocated=allocations.arena)
    built, compiled = time.perf_counter(), compile_clock()
    seen.results = call(kernel, case, inputs, allocations, wait=True)
    seen.kept = tuple((buffer.dtype, buffer.shape) for buffer in allocations.kept)
    seen.build_s, seen.compile_s = built - started, compile_clock() - compiled
    seen.kernel_s = time.perf_counter() - built - seen.compile_s
    return seen


_LATE_CYCLES = 1_000_000
"""By which the current stream is late, half a millisecond: what waits for it in another stream is not done at once.

Longer than a call takes to launch a few kernels; processes that share a GPU wait for each other meanwhile.
"""


def call(
    kernel: Kernel, case: Case, inputs: Any, allocations: TrackedAllocations, *, wait: bool = False
) -> dict[str, Tensor]:
    """Run `kernel` on `inputs`; its results by name, as they are when it returns. Raises `KernelRaised`.

    What lies elsewhere than in the memory of `inputs` is copied: a kernel may keep the buffers that it returns, and
    then a later call overwrites them. Arenas still know the originals, by the names of the results.
    `wait` for a GPU to be done: then it also shows whether the kernel gave work to a stream that it does not wait for.
    """
    threads, timers, begun = living_threads(), _running_timers(), (launches_begun(), tuned_calls())
    is_awaited = wait and allocations.arena.device.type == "cuda"
    try:
        if is_awaited:
            torch.cuda._sleep(_LATE_CYCLES)  # type: ignore[no-untyped-call]  # torch has no public name for it
        with allocations:
            returned = kernel(inputs, **call_options(kernel, case))
        _note_launches(kernel, begun)
        results = (_after_waiting if is_awaited else results_of_call)(kernel, case, inputs, returned)
        check_finished(results, threads)
        _check_timers(timers)
        for name, result in results.items():
            allocations.arena.rename(result, name)
        return {name: _kept(result, getattr(inputs, name)) for name, result in results.items()}
    except BaseException as error:  # whatever a kernel raises, SystemExit included, is its verdict
        raise KernelRaised(error, allocations.arena.poison) from error
    finally:
        if wait or allocations.arena.device.type == "cpu":
            run_is_over()


_LAUNCHES: dict[str, bool] = {}
"""By target of a kernel whose calls have returned here, whether one of them has launched what is interpreted."""
_TUNED: dict[str, bool] = {}
"""Likewise, whether one of them has called an autotuned function."""


def never_launches(target: str) -> bool:
    """Whether calls of a kernel have returned in this process, none of which has launched an interpreted kernel.

    False where nobody counts what is launched.
    """
    return _LAUNCHES.get(target) is False


def never_tuned(target: str) -> bool:
    """Whether calls of a kernel have returned in this process, none of which has called an autotuned function.

    True where there is no Triton, or one unknown.
    """
    return _TUNED.get(target) is False or tuned_calls() is None


def _note_launches(kernel: Kernel, begun: tuple[int | None, int | None]) -> None:
    target = kernel.declaration.target
    now = launches_begun(), tuned_calls()
    for counted, before, after in zip((_LAUNCHES, _TUNED), begun, now, strict=True):
        if target and after is not None:
            counted[target] = counted.get(target, False) or after != before


def _kept(result: Tensor, offered: Tensor) -> Tensor:
    """`result`, in memory that no later call of the kernel is given; that of what was `offered` is such."""
    is_offered = result.untyped_storage().data_ptr() == offered.untyped_storage().data_ptr()
    return result if is_offered else result.clone()


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
    """The results that a call `returned` or changed, by name, without unobserved elements. Raises `ResultError`."""
    problem, supports = problem_of(case), kernel.declaration.supports
    wanted = problem.returned_names(case, supports)
    found = named_results(returned, inputs, problem.results or wanted, wanted)
    return problem.owned(case, found | {name: getattr(inputs, name) for name in problem.changed_names(case)})


def call_options(kernel: Kernel, case: Case) -> dict[str, OptionValue]:
    """The case's options; for those it leaves out, the first choice that the kernel declares."""
    return {name: choices[0] for name, choices in kernel.declaration.options.items()} | dict(case.options)


def observe_guarded(
    kernel: Kernel,
    case: Case,
    values: Any,
    *,
    guard: Guard,
    poison: Fill,
    prefill: Fill,
    compile_clock: Callable[[], float] = lambda: 0.0,
) -> Observation | None:
    """As `observe` on "cpu", with the edge `guard` of every tensor and workspace at unmapped memory.

    None where that says nothing of the kernel: the system has no such memory left, nobody could tell of a fault, or the
    kernel raised, as it may where tensors are aligned to no more than their elements. A KeyboardInterrupt is passed on.
    """
    fault_map = installed()
    if fault_map is None:
        return None
    memory = guarded_memory("cpu")
    given, allocated = (GuardedArena(memory, fault_map, guard=guard, poison=poison, prefill=prefill) for _ in range(2))
    with fault_map.recording():
        try:
            return observe(
                kernel,
                case,
                values,
                device="cpu",
                poison=poison,
                prefill=prefill,
                arenas=(given, allocated),
                compile_clock=compile_clock,
            )
        except KernelRaised as raised:
            if raised.is_a(KeyboardInterrupt):
                raise
        except OSError:  # of the inputs; where a workspace could not be had, it is what the kernel raised
            pass
    return None


def build_through_host(
    case: Case, allocator: Allocator, supports: Supports, *, edit: Mapping[str, Callable[[Tensor], None]] | None = None
) -> Any:
    """As the ``build`` of the case's problem, with the same numbers; dead elements are NaN, or -1.

    ``edit`` may change tensors while they are on the host, by name.
    """
    written = problem_of(case).filled(case, supports)
    for name, change in (edit or {}).items():
        if name in written:
            change(written[name])
    tensors = {}
    for name, spec in tensor_specs(case).items():
        dtype = getattr(torch, spec.dtype)
        given = allocator.tensor(name, spec.shape, dtype, strides=strides_of(case, name), role=role_of(spec))
        if spec.role != "output":
            source = written[name]
            if given.device.type == "cuda" and source.numel():  # pinned memory, which torch keeps until it is copied
                source = source.contiguous().pin_memory()
            given.copy_(source, non_blocking=True)
        tensors[name] = given
    return problem_of(case).inputs(case, tensors)
