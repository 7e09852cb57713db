"""Gluon in torch: runs a kernel one program after the other, without a GPU.

Layouts are nothing, copies and products are done at once, and what lies outside of a tensor is an error. So it shows
what a kernel computes and where it reads, and nothing of its order in time, but for one thing: groups of warps run in
turns, each until a barrier in shared memory has it wait, and that all of them wait is an error. Integers that Gluon
would make tensors of are tensors.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


class Pointer:
    """A tensor, contiguous, and offsets in elements."""

    def __init__(self, tensor: Tensor, offsets: Any = 0) -> None:
        assert tensor.is_contiguous()
        self.tensor, self.offsets = tensor, offsets
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.tensor, self.offsets + more)

    def at(self, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The elements, offsets and mask, of one shape; offsets 0 where masked."""
        masks = _tensor(True if mask is None else mask)
        offsets = _tensor(self.offsets) + 0 * masks.long()
        masks = masks & (offsets == offsets)
        offsets, elements = torch.where(masks, offsets, 0), self.tensor.view(-1)
        assert ((offsets >= 0) & (offsets < len(elements))).all(), "outside of the tensor"
        return elements, offsets, masks


class Shared:
    """Shared memory, which holds NaN until it is written."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def dtype(self) -> torch.dtype:
        """Of an element."""
        return self.tensor.dtype

    def index(self, i: Any) -> Shared:
        return Shared(self.tensor[int(i)])

    def slice(self, first: int, length: int) -> Shared:
        return Shared(self.tensor[first : first + length])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.tensor.permute(*order))

    def store(self, value: Tensor) -> None:
        self.tensor.copy_(value)

    def load(self, _: Any) -> Tensor:
        return self.tensor.clone()

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], _: Any) -> Shared | Boxes:
        """Narrower tiles of the same numbers are boxes: all rows of the first columns, then those of the next."""
        if dtype == self.dtype and shape[-1] < self.tensor.shape[-1]:
            (n, rows, columns), (tall, wide) = self.tensor.shape, shape[1:]
            return Boxes(self.tensor.view(n, rows // tall, tall, columns // wide, wide).permute(0, 3, 1, 2, 4))
        return Shared(self.tensor.view(dtype).view(*shape))


class Boxes:
    """Shared memory as boxes ``[n, wide, tall, rows, columns]``, numbered by the first three."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def index(self, i: Any) -> Shared:
        """Box ``i`` of all."""
        _, wide, tall = self.tensor.shape[:3]
        return Shared(self.tensor[int(i) // (wide * tall), int(i) // tall % wide, int(i) % tall])


class Descriptor:
    """A tensor of which TMA copies boxes of rows; what lies outside of it is 0."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def copy(self, place: Sequence[Any], to: Shared) -> int:
        """Copy the box that begins there, and return its bytes."""
        rows, columns = (int(first) + torch.arange(n) for first, n in zip(place, to.tensor.shape, strict=True))
        inside = ((rows >= 0) & (rows < len(self.tensor)))[:, None] & (columns < self.tensor.shape[1])
        found = self.tensor[rows.clamp(0, len(self.tensor) - 1)][:, columns.clamp(max=self.tensor.shape[1] - 1)]
        to.store(torch.where(inside, found, 0))
        return to.tensor.nbytes


class _Groups:
    """Groups of warps, each a thread, of which one runs at a time."""

    def __init__(self, num_warps: int) -> None:
        self.turn = threading.Condition()
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.running, self.num_warps = 0, [num_warps]
        self.failure: BaseException | None = None

    def specialize(self, functions: Sequence[tuple[Any, Any]], workers: Sequence[int], _: Sequence[int]) -> None:
        """Run all of them to their ends. The first has the warps of the kernel."""
        self.num_warps = [self.num_warps[0], *workers]
        self.waiting = dict.fromkeys(range(len(functions)), lambda: True)
        self.failure = None
        threads = [threading.Thread(target=self._run, args=(i, *each)) for i, each in enumerate(functions)]
        with self.turn:
            self._choose()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def wait(self, until: Callable[[], bool]) -> None:
        """Let others run, until this holds and it is the turn of this group again."""
        mine = self.running
        with self.turn:
            self.waiting[mine] = until
            self._choose()
            self.turn.wait_for(lambda: self.running == mine or self.failure is not None)
            if self.failure is not None:
                raise SystemExit

    def _choose(self) -> None:
        ready = [i for i, until in self.waiting.items() if until()]
        if ready:
            self.running = next((i for i in ready if i > self.running), ready[0])
            del self.waiting[self.running]
        elif self.waiting:
            self.failure = self.failure or AssertionError(f"groups of warps {[*self.waiting]} wait for ever")
        self.turn.notify_all()

    def _run(self, mine: int, function: Any, args: Any) -> None:
        try:
            with self.turn:
                self.turn.wait_for(lambda: self.failure or (self.running == mine and mine not in self.waiting))
            if self.failure is None:
                function(*(one.clone() if isinstance(one, Tensor) else one for one in args))
        except BaseException as error:  # noqa: BLE001 - told by the thread that waits for all
            self.failure = self.failure or error
        with self.turn:
            self.waiting.pop(mine, None)
            self._choose()


def _barriers(groups: _Groups) -> SimpleNamespace:
    """Barriers in shared memory: how many are awaited, how many came, phases that are over, and bytes to come."""

    def init(barrier: Shared, count: int) -> None:
        barrier.tensor.view(-1)[:] = torch.tensor([count, 0, 0, 0])

    def arrive(barrier: Shared, count: int = 1, num_bytes: int = 0) -> None:
        state = barrier.tensor.view(-1)
        state[1] += count
        state[3] += num_bytes
        assert state[1] <= state[0], "more arrive than are awaited"
        if state[1] == state[0] and state[3] == 0:
            state[1], state[2] = 0, state[2] + 1

    def wait(barrier: Shared, phase: Any) -> None:
        state = barrier.tensor.view(-1)
        groups.wait(lambda: int(state[2]) & 1 != int(phase))

    def expect(barrier: Shared, num_bytes: int, pred: Any = True) -> None:
        if pred:
            arrive(barrier, 1, num_bytes)

    return SimpleNamespace(MBarrierLayout=lambda: _BARRIER, init=init, arrive=arrive, expect=expect, wait=wait)


_BARRIER = object()


def run(module: str, kernel: str, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
    """Run ``kernel`` of the module of that name on tensors and numbers."""
    language, groups = _language(), _Groups(named.get("num_warps", 4))
    barriers = _barriers(groups)
    gluon = ModuleType("gluon")
    gluon.jit, gluon.language = _jit, language  # type: ignore[attr-defined]
    hopper = ModuleType("hopper")
    vars(hopper).update(
        async_copy=SimpleNamespace(
            async_copy_global_to_shared=lambda to, at, mask=None: to.store(_load(at, mask, 0)),
            commit_group=lambda: None,
            wait_group=lambda _: None,
            mbarrier_arrive=lambda barrier, increment_count: barriers.arrive(
                barrier, 32 * groups.num_warps[groups.running]
            ),
        ),
        mbarrier=barriers,
        tma=SimpleNamespace(
            async_copy_global_to_shared=lambda one, place, barrier, to, pred=True: (
                barriers.arrive(barrier, 0, -one.copy(place, to)) if pred else None
            )
        ),
        fence_async_shared=lambda: None,
        mma_v2=lambda a, b, acc: a.float() @ b.float() + acc,
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=lambda _, deps: deps[0] if len(deps) == 1 else tuple(deps),
    )
    at = "triton.experimental"
    stand_ins = {f"{at}.gluon": gluon, f"{at}.gluon.language": language, f"{at}.gluon.language.nvidia.hopper": hopper}
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    in_gluon = [name for name, one in sys.modules.items() if name.startswith("attnfuzz.") and hasattr(one, "gluon")]
    with patch.dict(sys.modules, stand_ins), patch("triton.experimental.gluon", gluon, create=True):
        for name in in_gluon:  # whose functions the kernel uses
            del sys.modules[name]
        spec.loader.exec_module(loaded)
    vars(loaded)["range"] = lambda *ends: map(torch.tensor, range(*map(int, ends)))
    pointers = [Pointer(one) if isinstance(one, Tensor) else one for one in args]
    language.warp_specialize = groups.specialize  # type: ignore[attr-defined]
    language.num_programs = lambda axis: torch.tensor(grid[axis])  # type: ignore[attr-defined]
    for place in itertools.product(*map(range, grid)):
        language.program_id = [torch.tensor(i) for i in place].__getitem__  # type: ignore[attr-defined]
        getattr(loaded, kernel)(*pointers, **named)


def compiled(script: str, folder: Path) -> list[tuple[str, int]]:
    """What a ``script`` prints of kernels that it has compiled in ``folder``: name and shared memory of each."""
    own = {"TRITON_INTERPRET": "0", "TRITON_DUMP_PTXAS_LOG": "1", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    return [(kernel, int(shared)) for kernel, shared in map(str.split, run.stdout.splitlines())]


def combined(acc: Tensor, row_max: Tensor, exp_sum: Tensor) -> tuple[Tensor, Tensor]:
    """The result and the LSE of states ``[heads, states]``, as ``combine_partials`` has them."""
    weights = torch.exp(row_max - row_max.amax(1, keepdim=True))
    total = (weights * exp_sum).sum(1)
    return (weights[:, :, None] * acc).sum(1) / total[:, None], row_max.amax(1) + total.log()


def _language() -> ModuleType:
    nothing = dict.fromkeys(
        (
            "BlockedLayout",
            "DistributedLinearLayout",
            "DotOperandLayout",
            "NVMMADistributedLayout",
            "NVMMASharedLayout",
            "SliceLayout",
            "SwizzledSharedLayout",
            "barrier",
        ),
        lambda *_, **__: None,
    )
    language = ModuleType("language")
    vars(language).update(
        **nothing,
        **{name: getattr(torch, name) for name in ("exp2", "float16", "float32", "int16", "int32", "int64", "log2")},
        float8e5=torch.float8_e5m2,
        int1=torch.bool,
        allocate_shared_memory=_allocate,
        arange=lambda first, end, **_: torch.arange(first, end),
        associative_scan=lambda x, axis, _: x.cumsum(axis),
        constexpr=lambda value: value,
        convert_layout=lambda x, _: x,
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        full=lambda shape, value, dtype, **_: torch.full(shape, value, dtype=dtype),
        inline_asm_elementwise=_assembly,
        join=lambda x, y: torch.stack((x, y), -1),
        load=_load,
        max=lambda x, axis: x.amax(axis),
        maximum=lambda x, y: torch.maximum(_tensor(x), _tensor(y)),
        minimum=lambda x, y: torch.minimum(_tensor(x), _tensor(y)),
        multiple_of=lambda x, _: x,
        static_range=range,
        store=_store,
        sum=lambda x, axis: x.sum(axis),
        where=lambda mask, x, y: torch.where(_tensor(mask), _tensor(x), _tensor(y)),
    )
    return language


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
    if layout is _BARRIER:
        return Shared(torch.zeros(*shape[:-1], 4, dtype=dtype))
    return Shared(torch.full(shape, float("nan"), dtype=dtype))


def _assembly(text: str, _: str, args: Sequence[Any], **__: Any) -> Any:
    """What kernels say in instructions of the GPU."""
    if "mul.wide" in text:
        return args[0].long() * args[1]
    if "mad.wide" in text:
        return args[0].long() * args[1] + args[2]
    if "cvt" in text:
        (words,) = args
        numbers = words.contiguous().view(torch.float8_e5m2 if "e5m2" in text else torch.float8_e4m3fn)
        pairs = numbers.view(*words.shape, 2).half()
        return pairs[..., 0], pairs[..., 1]
    if text.startswith("ex2"):
        return torch.exp2(args[0])
    assert "griddepcontrol" in text
    return None


def _jit(function: Any = None, **_: Any) -> Any:
    return function if function is not None else lambda other: other


def _tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x)


def _load(at: Pointer, mask: Any = None, other: float = 0) -> Tensor:
    elements, offsets, masks = at.at(mask)
    return torch.where(masks, elements[offsets], torch.tensor(other, dtype=elements.dtype))


def _store(at: Pointer, value: Any, mask: Any = None) -> None:
    elements, offsets, masks = at.at(mask)
    elements[offsets[masks]] = _tensor(value).to(elements.dtype).expand(masks.shape)[masks]


def _multiply(a: Any, b: Any, acc: Tensor, *, use_acc: bool = True, is_async: bool) -> Tensor:
    assert is_async
    x, y = ((one.tensor if isinstance(one, Shared) else one).float() for one in (a, b))
    return x @ y + (acc if use_acc else 0)
