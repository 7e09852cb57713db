"""The mutants, read from `mutants.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class Edit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One replacement in a file of `kernels/`; `old` must occur there exactly once."""

    file: str
    old: str
    new: str


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bundled kernel with one bug; the fields are explained in `mutants.toml`."""

    name: str
    kernel: str
    bug: str
    classes: str
    oracle: str
    minimal: dict[str, Any]
    edits: tuple[Edit, ...]
    reference: str = ""
    in_suite: bool = False


class _Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mutant: tuple[Mutant, ...]


MUTANTS = msgspec.toml.decode((Path(__file__).parent / "mutants.toml").read_bytes(), type=_Catalogue).mutant


def mutant_named(name: str) -> Mutant:
    return next(mutant for mutant in MUTANTS if mutant.name == name)
