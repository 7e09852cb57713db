"""Declarations that remember what was said in them: a default that somebody wrote down is a promise. Torch-free."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["Declared"]


class _Remembers(msgspec.StructMeta):
    """Notes which fields a program passed at their defaults; a copy by ``msgspec.structs.replace`` keeps the note."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:  # noqa: N805 - of a metaclass
        made = super().__call__(*args, **fields)
        if fields and "promised" not in fields:
            defaults = {one.name: one.default for one in msgspec.structs.fields(made)}
            said = tuple(sorted(name for name, value in fields.items() if value == defaults[name]))
            msgspec.structs.force_setattr(made, "promised", said)
        return made


class Declared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, metaclass=_Remembers):
    """Fields with defaults, of which nothing that was passed is taken to be left open.

    ``promised`` are the names of those that were passed at their defaults; it is filled in, not passed.
    """

    promised: tuple[str, ...] = ()

    def leaves_open(self, name: str) -> bool:
        """Whether nothing was said of the field ``name``."""
        default = next(field.default for field in msgspec.structs.fields(self) if field.name == name)
        return bool(getattr(self, name) == default) and name not in self.promised

    def declared(self) -> dict[str, Any]:
        """The fields that something was said of, with their values."""
        names = (name for name in self.__struct_fields__ if name != "promised")
        return {name: getattr(self, name) for name in names if not Declared.leaves_open(self, name)}
