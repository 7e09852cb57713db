"""Cases of problems that a user's file defines: their fields as data, from which all else about a case follows.

An `OpenProblem` travels from the process that has imported the file to those that never do: these draw, decode, shrink
and tell cases by it. A field's order is its weight: what is declared first is made simple first. Torch-free.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, ClassVar, Protocol, TypeVar, cast

import msgspec

from attnfuzz.problems.recipes import check_range
from attnfuzz.problems.supports import OptionValue, Supports, as_written, check_option
from attnfuzz.said import check_text, text_of, type_name

__all__ = [
    "Choice",
    "Field",
    "Integer",
    "Integers",
    "OpenCase",
    "OpenProblem",
    "ProblemError",
    "Seed",
    "implementation_of",
    "implemented",
    "narrowed",
    "open_changes",
    "open_features",
    "open_objections",
    "open_rank",
    "simpler_open_cases",
    "simplest_open_case",
]

_MOST_FIELDS = 64
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
_NAMES_TAKEN = frozenset({"options", "problem"})

T = TypeVar("T")


class ProblemError(ValueError):
    """A user's problem fails, or contradicts itself; the message names its method, the value and the rule."""

    @classmethod
    def raised(cls, method: str, case: OpenCase, error: Exception) -> ProblemError:
        """What ``method`` raised on ``case``."""
        said = f"{type_name(error)}: {text_of(error)}".partition("\n")[0]
        shown = msgspec.json.encode(case).decode()
        return cls(f"{case.problem}.{method} raised {said} on {shown}; correct it in {case.problem.place}")


class Decides(Protocol):
    """What a value is drawn by: `attnfuzz.strategies.decisions.Decisions`."""

    def pick(self, options: Sequence[T]) -> T: ...


class _Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type"):
    """What a field says of itself; ``name`` is what the problem calls it."""


class Integer(_Field, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="integer"):
    """A whole number from ``low``, which is simplest, to ``high``; ``likely`` ones are drawn, or usual sizes."""

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
    def decisions(self) -> int:
        """How many of them a value takes."""
        return 1

    @property
    def drawn(self) -> tuple[int, ...]:
        """What is drawn, simplest first."""
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
        """Simpler values, the simplest first."""
        offered = {*self.drawn, self.low + 1, self.low + (value - self.low) // 2, value - 1}
        yield from sorted(one for one in offered if self.low <= one < value)

    def others(self, value: int) -> Iterator[int]:
        """Other values that tell whether this one matters."""
        yield from (near for near in (value - 1, value + 1) if self.low <= near <= self.high)

    def features(self, name: str, value: int) -> Iterator[str]:
        if value > self.low:
            yield f"{name}>{self.low}"
        if value > 2 and value & (value - 1):
            yield f"{name} not pow2"

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
        """The same, with no other than ``values``."""
        return Choice(tuple(value for value in values if self.low <= value <= self.high))


class Seed(_Field, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="seed"):
    """Where numbers come from. It means nothing by itself, and is no feature of a case."""

    @property
    def simplest(self) -> int:
        return 0

    @property
    def decisions(self) -> int:
        return 1

    def decide(self, decisions: Decides) -> int:
        return decisions.pick(_SEEDS)

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name}={value!r:.80} must be an integer")
        check_range(name, value, 0, (1 << 32) - 1)

    def rank(self, value: int) -> Any:
        return value

    def simpler(self, value: int) -> Iterator[int]:
        yield from range(min(value, 3))

    def others(self, value: int) -> Iterator[int]:
        yield value + 1 if value < 1 << 31 else 0

    def features(self, name: str, value: int) -> Iterator[str]:
        del name, value
        yield from ()

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
    """One of ``values``, the simplest first: bool, int, float or str."""

    values: tuple[OptionValue, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.values, tuple) or not 0 < len(self.values) <= _MOST_CHOICES:
            raise ValueError(f"Choice({self.values!r:.80}): must be a tuple of 1 to {_MOST_CHOICES} values")
        for value in self.values:
            check_option("a_choice", value)

    @property
    def simplest(self) -> OptionValue:
        return self.values[0]

    @property
    def decisions(self) -> int:
        return 1

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

    def features(self, name: str, value: OptionValue) -> Iterator[str]:
        if self._place(value):
            yield f"{name}={value}"

    def __str__(self) -> str:
        return " or ".join(map(str, self.values))

    def level(self, value: OptionValue) -> str:
        return str(value)

    @property
    def levels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(str, self.values)))

    def within(self, values: Sequence[Any]) -> Field:
        return Choice(tuple(value for value in self.values if value in values))

    def _place(self, value: object) -> int | None:
        places = (i for i, one in enumerate(self.values) if type(one) is type(value) and one == value)
        return next(places, None)


class Integers(_Field, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="integers"):
    """From ``least`` to ``most`` whole numbers, each from ``low`` to ``high`` and all together at most ``total``."""

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

    def features(self, name: str, value: tuple[int, ...]) -> Iterator[str]:
        if len(value) > self.least:
            yield f"len({name})>{self.least}"
        if len(set(value)) > 1:
            yield f"{name} differ"
        if any(one > self.low for one in value):
            yield f"some {name}>{self.low}"
        if self.low == 0 and 0 in value and self.simplest == ():
            yield f"0 among {name}"

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


class OpenProblem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A problem as those see it that do not import it: where it lives, and the fields of its cases.

    ``place``: ``path/to/file.py:Class`` or ``module:Class``. Raises ValueError for names that cannot be fields.
    """

    place: str
    fields: dict[str, Field]

    def __post_init__(self) -> None:
        check_text("problem", self.place, 8192)
        if not 0 < len(self.fields) <= _MOST_FIELDS:
            raise ValueError(f"{self.name} has {len(self.fields)} fields; a problem has 1 to {_MOST_FIELDS}")
        for name in self.fields:
            if not name.isidentifier() or name.startswith("_") or name in _NAMES_TAKEN:
                raise ValueError(f"{self.name} has a field {name!r:.80}, which cannot be one; choose another name")

    def __hash__(self) -> int:
        return hash((self.place, tuple(self.fields.items())))

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """The name of its class."""
        return self.place.rpartition(":")[2]

    def is_same(self, other: OpenProblem) -> bool:
        """Whether it is the same class of a file of the same name, wherever that lay and whatever fields it had."""
        mine, its = (one.place.rpartition(":") for one in (self, other))
        return mine[2] == its[2] and PurePath(mine[0]).name == PurePath(its[0]).name

    def refitted(self, case: OpenCase) -> OpenCase:
        """``case``, of the same problem as it was once, as one of this. Raises ValueError where it is none any more."""
        try:
            return self.case_type(**msgspec.structs.asdict(case))
        except TypeError as error:
            raise ValueError(f"{self.name} has other fields now ({error})") from error

    @property
    def case_type(self) -> type[OpenCase]:
        """Of its cases; equal problems have the same."""
        return _case_type(self)

    @property
    def decisions(self) -> int:
        """How many of them a case takes, options left out."""
        return sum(field.decisions for field in self.fields.values())


class OpenCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What cases of all open problems share; the fields of each are those of its ``problem``."""

    problem: ClassVar[OpenProblem]

    options: Mapping[str, OptionValue] = {}

    def __post_init__(self) -> None:
        for name, value in self.options.items():
            check_option(name, value)
        for name, field in self.problem.fields.items():
            field.check(name, getattr(self, name))

    def __getattr__(self, name: str) -> Any:  # a type checker does not know the fields
        raise AttributeError(
            f"a case of {type(self).problem} has no field {name!r}; it has {', '.join(type(self).problem.fields)}"
        )


@functools.lru_cache(maxsize=256)
def _case_type(problem: OpenProblem) -> type[OpenCase]:
    types: dict[type, Any] = {
        Integer: int, Seed: int, Integers: tuple[int, ...], Choice: bool | int | float | str
    }  # fmt: skip
    fields = [(name, types[type(field)], field.simplest) for name, field in problem.fields.items()]
    made = msgspec.defstruct(
        problem.name.rpartition(".")[2],
        fields,
        bases=(OpenCase,),
        namespace={"problem": problem},
        module=__name__,
        frozen=True,
        forbid_unknown_fields=True,
        kw_only=True,
    )
    return cast("type[OpenCase]", made)


_IMPLEMENTED: dict[OpenProblem, Any] = {}
"""What this process has imported; empty in those that import no kernel."""


def implemented(description: OpenProblem, problem: Any) -> OpenProblem:
    """From now on ``problem`` is what ``description``, which is returned, stands for in this process."""
    _IMPLEMENTED[description] = problem
    return description


def implementation_of(description: OpenProblem) -> Any:
    """The `attnfuzz.Problem` that ``description`` stands for; None where no kernel of it has been imported."""
    return _IMPLEMENTED.get(description)


def simplest_open_case(problem: OpenProblem, options: Mapping[str, tuple[OptionValue, ...]]) -> OpenCase:
    """Every field and option at its simplest."""
    return problem.case_type(options={name: choices[0] for name, choices in options.items()})


def open_features(case: OpenCase) -> Iterator[str]:
    """What makes ``case`` more than the simplest; an option's value always."""
    for name, field in case.problem.fields.items():
        yield from field.features(name, getattr(case, name))
    yield from (f"option {name}={value}" for name, value in case.options.items())


def open_rank(case: OpenCase) -> tuple[Any, ...]:
    """Orders cases of one problem by their fields, the first of which counts most."""
    return tuple(field.rank(getattr(case, name)) for name, field in case.problem.fields.items())


def simpler_open_cases(case: OpenCase, options: Mapping[str, tuple[OptionValue, ...]]) -> Iterator[OpenCase]:
    """Cases that are simpler in one field or in all, big steps first."""
    yield simplest_open_case(case.problem, options)
    for name, field in case.problem.fields.items():
        yield from (msgspec.structs.replace(case, **{name: value}) for value in field.simpler(getattr(case, name)))
    for name, choices in options.items():
        for choice in choices[: choices.index(case.options[name]) if case.options.get(name) in choices else None]:
            yield msgspec.structs.replace(case, options={**case.options, name: choice})


def open_changes(case: OpenCase, options: Mapping[str, tuple[OptionValue, ...]]) -> Iterator[tuple[str, OpenCase]]:
    """Cases that differ in one field or option, with words for what differs."""
    for name, field in case.problem.fields.items():
        now = getattr(case, name)
        for value in dict.fromkeys((*field.simpler(now), *field.others(now))):
            words = f"{name} {as_written(value)} instead of {as_written(now)}"
            yield words, msgspec.structs.replace(case, **{name: value})
    for name, choices in options.items():
        for value in choices:
            if name in case.options and value != case.options[name]:
                words = f"{name}={value!r} instead of {case.options[name]!r}"
                yield words, msgspec.structs.replace(case, options={**case.options, name: value})


_NARROWED_BY = {"dtypes": "dtype", "head_sizes": "head_size", "block_sizes": "block_size"}
"""The fields that a word of `Supports` narrows."""
_PROMISES = ("deterministic", "graph_replay")


def narrowed(problem: OpenProblem, supports: Supports) -> OpenProblem:
    """``problem`` as a kernel with ``supports`` takes it. Raises ValueError for what says nothing about its cases."""
    fields = dict(problem.fields)
    for declared in msgspec.structs.fields(supports):
        name, value = declared.name, getattr(supports, declared.name)
        if value == declared.default or name in _PROMISES:
            continue
        if (field := fields.get(_NARROWED_BY.get(name, ""))) is None:
            known = (*(word for word, own in _NARROWED_BY.items() if own in fields), *_PROMISES)
            raise ValueError(
                f"Supports({name}={value!r:.80}) says nothing about {problem.name}; of it only {', '.join(known)} may "
                f"be declared, beside the problem's own fields: {problem.name}(field=attnfuzz.Choice(...))"
            )
        fields[_NARROWED_BY[name]] = field.within(value)
    return msgspec.structs.replace(problem, fields=fields)


def open_objections(options: Mapping[str, tuple[OptionValue, ...]], case: OpenCase) -> Iterator[str]:
    """Why a kernel with ``options`` does not take ``case``; its fields have been checked as it was made."""
    for name, value in case.options.items():
        if name not in options:
            yield f"options[{name!r}]={value!r}, but the kernel has no such option"
        elif not any(type(one) is type(value) and one == value for one in options[name]):
            yield f"options[{name!r}]={value!r}, but the kernel offers {options[name]}"
    for name in options:
        if name not in case.options:
            yield f"the case leaves out options[{name!r}]; the kernel offers {options[name]}"
