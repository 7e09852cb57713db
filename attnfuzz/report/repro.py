"""A saved case as one short Python file: the tensors, the call, and what should come of it.

It needs no attnfuzz, but where Triton's interpreter, which is what runs without a GPU, has to be repaired: it rounds
bfloat16 and 8 bits wrongly. The repairs are a thousand lines, so a script imports them, and says why.

Of an engine's kernel the engine's own function is called, as its adapter calls it (`attnfuzz.trials.engine_calls`). Any
other kernel's source is in the script: as it is where it is one file, else as files that the script writes. The kernel
is not imported here; its source text is taken from its files.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnfuzz.campaign.saved.replay import preceding_for, runs_to_see
from attnfuzz.corpus import Regression
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.identity.bug import is_leak
from attnfuzz.inputs.registry import problem_of
from attnfuzz.memory.arena import Arena
from attnfuzz.oracles.registry import CRASH, DETERMINISM, GUARD_PAGE, HANG, RED_ZONE
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import CaseTooLarge, tensor_nbytes
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.report.files import TEMPLATES
from attnfuzz.report.findings import one_line
from attnfuzz.report.scripts import Follow
from attnfuzz.report.sources import KernelSources, inlined, kernel_sources
from attnfuzz.trials.as_code import UNPACK, compared, definitions, names_used
from attnfuzz.trials.expectations import bound_of
from attnfuzz.trials.script_part import MAX_TENSOR_BYTES, ScriptPart
from attnfuzz.untrusted_text import only_printable
from attnfuzz.verdict import where_to_look

_WIDTH = 116
_MOST_LINES = 40
"""Most lines of a script of an engine's kernel, whose source is not in it; the tensors of longer ones are packed."""
_FEW_ELEMENTS = 64
"""Most elements of a result that is compared whole; of a larger one, the rows that an oracle pointed to."""
_MOST_SAID = 3
"""Lines of what the oracle said; the saved case has all of it."""
_HANGS_S = 120
"""Seconds after which a script gives up, and says where the kernel was."""


def repro_script(regression: Regression, declaration: Declaration, *, follow: Follow | None = None) -> str:
    """The script for a saved case. ``declaration`` is that of its kernel.

    ``follow``: how an engine's kernel calls it; without, or where that cannot be told, the adapter is in the script.
    It also tells what the script holds of a user's problem: without, there is none. The cases that it needs before it
    run first. Raises CaseTooLarge for more tensors than a script can hold and KernelLoadError for a kernel without
    source.
    """
    cases = (*preceding_for(declaration, regression), regression.case)
    if isinstance(regression.problem, OpenProblem):
        runs = _of_open_problem(regression, cases, follow)
    else:
        _check_size(cases)
        runs = _followed(regression, declaration, cases, follow) or _from_source(regression, declaration, cases)
    lines = list(_lines(regression, declaration, runs))
    if runs.is_engine and len(lines) > _MOST_LINES and all(run.together for run in runs.each):
        lines = list(_lines(regression, declaration, runs, together=True))
    return "\n".join(lines) + "\n"


def _check_size(cases: Sequence[Case]) -> None:
    nbytes = sum(map(tensor_nbytes, cases))
    if nbytes > MAX_TENSOR_BYTES:
        cases_have = "the case has" if len(cases) == 1 else f"the {len(cases)} cases have"
        raise CaseTooLarge(
            f"{cases_have} {nbytes} bytes of tensors, more than the {MAX_TENSOR_BYTES} that a script can hold; "
            "use attnfuzz replay, or a smaller case"
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """``tensors``: lines that define ``names``; ``together`` is one line for all, if known. ``calls``: lines that run
    the kernel on them. ``results``: expressions for what it gives. ``checks``: lines that compare these, where a user's
    problem has said with what."""

    tensors: list[str]
    names: list[str]
    calls: list[str]
    results: list[str]
    checks: list[str] = field(default_factory=list)
    together: str = ""


@dataclass(frozen=True, slots=True)
class _Runs:
    """``kernel``: lines that import or define it; ``before_all`` stands at the top. ``each``: the case is the last."""

    kernel: list[str]
    each: list[_Run]
    is_triton: bool
    is_engine: bool = False
    before_all: tuple[str, ...] = ()


def _followed(
    regression: Regression, declaration: Declaration, cases: Sequence[Case], follow: Follow | None
) -> _Runs | None:
    """None where the kernel is no engine's, or its adapter cannot be followed."""
    if follow is None or not declaration.calls:
        return None
    launches = regression.finding.oracle not in (CRASH.name, HANG.name)
    found = [follow(case, launches or case is not regression.case) for case in cases]
    told = [one for one in found if one is not None]
    if len(told) < len(found):
        return None
    return _of_engine(regression, told)


def _of_engine(regression: Regression, told: Sequence[ScriptPart]) -> _Runs:
    """Lines that call an engine's functions."""
    return _Runs(
        kernel=list(dict.fromkeys(line for one in told for line in one.imports)),
        each=list(map(_run_of, told)),
        is_triton=told[-1].interpreted,
        is_engine=True,
    )


def _run_of(part: ScriptPart) -> _Run:
    return _Run(
        list(part.tensors), list(part.names), list(part.calls), list(part.results), list(part.checks), part.together
    )


def _of_open_problem(regression: Regression, cases: Sequence[Case], follow: Follow | None) -> _Runs:
    """The process that has imported the problem says what its cases hold; the kernel is called ``kernel``."""
    parts = [None if follow is None else follow(case, True) for case in cases]
    told = [one for one in parts if one is not None]
    if len(told) < len(parts):
        raise KernelLoadError(f"{regression.problem} could not be asked what its case holds: use attnfuzz replay")
    if told[-1].imports:
        return _of_engine(regression, told)
    source = _source(regression)
    return _Runs(
        kernel=[*source.lines, *([] if source.name == "kernel" else [f"kernel = {source.name}"])],
        each=list(map(_run_of, told)),
        is_triton=source.is_triton,
        before_all=source.before_all,
    )


def _from_source(regression: Regression, declaration: Declaration, cases: Sequence[Case]) -> _Runs:
    source = _source(regression, is_engine=bool(declaration.calls))
    return _Runs(
        kernel=source.lines,
        each=[_run_from_source(declaration, case, source.name, source.attributes) for case in cases],
        is_triton=source.is_triton,
        is_engine=bool(declaration.calls),
        before_all=source.before_all,
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """``lines`` that define a kernel, or import it, as ``name``; ``before_all`` stands at the top.

    ``attributes``: names of what it may look at.
    """

    lines: list[str]
    name: str
    before_all: tuple[str, ...]
    is_triton: bool
    attributes: set[str]


def _source(regression: Regression, *, is_engine: bool = False) -> _Source:
    sources = kernel_sources(regression.kernel)
    inline = None if is_engine else inlined(sources)  # an engine's functions reach an adapter as it is declared
    if inline is not None and not _NAMES.isdisjoint(_names_defined(inline.text)):
        inline = None
    texts = [inline.text] if inline is not None else list(sources.files.values())
    is_triton = any("triton" in text for text in texts) or is_engine
    attributes = {name for text in texts for name in _attributes(text)}
    if inline is None:
        return _Source(_imported(sources), "kernel", (), is_triton, attributes)
    given = {"import torch", "import sys", "import os"}
    lines = [line for line in inline.text.splitlines() if line not in given]
    return _Source(lines, inline.name, inline.before_all, is_triton, attributes)


_NAMES = frozenset({"Allocating", "beside", "differs", "grows", "memory", "merged", "unpack"})
"""What a script defines for itself, so that a kernel that calls something so is imported from a file of its own."""


def _names_defined(text: str) -> set[str]:
    """Functions and classes that source ``text`` defines."""
    every = ast.walk(ast.parse(text))
    return {node.name for node in every if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def _attributes(text: str) -> Iterator[str]:
    """Names of attributes that source ``text`` may look at, some of them by a name that is a string."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _written(files: Mapping[str, str]) -> list[str]:
    """Lines that write ``files`` to a folder that is searched for modules: Triton compiles functions from files.

    The folder is gone soon after the process, also if that crashes: another process waits for its end.
    """
    lines = [_WRITTEN_BEGINS]
    for path, text in files.items():
        lines += f"    {path!r}: {_text_literal(text)},".splitlines()
    return [*lines, *_WRITTEN_ENDS]


def _imported(sources: KernelSources) -> list[str]:
    """Lines that write the files of a kernel that has several, with what stands in for attnfuzz, and import it."""
    module = sources.entry.removesuffix(".py").replace("/", ".")
    is_name = all(part.isidentifier() for part in module.split("."))
    files = {
        (path if is_name or path != sources.entry else "kernel_file.py"): text for path, text in sources.files.items()
    }
    return [
        *_written({"attnfuzz/__init__.py": (TEMPLATES / _STUB).read_text(encoding="utf-8"), **files}),
        f"from {module if is_name else 'kernel_file'} import {sources.attribute} as kernel",
    ]


def _text_literal(text: str) -> str:
    """Source code, readable as it is wherever a raw string can hold it."""
    is_plain = all(line.isprintable() for line in text.split("\n"))
    for quotes in ("'''", '"""'):
        if is_plain and quotes not in text and not text.endswith(("\\", quotes[0])):
            return f"r{quotes}{text}{quotes}"
    return repr(text)


def _run_from_source(declaration: Declaration, case: Case, kernel: str, used: set[str]) -> _Run:
    """``used``: attributes that the source names; other inputs are left out."""
    values = problem_of(case).values(case, "cpu", declaration.supports)
    arena = Arena("cpu", poison="nan", prefill="nan", capacity=tensor_nbytes(case))
    inputs = problem_of(case).build(case, arena, declaration.supports, values)
    results = problem_of(case).results[: 1 if declaration.supports.lse == "none" else None]
    fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    kept = {name: value for name, value in fields.items() if name in used}
    tensors = {name: value for name, value in kept.items() if isinstance(value, Tensor)}
    given = ", ".join(f"{name}={name if name in tensors else repr(value)}" for name, value in kept.items())
    options = {name: choices[0] for name, choices in declaration.options.items()} | dict(case.options)
    chosen = "".join(f", {name}={value!r}" for name, value in options.items())
    shown = ", ".join(results)
    written = ", ".join(name if name in kept else "None" for name in results)
    calls = [
        f"result = {kernel}(SimpleNamespace({given}){chosen})",
        "result = result if isinstance(result, (tuple, list)) else (result,)",
        f"{shown}, *_ = (b if a is None else a for a, b in zip((*result, None), ({written}, None)))",
    ]
    return _Run(definitions(tensors), list(tensors), calls, list(results))


def _lines(regression: Regression, declaration: Declaration, runs: _Runs, *, together: bool = False) -> Iterator[str]:
    """``together``: all tensors of a run in one line, of their bytes."""
    finding = regression.finding
    leaks, guards = is_leak(finding), finding.oracle == GUARD_PAGE.name
    needs_gpu = guards and not runs.is_triton and runs.is_engine  # what is no Triton kernel runs on a GPU alone
    guards = guards and not needs_gpu
    *before, last = runs.each
    body = [
        line
        for number, run in enumerate(before, start=1)
        for line in _run_before(run, f"{number} of {len(before)}", together=together)
    ]
    body += _defined(last, together=together, on_device=not guards)
    helpers, more = _judged(regression, declaration, last, guards=guards, leaks=leaks)
    body += more
    named = names_used(body)
    if (times := runs_to_see(finding.failed, finding.runs)) > 1:
        body = [f"for _ in range({times}):  # it does not fail in every run", *(f"    {line}" for line in body)]
    dies = guards or finding.oracle in (CRASH.name, HANG.name)
    yield from _docstring(regression, declaration, needs_gpu=needs_gpu)
    yield from runs.before_all
    is_written = _WRITTEN_BEGINS in runs.kernel
    modules = {
        "base64": together or "unpack" in named, "ctypes": guards, "faulthandler": dies, "io": together, "mmap": guards,
        "os": runs.is_triton or leaks, "pathlib": is_written,
        "subprocess": is_written, "sys": True, "tempfile": is_written, "torch": True,
        "zlib": together or "unpack" in named,
    }  # fmt: skip
    yield f"import {', '.join(name for name, used in modules.items() if used)}"
    if numbers := [name for name in named if name != "unpack"]:
        yield f"from math import {', '.join(numbers)}"
    if any("SimpleNamespace" in line for line in body):
        yield "from types import SimpleNamespace"
    if _ALLOCATING[0] in helpers:
        yield "from torch.utils._python_dispatch import TorchDispatchMode"
    yield 'DEVICE = "cpu"' if guards else 'DEVICE = "cuda" if torch.cuda.is_available() else "cpu"'
    if runs.is_triton:
        setting = f'{{"TRITON_INTERPRET": "1"{_HIDDEN if runs.is_engine else ""}}}'
        yield f"os.environ |= {setting if guards else f'{{}} if DEVICE == {chr(34)}cuda{chr(34)} else {setting}'}"
    if runs.is_triton and any(name in line for line in last.tensors for name in _NARROW):
        yield from _REPAIRED
        yield from _FORGOTTEN if is_written else ()
    yield from runs.kernel
    if not guards:
        yield "torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is filled with NaN"
    if dies:
        yield "faulthandler.enable()"
    if finding.oracle == HANG.name:
        yield f"faulthandler.dump_traceback_later({_HANGS_S}, exit=True)"
    if "unpack" in named:
        yield from UNPACK
    yield from helpers
    first = next((number for number, line in enumerate(body) if line.startswith("failed |= ")), None)
    if first is not None:
        body[first] = body[first].replace("|=", "=", 1)
    elif judges := any("failed |= " in line for line in body):
        yield "failed = False"
    yield from body
    if first is None and not judges:  # whoever gets here has not raised, hung or died
        yield 'print(f"torch {torch.__version__} on {DEVICE}: PASS")'
        return
    yield "print(f\"torch {torch.__version__} on {DEVICE}: {'FAIL' if failed else 'PASS'}\")"
    yield "sys.exit(failed)"


_NARROW = ("bfloat16", "float8", "torch.int8")
_REPAIRED = (
    'if DEVICE == "cpu":  # attnfuzz repairs how Triton\'s interpreter rounds bfloat16 and 8 bits: no GPU needs that',
    "    from attnfuzz.triton_compat.interpreter import set_up_interpreter",
    "    set_up_interpreter()",
)
_FORGOTTEN = (
    'for name in [name for name in sys.modules if name.partition(".")[0] == "attnfuzz"]:',
    "    del sys.modules[name]  # the files below bring what stands in for it",
)
_HIDDEN = ', "CUDA_VISIBLE_DEVICES": ""'
"""vLLM does without Triton where it finds no GPU and none is hidden."""


def _defined(run: _Run, *, together: bool, on_device: bool = True) -> list[str]:
    """Lines that define its tensors."""
    if together:
        return [run.together]
    return ["with torch.device(DEVICE):", *(f"    {line}" for line in run.tensors)] if on_device else run.tensors


def _run_before(run: _Run, number: str, *, together: bool) -> list[str]:
    """A case that has to run before, as often as attnfuzz runs each."""
    return [
        f"# case {number} that run before, in the same process",
        *_defined(run, together=together),
        "for _ in range(2):",
        *(f"    {line}" for line in _called(run)),
    ]


def _called(run: _Run) -> list[str]:
    return [part for line in run.calls for part in _wrapped(line)]


def _judged(
    regression: Regression, declaration: Declaration, run: _Run, *, guards: bool, leaks: bool
) -> tuple[list[str], list[str]]:
    """Definitions, and lines that call the kernel on its tensors and set ``failed``."""
    finding, calls = regression.finding, _called(run)
    if leaks:
        shared = [f"global {', '.join(run.results)}"] if run.results else []
        return _MEMORY, ["def call():", *(f"    {line}" for line in (*shared, *calls)), "failed |= grows(call)"]
    if guards:
        known = [finding.tensor] if finding.tensor in run.names else run.names
        within = [] if known != run.names else ["with Allocating():"]
        return (
            [*_LOCKED, *(_ALLOCATING if within else [])],
            [
                'for edge in ("end", "start"):',
                *(f"    {line}" for line in _wrapped(f"{_several(known)} = map(beside, {_several(known)})")),
                *(f"    {line}" for line in within),
                *(f"    {'    ' if within else ''}{line}" for line in calls),
            ],
        )
    if finding.oracle == RED_ZONE.name:
        return [*_FENCED, *_ALLOCATING, *(_DIFFERS if run.checks else ())], [*_watching(run, calls), *run.checks]
    if finding.oracle == DETERMINISM.name:
        kept, names = _several(run.results), _several(run.names)
        bits = f"[part.contiguous().view(-1).view(torch.uint8).clone() for part in {kept}]"
        return (
            [],
            [
                *_wrapped(f"given = [tensor.clone() for tensor in {names}]"),
                *calls,
                f"first = {bits}",
                *_wrapped(f"{names} = given"),
                *calls,
                f"failed |= any(not torch.equal(a, b) for a, b in zip(first, {bits}))",
            ],
        )
    checks = run.checks or _checks(regression, declaration, run)
    return ([*_DIFFERS] if checks else []), [*calls, *(checks or [_SYNCHRONISED])]


_SYNCHRONISED = 'torch.cuda.synchronize() if DEVICE == "cuda" else None'


def _several(names: Sequence[str]) -> str:
    """A tuple of ``names``."""
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _wrapped(line: str) -> list[str]:
    """A call over several lines, if it takes them."""
    return textwrap.wrap(line, _WIDTH - 8, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _watching(run: _Run, calls: list[str]) -> list[str]:
    """A run of which nothing but results may change: neither inputs nor what lies beside any tensor."""
    outputs = {name.partition(".")[0] for name in run.results}
    inputs, names = _several([name for name in run.names if name not in outputs]), _several(run.names)
    return [
        *_wrapped(f"{names} = map(beside, {names})"),
        *_wrapped(f"before = [tensor.clone() for tensor in {inputs}]"),
        "with Allocating():",
        *(f"    {line}" for line in calls),
        *_wrapped(f"same = [torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, {inputs})]"),
        "failed |= not all(same) or any(bool((fence != 255).any()) for fence in fences)",
    ]


def _docstring(regression: Regression, declaration: Declaration, *, needs_gpu: bool) -> Iterator[str]:
    finding = regression.finding
    versions = {"torch": regression.environment.versions.get("torch", torch.__version__), **declaration.versions}
    used = " and ".join(f"{name} {version}" for name, version in versions.items())
    said = _plain(f"{regression.kernel} fails {finding.oracle}: {finding.message}")
    lines = textwrap.wrap(said, _WIDTH, break_long_words=False, max_lines=_MOST_SAID, placeholder=" ...")
    facts = [*where_to_look(finding.sources), f"{one_line(regression.case)}; {used}"]
    if needs_gpu:
        facts.append("PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 python THIS_FILE shows it")
    for fact in facts:
        lines += textwrap.wrap(_plain(fact), _WIDTH, break_long_words=False)
    yield f'"""{lines[0]}'
    yield from lines[1:-1]
    yield f'{lines[-1]}"""'


def _plain(text: str) -> str:
    """``text`` as it can stand in a docstring."""
    return only_printable(text).replace("\\", "/").replace('"""', "'''").strip('"')


def _checks(regression: Regression, declaration: Declaration, run: _Run) -> list[str]:
    """Lines that compare what the kernel gives with what it should give; nothing for one that gives nothing."""
    case = regression.case
    problem = problem_of(case)
    values = problem.values(case, "cpu", declaration.supports)
    expected = problem.reference(case, values)
    on_gpu = torch.cuda.is_available()
    bound = bound_of(declaration, case, values, one_copy=not on_gpu)
    names = list(problem.results if declaration.supports.lse != "none" else problem.results[:1])
    results = dict(zip(names, run.results, strict=False))
    lines: list[str] = []
    if case.problem == "split_decode" and len(results) == 2:
        lines += [*_MERGED, f"whole = merged({results[names[0]]}, {results[names[1]]})"]
        results = {"out": "whole[0]", "lse": "whole[1]"}
    unit = math.log(2) if declaration.supports.lse == "base2" else 1.0
    for (name, result), should_be, within in zip(
        results.items(), (expected.out, expected.lse), (bound.out, bound.lse), strict=False
    ):
        if problem.axes(case, names[-1])[0] == "head" and name == names[-1] and should_be.dim() == 2:
            should_be, within = should_be.T, within.T
        if should_be is expected.lse and unit != 1.0:
            result = f"({result} * {unit!r})"
        if regression.finding.tensor in names and regression.finding.tensor != name:
            continue  # which result is wrong is known
        if case.num_query_slots != case.num_rows:  # the last rows belong to no sequence
            result = f"{result}[:{case.num_rows}]"
        lines += _checked(name, result, should_be.double(), within.double(), regression.finding.blame.rows)
    return lines


def _checked(name: str, result: str, should_be: Tensor, within: Tensor, rows: Iterable[tuple[int, int]]) -> list[str]:
    """Lines for one result; of a large one only its first row that is wrong, if that is known."""
    where = next(iter(rows), None)
    if should_be.numel() > _FEW_ELEMENTS and where is not None and should_be.dim() == 3:
        row, head = where
        name, result = f"{name}[{row}, {head}]", f"{result}[{row}, {head}]"
        should_be, within = should_be[row, head], within[row, head]
    return compared(name, result, should_be, within)


_STUB = "attnfuzz_stub.py.jinja"
_WRITTEN_BEGINS = "FILES = {"
_WRITTEN_ENDS = """
}
folder = tempfile.mkdtemp(prefix="repro-")
subprocess.Popen(["sh", "-c", 'cat; rm -rf "$0"', folder], stdin=subprocess.PIPE)  # once this process has ended
for name, text in FILES.items():
    pathlib.Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(folder, name).write_text(text)
sys.path.insert(0, folder)
""".strip().splitlines()
_DIFFERS = """
def differs(name, got, expected, bound):  # from the float64 result by more than rounding may give
    kind = {"dtype": torch.float64, "device": DEVICE}
    near, exact = (torch.as_tensor(part, **kind).expand(got.shape) for part in (bound, expected))
    wrong = ~((got.double() - exact).abs() <= near) & (got.double() != exact) & ~(got.double().isnan() & exact.isnan())
    for at in map(tuple, wrong.nonzero().tolist()[:1]):
        print(f"{name}{list(at)} is {got[at]:.9g}, expected {exact[at]:.9g} +- {near[at]:.3g}")
    return bool(wrong.any())
""".strip().splitlines()
_MERGED = """
def merged(out, lse):  # the partial states of all splits as one
    top = lse.double().amax(-1, keepdim=True)
    weights = (lse.double() - top.nan_to_num(neginf=0)).exp()
    total = weights.sum(-1, keepdim=True)
    outs = torch.where(lse.isneginf()[..., None], 0, out.double())
    return (weights[..., None] * outs).sum(-2) / total.where(total != 0, 1), (top + total.log())[..., 0]
""".strip().splitlines()
_LOCKED = """
def beside(tensor):  # a copy that ends, or begins, at a page that nobody may touch: who does ends the process
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    page, size = mmap.PAGESIZE, span * tensor.element_size()
    area = mmap.mmap(-1, 2 * page + (room := size + -size % page))
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for locked in (start, start + page + room) if tensor.numel() else ():
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(locked), ctypes.c_size_t(page), 0)
    flat = torch.frombuffer(area, dtype=tensor.dtype, count=span, offset=page + (room - size) * (edge == "end"))
    return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
""".strip().splitlines()
_FENCED = """
fences = []
def beside(tensor):  # a copy between bytes that must not change
    size = (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))) * tensor.element_size()
    area = torch.full((8192 + -(-size // 16) * 16,), 255, dtype=torch.uint8, device=tensor.device)
    fences.extend((area[:4096], area[4096 + size :]))
    return area[4096 : 4096 + size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)
""".strip().splitlines()
_ALLOCATING = """
class Allocating(TorchDispatchMode):  # so do the tensors that the kernel allocates
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removeprefix("new_").partition("_")[0]
        return beside(made) if name in ("empty", "zeros", "ones", "full") and 0 not in made.stride() else made
""".strip().splitlines()
_MEMORY = """
def memory():
    pages = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.memory_allocated() if DEVICE == "cuda" else pages
def grows(call):  # whether each of the later rounds of calls adds about as much memory as the others
    for calls in (1, 8, 64):
        sizes = [[call() for _ in range(calls)] and memory() for _ in range(21)]
        added = sorted(b - a for a, b in zip(sizes[10:], sizes[11:]))
        if added[0] >= 128 << 10 and added[-1] <= 4 * added[0]:
            return not print(f"every call keeps another {added[5] / calls / 2**20:.3f} MiB")
    return False
""".strip().splitlines()
