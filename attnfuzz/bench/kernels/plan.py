"""Which contender is timed on which shape with which options. Torch-free."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from attnfuzz.bench.kernels.messages import L2State, Mode
from attnfuzz.bench.kernels.shapes import PROBLEMS_OF, Shape
from attnfuzz.declaration import Declaration
from attnfuzz.problems.supports import OptionValue

__all__ = ["DEFAULT_PAGES", "Entry", "KernelBench", "entries"]

DEFAULT_PAGES = 16

Options = dict[str, OptionValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBench:
    """``suites``: shapes by name. ``options``: the values to try in place of the first that a kernel declares, or all
    that an engine's has.

    ``seconds``: of one measurement. ``budget_s``: after which none is begun.
    """

    suites: Mapping[str, Sequence[Shape]]
    options: Mapping[str, tuple[OptionValue, ...]]
    l2: tuple[L2State, ...] = ("cold", "warm")
    modes: tuple[Mode, ...] = ("eager", "graph")
    seconds: float = 0.05
    budget_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class Entry:
    """One contender on one shape: all ``choices`` of its options are timed. ``timed_on``: the shape that stands for it.

    Those that do not see pages are timed once for all page sizes.
    """

    suite: str
    shape: Shape
    timed_on: Shape
    contender: str
    is_reference: bool
    choices: tuple[Options, ...]


def entries(bench: KernelBench, kernels: Sequence[Declaration], references: Sequence[Declaration]) -> Iterator[Entry]:
    """Shape after shape, so that tensors are drawn once. All choices of the options of ``references`` are tried."""
    named = {kernel.target for kernel in kernels}
    contenders = [*kernels, *(one for one in references if one.target not in named)]
    for suite, shapes in bench.suites.items():
        for shape in shapes:
            for number, kernel in enumerate(contenders):
                if kernel.problem in PROBLEMS_OF[shape.kind]:
                    is_reference = number >= len(kernels)
                    sees_pages = kernel.problem.startswith("paged")
                    choices = _choices(kernel.options, bench.options, try_all=is_reference or bool(kernel.versions))
                    yield Entry(suite, shape, _timed_on(shape, sees_pages), kernel.target, is_reference, choices)


def _timed_on(shape: Shape, sees_pages: bool) -> Shape:
    return shape if sees_pages or shape.kind == "merge" else shape.in_pages_of(DEFAULT_PAGES)


def _choices(
    declared: Mapping[str, tuple[OptionValue, ...]],
    asked: Mapping[str, tuple[OptionValue, ...]],
    *,
    try_all: bool = False,
) -> tuple[Options, ...]:
    values = [asked.get(name, choices if try_all else choices[:1]) for name, choices in declared.items()]
    return tuple(dict(zip(declared, chosen, strict=True)) for chosen in itertools.product(*values))
