"""A case as one Python file that needs no attnfuzz: exact inputs, expected results, bounds and the kernel's source.

The kernel is not imported here; its source text is taken from its files.
"""

from __future__ import annotations

import ast
import base64
import dataclasses
import math
import pprint
import sys
import textwrap
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import torch
from jaxtyping import Shaped
from torch import Tensor

import attnfuzz
from attnfuzz.campaign.saved.replay import preceding_for, runs_to_see
from attnfuzz.corpus import Regression
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.judging.leaks import LEAK
from attnfuzz.memory.arena import Arena
from attnfuzz.problems.cases import Case
from attnfuzz.problems.limits import CaseTooLarge, tensor_nbytes
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.registry import problem_of
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.report.files import TEMPLATES
from attnfuzz.report.findings import finding_lines
from attnfuzz.report.sources import kernel_sources
from attnfuzz.trials.expectations import bound_of
from attnfuzz.untrusted_text import only_printable

__all__ = [
    "MAX_TENSOR_BYTES",
    "ReproData",
    "ReproInputs",
    "TensorPlace",
    "pack",
    "repro_data",
    "repro_inputs",
    "repro_script",
]


_STUB = "attnfuzz_stub.py.jinja"
_PACKAGE = Path(attnfuzz.__file__).parent
_INTERPRETER = tuple(
    f"triton_compat/interpreter{part}.py" for part in ("", "_libdevice", "_objects", "_repairs", "_rewriting")
)
"""What sets up Triton's interpreter: modules that need nothing else of attnfuzz."""
_WITHOUT_TRITON = sys.stdlib_module_names | {"attnfuzz", "numpy", "torch"}
_WIDTH = 116


def repro_script(regression: Regression, declaration: Declaration) -> str:
    """The script for a saved case. ``declaration`` is that of its kernel.

    The cases that it needs before it run first. Raises CaseTooLarge for more tensors than a script can hold and
    KernelLoadError for a kernel without source.
    """
    if isinstance(regression.problem, OpenProblem):
        raise KernelLoadError(
            f"{regression.problem} is defined in a file of its own, whose inputs and reference a script does not hold: "
            "use attnfuzz replay"
        )
    case, preceding = regression.case, preceding_for(declaration, regression)
    _check_size((*preceding, case))
    data = repro_data(declaration, case)
    sources = kernel_sources(regression.kernel)
    files = {"attnfuzz/__init__.py": (TEMPLATES / _STUB).read_text(encoding="utf-8"), **sources.files}
    if interpreted := _may_use_triton(sources.files):
        files |= {f"attnfuzz/{name}": (_PACKAGE / name).read_text(encoding="utf-8") for name in _INTERPRETER}
    finding = regression.finding
    loader = jinja2.FileSystemLoader(TEMPLATES)
    scripts = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return scripts.get_template("repro.py.jinja").render(
        headline=_plain(f"{regression.kernel} fails {finding.oracle} on a case of {regression.problem}"),
        description=_plain("\n".join((finding.message, *finding_lines(finding, case)))),
        message=repr(finding.message),
        problem=repr(case.problem),
        scalars=repr(data.scalars),
        options=repr(_options(declaration, case)),
        results=repr(data.results),
        lse_unit=repr(lse_unit(declaration)),
        deterministic=repr(declaration.supports.deterministic),
        tensors=_literals(data.tensors),
        outputs=repr(_outputs(case)),
        padding_tokens=case.num_query_slots - case.num_rows,
        entry=repr(sources.entry),
        kernel=repr(sources.attribute),
        files={repr(path): _text_literal(text) for path, text in files.items()},
        interpreted=interpreted,
        storages=[_data_literal(text) for text in data.storages],
        expected={repr(name): _data_literal(text) for name, text in data.expected.items()},
        bounds={
            repr(device): {repr(name): _data_literal(text) for name, text in texts.items()}
            for device, texts in data.bounds.items()
            if device == "cpu" or texts != data.bounds["cpu"]
        },
        case=_comment(case),
        runs=runs_to_see(finding.failed, finding.runs),
        leaks=finding.kind == LEAK,
        preceding=[_preceding(declaration, one) for one in preceding],
    )


def _check_size(cases: Sequence[Case]) -> None:
    nbytes = sum(map(tensor_nbytes, cases))
    if nbytes > MAX_TENSOR_BYTES:
        cases_have = "the case has" if len(cases) == 1 else f"the {len(cases)} cases have"
        raise CaseTooLarge(
            f"{cases_have} {nbytes} bytes of tensors, more than the {MAX_TENSOR_BYTES} that a script can hold; "
            "use attnfuzz replay, or a smaller case"
        )


def _may_use_triton(files: Mapping[str, str]) -> bool:
    """Whether kernels could run in Triton's interpreter: another package that is imported may bring Triton along.

    So may an engine, which an adapter has imported by name.
    """
    local = {name for path in files for name in (Path(path).parts[0], Path(path).stem)}
    names = {name for text in files.values() for name in _imported(text)}
    return bool(names - _WITHOUT_TRITON - local) or any(map(_has_engine, files.values()))


def _has_engine(text: str) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "Engine" for node in ast.walk(ast.parse(text)))


def _imported(text: str) -> Iterator[str]:
    """The packages that ``text`` imports by their full names."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


def _preceding(declaration: Declaration, case: Case) -> dict[str, Any]:
    inputs = repro_inputs(declaration, case)
    return {
        "case": _comment(case),
        "scalars": repr(inputs.scalars),
        "options": repr(_options(declaration, case)),
        "tensors": repr(inputs.tensors),
        "outputs": repr(_outputs(case)),
        "storages": [_data_literal(text) for text in inputs.storages],
    }


def _outputs(case: Case) -> list[str]:
    return [name for name, spec in tensor_specs(case).items() if spec.role == "output"]


def _options(declaration: Declaration, case: Case) -> dict[str, Any]:
    return {name: choices[0] for name, choices in declaration.options.items()} | dict(case.options)


def _literals(values: Mapping[str, object]) -> dict[str, str]:
    return {repr(name): repr(value) for name, value in values.items()}


def _plain(text: str) -> str:
    """``text`` as it can stand in a docstring."""
    return only_printable(text).replace("\\", "/").replace('"""', "'''").strip('"')


def _comment(case: Case) -> str:
    fields = pprint.pformat(msgspec.to_builtins(case), width=_WIDTH - 2, sort_dicts=False)
    return textwrap.indent(fields, "# ")


def _text_literal(text: str) -> str:
    """Source code, readable as it is wherever a raw string can hold it."""
    is_plain = all(line.isprintable() for line in text.split("\n"))
    for quotes in ("'''", '"""'):
        if is_plain and quotes not in text and not text.endswith(("\\", quotes[0])):
            return f"r{quotes}{text}{quotes}"
    return repr(text)


def _data_literal(text: str) -> str:
    lines = textwrap.wrap(text, _WIDTH)
    return '"""\n' + "\n".join(lines) + '\n"""' if len(lines) > 1 else repr(text)


MAX_TENSOR_BYTES = 4 << 20
"""Of a case's tensors; a larger script could not be pasted anywhere."""

TensorPlace = tuple[int, str, tuple[int, ...], tuple[int, ...], int]
"""Number of the storage, dtype, shape, strides and offset in elements."""


@dataclass(frozen=True)
class ReproInputs:
    """``scalars`` and ``tensors`` are the kernel's inputs; ``storages``, in which the tensors lie, are packed."""

    storages: list[str]
    tensors: dict[str, TensorPlace]
    scalars: dict[str, Any]


@dataclass(frozen=True)
class ReproData(ReproInputs):
    """``expected`` and ``bounds`` are packed too; ``bounds`` are by device, then by result.

    ``results`` are the names of what the kernel returns.
    """

    results: list[str]
    expected: dict[str, str]
    bounds: dict[str, dict[str, str]]


def repro_inputs(declaration: Declaration, case: Case) -> ReproInputs:
    """Build ``case`` on the CPU, as the first run of the oracles does: everything dead or unwritten is NaN."""
    values = problem_of(case).values(case, "cpu", declaration.supports)
    return _inputs(declaration, case, values)


def repro_data(declaration: Declaration, case: Case) -> ReproData:
    """The inputs with what should come of them."""
    problem = problem_of(case)
    values = problem.values(case, "cpu", declaration.supports)
    inputs = _inputs(declaration, case, values)
    results = list(problem.results if declaration.supports.lse != "none" else problem.results[:1])
    expected = problem.reference(case, values)
    bounds = {
        device: bound_of(declaration, case, values, one_copy=one_copy)
        for device, one_copy in (("cpu", True), ("cuda", False))
    }
    return ReproData(
        **vars(inputs),
        results=results,
        expected=_pack_results(case, results, expected.out, expected.lse),
        bounds={device: _pack_results(case, results, bound.out, bound.lse) for device, bound in bounds.items()},
    )


def _inputs(declaration: Declaration, case: Case, values: Any) -> ReproInputs:
    arena = Arena("cpu", poison="nan", prefill="nan", capacity=tensor_nbytes(case))
    inputs = problem_of(case).build(case, arena, declaration.supports, values)
    fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    storages, tensors = _place({name: value for name, value in fields.items() if isinstance(value, Tensor)})
    scalars = {name: value for name, value in fields.items() if not isinstance(value, Tensor)}
    return ReproInputs(storages, tensors, scalars)


def pack(tensor: Shaped[Tensor, "..."]) -> str:
    """The bytes of ``tensor`` in order, compressed, as base64 text."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _place(tensors: dict[str, Tensor]) -> tuple[list[str], dict[str, TensorPlace]]:
    """Every storage that ``tensors`` are views of, and where each lies."""
    storages: dict[int, Tensor] = {}
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        storages.setdefault(storage.data_ptr(), torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
    numbers = {address: number for number, address in enumerate(storages)}
    places = {
        name: (
            numbers[tensor.untyped_storage().data_ptr()],
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )
        for name, tensor in tensors.items()
    }
    return [pack(storage) for storage in storages.values()], places


def _pack_results(case: Case, results: list[str], out: Tensor, lse: Tensor) -> dict[str, str]:
    """In the axes of what the kernel returns (of splits, merged)."""
    if problem_of(case).axes(case, results[-1])[0] == "head":
        lse = lse.T
    return {name: pack(part.double()) for name, part in zip(results, (out, lse), strict=False)}


def lse_unit(declaration: Declaration) -> float:
    """One unit of the kernel's log-sum-exp in natural logarithms."""
    return math.log(2) if declaration.supports.lse == "base2" else 1.0
