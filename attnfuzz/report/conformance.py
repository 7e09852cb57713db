"""Results of ``attnfuzz conformance``: lines for a terminal, JSON, and a page of kernels and features of inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from attnfuzz.conformance import Conformance, ConformanceOutcome, Examined
from attnfuzz.conformance.kept import KEPT, KeptName
from attnfuzz.corpus import FindingRecord, Regression, encode_regression
from attnfuzz.own_files import write_file
from attnfuzz.problems.cases import encode_case
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.report.files import rendered, write_json
from attnfuzz.report.findings import count, one_line

FORMAT = "attnfuzz.conformance/1"

_MOST_FEATURES = 6
_TITLES = {
    "paged_decode": "Attention",
    "masked_attention": "Masked attention",
    "latent_decode": "Latent attention",
    "merge_states": "Merging",
}
"""Of tables; kernels of a problem that is not here are in the first one, of an open problem in one by its name."""


class _Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    group: str
    feature: str
    status: str
    case: msgspec.Raw
    changes: tuple[str, ...] = ()
    cause: str = ""
    message: str = ""
    why: str = ""


class _Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``up_to``: the largest batch in which it was kept."""

    name: str
    promised: bool
    status: str
    up_to: int = 0
    message: str = ""
    why: str = ""


class _Kernel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    problem: str
    versions: dict[str, str]
    passed: int
    failed: int
    unsupported: int
    not_run: int
    kept: tuple[_Kept, ...]
    outcomes: tuple[_Outcome, ...]


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    set: int
    device: str
    versions: dict[str, str]
    absent: tuple[str, ...]
    kernels: tuple[_Kernel, ...]


@dataclass(frozen=True, slots=True)
class _Cause:
    """One way in which one kernel fails, numbered over all of them."""

    number: int
    kernel: str
    name: str
    message: str
    details: tuple[str, ...]
    case: str
    features: str
    cases: int
    regression: str


@dataclass(frozen=True, slots=True)
class _Cell:
    """``text`` is a mark or numbers of causes, ``title`` what is said when the pointer rests on it."""

    mood: str
    text: str = ""
    title: str = ""
    causes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Table:
    """``kept``: what each kernel keeps to, as rows."""

    title: str
    kernels: tuple[Examined, ...]
    kept: tuple[tuple[str, tuple[_Cell, ...]], ...]
    groups: tuple[tuple[str, tuple[tuple[str, tuple[_Cell, ...]], ...]], ...]


def print_examined(console: Console, kernel: Examined) -> None:
    """One line."""
    failed = kernel.count("fail")
    line = Text(kernel.declaration.target, style="bold red" if failed or kernel.broken else "green")
    of = "".join(f" ({package} {version})" for package, version in kernel.declaration.versions.items())
    parts = [f"{kernel.count('pass')} of {len(kernel.outcomes)} pass"]
    parts += [f"{failed} fail with {count(len(kernel.failing()), 'cause')}"] if failed else []
    parts += [f"{number} not supported" for number in (kernel.count("unsupported"),) if number]
    parts += [f"{number} not run" for number in (kernel.count("not_run"),) if number]
    parts += [f"does not keep to {KEPT[one.name][0]}, as it promises" for one in kernel.kept if one.status == "fail"]
    console.print(line.append(f"{of}: {', '.join(parts)}", style="default"), soft_wrap=True)


def print_causes(console: Console, conformance: Conformance) -> None:
    """Print each kernel's failures: its smallest case, and the features of inputs in which it shows."""
    for one in _causes(conformance):
        console.print()
        console.print(Text(f"{one.number}. {one.kernel}  {one.name}", style="bold"), soft_wrap=True)
        for line in (one.message, one.case, f"in {count(one.cases, 'case')}: {one.features}"):
            console.print(Text(f"   {line}"), soft_wrap=True)


def print_absent(console: Console, absent: Sequence[str]) -> None:
    """A line for each engine that is not there."""
    for sentence in absent:
        console.print(Text(f"left out: {sentence}", style="yellow"), soft_wrap=True)


def write_conformance(conformance: Conformance, path: Path) -> None:
    """Write all outcomes as JSON. Raises OSError."""
    document = _Document(
        format=FORMAT,
        set=conformance.version,
        device=conformance.device,
        versions=conformance.versions,
        absent=conformance.absent,
        kernels=tuple(map(_kernel, conformance.kernels)),
    )
    write_json(path, document)


def write_page(conformance: Conformance, path: Path) -> None:
    """Write kernels x features as one HTML page that needs nothing else. Raises OSError."""
    causes = list(_causes(conformance))
    titles = dict.fromkeys([*_TITLES.values(), *(_title(one) for one in conformance.kernels)])
    by_title = {title: tuple(one for one in conformance.kernels if _title(one) == title) for title in titles}
    tables = [_table(title, kernels, causes) for title, kernels in by_title.items() if kernels]
    page = rendered("conformance.html.jinja", result=conformance, tables=tables, causes=causes)
    write_file(path, page.encode())


def _kernel(kernel: Examined) -> _Kernel:
    return _Kernel(
        name=kernel.declaration.target,
        problem=str(kernel.declaration.problem),
        versions=kernel.declaration.versions,
        passed=kernel.count("pass"),
        failed=kernel.count("fail"),
        unsupported=kernel.count("unsupported"),
        not_run=kernel.count("not_run"),
        kept=tuple(
            _Kept(
                name=one.name,
                promised=one.promised,
                status=one.status,
                up_to=one.up_to,
                message=one.failure.message if one.failure is not None else "",
                why=one.why,
            )
            for one in kernel.kept
        ),
        outcomes=tuple(
            _Outcome(
                group=one.entry.group,
                feature=one.entry.feature,
                status=one.status,
                case=msgspec.Raw(encode_case(one.case)),
                changes=one.changes,
                cause=kernel.cause_of(one),
                message=one.failure.message if one.failure is not None else "",
                why=one.why,
            )
            for one in kernel.outcomes
        ),
    )


def _causes(conformance: Conformance) -> Iterator[_Cause]:
    number = 0
    for kernel in conformance.kernels:
        for name, outcomes in kernel.failing().items():
            smallest = outcomes[0]
            if smallest.failure is None:  # `failing` has none of those
                continue
            number += 1
            features = list(dict.fromkeys(f"{one.entry.group} {one.entry.feature}" for one in outcomes))
            more = f" and {len(features) - _MOST_FEATURES} more" if len(features) > _MOST_FEATURES else ""
            regression = Regression(
                problem=kernel.declaration.problem,
                kernel=kernel.declaration.target,
                case=smallest.case,
                finding=FindingRecord.of(smallest.failure),
            )
            yield _Cause(
                number=number,
                kernel=kernel.declaration.target,
                name=name,
                message=smallest.failure.message,
                details=smallest.failure.details,
                case=one_line(smallest.case),
                features=", ".join(features[:_MOST_FEATURES]) + more,
                cases=len(outcomes),
                regression=encode_regression(regression).decode(),
            )


def _title(kernel: Examined) -> str:
    problem = kernel.declaration.problem
    return problem.name if isinstance(problem, OpenProblem) else _TITLES.get(problem, _TITLES["paged_decode"])


def _kept(kernel: Examined, name: KeptName, numbers: dict[tuple[str, str], int]) -> _Cell:
    """Whether the kernel keeps to it, and in which batches; nothing where that was not asked."""
    promise = "promised" if getattr(kernel.declaration.supports, name) else "not promised"
    one = next((one for one in kernel.kept if one.name == name), None)
    if one is None:
        return _Cell("none", title=promise)
    upto = f" {one.up_to}" if one.up_to > 1 else ""
    said = f"; {one.failure.message if one.failure is not None else one.why}".rstrip("; ")
    if one.status == "fail":
        broken = next(found for found in kernel.broken if found.failure is one.failure)
        causes = (numbers[kernel.declaration.target, kernel.cause_of(broken)],)
        return _Cell("bad", f"✓{upto}, no" if upto else "no", promise + said, causes)
    if one.status == "not_run":
        return _Cell("left", "○", promise + said)
    if one.status == "pass":
        return _Cell("good", f"✓{upto}", promise + said)
    no = "no" if one.failure is not None else "–"
    return _Cell("none", f"✓{upto}, no" if upto else no, promise + said)


def _table(title: str, kernels: tuple[Examined, ...], causes: Sequence[_Cause]) -> _Table:
    numbers = {(one.kernel, one.name): one.number for one in causes}
    rows = dict.fromkeys((one.entry.group, one.entry.feature) for kernel in kernels for one in kernel.outcomes)
    cells = [
        (group, feature, tuple(_cell(kernel, group, feature, numbers) for kernel in kernels)) for group, feature in rows
    ]
    groups = dict.fromkeys(group for group, _, _ in cells)
    return _Table(
        title,
        kernels,
        tuple((row, tuple(_kept(kernel, name, numbers) for kernel in kernels)) for name, (row, _) in KEPT.items()),
        tuple((group, tuple((name, found) for of, name, found in cells if of == group)) for group in groups),
    )


def _cell(kernel: Examined, group: str, feature: str, numbers: dict[tuple[str, str], int]) -> _Cell:
    found = [one for one in kernel.outcomes if (one.entry.group, one.entry.feature) == (group, feature)]
    if failed := [one for one in found if one.status == "fail"]:
        ids = tuple(dict.fromkeys(numbers[kernel.declaration.target, kernel.cause_of(one)] for one in failed))
        said = failed[0].failure.message if failed[0].failure is not None else ""
        return _Cell("bad", f"{len(failed)}/{len(found)}", said, ids)
    left = [one for one in found if one.status == "not_run"]
    if passed := [one for one in found if one.status == "pass"]:
        text = "✓" if len(found) == 1 else f"✓ {len(passed)}"
        return _Cell(
            "good", f"{text} ○ {len(left)}" if left else text, _changes(passed) or (left[0].why if left else "")
        )
    if left:
        return _Cell("left", "○", left[0].why)
    if found:
        return _Cell("none", "–", found[0].why)
    return _Cell("none")


def _changes(outcomes: Sequence[ConformanceOutcome]) -> str:
    return ", ".join(dict.fromkeys(change for one in outcomes for change in one.changes))
