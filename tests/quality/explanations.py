"""What explanations of the planted bugs must name, read from `explanations.toml`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from attnfuzz.oracles.registry import OracleName


class Expectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One mutant's smallest failing case and what is to be said of it; the fields are explained in the file."""

    oracle: OracleName
    case: str
    names: str = ""
    nothing: str = ""
    missed: str = ""


EXPLANATIONS = msgspec.toml.decode(
    (Path(__file__).parent / "explanations.toml").read_bytes(), type=dict[str, Expectation]
)
