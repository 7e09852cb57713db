"""Launch a Triton kernel again as it was launched before, without Triton looking at each argument.

To find the compilation that fits, Triton asks of every argument of every launch what it may be specialised on: its
type, whether it is 1, whether 16 divides it. That takes about a microsecond for each, on the host: for the fifty of an
attention kernel, as long as several short calls take on the GPU. Where all numbers are those of an earlier launch, and
all tensors have the same dtype and alignment, the answers are the same too. What that launch returned, the compiled
kernel, can then be launched itself, as in Triton's tutorial on fused softmax.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel

_LAUNCHED: dict[Hashable, tuple[Any, CompiledKernel]] = {}
"""By what specialises a launch: the kernel, whose ``id`` is in the key, and its compilation."""
_MOST_LAUNCHED = 1024
_ALIGNMENT = 16
"""Bytes. Triton specialises pointers on it."""


def launch_again(
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    named: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """``kernel[grid](*args, **named, **options)`` on the current device.

    ``args``: the kernel's first arguments, a tensor to begin with. ``named``: all others, constants among them, by
    name. ``options``: of the launch, as ``num_warps``, which kernels in Gluon take as an argument too. All but tensors
    must be hashable.
    """
    if not args[0].is_cuda:  # in the interpreter nothing is compiled
        kernel[grid](*args, **named, **options)
        return
    of_both = {**options, **named}
    _launch(kernel, grid, (*args, *[of_both[name] for name in kernel.arg_names[len(args) :]]), options)


def _launch(kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    facts = [(one.dtype, one.data_ptr() % _ALIGNMENT) if isinstance(one, Tensor) else one for one in args]
    key = (id(kernel), args[0].device, *options.items(), *facts)
    launched = _LAUNCHED.get(key)
    if launched is not None and launched[0] is kernel:
        launched[1][grid](*args)
        return
    by_position = sum(name not in options for name in kernel.arg_names)  # what is both comes last
    compiled = kernel[grid](*args[:by_position], **options)
    if isinstance(compiled, CompiledKernel):
        if len(_LAUNCHED) >= _MOST_LAUNCHED:
            _LAUNCHED.clear()
        _LAUNCHED[key] = kernel, compiled
