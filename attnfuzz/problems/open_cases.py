"""Cases of problems that a user's file defines: their fields as data, from which all else about a case follows.

An `OpenProblem` travels from the process that has imported the file to those that never do: these draw, decode, shrink
and tell cases by it. A field's order is its weight: what is declared first is made simple first. Torch-free.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, ClassVar, cast

import msgspec

from attnfuzz.problems.fields import Choice, Field, Integer, Integers, Seed
from attnfuzz.problems.supports import OptionValue, Supports, check_option
from attnfuzz.untrusted_text import check_text, text_of, type_name

_MOST_FIELDS = 64
_NAMES_TAKEN = frozenset({"options", "problem"})


class ProblemError(ValueError):
    """A user's problem fails, or contradicts itself; the message names its method, the value and the rule."""

    @classmethod
    def raised(cls, method: str, case: OpenCase, error: Exception) -> ProblemError:
        """The error for what ``method`` raised on ``case``."""
        said = f"{type_name(error)}: {text_of(error)}".partition("\n")[0]
        shown = msgspec.json.encode(case).decode()
        return cls(f"{case.problem}.{method} raised {said} on {shown}; correct it in {case.problem.place}")


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
        """The type of its cases; equal problems have the same."""
        return _case_type(self)

    @property
    def decisions(self) -> int:
        """How many of them a case takes, options left out."""
        return sum(field.decisions for field in self.fields.values())


class OpenCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A case of an open problem; the fields of each are those of its ``problem``."""

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


_NARROWED_BY = {"dtypes": "dtype", "head_sizes": "head_size", "block_sizes": "block_size"}
"""The fields that a word of `Supports` narrows."""
PROMISES = ("deterministic", "graph_replay", "where")
"""Fields of `Supports` that may be said of any problem."""


def narrowed(problem: OpenProblem, supports: Supports) -> OpenProblem:
    """``problem`` as a kernel with ``supports`` takes it. Raises ValueError for what says nothing about its cases."""
    fields = dict(problem.fields)
    for declared in msgspec.structs.fields(supports):
        name, value = declared.name, getattr(supports, declared.name)
        if value == declared.default or name in (*PROMISES, "promised"):
            continue
        if (field := fields.get(_NARROWED_BY.get(name, ""))) is None:
            known = (*(word for word, own in _NARROWED_BY.items() if own in fields), *PROMISES)
            raise ValueError(
                f"Supports({name}={value!r:.80}) says nothing about {problem.name}; of it only {', '.join(known)} may "
                f"be declared, beside the problem's own fields: {problem.name}(field=attnfuzz.Choice(...))"
            )
        fields[_NARROWED_BY[name]] = field.within(value)
    return msgspec.structs.replace(problem, fields=fields)
