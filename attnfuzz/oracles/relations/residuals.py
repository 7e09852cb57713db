"""Errors that are each within their bound are together no larger than roundings make them, and go either way.

The case is run some more times with numbers of which each has a sign of its own, scores of the order of 1, and no
needles. An error beyond its bound is told by itself. Else what the last query token of each sequence gives is compared
with the exact result, and the errors of all runs are judged together (`attnfuzz.numerics.residuals`). This sees what a
bound cannot, which allows for roundings that all go the same way: an accumulator or a row sum kept in 16 bits from tile
to tile, results that are cut off. A wrong row sum is seen by the factor that the elements of a row have in common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.declaration import Declaration
from attnfuzz.explaining.diagnose import no_runs, precision_of, row_of
from attnfuzz.explaining.explanation import in_words
from attnfuzz.explaining.low_precision import Rounding, roundings
from attnfuzz.explaining.neighbours import rounding_cases
from attnfuzz.explaining.row import AttentionRow
from attnfuzz.numerics.residuals import Residuals, residuals, spread_of_rows
from attnfuzz.oracles import accuracy, registry
from attnfuzz.oracles.accuracy import nearby, objection
from attnfuzz.oracles.relations.relation import Changed, Relation, run_on
from attnfuzz.problems.cases import AttentionCase
from attnfuzz.problems.repeated import repeated, telling_rows, visible_keys
from attnfuzz.problems.wording import number
from attnfuzz.trials.comparison import Comparison, Reference, compare
from attnfuzz.trials.expected_rows import arithmetic_of, changes_scores
from attnfuzz.trials.trial import Trial
from attnfuzz.verdict import Blame, Failure

_FEWEST_ROWS = 32
_SMALLEST_EXPONENT = {"float16": -14, "bfloat16": -126}
_SEVERAL_TILES = 48
_EXPLAINED = 0.5
"""Part of the squares of the errors that a replayed rounding must account for."""
_MOST_REPLAYED = 4
_MOST_AT_ONCE = 1 << 20
"""Numbers of K that are looked at together."""


@dataclass(frozen=True)
class _Token:
    """One query token of a run: its query heads that tell something, and what their errors may be.

    The last of the `elements` is the log-sum-exp, if there is one. `factor`: by how much all elements of the output are
    too large, in proportion; its spread is in `factor_spread` and `factor_fixed`.
    """

    reference: Reference
    comparisons: list[Comparison]
    token: int
    heads: list[int]
    spread: Float64[Tensor, "heads elements"]
    fixed: Float64[Tensor, "heads elements"]
    expected: Float64[Tensor, "heads elements"]
    errors: Float64[Tensor, "heads elements"]
    factor: Float64[Tensor, " heads"]
    factor_spread: Float64[Tensor, " heads"]
    factor_fixed: Float64[Tensor, " heads"]

    def row(self, i: int) -> AttentionRow:
        """The row of `heads[i]`, with all its inputs."""
        case: Any = self.reference.case
        return row_of(self.reference, case, self.comparisons, self.token, self.heads[i], 0.0)


def _applies(_: Declaration, case: AttentionCase) -> bool:
    """Float32 has no roundings to 16 bits, and an 8-bit cache and variants of scores more than are taken apart here."""
    if case.dtype == "float32" or case.kv is not None or changes_scores(case):
        return False
    return next(repeated(case, "cpu"), None) is not None


def _check(trial: Trial) -> Failure | None:
    case: Any = trial.case
    if trial.reference.tolerance != "bound":
        return None
    found = list[_Token]()
    for changed in repeated(case, trial.device):
        seen = run_on(trial, Changed("with other numbers", changed))
        reference = trial.reference_of(changed)
        comparisons = compare(reference, seen.results)
        if (wrong := objection(reference, comparisons, seen.poison, nearby=no_runs)) is not None:
            return _beyond(_inquired(trial, changed) or wrong, changed)
        found += _tokens_of(trial, changed, reference, comparisons)
    failure = _objection(case, found) if sum(len(token.heads) for token in found) >= _FEWEST_ROWS else None
    return failure if failure is None or not trial.inquire else _told(trial, failure)


def _told(trial: Trial, failure: Failure) -> Failure:
    """The objection with the rounding that it is, as runs tell in which each shows by itself; else what may be it."""
    case: Any = trial.case
    precision = precision_of(nearby(trial, rounding_cases(case)), "nan")
    decided = () if precision is None or not precision.is_known else precision.causes
    if not (words := in_words(decided or failure.causes)):
        return failure
    message = f"{failure.message}; {'' if decided else 'perhaps '}{words}"
    return msgspec.structs.replace(failure, message=message, causes=decided or failure.causes)


def _inquired(trial: Trial, changed: AttentionCase) -> Failure | None:
    """The failure of a case with other numbers, explained like that of any case that is wrong by itself."""
    return accuracy.check(trial.beside(case=changed, twice=False, inquire=True)) if trial.inquire else None


def _beyond(wrong: Failure, changed: AttentionCase) -> Failure:
    """The failure where an error exceeds its bound with other numbers, whatever the errors are together."""
    return msgspec.structs.replace(
        wrong,
        oracle=registry.RESIDUALS.name,
        message=f"with other numbers, {wrong.message}",
        details=(f"of {changed.num_rows} rows of the same shapes", *wrong.details),
        blame=Blame(),
    )


def _tokens_of(
    trial: Trial, case: AttentionCase, reference: Reference, comparisons: list[Comparison]
) -> Iterator[_Token]:
    """Query tokens of one run whose errors tell something."""
    declaration = trial.kernel.declaration
    got, expected = (
        torch.cat([part.double().cpu().reshape(*part.shape[:2], -1) for part in parts], -1)
        for parts in ([one.got for one in comparisons[:2]], [one.expected for one in comparisons[:2]])
    )
    elements = slice(got.shape[-1])
    values = reference.values_on_cpu
    arithmetic = arithmetic_of(declaration, case, one_copy=trial.device == "cpu")
    for count, tokens in _of_one_count(case):
        seen = [_seen_by(values, case, token, count) for token in tokens]
        k, v = (torch.stack(part).double() for part in zip(*seen, strict=True))
        spread = spread_of_rows(
            values.q[tokens].double(), k, v, case.scale, arithmetic, smallest_exponent=_SMALLEST_EXPONENT[case.dtype]
        )
        of_all = torch.cat((spread.out, spread.lse[..., None]), -1)[..., elements]
        fixed = torch.cat((spread.out_fixed, spread.lse_fixed[..., None]), -1)[..., elements]
        for i, token in enumerate(tokens):
            heads = spread.is_telling[i].nonzero().flatten().tolist()
            if heads:
                out, errors = expected[token][heads, : case.value_size], (got - expected)[token][heads]
                yield _Token(
                    reference,
                    comparisons,
                    token,
                    heads,
                    spread=of_all[i][heads],
                    fixed=fixed[i][heads],
                    expected=expected[token][heads],
                    errors=errors,
                    factor=(errors[:, : case.value_size] * out).sum(1) / out.square().sum(1),
                    factor_spread=spread.factor[i][heads],
                    factor_fixed=spread.factor_fixed[i][heads],
                )


def _of_one_count(case: AttentionCase) -> Iterator[tuple[int, list[int]]]:
    """Tokens that tell something and see as many keys, some at a time: one by one they took half of all time here."""
    by_count = defaultdict[int, list[int]](list)
    for token in telling_rows(case):
        by_count[visible_keys(case, token)].append(token)
    for count, tokens in by_count.items():
        at_once = max(1, _MOST_AT_ONCE // (count * case.num_kv_heads * case.head_size))
        yield from ((count, tokens[first : first + at_once]) for first in range(0, len(tokens), at_once))


def _seen_by(values: Any, case: AttentionCase, token: int, count: int) -> tuple[Tensor, Tensor]:
    """K and V of the last `count` tokens that a query token sees."""
    k, v = values.sequence(case.row_seqs[token])
    keys = slice(case.row_lens[token] - count, case.row_lens[token])
    return k[keys], v[keys]


def _objection(case: AttentionCase, found: Sequence[_Token]) -> Failure | None:
    errors, expected, spread, fixed = (
        torch.cat([getattr(token, name) for token in found]) for name in ("errors", "expected", "spread", "fixed")
    )
    size = case.value_size
    factor, *of_factor = (
        torch.cat([getattr(token, name) for token in found])[:, None]
        for name in ("factor", "factor_spread", "factor_fixed")
    )
    factors = residuals(factor, *of_factor, most_sharing=0) if bool(factor.isfinite().all()) else None
    for name, part in (("out", slice(0, size)), ("lse", slice(size, None))):
        if not errors[:, part].numel() or not bool(errors[:, part].isfinite().all()):
            continue
        towards = expected[:, part].sign() if name == "out" else 1.0
        most_sharing = case.gqa_ratio if name == "out" else 0
        sums = residuals(errors[:, part] * towards, spread[:, part], fixed[:, part], most_sharing=most_sharing)
        if sums.is_one_sided or sums.is_too_large:
            is_of_rows = name == "out" and not sums.is_one_sided and factors and factors.excess > sums.excess
            if not is_of_rows:
                return _failure(name, sums, found)
            break
    return _failure("out", factors, found, of_factors=True) if factors and factors.is_too_large else None


def _failure(name: str, sums: Residuals, found: Sequence[_Token], *, of_factors: bool = False) -> Failure:
    rounding = _replayed(found)
    within, by_chance = f"each error of {name} is within its bound, but", "and chance explains at most"
    if of_factors or sums.is_too_large:
        kind, times = "factor" if of_factors else "size", sums.excess
        what = (
            "the elements of a row are wrong by a common factor: these factors are"
            if of_factors
            else "together they are"
        )
        message = (
            f"{within} {what} {number(sums.size)} x what the kernel's roundings explain, {by_chance} "
            f"{number(sums.largest_size)} x"
        )
    else:
        kind, times = "lean", abs(sums.lean) / sums.largest_lean
        side = {("out", True): "away from zero", ("out", False): "towards zero", ("lse", True): "upwards"}
        message = (
            f"{within} they are biased {side.get((name, sums.lean > 0), 'downwards')}: their mean is "
            f"{number(abs(sums.lean))} x their size, {by_chance} {number(sums.largest_lean)} x"
        )
    return Failure(
        oracle=registry.RESIDUALS.name,
        kind=f"{name}:{kind}",
        message=message,
        details=(f"of {sums.num_rows} rows with other numbers of the same shapes",),
        error_ratio=times,
        tensor=name,
        causes=() if rounding is None else (rounding.as_cause(),),
    )


def _replayed(found: Sequence[_Token]) -> Rounding | None:
    """The rounding that accounts for most of the errors of some rows that have large ones, and for half at least."""
    relative = [(token.errors / token.spread).square().mean(1) for token in found]
    tokens = sorted(range(len(found)), key=lambda i: -float(relative[i].max()))[:_MOST_REPLAYED]
    rows = [(found[i], int(relative[i].argmax())) for i in tokens]
    total = sum(float((token.errors / token.spread)[i].square().sum()) for token, i in rows)
    best, least = None, (1 - _EXPLAINED) * total
    for of_rows in zip(
        *(roundings(token.row(i), one_copy=found[0].reference.device == "cpu") for token, i in rows), strict=True
    ):
        left = sum(_left(token, i, rounding) for (token, i), rounding in zip(rows, of_rows, strict=True))
        if left < least:
            best, least = of_rows[0], left
    return best


def _left(token: _Token, i: int, rounding: Rounding) -> float:
    """The squares of a row's errors that the best way of a rounding leaves."""
    got = token.expected[i] + token.errors[i]
    missed = (got - rounding.beside(token.row(i)).replayed) / token.spread[i]
    return float(missed.square().sum(1).nan_to_num(torch.inf).min())


def _weight(declaration: Declaration, case: AttentionCase) -> int:
    """A sum of weights that loses digits from tile to tile shows here alone, if there is no LSE, and soonest in 8 bits.

    In float16 what float32 adds is as large, in rows as short as most are.
    """
    has_tiles = any(visible_keys(case, row) >= _SEVERAL_TILES for row in telling_rows(case))
    return 6 if has_tiles and case.dtype == "bfloat16" and declaration.supports.lse == "none" else 1


RESIDUALS = Relation(
    registry.RESIDUALS,
    _applies,
    _check,
    weight=_weight,
    cases=AttentionCase,
    under_a_mask=False,
)
