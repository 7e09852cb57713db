"""Symptoms of cases whose runs have been made, of one case or of many, found by a few operations on all of them.

Results in host memory are looked at together: those of all cases lie one after another, and what is found out element
by element is reduced to a number for each case. Those on a GPU, which are large, are looked at case by case, and only
the numbers are waited for.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.memory.image import RUNS
from attnfuzz.memory.patterns import bits, holds_prefill
from attnfuzz.numerics import error_ratio
from attnfuzz.trials.comparison import Reference, compare


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

    def any(self) -> bool:
        """Whether anything is wrong."""
        return any(self.damaged) or self.unwritten or self.differs or self.error_ratio > 1


@dataclass(frozen=True, slots=True)
class CaseRuns:
    """A case by its reference, the results of its first run and, if there was one, its second, and `RunChecks.damaged`.

    Results lie where the reference does.
    """

    reference: Reference
    runs: Sequence[Mapping[str, Tensor]]
    damaged: tuple[bool, ...]


def look(declaration: Declaration, seen: Sequence[CaseRuns]) -> list[RunChecks]:
    """Check the runs of each case, after a wait for the device."""
    firsts, pairs, compared = list[_Part](), list[_Part](), list[_Part]()
    for case, one in enumerate(seen):
        first, *second = one.runs
        firsts += ((case, (part,)) for part in first.values())
        pairs += ((case, (part, other[name])) for other in second for name, part in first.items())
        compared += ((case, (part.got, part.expected, part.bound)) for part in compare(one.reference, first))
    differ = partial(elements_differ, by_bits=declaration.supports.deterministic)
    found = [
        *_largest(0, firsts, lambda part: holds_prefill(part, RUNS[0])),
        *_largest(1, pairs, differ),
        *_largest(2, compared, error_ratio),
    ]
    numbers: list[float] = torch.cat([of_group.double() for *_, of_group in found]).tolist() if found else []
    largest = [[0.0, 0.0, 0.0] for _ in seen]
    for (question, case), number in zip(((q, case) for q, cases, _ in found for case in cases), numbers, strict=True):
        largest[case][question] = max(largest[case][question], number)
    return [
        RunChecks(one.damaged, bool(unwritten), bool(differs), ratio)
        for one, (unwritten, differs, ratio) in zip(seen, largest, strict=True)
    ]


_Part = tuple[int, tuple[Tensor, ...]]
"""The number of a case, and tensors of one shape, of which each element is looked at beside those of the others."""


def _largest(
    question: int, parts: Iterable[_Part], ask: Callable[..., Shaped[Tensor, " elements"]]
) -> Iterator[tuple[int, list[int], Shaped[Tensor, " cases"]]]:
    """For parts that can be asked together the `question`, their cases and the largest answer of an element of each."""
    groups: dict[tuple[object, ...], list[_Part]] = defaultdict(list)
    for case, tensors in parts:
        if tensors[0].numel():
            alone = len(groups) if tensors[0].is_cuda else None
            groups[(alone, *(tensor.dtype for tensor in tensors))].append((case, tensors))
    for group in groups.values():
        answers = ask(*map(_joined, zip(*(tensors for _, tensors in group), strict=True)))
        if answers.is_cuda:
            largest = answers.amax().view(1)
        else:
            starts = itertools.accumulate((tensors[0].numel() for _, tensors in group[:-1]), initial=0)
            largest = torch.from_numpy(np.maximum.reduceat(answers.numpy(), list(starts)))
        yield question, [case for case, _ in group], largest


def _joined(parts: Sequence[Tensor]) -> Shaped[Tensor, " elements"]:
    """All elements one after another."""
    return torch.cat([part.reshape(-1) for part in parts]) if len(parts) > 1 else parts[0].reshape(-1)


def elements_differ(
    one: Shaped[Tensor, "*shape"], other: Shaped[Tensor, "*shape"], *, by_bits: bool
) -> Bool[Tensor, "*shape"]:
    """Whether only one of them is NaN or, `by_bits` and of one dtype, bits differ of what is not NaN in both.

    Which of its many bit patterns a NaN has says nothing: that it is one is for `accuracy` to judge.
    """
    if by_bits and one.dtype == other.dtype:
        return (bits(one) != bits(other)) & ~(one.isnan() & other.isnan())
    return one.isnan() != other.isnan()
