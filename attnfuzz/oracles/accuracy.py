"""Results within their error bounds, or not."""

import math
from collections.abc import Callable, Iterable, Iterator

import msgspec

from attnfuzz.cases.facets.sequences import with_lengths
from attnfuzz.explaining.diagnose import Compared, diagnose
from attnfuzz.memory.patterns import Fill
from attnfuzz.oracles.relations.relation import Changed, run_on
from attnfuzz.problems.cases import AttentionCase
from attnfuzz.problems.recipes import MIN_LOGIT_EXPONENT
from attnfuzz.problems.repeated import plain_values
from attnfuzz.problems.supported import supports_case
from attnfuzz.problems.wording import element, number, ratio
from attnfuzz.trials.checksums import CHANGED
from attnfuzz.trials.comparison import Comparison, Reference, blame_of, compare, extent, first_index, place_of
from attnfuzz.trials.observation import KernelRaised, ResultError
from attnfuzz.trials.trial import Trial
from attnfuzz.verdict import Blame, Failure

__all__ = ["check", "objection"]


def check(trial: Trial) -> Failure | None:
    """The first of out and lse that is beyond its bound, with what it points to."""
    if trial.symptoms.error_ratio <= 1:
        return None
    found = objection(trial.reference, trial.comparison, trial.first.poison, nearby=lambda: _nearby(trial))
    if found is None:  # it was beyond its bound when it was looked at first
        raise KernelRaised(ResultError(CHANGED), trial.first.poison, fatal=True)
    return found


def objection(
    reference: Reference,
    comparisons: list[Comparison],
    poison: Fill,
    *,
    nearby: Callable[[], Iterable[Compared]] = tuple,
) -> Failure | None:
    """As `check`, to results that somebody has; see `diagnose`."""
    comparison = next((part for part in comparisons if bool((part.ratio > 1).any())), None)
    if comparison is None:
        return None
    kind, index = _worst(comparison)
    found = diagnose(reference, poison, comparisons, comparison, index, nearby=nearby)
    blame = blame_of(reference.case, comparison.axes, index)
    return Failure(
        oracle="accuracy",
        kind=f"{comparison.name}:{kind}",
        message=_sentence(comparison, index) + (f"; {found.words}" if found is not None and found.words else ""),
        details=(
            f"beyond the bound: {extent(comparison.name, comparison.axes, comparison.ratio > 1)}",
            *place_of(reference.case, comparison.name, index),
        ),
        error_ratio=float(comparison.ratio[index]),
        tensor=comparison.name,
        causes=() if found is None else found.causes,
        maybe=() if found is None else found.maybe,
        blame=blame if found is None else blame | Blame(tokens=found.tokens),
        remedy={"lse": "base2"} if found is not None and found.cause == "lse_base2" else {},
    )


def _nearby(trial: Trial) -> Iterator[Compared]:
    """Runs on cases with fewer tokens, with one more, and with smaller scores, beside what each should give."""
    case, declaration = trial.case, trial.kernel.declaration
    if not isinstance(case, AttentionCase):
        return
    for changed in (*_shorter(case), *_longer(case), *_quieter(case), *_plainer(case)):
        if not supports_case(declaration.supports, declaration.options, changed):
            continue
        try:
            seen = run_on(trial, Changed("with other tokens or smaller scores", changed))
        except KernelRaised as raised:
            if raised.fatal:
                raise
            continue
        tolerance = trial.reference.tolerance
        reference = Reference(declaration, changed, device=trial.device, tolerance=tolerance)
        yield reference, compare(reference, seen)


def _shorter(case: AttentionCase) -> Iterator[AttentionCase]:
    """Without the last token of each sequence, without the second half, and with the first one only."""
    tried = {case.seq_lens}
    for shorter in (lambda length: length - 1, lambda length: length // 2, lambda length: 1):
        kept = tuple(max(shorter(length), 1) if length else 0 for length in case.seq_lens)
        changed = None if kept in tried else with_lengths(case, kept)
        tried.add(kept)
        if changed is not None:
            yield changed


def _longer(case: AttentionCase) -> Iterator[AttentionCase]:
    """With another token in each sequence that has any."""
    changed = with_lengths(case, tuple(length + 1 if length else 0 for length in case.seq_lens))
    if changed is not None:
        yield changed


def _quieter(case: AttentionCase) -> Iterator[AttentionCase]:
    """With scores of a half, a quarter and an eighth."""
    for exponent in range(case.values.logit_exponent - 1, case.values.logit_exponent - 4, -1):
        if exponent >= MIN_LOGIT_EXPONENT:
            yield msgspec.structs.replace(case, values=msgspec.structs.replace(case.values, logit_exponent=exponent))


def _plainer(case: AttentionCase) -> Iterator[AttentionCase]:
    """With scores about 0."""
    plain = plain_values(case, case.seed)
    if plain != case.values:
        yield msgspec.structs.replace(case, values=plain)


def _sentence(comparison: Comparison, index: tuple[int, ...]) -> str:
    got, expected, bound = (float(part[index]) for part in (comparison.got, comparison.expected, comparison.bound))
    sentence = f"{element(comparison.name, comparison.axes, index)} = {number(got)}, expected {number(expected)}"
    error = float(comparison.ratio[index])
    if math.isinf(error):
        return sentence
    return f"{sentence} (error {number(abs(got - expected))} is {ratio(error)} x the bound {number(bound)})"


def _worst(comparison: Comparison) -> tuple[str, tuple[int, ...]]:
    """The kind of failure, NaN before infinity before a wrong number, and its worst element."""
    wrong = comparison.ratio > 1
    got = comparison.got.double()
    for kind, mask in (("nan", wrong & got.isnan()), ("inf", wrong & got.isinf())):
        if mask.any():
            return kind, first_index(mask)
    worst = comparison.ratio == comparison.ratio.amax()
    return "value", first_index(worst)
