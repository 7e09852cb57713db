"""The fields of a case as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from attnfuzz.problems.cases import Case

__all__ = ["field_table"]


def field_table(case: Case, *, defaults: bool = False) -> Table:
    """The fields of ``case`` with their values; with ``defaults`` those too that have theirs, but less bright."""
    table = Table("field", "value", box=None, pad_edge=False, header_style="bold")
    changed = dict(_flat(msgspec.to_builtins(case)))
    for name, value in _flat(_all_fields(case)) if defaults else changed.items():
        style = "bold" if name in changed else "dim"
        table.add_row(name, Text(msgspec.json.encode(value).decode()), style=style)
    return table


def _all_fields(case: Case) -> dict[str, Any]:
    """As ``to_builtins``, with the fields that still have their default."""
    return {name: msgspec.to_builtins(getattr(case, name)) for name in case.__struct_fields__}


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
