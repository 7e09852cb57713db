"""States of campaigns with one thing wrong each, for whoever reads them: every field with every kind of value."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

Document = dict[str, Any]

NESTED: Any = "innermost"
for _ in range(200):
    NESTED = [NESTED]

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 7, 1.5, -2.5, 1e300, 2**63, 2**70, "", "x", "../../stranger.json", "/etc/passwd", "\x1b[2J\x00",
    "regressions/../../stranger.json", "x" * 5_000, [], [[]], {}, {"x": 1}, NESTED,
)  # fmt: skip


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*place, key)
        yield from _places(part, (*place, key))


def changed_documents(document: Document) -> Iterator[tuple[str, Document]]:
    """``document`` with each field, and each entry of a list, missing, doubled, renamed, or another value."""
    for place in _places(document):
        name = ".".join(map(str, place))
        for what in ("missing", "doubled", "renamed", *VALUES):
            changed = copy.deepcopy(document)
            holder = changed
            for key in place[:-1]:
                holder = holder[key]
            last = place[-1]
            if what == "missing":
                del holder[last]
            elif what == "doubled":
                if not isinstance(holder, list):
                    continue
                holder.append(holder[last])
            elif what == "renamed":
                if not isinstance(holder, dict):
                    continue
                holder[f"{last}_"] = holder.pop(last)
            else:
                holder[last] = copy.deepcopy(what)
            yield f"{name} {str(what)[:40]!r}", changed


def broken_bytes(data: bytes) -> Iterator[tuple[str, bytes]]:
    """What no encoder would write in place of ``data``."""
    for length in range(0, len(data), 37):
        yield f"cut off after {length} bytes", data[:length]
    yield "binary", bytes(range(256)) * 16
    yield "not UTF-8", data.replace(b"regressions", b"regress\xff\xfe")
    yield "half of a pair", data.replace(b"regressions", rb"\ud800")
    yield "not a number", data.replace(b"60.0", b"NaN")
    yield "infinite", data.replace(b"60.0", b"Infinity")
    yield "beyond numbers", data.replace(b"60.0", b"1e999")
    yield "a number of many digits", data.replace(b"60.0", b"9" * 10_000)
    yield "nested deeply", b"[" * 100_000 + b"]" * 100_000
    yield "nested deeply inside", data.replace(b'"findings":', b'"findings":' + b"[" * 100_000)
    yield "nested deeply in a case", data.replace(b'"case":{', b'"case":' + b"[" * 100_000 + b"]" * 100_000 + b',"x":{')
    yield "a list", b"[]"
    yield "a number", b"1"
    yield "a field twice", data.replace(b'"seed":7', b'"seed":7,"seed":-8')
    yield "two documents", data + data
    yield "more after it", data + b"\x00"
    yield "a byte-order mark", b"\xef\xbb\xbf" + data
    yield "another encoding", json.dumps(json.loads(data)).encode("utf-16")
