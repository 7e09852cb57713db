"""The same numbers in tensors with other strides, or in another layout of the cache: the same result, within bounds.

Not bit for bit: compilers and libraries choose how they load and add by strides and alignment.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.judging.trial import Trial
from attnfuzz.oracles.relations.bounded import too_far_apart
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.oracles.relations.transformed import Changed, fits
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import Case, PagedDecodeCase
from attnfuzz.problems.choices import layouts_of, stride_kinds_of, strided_tensors_of
from attnfuzz.problems.supported import supports_case

__all__ = ["LAYOUT"]


def _applies(declaration: Declaration, case: Case) -> bool:
    return next(_others(declaration, case), None) is not None


def _check(trial: Trial) -> Failure | None:
    for words, case in _others(trial.kernel.declaration, trial.case):
        failure = too_far_apart("layout", trial, Changed(words, case, trial.reference.values_on(trial.device)))
        if failure is not None:
            return failure
    return None


def _others(declaration: Declaration, case: Case) -> Iterator[tuple[str, Case]]:
    """The case in words and with other strides, if there are any, and in another layout."""
    for words, changed in (*_other_strides(declaration, case), *_other_layouts(declaration, case)):
        if supports_case(declaration.supports, declaration.options, changed) and fits(changed):
            yield words, changed


def _other_strides(declaration: Declaration, case: Case) -> Iterator[tuple[str, Case]]:
    if case.strides:
        yield "with contiguous tensors", msgspec.structs.replace(case, strides={})
        return
    supports = declaration.supports
    names = strided_tensors_of(case.problem, supports, case.layout if isinstance(case, PagedDecodeCase) else None)
    kinds = {name: stride_kinds_of(supports.strides, name)[1:2] for name in names}
    strides = {name: kind[0] for name, kind in kinds.items() if kind}
    if strides:
        yield "with rows that have gaps between them", msgspec.structs.replace(case, strides=strides)


def _other_layouts(declaration: Declaration, case: Case) -> Iterator[tuple[str, Case]]:
    if not isinstance(case, PagedDecodeCase):
        return
    for layout in layouts_of(declaration.supports):
        if layout != case.layout:
            try:
                yield f"in the layout {layout}", msgspec.structs.replace(case, layout=layout)
            except ValueError:  # a head size or strides that it does not have
                continue


LAYOUT = Relation("layout", _applies, _check, by_bounds=True)
