"""Promises that kernels keep, made or not: the same bits twice, in any batch, in a CUDA graph. Torch-free.

A kernel is judged as one that promises it. What it neither promises nor keeps to is no failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from attnfuzz.cases.supported import why_unsupported
from attnfuzz.declaration import Declaration
from attnfuzz.isolation.outcomes import DeadlinePassed
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.registry import BATCH_INVARIANCE, DETERMINISM, GRAPH_REPLAY, OracleName, oracle_of
from attnfuzz.problems.attention import AttentionCase
from attnfuzz.problems.cases import Case, MergeStatesCase
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.verdict import Failure, is_fault

KeptName = Literal["deterministic", "batch_invariant", "graph_replay"]
KEPT: dict[KeptName, tuple[str, OracleName]] = {
    "deterministic": ("same bits twice", DETERMINISM.name),
    "batch_invariant": ("same bits in any batch", BATCH_INVARIANCE.name),
    "graph_replay": ("in CUDA graphs", GRAPH_REPLAY.name),
}
"""Fields of `Supports`: what their rows are called, and the oracle that holds a kernel to them."""
_BATCHES = {"cuda": (4, 16, 64, 256), "cpu": (4, 16)}
"""Rows together. Triton's interpreter takes minutes for more."""
_LENGTHS = {"cuda": (600, 33, 130, 64), "cpu": (130, 33, 17, 64)}


@dataclass(frozen=True, slots=True)
class Kept:
    """``status``: ``fail`` only of what the kernel promises; what it does not keep to else is ``unsupported``.

    ``up_to``: the largest batch in which it was kept, 0 for none. ``case`` and ``failure``: those where it was not.
    """

    name: KeptName
    promised: bool
    status: Literal["pass", "fail", "unsupported", "not_run"]
    up_to: int = 0
    case: Case | None = None
    failure: Failure | None = None
    why: str = ""


def what_is_kept(
    declaration: Declaration, runner: Runner, passed: Sequence[Case], device: str, why_not: Callable[[], str]
) -> Iterator[Kept]:
    """``passed``: cases that the kernel does right. One of them is enlarged; ``why_not``: why nothing is run any more.

    Raises what ``Runner.judge`` raises, but for a case that is too large.
    """
    for name in KEPT:
        if name == "graph_replay" and (why := _no_graphs(declaration, device)):
            yield Kept(name, bool(declaration.supports.graph_replay), why[0], why=why[1])
            continue
        batches = [one for one in _batches(name, declaration, passed, device) if _is_taken(declaration, one)]
        if batches or name == "deterministic":
            yield _kept(name, declaration, runner, batches, why_not)


def _kept(
    name: KeptName, declaration: Declaration, runner: Runner, batches: Sequence[Case], why_not: Callable[[], str]
) -> Kept:
    promised = bool(getattr(declaration.supports, name))
    said: dict[str, Any] = {"deterministic": True, name: True}
    asked = msgspec.structs.replace(declaration, supports=msgspec.structs.replace(declaration.supports, **said))
    oracle = KEPT[name][1]
    up_to, why = 0, why_not() or "no case passes that could be enlarged"
    for case in batches:
        if why := why_not():
            break
        try:
            verdict = runner.judge(asked, case, relations=oracle_of(oracle).relations)
        except CaseTooLarge as error:
            why = str(error)
            break
        except DeadlinePassed:
            why = why_not() or "it compiles itself"
            break
        failure = verdict.failure
        if failure is None and not verdict.not_runnable:
            up_to = getattr(case, "num_parts", 1)
        elif failure is not None and not promised and is_fault(failure.oracle, failure.kind):
            return Kept(name, promised, "unsupported", up_to, case, why=failure.message)  # no more than nobody promises
        elif failure is not None and failure.oracle in (oracle, DETERMINISM.name):
            status: Literal["fail", "unsupported"] = "fail" if promised else "unsupported"
            return Kept(name, promised, status, up_to, case, failure)
        else:
            why = verdict.not_runnable or f"the case of {getattr(case, 'num_parts', 1)} fails by itself"
            break
    return Kept(name, promised, "pass" if up_to else "not_run", up_to, why=why)


def _no_graphs(declaration: Declaration, device: str) -> tuple[Literal["unsupported", "not_run"], str] | None:
    """Where nothing is captured. Adapters say False of what an engine's server captures in another way."""
    if declaration.supports.graph_replay is False:
        return "unsupported", "it is declared not to be captured"
    return None if device == "cuda" else ("not_run", "graphs are captured on a GPU only")


def _batches(name: KeptName, declaration: Declaration, passed: Sequence[Case], device: str) -> Iterator[Case]:
    """A case that passed with as many rows as a server has together; of an open problem the cases that there are."""
    bundled = [one for one in passed if isinstance(one, AttentionCase | MergeStatesCase)]
    if not bundled:
        if name != "batch_invariant":
            yield from list(passed)[:2]
        return
    sizes = _BATCHES[device]
    usual = max(bundled, key=lambda one: (min(one.num_parts, sizes[0]), -one.work))
    for size in sizes[1:2] if name == "graph_replay" else sizes:
        try:
            yield _enlarged(usual, size, device, declaration.supports.max_seq_len or max(_LENGTHS[device]))
        except ValueError:  # needles of tokens that are no more, or a mask of other lengths
            return


def _enlarged(case: AttentionCase | MergeStatesCase, size: int, device: str, longest: int) -> Case:
    if isinstance(case, MergeStatesCase):
        return msgspec.structs.replace(case, num_tokens=size)
    seqs = [seq % case.num_seqs for seq in range(size)]
    many = msgspec.structs.replace(case, **{**case.of_sequences(seqs), **case.with_own_pages()})
    if getattr(case, "mask", None) is not None:
        return many
    lengths = [min(one, longest) for one in _LENGTHS[device]]
    return msgspec.structs.replace(many, **many.with_seq_lens([lengths[seq % len(lengths)] for seq in range(size)]))


def _is_taken(declaration: Declaration, case: Case) -> bool:
    return why_unsupported(declaration.supports, declaration.options, case) is None
