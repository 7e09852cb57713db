"""Which values go together: the table of ``Supports(where=...)``, and how a function is made one. Torch-free.

A combination names fields of a case (`fields_of` has those of each problem) and options, and which values they may
have. What it leaves out may have any value that the other fields of `Supports` permit. So a table of one combination
narrows a declaration, as declaring fewer values would, and one of several is as many declarations of which one holds.

A function says of a case whether it is supported: ``lambda case: case.head_size <= 128 or case.block_size >= 32``. It
cannot travel to the processes that draw and shrink cases, which never import a kernel's module. So whoever has imported
that asks it about all values that are drawn, and keeps the table of what it said. It sees these fields and options
(``case.tile``) and nothing else, and only those that it looks at are told apart. A size that nobody draws unless it is
declared (``head_sizes``, ``block_sizes``) is not asked for, and is not supported where the function looks at it.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any, NoReturn, cast

import msgspec

from attnfuzz.problems.attention import AttentionCase, PagedDecodeCase, VarlenCase
from attnfuzz.problems.choices import (
    HEAD_SIZES,
    KV_HEADS,
    LARGE_HEAD_SIZES,
    block_sizes_of,
    caches_of,
    dtypes_of,
    gqa_ratios_of,
    head_size_rank,
    layouts_of,
    offers,
    split_counts_of,
    v_head_sizes_of,
)
from attnfuzz.problems.fields import Choice, Integer
from attnfuzz.problems.module import Case, Problem, case_type_of, has_query_lens, module_of
from attnfuzz.problems.open_cases import OpenCase, OpenProblem
from attnfuzz.problems.quantised_kv import KV_DTYPES
from attnfuzz.problems.supports import (
    DTYPES,
    LAYOUTS,
    MAX_COMBINATIONS,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    Combination,
    OptionValue,
    Supports,
)
from attnfuzz.problems.variants import VARIANTS
from attnfuzz.untrusted_text import text_of, type_name

Options = Mapping[str, tuple[OptionValue, ...]]
Rows = tuple[tuple[tuple[str, tuple[OptionValue, ...]], ...], ...]
"""Combinations that can be compared."""

_SIZES_OF_KEYS = (*HEAD_SIZES, 576)
_SIZES_OF_VALUES = (8, *HEAD_SIZES, 512)
"""Of latent attention; the last ones are those of DeepSeek-V2 (arXiv 2405.04434): 512 and 64 for the position."""
_MOST_CALLS = 1 << 15
_FEW = 64
QUERIES = ("equal_queries", "context")
"""Whether all sequences have as many query tokens, and whether all that have any have keys before these."""
_MERGE_HEADS = range(1, 65)
_ALLOWED: dict[str, tuple[OptionValue, ...]] = {
    "dtype": DTYPES,
    "layout": LAYOUTS,
    "kv_dtype": (*DTYPES, *KV_DTYPES),
    **dict.fromkeys(("causal", *QUERIES), (True, False)),
    **{name: (False, True) for name in VARIANTS},
}
"""Of a variant, whether a case has it."""
_LARGEST = {
    "head_size": MAX_HEAD_SIZE,
    "v_head_size": MAX_HEAD_SIZE,
    "block_size": 1 << 20,
    "num_q_heads": MAX_HEADS,
    "num_kv_heads": MAX_HEADS,
    "gqa_ratio": MAX_HEADS,
    "num_splits": 4096,
}


def fields_of(problem: Problem) -> tuple[str, ...]:
    """The fields that a combination may name beside options."""
    if isinstance(problem, OpenProblem):
        return tuple(name for name, field in problem.fields.items() if isinstance(field, Choice | Integer))
    kind = case_type_of(problem)
    names = ["dtype", "head_size", "num_q_heads"]
    if issubclass(kind, AttentionCase):
        names += ["num_kv_heads", "gqa_ratio", "v_head_size", *kind.variant_names]
    if issubclass(kind, PagedDecodeCase):
        names += ["block_size", "layout", "kv_dtype"]
    names += QUERIES if has_query_lens(problem) else ()
    return (*names, *(name for name in ("num_splits", "causal") if name in kind.__struct_fields__))


def fits(case: Case, combination: Combination) -> bool:
    """Whether ``case`` has one of the values of each field and option that ``combination`` names."""
    return all(offers(values, value_in(case, name)) for name, values in combination.items())


def value_in(case: Case, name: str) -> OptionValue | None:
    """The value in ``case`` of a field or an option that a combination may name; None of one that it lacks."""
    if name not in fields_of(case.problem):
        return case.options.get(name)
    if name in VARIANTS and isinstance(case, AttentionCase):
        return name in case.variant.names
    is_own = isinstance(case, OpenCase)
    value: OptionValue = getattr(case, "value_size" if name == "v_head_size" and not is_own else name)
    return value


def put_into(
    case: OpenCase, combination: Combination, pick: Callable[[tuple[Any, ...]], Any] = operator.itemgetter(0)
) -> OpenCase:
    """``case`` with values of ``combination``, the simplest first to be picked, in place of those that it forbids."""
    own, options = dict[str, Any](), dict(case.options)
    for name, values in combination.items():
        if fits(case, {name: values}):
            continue
        if name in options:
            options[name] = pick(values)
        else:
            rank: Any = case.problem.fields[name].rank
            own[name] = pick(tuple(sorted(values, key=rank)))
    return msgspec.structs.replace(case, **own, options=options)


def simplest_queries(combination: Combination) -> dict[str, tuple[int, ...]]:
    """The simplest lengths of which ``combination`` says what they are."""
    query_lens = (2, 1) if combination.get("equal_queries") == (False,) else (1,)
    context = int(combination.get("context") == (True,))
    return {"query_lens": query_lens, "seq_lens": tuple(count + context for count in query_lens)}


def regular_queries(case: VarlenCase, combination: Combination) -> dict[str, tuple[int, ...]]:
    """Lengths near those of ``case``, equal and with a context as far as ``combination`` asks for that."""
    equal, context = (combination.get(name) == (True,) for name in QUERIES)
    lengths = zip(case.query_lens, case.seq_lens, strict=True)
    seq_lens = tuple(max(length, 1 + context) if equal or own else length for own, length in lengths)
    if equal:
        count = min(*filter(None, case.query_lens), min(seq_lens) - context)
        return {"query_lens": (count,) * case.num_seqs, "seq_lens": seq_lens}
    query_lens = (min(own, length - context) for own, length in zip(case.query_lens, seq_lens, strict=True))
    return {"query_lens": tuple(map(max, query_lens, (0,) * case.num_seqs)), "seq_lens": seq_lens}


def alternatives(supports: Supports) -> list[Supports]:
    """``supports`` with each of its combinations alone; just itself, without a table."""
    found = []
    for combination in supports.combinations:
        one = copy.copy(supports)
        msgspec.structs.force_setattr(one, "where", (combination,))  # which has been checked
        found.append(one)
    return found or [supports]


def settled(problem: Problem, supports: Supports, options: Options) -> Supports:
    """``supports`` with the table of its function, if it has one; of a table, that a kernel like this can have it.

    Raises ValueError for names and values that cases of such a kernel do not have, and for a function that looks at
    anything else, at too many combinations, or permits none.
    """
    if callable(supports.where):
        function = supports.where
        if getattr(case_type_of(problem), "values_in_keys", False) and supports.v_head_sizes == "equal":
            supports = msgspec.structs.replace(supports, v_head_sizes="any")
        table = _table_of(function, problem, supports, options)
        return settled(problem, msgspec.structs.replace(supports, where=table), options)
    for i, combination in enumerate(supports.combinations):
        for name, values in combination.items():
            _check_values(f"Supports(where[{i}][{name!r}])", name, values, problem, options)
    return narrowed(problem, supports)


def narrowed(problem: Problem, supports: Supports) -> Supports:
    """``supports``, whose ``where`` is no function, with what cases of ``problem`` never have left out.

    Of latent_decode that is several KV heads, values larger than keys, and layouts. Unless sizes of V are declared,
    they are smaller than those of K. Raises ValueError where nothing is left.
    """
    if isinstance(problem, OpenProblem) or not module_of(problem).case_type.values_in_keys or _is_narrow(supports):
        return supports
    table: list[Combination] = []
    for combination in supports.combinations or ({},):
        by_values: dict[tuple[int, ...], list[OptionValue]] = {}
        for size in combination.get("head_size") or supports.head_sizes or _SIZES_OF_KEYS:
            by_values.setdefault(_sizes_within(int(size), supports, combination), []).append(size)
        table += [
            {**combination, "num_kv_heads": (1,), "head_size": tuple(sizes), "v_head_size": of_values}
            for of_values, sizes in by_values.items()
            if of_values
        ]
    if not table or len(table) > MAX_COMBINATIONS:
        raise ValueError(
            f"Supports(head_sizes={supports.head_sizes!r}, v_head_sizes={supports.v_head_sizes!r}): in {problem} V is "
            f"the first numbers of each key; declare sizes of V that some head size has room for, at most "
            f"{MAX_COMBINATIONS} pairs"
        )
    return msgspec.structs.replace(supports, layouts=("NHD",), v_head_sizes="any", where=tuple(table))


def _is_narrow(supports: Supports) -> bool:
    named = {"num_kv_heads", "head_size", "v_head_size"}
    return (
        supports.layouts == ("NHD",)
        and bool(supports.combinations)
        and all(named <= one.keys() and one["num_kv_heads"] == (1,) for one in supports.combinations)
        and all(max(_sizes_in(one, "v_head_size")) <= min(_sizes_in(one, "head_size")) for one in supports.combinations)
    )


def _sizes_in(combination: Combination, name: str) -> tuple[int, ...]:
    return tuple(map(int, combination[name]))


def _sizes_within(head_size: int, supports: Supports, combination: Combination) -> tuple[int, ...]:
    """Sizes of V that are a part of a key of ``head_size``."""
    declared = combination.get("v_head_size")
    if declared is None and isinstance(supports.v_head_sizes, tuple):
        declared = supports.v_head_sizes
    if declared is None:
        largest = head_size - 1 if supports.v_head_sizes == "equal" else head_size
        declared = tuple(dict.fromkeys((*_SIZES_OF_VALUES, largest)))
        return tuple(sorted({int(size) for size in declared if 1 <= int(size) <= largest}, key=head_size_rank))
    return tuple(int(size) for size in declared if int(size) <= head_size)


def _check_values(place: str, name: str, values: tuple[OptionValue, ...], problem: Problem, options: Options) -> None:
    fields = fields_of(problem)
    if name not in fields and name not in options:
        raise ValueError(
            f"{place}: a case of {problem} has no such field, and the kernel no such option; it may name "
            f"{', '.join((*fields, *options))}"
        )
    if name in fields and name in options:
        raise ValueError(f"{place}: both a case of {problem} and the kernel's options have that; rename the option")
    if isinstance(problem, OpenProblem) and name in fields:
        for value in values:
            problem.fields[name].check(place, value)
        return
    choices = _ALLOWED.get(name) if name in fields else options[name]
    for value in values:
        if choices is not None and not offers(choices, value):
            raise ValueError(f"{place} holds {value!r}: must be one of {choices}")
        if choices is None and not (type(value) is int and 1 <= value <= _LARGEST[name]):
            raise ValueError(f"{place} holds {value!r}: must be an integer between 1 and {_LARGEST[name]}")


# Functions


class _CaseProxy:
    """A case as a function of it sees it: each field that is looked at is given a value, which is noted."""

    def __init__(self, path: list[tuple[str, int]], choices: Mapping[str, _Choices]) -> None:
        for name, value in (("_path", path), ("_choices", choices), ("_read", {}), ("_unknown", "")):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a case cannot be changed: {name}")

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        path, read = own["_path"], own["_read"]
        if name in read:
            number, choices = read[name]
            return choices[number]
        of = own["_choices"].get(name)
        if of is None:
            object.__setattr__(self, "_unknown", own["_unknown"] or name)
            raise AttributeError(f"where may not look at {name}")
        found = of(self) if callable(of) else of
        if not isinstance(found, tuple):  # what follows from other fields
            return found
        place = len(read)
        number = path[place][1] if place < len(path) and path[place][0] == name else 0
        read[name] = number, found
        return found[number]


_Choices = tuple[Any, ...] | Callable[[Any], Any]
"""The values of a field, or what makes them, or the only one, of a case."""


def _choices(problem: Problem, supports: Supports, options: Options) -> dict[str, _Choices]:
    """The choices of each field that a function may look at."""
    if isinstance(problem, OpenProblem):
        return {**options, **{name: _values_of(problem.fields[name]) for name in fields_of(problem)}}

    def v_head_sizes(case: Any) -> tuple[int, ...]:
        layout = case.layout if supports.v_head_sizes != "equal" and "layout" in fields else None
        return v_head_sizes_of(supports, case.head_size, layout)

    def kv_dtypes(case: Any) -> tuple[OptionValue, ...]:
        return tuple(case.dtype if one is None else one for one in caches_of(problem, supports, case.dtype))

    fields = fields_of(problem)
    usual = (*HEAD_SIZES, *LARGE_HEAD_SIZES) if supports.large_sizes else HEAD_SIZES
    head_sizes = tuple(sorted(set(supports.head_sizes or usual), key=head_size_rank))
    found: dict[str, _Choices] = {
        "dtype": dtypes_of(supports),
        "layout": layouts_of(supports),
        "head_size": head_sizes,
        "block_size": block_sizes_of(supports),
        "gqa_ratio": gqa_ratios_of(supports),
        "num_kv_heads": KV_HEADS,
        "num_q_heads": _num_q_heads if "gqa_ratio" in fields else tuple(_MERGE_HEADS),
        "num_splits": split_counts_of(supports),
        "v_head_size": v_head_sizes,
        "kv_dtype": kv_dtypes,
        "causal": (True, False) if supports.non_causal else (True,),
        **dict.fromkeys(QUERIES, (True, False)),
        **{name: (False, True) if name in supports.variants else (False,) for name in VARIANTS},
    }
    return {**options, **{name: found[name] for name in fields}}


def _values_of(field: Any) -> tuple[OptionValue, ...]:
    """The simplest first: all that it may have, or of many numbers those that are drawn."""
    if isinstance(field, Choice):
        return field.values
    return tuple(range(field.low, field.high + 1)) if field.high - field.low < _FEW else cast("Any", field.drawn)


def _num_q_heads(case: Any) -> Any:
    return case.gqa_ratio * case.num_kv_heads


Read = dict[str, tuple[int, tuple[OptionValue, ...]]]
"""The fields that were looked at, in that order, with their values and the number of the one that was told."""
Leaf = tuple[Read, bool]


def _table_of(
    function: Callable[[Any], bool], problem: Problem, supports: Supports, options: Options
) -> tuple[Combination, ...] | None:
    """None for a function that permits everything."""
    plain = msgspec.structs.replace(supports, where=None)
    leaves: list[Leaf] = []
    for leaf in _leaves(function, _choices(problem, plain, options)):
        leaves.append(leaf)
        if len(leaves) > _MOST_CALLS:
            raise ValueError(
                f"Supports(where=a function): it looks at more than {_MOST_CALLS} combinations of "
                f"{', '.join(leaf[0])}; declare fewer of their values, or give a table"
            )
    rows = _rows(leaves, 0)
    if not rows:
        raise ValueError(
            f"Supports(where=a function): it permits none of {len(leaves)} combinations of "
            f"{', '.join(leaves[0][0]) or 'anything'}; nothing would be supported, so correct it"
        )
    if len(rows) > MAX_COMBINATIONS:
        raise ValueError(
            f"Supports(where=a function): what it permits is a table of {len(rows)} combinations, but at most "
            f"{MAX_COMBINATIONS} are told apart; have it look at fewer fields, or declare fewer of their values"
        )
    return None if rows == ((),) else tuple(dict(row) for row in rows)


def _leaves(function: Callable[[Any], bool], choices: Mapping[str, _Choices]) -> Iterator[Leaf]:
    """The answer of ``function`` for each combination of the fields that it looks at, in the order in which it does.

    As Korat (Boyapati et al., ISSTA 2002) enumerates inputs by what a predicate reads: the last field that was looked
    at gets its next value, and is dropped once it has had them all.
    """
    path: list[tuple[str, int]] = []
    while True:
        read, said = _ask(function, _CaseProxy(path, choices), choices)
        if [(name, number) for name, (number, _) in read.items()][: len(path)] != path:
            raise ValueError(
                f"Supports(where=a function): asked twice about the same {', '.join(name for name, _ in path)}, it "
                "looks at different fields; it must depend on the case alone"
            )
        yield read, said
        path = [(name, number) for name, (number, _) in read.items()]
        while path and path[-1][1] + 1 == len(read[path[-1][0]][1]):
            path.pop()
        if not path:
            return
        name, number = path.pop()
        path.append((name, number + 1))


def _ask(function: Callable[[Any], bool], case: _CaseProxy, choices: Mapping[str, _Choices]) -> Leaf:
    own = vars(case)
    raised = ""
    said: object = None
    try:
        said = function(case)
    except Exception as error:  # noqa: BLE001 - the user's code, whose fault becomes one sentence
        raised = f"{type_name(error)}: {text_of(error)}"
    read: Read = own["_read"]
    if own["_unknown"]:
        raise ValueError(
            f"Supports(where=a function): it looks at case.{own['_unknown']}, but may look at "
            f"{', '.join(choices)} only; lengths and strides have declarations of their own"
        )
    if raised or not isinstance(said, bool):
        about = ", ".join(f"{name}={values[number]!r}" for name, (number, values) in read.items()) or "a case"
    if raised:
        raise ValueError(f"Supports(where=a function): asked about {about}, it raised {raised}; correct it")
    if not isinstance(said, bool):
        raise ValueError(
            f"Supports(where=a function): asked about {about}, it returned {said!r:.80}; it must return True or False"
        )
    return read, said


def _rows(leaves: list[Leaf], depth: int) -> Rows:
    """Combinations that permit what ``leaves`` permit, all of which agree in their first ``depth`` fields.

    Values with the same consequences are joined, and a field is left out where all of its values have the same.
    """
    read, said = leaves[0]
    if len(read) == depth:
        return ((),) if said else ()
    name = list(read)[depth]
    choices = read[name][1]
    by_rest: dict[Rows, list[OptionValue]] = {}
    for number, group in groupby(leaves, key=lambda leaf: leaf[0][name][0]):
        by_rest.setdefault(_rows(list(group), depth + 1), []).append(choices[number])
    if len(by_rest) == 1:
        return next(iter(by_rest))
    return tuple(((name, tuple(values)), *row) for rest, values in by_rest.items() for row in rest)
