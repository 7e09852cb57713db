"""What makes hostile JSON of honest JSON: changes of its structure, of its bytes, and of its meaning."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

Path = tuple[str | int, ...]

_LONG = 50_000
_MOST_REPEATED = 64 << 20
"""Characters: of what is large or repeated twice there would be gigabytes, and no memory left for what is tried."""
_RAW = "@raw@"
"""Stands for JSON that `json.dumps` cannot write; see `spliced`."""


def nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    """JSON that is so deep."""
    return opening * depth + "0" + closing * depth


HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400,
    0.5, -0.0, 5e-324, 1e308, float("nan"), float("inf"), -float("inf"),
    "", "*", "paged_*", "NaN", "\0", "\x1b[2J\x1b]0;owned\a", "\ud800", "\u202eevil", "[bold]x[/nothing]", "{0}%s$HOME",
    "x" * _LONG, "../../planted.py", "a\nb\rc\bd", "1" * 5000,
    [], {}, [[]], {"": ""}, [None] * 100, [0] * _LONG, {str(i): i for i in range(1000)},
    f"{_RAW}{nested(400)}", f"{_RAW}{nested(200_000)}", f"{_RAW}1e999999", f"{_RAW}-", f"{_RAW}{'9' * 5000}",
)  # fmt: skip
"""Values that fit hardly anywhere."""


def mutated_document(document: Any, dice: random.Random, *, changes: int) -> bytes:
    """``document`` as JSON, changed in so many places by one kind of change each."""
    for _ in range(changes):
        document = json.loads(json.dumps(document))  # a copy in which nothing stands at two places
        places = _places(document)
        if places:
            dice.choice(_CHANGES)(document, dice.choice(places), dice)
    return spliced(document)


def spliced(document: Any) -> bytes:
    """``document`` as JSON, in which texts that begin with ``@raw@`` stand for themselves."""
    return re.sub(f'"{_RAW}([^"]*)"', r"\1", json.dumps(document)).encode()


def mutated_bytes(data: bytes, dice: random.Random) -> bytes:
    """``data`` with bits flipped, a part left out, doubled or cut off, or something put in."""
    start = dice.randrange(len(data) + 1)
    end = min(len(data), start + dice.choice((1, 1, 2, 8, 64, 1000)))
    before, part, after = data[:start], data[start:end], data[end:]
    how = dice.randrange(6)
    if how == 0:
        return before + bytes(byte ^ (1 << dice.randrange(8)) for byte in part) + after
    if how == 1:
        return before
    if how == 2:
        return before + after
    if how == 3:
        return before + part * dice.choice((2, 3, 500)) + after
    if how == 4:
        return before + dice.randbytes(dice.choice((1, 4, 100))) + part + after
    return before + dice.choice((b"\0", b"\xff", b"\xed\xa0\x80", b'"', b"\\", b",", b"}", b"1e9", b"\x1b[2J")) + after


def nudged(document: Any, dice: random.Random, *, choices: Sequence[Any] = ()) -> Any:
    """``document`` with one number a little other, or one entry doubled, moved or left out: often still valid."""
    document = copy.deepcopy(document)
    places = _places(document)
    if not places:
        return document
    parent, key = _parent(document, dice.choice(places))
    value = parent[key]
    if isinstance(value, bool):
        parent[key] = not value
    elif isinstance(value, int):
        parent[key] = dice.choice((value + 1, value - 1, 2 * value, value // 2, -value, 0, 1, 3, 7, 16, 17, 64, 129))
    elif isinstance(value, float):
        parent[key] = dice.choice((value * 2, value / 3, -value, 1e-30, 64.0, 1.0))
    elif isinstance(value, str):
        parent[key] = dice.choice(choices or ("",))
    elif isinstance(value, list):
        dice.choice((value.reverse, partial(value.extend, value[:1]), lambda: value and value.pop()))()
    else:
        del parent[key]
    return document


def _places(document: Any, path: Path = ()) -> list[Path]:
    children = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    found = [path] if path else []
    for key, value in list(children)[:200]:  # of a long list the first ones stand for all
        found += _places(value, (*path, key))
    return found


def _parent(document: Any, path: Path) -> tuple[Any, Any]:
    for key in path[:-1]:
        document = document[key]
    return document, path[-1]


def _replace(document: Any, path: Path, dice: random.Random) -> None:
    parent, key = _parent(document, path)
    parent[key] = copy.deepcopy(dice.choice(HOSTILE))


def _delete(document: Any, path: Path, dice: random.Random) -> None:
    parent, key = _parent(document, path)
    del parent[key]


def _swap(document: Any, path: Path, dice: random.Random) -> None:
    parent, key = _parent(document, path)
    others = [place for place in _places(document) if place[: len(path)] != path and path[: len(place)] != place]
    if others:
        other, at = _parent(document, dice.choice(others))
        parent[key], other[at] = other[at], parent[key]


def _add(document: Any, path: Path, dice: random.Random) -> None:
    parent, _ = _parent(document, path)
    value = copy.deepcopy(dice.choice(HOSTILE))
    if isinstance(parent, dict):
        parent[dice.choice(("unheard_of", "", "__class__", "seed", "path", "\0", "x" * 300))] = value
    else:
        parent.insert(dice.randrange(len(parent) + 1), value)


def _rename(document: Any, path: Path, dice: random.Random) -> None:
    parent, key = _parent(document, path)
    if isinstance(parent, dict):
        parent[f"{key}{dice.choice(('_', ' ', chr(0), 's'))}"] = parent.pop(key)


def _repeat(document: Any, path: Path, dice: random.Random) -> None:
    parent, key = _parent(document, path)
    most = max(1, _MOST_REPEATED // len(json.dumps(parent[key])))
    if isinstance(parent, list):
        parent[key:key] = [parent[key]] * min(most, dice.choice((1, 10, 65_535)))
    else:
        parent[key] = [parent[key]] * min(most, dice.choice((1, 3, 1000)))


def _number(document: Any, path: Path, dice: random.Random) -> None:
    parent, key = _parent(document, path)
    if isinstance(parent[key], int | float):
        parent[key] = dice.choice((parent[key] * -1, parent[key] + 1, parent[key] * 2**20, 2 ** dice.randrange(70)))
    else:
        _replace(document, path, dice)


def _wrap(document: Any, path: Path, dice: random.Random) -> None:
    parent, key = _parent(document, path)
    parent[key] = dice.choice(({"0": parent[key]}, [parent[key]], [[parent[key]]], str(parent[key])[:1000]))


_CHANGES: tuple[Callable[[Any, Path, random.Random], None], ...] = (
    _replace, _replace, _replace, _delete, _swap, _add, _rename, _repeat, _number, _number, _wrap,
)  # fmt: skip
