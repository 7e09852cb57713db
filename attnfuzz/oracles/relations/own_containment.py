"""Numbers that are not finite stay where a user's problem says that they belong.

A row of names (`TensorSpec.named_by`), as a sequence's row of the block table, names entries of which the reference
makes some results and not others: it is asked with NaN in all of them, in one head where there are several. A kernel
that is given these keeps the bits of all other results. One that reads them all the same, with a weight of 0, gives
NaN. Rows that depend on any entry of the row may show it: those of a prompt read a page with tokens after their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from attnfuzz.inputs.open_module import OpenValues, Target, asked_again
from attnfuzz.inputs.registry import Contents
from attnfuzz.mistake import WITHOUT_WEIGHT
from attnfuzz.oracles import registry
from attnfuzz.oracles.relations.page_relocation import named_groups
from attnfuzz.oracles.relations.relation import (
    Changed,
    FurtherRuns,
    Results,
    as_it_is,
    results_of,
    unequal_bits,
    where_bits_differ,
)
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.shapes import TensorSpec, tensor_specs
from attnfuzz.trials.trial import Trial
from attnfuzz.verdict import Cause, Failure

_WITH_NAN = ("float16", "bfloat16", "float32", "float64")
_FINITE = 3.0

Written = Mapping[str, tuple[Tensor, Tensor]]


class _Row(NamedTuple):
    """All that ``row`` of ``names`` names, of ``tensors``."""

    names: str
    row: int
    entries: Tensor
    tensors: dict[str, TensorSpec]


def applies(case: OpenCase) -> bool:
    return any(_groups(case))


def further(case: OpenCase, contents: Contents) -> FurtherRuns | None:
    values: OpenValues = contents.values
    row = _row(case, values.written)
    if row is None:
        return None
    kept = asked_again(case, values, _spoiled(values.written, row, math.nan))
    if not any(bool(one.any()) for one in kept.values()):
        return None

    def targets(tolerance: object) -> list[Target]:
        own = values.targets(tolerance)  # type: ignore[arg-type]  # passed on as it is
        return [replace(one, value=torch.where(kept[one.name], one.value, math.nan)) for one in own]

    def changed(number: float) -> Changed:
        written = _spoiled(values.written, row, number)
        words = f"with {number} in what row {row.row} of {row.names} names of {' and '.join(row.tensors)}"
        return Changed(words, case, replace(values, written=written, targets=targets))

    def wrong(one: Results, other: Results) -> dict[str, Tensor]:
        return {name: mask & kept[name] for name, mask in where_bits_differ(one, other).items()}

    def compare(one: Results, others: Sequence[Results]) -> Failure | None:
        details = ("no result is made of it but those that the reference makes of what that row names",)
        masks = wrong(one, others[0])
        found = unequal_bits(registry.CONTAINMENT, case, one, others[0], spoiled.words, details=details, masks=masks)
        return found and msgspec.structs.replace(found, kind="NaN in named entries")

    def refine(trial: Trial, failure: Failure) -> Failure:
        after = results_of(trial, changed(_FINITE))
        if any(bool(mask.any()) for mask in wrong(as_it_is(trial), after).values()):
            return failure
        words = "with a finite number there it is right, as where it has a weight of 0: 0 x NaN is NaN"
        cause = Cause(mistake=WITHOUT_WEIGHT, words=words)
        return msgspec.structs.replace(failure, message=f"{failure.message}; {words}", causes=(cause,))

    spoiled = changed(math.nan)
    return FurtherRuns([spoiled], compare, refine=refine)


def _groups(case: OpenCase) -> list[tuple[str, dict[str, TensorSpec]]]:
    """Each tensor of names with those that it names and that a kernel only reads, and that can hold NaN."""
    specs = tensor_specs(case)
    found = []
    for names, group, _ in named_groups(case):
        chosen = {name: one for name, one in group.items() if one.role == "input" and one.dtype in _WITH_NAN}
        if chosen and specs[names].role == "input":
            found.append((names, chosen))
    return found


def _row(case: OpenCase, written: Written) -> _Row | None:
    """The row that names most; None where nothing is written in what any row names."""
    for names, group in _groups(case):
        spec = next(iter(group.values()))
        holds = written[next(iter(group))][1].reshape(spec.shape[0], -1).any(1)
        ids, is_written = (one.reshape(max(1, len(one)), -1) for one in written[names])
        rows = []
        for row_ids, row_written in zip(ids.long(), is_written, strict=True):
            own = row_ids[row_written & (row_ids >= 0)] // spec.places
            rows.append(own[own < spec.shape[0]].unique())
        counts = [int(holds[own].sum()) for own in rows]
        if any(counts):
            number = counts.index(max(counts))
            return _Row(names, number, rows[number], group)
    return None


def _spoiled(written: Written, row: _Row, number: float) -> dict[str, tuple[Tensor, Tensor]]:
    """The tensors that are written, with ``number`` in place of all that is written in what the row names, in the last
    head."""
    found = dict(written)
    for name, spec in row.tensors.items():
        tensor, is_written = written[name]
        chosen = torch.zeros_like(is_written)
        chosen[row.entries] = True
        if "head" in spec.axes:
            axis = spec.axes.index("head")
            chosen.narrow(axis, 0, spec.shape[axis] - 1).fill_(False)
        found[name] = tensor.masked_fill(chosen & is_written, number), is_written
    return found
