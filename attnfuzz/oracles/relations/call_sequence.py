"""The same call again after other calls: the same bits. And the other calls in turn do not depend on this one.

Kernels keep things between calls: workspaces that grow, plans and launch settings by shape, counters. One call, or the
same call twice, tells nothing of what is left over from another one with more tokens or other rows. So the other calls
are on cases of the same format, bigger and smaller ones.

And some keep results, to hand them out again for the same tensors. So V is negated in place, and the call made again on
the tensors that it has just been made on: the bits but for the sign are those of the call before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import singledispatch
from typing import Any, NamedTuple

import msgspec

from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.memory.allocations import TrackedAllocations
from attnfuzz.memory.arena import Arena
from attnfuzz.memory.patterns import bits
from attnfuzz.oracles import accuracy, registry
from attnfuzz.oracles.exception import interpreter_limit
from attnfuzz.oracles.relations.fresh_copy import fresh_copy
from attnfuzz.oracles.relations.relation import (
    Changed,
    FurtherRuns,
    Relation,
    Results,
    as_it_is,
    fits,
    results_of,
    unequal_bits,
)
from attnfuzz.oracles.relations.value_affinity import VALUE_AFFINITY
from attnfuzz.problems.cases import AttentionCase, Case, MergeStatesCase
from attnfuzz.problems.registry import Contents, problem_of
from attnfuzz.problems.supported import supports_case
from attnfuzz.trials.observation import KernelRaised, call
from attnfuzz.trials.trial import Trial
from attnfuzz.untrusted_text import text_of, type_name
from attnfuzz.verdict import Failure

__all__ = ["CALL_SEQUENCE", "Relative", "relatives_of"]

_MOST_MORE = 64
"""Tokens by which a sequence grows: past the ends of some pages, tiles and splits, and no longer than that takes."""
_OTHER_SEED = 0x5EED
_ROOM = ("extra_rows", "query_slack", "seq_slack", "padding_tokens")


class Relative(NamedTuple):
    """A case, and how its call is told: "a call with seq_lens=[10, 6]"."""

    case: Case
    words: str


def relatives_of(declaration: Declaration, case: Case) -> list[Relative]:
    """One with more tokens, at most twice as many, then one with half as many and another number of rows.

    Those that the kernel supports.
    """
    return [
        one
        for one in _made(case, declaration)
        if one.case != case and supports_case(declaration.supports, declaration.options, one.case) and fits(one.case)
    ]


@singledispatch
def _made(case: Case, declaration: Declaration) -> Iterator[Relative]:
    raise TypeError(f"no relatives are known of a case of {case.problem} in {declaration.target}")


@_made.register
def _(case: MergeStatesCase, declaration: Declaration) -> Iterator[Relative]:
    del declaration
    for num_tokens in (case.num_tokens + min(case.num_tokens, _MOST_MORE), max(1, case.num_tokens // 2)):
        other = msgspec.structs.replace(case, num_tokens=num_tokens, seed=case.seed ^ _OTHER_SEED)
        yield Relative(other, f"a call with num_tokens={num_tokens}")


@_made.register
def _(case: AttentionCase, declaration: Declaration) -> Iterator[Relative]:
    longest = declaration.supports.max_seq_len or math.inf
    more = tuple(int(min(length + min(length, _MOST_MORE), longest)) for length in case.seq_lens)
    half = tuple(-(-length // 2) for length in case.seq_lens)
    fewer = tuple(range(case.num_seqs - 1)) if case.num_seqs > 1 else (0, 0)
    for kept, lengths in ((tuple(range(case.num_seqs)), more), (fewer, half)):
        fields = case.of_sequences(kept)
        if any(fields.get("query_lens", (1,))):  # without a query token there is no call
            seq_lens = tuple(lengths[seq] for seq in kept)
            yield Relative(_with_lengths(case, fields, seq_lens), f"a call with seq_lens={list(seq_lens)}")


def _with_lengths(case: AttentionCase, fields: dict[str, Any], seq_lens: tuple[int, ...]) -> Any:
    values = msgspec.structs.replace(case.values, needles=(), seed=case.values.seed ^ _OTHER_SEED)
    changes: dict[str, Any] = {**fields, "values": values}
    changes |= {name: 0 for name in _ROOM if name in case.__struct_fields__}
    chosen = msgspec.structs.replace(case, **changes)
    return msgspec.structs.replace(chosen, **chosen.with_seq_lens(seq_lens))


_NEGATED = "when V is negated in place, and the same tensors are passed again"
_REASONS = (
    "the result depends on an earlier call; look for a workspace that is not cleared, a cache whose key leaves "
    "something out, or a counter"
)


def _applies(declaration: Declaration, case: Case) -> bool:
    del case
    return declaration.supports.deterministic


def _check(trial: Trial) -> Failure | None:
    for relative in relatives_of(trial.kernel.declaration, trial.case):
        failure = _of_relative(trial, relative) or _after(trial, relative)
        if failure is not None:
            return failure
    return _on_the_same_tensors(trial)


def _further(declaration: Declaration, case: Case, contents: Contents) -> FurtherRuns:
    relatives = relatives_of(declaration, case)
    again = [_again(relative, case, contents) for relative in relatives]

    def compare(one: Results, others: Sequence[Results]) -> Failure | None:
        found = (_bits(case, one, other, same) for other, same in zip(others[1::2], again, strict=True))
        return next(filter(None, found), None)

    def blame(trial: Trial, run: int, what: Failure | KernelRaised) -> Failure | None:
        failure = _raised(what) if isinstance(what, KernelRaised) else what
        return None if failure is None else _next_call(trial, relatives[run // 2], failure)

    runs = [run for relative, same in zip(relatives, again, strict=True) for run in (Changed("", relative.case), same)]
    return FurtherRuns(runs, compare, blame=blame)


def _of_relative(trial: Trial, relative: Relative) -> Failure | None:
    """The call of another case right after this one: wrong, and right in a fresh copy of the kernel."""
    failure = _judged(trial, trial.kernel, relative)
    return None if failure is None else _next_call(trial, relative, failure)


def _next_call(trial: Trial, relative: Relative, failure: Failure) -> Failure | None:
    """What it means that a relative's call failed."""
    fresh = fresh_copy(trial.kernel)
    if fresh is None or _judged(trial, fresh, relative) is not None:
        return None  # it is wrong by itself, or nobody can tell
    return msgspec.structs.replace(
        failure,
        oracle=registry.CALL_SEQUENCE.name,
        kind=f"next call: {failure.kind}",
        message=f"{relative.words} after this case gives {failure.message}; before any other call it is right",
        details=(*failure.details, _REASONS),
    )


def _judged(trial: Trial, kernel: Kernel, relative: Relative) -> Failure | None:
    other = Trial(
        kernel,
        relative.case,
        device=trial.device,
        tolerance=trial.reference.tolerance,
        twice=False,
        compile_clock=trial.compile_clock,
    )
    try:
        failure = accuracy.check(other)
    except KernelRaised as raised:
        if raised.is_a(KeyboardInterrupt):
            raise
        return _raised(raised)
    trial.observations.extend(other.observations)
    return failure


def _raised(raised: KernelRaised) -> Failure | None:
    """What a relative's call raised, in the words of a failure; None for what cannot run here at all."""
    if interpreter_limit(raised.error):
        return None
    name = type_name(raised.error)
    return Failure(
        oracle=registry.EXCEPTION.name, kind=name, message=f"{name}: {text_of(raised.error).partition(chr(10))[0]}"
    )


def _after(trial: Trial, relative: Relative) -> Failure | None:
    """The call of this case after that of another one."""
    same = _again(relative, trial.case, Contents(trial.reference.values_on(trial.device), None))
    return _bits(trial.case, as_it_is(trial), results_of(trial, same), same)


def _on_the_same_tensors(trial: Trial) -> Failure | None:
    """A call, and another one after V was negated in place: -1 times the result, if it is so in other memory."""
    case, problem = trial.case, problem_of(trial.case)
    arena = Arena(trial.device, poison="nan", prefill="nan")
    values = trial.reference.values_on(trial.device)
    inputs = problem.build(case, arena, trial.kernel.declaration.supports, values)
    one = _call(trial, inputs, "called on other tensors")
    _negate(inputs)
    if case.values_in_keys:  # the products stay
        inputs.q[..., : case.value_size].neg_()
    found = _call(trial, inputs, _NEGATED)
    out, *_ = one
    failure = unequal_bits(
        registry.CALL_SEQUENCE,
        case,
        {**one, out: -one[out]},
        found,
        _NEGATED,
        details=(_REASONS,),
        as_it_was="if the result of the call before is multiplied with -1",
    )
    return failure if failure is not None and VALUE_AFFINITY.check(trial) is None else None


def _call(trial: Trial, inputs: Any, words: str) -> Results:
    allocations = TrackedAllocations(trial.device, poison="nan", prefill="nan")
    try:
        results = call(trial.kernel, trial.case, inputs, allocations, wait=trial.wait)
    except KernelRaised as raised:
        raised.changed = words
        raise
    return {name: result.cpu().clone() for name, result in results.items()}


def _negate(inputs: Any) -> None:
    """V, in place; of a merge, both outputs."""
    for name in ("v", "v_cache", "prefix_output", "suffix_output"):
        tensor = getattr(inputs, name, None)
        if tensor is not None and tensor.dtype.itemsize == 1:
            bits(tensor).bitwise_xor_(0x80)  # both formats of 8 bits have their sign there, and torch has no negation
        elif tensor is not None:
            tensor.neg_()


def _again(relative: Relative, case: Case, contents: Contents) -> Changed:
    return Changed(f"after {relative.words}", case, contents.values, contents.placement)


def _bits(case: Case, one: Results, other: Results, same: Changed) -> Failure | None:
    return unequal_bits(registry.CALL_SEQUENCE, case, one, other, same.words, details=(_REASONS,), as_it_was="at first")


CALL_SEQUENCE = Relation(registry.CALL_SEQUENCE, _applies, _check, further=_further, alone_on=("cpu",))
