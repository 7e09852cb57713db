"""Results that depend on what output and workspaces held before the kernel ran."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from attnfuzz.explaining.rig import Rig
from attnfuzz.judging.words import ranges, shape_of
from attnfuzz.memory.patterns import bits, holds_prefill
from attnfuzz.problems.cases import Case, MergeStatesCase

__all__ = ["Unwritten", "find_unwritten"]


@dataclass(frozen=True)
class Unwritten:
    """`lines` say which elements; `rows` are those that have any.

    `lacks_lse`: there is no LSE at all beside the output, which says nothing about any row.
    """

    lines: tuple[str, ...]
    rows: frozenset[int]
    lacks_lse: bool = False


def find_unwritten(rig: Rig) -> Unwritten:
    """Compare runs with different pre-fill. Raises what `Rig.run` raises."""
    rig.reset()
    one = rig.run(prefill="finite")
    rig.reset()
    rig.prefill("low")
    third = rig.run(prefill="low")
    rig.reset()
    rig.prefill("nan")
    other = rig.run(prefill="nan")
    lines, rows, lacks_lse = [], set(), False
    for name, part in one.items():
        differs = bits(part) != bits(other[name])
        if bool(differs.any()):
            held = holds_prefill(other[name], "nan") & holds_prefill(third[name], "low")
            what = "is not written" if torch.equal(held, differs) else "is made of memory that was never written"
            lines.append(f"{name}{_where(name, differs, rig.case)} {what}")
            if name in ("lse", "output_lse") and bool((held & differs).all()):
                lacks_lse = True
            else:
                rows |= _rows_of(differs, rig.case)
    if any("made of" in line for line in lines):
        lines += _workspaces(rig)
    return Unwritten(tuple(lines), frozenset(rows), lacks_lse)


def _workspaces(rig: Rig) -> Iterator[str]:
    """What the kernel allocated and did not write in the last run, results aside."""
    for workspace in rig.workspaces:
        held = holds_prefill(workspace, "nan")
        if bool(held.any()) and not bool(held.all()):
            axes = tuple(f"index along axis {i}:" for i in range(held.dim()))
            dtype = str(workspace.dtype).removeprefix("torch.")
            where = _along(held, axes) or "some elements"
            yield f"not written in its workspace {shape_of(dtype, workspace.shape)}: {where}"


def _where(name: str, differs: Bool[Tensor, "..."], case: Case) -> str:
    where = _along(differs, _axes(name, differs.dim(), case))
    return f"[{where}]" if where else ""


def _along(differs: Bool[Tensor, "..."], axes: tuple[str, ...]) -> str:
    """Along which axes only some indices are concerned."""
    parts = []
    for axis, label in enumerate(axes):
        others = [other for other in range(differs.dim()) if other != axis]
        some = differs.any(others) if others else differs
        if not bool(some.all()):
            parts.append(f"{label} {ranges(some.nonzero()[:, 0].tolist())}")
    return ", ".join(parts)


def _axes(name: str, count: int, case: Case) -> tuple[str, ...]:
    if isinstance(case, MergeStatesCase):
        heads_first = name.endswith("lse") and case.lse_layout == "HT"
        return (*(("head", "token") if heads_first else ("token", "head")), "dim")[:count]
    if name.startswith("partial"):
        return ("seq", "head", "split", "dim")[:count]
    return ("token" if case.problem == "paged_attention" else "seq", "head", "dim")[:count]


def _rows_of(differs: Bool[Tensor, "..."], case: Case) -> set[int]:
    if isinstance(case, MergeStatesCase) and differs.dim() == 2 and case.lse_layout == "HT":
        differs = differs.mT
    rows: list[int] = (
        differs.flatten(0, 1).flatten(1).any(-1).nonzero()[:, 0].tolist()
        if differs.dim() > 2
        else (differs.flatten().nonzero()[:, 0].tolist())
    )
    return set(rows)
