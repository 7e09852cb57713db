"""Fields of a case and what may be in them: a number, one of several values, several numbers, a seed. Torch-free.

Users' problems have their fields described by these alone, and facets of the bundled ones their plain fields. All that
is done with a value by itself stands here: how it is drawn, made simpler, varied, told and compared.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from attnfuzz.problems.feature import Feature
from attnfuzz.problems.recipes import check_range
from attnfuzz.problems.supports import OptionValue, as_written, check_option

C = TypeVar("C", bound=msgspec.Struct)
Proposal = Generator[C | None, bool, C]
"""A generator that yields smaller cases and is told after each whether it was accepted, that is, still fails.

It goes on from there and returns the smallest accepted. None stands for a change that cannot be made; it counts as
refused. Driven by refusals only, it yields everything that it would try on a case that cannot be made smaller.
"""


def first_of(case: C, candidates: Iterable[C | None]) -> Proposal[C]:
    """The first of ``candidates`` that is accepted."""
    for candidate in candidates:
        if (yield candidate) and candidate is not None:
            return candidate
    return case


def lower_integer(
    case: C, value: int, low: int, edit: Callable[[C, int], C | None], *, likely: Iterable[int] = ()
) -> Proposal[C]:
    """The smallest accepted value from ``low``, 0, 1, 2 and ``likely``, then by bisection down to ``low``."""
    refused = low - 1
    for target in sorted({low, 0, 1, 2, *likely}):
        if low <= target < value:
            candidate = edit(case, target)
            if (yield candidate) and candidate is not None:
                case, value = candidate, target
                break
            refused = target
    while value - refused > 1:
        target = (refused + value) // 2
        candidate = edit(case, target)
        if (yield candidate) and candidate is not None:
            case, value = candidate, target
        else:
            refused = target
    return case


_MOST_CHOICES = 64
_MOST_NUMBERS = 1024
_LIMIT = 1 << 40
_USUAL = (
    *(2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100),
    *(127, 128, 129, 255, 256, 257, 511, 512, 513, 1000),
)
"""Numbers at which loops, tiles and vectors of kernels begin anew, and beside these."""
_MOST_LEVELS = 8
_SEEDS = range(64)
_DIVISORS = (2, 4, 8, 16, 32)
_LIMITS = (1, 2, 3, 4, 5, 6, 8, 12, *(1 << power for power in range(4, 15)))

T = TypeVar("T")
Put = Callable[[C, Any], C | None]
"""A case with another value in the field; None if it is no case."""


@functools.lru_cache(maxsize=4096)
def number_traits(name: str, value: int) -> frozenset[Feature]:
    """Features of a number: its value, what divides it, and on which side of each of a few limits it lies."""
    found = [f" is {value}"]
    found += (f" is {'' if value % by == 0 else 'not '}a multiple of {by}" for by in _DIVISORS)
    found += (f" {'>=' if value >= limit else '<'} {limit}" for limit in _LIMITS)
    return frozenset(Feature(name, one) for one in found)


class Decides(Protocol):
    """The source that a value is drawn from: `attnfuzz.strategies.decisions.Decisions`."""

    def pick(self, options: Sequence[T]) -> T: ...


class _Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type"):
    """The declaration of a field; ``name`` is what the problem calls it."""

    @property
    def decisions(self) -> int:
        """How many decisions drawing a value takes."""
        return 1

    def simpler(self, value: Any) -> Iterator[Any]:
        """Simpler values, the simplest first."""
        raise NotImplementedError

    def others(self, value: Any) -> Iterator[Any]:
        """Other values that tell whether this one matters."""
        raise NotImplementedError

    def shrink(self, case: C, value: Any, put: Put[C]) -> Proposal[C]:
        """Propose simpler values in place of ``value``."""
        return (yield from first_of(case, (put(case, simpler) for simpler in self.simpler(value))))

    def lower(self, value: Any) -> Iterator[tuple[Any, int]]:
        """Lower values that lack a feature of this one, each with how much of its numbers is gone."""
        del value
        yield from ()

    def higher(self, value: Any, by: int) -> Any:
        """The value whose numbers are all larger ``by`` so much; None where there is none."""
        del value, by

    def features(self, name: str, value: Any) -> Iterator[Feature]:
        """The respects in which the value is not the simplest."""
        del name, value
        yield from ()

    def traits(self, name: str, value: Any) -> Iterator[Feature]:
        """Features that any value has."""
        del name, value
        yield from ()


class Integer(_Field, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="integer"):
    """A whole number from ``low``, the simplest, to ``high``; ``likely`` ones, or usual sizes, are drawn often."""

    low: int
    high: int
    likely: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not -_LIMIT <= self.low <= self.high <= _LIMIT:
            raise ValueError(f"Integer(low={self.low}, high={self.high}): low must not exceed high, nor 2^40 either")
        for value in self.likely:
            check_range("Integer(likely)", value, self.low, self.high)

    @property
    def simplest(self) -> int:
        return self.low

    @property
    def drawn(self) -> tuple[int, ...]:
        """The numbers that are drawn, simplest first."""
        return _drawn(self)

    def decide(self, decisions: Decides) -> int:
        return decisions.pick(self.drawn)

    def check(self, name: str, value: object) -> None:
        """Raise ValueError unless ``value`` can be the field's."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name}={value!r:.80} must be an integer")
        check_range(name, value, self.low, self.high)

    def rank(self, value: int) -> Any:
        return value - self.low

    def simpler(self, value: int) -> Iterator[int]:
        offered = {*self.drawn, self.low + 1, self.low + (value - self.low) // 2, value - 1}
        yield from sorted(one for one in offered if self.low <= one < value)

    def others(self, value: int) -> Iterator[int]:
        yield from (near for near in (value - 1, value + 1) if self.low <= near <= self.high)

    def lower(self, value: int) -> Iterator[tuple[int, int]]:
        if value > self.low:
            yield self.low, value - self.low

    def higher(self, value: int, by: int) -> int | None:
        return value + by if value + by <= self.high else None

    def shrink(self, case: C, value: int, put: Put[C]) -> Proposal[C]:
        return (yield from lower_integer(case, value, self.low, put, likely=self.drawn))

    def traits(self, name: str, value: int) -> Iterator[Feature]:
        yield from number_traits(name, value)

    def features(self, name: str, value: int) -> Iterator[Feature]:
        if value > self.low:
            yield Feature(name, f">{self.low}")

    def level(self, value: int) -> str:
        """Where it lies among those drawn, in a word."""
        anchors = self.drawn[:: -(-len(self.drawn) // _MOST_LEVELS)]
        anchor = anchors[max(0, bisect_right(anchors, value) - 1)]
        return str(anchor) if len(anchors) == len(self.drawn) else f"from {anchor}"

    @property
    def levels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(self.level, self.drawn)))

    def __str__(self) -> str:
        return f"{self.low} to {self.high}"

    def within(self, values: Sequence[Any]) -> Field:
        """This field with no other values than ``values``."""
        return Choice(tuple(value for value in values if self.low <= value <= self.high))


class Seed(_Field, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="seed"):
    """A field that the numbers in tensors are drawn from. It means nothing by itself, and is no feature of a case."""

    @property
    def simplest(self) -> int:
        return 0

    def decide(self, decisions: Decides) -> int:
        return decisions.pick(_SEEDS)

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name}={value!r:.80} must be an integer")
        check_range(name, value, 0, (1 << 32) - 1)

    def rank(self, value: int) -> Any:
        return value

    def simpler(self, value: int) -> Iterator[int]:
        yield from (0,) * (value > 0)

    def others(self, value: int) -> Iterator[int]:
        yield value + 1 if value < 1 << 31 else 0

    def __str__(self) -> str:
        return "a seed"

    def level(self, value: int) -> str:
        del value
        return "any"

    @property
    def levels(self) -> tuple[str, ...]:
        return ("any",)

    def within(self, values: Sequence[Any]) -> Field:
        return Choice(tuple(values))


class Choice(_Field, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="choice"):
    """A field that is one of ``values``, the simplest first: bool, int, float or str."""

    values: tuple[OptionValue, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.values, tuple) or not 0 < len(self.values) <= _MOST_CHOICES:
            raise ValueError(f"Choice({self.values!r:.80}): must be a tuple of 1 to {_MOST_CHOICES} values")
        for value in self.values:
            check_option("a_choice", value)

    @property
    def simplest(self) -> OptionValue:
        return self.values[0]

    def decide(self, decisions: Decides) -> OptionValue:
        return decisions.pick(self.values)

    def check(self, name: str, value: object) -> None:
        if self._place(value) is None:
            raise ValueError(f"{name}={value!r:.80} must be one of {as_written(self.values)}")

    def rank(self, value: OptionValue) -> Any:
        return self._place(value)

    def simpler(self, value: OptionValue) -> Iterator[OptionValue]:
        yield from self.values[: self._place(value)]

    def others(self, value: OptionValue) -> Iterator[OptionValue]:
        yield from (other for other in self.values if type(other) is not type(value) or other != value)

    def lower(self, value: Any) -> Iterator[tuple[Any, int]]:
        """The next value below it, and the lowest."""
        before = self.values[: self._place(value)] if self._are_whole else ()
        yield from ((one, value - one) for one in dict.fromkeys((*before[-1:], *before[:1])) if isinstance(one, int))

    def higher(self, value: Any, by: int) -> Any:
        return value + by if self._are_whole and value + by in self.values else None

    def traits(self, name: str, value: OptionValue) -> Iterator[Feature]:
        yield Feature(name, f" is {value}")

    def features(self, name: str, value: OptionValue) -> Iterator[Feature]:
        """Which smaller numbers it exceeds, of numbers in ascending order: what two values have in common is one."""
        before = self.values[: self._place(value)]
        if self._are_ascending:
            yield from (Feature(name, f">{smaller}") for smaller in before)
        elif before:
            yield Feature(name, f"={value}")

    def __str__(self) -> str:
        return " or ".join(map(str, self.values))

    def level(self, value: OptionValue) -> str:
        return str(value)

    @property
    def levels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(str, self.values)))

    def within(self, values: Sequence[Any]) -> Field:
        return Choice(tuple(value for value in self.values if value in values))

    @property
    def _are_ascending(self) -> bool:
        """Whether its values are numbers, each above the one before."""
        numbers = [value for value in self.values if isinstance(value, int | float) and not isinstance(value, bool)]
        return len(numbers) == len(self.values) and numbers == sorted(set(numbers))

    @property
    def _are_whole(self) -> bool:
        """Whether these are whole numbers."""
        return self._are_ascending and all(isinstance(value, int) for value in self.values)

    def _place(self, value: object) -> int | None:
        places = (i for i, one in enumerate(self.values) if type(one) is type(value) and one == value)
        return next(places, None)


class Integers(_Field, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="integers"):
    """A tuple of ``least`` to ``most`` whole numbers from ``low`` to ``high``, whose sum is at most ``total``."""

    low: int
    high: int
    likely: tuple[int, ...] = ()
    least: int = 1
    most: int = 8
    total: int | None = None

    def __post_init__(self) -> None:
        Integer(self.low, self.high, self.likely)
        if not 0 <= self.least <= self.most <= _MOST_NUMBERS:
            raise ValueError(
                f"Integers(least={self.least}, most={self.most}): from 0 to {_MOST_NUMBERS}, in this order"
            )
        if self.low < 0 or (self.total is not None and self.total < self.least * self.low):
            raise ValueError(
                f"Integers(low={self.low}, least={self.least}, total={self.total}): low must not be negative, and "
                "total have room for as many of the lowest number as there must be"
            )

    @property
    def simplest(self) -> tuple[int, ...]:
        return (self.low,) * self.least

    @property
    def decisions(self) -> int:
        return 1 + self.most

    def decide(self, decisions: Decides) -> tuple[int, ...]:
        counts = tuple(count for count in range(self.least, self.most + 1) if self._fits((self.low,) * count))
        count = decisions.pick(counts)
        found: list[int] = []
        for i in range(count):
            others = sum(found) + self.low * (count - i - 1)
            room = self.high if self.total is None else min(self.high, self.total - others)
            found.append(decisions.pick([one for one in self._each.drawn if one <= room]))
        return tuple(found)

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, tuple):
            raise ValueError(f"{name}={value!r:.80} must be a tuple of integers")
        check_range(f"len({name})", len(value), self.least, self.most)
        for i, one in enumerate(value):
            self._each.check(f"{name}[{i}]", one)
        if not self._fits(value):
            raise ValueError(f"sum({name})={sum(value)} must not exceed {self.total}")

    def rank(self, value: tuple[int, ...]) -> Any:
        return len(value), sum(value), value

    def simpler(self, value: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if value != self.simplest:
            yield self.simplest
        if len(value) > self.least:
            halves = (value[: len(value) // 2], value[len(value) // 2 :])
            yield from (half for half in halves if len(half) >= self.least)
            yield from (value[:i] + value[i + 1 :] for i in range(len(value)))
        for i, one in enumerate(value):
            yield from ((*value[:i], smaller, *value[i + 1 :]) for smaller in self._each.simpler(one))

    def others(self, value: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(value) > 1:
            yield value[::-1]
        for i, one in enumerate(value):
            nearby = ((*value[:i], near, *value[i + 1 :]) for near in self._each.others(one))
            yield from filter(self._fits, nearby)

    def lower(self, value: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
        if (largest := max(value, default=self.low)) > self.low:
            yield (self.low,) * len(value), largest - self.low

    def higher(self, value: tuple[int, ...], by: int) -> tuple[int, ...] | None:
        raised = tuple(one + by for one in value)
        return raised if raised and max(raised) <= self.high and self._fits(raised) else None

    def traits(self, name: str, value: tuple[int, ...]) -> Iterator[Feature]:
        yield from number_traits(f"len({name})", len(value)) | number_traits(f"sum({name})", sum(value))
        for one in set(value):
            yield from number_traits(f"some {name}", one)

    def features(self, name: str, value: tuple[int, ...]) -> Iterator[Feature]:
        if len(value) > self.least:
            yield Feature(f"len({name})", f">{self.least}")
        if len(set(value)) > 1:
            yield Feature(name, " differ")
        if any(one > self.low for one in value):
            yield Feature(f"some {name}", f">{self.low}")
        if self.low == 0 and 0 in value and self.simplest == ():
            yield Feature(f"0 among {name}")

    def __str__(self) -> str:
        together = "" if self.total is None else f", {self.total} together"
        return f"{self.least} to {self.most} numbers of {self.low} to {self.high}{together}"

    def level(self, value: tuple[int, ...]) -> str:
        if len(value) < 2:
            return str(len(value))
        return "several, equal" if len(set(value)) == 1 else "several, unlike"

    @property
    def levels(self) -> tuple[str, ...]:
        few = [str(count) for count in (0, 1) if self.least <= count <= self.most]
        several = ["several, equal", "several, unlike"] if self.most > 1 else []
        return (*few, *(several if self.high > self.low else several[:1]))

    def within(self, values: Sequence[Any]) -> Field:
        """With none above the largest of ``values``."""
        high = min(self.high, max(values))
        return msgspec.structs.replace(self, high=high, likely=tuple(one for one in self.likely if one <= high))

    @property
    def _each(self) -> Integer:
        return Integer(self.low, self.high, self.likely)

    def _fits(self, value: Sequence[int]) -> bool:
        return self.total is None or sum(value) <= self.total


Field = Integer | Integers | Choice | Seed


@functools.lru_cache(maxsize=1024)
def _drawn(field: Integer) -> tuple[int, ...]:
    usual = (0, 1, *_USUAL, field.low + 1, field.high) if field.high <= _USUAL[-1] else (0, 1, *_USUAL, field.low + 1)
    offered = field.likely or usual
    return tuple(sorted({field.low, *(one for one in offered if field.low <= one <= field.high)}))
