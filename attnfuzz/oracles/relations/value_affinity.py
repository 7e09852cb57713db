"""V times -2**n: the result times -2**n, bit for bit.

The result is linear in V. (Where V is a part of K, queries are divided there by what V is multiplied with: the products
stay.) Rounding commutes with a change of sign, whether to nearest or towards zero, and with powers
of two as long as nothing over- or underflows; so do sums in any order. What this sees: whatever is added to the result
or compared with a constant (an epsilon, a clamp, a threshold below which values count as zero), while it is smaller
than the bound, and LSEs that depend on V.

For a power of two, every number that a kernel may keep on the way has to be far from both ends of its range:

* float16 holds nothing below 2**-24 and has fewer digits below 2**-14. That concerns V, which is scaled up and so keeps
  its digits, the results, of which only larger ones are compared (2**-14 itself may have been rounded up), and partial
  results in the input dtype: a kernel that may keep such is only asked about the sign.
* V stays below 2**15, so that no weighted average of it leaves float16. In bfloat16 and float32 it stays below 2**40,
  and the power itself within float32.
* An 8-bit cache holds -V, but not V times powers of two: its scale is multiplied with those. A kernel that rounds V
  times its scale to float16 is only asked about the sign.
* Products of weights and V that float32 holds as subnormal numbers, or not at all, have fewer digits in one of the two
  runs. However small, such a product decides between two roundings of a sum that lies half-way. So where scores may
  lie as far apart as that takes, the kernel is only asked about the sign, which changes no digit of any product.

That the result follows V + b too is what accuracy holds it to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.registry import Contents
from attnfuzz.mistake import V_SCALE
from attnfuzz.numerics.arithmetic import SMALLEST_NORMAL_FLOAT32
from attnfuzz.oracles import registry
from attnfuzz.oracles.relations.relation import (
    Changed,
    FurtherRuns,
    Relation,
    Results,
    one_by_one,
    unequal_bits,
    where_bits_differ,
)
from attnfuzz.problems.cases import AttentionCase, BundledCase, Case
from attnfuzz.trials.trial import Trial
from attnfuzz.values import LogicalAttention, LogicalStates
from attnfuzz.verdict import Cause, Failure

_LARGEST = {"float16": 15, "bfloat16": 40, "float32": 40}
_SMALLEST = {"float16": -14, "bfloat16": -60, "float32": -60}
"""Exponents of two."""
_MOST_DOUBLINGS = 100
_LOG_SMALLEST_PRODUCT = math.log(SMALLEST_NORMAL_FLOAT32) + 2.0
"""With a margin for what rounding does to a score and to its exponential."""


def _applies(declaration: Declaration, case: BundledCase) -> bool:
    return declaration.supports.deterministic and any(getattr(case, "seq_lens", (1,)))


def _further(declaration: Declaration, case: Case, contents: Contents) -> FurtherRuns:
    power = _power(declaration, case, contents.values)

    def refine(trial: Trial, failure: Failure) -> Failure:
        """If the sign alone shows it, that is the simpler thing to say."""
        by_sign = one_by_one(lambda _, case, contents: _times(-1.0, case, contents))
        return (power and by_sign(trial)) or failure

    return replace(_times(-(2.0**power), case, contents), refine=refine)


def _power(declaration: Declaration, case: Case, values: LogicalAttention | LogicalStates) -> int:
    """How often V can be doubled."""
    numerics = declaration.numerics
    rounds_v = isinstance(values, LogicalAttention) and values.kv_scales is not None and numerics.dequantised == "input"
    if case.dtype == "float16" and (numerics.partials != "float32" or rounds_v):
        return 0
    if case.scores_read_values:  # a query divided so often would have fewer digits
        return 0
    exact = values.dequantised() if isinstance(values, LogicalAttention) else values
    sizes = torch.cat([part.abs().flatten() for part in _scaled_parts(exact).values()])
    largest = float(sizes.max())
    if not largest or math.log(float(sizes[sizes > 0].min())) - _span(case, exact) < _LOG_SMALLEST_PRODUCT:
        return 0
    return min(max(0, _LARGEST[case.dtype] - math.ceil(math.log2(largest))), _MOST_DOUBLINGS)


def _span(case: Case, values: LogicalAttention | LogicalStates) -> float:
    """At most how far two logits of a row lie apart, whichever sequences the keys are of."""
    if isinstance(values, LogicalStates):
        apart = (values.prefix_lse - values.suffix_lse).abs()
        return float(apart[apart.isfinite()].max()) if apart.isfinite().any() else 0.0
    case = cast(AttentionCase, case)
    variant = case.variant
    span = largest = 0.0
    for head in range(case.num_kv_heads):
        of_group = slice(head * case.gqa_ratio, (head + 1) * case.gqa_ratio)
        scores = values.q[:, of_group].flatten(0, 1).float() @ values.k[:, head].float().T
        span = max(span, case.scale * float((scores.amax(1) - scores.amin(1)).max()))
        largest = max(largest, case.scale * float(scores.abs().max()))
    if variant.soft_cap is not None:
        span = min(span, 2 * variant.soft_cap)
    for name, numbers in variant.per_head_numbers(case.num_q_heads, case.seed).items():
        if name == "alibi_slopes":
            span += max(numbers) * max(case.seq_lens)
        elif weighty := [abs(number) for number in numbers if math.isfinite(number)]:  # a sink lies beside all scores
            span += max(weighty) + largest
    return span


def _times(factor: float, case: Case, contents: Contents) -> FurtherRuns:
    what = "V" if isinstance(contents.values, LogicalAttention) else "both outputs"
    words = "-1" if factor == -1 else f"-2**{math.frexp(factor)[1] - 1}"
    scaled = _scaled(contents.values, factor)
    by_scale = isinstance(scaled, LogicalAttention) and scaled.kv_scales is not None and factor != -1
    if isinstance(scaled, LogicalAttention) and case.values_in_keys:
        scaled = _with_same_scores(case, scaled, factor)
    how = f"{what} times -1 and its scale times {words[1:]}" if by_scale else f"{what} times {words}"
    changed = Changed(f"with {how}", case, scaled, contents.placement)

    def compare(one: Results, others: Sequence[Results]) -> Failure | None:
        (found,) = others
        expected, is_sure = _expected(one, factor, case)
        masks = {name: mask & is_sure.get(name, True) for name, mask in where_bits_differ(expected, found).items()}
        failure = unequal_bits(
            registry.VALUE_AFFINITY,
            case,
            expected,
            found,
            changed.words,
            masks=masks,
            as_it_was=f"if the original result is multiplied with {words}",
            details=(f"the result is linear in {what}, and such a factor changes no digit of it",),
        )
        if failure is not None and by_scale and (cause := _of_scale(one, found, factor)):
            return msgspec.structs.replace(failure, message=f"{failure.message}; {cause.words}", causes=(cause,))
        overflows = any(bool((mask & ~found[name].isfinite()).any()) for name, mask in masks.items())
        if failure is None or case.dtype != "float16" or not overflows:
            return failure
        message = f"{failure.message}; a sum of weights x V is kept in float16, perhaps, and overflows at 65504"
        return msgspec.structs.replace(failure, message=message, maybe=("sums_rounded",))

    return FurtherRuns([changed], compare)


def _of_scale(one: Results, found: Results, factor: float) -> Cause | None:
    """The mistake with V's scale, which was multiplied by the size of ``factor``, if it is plain."""
    name, out = next(iter(one.items()))
    for times, words in (
        (1.0, "the scale of V makes no difference"),
        (factor * factor, "the result grows as the square of the scale of V"),
    ):
        if torch.equal(found[name], (-times * out.double()).to(out.dtype)):
            return Cause(mistake=V_SCALE, way=words, words=words)
    return None


def _scaled(values: LogicalAttention | LogicalStates, factor: float) -> LogicalAttention | LogicalStates:
    if isinstance(values, LogicalAttention) and values.kv_scales is not None:
        k_scale, v_scale = values.kv_scales
        scales = torch.stack((k_scale, v_scale * abs(factor)))
        return replace(values, v=values.v * math.copysign(1.0, factor), kv_scales=scales)
    scaled: Any = {name: part * factor for name, part in _scaled_parts(values).items()}
    return replace(values, **scaled)


def _with_same_scores(case: Case, values: LogicalAttention, factor: float) -> LogicalAttention:
    """``values``, whose V has been multiplied, with K that has it too, and queries that make up for it."""
    q, k, size = values.q.clone(), values.k.clone(), case.value_size
    k[..., :size] = values.v
    q[..., :size] /= factor
    return replace(values, q=q, k=k)


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
        is_sure = scaled.isfinite() & (out.abs().double() > 2.0 ** _SMALLEST[case.dtype])
    return {**results, name: scaled}, {name: is_sure}


VALUE_AFFINITY = Relation(registry.VALUE_AFFINITY, _applies, one_by_one(_further), further=_further)
