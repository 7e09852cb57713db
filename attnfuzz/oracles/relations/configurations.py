"""Every configuration of an autotuned Triton kernel: right with each, whichever the tuner takes.

`triton.autotune` takes the configuration that was fastest, on each machine anew. So a tile size that leaves out a row,
or a load whose mask holds for small blocks only, is wrong on some machines, and on others after an update. Here a call
is made with each configuration, one at a time, and judged by all usual oracles.

At a first call a tuner runs all of them, many times, on the tensors of that call. What a kernel changes in place is
changed each time, unless it is named in ``restore_value`` or ``reset_to_zero``. On a GPU that is so anyway; in the
interpreter a call is made once more with that.
"""

from __future__ import annotations

import random

import msgspec

from attnfuzz.declaration import Declaration, Kernel
from attnfuzz.oracles import registry
from attnfuzz.oracles.relations.relation import Relation, run_on, unchanged
from attnfuzz.problems.cases import Case, case_number
from attnfuzz.trials.observation import KernelRaised, never_tuned
from attnfuzz.trials.trial import Trial
from attnfuzz.triton_compat.configurations import Configuration, cannot_run, taking, timing
from attnfuzz.verdict import Failure

_TRIED = 8
"""Of a case that nobody looks into; the next one draws others."""
_MOST_NAMED = 3

_USUAL = tuple(one.load() for one in registry.KNOWN.values() if one.code and not one.is_relation)


def _applies(declaration: Declaration, _: Case) -> bool:
    """To all kernels whose calls are not known to call no autotuned function."""
    return not never_tuned(declaration.target)


def _check(trial: Trial, tried: int | None = _TRIED) -> Failure | None:
    wrong, right = _judged(trial, tried)
    if not wrong:
        return _at_a_first_call(trial) if right > 1 and trial.device == "cpu" else None
    failure = wrong[0][1]
    return msgspec.structs.replace(
        failure,
        oracle=registry.CONFIGURATIONS.name,
        message=f"{failure.message}: {_sentence([one for one, _ in wrong], right)}",
        details=(*failure.details, "a machine takes the configuration that is fastest there (triton.autotune)"),
    )


def _at_a_first_call(trial: Trial) -> Failure | None:
    with timing():
        failure = _objection(trial, inquire=trial.inquire)
    if failure is None:
        return None
    return msgspec.structs.replace(
        failure,
        oracle=registry.CONFIGURATIONS.name,
        kind=f"first call {failure.kind}",
        message=f"{failure.message}: wrong at a first call, where triton.autotune times all of them on its tensors",
        details=(
            *failure.details,
            "name what it changes in place in restore_value or reset_to_zero of triton.autotune",
        ),
    )


def lines_of(kernel: Kernel, case: Case, *, device: str) -> tuple[str, ...]:
    """The configurations with which a case fails, told in lines. None of a kernel that is right, or tunes nothing.

    Nor of one that raises before it tunes anything.
    """
    if never_tuned(kernel.declaration.target):
        return ()
    try:
        wrong, right = _judged(Trial(kernel, case, device=device, tolerance="bound"), _TRIED)
    except KernelRaised:
        return ()
    return (_sentence([one for one, _ in wrong], right),) if wrong else ()


def _judged(trial: Trial, tried: int | None) -> tuple[list[tuple[Configuration, Failure]], int]:
    """With which of those that were ``tried`` (None: of all) the case fails, and with how many it passes."""
    with taking(None) as choices:
        run_on(trial, unchanged(trial, ""))
    if tried is not None and len(choices) > tried:
        choices = random.Random(case_number(trial.case)).sample(choices, tried)
    wrong: list[tuple[Configuration, Failure]] = []
    right = 0
    for one in choices:
        with taking(one):
            try:
                failure = _objection(trial, inquire=trial.inquire and not wrong)
            except KernelRaised as raised:
                if cannot_run(raised.error):
                    continue
                raised.changed = f"with {one.words}"
                raise
        if failure is None:
            right += 1
        else:
            wrong.append((one, failure))
    return wrong, right


def _objection(trial: Trial, *, inquire: bool) -> Failure | None:
    """An objection of the usual oracles to runs with the configuration that is taken now."""
    again = trial.beside(reference=trial.reference, placement=trial.placement, inquire=inquire)
    try:
        return next(filter(None, (check(again) for check in _USUAL)), None)
    finally:
        trial.times.extend(again.times)


def _sentence(wrong: list[Configuration], right: int) -> str:
    """Which are wrong, of which function, and how many are not."""
    names = [f"{one.words} of {one.kernel}" for one in wrong]
    if not right and len(wrong) > 1:
        return f"wrong with each of {len(wrong)} configurations"
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    others = f"right with the {right} others" if right > 1 else "right with the other one" if right else "no other runs"
    return f"wrong with {' and with '.join(names[:_MOST_NAMED])}{more}; {others}"


CONFIGURATIONS = Relation(
    registry.CONFIGURATIONS, _applies, _check, of_any_problem=True, closer=lambda trial: _check(trial, tried=None)
)
