"""Symptoms of many cases whose results are in host memory, found by a few operations on all of them.

`Trial.flags` says the same of one case. Here the results of all cases lie one after another, and what is found out
element by element is reduced to a number for each case.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Shaped
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.open_module import Target
from attnfuzz.inputs.reference import merge_all
from attnfuzz.memory.image import RUNS
from attnfuzz.memory.patterns import bits, holds_prefill
from attnfuzz.numerics import error_ratio
from attnfuzz.problems.cases import Case
from attnfuzz.trials.comparison import axes_of


@dataclass(frozen=True, slots=True)
class RunChecks:
    """Checks of the first two runs, made before any cause is looked for.

    `damaged`: per run, whether memory changed that may not. `unwritten`: an element still holds pre-fill. `differs`:
    the runs disagree. `error_ratio`: the largest error over bound of the first run.
    """

    damaged: tuple[bool, ...]
    unwritten: bool
    differs: bool
    error_ratio: float

    @classmethod
    def read(cls, flags: Sequence[float], *, runs: int) -> RunChecks:
        """From the numbers of `Trial.flags` of a trial of so many `runs`."""
        *damaged, unwritten, differs, error_ratio = flags
        return cls(tuple(map(bool, damaged[:runs])), bool(unwritten), bool(differs), error_ratio)

    def any(self) -> bool:
        """Whether anything is wrong."""
        return any(self.damaged) or self.unwritten or self.differs or self.error_ratio > 1


@dataclass(frozen=True, slots=True)
class HostResults:
    """A case with the results of its first run and, if there was one, its second: output first, then the LSE.

    `damaged`: as in `RunChecks`. `expectation`: an `Expectation`, or `Target`s of results in their order.
    """

    case: Case
    runs: Sequence[Sequence[Tensor]]
    expectation: Any
    damaged: tuple[bool, ...] = ()


def look(declaration: Declaration, seen: Sequence[HostResults]) -> list[RunChecks]:
    """Check the runs of each case; all results are on the host."""
    unwritten, differs = _look_at_bits(declaration, seen)
    ratios = _compare(declaration, seen)
    damaged = (one.damaged for one in seen)
    return list(map(RunChecks, damaged, unwritten, differs, ratios))


def _look_at_bits(declaration: Declaration, seen: Sequence[HostResults]) -> tuple[list[bool], list[bool]]:
    """Whether, in each case, elements were not written, and whether any differ between runs."""
    unwritten, differs = [False] * len(seen), [False] * len(seen)
    for group in _groups(seen, lambda one: tuple(tuple(part.dtype for part in run) for run in one.runs)):
        first, *second = zip(*(seen[i].runs for i in group), strict=True)
        for position in range(len(first[0])):
            ones, starts = _joined([results[position] for results in first])
            for i, held in zip(group, _any(holds_prefill(ones, RUNS[0]), starts), strict=True):
                unwritten[i] |= held
            for other in second:
                others, _ = _joined([results[position] for results in other])
                mask = elements_differ(ones, others, by_bits=declaration.supports.deterministic)
                for i, differ in zip(group, _any(mask, starts), strict=True):
                    differs[i] |= differ
    return unwritten, differs


def _compare(declaration: Declaration, seen: Sequence[HostResults]) -> list[float]:
    """The largest error over bound of each first run."""
    if any(isinstance(one.expectation, list) for one in seen):
        return [max(map(_ratio, one.runs[0], one.expectation), default=0.0) for one in seen]
    found = [0.0] * len(seen)
    unit = math.log(2) if declaration.supports.lse == "base2" else 1.0
    for group in _groups(seen, _kind):
        chosen = [seen[i] for i in group]
        split = chosen[0].case.partial_states and len(chosen[0].runs[0]) == 2
        worst = _worst_of_splits(chosen, unit) if split else _worst(chosen, unit)
        for i, ratio in zip(group, worst, strict=True):
            found[i] = ratio
    return found


def _ratio(result: Tensor, target: Target) -> float:
    ratio = error_ratio(result.double(), target.value, target.bound)
    return float(ratio.amax()) if ratio.numel() else 0.0


def _kind(one: HostResults) -> tuple[Any, ...]:
    """A key that cases share whose results can be joined."""
    out, *rest = one.runs[0]
    splits = tuple(out.shape[2:]) if one.case.partial_states else ()
    return out.dtype, len(rest), splits


def _worst(seen: Sequence[HostResults], unit: float) -> list[float]:
    """The largest ratio of each case."""
    out, starts = _joined([one.runs[0][0] for one in seen])
    expected = [one.expectation for one in seen]
    worst = _largest(
        out.double(), [part.expected.out for part in expected], [part.bound.out for part in expected], starts
    )
    if len(seen[0].runs[0]) > 1:
        lses = ((one.runs[0][1], axes_of("output_lse", one.case)[0] == "head") for one in seen)
        lse, starts = _joined([part.mT if is_turned else part for part, is_turned in lses])
        expected_lse, bounds = [part.expected.lse for part in expected], [part.bound.lse for part in expected]
        worst = np.maximum(worst, _largest(lse.double().mul_(unit), expected_lse, bounds, starts))
    return [float(ratio) for ratio in worst]


def _largest(
    got: Float64[Tensor, " elements"], expected: Sequence[Tensor], bounds: Sequence[Tensor], starts: Sequence[int]
) -> Any:
    ratio = error_ratio(got, _joined(expected)[0], _joined(bounds)[0])
    return np.maximum.reduceat(ratio.numpy(), starts)


def _worst_of_splits(seen: Sequence[HostResults], unit: float) -> list[float]:
    """As `_worst`, after merging; infinite where a split without tokens is not left as one."""
    out = torch.cat([one.runs[0][0].flatten(0, 1) for one in seen])
    lse = torch.cat([one.runs[0][1].flatten(0, 1) for one in seen]).double().mul_(unit)
    merged_out, merged_lse = merge_all(out, lse)
    expected = [one.expectation for one in seen]
    ratio = error_ratio(
        merged_out,
        torch.cat([part.expected.out.flatten(0, 1) for part in expected]),
        torch.cat([part.bound.out.flatten(0, 1) for part in expected]),
    ).amax(-1)
    lse_ratio = error_ratio(
        merged_lse,
        _joined([part.expected.lse for part in expected])[0],
        _joined([part.bound.lse for part in expected])[0],
    )
    worst = torch.maximum(ratio, lse_ratio).masked_fill_(_wrongly_empty(seen, out, lse), math.inf)
    starts = list(itertools.accumulate((one.runs[0][1].shape[:2].numel() for one in seen[:-1]), initial=0))
    return [float(value) for value in np.maximum.reduceat(worst.numpy(), starts)]


def _wrongly_empty(
    seen: Sequence[HostResults], out: Float[Tensor, "rows splits head_size"], lse: Float64[Tensor, "rows splits"]
) -> Bool[Tensor, " rows"]:
    """Rows of empty sequences with more than 0 and -inf in a split; others with no number beside an LSE of -inf."""
    unused = lse.isneginf()
    cases: list[Any] = [one.case for one in seen]
    lens = [seq_len for case in cases for seq_len in case.seq_lens]
    wrong = torch.zeros(len(lse), dtype=torch.bool, device="cpu")
    if not unused.any() and 0 not in lens:
        return wrong
    heads = [case.num_q_heads for case in cases for _ in case.seq_lens]
    lens_and_heads = torch.tensor([lens, heads], dtype=torch.int64, device="cpu")
    of_empty = torch.repeat_interleave(lens_and_heads[0] == 0, lens_and_heads[1])[:, None].expand_as(unused)
    chosen = unused | of_empty
    numbers = out[chosen]
    is_wrong = torch.where(of_empty[chosen], (numbers != 0).any(-1), ~numbers.isfinite().all(-1)) | ~unused[chosen]
    wrong[chosen.nonzero()[is_wrong, 0]] = True
    return wrong


def _groups(seen: Sequence[HostResults], key: Callable[[HostResults], Any]) -> list[list[int]]:
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, one in enumerate(seen):
        groups[key(one)].append(i)
    return list(groups.values())


def _joined(parts: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """All elements one after another, and where each part starts."""
    starts = list(itertools.accumulate((part.numel() for part in parts[:-1]), initial=0))
    return torch.cat([part.reshape(-1) for part in parts]), starts


def elements_differ(
    one: Shaped[Tensor, "*shape"], other: Shaped[Tensor, "*shape"], *, by_bits: bool
) -> Bool[Tensor, "*shape"]:
    """Whether only one of them is NaN or, `by_bits` and of one dtype, bits differ of what is not NaN in both.

    Which of its many bit patterns a NaN has says nothing: that it is one is for `accuracy` to judge.
    """
    if by_bits and one.dtype == other.dtype:
        return (bits(one) != bits(other)) & ~(one.isnan() & other.isnan())
    return one.isnan() != other.isnan()


def _any(mask: Bool[Tensor, " elements"], starts: Sequence[int]) -> list[bool]:
    """Whether any element of each part is true."""
    if not mask.any():
        return [False] * len(starts)
    return [bool(part) for part in np.logical_or.reduceat(mask.numpy(), starts)]
