"""Calls the kernel again after other calls, and compares bits. The other calls must not depend on this one either.

Kernels keep things between calls: workspaces that grow, plans and launch settings by shape, counters. One call, or the
same call twice, tells nothing of what is left over from another one. So the other calls are on cases of the same
format, bigger and smaller ones, and on cases whose tensors have the same shapes and which differ from this one in one
respect: scale, strides, dtype, where pages lie. All are made one after the other, each is held to its own error bounds,
and the case is run once more at the end. Which of them is to blame is looked for where that shows something.

And some keep results, to hand them out again for the same tensors. So V is negated in place, and the call made again on
the tensors that it has just been made on: the bits but for the sign are those of the call before. Or lengths: those
of a call are overwritten by shorter ones, and the bits are those of new tensors.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from copy import copy
from functools import singledispatch
from typing import Any, NamedTuple

import msgspec
import torch

from attnfuzz.cases.same_shapes import twins_of
from attnfuzz.cases.supported import supports_case
from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.inputs.registry import Contents, problem_of
from attnfuzz.memory.allocations import TrackedAllocations
from attnfuzz.memory.arena import Arena
from attnfuzz.memory.patterns import bits, prefill_
from attnfuzz.mistake import KEPT_BETWEEN_CALLS
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
from attnfuzz.problems.boundaries import num_splits_of
from attnfuzz.problems.cases import AttentionCase, Case, MergeStatesCase, case_number
from attnfuzz.problems.formats import format_key, format_of
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.shapes import tensor_specs
from attnfuzz.trials.observation import KernelRaised, call
from attnfuzz.trials.trial import Trial
from attnfuzz.untrusted_text import text_of, type_name
from attnfuzz.verdict import Cause, Failure

_MOST_MORE = 64
"""Tokens by which a sequence grows: past the ends of some pages, tiles and splits, and no longer than that takes."""
_OTHER_SEED = 0x5EED
_SEVERAL_TILES = 32
"""Tokens, from which on it shows in the bits how a sequence is cut into splits."""
_ROOM = ("extra_rows", "query_slack", "seq_slack", "padding_tokens")


class OtherCall(NamedTuple):
    """A case, and how its call is told: "a call with seq_lens=[10, 6]", "the same call with scale=0.5"."""

    case: Case
    words: str
    is_twin: bool = False


def other_calls_of(declaration: Declaration, case: Case) -> list[OtherCall]:
    """One with more tokens, at most twice as many, then one with half as many and another number of rows.

    Then those of the same shapes. All are such as the kernel supports.
    """
    supports, options = declaration.supports, declaration.options
    others = [
        one for one in _made(case, declaration) if one.case != case and supports_case(supports, options, one.case)
    ]
    twins = twins_of(case, supports=supports, options=options)
    return [
        one
        for one in (*others, *(OtherCall(twin.case, f"the same call {twin.words}", is_twin=True) for twin in twins))
        if fits(one.case)
    ]


@singledispatch
def _made(case: Case, declaration: Declaration) -> Iterator[OtherCall]:
    raise TypeError(f"no other calls are known of a case of {case.problem} in {declaration.target}")


@_made.register
def _(case: MergeStatesCase, _: Declaration) -> Iterator[OtherCall]:
    for num_tokens in (case.num_tokens + min(case.num_tokens, _MOST_MORE), max(1, case.num_tokens // 2)):
        other = msgspec.structs.replace(case, num_tokens=num_tokens, seed=case.seed ^ _OTHER_SEED)
        yield OtherCall(other, f"a call with num_tokens={num_tokens}")


@_made.register
def _(case: AttentionCase, declaration: Declaration) -> Iterator[OtherCall]:
    longest = declaration.supports.max_seq_len or math.inf
    more = tuple(int(min(length + min(length, _MOST_MORE), longest)) for length in case.seq_lens)
    half = tuple(-(-length // 2) for length in case.seq_lens)
    fewer = tuple(range(case.num_seqs - 1)) if case.num_seqs > 1 else (0, 0)
    for kept, lengths in ((tuple(range(case.num_seqs)), more), (fewer, half)):
        fields = case.of_sequences(kept)
        if any(fields.get("query_lens", (1,))):  # without a query token there is no call
            seq_lens = tuple(lengths[seq] for seq in kept)
            yield OtherCall(_with_lengths(case, fields, seq_lens), f"a call with seq_lens={list(seq_lens)}")


@_made.register
def _(case: OpenCase, _: Declaration) -> Iterator[OtherCall]:
    """One for each field, with another value of it: which one, that follows from the case."""
    shapes = _shapes_of(case)
    for number, (name, field) in enumerate(case.problem.fields.items()):
        others = [*field.others(getattr(case, name)), *itertools.islice(field.simpler(getattr(case, name)), 1)]
        if others:
            value = others[(case_number(case) + number) % len(others)]
            other = msgspec.structs.replace(case, **{name: value})
            is_twin = _shapes_of(other) == shapes
            yield OtherCall(other, f"{'the same call' if is_twin else 'a call'} with {name}={value}", is_twin=is_twin)


def _shapes_of(case: OpenCase) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, spec.shape, spec.dtype) for name, spec in tensor_specs(case).items()]


def _with_lengths(case: AttentionCase, fields: dict[str, Any], seq_lens: tuple[int, ...]) -> Any:
    values = msgspec.structs.replace(case.values, needles=(), seed=case.values.seed ^ _OTHER_SEED)
    changes: dict[str, Any] = {**fields, "values": values}
    changes |= {name: 0 for name in _ROOM if name in case.__struct_fields__}
    chosen = msgspec.structs.replace(case, **changes)
    return msgspec.structs.replace(chosen, **chosen.with_seq_lens(seq_lens))


_ON_OTHERS = "called on other tensors"
_NEGATED = "when V is negated in place, and the same tensors are passed again"
REASONS = (
    "the result depends on an earlier call; look for a workspace that is not cleared, a cache whose key leaves "
    "something out, or a counter"
)
LEFT_OVER = Cause(mistake=KEPT_BETWEEN_CALLS, words="the result depends on an earlier call")


def _weight(_: Declaration, case: Case) -> int:
    """How long splits are may be planned once for calls that are unlike, which short cases hardly ever show."""
    if not isinstance(case, AttentionCase) or num_splits_of(case) == 1:
        return 1
    return 4 if max(case.seq_lens) > _SEVERAL_TILES else 1


_FEW_TWINS = 4
"""Calls of the same shapes that are drawn where a case is one of many: other cases draw others."""


def _few_of(declaration: Declaration, case: Case, *, compiles: bool) -> list[OtherCall]:
    """The calls of `other_calls_of` that have other shapes, and some of the others, which the case alone decides.

    `compiles`: for a twin in another format a compiler takes longer than hundreds of cases. So all cases of a format
    have the same one of these, and another format has another.
    """
    other_calls, own = other_calls_of(declaration, case), format_key(format_of(case))
    twins = [one for one in other_calls if one.is_twin]
    costly = [one for one in twins if compiles and format_key(format_of(one.case)) != own]
    others = [one for one in twins if one not in costly]
    chosen = _in_turn(others, case_number(case))[:_FEW_TWINS] + _in_turn(costly, zlib.crc32(own))[:1]
    return [one for one in other_calls if not one.is_twin or one in chosen]


def _in_turn(twins: list[OtherCall], drawn_by: int) -> list[OtherCall]:
    first = (drawn_by >> 10) % max(1, len(twins))  # lower bits say which cases draw the relation
    return twins[first:] + twins[:first]


def _checked(trial: Trial, other_calls: Sequence[OtherCall]) -> Failure | None:
    for number, other in enumerate(other_calls):
        failure = _judged(trial, trial.kernel, other)
        failure = None if failure is None else _later_call(trial, other_calls, number, failure)
        if failure is not None:
            return failure
    return _after(trial, other_calls)


def _runs(other_calls: Sequence[OtherCall], case: Case, contents: Contents) -> FurtherRuns:
    again = Changed(_after_all(other_calls), case, contents.values, contents.placement)

    def compare(one: Results, others: Sequence[Results]) -> Failure | None:
        return _bits(case, one, others[-1], again.words)

    def refine(trial: Trial, failure: Failure) -> Failure:
        return _after_one(trial, other_calls) or failure

    def blame(trial: Trial, run: int, what: Failure | KernelRaised) -> Failure | None:
        failure = _raised(what) if isinstance(what, KernelRaised) else what
        return None if failure is None else _later_call(trial, other_calls, run, failure)

    return FurtherRuns([*(Changed("", one.case) for one in other_calls), again], compare, refine=refine, blame=blame)


def _later_call(trial: Trial, other_calls: Sequence[OtherCall], number: int, failure: Failure) -> Failure | None:
    """The failure of another call, which was made after this one and the other calls before it, in words."""
    fresh, other = fresh_copy(trial.kernel), other_calls[number]
    if fresh is None or _judged(trial, fresh, other) is not None:
        return None  # it is wrong by itself, or nobody can tell
    called = [trial.case, *(one.case for one in other_calls[:number])]
    if _is_wrong_after(trial, called[:1], other):
        earlier = "this case"
    elif (left_over := _after_one(trial, other_calls[:number])) is not None:
        return left_over
    else:
        calls = (one for one in reversed(other_calls[:number]) if _is_wrong_after(trial, [one.case], other))
        blamed = next(calls, None)
        if blamed is None and not (number and _is_wrong_after(trial, called, other)):
            return None  # nothing is left of these calls: what is read lies in memory that others have used since
        earlier = f"{len(called)} other calls" if blamed is None else blamed.words
    may_be = dict.fromkeys((*failure.maybe, *(one.mistake for one in failure.causes)))
    return msgspec.structs.replace(
        failure,
        oracle=registry.CALL_SEQUENCE.name,
        kind=f"next call: {failure.kind}",
        message=f"{other.words} after {earlier} gives {failure.message}; before any other call it is right",
        details=(*failure.details, REASONS),
        causes=(LEFT_OVER,),
        maybe=tuple(may_be),
        remedy={},
    )


def _is_wrong_after(trial: Trial, earlier: Sequence[Case], other: OtherCall) -> bool:
    """Whether another call is wrong right after those of other cases, of a kernel not called before."""
    fresh = fresh_copy(trial.kernel)
    if fresh is None:
        return False
    for case in earlier:
        _judged(trial, fresh, OtherCall(case, ""))
    return _judged(trial, fresh, other) is not None


def _judged(trial: Trial, kernel: Kernel, other: OtherCall) -> Failure | None:
    later = trial.beside(kernel=kernel, case=other.case, twice=False)
    try:
        failure = accuracy.check(later)
    except KernelRaised as raised:
        if raised.is_a(KeyboardInterrupt):
            raise
        return _raised(raised)
    trial.times.extend(later.times)
    return failure


def _raised(raised: KernelRaised) -> Failure | None:
    """The exception of another call, as a failure; None for what cannot run here at all."""
    if interpreter_limit(raised.error):
        return None
    name = type_name(raised.error)
    return Failure(
        oracle=registry.EXCEPTION.name, kind=name, message=f"{name}: {text_of(raised.error).partition(chr(10))[0]}"
    )


def _after(trial: Trial, other_calls: Sequence[OtherCall]) -> Failure | None:
    """The call of this case after those of all others, and then others on its tensors, which are changed in place."""
    words = _after_all(other_calls)
    inputs, memory = _built(trial)
    found = _call(trial, inputs, words)
    failure = _bits(trial.case, as_it_is(trial), found, words)
    if failure is not None:
        return _after_one(trial, other_calls) or failure
    if isinstance(trial.case, OpenCase):
        return None
    return _on_the_same_tensors(trial, inputs, found) or _with_shorter_sequences(trial, inputs, memory)


def _after_all(other_calls: Sequence[OtherCall]) -> str:
    return f"after {len(other_calls)} other calls, of other lengths and of the same shapes" if other_calls else "again"


def _after_one(trial: Trial, other_calls: Sequence[OtherCall]) -> Failure | None:
    """The call of this case between which and the same call again a single other one changes bits."""
    for other in other_calls:
        fresh = fresh_copy(trial.kernel)
        if fresh is None:
            return None
        words = f"after {other.words}"
        alike = copy(trial)
        alike.kernel = fresh
        before = _again(alike, words)
        _judged(trial, fresh, other)
        failure = _bits(trial.case, before, _again(alike, words), words)
        if failure is not None:
            return failure
    return None


def _again(trial: Trial, words: str) -> Results:
    return results_of(trial, Changed(words, trial.case, trial.reference.values_on(trial.device)))


def _on_the_same_tensors(trial: Trial, inputs: Any, one: Results) -> Failure | None:
    """Another call after V was negated in place: -1 times the result, if it is so in other memory.

    Leaves the inputs as they were.
    """
    case = trial.case
    _negate(case, inputs)
    found = _call(trial, inputs, _NEGATED)
    _negate(case, inputs)
    out, *_ = one
    failure = unequal_bits(
        registry.CALL_SEQUENCE,
        case,
        {**one, out: -one[out]},
        found,
        _NEGATED,
        details=(REASONS,),
        as_it_was="if the result of the call before is multiplied with -1",
    )
    return failure if failure is not None and VALUE_AFFINITY.check(trial) is None else None


def _with_shorter_sequences(trial: Trial, kept: Any, memory: Arena) -> Failure | None:
    """Another call after lengths were overwritten in place, as servers do: that of new tensors.

    What a mask's tables hold goes by lengths, so that of such a case they stay.
    """
    case = trial.case
    if not isinstance(case, AttentionCase) or case.hides_keys:
        return None
    lengths = zip(case.seq_lens, case.query_counts, strict=True)
    shorter = [min(length, max(queries, -(-length // 2))) for length, queries in lengths]
    if shorter == list(case.seq_lens):
        return None
    new, _ = _built(trial)
    for region in memory.regions:
        if region.role == "output":  # what is not written by either call is no difference
            prefill_(region.tensor, "nan")
    for inputs in (kept, new):
        inputs.seq_lens.copy_(torch.tensor(shorter, dtype=inputs.seq_lens.dtype, device="cpu"))
    words = f"when the lengths of the call before are overwritten with {shorter}, and the same tensors are passed again"
    found, one = _call(trial, kept, words), _call(trial, new, _ON_OTHERS)  # right after it: some keep one plan only
    return unequal_bits(
        registry.CALL_SEQUENCE,
        case,
        one,
        found,
        words,
        details=(REASONS,),
        as_it_was="with these lengths in new tensors",
    )


def _built(trial: Trial) -> tuple[Any, Arena]:
    """New tensors of the case, and the memory that they lie in."""
    arena = Arena(trial.device, poison="nan", prefill="nan")
    values = trial.reference.values_on(trial.device)
    return problem_of(trial.case).build(trial.case, arena, trial.kernel.declaration.supports, values), arena


def _call(trial: Trial, inputs: Any, words: str) -> Results:
    allocations = TrackedAllocations(trial.device, poison="nan", prefill="nan")
    try:
        results = call(trial.kernel, trial.case, inputs, allocations, wait=True)
    except KernelRaised as raised:
        raised.changed = words
        raise
    return {name: result.cpu().clone() for name, result in results.items()}


def _negate(case: Case, inputs: Any) -> None:
    """V, in place; of a merge, both outputs. Where V lies in K, what it is multiplied with in Q too: scores stay."""
    if case.values_in_keys:
        inputs.q[..., : case.value_size].neg_()
    for name in ("v", "v_cache", "prefix_output", "suffix_output"):
        tensor = getattr(inputs, name, None)
        if tensor is not None and tensor.dtype.itemsize == 1:
            bits(tensor).bitwise_xor_(0x80)  # both formats of 8 bits have their sign there, and torch has no negation
        elif tensor is not None:
            tensor.neg_()


def _bits(case: Case, one: Results, other: Results, words: str) -> Failure | None:
    failure = unequal_bits(registry.CALL_SEQUENCE, case, one, other, words, details=(REASONS,), as_it_was="at first")
    return None if failure is None else msgspec.structs.replace(failure, causes=(LEFT_OVER,))


CALL_SEQUENCE = Relation(
    registry.CALL_SEQUENCE,
    lambda declaration, case: declaration.supports.deterministic,
    lambda trial: _checked(trial, _few_of(trial.kernel.declaration, trial.case, compiles=trial.device != "cpu")),
    weight=_weight,
    further=lambda declaration, case, given: _runs(_few_of(declaration, case, compiles=True), case, given),
    alone_on=("cpu",),
    of_any_problem=True,
    closer=lambda trial: _checked(trial, other_calls_of(trial.kernel.declaration, trial.case)),
    closer_further=lambda declaration, case, given: _runs(other_calls_of(declaration, case), case, given),
)
