"""Finds out, with a few dozen small cases, what a kernel takes where its declaration leaves that open. Torch-free.

A field of `Supports` of which nothing was said promises everything, which few kernels mean. So each value of such a
field is probed. One is left out of the contract only if every probe that has it fails, where the same probe with the
kernel's ordinary value passes; what that is taken for depends on how it fails (docs/declaring.md):

* A *limit* is what the kernel refuses: it raises, throughout, for a dtype, head size, page size, GQA ratio, layout, for
  strides, padding tokens, or where there are no keys. What attnfuzz itself objects to in a result is no refusal.
* A *convention* is what all evidence bears out: a log-sum-exp that is written in no row, or is right to base 2 in all,
  short and long ones by themselves; its axes; roundings that some designs make on purpose (`Numerics`): a replay of one
  gives a wrong result, no mistake gives it as nearly, no probe fails where it is declared, and without that some fail
  of each shape (roundings of scores and weights; sums over tiles show in some shapes only). The search tries those
  in the same way that it comes upon itself (`attnfuzz.campaign.triage.investigation`).
* A *question* is what is silently wrong: for a layout where layouts differ, for strides, without keys, for an LSE of
  +inf where -inf is merged rightly, where freed pages lie behind a window, for all page sizes but one. Only its author
  knows whether the kernel was ever meant for it. The rest is searched without, and the question told with its case.

What depends on earlier calls (the case passes in a fresh process), reads dead memory or dies for want of keys, or is
wrong on some path only, is none of these: strides that the kernel gets right once other tensors lie likewise, a
log-sum-exp that some rows have, scores that are rounded for short sequences. That stays in the contract, and the search
tells it as a finding. So do wrong numbers for some sizes: they are a missing mask or a wrong head map. Where only the
log-sum-exp of a row without keys is wrong, the kernel has thought of these.

A kernel with a bug in all ordinary cases has limits all the same. So where ragged lengths are never right, full pages
are what is ordinary; and where the log-sum-exp never is, the output alone is looked at.

What a kernel rounds less than it may is told, and nothing rests on it: under stricter `Numerics` than it has, probes
run that a kernel with these roundings fails, short sequences of weights that add up their errors. That is the sum of
rounded weights, which a log-sum-exp shows, and weights and partial results in 16 bits, both at once, since either hides
in what the other may cost. Whether matrix units truncate cannot be told: the bound of float32 sums is far wider.

Where a kernel is verified (``verifying``), what it does silently is not taken for its contract: there are no questions,
and numbers that are rounded without a declaration stay findings.

Cases are made, not drawn: the same kernel gets the same probes wherever it is asked.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import msgspec

from attnfuzz.campaign.probe_cases import (
    TOLD_ON_ALL_PATHS,
    Pair,
    ProbeCases,
    behind_a_window,
    points,
    strided_beside,
    told_by_either_infinity,
    with_ordinary,
)
from attnfuzz.cases.supported import supports_case
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import is_refusal, is_told_of_all, lacks_lse
from attnfuzz.isolation.outcomes import DeadlinePassed, ServiceError
from attnfuzz.judging.runner import ProblemUnusable, Runner
from attnfuzz.minimise import minimise
from attnfuzz.mistake import READ_BEFORE_WRITTEN
from attnfuzz.oracles.registry import ACCURACY, DEAD_MEMORY, HANG, oracle_of
from attnfuzz.problems.cases import (
    CASE_TYPES,
    AttentionCase,
    Case,
    MergeStatesCase,
    PagedDecodeCase,
    encode_case,
    has_query_lens,
)
from attnfuzz.problems.choices import (
    BLOCK_SIZES,
    GQA_RATIOS,
    HEAD_SIZES,
    block_size_rank,
    dtypes_of,
    head_counts_of,
    head_size_rank,
    is_power_of_two,
    layouts_of,
    lying_alike,
    strided_tensors_of,
    without_lse,
)
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.recipes import STRIDE_KINDS, StrideKind
from attnfuzz.problems.supports import LseKind, LseLayout, Strides, Supports, as_call
from attnfuzz.verdict import Failure, Verdict

_TIMEOUT_S = {"cpu": 3.0, "cuda": 20.0}
_PATIENCE_S = {"cpu": 180.0, "cuda": 600.0}
"""For all probes of a kernel, beside which it may be searched. Builds may take as long as they need."""
_MOST_PROBES = 80
"""That the kernel answers; what is not known by then stays in the contract."""
_MOST_REFUSALS = 320
"""Probes that it refuses, which cost little."""
_FEWEST_PROBES = 16
"""Whatever they take, before patience ends: a compiler may need seconds for each."""
_MOST_HANGS = 4
_SHRINKING_S = {"cpu": 2.0, "cuda": 6.0}
_MOST_SHRINKING = 60
"""Runs to make the case of a question small."""
_UNDECLARED = Supports()
_ORDINARY = Numerics()
_PROMISES = {"probabilities": "float32", "row_sum": "float32", "partials": "float32", "matmul": "ieee"}
"""Values of `Numerics` for kernels that round less than they may."""
_MOST_ROUNDINGS = 4
_MOST_UNNAMED = 2
_STRICTER = ({"probabilities": "float32", "partials": "float32"}, {"row_sum": "float32"})
"""Arithmetic that probes can tell from what is allowed undeclared. Where weights are not rounded, their sum is not."""
_MOST_STRICT = 24
"""Further probes for that."""
_LEAST: dict[str, Any] = {
    "strides": "contiguous",
    "lse": "none",
    "empty_sequences": False,
    "empty_state_lse": ("-inf",),
    "padding_tokens": False,
    "freed_pages": False,
}
"""Values of `Supports` that the least of kernels takes."""
_MOST_OPTIONS = 3
_SEEDS = (0, 1)
_LONG = 600
"""Tokens, of which many kernels make several partial results."""

Outcome = Literal["passes", "raises", "wrong", "dies", "unknown"]
Disposition = Literal["limit", "convention", "question"]
Values = tuple[Any, ...]
Recipe = tuple[tuple[str, StrideKind], ...]
"""Tensors and how they lie in memory."""


class LeftOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All but ``kept`` of what the field ``name`` of `Supports` may hold, ``before``: a kernel does not take it.

    ``values`` are those of them that were tried. How it shows that they are not taken is ``how``; ``failure`` is that
    of ``case``, the first of them, and ``said`` what the kernel, or an oracle, said of it. Of ``strides``, the
    values are the names of tensors that do not lie in memory as ``kept`` says.
    """

    name: str
    kept: Any
    values: Values
    how: Outcome
    said: str
    before: Any = None
    case: Any = None
    failure: Failure | None = None

    @property
    def disposition(self) -> Disposition:
        """Whether it is taken for a limit, a convention or a question."""
        if self.name in ("lse", "lse_layout") or self.name in Numerics.__struct_fields__:
            return "convention"
        return "limit" if self.how == "raises" else "question"

    def __str__(self) -> str:
        return _words(self.name, self.kept, self.values, _HOW[self.how])


class Stricter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a kernel that may round more fares with fields of `Numerics` at ``fields``, in ``probes`` that would tell.

    ``ratio`` is its largest error over the bound that these leave, or the first above 1.
    """

    fields: dict[str, str]
    ratio: float
    probes: int

    @property
    def holds(self) -> bool:
        """Whether the kernel may declare ``fields``, as far as probes can tell."""
        return self.ratio <= 1

    def __str__(self) -> str:
        text = as_call("Numerics", self.fields)
        if self.holds:
            return (
                f"{text} held in {self.probes} probes (largest error/bound {self.ratio:.2g}); "
                "declared, it is what the kernel is held to from then on"
            )
        defaults = " or ".join(f'{name}="{getattr(_ORDINARY, name)}"' for name in self.fields)
        return f"its error is {self.ratio:.3g} x the bound of {text}; the default, {defaults}, allows this"


class Failing(msgspec.Struct, frozen=True):
    """``case`` fails as ``failure`` says, whatever the kernel declares: in a fresh process, or once ``before`` has run
    there."""

    case: Any
    failure: Failure
    before: Any = None


class Inferred(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``supports`` is what the kernel takes, with all that it declares; ``left_out``, what its declaration left open.

    ``numerics`` are the roundings that it makes on purpose. ``stricter``: those it may make and makes, or does not.

    ``works``: whether any probe passed. If none did, nothing but refusals could be told from a bug. ``failing``: the
    first ordinary case of a kernel that is right about none, and probes that failed for what had run before them.
    """

    target: str
    supports: Supports
    left_out: tuple[LeftOut, ...]
    probes: int
    works: bool
    numerics: Numerics = Numerics()
    stricter: tuple[Stricter, ...] = ()
    failing: tuple[Failing, ...] = ()

    @property
    def kept(self) -> Numerics:
        """``numerics`` with all stricter arithmetic that held."""
        fields = {name: value for one in self.stricter if one.holds for name, value in one.fields.items()}
        return msgspec.structs.replace(self.numerics, **fields)

    @property
    def questions(self) -> tuple[LeftOut, ...]:
        """Wrong results without a refusal: the author has to say whether they are meant."""
        return tuple(one for one in self.left_out if one.disposition == "question")

    @property
    def settled(self) -> tuple[LeftOut, ...]:
        """Limits and conventions: what needs no answer."""
        return tuple(one for one in self.left_out if one.disposition != "question")

    @property
    def declarable(self) -> Supports:
        """``supports`` as far as no question has to be answered for it."""
        supports = self.supports
        for question in reversed(self.questions):
            supports = msgspec.structs.replace(supports, **{question.name: question.before})
        return supports

    @property
    def text(self) -> str:
        """``Supports(...)`` and, if any, ``Numerics(...)``, to be pasted: what is declared, and what was inferred."""
        return self._called(self.declarable)

    @property
    def searched(self) -> str:
        """The declaration with an answer to each question: the kernel is searched in it."""
        return self._called(self.supports)

    def _called(self, supports: Supports) -> str:
        calls = {"Supports": supports.declared(), "Numerics": self.numerics.declared()}
        return ", ".join(as_call(name, fields) for name, fields in calls.items() if fields or name == "Supports")

    def __str__(self) -> str:
        limits = ", ".join(str(one) for one in self.settled if one.disposition == "limit")
        conventions = ", ".join(str(one) for one in self.settled if one.disposition == "convention")
        told = f"Not searched, as {self.target} refuses it: {limits}. " if limits else ""
        told += f"Taken for the design of {self.target}, as every case shows it: {conventions}. " if conventions else ""
        return f"{told}To declare this: {self.text}"


def with_declared(declaration: Declaration, supports: Supports, numerics: Numerics = _ORDINARY) -> Declaration:
    """``declaration`` with what it leaves at the default as in these two, and told to be ``assumed``."""
    fields = {
        name: value
        for name, value in supports.declared().items()
        if name != "where" and declaration.supports.leaves_open(name)
    }
    roundings = {name: value for name, value in numerics.declared().items() if declaration.numerics.leaves_open(name)}
    return msgspec.structs.replace(
        declaration,
        supports=msgspec.structs.replace(declaration.supports, **fields),
        numerics=msgspec.structs.replace(declaration.numerics, **roundings),
        assumed=(*declaration.assumed, *fields, *roundings),
    )


def adopting(numerics: Numerics, named: Mapping[str, str]) -> Numerics:
    """``numerics`` with what it leaves open as in ``named``."""
    return msgspec.structs.replace(
        numerics, **{one: value for one, value in named.items() if numerics.leaves_open(one)}
    )


def designs_of(numerics: Numerics, designs: Iterable[Mapping[str, str]]) -> Iterator[Numerics]:
    """The ``designs`` that a kernel with ``numerics`` may be declared as, the likeliest first.

    None that is less likely than one which is declared away: that is what the kernel does, and must not. Nor any of a
    kernel that promises to round less than it may: whoever says that knows what it rounds.
    """
    if any(getattr(numerics, name) == value for name, value in _PROMISES.items()):
        return
    for named in designs:
        declared = adopting(numerics, named)
        if any(getattr(declared, name) != value for name, value in named.items()):
            return
        if declared != numerics:
            yield declared


def roundings_told(before: Numerics, after: Numerics, how: Outcome, failure: Failure | None) -> list[LeftOut]:
    """Fields that ``after`` says and ``before`` leaves open, as conventions of a kernel that failed so without it."""
    said = "" if failure is None else failure.message
    return [
        LeftOut(name, value, (getattr(before, name),), how, said)
        for name, value in after.declared().items()
        if before.leaves_open(name)
    ]


def infer(
    runner: Runner,
    declaration: Declaration,
    *,
    is_over: Callable[[], bool] = lambda: False,
    verifying: bool = False,
    stricter: bool = True,
    begin: Callable[[Supports, Sequence[Failing]], None] = lambda supports, failing: None,
    patience_s: float = math.inf,
) -> Inferred:
    """Find out what the kernel takes, as far as its declaration leaves that open; no probe is made once ``is_over``.

    ``stricter``: also what it rounds less than it may. ``begin`` is called early, with what is known of a kernel that
    is right about ordinary cases: it takes that for certain, whatever else it will be found to take; and with those
    that it fails in a way that no declaration ends. ``patience_s``: for a kernel that is right about nothing, of which
    little can be found out. Raises what ``runner.judge`` raises.
    """
    if isinstance(declaration.problem, OpenProblem):  # its fields say what a case may have
        return Inferred(target=declaration.target, supports=declaration.supports, left_out=(), probes=0, works=True)
    probes = _Probes(runner, declaration, is_over, patience_s)
    inference = _Inference(probes, declaration, verifying, asks_stricter=stricter)
    inference.run(begin)
    return Inferred(
        target=declaration.target,
        supports=inference.supports,
        left_out=tuple(inference.left_out),
        probes=probes.count,
        works=inference.works,
        numerics=probes.numerics,
        stricter=tuple(inference.stricter),
        failing=tuple(probes.failing),
    )


@dataclass(frozen=True, slots=True)
class _ProbeOutcome:
    """The outcome of a probe, judged by an LSE as ``lse`` says, if it was made. ``beside``: its like that passes."""

    outcome: Outcome
    failure: Failure | None = None
    case: Case | None = None
    lse: LseKind = "natural"
    beside: Case | None = None


_PASSED = _ProbeOutcome("passes")
_UNKNOWN = _ProbeOutcome("unknown")


class _Probes:
    """Judges cases under any contract, each once, until there have been enough: nothing is known of any further."""

    def __init__(
        self, runner: Runner, declaration: Declaration, is_over: Callable[[], bool], patience_s: float
    ) -> None:
        self._runner = runner
        self._is_over = is_over
        self._declaration = declaration
        self.numerics = declaration.numerics
        self.is_on_gpu = runner.device == "cuda"
        self._seen: dict[tuple[bytes, str, Numerics], _ProbeOutcome] = {}
        self._began = time.monotonic()
        self._patience_s = min(patience_s, _PATIENCE_S[runner.device])
        self._hangs = 0
        self._refused = 0
        self._is_told = False
        self.count = 0
        self.failing: list[Failing] = []

    def __call__(self, case: Case, supports: Supports) -> _ProbeOutcome:
        key = encode_case(case), supports.lse, self.numerics
        if key not in self._seen:
            if self._is_enough():
                return _UNKNOWN
            self.count += 1
            self._seen[key] = self._judge(case, supports)
            self._refused += self._seen[key].outcome == "raises"
        return self._seen[key]

    def works(self) -> None:
        """There is a lot to find out."""
        self._patience_s = _PATIENCE_S[self._runner.device]

    def fails_first(self, seen: _ProbeOutcome, supports: Supports) -> bool:
        """Whether a case fails in a fresh process, too: what depends on earlier calls is a bug whatever is declared."""
        if seen.case is None or seen.failure is None:
            return False
        self._runner.restart()
        if self._judge(seen.case, supports).outcome in ("raises", "wrong", "dies"):
            return True
        if seen.beside is not None:
            self._runner.restart()
            self._judge(seen.beside, supports)
            after = self._judge(seen.case, supports)
            if after.failure is not None:
                self.failing.append(Failing(seen.case, after.failure, seen.beside))
        return False

    def smallest(
        self, seen: _ProbeOutcome, supports: Supports, within: Supports, ordinary: Callable[[Case], Case | None]
    ) -> _ProbeOutcome:
        """``seen``, or a smaller case that ``supports`` permits, ``within`` does not, and that fails in this way.

        What is ``ordinary`` beside it, if anything is, passes: else the case would fail for something else as well.
        """
        found = seen

        def fails(case: Case) -> bool:
            nonlocal found
            if supports_case(within, self._declaration.options, case) or self._is_enough():
                return False
            other = self._judge(case, supports)
            if other.outcome != seen.outcome:
                return False
            beside = ordinary(case)
            if beside is not None and self._judge(beside, supports).outcome != "passes":
                return False
            found = other
            return True

        if seen.case is not None:
            options, until = self._declaration.options, time.monotonic() + _SHRINKING_S[self._runner.device]
            minimise(seen.case, fails, supports=supports, options=options, deadline=until, max_calls=_MOST_SHRINKING)
        return found

    def ratio(self, case: Case, supports: Supports, fields: dict[str, str]) -> float | None:
        """The largest error over the bound with ``fields`` of `Numerics` as well; None unless that is all there is."""
        if self._is_enough():
            return None
        verdict = self._verdict(case, supports, msgspec.structs.replace(self.numerics, **fields))
        if verdict is None or (verdict.failure is not None and verdict.failure.oracle != ACCURACY.name):
            return None
        return verdict.error_ratio if math.isfinite(verdict.error_ratio) else None

    def _is_enough(self) -> bool:
        is_asked = self.count - self._refused >= _MOST_PROBES or self._refused >= _MOST_REFUSALS
        is_late = time.monotonic() >= self._began + self._patience_s and self.count >= _FEWEST_PROBES
        return is_asked or is_late or self._hangs >= _MOST_HANGS or self._is_told or self._is_over()

    def _judge(self, case: Case, supports: Supports) -> _ProbeOutcome:
        verdict = self._verdict(case, supports, self.numerics)
        if verdict is None:
            return _UNKNOWN
        if (failure := verdict.failure) is None:
            return _PASSED
        self._hangs += failure.oracle == HANG.name
        # all that the kernel does will be told of it
        self._is_told |= is_told_of_all(failure)
        dies = oracle_of(failure.oracle).ends_process
        outcome: Outcome = "raises" if is_refusal(failure) else "dies" if dies else "wrong"
        return _ProbeOutcome(outcome, failure, case, supports.lse)

    def _verdict(self, case: Case, supports: Supports, numerics: Numerics) -> Verdict | None:
        """None where that is told when the search meets it."""
        declaration = msgspec.structs.replace(self._declaration, supports=supports, numerics=numerics)
        timeout_s = _TIMEOUT_S[self._runner.device]
        try:
            return self._runner.judge(declaration, case, timeout_s=timeout_s, run_twice=False, relations=())
        except (DeadlinePassed, ServiceError, CaseTooLarge, ProblemUnusable):
            return None


@dataclass(slots=True)
class _Inference:
    """``point`` holds the one value of each field that probes have where they are about another one.

    ``is_even``: ordinary cases have sequences of one length, which fill their pages. ``has_right_lse``: whether the
    log-sum-exp of some ordinary case is right, so that it tells what is taken.
    """

    probes: _Probes
    declaration: Declaration
    verifying: bool = False
    asks_stricter: bool = True
    supports: Supports = _UNDECLARED
    left_out: list[LeftOut] = field(default_factory=list)
    stricter: list[Stricter] = field(default_factory=list)
    point: Supports = _UNDECLARED
    works: bool = False
    is_even: bool = False
    has_right_lse: bool = True
    _fails_in: str = ""

    def run(self, begin: Callable[[Supports, Sequence[Failing]], None]) -> None:
        self.supports = self.declaration.supports
        has_pages = "block_table" in CASE_TYPES[self.declaration.problem].tensor_names
        if self.declaration.problem == "merge_states":
            self._find_merge()
        else:
            self._find_point()
        if self.works:
            self.probes.works()
        else:
            self.probes.failing += self._failing()[:1]
        if self.works and not self.is_even:
            begin(self._least(), [one for one in self._failing() if one.failure.cause == READ_BEFORE_WRITTEN])
        if self.declaration.problem != "merge_states":
            if not self.verifying:
                self._numerics()
            if has_pages:
                self._layouts()
            self._lse()
        self._strides()
        self._empty()
        cases = self._cases(self.point)
        if has_query_lens(self.declaration.problem):
            padded = self._cases(self.point, padding_tokens=2)
            self._leave_out_if("padding_tokens", False, True, list(zip(cases, padded, strict=True)), ("raises",))
        if "window" in self.supports.variants:
            freed = [behind_a_window(case) for case in cases if isinstance(case, PagedDecodeCase)]
            self._leave_out_if("freed_pages", False, True, freed, ("wrong",), only=DEAD_MEMORY.name)
        self._leave_out_of("dtypes", dtypes_of(self.supports), ("raises",))
        self._sizes("head_sizes", (*HEAD_SIZES, 32), head_size_rank, (16, 64, 128, 256, 13, 40, 80, 192))
        if self.declaration.problem != "merge_states":
            self._sizes("gqa_ratios", GQA_RATIOS, lambda ratio: ratio, (2, 8, 16, 3, 6))
        if has_pages:
            self._block_sizes()
        if self.asks_stricter and self.works and not self.verifying and self.declaration.problem != "merge_states":
            self._stricter()

    def _failing(self) -> list[Failing]:
        """Failures of ordinary cases that are no refusals."""
        seen = map(self._output, self._cases(self.point)) if self.declaration.problem != "merge_states" else ()
        return [
            Failing(one.case, one.failure)
            for one in seen
            if one.failure is not None and one.outcome in ("wrong", "dies")
        ]

    def _least(self) -> Supports:
        """The least that a kernel takes which is right about ordinary cases: what these have, where all is left
        open."""
        least = {name: getattr(self.point, name) for name in _NOUNS} | _LEAST
        if self._is_in_parts or self.declaration.problem == "merge_states":  # their states go by it
            least["lse"] = self.supports.lse
        return msgspec.structs.replace(
            self.supports, **{name: value for name, value in least.items() if self._is_open(name)}
        )

    def _is_open(self, name: str) -> bool:
        return self.declaration.supports.leaves_open(name)

    @property
    def _is_in_parts(self) -> bool:
        """Whether the output is there only once partial states are merged by their log-sum-exp."""
        return self.declaration.problem == "split_decode"

    def _leave_out(self, name: str, kept: object, values: Values, seen: _ProbeOutcome) -> None:
        before, supports = getattr(self.supports, name), self.supports
        self.supports = msgspec.structs.replace(supports, **{name: kept})
        found = LeftOut(name, kept, values, seen.outcome, "", before, seen.case, seen.failure)
        if found.disposition == "question":
            if self.verifying or seen.case is None:
                self.supports = supports
                return
            within = msgspec.structs.replace(supports, lse=seen.lse)
            small = self.probes.smallest(seen, within, self.supports, lambda one: with_ordinary(one, name, self.point))
            found = msgspec.structs.replace(found, case=small.case, failure=small.failure)
        said = "" if found.failure is None else found.failure.message
        self.left_out.append(msgspec.structs.replace(found, said=said))

    def _leave_out_if(
        self, name: str, kept: object, value: object, pairs: Sequence[Pair], outcomes: Sequence[Outcome], only: str = ""
    ) -> None:
        """Leave ``value``, which the second case of each pair has, out if each fails so, by the oracle ``only``."""
        seen = _throughout(self._result, pairs, outcomes) if self._is_open(name) else None
        if seen is not None and seen.failure is not None and only in ("", seen.failure.oracle):
            self._leave_out(name, kept, (value,), seen)

    # What an ordinary case is

    def _find_point(self) -> None:
        """The first of some ordinary combinations of values for which the kernel is right about anything."""
        ordinary = list(points(self.declaration))
        self.point = ordinary[0]
        if self._is_right_about_any(ordinary):
            return
        if self._is_in_parts and self._is_open("lse"):
            natural, first = self.supports, self._output(self._cases(self.point)[0])
            self.supports = msgspec.structs.replace(natural, lse="base2")
            found = self._is_right_about_any(ordinary[:1])
            self.supports = natural
            if found:
                self._leave_out("lse", "base2", ("natural",), first)
                return
        raising = [self._output(case).outcome == "raises" for case in self._cases(ordinary[0])]
        if all(raising):  # whatever it does for another value is better
            for point in ordinary:
                if not all(self._output(case).outcome == "raises" for case in self._cases(point)):
                    self.point = point
                    return

    def _is_right_about_any(self, ordinary: Sequence[Supports]) -> bool:
        for point in ordinary:
            for self.is_even in (False, True):
                if any(self._output(case).outcome == "passes" for case in self._cases(point)):
                    self.point, self.works = point, True
                    return True
        self.is_even = False
        return False

    def _find_merge(self) -> None:
        """Which logarithms it takes, and on which axes: those that make the output right."""
        self.point = next(points(self.declaration))
        layouts: tuple[LseLayout, ...] = (
            get_args(LseLayout) if self._is_open("lse_layout") else (self.supports.lse_layout,)
        )
        kinds: tuple[LseKind, ...] = ("natural", "base2") if self._is_open("lse") else (self.supports.lse,)
        first: _ProbeOutcome | None = None
        for layout in layouts:
            for kind in kinds:
                point = msgspec.structs.replace(self.point, lse=kind, lse_layout=layout)
                seen = [self.probes(case, point) for case in self._cases(point)]
                first = first or next((one for one in seen if one.failure is not None), None)
                unwritten = all(one.failure is not None and lacks_lse(one.failure) for one in seen)
                if unwritten and kind == "natural" and self._is_open("lse"):
                    alone = msgspec.structs.replace(point, lse="none")
                    cases = [*self._cases(alone), *ProbeCases(self.declaration, alone).single_rows()]
                    if (
                        all(self.probes(case, alone).outcome == "passes" for case in cases)
                        and self._lse_of(cases, point) == "none"
                    ):
                        self._take_merge(alone, seen[0])
                        return
                if all(one.outcome == "passes" for one in seen):
                    self._take_merge(point, first or _PASSED)
                    return
        self.works = any(self.probes(case, self.point).outcome == "passes" for case in self._cases(self.point))
        if not self.works and self.supports.lse == "natural":
            self.has_right_lse = False
            self.works = all(self._output(case).outcome == "passes" for case in self._cases(self.point))

    def _take_merge(self, point: Supports, seen: _ProbeOutcome) -> None:
        self.point, self.works = point, True
        for name in ("lse", "lse_layout"):
            if getattr(point, name) != getattr(self.supports, name):
                self._leave_out(name, getattr(point, name), (getattr(self.supports, name),), seen)

    def _cases(self, point: Supports, **fields: Any) -> list[Case]:
        return ProbeCases(self.declaration, point, self.is_even).ordinary(**fields)

    def _output(self, case: Case) -> _ProbeOutcome:
        """The verdict on the output alone, or on what partial states are merged to."""
        point = msgspec.structs.replace(self.point, lse=self.supports.lse)
        return self.probes(case, without_lse(self.declaration.problem, point))

    def _result(self, case: Case) -> _ProbeOutcome:
        """The verdict on all that the kernel is believed to return, and rightly."""
        if not self.has_right_lse:
            return self._output(case)
        return self.probes(case, msgspec.structs.replace(self.point, lse=self.supports.lse))

    # What is rounded on purpose

    def _numerics(self) -> None:
        """Roundings that explain all that is wrong with ordinary numbers, whichever logarithm the kernel returns.

        One that it returns is evidence, and not left out: what is wrong with weights alone is not rounded scores.
        """
        is_open = self._is_open("lse") and not self._is_in_parts
        kinds: tuple[LseKind, ...] = get_args(LseKind) if is_open else (self.supports.lse,)
        before = self.probes.numerics
        for kind in kinds:
            point = msgspec.structs.replace(self.point, lse=kind)
            natural = (self.probes(case, self.point).failure for case in self._cases(self.point))
            if kind == "none" and is_open and not all(one is not None and lacks_lse(one) for one in natural):
                continue
            first = self._explained_by(point)
            if first is not None and self._is_throughout(before, point):
                self.left_out += roundings_told(before, self.probes.numerics, first.outcome, first.failure)
                return
            self.probes.numerics = before

    def _is_throughout(self, before: Numerics, point: Supports) -> bool:
        """Whether the kernel needs the roundings that were named in each shape in which that can be told.

        What only some of its paths do, nobody has decided.
        """
        adopted = self.probes.numerics
        named = {name for name in adopted.declared() if before.leaves_open(name)}
        if not named & TOLD_ON_ALL_PATHS:
            return True
        dtype = next((one for one in dtypes_of(self.supports) if one != "float32"), "float32")
        cases = ProbeCases(self.declaration, msgspec.structs.replace(point, dtypes=(dtype,)), self.is_even)
        shapes = [shape for path in cases.of_paths() if (shape := cases.permitted(path))]
        self.probes.numerics = before
        is_throughout = all(any(self.probes(case, point).failure is not None for case in shape) for shape in shapes)
        self.probes.numerics = adopted
        return is_throughout

    def _explained_by(self, point: Supports, steps: int = _MOST_ROUNDINGS) -> _ProbeOutcome | None:
        """How the first of some telling cases failed, if none does with roundings that replays of them have named.

        Of several that one may be, the likeliest that ends all.
        """
        failed = self._named_failure(point)
        if failed.outcome == "passes":
            return failed
        before, failure = self.probes.numerics, failed.failure
        if failure is None or not steps:
            return None
        for numerics in designs_of(before, failure.designs or self._of_matrix_units(failure, point)):
            self.probes.numerics = numerics
            if self._explained_by(point, steps - 1) is not None:
                return failed
        self.probes.numerics = before
        return None

    def _of_matrix_units(self, failure: Failure, point: Supports) -> tuple[dict[str, str], ...]:
        """TF32, where a GPU's kernel is wrong in float32 alone, and no mistake accounts for it.

        Each tile's weights lose their low bits beside a maximum that is the kernel's own affair, so that replays give
        such errors in few orders. What is adopted must end every failure, as all that replays name. And what TF32 can
        hold it must leave: where that goes wrong, too, it is not the operands of products that lose bits.
        """
        is_likely = self.probes.is_on_gpu and failure.oracle == ACCURACY.name and not failure.cause
        if not is_likely or self._fails_in != "float32":
            return ()
        exact = ProbeCases(self.declaration, msgspec.structs.replace(point, dtypes=("float32",)), self.is_even)
        are_right = all(self.probes(case, point).outcome == "passes" for case in exact.of_few_bits())
        return ({"matmul": "tf32"},) if are_right else ()

    def _named_failure(self, point: Supports) -> _ProbeOutcome:
        """The first telling case that fails; of several, one whose replay names a rounding."""
        failures = []
        each = (msgspec.structs.replace(point, dtypes=(dtype,)) for dtype in dtypes_of(self.supports))
        shapes = (ProbeCases(self.declaration, one, self.is_even) for one in each)
        for case in itertools.chain.from_iterable(one.of_roundings() for one in shapes):
            seen = self.probes(case, point)
            if seen.failure is None:
                continue
            failures.append(seen)
            self._fails_in = case.dtype
            if seen.failure.designs:
                return seen
            if seen.failure.oracle != ACCURACY.name or len(failures) == _MOST_UNNAMED:
                break
        return failures[0] if failures else _PASSED

    # What is not rounded

    def _stricter(self) -> None:
        """Each stricter arithmetic, until one holds that the next is part of.

        What costs more than a rounding of weights, and is declared or was found, would hide that.
        """
        numerics = self.probes.numerics
        costly = ("query", "scores", "exponential", "dequantised")
        if numerics.matmul == "tf32" or not all(map(numerics.leaves_open, costly)):
            return
        for fields in _STRICTER:
            of_lse = "row_sum" in fields
            is_open = all(map(numerics.leaves_open, fields))
            if not is_open or (of_lse and (not self.has_right_lse or self.supports.lse == "none")):
                continue
            found = self._under(fields)
            if found is not None:
                self.stricter.append(found)
                if found.holds:
                    return

    def _under(self, fields: dict[str, str]) -> Stricter | None:
        """How the kernel fares with ``fields``; None where a probe was not made, or fails all the same."""
        lse = self.supports.lse if self.has_right_lse else "none"
        point = msgspec.structs.replace(self.point, lse=lse)
        largest, number = 0.0, 0
        for case in itertools.islice(self._strict_cases(point), _MOST_STRICT // len(_STRICTER)):
            ratio = self.probes.ratio(case, point, fields)
            number += 1
            if ratio is None:
                return None
            largest = max(largest, ratio)
            if ratio > 1:
                allowed = self.probes.ratio(case, point, {})
                return Stricter(fields, ratio, number) if allowed is not None and allowed <= 1 else None
        return Stricter(fields, largest, number) if number else None

    def _strict_cases(self, point: Supports) -> Iterator[Case]:
        """Short sequences, in which weights add up their errors, and long ones, in each 16-bit dtype and with options.

        Small scores leave the bound little else than the roundings of weights and results.
        """
        options = [(name, choice) for name, choices in self.declaration.options.items() for choice in choices[1:]]
        for dtype in dtypes_of(self.supports):
            cases = self._cases(msgspec.structs.replace(point, dtypes=(dtype,))) if dtype != "float32" else []
            for case in cases[:1]:
                if not isinstance(case, AttentionCase):
                    return
                size = case.page_size or 4
                long = -(-_LONG // size) * size
                short = (2 * size,) * 6 if self.is_even else (3, 7, 17, 40, 5, 11)
                for seed in _SEEDS:
                    values = msgspec.structs.replace(case.values, keys="normal", values="normal", seed=seed)
                    yield self._shapes.with_lengths(case, short, values=values)
                    if not seed:
                        longer = (long, long) if self.is_even else (long - 1, 33)
                        yield self._shapes.with_lengths(case, longer, values=values)
                for name, choice in options[:_MOST_OPTIONS]:
                    chosen = {**dict(case.options), name: choice}
                    yield self._shapes.with_lengths(case, short, values=values, options=chosen)

    # Whether a value is taken

    def _is_of_itself(self, seen: _ProbeOutcome) -> bool:
        """Whether a case fails for what it is, and not for the calls before it; refusals are believed."""
        supports = msgspec.structs.replace(self.supports, lse=seen.lse)
        return seen.outcome == "raises" or self.probes.fails_first(seen, supports)

    def _fails_throughout(self, name: str, value: object, outcomes: Sequence[Outcome]) -> _ProbeOutcome | None:
        """How, if all cases with the value do that have an answer, the right one, with the ordinary value."""
        judge = self._result if self.declaration.problem == "merge_states" else self._output
        point = msgspec.structs.replace(self.point, **{name: (value,)})
        pairs = list(zip(self._cases(self.point), self._cases(point), strict=False))
        seen = _throughout(judge, pairs, outcomes)
        if name == "layouts" and seen is not None and seen.outcome == "raises":
            # what raises for most shapes, and here is silently wrong, has not looked at the layout
            alike = zip(self._as_many_heads_as_slots(self.point), self._as_many_heads_as_slots(point), strict=False)
            return _throughout(judge, list(alike), ("wrong", "dies")) or seen
        return seen

    def _as_many_heads_as_slots(self, point: Supports) -> list[Case]:
        """A case whose pages have one shape in several layouts, as far as the kernel takes one."""
        cases = ProbeCases(self.declaration, point, self.is_even)
        (size,) = point.block_sizes or (1,)
        made = [
            cases.with_lengths(one, (size,), num_kv_heads=size, num_q_heads=size * one.gqa_ratio)
            for one in self._cases(point)[:1]
            if isinstance(one, AttentionCase) and head_counts_of(point) is None
        ]
        return cases.permitted(made)

    def _layouts(self) -> None:
        self._leave_out_of("layouts", layouts_of(self.supports), ("raises",))
        if self.point.block_sizes != (1,):  # there all layouts look alike
            self._leave_out_of("layouts", layouts_of(self.supports), ("wrong", "dies"))

    def _values(self, name: str, values: Sequence[Any], outcomes: Sequence[Outcome]) -> dict[Any, _ProbeOutcome]:
        """The ``values`` that the kernel does not take, and what became of them."""
        (ordinary,) = getattr(self.point, name)
        found = {}
        for value in values:
            seen = self._fails_throughout(name, value, outcomes) if value != ordinary else None
            if seen is not None and self._is_of_itself(seen):
                found[value] = seen
        return found

    def _drop(
        self, name: str, all_values: Sequence[Any], failing: dict[Any, _ProbeOutcome], alike: Collection[Any] = ()
    ) -> None:
        """Leave out values that are not taken, and ``alike`` ones, which were not tried."""
        kept = tuple(value for value in all_values if value not in failing and value not in alike)
        if failing and kept:
            self._leave_out(name, kept, tuple(failing), next(iter(failing.values())))

    def _leave_out_of(self, name: str, all_values: Sequence[Any], outcomes: Sequence[Outcome]) -> None:
        if self._is_open(name):
            failing = self._values(name, all_values, outcomes)
            raising = {value: seen for value, seen in failing.items() if seen.outcome == "raises"}
            self._drop(name, all_values, raising)
            taken = [value for value in all_values if value not in raising]
            self._drop(name, taken, {value: seen for value, seen in failing.items() if value not in raising})

    def _sizes(self, name: str, sizes: tuple[int, ...], rank: Callable[[int], Any], sample: tuple[int, ...]) -> None:
        """Powers of two and other sizes: where those of ``sample`` are at one, they speak for their like."""
        if not self._is_open(name):
            return
        (ordinary,) = getattr(self.point, name)
        failing = self._values(name, sample, ("raises",))
        alike = list[int]()
        for is_power in (True, False):
            like = [size for size in sample if is_power_of_two(size) == is_power and size != ordinary]
            rest = [size for size in sizes if is_power_of_two(size) == is_power and size not in (*sample, ordinary)]
            if set(like) <= set(failing):
                alike += rest
            elif set(like) & set(failing):
                failing |= self._values(name, rest, ("raises",))
        order = sorted(sizes, key=rank)
        self._drop(name, order, {size: failing[size] for size in order if size in failing}, alike)

    def _block_sizes(self) -> None:
        sample = (1, 2, 8, 16, 32, 128, 3, 24, 48)
        self._sizes("block_sizes", BLOCK_SIZES, block_size_rank, sample)
        (own,) = self.point.block_sizes or (1,)
        if not self._is_open("block_sizes") or self.supports.block_sizes is not None or own == 1:
            return
        if self.works and not self.verifying:  # right for one size, and for no other
            seen = {}
            for size in (1, 8, 32, 128, 24):
                wrong = self._wrong_beyond_a_page(size) if size != own else None
                if wrong is None and size != own:
                    return
                if wrong is not None:
                    seen[size] = wrong
            first = next(iter(seen.values()))
            if self._is_of_itself(first):
                self._leave_out("block_sizes", (own,), tuple(seen), first)

    def _wrong_beyond_a_page(self, size: int) -> _ProbeOutcome | None:
        """How a case of several pages of ``size`` fails, if one of the ordinary size passes."""
        point = msgspec.structs.replace(self.point, block_sizes=(size,))
        pair = (self._cases(self.point)[0], self._cases(point)[0])
        return _throughout(self._output, [pair], ("raises", "wrong", "dies"))

    def _lse(self) -> None:
        """Look at the LSE of a kernel that writes one; a wrong one is a bug, unless no row has one, or all to base
        2."""
        ordinary = [case for case in self._cases(self.point) if self._output(case).outcome == "passes"]
        if not ordinary or any(self._result(case).failure is None for case in ordinary):
            return
        self.has_right_lse = False
        if not self._is_open("lse"):
            return
        first = self.probes(ordinary[0], self.point)
        rows = (case for case in self._shapes.single_rows() if self._output(case).outcome == "passes")
        if (kind := self._lse_of([*ordinary, *rows], self.point)) != "natural":
            self.has_right_lse = kind == "base2"
            self._leave_out("lse", kind, ("natural",), first)

    def _lse_of(self, cases: Sequence[Case], point: Supports) -> LseKind:
        """The kind of LSE that all ``cases`` bear out; "natural" where they do not agree on anything else."""
        natural = [self.probes(case, point) for case in cases]
        if all(one.failure is not None and lacks_lse(one.failure) for one in natural):
            return "none"
        in_base_2 = msgspec.structs.replace(point, lse="base2")
        is_base_2 = all(self.probes(case, in_base_2).outcome == "passes" for case in cases)
        return "base2" if is_base_2 and any(one.failure is not None for one in natural) else "natural"

    @property
    def _shapes(self) -> ProbeCases:
        return ProbeCases(self.declaration, self.point, self.is_even)

    # Where tensors lie

    def _strides(self) -> None:
        if not self._is_open("strides"):
            return
        levels: tuple[Strides, ...] = get_args(Strides)
        default = levels.index(self.supports.strides)
        failing: dict[Recipe, _ProbeOutcome] = {}
        for level in levels[default:]:
            found = self._stride_not_taken(level, failing)
            if found is None:
                if level != self.supports.strides:
                    names = tuple(sorted({name for recipe in failing for name, _ in recipe}))
                    self._leave_out("strides", level, names, next(iter(failing.values())))
                return
            failing |= found

    def _stride_not_taken(
        self, level: Strides, known: dict[Recipe, _ProbeOutcome]
    ) -> dict[Recipe, _ProbeOutcome] | None:
        """One way for a tensor to lie in memory that ``level`` permits and the kernel does not take."""
        recipes = list(self._recipes(level))
        if any(recipe in known for recipe in recipes):
            return {}
        suspects = list[Recipe]()
        for kind in STRIDE_KINDS[1:]:
            of_kind = [recipe for recipe in recipes if recipe[0][1] == kind]
            together = dict(one for recipe in of_kind for one in recipe)
            if together and self._fails_with(together) is not None:
                suspects += of_kind
        stricter = [one for one in get_args(Strides) if get_args(Strides).index(one) > get_args(Strides).index(level)]
        suspects.sort(key=lambda recipe: -sum(self._permits(one, dict(recipe)) for one in stricter))
        for recipe in suspects:
            seen = self._fails_with(dict(recipe))
            if seen is not None and (seen.outcome == "raises" or self._heeds_no(recipe, seen)):
                return {recipe: seen}
        return None

    def _heeds_no(self, recipe: Recipe, seen: _ProbeOutcome) -> bool:
        """Whether the kernel fails with these strides whatever else lies likewise, and whatever ran before."""
        beside = list(strided_beside(self.declaration, self.point, dict(recipe)))
        permitted = [one for one in beside if self._permits(self.supports.strides, one)]
        return all(self._fails_with(one) is not None for one in permitted) and self._is_of_itself(seen)

    def _recipes(self, level: Strides) -> Iterator[Recipe]:
        """Each tensor in each way that ``level`` permits, with those that lie alike then."""
        (layout,) = self.point.layouts
        tensors = strided_tensors_of(self.declaration.problem, self.supports, layout)
        for names in dict.fromkeys(lying_alike(level, name) for name in tensors):
            for kind in STRIDE_KINDS[1:]:
                recipe = tuple((name, kind) for name in names if name in tensors)
                if self._permits(level, dict(recipe)):
                    yield recipe

    def _permits(self, level: Strides, strides: dict[str, StrideKind]) -> bool:
        supports = msgspec.structs.replace(self.point, strides=level)
        cases = self._cases(self.point, strides=strides)
        return all(supports_case(supports, self.declaration.options, case) for case in cases)

    def _fails_with(self, strides: dict[str, StrideKind]) -> _ProbeOutcome | None:
        pairs = list(zip(self._cases(self.point), self._cases(self.point, strides=strides), strict=True))
        return _throughout(self._result, pairs, ("raises", "wrong", "dies"))

    # What there may be none of

    def _empty(self) -> None:
        if not self._is_open("empty_sequences") or not self.works:
            return
        cases = list(self._shapes.empty())
        right = next((case for case in self._cases(self.point) if self._result(case).outcome == "passes"), None)
        if right is None:
            return
        seen = _throughout(self._result, [(right, case) for case in cases], ("raises", "wrong"))
        if seen is not None and all(self._output(case).outcome in ("raises", "wrong") for case in cases):
            failures = [self._result(case).failure for case in cases]
            if any(
                one is not None and (one.cause == READ_BEFORE_WRITTEN or not oracle_of(one.oracle).may_be_meant)
                for one in failures
            ) or not self._is_of_itself(seen):
                return
            self._leave_out("empty_sequences", False, (True,), seen)
        elif isinstance(right, MergeStatesCase):
            told = list(told_by_either_infinity(right))
            self._leave_out_if("empty_state_lse", ("-inf",), "+inf", told, ("raises", "wrong", "dies"))


def _throughout(
    judge: Callable[[Case], _ProbeOutcome], pairs: Sequence[tuple[Case, Case]], outcomes: Sequence[Outcome]
) -> _ProbeOutcome | None:
    """How the second of each pair fails, if each does in one of ``outcomes`` wherever the first passes.

    Where all that counts is an exception, the first need only have none.
    """
    seen: _ProbeOutcome | None = None
    for ordinary, case in pairs:
        other = judge(case)
        if other.outcome in ("passes", "unknown"):
            return None
        before = judge(ordinary).outcome
        if before != "passes" and (outcomes != ("raises",) or before == "raises"):
            continue
        if other.outcome not in outcomes:
            return None
        seen = seen or replace(other, beside=ordinary)
    return seen


_HOW: dict[Outcome, str] = {
    "passes": "passes", "raises": "raises", "wrong": "gives wrong numbers", "dies": "crashes or hangs", "unknown": "?"
}  # fmt: skip
_NOUNS = {
    "dtypes": "dtype",
    "layouts": "layout",
    "head_sizes": "head size",
    "block_sizes": "page size",
    "gqa_ratios": "GQA ratio",
}
_QUERIES = {
    "scaled": "it rounds q times the scale to q's dtype",
    "scaled_both": "it rounds q and k times the scale's root to their dtype",
    "float8_e4m3fn": "it rounds q to float8_e4m3fn",
}
_EXPONENTIALS = {
    "cubic": "its exp2 is a polynomial of degree 3",
    "input": "its exp2 is one of 16-bit numbers",
}

_TILE_SUMS = {
    "rounded": "it rounds weights times V, summed over each tile, to q's dtype",
    "input": "it multiplies weights and V, and adds them up by eights, in q's dtype",
}


def _words(name: str, kept: Any, values: Values, how: str) -> str:
    if name in _NOUNS:
        return f"it {how} for {_NOUNS[name]}{'s' if len(values) > 1 else ''} {_listed(values)}"
    if name == "strides":
        several = len(values) > 1
        does_not = "do not" if several else "does not"
        what = "is not contiguous" if kept == "contiguous" else f"{does_not} lie as strides={kept!r} says"
        return f"it {how} where {_listed(values)} {what.replace('is', 'are', 1) if several else what}"
    if name == "lse":
        return "it returns no LSE" if kept == "none" else f"its LSE is to base {kept.removeprefix('base')}"
    others = {
        "query": _QUERIES.get(kept, ""),
        "scores": "it rounds scores, or the products of q and k that they are sums of, to q's dtype",
        "tile_sums": _TILE_SUMS.get(kept, ""),
        "dequantised": "it rounds K and V times their scales to q's dtype",
        "exponential": _EXPONENTIALS.get(kept, ""),
        "probabilities": f"it rounds softmax weights to {kept}",
        "matmul": "it multiplies float32 in TF32",
        "lse_layout": f"its LSE has the axes {kept}",
        "empty_sequences": f"it {how} where there are no keys",
        "padding_tokens": f"it {how} for padding tokens",
        "empty_state_lse": f"it {how} where the LSE of an empty state is +inf",
        "freed_pages": "it reads pages behind the window",
    }
    return others[name]


def _listed(values: Values) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last
