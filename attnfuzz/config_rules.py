"""The keys that ``[tool.attnfuzz]`` may have, and what each may hold. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from attnfuzz.campaign.stopping import parse_duration
from attnfuzz.oracles.verdict import ORACLES, OracleName
from attnfuzz.problems.tolerance import FixedTolerance

__all__ = ["DEVICES", "MAX_SEED", "MAX_WORKERS", "RULES", "Rule"]

DEVICES = ("auto", "cpu", "cuda")
MAX_WORKERS = 256
MAX_SEED = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Rule:
    """What one key may hold: its type, and ``check``, which raises ValueError for a value that breaks the rule."""

    kind: Any
    text: str
    example: str
    check: Callable[[Any], object] = lambda value: value

    def convert(self, value: object) -> Any:
        """``value``, as TOML has it, in its own type. Raises ValueError."""
        converted = msgspec.convert(value, type=self.kind)
        self.check(converted)
        return converted


def _check_not_empty(value: str | tuple[str, ...]) -> None:
    if not value or not all(value):
        raise ValueError(f"{value!r} must not be empty")


def _check_oracles(names: tuple[OracleName, ...]) -> None:
    _check_not_empty(names)
    for name in names:
        if name not in ORACLES:
            raise ValueError(f"no oracle of this version is called {name!r}")


def _check_number(value: int | str, lowest: int, highest: int) -> None:
    if isinstance(value, int) and not lowest <= value <= highest:
        raise ValueError(f"{value!r} must be between {lowest} and {highest}")


RULES: dict[str, Rule] = {
    "kernels": Rule(
        tuple[str, ...], "a list of one or more names of kernels", '["paged_*", "my_decode.py"]', check=_check_not_empty
    ),
    "budget": Rule(str, "a duration above zero and at most a year", '"10m"', check=parse_duration),
    "regressions": Rule(str, "the name of a folder", '"regressions"', check=_check_not_empty),
    "tolerance": Rule(
        Literal["bound"] | FixedTolerance,
        '"bound" or finite numbers >= 0 for both atol and rtol',
        "{ atol = 1e-2, rtol = 1e-2 }",
    ),
    "workers": Rule(
        int | Literal["auto"],
        f'"auto" or a number between 1 and {MAX_WORKERS}',
        '"auto"',
        check=lambda value: _check_number(value, 1, MAX_WORKERS),
    ),
    "device": Rule(Literal["auto", "cpu", "cuda"], f"one of {', '.join(DEVICES)}", '"auto"'),
    "oracles": Rule(
        tuple[OracleName, ...],
        f"a list of one or more of {', '.join(ORACLES)}",
        '["accuracy", "dead_memory"]',
        check=_check_oracles,
    ),
    "seed": Rule(
        int, f"a number between 0 and {MAX_SEED}", "20261121", check=lambda value: _check_number(value, 0, MAX_SEED)
    ),
    "fail_fast": Rule(bool, "true or false", "true"),
    "on": Rule(
        tuple[str, ...], "a list of one or more names of kernels", '["paged_*", "vllm:*"]', check=_check_not_empty
    ),
    "against": Rule(str, "the name of a file", '"baseline.json"', check=_check_not_empty),
}
"""By key."""
