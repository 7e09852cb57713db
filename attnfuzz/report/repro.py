"""A case as one Python file that needs no attnfuzz: exact inputs, expected results, bounds and the kernel's source.

The kernel is not imported here; its source text is taken from its files.
"""

from __future__ import annotations

import ast
import pprint
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import msgspec

import attnfuzz
from attnfuzz.campaign.saved_run import preceding_for, runs_to_see
from attnfuzz.corpus import Regression
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.execution.leaks import LEAK
from attnfuzz.problems.cases import Case, MergeStatesCase
from attnfuzz.problems.limits import CaseTooLarge, tensor_nbytes
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.report.headline import finding_lines
from attnfuzz.report.repro_data import MAX_TENSOR_BYTES, lse_unit, repro_data, repro_inputs
from attnfuzz.report.sources import kernel_sources
from attnfuzz.said import only_printable

__all__ = ["repro_script"]

_TEMPLATES = Path(__file__).parent / "templates"
_STUB = "attnfuzz_stub.py.jinja"
_REPAIRS = Path(attnfuzz.__file__).parent / "execution" / "interpreter_repairs.py"
_WITHOUT_TRITON = sys.stdlib_module_names | {"attnfuzz", "numpy", "torch"}
_WIDTH = 116


def repro_script(regression: Regression, declaration: Declaration) -> str:
    """The script for a saved case. ``declaration`` is that of its kernel.

    The cases that it needs before it run first. Raises CaseTooLarge for more tensors than a script can hold and
    KernelLoadError for a kernel without source.
    """
    if isinstance(regression.case, OpenCase):
        raise KernelLoadError(
            f"{regression.problem} is defined in a file of its own, whose inputs and reference a script does not hold: "
            "use attnfuzz replay"
        )
    case, preceding = regression.case, preceding_for(declaration, regression)
    _check_size((*preceding, case))
    data = repro_data(declaration, case)
    sources = kernel_sources(regression.kernel)
    files = {"attnfuzz/__init__.py": (_TEMPLATES / _STUB).read_text(encoding="utf-8"), **sources.files}
    if interpreted := _may_use_triton(sources.files):
        files["attnfuzz/interpreter_repairs.py"] = _REPAIRS.read_text(encoding="utf-8")
    finding = regression.finding
    template = _environment().get_template("repro.py.jinja")
    return template.render(
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
        padding_tokens=0 if isinstance(case, MergeStatesCase) else case.num_query_slots - case.num_rows,
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


@cache
def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(_TEMPLATES)
    return jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)


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
