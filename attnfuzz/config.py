"""Defaults of a project: ``[tool.attnfuzz]`` in its pyproject.toml, read as strictly as a regression file. Torch-free.

```toml
[tool.attnfuzz]
kernels = ["my_decode.py", "paged_*"]
budget = "10m"
profile = "quick"                 # unless --profile or ATTNFUZZ_PROFILE names another one

[tool.attnfuzz.profiles.quick]    # what a profile does not set is as above
budget = "30s"
```

Command-line options win over a profile, a profile over the table, the table over what is built in.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from attnfuzz.campaign.stopping import parse_duration
from attnfuzz.data_files import MOST_PYPROJECT_BYTES, is_regular_file, read_data_file, why_unusable
from attnfuzz.oracles.registry import ORACLES, OracleName
from attnfuzz.problems.declared_numerics import FixedTolerance, Tolerance
from attnfuzz.project import everybody_can_write, project_root

PROFILE_VARIABLE = "ATTNFUZZ_PROFILE"

_TABLE = "tool.attnfuzz"
_SHOWN_CHARACTERS = 60


class ConfigurationError(ValueError):
    """pyproject.toml cannot be used; the message is one sentence with file, table, key, value, rule and remedy."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a project; None where it leaves the choice to attnfuzz.

    ``kernels`` and ``on`` that are files, ``against`` and the folder ``regressions`` can be used from the working
    directory, wherever pyproject.toml lies. ``budget`` is a duration such as ``10m``. ``file`` is the pyproject.toml
    that says so, None if it has nothing to say; ``profile`` the profile that was chosen.
    """

    kernels: tuple[str, ...] | None = None
    budget: str | None = None
    regressions: Path | None = None
    tolerance: Tolerance | None = None
    workers: int | str | None = None
    device: str | None = None
    oracles: tuple[OracleName, ...] | None = None
    seed: int | None = None
    max_seq_len: int | None = None
    max_seqs: int | None = None
    fail_fast: bool | None = None
    on: tuple[str, ...] | None = None
    against: Path | None = None
    profile: str | None = None
    file: Path | None = None


def load_settings(*, profile: str | None = None) -> Settings:
    """The settings of the project that the working directory belongs to.

    Without ``profile`` the one that ``ATTNFUZZ_PROFILE`` or the table names is taken. Raises ConfigurationError.
    """
    pyproject = find_pyproject()
    if pyproject is None:
        return _without_table("there is no pyproject.toml here or above in this project", profile)
    return read_settings(pyproject, profile=profile)


def find_pyproject(start: Path | None = None) -> Path | None:
    """The pyproject.toml in the root of the project that ``start``, by default the working directory, belongs to.

    None where there is none, or where anybody may have put it: not the user's own, in a folder that all can write to.
    """
    root = project_root(start)
    file = root / "pyproject.toml"
    if not is_regular_file(file):
        return None
    is_mine = {file.lstat().st_uid, file.stat().st_uid} == {os.geteuid()}
    return file if is_mine or not everybody_can_write(root) else None


def has_settings(pyproject: Path) -> bool:
    """Whether the file has a ``[tool.attnfuzz]``. Raises ConfigurationError for one that cannot be read."""
    return _table(pyproject) is not None


def read_settings(pyproject: Path, *, profile: str | None = None) -> Settings:
    """The settings in one file; see `load_settings`."""
    table = _table(pyproject)
    if table is None:
        return _without_table(f"{pyproject} has no [{_TABLE}]", profile)
    profiles = table.pop("profiles", {})
    if not isinstance(profiles, dict):
        raise _wrong(pyproject, _TABLE, "profiles", profiles, "must be tables", f"write [{_TABLE}.profiles.NAME]")
    chosen = table.pop("profile", None)
    if chosen is not None and not (isinstance(chosen, str) and chosen in profiles):
        raise _wrong(pyproject, _TABLE, "profile", chosen, *_no_such_profile(profiles))
    values = _checked(pyproject, _TABLE, table)
    checked = {name: _checked(pyproject, f"{_TABLE}.profiles.{name}", one) for name, one in profiles.items()}
    wanted = profile or os.environ.get(PROFILE_VARIABLE) or chosen
    if wanted is not None and wanted not in checked:
        raise ConfigurationError(f"{pyproject}: profile {wanted!r} {'; '.join(_no_such_profile(profiles))}")
    values |= checked.get(wanted or "", {})
    return _placed(values, pyproject, wanted)


def _without_table(reason: str, profile: str | None) -> Settings:
    wanted = profile or os.environ.get(PROFILE_VARIABLE)
    if wanted:
        remedy = f"add [{_TABLE}.profiles.{wanted}] to it, or name no profile"
        raise ConfigurationError(f"profile {wanted!r} cannot be found, since {reason}; {remedy}")
    return Settings()


def _table(pyproject: Path) -> dict[str, Any] | None:
    try:
        document = tomllib.loads(read_data_file(pyproject, MOST_PYPROJECT_BYTES).decode())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "strerror", error)
        raise ConfigurationError(f"{pyproject} cannot be read ({reason}); repair it") from error
    tool = document.get("tool", {})
    table = tool.get("attnfuzz") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise _wrong(pyproject, "tool", "attnfuzz", table, "must be a table", f"write [{_TABLE}]")
    return table


def _checked(pyproject: Path, section: str, table: object) -> dict[str, Any]:
    """The values of one table, each of its key's type."""
    if not isinstance(table, dict):
        parent, _, name = section.rpartition(".")
        raise _wrong(pyproject, parent, name, table, "must be a table", f"write [{section}]")
    return {key: _value(pyproject, section, key, value) for key, value in table.items()}


def _value(pyproject: Path, section: str, key: str, value: object) -> Any:
    if key not in RULES:
        raise _wrong(pyproject, section, key, value, "is no setting of attnfuzz", _nearest(key, RULES, "remove it"))
    rule = RULES[key]
    try:
        return rule.convert(value)
    except ValueError as error:  # msgspec.ValidationError is one
        remedy = f"write for example {key} = {rule.example}"
        raise _wrong(pyproject, section, key, value, f"must be {rule.text}", remedy) from error


def _placed(values: dict[str, Any], pyproject: Path, profile: str | None) -> Settings:
    """Names of files and folders are relative to pyproject.toml."""
    folder = pyproject.parent.resolve()
    for key, kind in (("regressions", "folder"), ("against", "file")):
        if key in values:
            name = values[key]
            if (reason := why_unusable(folder / name)) is not None:
                raise _wrong(pyproject, _TABLE, key, name, f"names no {kind} ({reason})", "name another")
            values[key] = _shorten(folder / name)
    for key in ("kernels", "on"):
        if key in values:
            values[key] = tuple(_placed_kernel(name, folder) for name in values[key])
    return Settings(**values, profile=profile, file=pyproject)


def _placed_kernel(name: str, folder: Path) -> str:
    file, colon, attribute = (name, "", "") if name.endswith(".py") else name.rpartition(":")
    return f"{_shorten(folder / file)}{colon}{attribute}" if file.endswith(".py") else name


def _shorten(path: Path) -> Path:
    """Relative to the working directory where that is shorter to read."""
    cwd = Path.cwd()
    return path.relative_to(cwd) if path.is_relative_to(cwd) else path


def _no_such_profile(profiles: Mapping[str, object]) -> tuple[str, str]:
    names = ", ".join(profiles)
    return "is not among the profiles", f"name one of {names}" if names else f"add [{_TABLE}.profiles.NAME]"


def _nearest(key: str, keys: Mapping[str, object], otherwise: str) -> str:
    close = difflib.get_close_matches(key.replace("-", "_"), keys, n=1)
    return f"did you mean {close[0]!r}?" if close else f"{otherwise}, or name one of {', '.join(keys)}"


def _wrong(pyproject: Path, section: str, key: str, value: object, rule: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"{pyproject}: [{section}] {key} = {_show(value)} {rule}; {remedy}")


def _show(value: object) -> str:
    text = msgspec.json.encode(value, enc_hook=str).decode()
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


DEVICES = ("auto", "cpu", "cuda")
MAX_WORKERS = 256
MAX_SEED = 2**32 - 1
MAX_ASKED_LENGTH = 1 << 20
MAX_ASKED_SEQS = 1 << 12


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for one key: its type, and ``check``, which raises ValueError for a value that breaks the rule."""

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
        f"a list of one or more of {', '.join(ORACLES)}, or names of oracles of your own",
        '["accuracy", "dead_memory"]',
        check=_check_not_empty,
    ),
    "seed": Rule(
        int, f"a number between 0 and {MAX_SEED}", "20261121", check=lambda value: _check_number(value, 0, MAX_SEED)
    ),
    "max_seq_len": Rule(
        int,
        f"a number between 1 and {MAX_ASKED_LENGTH}",
        "8192",
        check=lambda value: _check_number(value, 1, MAX_ASKED_LENGTH),
    ),
    "max_seqs": Rule(
        int,
        f"a number between 1 and {MAX_ASKED_SEQS}",
        "64",
        check=lambda value: _check_number(value, 1, MAX_ASKED_SEQS),
    ),
    "fail_fast": Rule(bool, "true or false", "true"),
    "on": Rule(
        tuple[str, ...], "a list of one or more names of kernels", '["paged_*", "vllm:*"]', check=_check_not_empty
    ),
    "against": Rule(str, "the name of a file", '"baseline.json"', check=_check_not_empty),
}
"""By key."""
