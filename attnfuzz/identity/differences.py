"""In which fields two cases of a problem differ: what a kernel that keeps something confuses. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from attnfuzz.cases.facets import changed
from attnfuzz.cases.facets.facet import Changes, Options
from attnfuzz.cases.same_shapes import twins_of
from attnfuzz.cases.supported import supports_case
from attnfuzz.explaining.ablation import changes_of
from attnfuzz.problems.cases import AttentionCase, Case, encode_case
from attnfuzz.problems.supports import Supports, as_written

_ABSENT = "contiguous"
"""The strides of a tensor of which a case says nothing."""
_OTHER_SEED = 0x5EED
_NUMBERS = ("seed", "values.seed", "values.needles")


def differing(one: Case, other: Case) -> tuple[str, ...]:
    """The paths of fields whose values differ: "scale", "variant.window", "strides.q"."""
    return tuple(dict.fromkeys(_paths("", one, other)))


def _paths(above: str, one: Any, other: Any) -> Iterator[str]:
    if type(one) is type(other) and isinstance(one, msgspec.Struct | Mapping):
        mine, its = _entries(one), _entries(other)
        for name in dict.fromkeys((*mine, *its)):
            yield from _paths(f"{above}{name}.", mine.get(name, _ABSENT), its.get(name, _ABSENT))
    elif one != other:
        yield above.removesuffix(".")


def _entries(one: msgspec.Struct | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(one, Mapping):
        return one
    return {name: getattr(one, name) for name in one.__struct_fields__}


def differences(case: Case, other: Case) -> Iterator[str]:
    """Each respect in which ``other`` differs from ``case``, in words."""
    paths = differing(case, other)
    for path in paths:
        if path not in _NUMBERS:
            yield f"{path} ({as_written(_at(other, path))} there, {as_written(_at(case, path))} here)"
    if any(path in _NUMBERS for path in paths):
        yield "the numbers in its tensors"


def _at(one: Any, path: str) -> Any:
    for name in path.split("."):
        one = one.get(name, _ABSENT) if isinstance(one, Mapping) else getattr(one, name)
    return one


def with_fields_of(case: Case, other: Case, paths: Iterable[str]) -> Case | None:
    """``case`` with the values that ``other`` has at ``paths`` and all else as it is; None where no case may be so."""
    found = case
    try:
        for path in paths:
            found = _put(found, path.split("."), _at(other, path))
    except (AttributeError, ValueError):  # a field in a part that the case has not; lengths that do not go together
        return None
    return found


def _put(one: Any, path: list[str], value: object) -> Any:
    name, *inner = path
    if isinstance(one, Mapping):
        return {key: its for key, its in {**one, name: value}.items() if its != _ABSENT}
    return msgspec.structs.replace(one, **{name: _put(getattr(one, name), inner, value) if inner else value})


def others_like(case: Case, *, supports: Supports, options: Options) -> Iterator[Case]:
    """Supported cases that differ from ``case`` in one respect, first in what a key made of shapes leaves out."""
    seen = {encode_case(case)}
    same = ("values",) if isinstance(case, AttentionCase) else ()
    twins = (with_fields_of(one.case, case, same) for one in twins_of(case, supports=supports, options=options))
    renewed = (changed(case, **changes) for changes in _other_numbers(case))
    for one in (*twins, *renewed, *(one for _, one in changes_of(case, supports=supports, options=options))):
        if one is not None and encode_case(one) not in seen and supports_case(supports, options, one):
            seen.add(encode_case(one))
            yield one


def _other_numbers(case: Any) -> Iterator[Changes]:
    """Changes of the numbers in tensors alone; the same lengths, of other sequences."""
    if isinstance(case, AttentionCase):
        yield {"seq_lens": case.seq_lens[::-1]}
        yield {"values": msgspec.structs.replace(case.values, seed=case.values.seed ^ _OTHER_SEED)}
    elif "seed" in case.__struct_fields__:
        yield {"seed": case.seed ^ _OTHER_SEED}
