"""Runs of a trial's kernel on the same numbers with offsets that do not fit into 32 bits."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnfuzz.memory.address_limit import at_most_more
from attnfuzz.memory.allocations import TrackedAllocations
from attnfuzz.memory.arena import Arena
from attnfuzz.memory.cuda_sparse import sparse_memory
from attnfuzz.memory.far import FarAllocator
from attnfuzz.memory.fault_map import installed
from attnfuzz.memory.reservation import SparseUnavailable
from attnfuzz.oracles.exception import context_lost
from attnfuzz.oracles.observation import KernelRaised, Observation, call
from attnfuzz.oracles.relations.through_host import build_through_host
from attnfuzz.oracles.trial import Trial
from attnfuzz.oracles.verdict import NARROW_OFFSETS
from attnfuzz.problems.block_table import num_blocks
from attnfuzz.problems.cases import Case, PagedDecodeCase
from attnfuzz.problems.paged_decode import with_both_caches
from attnfuzz.problems.registry import problem_of
from attnfuzz.said import text_of

__all__ = ["Far", "run_far"]

_ROOM_BYTES = 960 << 20
"""What a kernel may allocate in such a run. One that copies its inputs as a whole is not told to be wrong for that.

Less than K's half of an interleaved cache of 2^31 elements of one byte: its copy would be taken for a leak.
"""

_REFUSALS = (ValueError, NotImplementedError, OverflowError, MemoryError, torch.OutOfMemoryError)
_OUT_OF_MEMORY = "can't allocate memory"


@dataclass(frozen=True, slots=True)
class Far:
    """What lies far away: pages from id ``first_page`` on, and what has high indices along an axis of a tensor.

    ``near``: of the latter, not far, but merely further away than in a contiguous tensor.
    """

    first_page: int = 0
    stretched: Mapping[str, int] = field(default_factory=dict)
    near: bool = False


def run_far(trial: Trial, far: Far) -> Observation | None:
    """The run; None if this machine has no such memory, or the kernel says that it does not take such inputs.

    An offset that comes out negative may end the process, or cost it its CUDA context: on a GPU there is no run in a
    process that is not made for that. Raises `KernelRaised` for what else the kernel raises.
    """
    fault_map = installed()
    if fault_map is None and trial.device != "cpu":
        return None
    with nullcontext() if fault_map is None else fault_map.recording():
        arena = Arena(trial.device, poison="nan", prefill="nan")
        try:
            memory = FarAllocator(
                arena,
                first_page=far.first_page,
                stretched=far.stretched,
                near=far.near,
                fault_map=fault_map,
                on_gpu=None if trial.device == "cpu" else sparse_memory(),
            )
            inputs = _built(trial, far, memory)
        except SparseUnavailable:
            return None
        return _run(trial, far, inputs)


def _built(trial: Trial, far: Far, memory: FarAllocator) -> Any:
    case, supports = trial.case, trial.kernel.declaration.supports

    def move_ids(table: Tensor) -> None:
        if far.first_page and isinstance(case, PagedDecodeCase):
            _move_ids(table, case, far.first_page)

    if trial.device == "cpu":
        inputs = problem_of(case).build(case, memory, supports, trial.reference.values_on("cpu"))
        if far.first_page:
            move_ids(inputs.block_table)
    else:
        inputs = build_through_host(case, memory, supports, edit={"block_table": move_ids})
    if memory.caches and isinstance(case, PagedDecodeCase):
        caches = with_both_caches(case, memory.caches) if "kv_cache" in memory.caches else memory.caches
        for name, cache in caches.items():
            setattr(inputs, name, cache)
    return inputs


def _run(trial: Trial, far: Far, inputs: Any) -> Observation | None:
    """What is returned holds on to none of the memory of the run."""
    allocations = TrackedAllocations(trial.device, poison="nan", prefill="nan")
    started = time.perf_counter()
    try:
        # A GPU's memory has a limit of its own, and its driver takes more addresses than that.
        with at_most_more(_ROOM_BYTES) if trial.device == "cpu" else nullcontext():
            results = call(trial.kernel, trial.case, inputs, allocations, wait=True)
    except KernelRaised as raised:
        if context_lost(raised.error) is None and _refuses(raised):
            return None
        raised.changed = _words(trial.case, far)
        if not far.near and context_lost(raised.error) is not None:
            raised.maybe = (NARROW_OFFSETS,)
        raise
    nothing = Arena(trial.device, poison="nan", prefill="nan")
    seen = Observation("nan", "nan", None, given=nothing, allocated=nothing)
    seen.results = {name: result.clone() for name, result in results.items()}
    seen.kernel_s = time.perf_counter() - started
    trial.observations.append(seen)
    return seen


def _move_ids(table: Tensor, case: PagedDecodeCase, first_page: int) -> None:
    """Every id of a page of the case, and the one after the last, which does not exist; unused zeros stay."""
    columns = torch.arange(table.shape[1], device=table.device)
    blocks = torch.tensor([case.blocks_of(seq) for seq in range(case.num_seqs)], dtype=torch.int64, device=table.device)
    moved = (table >= 0) & (table <= num_blocks(case))
    if case.pages.padding == "zero":
        moved &= columns < blocks[:, None]
    table += moved * first_page


def _refuses(raised: KernelRaised) -> bool:
    if raised.is_a(RuntimeError) and _OUT_OF_MEMORY in text_of(raised.error):
        return True
    return any(map(raised.is_a, _REFUSALS))


def _words(case: Case, far: Far) -> str:
    moved = [f"page ids from {far.first_page} on"] if far.first_page and isinstance(case, PagedDecodeCase) else []
    if far.stretched:
        strides = "gaps" if far.near else "strides past 2^31 elements"
        moved.append(f"{strides} in {', '.join(sorted(far.stretched))}")
    return f"with {' and '.join(moved)}"
