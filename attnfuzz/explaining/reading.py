"""What the weights of one row say: tokens dropped or doubled, places that are not its own, other scores."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from attnfuzz.explaining.counts import Counts, count_tokens
from attnfuzz.explaining.redirected import another_page, read_elsewhere
from attnfuzz.explaining.row import MeasuredRow, Reading
from attnfuzz.explaining.sets import descriptions
from attnfuzz.explaining.tables import read_through_table
from attnfuzz.explaining.variant_reading import diagnosed, read_variant
from attnfuzz.explaining.words import row_name, weight
from attnfuzz.judging.words import number
from attnfuzz.oracles.diagnosis import explain_lse
from attnfuzz.oracles.diagnosis.arithmetic import is_written
from attnfuzz.oracles.diagnosis.scales import wrong_scales
from attnfuzz.oracles.diagnosis.suspect import first_match

__all__ = ["read_row"]

_SHOWN = 3
_FEWEST = 4
_LEAST_SPREAD = 0.1
"""Of scores, and between them: for two tokens, some factor always fits."""


def read_row(row: MeasuredRow) -> Reading | None:
    """What is wrong with a row; None if its weights and its LSE are right."""
    if row.length == 0:
        return _empty(row)
    if not bool(row.got.isfinite().all()):
        return Reading(
            "weights are NaN or infinite, although all memory holds finite numbers", ("weights are NaN or infinite",)
        )
    if not bool(row.weights.wrong[row.number].any()):
        return _lse_alone(row)
    got, expected, bound = (part[row.own] for part in (row.got, row.expected, row.bound))
    counts = count_tokens(got, expected, bound, row.weights.lse_error(row.number), row.beside_tokens)
    if not bool((row.got.abs() > row.bound).any()):
        return _nothing_read(row)
    if (of_scales := _by_scales(row)) is not None:
        return of_scales
    if (of_variant := read_variant(row)) is not None:
        return of_variant
    for read in (_result_of_another_row, _through_table, _elsewhere, _counted, _query_of_another_row):
        found = read(row, counts)
        if found is not None:
            return found
    return _by_diagnosis(row) or _rescaled(row) or _largest_errors(row)


def _empty(row: MeasuredRow) -> Reading | None:
    lse = row.weights.lse
    expected_lse = float(row.weights.expected_lse[row.number])
    right_lse = lse is None or not bool(row.weights.wrong_lse[row.number])
    constant = row.weights.constant[row.number]
    if right_lse and bool((constant == 0).all()) and not bool((row.got != 0).any()):
        return None
    seen = "" if lse is None else f" and lse = {number(float(lse[row.number]))}"
    out = number(float(constant[0])) if not bool((row.got > 0).any()) else "an average of other tokens"
    return Reading(
        f"the sequence is empty: got out = {out}{seen}, expected 0 and {number(expected_lse)}",
        ("the result of an empty sequence is wrong",),
    )


def _nothing_read(row: MeasuredRow) -> Reading:
    seen = range(row.first_seen, row.length)
    tokens = row.tokens(list(seen))
    has = "has" if len(seen) == 1 else "have"
    lse = row.weights.lse
    as_empty = lse is not None and _is_of_no_token(row, float(lse[row.number]))
    why = "the sequence is treated as empty" if as_empty else f"{'it is' if len(seen) == 1 else 'all are'} dropped"
    top = float(row.scores(row.own).max())
    scores = f" (its largest score is {number(top)})" if abs(top) > 80 else ""
    total = weight(row.expected.sum())
    return Reading(f"{tokens} {has} weight 0, expected {total}: {why}{scores}", ("no token has any weight",))


def _is_of_no_token(row: MeasuredRow, lse: float) -> bool:
    """-inf, or the sink."""
    if not row.beside_tokens:
        return lse == -math.inf
    sink = float(row.weights.expected_lse[row.number]) + math.log(row.beside_tokens)
    return math.isclose(lse, sink, rel_tol=1e-4, abs_tol=1e-4)


def _result_of_another_row(row: MeasuredRow, counts: Counts | None) -> Reading | None:
    del counts
    for other in range(len(row.weights.expected)):
        expected = row.weights.expected[other]
        if other != row.number and not torch.equal(expected, row.expected) and _same(row, other):
            number, head = divmod(other, row.case.num_q_heads)
            seq = row.case.row_seqs[number]
            if head // row.case.gqa_ratio != row.kv_head and number == row.row:
                continue  # another KV head says more
            if seq != row.seq and head == row.head and row.length == row.case.row_lens[number]:
                continue  # as does another sequence's page
            if (
                seq == row.seq
                and number != row.row
                and torch.equal(row.values.q[number, head], row.values.q[row.row, row.head])
            ):
                continue  # the same query with another causal limit: which tokens it reads says more
            text = f"the result is that of {row_name(row.case, other)}"
            return Reading(text, ("rows are exchanged or written to another row's place",))
    return None


def _same(row: MeasuredRow, other: int) -> bool:
    expected, bound = row.weights.expected[other], row.weights.bound[other]
    lse = row.weights.lse
    if lse is not None and abs(float(lse[row.number] - row.weights.expected_lse[other])) > float(
        8 * row.weights.lse_bound[other]
    ):
        return False
    return bool(((row.got - expected).abs() <= 2 * bound).all()) and bool((expected > 8 * bound).any())


def _through_table(row: MeasuredRow, counts: Counts | None) -> Reading | None:
    del counts
    return read_through_table(row)


def _elsewhere(row: MeasuredRow, counts: Counts | None) -> Reading | None:
    is_own = torch.zeros_like(row.got, dtype=torch.bool)
    is_own[row.own] = True
    gained = ((row.got > row.bound) & ~is_own).nonzero()[:, 0].tolist()
    if not gained:
        return None
    got, expected, bound = (part[row.own] for part in (row.got, row.expected, row.bound))
    lost = ((got <= bound) & (expected > 8 * bound)).nonzero()[:, 0].tolist()
    return read_elsewhere(row, gained, lost)


def _counted(row: MeasuredRow, counts: Counts | None) -> Reading | None:
    if counts is None:
        return None
    dropped, repeated = counts.positions(0), counts.repeated
    if not dropped and not repeated:
        return _factor(row, counts)
    if dropped and repeated and int((counts.times[repeated] - 1).sum()) == len(dropped):
        return _read_twice(row, counts, dropped, repeated)
    texts, general = [], []
    if dropped:
        total = weight(row.expected[row.own[dropped]].sum())
        verb = "has" if len(dropped) == 1 else "have"
        what = "dropped" if counts.sum != "all" else "in the sum of weights, but V is left out"
        if row.reads_outside:
            what = "read from outside the cache"
        texts.append(f"{row.tokens(dropped)} {verb} weight 0, expected {total}: {what}")
        general += [f"{name} is {what}" for name in descriptions(row.case, row.length, dropped, row.first_seen)]
        general.append(f"tokens are {what}")
    for times in sorted({int(counts.times[position]) for position in repeated}):
        positions = counts.positions(times)
        got, expected = (weight(part[row.own[positions]].sum()) for part in (row.got, row.expected))
        often = _often(times)
        verb = "has" if len(positions) == 1 else "have"
        texts.append(f"{row.tokens(positions)} {verb} weight {got}, expected {expected}: counted {often}")
        names = descriptions(row.case, row.length, positions, row.first_seen)
        general += [f"{name} is counted {often}" for name in names]
        general.append("tokens are counted more than once")
    return Reading("; ".join(texts), tuple(general))


def _read_twice(row: MeasuredRow, counts: Counts, dropped: list[int], repeated: list[int]) -> Reading:
    """As many tokens missing as there are too many: some are read from the places of others."""
    pages = another_page(row, row.own[repeated].tolist(), dropped)
    if pages is not None:
        return pages
    sources = [position for position in repeated for _ in range(int(counts.times[position]) - 1)]
    texts = [
        f"{row.tokens([position])} has weight 0, expected {weight(row.expected[row.own[position]])}, and "
        f"{row.tokens([source])} is counted {_often(int(counts.times[source]))}: it is read in its place"
        for position, source in zip(dropped, sources, strict=True)
    ]
    steps = {source - position for position, source in zip(dropped, sources, strict=True)}
    general = ["tokens are read from places of other tokens"]
    if len(steps) == 1:
        general.insert(0, f"token t is read from the place of token t{steps.pop():+d}")
    return Reading("; ".join(texts[:_SHOWN]) + ("; ..." if len(texts) > _SHOWN else ""), tuple(general))


def _often(times: int) -> str:
    return "twice" if times == 2 else f"{times} times"


def _factor(row: MeasuredRow, counts: Counts) -> Reading | None:
    """All weights too large or too small by the same factor."""
    total = 1 / max(float(row.expected.max()), row.beside_tokens)  # of exp(score - largest score)
    names = {
        total: f"not divided by the sum of the weights ({weight(total)})",
        1 / total: f"divided twice by the sum of the weights ({weight(total)})",
        math.exp(float(row.weights.expected_lse[row.number])): "not divided by the sum of exp(score)",
    }
    for factor, words in names.items():
        if abs(factor - 1) > 0.02 and math.isclose(counts.factor, factor, rel_tol=2e-2):
            return Reading(
                f"all weights are {weight(counts.factor)} x the right ones: {words}",
                (f"the output is {words.partition(' (')[0]}",),
            )
    diagnosed = _by_diagnosis(row)
    if diagnosed is not None and "past the end" in diagnosed.exact:
        return diagnosed
    text = f"all weights are {weight(counts.factor)} x the right ones"
    return Reading(text, (text, "all weights are off by a factor"))


def _query_of_another_row(row: MeasuredRow, counts: Counts | None) -> Reading | None:
    """The right keys and values with another query."""
    del counts
    num_heads = row.case.num_q_heads
    for other in range(row.case.num_rows * num_heads):
        number, head = divmod(other, num_heads)
        seq, q = row.case.row_seqs[number], row.values.q[number, head].double()
        if other == row.number or torch.equal(q, row.q):
            continue
        if row.length > 1 and row.fits(row.predicted(row.own, row.own, q)):
            other_than = "head" if number == row.row else "token" if seq == row.seq else "sequence"
            return Reading(
                f"the query of {row_name(row.case, other)} is read", (f"the query of another {other_than} is read",)
            )
    return None


def _rescaled(row: MeasuredRow) -> Reading | None:
    """Scores that are wrong by a factor, which the ratios of weights tell, unless they are capped."""
    if row.case.variant.soft_cap is not None:
        return None
    got, expected = row.got[row.own], row.expected[row.own]
    visible = (got > 8 * row.bound[row.own]) & (expected > 8 * row.bound[row.own])
    scores = row.scores(row.own)[visible]
    if len(scores) < _FEWEST or float(scores.max() - scores.min()) < _LEAST_SPREAD:
        return None
    ratios = (got[visible] / expected[visible]).log()
    spread = scores - scores.mean()
    slope = float((spread @ (ratios - ratios.mean())) / (spread @ spread))
    rest = (ratios - ratios.mean() - slope * spread).abs()
    if float(rest.max()) > 0.1 * float((slope * spread).abs().max()):
        return None
    factor = float(f"{1 + slope:.3g}")
    if not is_written(factor):
        return None
    text = f"the scores are {number(factor)} x the right ones"
    return Reading(text, (text, "the scores are off by a factor"))


def _by_diagnosis(row: MeasuredRow) -> Reading | None:
    """What mistake, of those that `attnfuzz.oracles.diagnosis` replays, gives all of these weights."""
    words = diagnosed(row)
    return None if words is None else Reading(words, tuple(_without_numbers(words, row)))


def _by_scales(row: MeasuredRow) -> Reading | None:
    """Scales of an 8-bit cache that are not this row's own: before anything else, which would see odd weights."""
    full = row.diagnosable() if row.values.kv_scales is not None else None
    found = None if full is None else first_match(full, wrong_scales(full))
    return None if found is None else Reading(found.words, (found.words,))


def _without_numbers(words: str, row: MeasuredRow) -> Iterator[str]:
    """The mistake as it may hold for other rows."""
    of_this = f" of sequence {row.seq}"
    yield words.replace(of_this, "")


def _lse_alone(row: MeasuredRow) -> Reading | None:
    if row.weights.lse is None or not bool(row.weights.wrong_lse[row.number]):
        return None
    full = row.diagnosable()
    found = explain_lse(full) if full is not None else None
    words = None if found is None else found.words
    got, expected = (number(float(part[row.number])) for part in (row.weights.lse, row.weights.expected_lse))
    text = f"the weights are right, but lse = {got}, expected {expected}"
    general = (words,) if words else ()
    return Reading(f"{text}: {words}" if words else text, (*general, "the weights are right, the LSE is wrong"))


def _largest_errors(row: MeasuredRow) -> Reading:
    errors = (row.got - row.expected).abs()[row.own]
    worst = errors.argsort(descending=True)[:_SHOWN].sort().values.tolist()
    texts = [
        f"{row.tokens([t])} has weight {weight(row.got[row.own[t]])}, expected {weight(row.expected[row.own[t]])}"
        for t in worst
        if float(errors[t]) > float(row.bound[row.own[t]])
    ]
    return Reading("; ".join(texts), ("the scores are wrong",), vague=True)
