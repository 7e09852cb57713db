"""Gluon in torch: runs a kernel one program after the other, without a GPU.

Layouts are nothing, copies and products are done at once, and what lies outside of a tensor is an error. So it shows
what a kernel computes and where it reads, and nothing of its order in time. Integers that Gluon would make tensors of
are tensors.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
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

    def index(self, i: Any) -> Shared:
        return Shared(self.tensor[int(i)])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.tensor.permute(*order))

    def store(self, value: Tensor) -> None:
        self.tensor.copy_(value)

    def load(self, _: Any) -> Tensor:
        return self.tensor

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], _: Any) -> Shared:
        return Shared(self.tensor.view(dtype).view(*shape))


def run(module: str, kernel: str, grid: tuple[int, int], *args: Any, **named: Any) -> None:
    """Run ``kernel`` of the module of that name on tensors and numbers."""
    language = _language()
    gluon = ModuleType("gluon")
    gluon.jit, gluon.language = _jit, language  # type: ignore[attr-defined]
    hopper = ModuleType("hopper")
    vars(hopper).update(
        async_copy=SimpleNamespace(
            async_copy_global_to_shared=lambda to, at, mask: to.store(_load(at, mask, 0)),
            commit_group=lambda: None,
            wait_group=lambda _: None,
        ),
        fence_async_shared=lambda: None,
        mma_v2=lambda a, b, acc: a.float() @ b.float() + acc,
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=lambda _, deps: deps[0],
    )
    at = "triton.experimental"
    stand_ins = {f"{at}.gluon": gluon, f"{at}.gluon.language": language, f"{at}.gluon.language.nvidia.hopper": hopper}
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, stand_ins), patch("triton.experimental.gluon", gluon, create=True):
        spec.loader.exec_module(loaded)
    vars(loaded)["range"] = lambda *ends: map(torch.tensor, range(*map(int, ends)))
    pointers = [Pointer(one) if isinstance(one, Tensor) else one for one in args]
    for i in range(grid[0]):
        for j in range(grid[1]):
            language.program_id = (torch.tensor(i), torch.tensor(j)).__getitem__  # type: ignore[attr-defined]
            getattr(loaded, kernel)(*pointers, **named)


def combined(acc: Tensor, row_max: Tensor, exp_sum: Tensor) -> tuple[Tensor, Tensor]:
    """The result and the LSE of states ``[heads, states]``, as ``combine_partials`` has them."""
    weights = torch.exp(row_max - row_max.amax(1, keepdim=True))
    total = (weights * exp_sum).sum(1)
    return (weights[:, :, None] * acc).sum(1) / total[:, None], row_max.amax(1) + total.log()


def _language() -> ModuleType:
    nothing = dict.fromkeys(
        (
            "BlockedLayout",
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
        allocate_shared_memory=lambda dtype, shape, _: Shared(torch.full(shape, float("nan"), dtype=dtype)),
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
