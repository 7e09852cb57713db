"""A run in guarded memory says what an ordinary one says, or nothing."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.inputs.registry import problem_of
from attnfuzz.isolation import memory_faults as fault_map
from attnfuzz.isolation.memory_faults import FaultMap, read_regions
from attnfuzz.memory.guarded import GUARDS, Guard, HostGuardedMemory
from attnfuzz.problems.cases import Case
from attnfuzz.trials.observation import KernelRaised, Observation, observe, observe_guarded

PROBLEMS = {
    "dense": "dense_decode",
    "paged": "paged_decode",
    "split": "split_decode",
    "queries": "paged_attention",
    "states": "merge_states",
}
FINITE: dict[str, Any] = {"poison": "finite", "prefill": "finite"}


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> bytearray:
    """What the map of faults holds that this process pretends to have."""
    memory = bytearray(1 << 16)
    monkeypatch.setattr(fault_map, "_installed", FaultMap(memoryview(memory)))
    return memory


def values(kernel: Any, case: Case) -> Any:
    return problem_of(case).values(case, "cpu", kernel.declaration.supports)


def guarded(kernel: Any, case: Case, guard: Guard = "end") -> Observation | None:
    return observe_guarded(kernel, case, values(kernel, case), guard=guard, **FINITE)


@pytest.mark.parametrize("fixture", PROBLEMS)
@pytest.mark.parametrize("guard", GUARDS)
def test_it_is_the_run_that_it_takes_the_place_of(
    fixture: str, guard: Guard, plant: Any, request: pytest.FixtureRequest
) -> None:
    """Oracles that compare runs would compare other inputs, or call a right kernel's writes damage."""
    case, kernel = request.getfixturevalue(fixture), plant(PROBLEMS[fixture])
    seen = guarded(kernel, case, guard)
    assert seen is not None
    ordinary = observe(kernel, case, values(kernel, case), device="cpu", **FINITE)
    assert seen.results.keys() == ordinary.results.keys()
    assert all(torch.equal(seen.results[name], ordinary.results[name]) for name in seen.results)
    assert not seen.given.damage()
    assert not seen.allocated.damage()
    assert (seen.poison, seen.prefill) == ("finite", "finite")
    assert min(seen.build_s, seen.kernel_s) > 0


@pytest.mark.parametrize("guard", GUARDS)
def test_everything_is_guarded_and_noted_while_the_kernel_runs(
    guard: Guard, plant: Any, dense: Case, noted: bytearray
) -> None:
    """A fault beside an input, an output or a workspace would be a crash that nobody can place, or none."""
    during: list[Any] = []

    def allocate(like: Tensor) -> Tensor:
        made = torch.empty_like(like)
        during.append(read_regions(bytes(noted)))
        return made

    assert guarded(plant(allocate=allocate), dense, guard) is not None
    names = [region.name for region in during[-1]]
    assert {"q", "k", "v", "seq_lens", "out", "lse", "workspace"} <= set(names)
    for region in during[-1]:
        assert (region.end if guard == "end" else region.start) % mmap.PAGESIZE == 0
    assert not read_regions(bytes(noted))


def test_what_a_kernel_damages_inside_is_seen(plant: Any, dense: Case) -> None:
    """An input that is modified only where memory is finite would pass."""
    seen = guarded(plant(before=lambda inputs: inputs.q.mul_(2)), dense)
    assert seen is not None
    assert seen.given.damage()


def test_a_refusal_says_nothing(plant: Any, dense: Case) -> None:
    """A kernel would be blamed for wanting tensors aligned as everybody allocates them."""

    def refuse(inputs: Any) -> None:
        raise ValueError("q must be aligned to 16 bytes")

    def interrupt(inputs: Any) -> None:
        raise KeyboardInterrupt

    assert guarded(plant(before=refuse), dense) is None
    with pytest.raises(KernelRaised):
        guarded(plant(before=interrupt), dense)


@pytest.mark.parametrize("first", [0, 7])
def test_memory_that_cannot_be_had_says_nothing(
    first: int, plant: Any, dense: Case, monkeypatch: pytest.MonkeyPatch, noted: bytearray
) -> None:
    """Under a limit on mappings a right kernel would be accused, or the campaign end."""
    take, taken = HostGuardedMemory.take, []

    def refuse(self: HostGuardedMemory, nbytes: int) -> Any:
        taken.append(nbytes)
        if len(taken) > first:
            raise OSError(12, "mmap of a guarded block failed")
        return take(self, nbytes)

    monkeypatch.setattr(HostGuardedMemory, "take", refuse)
    assert guarded(plant(), dense) is None
    assert len(taken) == first + 1
    assert not read_regions(bytes(noted))


def test_nothing_is_run_where_its_death_could_not_be_told(
    plant: Any, dense: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own process would be taken down."""
    monkeypatch.setattr(fault_map, "_installed", None)
    runs: list[int] = []
    assert guarded(plant(before=lambda inputs: runs.append(1)), dense) is None
    assert not runs
