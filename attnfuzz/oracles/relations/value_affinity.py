"""V times -2**n: the result times -2**n, bit for bit.

The result is linear in V. Rounding commutes with a change of sign, whether to nearest or towards zero, and with powers
of two as long as nothing over- or underflows; so do sums in any order. What this sees: whatever is added to the result
or compared with a constant (an epsilon, a clamp, a threshold below which values count as zero), while it is smaller
than the bound, and LSEs that depend on V.

For a power of two, every number that a kernel may keep on the way has to be far from both ends of its range:

* float16 holds nothing below 2**-24 and has fewer digits below 2**-14. That concerns V, which is scaled up and so keeps
  its digits, the results, of which smaller ones are not compared, and partial results in the input dtype: a kernel that
  may keep such is only asked about the sign.
* V stays below 2**15, so that no weighted average of it leaves float16. In bfloat16 and float32 it stays below 2**40.
* Products with weights below 2**-60 of the result may vanish in float32, where they do not count.

That the result follows V + b too is what accuracy holds it to.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.oracles.relations.transformed import (
    Changed,
    Results,
    as_it_is,
    results_of,
    unequal_bits,
    where_bits_differ,
)
from attnfuzz.oracles.trial import Trial
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import Case, MergeStatesCase
from attnfuzz.values import LogicalAttention, LogicalStates

__all__ = ["VALUE_AFFINITY"]

_LARGEST = {"float16": 15, "bfloat16": 40, "float32": 40}
_SMALLEST = {"float16": -14, "bfloat16": -60, "float32": -60}
"""Exponents of two."""


def _applies(declaration: Declaration, case: Case) -> bool:
    return declaration.supports.deterministic and (isinstance(case, MergeStatesCase) or any(case.seq_lens))


def _check(trial: Trial) -> Failure | None:
    values = trial.reference.values_on(trial.device)
    power = _power(trial, values)
    failure = _failure(trial, values, -(2.0**power))
    if failure is not None and power:
        return _failure(trial, values, -1.0) or failure
    return failure


def _power(trial: Trial, values: LogicalAttention | LogicalStates) -> int:
    """How often V can be doubled."""
    case = trial.case
    if case.dtype == "float16" and trial.kernel.declaration.numerics.partials != "float32":
        return 0
    largest = max(float(part.abs().max()) for part in _scaled_parts(values).values())
    return max(0, _LARGEST[case.dtype] - math.ceil(math.log2(largest))) if largest else 0


def _failure(trial: Trial, values: LogicalAttention | LogicalStates, factor: float) -> Failure | None:
    case = trial.case
    what = "both outputs" if isinstance(case, MergeStatesCase) else "V"
    words = "-1" if factor == -1 else f"-2**{math.frexp(factor)[1] - 1}"
    scaled: Any = {name: part * factor for name, part in _scaled_parts(values).items()}
    changed = Changed(f"with {what} times {words}", case, replace(values, **scaled))
    expected, is_sure = _expected(as_it_is(trial), factor, case)
    found = results_of(trial, changed)
    masks = {name: mask & is_sure.get(name, True) for name, mask in where_bits_differ(expected, found).items()}
    return unequal_bits(
        "value_affinity",
        case,
        expected,
        found,
        changed.words,
        masks=masks,
        as_it_was=f"from the result as the case is, times {words}",
        details=(f"the result is linear in {what}, and the factor changes no digit",),
    )


def _scaled_parts(values: LogicalAttention | LogicalStates) -> dict[str, Float[Tensor, "..."]]:
    if isinstance(values, LogicalStates):
        return {"prefix_output": values.prefix_output, "suffix_output": values.suffix_output}
    return {"v": values.v}


def _expected(results: Results, factor: float, case: Case) -> tuple[Results, dict[str, Bool[Tensor, "..."]]]:
    """The results of the run on the case, times `factor` but for the LSE; and where that holds for every bit."""
    name, out = next(iter(results.items()))
    scaled = (out.double() * factor).to(out.dtype)
    is_sure = torch.ones_like(out, dtype=torch.bool)
    if abs(factor) != 1:
        is_sure = scaled.isfinite() & (out.abs().double() >= 2.0 ** _SMALLEST[case.dtype])
    return {**results, name: scaled}, {name: is_sure}


VALUE_AFFINITY = Relation("value_affinity", _applies, _check)
