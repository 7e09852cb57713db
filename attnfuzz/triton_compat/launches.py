"""Launches of Triton on a GPU: writes them down, or has them wait at random.

Programs wait before they begin, warps before they access memory. Short kernels on an idle GPU run much alike each time:
programs begin in their order, and all warps of one do the same at about the same time. On a busy GPU none of that
holds. The waits are put into the PTX that Triton has made of a kernel, which is assembled once more, so that no
arithmetic changes; and what is launched then is that, by whichever way it is launched. Triton's own caches know nothing
of it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from attnfuzz.triton_compat.patching import replaced


@dataclass(frozen=True, slots=True)
class Launch:
    """``addresses`` are those of tensors, by the name of the argument."""

    ttir: str
    addresses: dict[str, int]


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Fill a list with what is launched meanwhile; with nothing where no Triton is installed, or one unknown."""
    launches: list[Launch] = []
    jit = importlib.import_module("triton.runtime.jit") if importlib.util.find_spec("triton") else None
    function = getattr(jit, "JITFunction", None)
    run = vars(function).get("run") if isinstance(function, type) else None
    if run is None or not callable(run):
        yield launches
        return

    @functools.wraps(run)
    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = run(self, *args, **kwargs)
        ttir = getattr(compiled, "asm", {}).get("ttir")
        if isinstance(ttir, str):
            given = dict(zip(getattr(self, "arg_names", ()), args, strict=False)) | kwargs
            tensors: list[tuple[str, Any]] = [(name, getattr(one, "base", one)) for name, one in given.items()]
            addresses = {name: one.data_ptr() for name, one in tensors if hasattr(one, "data_ptr")}
            launches.append(Launch(ttir, addresses))
        return compiled

    with replaced(function, {"run": recording}):
        yield launches


_NVIDIA = "triton.backends.nvidia.compiler"
_WAITING = "_attnfuzz_waiting"
"""Where a compiled kernel keeps its twin, by device; None if the assembler takes none."""

_BEGIN = """\
{
.reg .b32 %zw, %zt;
.reg .b64 %zc;
mov.u64 %zc, %globaltimer;
shr.u64 %zc, %zc, 18;
cvt.u32.u64 %zw, %zc;
mov.u32 %zt, %ctaid.x;
mad.lo.s32 %zw, %zw, 668265263, %zt;
mov.u32 %zt, %ctaid.y;
mad.lo.s32 %zw, %zw, 374761393, %zt;
mov.u32 %zt, %ctaid.z;
mad.lo.s32 %zw, %zw, 668265263, %zt;
shr.u32 %zt, %zw, 15;
xor.b32 %zw, %zw, %zt;
mul.lo.s32 %zw, %zw, 739982445;
shr.u32 %zt, %zw, 12;
xor.b32 %zw, %zw, %zt;
mul.lo.s32 %zw, %zw, 695872825;
shr.u32 %zt, %zw, 31;
bfe.u32 %zw, %zw, 8, 15;
mul.lo.s32 %zw, %zw, %zt;
nanosleep.u32 %zw;
}
"""
"""Every second program waits up to 32 microseconds: longer than launches of all take, and than a small case does."""
_ACCESS = """\
{
.reg .b32 %zw, %zt;
.reg .pred %zp;
mov.u32 %zw, %clock;
mov.u32 %zt, %tid.x;
shr.u32 %zt, %zt, 5;
mad.lo.s32 %zw, %zw, 668265263, %zt;
mov.u32 %zt, %ctaid.x;
mad.lo.s32 %zw, %zw, 374761393, %zt;
shr.u32 %zt, %zw, 15;
xor.b32 %zw, %zw, %zt;
mul.lo.s32 %zw, %zw, 739982445;
bfe.u32 %zt, %zw, 24, BITS;
setp.eq.u32 %zp, %zt, 0;
bfe.u32 %zw, %zw, 8, 13;
selp.b32 %zw, %zw, 0, %zp;
nanosleep.u32 %zw;
}
"""
"""One in 2^BITS accesses of a warp waits up to 8 microseconds."""
_BITS = {"ld": "5", "st": "1", "atom": "1", "red": "1"}
"""Loads are many, and each of a loop waits for the one before; stores and atomic operations are what others see."""
_ENTRY = re.compile(r"^\.visible \.entry [^{]*\{\n", re.MULTILINE)
_GLOBAL = re.compile(r"^[ \t]*(?:@!?%\w+[ \t]+)?(ld|st|atom|red)\.[\w.:]*\bglobal\b", re.MULTILINE)


@dataclass(slots=True)
class Delayed:
    """``launches``: how often a kernel was launched that waits at random."""

    launches: int = 0


def with_delays(ptx: str) -> str:
    """``ptx`` with a wait where a program begins, and before each access to global memory."""
    begun = _ENTRY.sub(lambda found: found[0] + _BEGIN, ptx)
    return _GLOBAL.sub(lambda found: _ACCESS.replace("BITS", _BITS[found[1]]) + found[0], begun)


@contextlib.contextmanager
def delayed() -> Iterator[Delayed]:
    """Let launches within wait at random; none waits with a Triton that is not known, or without one."""
    seen = Delayed()
    compiled = _compiled_kernels()
    if compiled is None:
        yield seen
        return
    run = vars(compiled)["run"]

    def waiting_run(self: Any) -> Callable[..., Any]:
        """A function that launches a compiled kernel, given the grid, the stream, its binary, and the arguments."""
        launch = run.fget(self)
        function = _waiting_function(self)
        if function is None:
            return cast("Callable[..., Any]", launch)
        seen.launches += 1
        return lambda x, y, z, stream, own, *rest: launch(x, y, z, stream, function, *rest)

    with replaced(compiled, {"run": property(waiting_run)}):
        yield seen


def _compiled_kernels() -> type | None:
    """The class of what Triton has compiled, if its launches go the way that is known."""
    if not importlib.util.find_spec("triton"):
        return None
    found = getattr(importlib.import_module("triton.compiler"), "CompiledKernel", None)
    return found if isinstance(found, type) and isinstance(vars(found).get("run"), property) else None


def _waiting_function(kernel: Any) -> Any:
    """The twin of a compiled kernel that waits, loaded on the current device; None if there can be none."""
    driver = importlib.import_module("triton.runtime.driver").driver.active
    kept, device = vars(kernel).setdefault(_WAITING, {}), driver.get_current_device()
    if device not in kept:
        cubin = _assembled(kernel)
        loaded = cubin and driver.utils.load_binary(kernel.name, cubin, kernel.metadata.shared, device)
        kept[device] = loaded and loaded[1]
    return kept[device]


def _assembled(kernel: Any) -> bytes | None:
    ptx, target = kernel.asm.get("ptx"), kernel.metadata.target
    backend = getattr(importlib.import_module(_NVIDIA), "CUDABackend", None) if target.backend == "cuda" else None
    if not ptx or backend is None or not hasattr(backend, "make_cubin"):
        return None
    errors = importlib.import_module("triton.runtime.errors")
    try:
        return cast("bytes", backend(target).make_cubin(with_delays(ptx), {}, kernel.metadata, target.arch))
    except errors.PTXASError:
        return None
