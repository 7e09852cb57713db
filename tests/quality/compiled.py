"""`python -m tests.quality.compiled [FILE]`: what each bundled Triton kernel compiles to, for GPUs that are not there.

Every kernel is called as users call it, on tensors that nobody reads, and what it launches is compiled instead, for
each target and head size: `Compiled` says what came of it. FILE is a page in Markdown, whose part between the lines of
`MARKS` is replaced by the tables; without it they are printed. The exit status is 1 if there are `complaints`.

Neither a GPU nor a driver is needed: Triton brings its assemblers. It must not be told to interpret.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import io
import linecache
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

MARKS = ("<!-- compiled: begin -->", "<!-- compiled: end -->")
HEAD_SIZES = (64, 128, 192, 256, 512, 1024)
LATENT_SIZES = ((192, 128), (576, 512))
"""Of keys and of the latent vectors in them."""
_WIDE = 16
_TO_GLOBAL_MEMORY = re.compile(
    r"(?P<load>ld\.global\S*?(\.v(?P<many>\d))?\.[bfsu](?P<bits>\d+)) "
    r"|cp\.async\.c[ag]\.shared\S* .*?\], *(?P<bytes>\w+)"
)
_OF_A_TILE = re.compile(r"\b(?P<name>b_k|b_v|b_latent|b_rope|tile) = tl\.load\(")
_NO_CACHE = "reduce_splits.py"
"""Its values are partial results."""
_FIELDS = ("shared", "registers")
_TILES = {"b_k": "K", "b_latent": "K and V", "b_rope": "K", "b_v": "V", "tile": "K and V"}


class Target(NamedTuple):
    """``arch`` and ``warp_size`` as of Triton's ``GPUTarget``, the others as of ``GpuLimits``."""

    backend: str
    arch: int | str
    warp_size: int
    processors: int
    shared_kib: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 108, 163),
    "sm_89": Target("cuda", 89, 32, 128, 99),
    "sm_90": Target("cuda", 90, 32, 132, 227),
    "sm_100": Target("cuda", 100, 32, 148, 227),
    "gfx942": Target("hip", "gfx942", 64, 304, 64),
}
"""An A100, an RTX 4090, an H100, a B200 and an MI300X."""


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """What one launch became. ``spilled``: bytes that a thread puts aside; ``widths``: of "K" and "V", the bytes that
    a thread loads at once; empty for AMD, and for kernels that load none.
    """

    target: str
    declared: str
    launch: str
    kernel: str
    head_size: int
    shared: int
    registers: int
    spilled: int
    widths: dict[str, int]


def complaints(compiled: Sequence[Compiled]) -> list[str]:
    """What does not fit into the GPU's shared memory, spills, or loads K or V in small pieces."""
    found: list[str] = []
    for one in compiled:
        where = f"{one.kernel} of {one.declared} ({one.launch}), head size {one.head_size}, {one.target}"
        most = TARGETS[one.target].shared_kib << 10
        if one.shared > most:
            found.append(f"{where}: takes {one.shared:,} bytes of shared memory, of {most:,}")
        if one.spilled:
            found.append(f"{where}: spills {one.spilled:,} bytes")
        found += [f"{where}: loads {name} by {n} bytes" for name, n in one.widths.items() if n < _WIDE]
    return found


def compile_for(target: str, head_sizes: Sequence[int], names: Sequence[str] = ()) -> Iterator[Compiled]:
    """What the bundled kernels of these ``names`` launch, or all; this process can launch nothing afterwards."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TRITON_CACHE_DIR": cache, "TRITON_DUMP_PTXAS_LOG": "1"}
        compiler = Compiler(target)
        for call in _calls(head_sizes, names):
            yield from compiler.of(call)


def compile_apart(target: str, *arguments: str) -> list[Compiled]:
    """The same in a process of its own, which gets these ``arguments`` of the command besides."""
    command = [sys.executable, "-m", "tests.quality.compiled", "--json", "--targets", target, *arguments]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "0"}, stdout=subprocess.PIPE, text=True, check=False
    )
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}; what it said stands above")
    return _decoded(run.stdout)


def _decoded(text: str) -> list[Compiled]:
    return [msgspec.json.decode(line, type=Compiled) for line in text.splitlines()]


class Call(NamedTuple):
    """A call of a kernel; ``launch`` says how it differs from others of the kernel."""

    declared: str
    launch: str
    head_size: int
    run: Callable[[], object]


def _calls(head_sizes: Sequence[int], names: Sequence[str]) -> Iterator[Call]:
    from attnfuzz.declaration import BUNDLED_MODULE, load_kernels
    from attnfuzz.inputs.allocation import PlainAllocator, allocate
    from attnfuzz.inputs.registry import problem_of
    from tests.gpu.bundled_cases import fitted

    kernels = [kernel for kernel in load_kernels(BUNDLED_MODULE) if not kernel.declaration.name.endswith("_eager")]
    for kernel in kernels:
        declaration = kernel.declaration
        if names and declaration.name not in names:
            continue
        sizes = LATENT_SIZES if declaration.problem == "latent_decode" else [(size, size) for size in head_sizes]
        for size, v_size in sizes:
            for launch, case in _cases(declaration.name, str(declaration.problem), size, v_size):
                fits = fitted(declaration, case)
                inputs = problem_of(fits).inputs(fits, allocate(fits, PlainAllocator("cpu")))
                yield Call(declaration.name, launch, size, lambda: kernel.function(inputs, **fits.options))  # noqa: B023


def _cases(name: str, problem: str, head_size: int, v_head_size: int) -> Iterator[tuple[str, Any]]:
    """Cases of a problem, with how each differs; a kernel that chooses its launch gets one for each choice."""
    from attnfuzz.problems import cases

    shape: dict[str, Any] = {
        "num_q_heads": 8,
        "num_kv_heads": 2,
        "head_size": head_size,
        "scale": 0.1,
        "dtype": "float16",
    }
    paged: dict[str, Any] = {**shape, "seq_lens": (1024,), "block_size": 16}
    match problem:
        case "dense_decode":
            yield "", cases.DenseDecodeCase(**shape, seq_lens=(64,))
        case "paged_decode":
            yield "", cases.PagedDecodeCase(**paged)
            if name == "paged_grouped":
                whole = {"num_splits": 1, "num_warps": 8, "num_stages": 3, "pdl": False}
                yield "whole sequences", cases.PagedDecodeCase(**paged, options=whole)
                many = paged | {"num_q_heads": 64, "num_kv_heads": 1}
                yield "64 heads on 1", cases.PagedDecodeCase(**many, options={"num_stages": 3})
                yield "last combines", cases.PagedDecodeCase(**paged, options={"last_combines": True})
        case "latent_decode":
            yield "", cases.LatentDecodeCase(**paged | {"num_kv_heads": 1}, v_head_size=v_head_size)
        case "split_decode":
            yield "", cases.SplitDecodeCase(**paged, num_splits=4)
        case "masked_attention":
            yield "", cases.MaskedAttentionCase(**paged, query_lens=(4,))
        case "paged_attention" if name == "paged_attention_auto":
            for queries, launch in ((1, "decode"), (40, "a few queries"), (512, "prompt")):
                yield launch, cases.PagedAttentionCase(**paged, query_lens=(queries,))
            yield "prompt, float32", cases.PagedAttentionCase(**paged | {"dtype": "float32"}, query_lens=(512,))
        case "paged_attention":
            yield "", cases.PagedAttentionCase(**paged, query_lens=(4,))
        case "merge_states":
            states = {name: shape[name] for name in ("num_q_heads", "head_size", "dtype")}
            yield "", cases.MergeStatesCase(**states, num_tokens=9, lse_pairs=(("finite", "finite"),))


class Compiler:
    """In place of all launches of this process."""

    def __init__(self, target: str) -> None:
        import triton
        from triton.backends.compiler import GPUTarget

        from attnfuzz.kernels.common import device

        self.name = target
        it = TARGETS[target]
        self._target = GPUTarget(it.backend, it.arch, it.warp_size)
        is_amd = it.backend == "hip"
        is_hopper = not is_amd and int(it.arch) >= 90
        gpu = device.GpuLimits(it.processors, it.shared_kib << 10, is_amd, is_hopper)
        for module in [*sys.modules.values()]:
            if getattr(module, "gpu_at", None) is device.gpu_at:
                module.gpu_at = lambda _: gpu  # type: ignore[attr-defined]
        triton.runtime.driver.set_active(self)
        self._launched: list[tuple[Any, str]] = []
        self._logs: dict[int, str] = {}
        triton.JITFunction.__getitem__ = lambda kernel, grid: (
            lambda *args, **named: self._compile(kernel, grid, args, named)
        )

    # What Triton asks a driver for before it compiles.
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        del device
        return 0

    def get_current_target(self) -> object:
        return self._target

    def _compile(self, kernel: Any, grid: object, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            compiled = kernel.warmup(*args, grid=grid, **named)
        self._launched.append((compiled, self._logs.setdefault(id(compiled), log.getvalue())))

    def of(self, call: Call) -> Iterator[Compiled]:
        self._launched.clear()
        call.run()
        for compiled, log in self._launched:
            cuda = self._target.backend == "cuda"
            registers, spilled = _in_log(log) if cuda else _in_assembly(compiled.asm["amdgcn"])
            yield Compiled(
                target=self.name,
                declared=call.declared,
                launch=call.launch,
                kernel=compiled.name,
                head_size=call.head_size,
                shared=compiled.metadata.shared,
                registers=registers,
                spilled=spilled,
                widths=_widths(compiled.asm["ptx"]) if cuda else {},
            )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"{pattern!r} is not in what the assembler says: {text[-500:]!r}")
    return int(found[1])


def _in_log(log: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills, by ptxas."""
    return _number(r"Used (\d+) registers", log), _number(r"(\d+) bytes spill stores", log)


def _in_assembly(text: str) -> tuple[int, int]:
    return _number(r"\.vgpr_count: +(\d+)", text), 4 * _number(r"\.vgpr_spill_count: +(\d+)", text)


def _widths(ptx: str) -> dict[str, int]:
    """Bytes that a thread loads at once of each kind of tile, by the line of source that stands before it in the PTX.

    Of several lines the best counts: the others are those of a rest under a mask.
    """
    files = {found[1]: found[2] for found in re.finditer(r'\.file\s+(\d+) "([^"]+)"', ptx)}
    narrowest: dict[tuple[str, str], int] = {}
    tile = None
    for line in ptx.splitlines():
        if found := re.match(r"\s*\.loc\s+(\d+) (\d+)", line):
            file = files[found[1]]
            tile = None if file.endswith(_NO_CACHE) else _OF_A_TILE.search(linecache.getline(file, int(found[2])))
        elif tile is not None and (found := _TO_GLOBAL_MEMORY.search(line)):
            size = int(found["many"] or 1) * int(found["bits"]) // 8 if found["load"] else int(found["bytes"], 0)
            for name in _TILES[tile["name"]].split(" and "):
                narrowest[name, tile.string] = min(size, narrowest.get((name, tile.string), size))
    best: dict[str, int] = {}
    for (name, _), size in narrowest.items():
        best[name] = max(size, best.get(name, size))
    return best


def page(compiled: Sequence[Compiled]) -> list[str]:
    """The tables: of each kernel the most that any of its launches takes, and all that is not as it should be."""
    sizes = sorted({one.head_size for one in compiled})
    targets = [target for target in TARGETS if any(one.target == target for one in compiled)]
    lines = [
        f"Compiled {datetime.date.today().isoformat()} with `python -m tests.quality.compiled`, Triton "
        f"{importlib.metadata.version('triton')}, no GPU; head sizes {', '.join(map(str, sizes))}. In each place: KiB "
        "of shared memory, registers of a thread, the most of all launches.",
        "",
        f"| kernel | K and V, bytes a load | {' | '.join(targets)} |",
        f"|---|---|{'---:|' * len(targets)}",
    ]
    for kernel in dict.fromkeys(one.kernel for one in compiled):
        own = [one for one in compiled if one.kernel == kernel]
        widths = sorted({f"{name} {size}" for one in own for name, size in one.widths.items()})
        cells = []
        for target in targets:
            there = [one for one in own if one.target == target]
            shared, registers = (max((getattr(one, field) for one in there), default=0) for field in _FIELDS)
            cells.append(f"{shared / 1024:.0f}, {registers}" if there else "")
        lines.append(f"| `{kernel}` | {', '.join(widths)} | {' | '.join(cells)} |")
    told = [f"- {one}" for one in complaints([msgspec.structs.replace(one, spilled=0) for one in compiled])]
    lines += ["", *(told or ["Everything fits, K and V are loaded by 16 bytes."]), ""]
    return lines + _spills(compiled, targets)


def _spills(compiled: Sequence[Compiled], targets: Sequence[str]) -> list[str]:
    """A table of what spills: bytes of a thread, the most of all head sizes, and at which."""
    spilling = [one for one in compiled if one.spilled]
    if not spilling:
        return ["Nothing spills."]
    lines = [
        f"| spills: bytes (head size) | {' | '.join(targets)} |",
        f"|---|{'---:|' * len(targets)}",
    ]
    for kernel, declared, launch in dict.fromkeys((one.kernel, one.declared, one.launch) for one in spilling):
        cells = []
        for target in targets:
            own = [one for one in spilling if (one.kernel, one.declared, one.launch) == (kernel, declared, launch)]
            worst = max((one for one in own if one.target == target), key=lambda one: one.spilled, default=None)
            cells.append("" if worst is None else f"{worst.spilled:,} ({worst.head_size})")
        what = f"`{declared}`, {launch}" if launch else f"`{declared}`"
        lines.append(f"| `{kernel}` of {what} | {' | '.join(cells)} |")
    return lines


def replace_part(path: Path, marks: tuple[str, str], lines: Sequence[str]) -> None:
    """Put ``lines`` between the two ``marks`` of a page. Raises ValueError for one that lacks them."""
    text = path.read_text(encoding="utf-8")
    if not all(text.count(mark) == 1 for mark in marks):
        raise ValueError(f"{path} must hold each of {marks} once, around the part that is replaced; add them")
    before, _, rest = text.partition(marks[0])
    _, _, after = rest.partition(marks[1])
    path.write_text("\n".join([before + marks[0], "", *lines, "", marks[1] + after]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.quality.compiled", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="replace the tables there")
    parser.add_argument("--json", action="store_true", help="print what was compiled for the first target, a line each")
    parser.add_argument("--read", nargs="+", type=Path, metavar="JSON", help="compile nothing: what --json has printed")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--kernels", nargs="+", default=[], help="these alone")
    parser.add_argument("--head-sizes", nargs="+", type=int, default=[*HEAD_SIZES])
    parser.add_argument("--jobs", type=int, default=2, help="targets compiled for at once")
    arguments = parser.parse_args()
    if arguments.json:
        for one in compile_for(arguments.targets[0], arguments.head_sizes, arguments.kernels):
            print(msgspec.json.encode(one).decode(), flush=True)
        return
    if arguments.read:
        compiled = [one for path in arguments.read for one in _decoded(path.read_text(encoding="utf-8"))]
    else:
        kernels = ["--kernels", *arguments.kernels] if arguments.kernels else []
        options = ["--head-sizes", *map(str, arguments.head_sizes), *kernels]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            parts = [pool.submit(compile_apart, target, *options) for target in arguments.targets]
            compiled = [one for part in parts for one in part.result()]
    if arguments.file is None:
        print(*page(compiled), sep="\n")
    else:
        replace_part(arguments.file, MARKS, page(compiled))
    sys.exit(bool(complaints(compiled)))


if __name__ == "__main__":
    main()
