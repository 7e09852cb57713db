"""From a failed comparison to the mistakes that explain it.

Mistakes are replayed in float64 on the wrong rows of a run: those that give all of them are the `causes`. Which of
several it is, and whether it is one of them at all, neighbouring cases decide (`attnfuzz.explaining.neighbours`): the
kernel is run on them, and what does not give their wrong rows as well is dropped. A cause is told as a fact only if it
is the only one left and other runs have borne it out.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import msgspec
import torch
from torch import Tensor

from attnfuzz.explaining import formulas, tokens
from attnfuzz.explaining.explanation import in_a_similar_case, in_words
from attnfuzz.explaining.low_precision import LOWEST_EXPONENT, OF_EMPTY_ROWS, start_of
from attnfuzz.explaining.merges import OF_MERGES, both_sides_empty, empty_sides, merged_row
from attnfuzz.explaining.mistakes import REFUTED, Family, Key, Maker, Match, family, in_output_alone, matches, silent
from attnfuzz.explaining.neighbours import beside_empty, maxima_cases, neighbours, rising_cases, rounding_cases
from attnfuzz.explaining.precision import OF_MAXIMA, OF_SOME_NUMBERS, Precision
from attnfuzz.explaining.rounding_diagnosis import MOST_ROWS, WrongRows
from attnfuzz.explaining.row import AttentionRow, AveragedRow
from attnfuzz.inputs.reference import merge_all
from attnfuzz.isolation.progress import run_is_over
from attnfuzz.memory.patterns import Fill, poison_value
from attnfuzz.mistake import K_SCALE, KV_SCALES, LSE_TRANSPOSED, PAST_THE_END, V_SCALE, common_to
from attnfuzz.numerics import error_ratio
from attnfuzz.problems.cases import AttentionCase, Case, MergeStatesCase
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.wording import row_words
from attnfuzz.trials.comparison import Comparison, Reference
from attnfuzz.verdict import Cause

P = ParamSpec("P")
T = TypeVar("T")

Place = tuple[int, int]
"""A row of q, and a head."""
Shape = tuple[Any, ...]
"""What counts in a case: lengths, not numbers."""
Run = tuple[Shape, bool]
"""A shape, and whether its numbers are ordinary ones."""
Compared = tuple[Reference, list[Comparison]]
"""What a run should give, and what it gave beside it."""
Nearby = Callable[[Iterable[Case]], Iterable[Compared]]
"""Makes runs on cases, as far as the kernel supports them."""


def no_runs(cases: Iterable[Case]) -> Iterable[Compared]:
    """Makes none, of whatever cases."""
    del cases
    return ()


MAKERS: tuple[Maker, ...] = (
    Maker({KV_SCALES, K_SCALE, V_SCALE}, formulas.kv_scales),
    Maker({KV_SCALES, K_SCALE, V_SCALE}, tokens.unscaled_tokens),
    Maker.of("mask", formulas.masks),
    Maker({"scored_dims", "score_columns", "value_columns"}, formulas.columns),
    Maker({"window", "soft_cap", "alibi", "sinks"}, formulas.variants),
    Maker.of("hidden_keys", formulas.hidden_keys),
    Maker.of("head_map", tokens.another_head),
    Maker.of("causal_limit", tokens.behind_the_query),
    Maker({"tokens_dropped", "tokens_counted_twice", "values_dropped", "weights_dropped"}, tokens.miscounted),
    Maker({PAST_THE_END}, tokens.past_the_end),
    Maker({"not_rescaled"}, formulas.not_rescaled),
    Maker.of("normalisation", formulas.rescaled_output),
    Maker.of("scale", formulas.rescaled_scores),
    Maker.of("partial_lse", formulas.partial_states),
    Maker({"lse_base2", "lse_natural", "lse_base10", "lse_formula"}, formulas.lse_formulas),
    Maker.of("block_table", tokens.through_the_table),
    Maker.of("another_sequence", tokens.another_sequence),
    Maker.of("another_length", tokens.another_length),
    Maker.of("another_page", tokens.another_page),
    Maker({"another_token"}, tokens.another_token),
    Maker.of("another_tensor", tokens.another_tensor),
    Maker.of("displaced_rows", tokens.displaced),
    Maker({"another_row", "another_query", "treated_as_empty", "output_is_zero"}, tokens.another_row),
    Maker.of("weights_misplaced", tokens.weights_of_another_stride),
    Maker.of("single_token", tokens.single_token),
)
"""The list of mistakes with tokens, places and formulas, the likeliest first; `low_precision` has the roundings."""

IN_GENERAL = {
    "another_length": "a sequence is taken to be as long as another",
    "another_page": "a page is read that is not the one in the block table",
    "another_query": "the query of another row is read",
    "another_row": "this is the result of another row",
    "another_sequence": "tokens of another sequence are read",
    "block_table": "pages are read through the wrong entry of the block table",
    "causal_limit": "keys behind the query take weight, or some before it do not",
    "displaced_rows": "output rows lie in the places of others",
    "head_map": "another KV head is read",
    "hidden_keys": "hidden keys take part with a finite score",
    KV_SCALES: "the scales of K and V are wrong",
    K_SCALE: "the scale of K is wrong",
    V_SCALE: "the scale of V is wrong",
    "mask": "the mask is read wrongly",
    "merge": "the weights of prefix and suffix are wrong",
    "not_rescaled": "the sums so far are rescaled wrongly when the maximum grows",
    "partial_lse": "partial states are merged with wrong weights",
    "tokens_counted_twice": "tokens are counted twice",
    "tokens_dropped": "tokens are dropped",
    "values_dropped": "tokens have weight, but their V is left out",
    "weights_dropped": "tokens are averaged, but their weights are left out of the sum that divides",
    "weights_misplaced": "weights are read from where those of others are stored",
    "window": "the window is wrong",
}
"""What is told of a mistake where it is not known in which way it is made."""

OF_PLACES = frozenset({PAST_THE_END, "another_length", "another_page", "block_table"})
"""Mistakes that read memory which is not the row's own."""
OF_VALUES = frozenset({"another_tensor", "score_columns", "value_columns"})
"""Mistakes of which measured weights say nothing, since other values have been put in the place of the case's."""

_NOTHING = frozenset({"output_is_zero", "treated_as_empty"})
"""Mistakes that say no more than that nothing was averaged."""
_ANYHOW = "in ways of their own"
"""In place of one way in which all wrong rows are."""
_OF_SEVERAL_PLACES = frozenset(
    {"another_length", "another_page", "another_query", "another_row", "another_sequence", "block_table", "head_map"}
)
"""Mistakes of which each row may be wrong in another way: none fits by chance."""
_MOST_NUMBERS = 1 << 18
"""Of K and V that a row reads: each of some hundred mistakes goes through them."""
_MOST_KEPT = 1 << 14
"""Of those, of a row that is kept while others are looked at: there are some hundred rows."""
_MOST_RIGHT = 16
_SAME = 1e-6
_MOST_IN_PASSING = 3
"""Wrong rows of a case that nobody looks into yet: most show a bug that is known."""
_MOST_OF_NEIGHBOUR = 3
_MOST_RIGHT_OF_NEIGHBOUR = 8
_ENOUGH_WEIGHTS = 4
"""Measured weights of a row, of which three are free: no mistake gives them all by chance."""
_FEWEST_EMPTY = 3
"""Rows without keys that read as many as another sequence has."""
_MOST_NEIGHBOURS = 12
"""Runs beside the failing one."""
_FAR_OFF = 0.05
"""Part of the largest number of a row: few roundings to 8 bits make so large an error."""
_SAME_BOUNDS = 2.0
"""What a mistake leaves open of a row that it gives exactly. Where one does, others that leave more fit by chance."""


@dataclass(frozen=True)
class Diagnosis:
    """A diagnosis of a wrong result: every mistake that gives it, as ``causes``, and what is told of it in ``words``.

    `maybe`: mistakes that would give errors of such a size.
    """

    words: str = ""
    causes: tuple[Cause, ...] = ()
    maybe: tuple[str, ...] = ()


def _at_fault(diagnosed: Callable[P, Diagnosis]) -> Callable[P, Diagnosis]:
    """A finding is not lost to a fault in here: the fault is told then."""

    @functools.wraps(diagnosed)
    def found(*args: P.args, **kwargs: P.kwargs) -> Diagnosis:
        try:
            return diagnosed(*args, **kwargs)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            return Diagnosis(f"(attnfuzz could not diagnose this: {type(error).__name__}: {error})")

    return found


@_at_fault
def diagnose(
    reference: Reference,
    poison: Fill,
    comparisons: list[Comparison],
    failed: Comparison,
    index: tuple[int, ...],
    *,
    nearby: Nearby | None = None,
    weighed: Callable[[], Iterable[AttentionRow]] = tuple,
    among: Callable[[Cause], bool] | None = None,
) -> Diagnosis:
    """Find what the wrong element `index` of `failed` points to.

    `poison`: what dead memory held. `nearby`: makes runs on cases that tell mistakes apart; where it makes none, a
    mistake is told as what may be it. Without, nothing is told. `weighed`: measures the weights of the case's tokens,
    which is asked for where these runs leave no single mistake. `among`: the mistakes that may be it, if not all.
    """
    run_is_over()  # what follows takes a while where much is wrong, and is not the kernel's doing
    case = reference.case
    if isinstance(case, OpenCase):  # mistakes are replayed that attention is known for
        return Diagnosis()
    rows = _Rows(reference, poison, comparisons)
    number, head = index[:2]
    beside = ""
    if isinstance(case, MergeStatesCase):
        empty = [f"{side} (lse = {lse:+})" for side, lse in empty_sides(reference.values, number, head).items()]
        if len(empty) == 2:
            return Diagnosis(f"both sides are empty, {' and '.join(empty)}: expected 0 and -inf")
        beside = f"the {empty[0]} is empty, so the result is the other side" if empty else ""
    if isinstance(case, AttentionCase):
        if case.partial_states and (idle := _of_idle_splits(comparisons)):
            return Diagnosis(idle.words, (idle,))
        if failed.name not in ("out", "lse"):
            return Diagnosis("a split without tokens has lse = -inf and an output that is written and finite")
        if _is_transposed(failed):
            words = f"{failed.name} is transposed: its axes are {' and '.join(reversed(failed.axes))}"
            return Diagnosis(words, (Cause(mistake=LSE_TRANSPOSED, words=words),))
        if case.row_lens[number] == 0:
            row = rows.of(case, (number, head)) if failed.name == "out" else None
            read = row and (
                _as_long_as_another(rows, row, poison, nearby)
                or _read_by_empty(row)
                or _seen_by_none(row, poison, nearby)
            )
            counted = None if read else _zeros_counted_by_empty(rows.of(case, (number, head)), poison, nearby)
            return read or counted or _of_empty(case, failed, number, head)
    if nearby is None:
        found = Survivors(rows, among=among)
        found.retell(rows.at((number, head)))
        return Diagnosis("", found.causes, found.maybe)
    runs = _runs_near(case, poison, nearby)
    found = _left_by(rows, runs, among)
    if isinstance(case, AttentionCase) and not found.is_settled and found.is_about("not_rescaled"):
        for other, compared in nearby(rising_cases(case)):
            found.ask(_Rows(other, poison, compared))
    if not found.is_settled and found.weigh(list(weighed())):
        for run in runs:
            found.ask(run)
    if among is None and isinstance(case, AttentionCase) and (rows.are_nearly_right or not found.is_settled):
        found.decide(precision_of(nearby(rounding_cases(case)), poison), rows)
    if any(one.mistake == OF_EMPTY_ROWS for one in found.causes):
        found.drop_starts((rows, *runs))
    if isinstance(case, AttentionCase) and found.is_about(*OF_MAXIMA):
        found.decide_maximum([_Rows(other, poison, compared) for other, compared in nearby(maxima_cases(case))], runs)
    found.retell(rows.at((number, head)))
    told = found.told()
    return Diagnosis(
        "; ".join(filter(None, (beside, told))), found.believed, tuple(dict.fromkeys((*found.maybe, *found.doubted)))
    )


def _is_transposed(failed: Comparison) -> bool:
    """Whether all of a log-sum-exp is right once its axes, of one size, change places."""
    rows, *others = failed.got.shape
    if failed.name != "lse" or others != [rows]:
        return False
    return not bool((error_ratio(failed.got.T, failed.expected, failed.bound) > 1).any())


class _Rows:
    """The wrong and the right rows of one run."""

    def __init__(self, reference: Reference, poison: Fill, comparisons: list[Comparison]) -> None:
        self.reference = reference
        self.case: Any = reference.case
        self.comparisons = comparisons
        self._poison = poison
        self._kept: dict[Place, AveragedRow] = {}
        is_wrong = _rows_where(comparisons, lambda one: one.ratio > 1)
        is_asked = _rows_where(comparisons, lambda one: ~one.expected.isnan())  # of rows that read NaN nothing is
        self._wrong = is_wrong.nonzero().tolist()
        self._right = (~is_wrong & is_asked).nonzero().tolist()

    def of(self, case: AttentionCase, place: Place) -> AttentionRow:
        held = poison_value(getattr(torch, case.kv_dtype), self._poison)
        return row_of(self.reference, case, self.comparisons, *place, held)

    def at(self, place: Place) -> AveragedRow | None:
        """The row there, if it has keys."""
        return next(iter(self._rows([place], 1)), None)

    def wrong(self, most: int = MOST_ROWS, *, of_any_length: bool = False) -> list[AveragedRow]:
        """Wrong rows with keys, unlike each other as far as possible; long ones are for one mistake, not for all."""
        return self._rows(self._wrong, most, of_any_length=of_any_length)

    def right(self, most: int = _MOST_RIGHT) -> list[AveragedRow]:
        """Likewise of those without an error, that are no shorter than one that is wrong."""
        if isinstance(self.case, AttentionCase) and self._wrong:
            shortest = min((self.case.row_lens[row] for row, _ in self._wrong), default=0)
            return self._rows([at for at in self._right if self.case.row_lens[at[0]] >= shortest], most)
        return self._rows(self._right, most)

    def last(self) -> list[AttentionRow]:
        """Each sequence's last query token, with all heads, where they see as many keys."""
        case: AttentionCase = self.case
        rows = [case.rows_of(seq)[-1] for seq in range(case.num_seqs) if len(case.rows_of(seq))]
        made = (self._rows([(row, head)], 1) for row in rows for head in range(case.num_q_heads))
        found = [row for of_place in made for row in of_place if isinstance(row, AttentionRow)]
        return [row for row in found if row.num_tokens == found[0].num_tokens]

    @property
    def shape(self) -> Shape:
        """Lengths of the case, and its window: what numbers do not change."""
        case = self.case
        if isinstance(case, MergeStatesCase):
            return case.num_tokens, case.lse_pairs
        return case.seq_lens, case.query_counts, case.variant.window

    @property
    def run(self) -> Run:
        """The shape, and whether numbers are unlike each other, so that no mistake fits by chance."""
        case = self.case
        if isinstance(case, MergeStatesCase):
            return self.shape, case.outputs == "normal"
        return self.shape, case.values.keys == case.values.values == "normal" and not case.values.needles

    @property
    def told_by(self) -> int:
        """How many wrong numbers there are, in the rows that are looked at, of which some are not 0 either."""
        rows = [row for row in self.wrong(_MOST_OF_NEIGHBOUR) if row.is_finite and not _is_zero(row)]
        return sum(int(((row.got - row.expected).abs() > row.bound).sum()) for row in rows)

    @property
    def longest(self) -> int:
        """How many keys, or states, the longest of the wrong rows has: mistakes coincide where there are few."""
        return max((len(row.v) for row in self.wrong(_MOST_OF_NEIGHBOUR)), default=0)

    @property
    def are_nearly_right(self) -> bool:
        """Whether the wrong rows are off by no more than roundings make them."""
        rows = [row for row in self.wrong() if row.is_finite]
        return all(bool((row.got - row.expected).abs().amax() < _FAR_OFF * row.expected.abs().amax()) for row in rows)

    @property
    def without_keys(self) -> list[AttentionRow]:
        """The wrong rows without keys."""
        case = self.case
        places = [place for place in self._wrong if case.row_lens[place[0]] == 0]
        return [self.of(case, (row, head)) for row, head in _spread(places, MOST_ROWS)]

    @property
    def wrong_and_empty(self) -> list[AttentionRow]:
        """Rows without keys whose output is a number other than 0."""
        return [row for row in self.without_keys if row.is_finite and not _is_zero(row)]

    @property
    def wrong_if_empty(self) -> bool:
        """Whether a row without keys is wrong."""
        case = self.case
        return isinstance(case, AttentionCase) and any(case.row_lens[row] == 0 for row, _ in self._wrong)

    def _rows(self, places: Sequence[Sequence[int]], most: int, *, of_any_length: bool = False) -> list[AveragedRow]:
        """None of so many numbers that replaying all mistakes would take seconds: shrinking comes first."""
        if isinstance(self.case, MergeStatesCase):
            is_empty = both_sides_empty(self.reference.values)
            with_tokens = [(row, head) for row, head in places if not is_empty[row, head]]
            return [self._once(place) for place in _spread(with_tokens, most)]
        case: AttentionCase = self.case
        most_keys = max(case.row_lens) if of_any_length else _MOST_NUMBERS // (case.head_size + case.value_size)
        with_keys = [(row, head) for row, head in places if 0 < case.row_lens[row] <= most_keys]
        return [self._once(place) for place in _spread(with_keys, most)]

    def _once(self, place: Place) -> AveragedRow:
        """The row there, which keeps what is made of it as long as this, if that is little."""
        if place in self._kept:
            return self._kept[place]
        is_merged = isinstance(self.case, MergeStatesCase)
        made = merged_row(self.reference, self.comparisons, *place) if is_merged else self.of(self.case, place)
        if (
            isinstance(made, AttentionRow)
            and made.num_tokens * (made.case.head_size + made.case.value_size) > _MOST_KEPT
        ):
            return made
        return self._kept.setdefault(place, made)


def _runs_near(case: Case, poison: Fill, nearby: Nearby) -> list[_Rows]:
    every = itertools.islice(nearby(neighbours(case)), _MOST_NEIGHBOURS)
    return [_Rows(other, poison, compared) for other, compared in every]


def _spread(every: Sequence[T], most: int) -> Sequence[T]:
    """At most so many, from all over."""
    return every[:: max(1, -(-len(every) // most))]


class Survivors:
    """The mistakes that give all wrong rows seen so far; fewer with each run that is asked."""

    def __init__(self, rows: _Rows, *, decided: bool = False, among: Callable[[Cause], bool] | None = None) -> None:
        """``decided``: other runs will be asked, so that what fits few numbers is worth asking them about.

        ``among``: the mistakes that may be it, none of them a rounding, if not all may.
        """
        self._decided = decided
        self._among = among
        self._rows = rows
        self._is_near = False
        self._is_finite = False
        self._is_general = True
        self._is_nothing = True
        self._borne_out: list[Run] = []
        self._unexplained = set[Run]()
        self._is_telling = False
        self.causes: tuple[Cause, ...] = ()
        self.maybe: tuple[str, ...] = ()
        self._refuted: set[Key] = set()
        self._inexact: set[Key] = set()
        self._partial: tuple[Cause, ...] = ()
        self._start(rows)

    def _start(self, rows: _Rows) -> None:
        most = (MOST_ROWS, _MOST_RIGHT) if self._decided else (_MOST_IN_PASSING, 1)
        wrong, right = rows.wrong(most[0]), rows.right(most[1])
        if not wrong:
            return
        self._is_finite = any(map(_has_numbers, wrong))
        self._is_nothing &= all(map(_is_zero, wrong))
        found = _given_by_all(wrong)
        self._refuted = _refuted_by(right, found)
        if unrefuted := {key: one for key, one in found.items() if key not in self._refuted}:
            self._partial = tuple(one.cause for key, one in found.items() if key in self._refuted)
            found = unrefuted
        if self._among is not None:
            found = {key: one for key, one in found.items() if self._among(one.cause)}
        exact = [match for match in found.values() if match.left <= _SAME_BOUNDS]
        roundings: tuple[Cause, ...] = ()
        if self._among is None and all(isinstance(row, AttentionRow) for row in wrong):
            rounded = _rounded(rows, wrong, right, self._replayed)
            self.maybe = rounded.perhaps()
            roundings = rounded.exactly(of_few=self._decided) if self._decided or not exact else ()
            if roundings and not rounded.is_telling and found:
                roundings = tuple(one for one in roundings if one.mistake in self.maybe) or roundings
        self.causes = (*roundings, *(match.cause for match in (exact or found.values())))

    def ask(self, rows: _Rows) -> None:
        """Drop what does not give the wrong rows of another run, or would make its right rows wrong.

        A run that none of them gives shows something else, and says nothing of this; unless something gives all wrong
        rows that was left aside since it would make right ones wrong: then that it is, in some rows.
        """
        wrong, right = rows.wrong(_MOST_OF_NEIGHBOUR), rows.right(_MOST_RIGHT_OF_NEIGHBOUR)
        if not self.causes:
            if wrong and not self._borne_out:
                self._start(rows)
                self._drop_what_is_not_shown_here()
            return
        keys = {_key(one) for one in self.causes}
        structural = [one for one in self.causes if not one.rounding]
        roundings = [one for one in self.causes if one.rounding]
        refuted = _refuted_by(right, map(_key, structural))
        kept = keys
        if wrong:
            kept, inexact = _kept_exactly(wrong, map(_key, structural))
            self._inexact |= inexact
            if roundings and all(isinstance(row, AttentionRow) for row in wrong):
                kept |= _rounded(rows, wrong, right, self._replayed).kept(roundings)
            of_some = _kept_exactly(wrong, map(_key, self._partial))[0] if self._partial else set()
            self._partial = tuple(one for one in self._partial if _key(one) in of_some)
            if not kept and self._partial and any(map(_has_numbers, wrong)):
                self.causes, self._partial, kept, structural = self._partial, (), of_some, []
            if not kept:
                self._unexplained.add(rows.run)
                self._is_general &= not any(map(_has_numbers, wrong))
                return
            self._bear_out(rows, wrong)
        if roundings and right and all(isinstance(row, AttentionRow) for row in right):
            refuted |= _rounded(rows, [], right, self._replayed).refuted(roundings)
        self._refuted |= refuted
        self.causes = tuple(one for one in self.causes if _key(one) in kept)
        if unrefuted := tuple(one for one in self.causes if _key(one) not in self._refuted):
            self.causes = unrefuted
        elif self.causes:  # which are no better than what was left aside
            self.causes, self._partial = (*self.causes, *self._partial), ()

    def _drop_what_is_not_shown_here(self) -> None:
        """Another run has shown other causes: they must give the first run's rows, if these are numbers, as well."""
        for row in filter(_has_numbers, self._rows.wrong(_MOST_OF_NEIGHBOUR)):
            left = _kept_by(row, (_key(one) for one in self.causes if not one.rounding))
            self.causes = tuple(one for one in self.causes if one.rounding or _key(one) in left)

    def decide(self, precision: Precision | None, rows: _Rows) -> None:
        """Let runs in which each rounding shows by itself say which it is, if it is one and the wrong rows are its.

        None: there were no such runs.
        """
        wrong, also_long = (
            [row for row in found if isinstance(row, AttentionRow)]
            for found in (rows.wrong(_MOST_OF_NEIGHBOUR), rows.wrong(_MOST_OF_NEIGHBOUR, of_any_length=True))
        )
        others = tuple(one for one in self.causes if not one.rounding or one.mistake in OF_SOME_NUMBERS)
        rounded = _rounded(rows, wrong, rows.right())
        if precision is None or not precision.is_known:
            near = rounded.exactly(of_few=True)
        elif also_long and (found := precision.behind(also_long)):
            told = _rounded(rows, also_long, ()).as_told
            self.causes, self._is_near, self._is_finite = tuple(map(told, found)), False, True
            self._bear_out(rows, also_long)
            self._unexplained.clear()
            self._refuted -= set(map(_key, found))
            return
        else:
            kept = rounded.kept(precision.perhaps) if precision.perhaps else set()
            near = tuple(one for one in precision.perhaps if _key(one) in kept)
        overflows = bool(near) and not all(row.is_finite for row in wrong)
        if overflows or not others:  # nearly anything gives NaN, but other runs are finite, and show the rounding
            self._is_near = True
            self._unexplained.clear()
            self._is_finite |= overflows
            others = ()
        self.causes = others or tuple(map(rounded.as_told, near))

    def decide_maximum(self, runs: Sequence[_Rows], ordinary: Sequence[_Rows]) -> None:
        """Let ``runs``, of scores that overflow exp beside one maximum or another, say which one is subtracted.

        Each shows one of the mistakes that another leaves right, so that NaN tells there what it is, which it does not
        elsewhere. One is the cause if it alone gives all of these runs, and no ``ordinary`` one is wrong in a way that
        is not its own.
        """
        every = OF_MAXIMA | {OF_EMPTY_ROWS}
        asked = tuple(one for one in self.causes if one.mistake in every)
        others = tuple(one for one in self.causes if one not in asked)
        is_shown = False
        for rows in runs:
            wrong, right = (
                [row for row in found if isinstance(row, AttentionRow)]
                for found in (rows.wrong(_MOST_OF_NEIGHBOUR), rows.right(_MOST_RIGHT_OF_NEIGHBOUR))
            )
            refuted = _rounded(rows, [], right, every).refuted(asked) if right else set()
            given = _rounded(rows, wrong, [], every).kept(asked) if wrong else set(map(_key, asked))
            asked = tuple(one for one in asked if _key(one) in given - refuted)
            is_shown |= bool(wrong)
        self.causes = (*asked, *others)
        wrong_elsewhere = ([row for row in rows.wrong() if isinstance(row, AttentionRow)] for rows in ordinary)
        if (
            is_shown
            and len(asked) == 1
            and asked[0].mistake in OF_MAXIMA
            and all(_rounded(ordinary[0], wrong, [], every).kept(asked) for wrong in wrong_elsewhere if wrong)
        ):
            self.causes, self._is_near, self._is_finite = asked, False, True
            self._borne_out += [rows.run for rows in runs]
            self._unexplained.clear()
            self._is_general = True

    def drop_starts(self, every: Sequence[_Rows]) -> None:
        """Drop a running maximum that begins at a finite number, where no single one gives the wrong rows of all runs.

        Where right rows have lower scores, it is so in some rows alone, unless something else gives the wrong ones.
        """
        alike = [run for run in every if run.case.scale == self._rows.case.scale]
        wrong = [row for run in alike for row in run.wrong(_MOST_OF_NEIGHBOUR) if isinstance(row, AttentionRow)]
        starts = [found for row in wrong if (found := start_of(row)) is not None]
        low = max((least for least, _ in starts), default=-math.inf)
        high = min((most for _, most in starts), default=math.inf)
        right = [row for run in alike for row in run.right(_MOST_RIGHT_OF_NEIGHBOUR) if isinstance(row, AttentionRow)]
        is_partial = any(row.lse < low for row in right)
        others = tuple(one for one in self.causes if one.mistake != OF_EMPTY_ROWS)
        if low > high or (is_partial and others):
            self.causes = others
        elif is_partial:
            self._refuted |= {_key(one) for one in self.causes if one.mistake == OF_EMPTY_ROWS}

    @property
    def _replayed(self) -> Collection[str] | None:
        """The roundings that wrong rows alone are asked about: runs in which each shows tell the others."""
        return OF_SOME_NUMBERS if self._decided else None

    def is_about(self, *mistakes: str) -> bool:
        """Whether one of these is left."""
        return any(one.mistake in mistakes for one in self.causes)

    @property
    def is_settled(self) -> bool:
        """Whether one statement is left, which other runs have borne out."""
        return self.is_borne_out and len({one.words for one in self.causes}) == 1

    def weigh(self, rows: Sequence[AttentionRow]) -> bool:
        """Drop what the measured weights of the case contradict; true if only they tell what it is.

        They are what the kernel did, whatever the values: a mistake must give them, and leave right ones right, unless
        it is made in some rows alone, as right ones of other runs have shown.
        """
        if not rows or not all(map(_has_numbers, rows)):
            return False
        wrong, right = [row for row in rows if not row.is_right], [row for row in rows if row.is_right]
        given = {
            key: match
            for key, match in (_given_by_all(wrong) if wrong else {}).items()
            if match.cause.mistake not in OF_VALUES
        }
        unasked = OF_VALUES | OF_PLACES  # in dead memory lies something else, too
        asked = {_key(one) for one in self.causes if not one.rounding and one.mistake not in unasked}
        contradicted = (asked - set(given) if wrong else set()) | (_refuted_by(right, asked) - self._refuted)
        self.causes = tuple(one for one in self.causes if _key(one) not in contradicted)
        if given and any(len(row.seen) >= _ENOUGH_WEIGHTS for row in wrong):
            self._bear_out(self._rows, wrong)
        if self.causes or not given:
            return False
        self.causes = tuple(match.cause for match in given.values())
        self._is_near, self._is_finite = False, True
        return True

    def retell(self, row: AveragedRow | None) -> None:
        """Let the words be about ``row``, as far as a mistake says anything of it."""
        if row is None:
            return
        mistakes = {one.mistake for one in self.causes if not one.rounding}
        replayed = list(_replays(row, mistakes))
        said = {key: match.cause for key, match in _matched(row, replayed).items()}
        for one in list(said.values()):
            told = {other.words for other in said.values() if other.mistake == one.mistake}
            words = one.words if len(told) == 1 else IN_GENERAL.get(one.mistake, "")  # one may be a chance
            said.setdefault((one.mistake, _ANYHOW), msgspec.structs.replace(one, way=_ANYHOW, words=words))
        asked = set(map(_key, self.causes))
        for made in replayed:
            for i, way in enumerate(made.ways):
                if (key := (made.cause, way)) in asked and key not in said:
                    said[key] = made.as_cause(i)
        self.causes = tuple(
            said.get(_key(one)) or (one if one.rounding else in_a_similar_case(one)) for one in self.causes
        )

    @property
    def is_borne_out(self) -> bool:
        """Whether a run besides the first has wrong results that a mistake gives which is left."""
        return bool(self._borne_out)

    @property
    def believed(self) -> tuple[Cause, ...]:
        """The causes that are left, unless more runs have spoken against all of them than for one.

        Nearly anything that overflows gives NaN: that nothing but NaN was seen bears out no one of them.
        """
        is_doubted = self._decided and not self._is_finite
        return () if is_doubted or self._is_contradicted else self.causes

    def _bear_out(self, rows: _Rows, wrong: Sequence[AveragedRow]) -> None:
        self._is_finite |= any(map(_has_numbers, wrong))
        self._is_nothing &= all(map(_is_zero, wrong))
        self._borne_out.append(rows.run)
        self._is_telling |= any(not isinstance(row, AttentionRow) or len(row.seen) >= _ENOUGH_WEIGHTS for row in wrong)

    @property
    def _is_contradicted(self) -> bool:
        """Whether more shapes are wrong in ways that none of the causes gives than bear them out.

        Of one shape ordinary numbers decide: of equal keys, say, other mistakes give the same. One shape will do if
        they are only borne out where rows see few keys, of which mistakes coincide whatever the numbers.
        """
        borne_out = set(self._borne_out)
        against = {
            shape
            for shape, is_ordinary in self._unexplained
            if (shape, True) not in borne_out and (is_ordinary or (shape, False) not in borne_out)
        }
        in_favour = [shape for shape, _ in self._borne_out if shape not in against]
        return len(against) > (len(in_favour) if self._is_telling else 0)

    @property
    def doubted(self) -> tuple[str, ...]:
        """The mistakes that may be behind NaN, where nothing but that was seen."""
        is_left = self._decided and not self._is_finite and not self._is_contradicted
        return tuple(dict.fromkeys(one.mistake for one in self.causes)) if is_left else ()

    def told(self) -> str:
        """The cause, if it is the only one left and has been borne out; else what may be it, or nothing.

        A rule, which says what is wrong in any case, is told if it gives the wrong rows of all runs, and within their
        bounds: a token more or less of many changes a result by little more. What right rows speak against is so in
        some rows alone, whatever decides in which.
        """
        is_sure = self._borne_out and not self._is_near and self._is_finite
        believed = () if self._is_contradicted else self.causes
        is_partial = any(_key(one) in self._refuted for one in believed)
        if is_partial or not self._borne_out or not self._is_general:
            believed = tuple(map(_without_rule, believed))
        else:
            believed = tuple(_without_rule(one) if _key(one) in self._inexact else one for one in believed)
        if self._is_nothing:  # that is what was seen, and all that leaves out every key explains it
            believed = tuple(one for one in believed if one.mistake in _NOTHING) or believed
        said = in_words(believed) or IN_GENERAL.get(common_to(one.mistake for one in believed), "")
        if said and is_partial and not any(one.tokens for one in believed):
            said += ", though not always"
        return said if is_sure or not said else f"perhaps {said}"


def _left_by(rows: _Rows, runs: Sequence[_Rows], among: Callable[[Cause], bool] | None = None) -> Survivors:
    """The mistakes that ``runs`` leave of those of ``rows``."""
    found = Survivors(rows, decided=True, among=among)
    telling = max(runs, key=lambda run: (run.told_by, run.longest), default=rows)
    if telling.told_by > rows.told_by:  # coincidences are fewer there; but it must be what the case shows
        other = Survivors(telling, decided=True, among=among)
        other.ask(rows)
        found = other if other.causes and other.is_borne_out else found
    for run in runs:
        found.ask(run)
    return found


def _as_long_as_another(rows: _Rows, row: AttentionRow, poison: Fill, nearby: Nearby | None) -> Diagnosis | None:
    """Name what a row without keys has read, if it got another's length, as other wrong rows and other runs have.

    That of an empty sequence is the length with which a row has no result.
    """
    if nearby is None or not rows.wrong() or not (of_this := _lengths_of_others(row)):
        return None
    runs = _runs_near(rows.case, poison, nearby)
    found = _left_by(rows, runs)
    mistakes = {one.mistake for one in found.believed}
    if "another_length" not in mistakes or mistakes - {"another_length"} - _NOTHING or not found.is_borne_out:
        return None
    counts = [{one.way for one in _lengths_of_others(empty)} for run in (rows, *runs) for empty in run.wrong_and_empty]
    if len(counts) < _FEWEST_EMPTY:
        return None
    everywhere = set.intersection(*counts)
    cause = next((one for one in of_this if one.way in everywhere), None)
    return None if cause is None else Diagnosis(cause.words, (cause,))


def _lengths_of_others(row: AttentionRow) -> list[Cause]:
    """The lengths with which a row without keys has what came out."""
    made = family("another_length", tokens.another_length(row))
    return [one.as_cause(i) for one in made for i in _nearly_given(row, one)]


def _has_numbers(row: AveragedRow) -> bool:
    return bool(row.got.isfinite().all())


def _key(one: Cause) -> Key:
    return one.mistake, one.way


def _without_rule(one: Cause) -> Cause:
    return msgspec.structs.replace(one, rule="")


def precision_of(runs: Iterable[Compared], poison: Fill) -> Precision | None:
    """Measure on runs which roundings a kernel makes; None if there are no runs."""
    seen = [_Rows(reference, poison, compared) for reference, compared in runs]
    if not seen:
        return None
    numerics, is_on_cpu = seen[0].reference.declaration.numerics, seen[0].reference.device == "cpu"
    return Precision([run.last() for run in seen], numerics, one_copy=is_on_cpu)


def _rounded(
    rows: _Rows, wrong: Sequence[Any], right: Sequence[Any], causes: Collection[str] | None = None
) -> WrongRows:
    is_on_cpu = rows.reference.device == "cpu"
    return WrongRows(wrong, right, one_copy=is_on_cpu, beside_empty=rows.wrong_if_empty, causes=causes)


def _replays(row: AveragedRow, mistakes: Collection[str] | None = None) -> Iterator[Family]:
    """Replay each of these mistakes on a row."""
    for one in MAKERS if isinstance(row, AttentionRow) else OF_MERGES:
        if mistakes is None or not one.mistakes.isdisjoint(mistakes):
            run_is_over()  # that it takes a while is not the kernel's doing
            yield from (made for made in one.made(row) if mistakes is None or made.cause in mistakes)


def _matched(row: AveragedRow, replayed: Iterable[Family]) -> dict[Key, Match]:
    found: dict[Key, Match] = {}
    for match in matches(row, replayed):
        found.setdefault(_key(match.cause), match)
    return found


def given_by_all(rows: Sequence[AveragedRow]) -> tuple[Cause, ...]:
    """The mistakes, roundings aside, that give all of some wrong rows. Those that give the first exactly rule."""
    found = _given_by_all(rows).values()
    exact = [match for match in found if match.left <= _SAME_BOUNDS]
    return tuple(match.cause for match in (exact or found))


def _given_by_all(wrong: Sequence[AveragedRow]) -> dict[Key, Match]:
    """The mistakes that give all these rows, as they are told of the first that tells anything."""
    first, *others = sorted(wrong, key=_says_little)
    every = _matched(first, _replays(first))
    if found := _kept_by_all(others, every):
        return found
    anyhow = {(mistake, _ANYHOW): match for (mistake, _), match in every.items() if mistake in _OF_SEVERAL_PLACES}
    return {
        key: Match(msgspec.structs.replace(match.cause, way=_ANYHOW), match.left)
        for key, match in _kept_by_all(others, anyhow).items()
    }


def _kept_by_all(rows: Iterable[AveragedRow], found: dict[Key, Match]) -> dict[Key, Match]:
    for row in rows:
        kept = _kept_by(row, found) if found else set()
        found = {key: match for key, match in found.items() if key in kept}
    return found


def _says_little(row: AveragedRow) -> tuple[bool, bool, int]:
    """A row that is no number, or 0, is given by many mistakes; one of many wrong elements by few."""
    return not row.is_finite, _is_zero(row), -int(_beyond(row).sum())


def _beyond(row: AveragedRow) -> Tensor:
    return ~((row.got - row.expected).abs() <= row.bound)


def _is_zero(row: AveragedRow) -> bool:
    """Whether all that is wrong of the output is 0, as where nothing was averaged."""
    return bool((row.got.abs() <= row.bound)[_beyond(row)].all())


def _kept_by(row: AveragedRow, keys: Iterable[Key]) -> set[Key]:
    """Which of the mistakes give a row, or say nothing of it."""
    wanted = set(keys)
    replayed = list(_replays(row, {mistake for mistake, _ in wanted}))
    found = set(_matched(row, replayed))
    found |= {(mistake, _ANYHOW) for mistake, _ in found}
    return wanted & (found | silent(row, replayed))


def _kept_exactly(wrong: Sequence[AveragedRow], keys: Iterable[Key]) -> tuple[set[Key], set[Key]]:
    """Which of the mistakes give all these rows, and which of these only nearly: none where another does exactly."""
    kept, exactly, near = set(keys), set[Key](), set[Key]()
    for row in wrong:
        replayed = list(_replays(row, {mistake for mistake, _ in kept}))
        found = _matched(row, replayed)
        within = {key for key, match in found.items() if match.left <= _SAME_BOUNDS}
        given, within = ({*of_row, *((mistake, _ANYHOW) for mistake, _ in of_row)} for of_row in (found, within))
        is_given = kept & within and _has_numbers(row) and not _is_zero(row)
        kept &= given if is_given else given | silent(row, replayed)  # which is none of what 0 / 0 may make
        exactly |= within
        near |= given - within
    near &= kept
    return (kept - near, set()) if kept & exactly - near else (kept, near)


def _refuted_by(right: Sequence[AveragedRow], keys: Iterable[Key]) -> set[Key]:
    """Keep the causes that would make a right row wrong."""
    wanted = set(keys)
    found: set[Key] = set()
    for row in right:
        for replayed in _replays(row, {mistake for mistake, _ in wanted}):
            for one in (replayed, in_output_alone(replayed)):
                if any((one.cause, way) in wanted for way in one.ways):
                    is_wrong = ((one.left_open(row) > REFUTED) & ~one.leaves_open(row)).tolist()
                    found |= {(one.cause, way) for way, wrong in zip(one.ways, is_wrong, strict=True) if wrong}
    return wanted & found


def _of_idle_splits(comparisons: Sequence[Comparison]) -> Cause | None:
    """Splits of output 0 whose log-sum-exp is finite, if the result is right once they count for nothing."""
    every = {one.name: one for one in comparisons}
    if not {"out", "lse", "partial_out", "partial_lse"} <= every.keys():
        return None
    parts, lses = (every[name].got for name in ("partial_out", "partial_lse"))
    idle = (parts == 0).all(-1) & lses.isfinite()
    merged = dict(zip(("out", "lse"), merge_all(parts, lses.masked_fill(idle, -torch.inf)), strict=True))
    others = (error_ratio(got, every[name].expected, every[name].bound) for name, got in merged.items())
    if not bool(idle.any()) or any(bool((one > 1).any()) for one in others):
        return None
    found = sorted(set(lses[idle].tolist()))
    told = f"lse = {found[0]:g}" if len(found) == 1 else "a finite lse"
    return Cause(mistake="idle_splits", way=told, words=f"a split without tokens has {told}, expected -inf")


def _read_by_empty(row: AttentionRow) -> Diagnosis | None:
    """Tokens of others that a row without keys has read."""
    for one in tokens.slots_past_the_end(row):
        for i in _nearly_given(row, one):
            cause = one.as_cause(i)
            return Diagnosis(cause.words, (cause,))
    return None


def _nearly_given(row: AttentionRow, one: Family) -> list[int]:
    """The ways that give what came out of a row without keys, to within the last bit."""
    roundoff = 2 * torch.finfo(row.dtype).eps * one.out.abs()
    return ((one.out - row.got).abs() <= roundoff).all(-1).nonzero()[:, 0].tolist()


def _seen_by_none(row: AttentionRow, poison: Fill, nearby: Nearby | None) -> Diagnosis | None:
    """The mistake about a mask by which a query sees keys that has none, if runs that show more leave only that."""
    if nearby is None or not row.case.hides_keys or row.case.seen(row.row) is None:
        return None
    given = set[Key]()
    for one in family("mask", formulas.masks(row)):
        given |= {_key(one.as_cause(i)) for i in _nearly_given(row, one)}
    runs = _runs_near(row.case, poison, nearby) if given else []
    if not runs:
        return None
    found = Survivors(max(runs, key=lambda run: run.told_by), decided=True)
    for run in runs:
        found.ask(run)
    is_shown = found.is_settled and set(map(_key, found.believed)) <= given
    return Diagnosis(found.told(), found.believed) if is_shown else None


def _zeros_counted_by_empty(row: AttentionRow, poison: Fill, nearby: Nearby | None) -> Diagnosis | None:
    """The zeros past the end that a row without keys counts, if those beside it are filled up with them to its length.

    The log-sum-exp of a single one is 0, which a kernel may also write by another mistake.
    """
    if nearby is None or (count := tokens.zeros_counted(row)) is None:
        return None
    runs = [_Rows(other, poison, compared) for other, compared in nearby(beside_empty(row.case))]
    for run in runs:
        wrong = [one for one in run.wrong() if isinstance(one, AttentionRow)]
        filled, of_empty = (
            {None if (more := tokens.zeros_counted(one)) is None else one.num_tokens + more for one in found}
            for found in (wrong, run.without_keys)
        )
        if filled != of_empty or len(filled) != 1 or None in filled:
            return None
    cause = tokens.of_zeros(row, count)
    return Diagnosis(f"{_has_no_keys(row.case, row.row)}; {cause.words}", (cause,)) if runs else None


def _has_no_keys(case: AttentionCase, number: int) -> str:
    return f"sequence {number} is empty" if case.seen(number) is None else f"{row_words(case, number)} sees no key"


def _of_empty(case: AttentionCase, failed: Comparison, number: int, head: int) -> Diagnosis:
    lse = "the sink" if case.variant.has_weighty_sinks else "-inf"
    words = f"{_has_no_keys(case, number)}: expected out = 0 and lse = {lse}"
    if failed.name == "lse" and lse == "-inf" and -math.inf < float(failed.got[number, head]) < LOWEST_EXPONENT:
        begins = f"{words}; the running maximum begins at a finite number"
        return Diagnosis(begins, (Cause(mistake=OF_EMPTY_ROWS, way="finite maximum", words=begins),))
    return Diagnosis(words)


def _rows_where(comparisons: list[Comparison], holds: Callable[[Comparison], Tensor]) -> Tensor:
    """Whether something holds of any element of a row and a head."""
    found = torch.zeros((), dtype=torch.bool, device="cpu")
    for one in comparisons[:2]:
        mask = holds(one).cpu()
        if one.name.endswith("lse") and one.axes[0] == "head":
            mask = mask.mT
        if one.name in ("out", "output", "lse", "output_lse"):
            found = found | (mask if mask.dim() == 2 else mask.any(-1))
    return found


def past_the_end_within_bounds(
    reference: Reference, poison: Fill, comparisons: list[Comparison], index: tuple[int, ...]
) -> Diagnosis | None:
    """Tokens past the end that take weight in row ``index``, which is within its bounds, but nearer to that."""
    case = reference.case
    if not isinstance(case, AttentionCase):
        return None
    number, head = index[:2]
    if case.row_lens[number] == 0:
        return None
    held = poison_value(getattr(torch, case.kv_dtype), poison)
    row = row_of(reference, case, comparisons, number, head, held)
    if not bool(row.got.isfinite().all()):
        return None
    missed = float((row.got - row.expected).abs().max())
    for one in tokens.past_the_end(row):
        others = (row.got - one.out).abs().amax(-1).nan_to_num(torch.inf)
        if float(others.min()) < missed / 2:
            nearest = (others <= others.min() * (1 + _SAME)).nonzero()[:, 0]
            cause = one.as_cause(int(nearest[-1]))  # of numbers that the result does not tell, the largest
            return Diagnosis(cause.words, (cause,))
    return None


def row_of(
    reference: Reference, case: AttentionCase, comparisons: list[Comparison], number: int, head: int, poison: float
) -> AttentionRow:
    """Query token `number` and `head` of a case, and what came out there."""
    out, *rest = comparisons
    values = reference.values_on_cpu
    has_lse = bool(rest) and rest[0].name == "lse"
    return AttentionRow(
        case=case,
        values=values.dequantised(),
        kv_scales=values.kv_scales,
        row=number,
        head=head,
        got=_here(out.got[number, head]),
        got_lse=float(rest[0].got[number, head]) if has_lse else None,
        bound=_here(out.bound[number, head]),
        lse_bound=float(rest[0].bound[number, head]) if has_lse else 0.0,
        poison=poison,
    )


def _here(tensor: Tensor) -> Tensor:
    return tensor.double().cpu()
