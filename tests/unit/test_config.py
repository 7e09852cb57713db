"""attnfuzz.config: what a project settles in pyproject.toml is read strictly, and mistakes are one sentence."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from attnfuzz.config import PROFILE_VARIABLE, RULES, ConfigurationError, Settings, find_pyproject, load_settings
from attnfuzz.problems.declared_numerics import FixedTolerance

FULL = """
[tool.attnfuzz]
kernels = ["paged_*", "my/decode.py:mine", "package.module:name"]
budget = "1h30m"
regressions = "saved"
tolerance = { atol = 1e-2, rtol = 0 }
workers = 3
device = "cpu"
oracles = ["accuracy"]
seed = 7
max_seq_len = 5000
max_seqs = 40
fail_fast = true
on = ["paged_*", "my/others.py"]
against = "baseline.json"
profile = "quick"

[tool.attnfuzz.profiles.quick]
budget = "30s"

[tool.attnfuzz.profiles.nightly]
budget = "8h"
workers = "auto"
"""


@pytest.fixture(autouse=True)
def _in_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PROFILE_VARIABLE, raising=False)


def write(text: str) -> None:
    Path("pyproject.toml").write_text(text, encoding="utf-8")


def refusal(text: str, *, profile: str | None = None) -> str:
    write(text)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(profile=profile)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_setting_is_read() -> None:
    """A key that is accepted and then ignored would make a project believe in a check that it does not get."""
    write(FULL)
    settings = load_settings()
    assert settings == Settings(
        kernels=("paged_*", "my/decode.py:mine", "package.module:name"),
        budget="30s",
        regressions=Path("saved"),
        tolerance=FixedTolerance(atol=0.01, rtol=0.0),
        workers=3,
        device="cpu",
        oracles=("accuracy",),
        seed=7,
        max_seq_len=5000,
        max_seqs=40,
        fail_fast=True,
        on=("paged_*", "my/others.py"),
        against=Path("baseline.json"),
        profile="quick",
        file=Path.cwd() / "pyproject.toml",
    )
    assert all(getattr(settings, name) is not None for name in RULES)


def test_nothing_configured_settles_nothing() -> None:
    """Projects without the table must get what attnfuzz has built in."""
    assert load_settings() == Settings()
    write("[project]\nname = 'x'\n")
    assert load_settings() == Settings()


def test_the_profile_of_the_command_wins_over_the_variable_and_that_over_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A nightly job must not run with the budget of the quick one."""
    write(FULL)
    assert (load_settings().budget, load_settings(profile="nightly").budget) == ("30s", "8h")
    monkeypatch.setenv(PROFILE_VARIABLE, "nightly")
    assert (load_settings().workers, load_settings(profile="quick").workers) == ("auto", 3)
    monkeypatch.setenv(PROFILE_VARIABLE, "")
    assert load_settings().profile == "quick"


def test_names_are_relative_to_the_file_that_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run from a subfolder, the kernels and the regressions of the project would not be found."""
    write(FULL)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    settings = load_settings()
    assert settings.regressions == tmp_path / "saved"
    assert settings.kernels == ("paged_*", f"{tmp_path / 'my' / 'decode.py'}:mine", "package.module:name")
    assert find_pyproject() == tmp_path / "pyproject.toml"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("budgt = '3m'", ['budgt = "3m"', "no setting of attnfuzz", "did you mean 'budget'?"]),
        ("fail-fast = true", ["did you mean 'fail_fast'?"]),
        ("colour = 'red'", ["remove it, or name one of kernels, budget"]),
        ("budget = '10x'", ['budget = "10x"', "a duration above zero", 'write for example budget = "10m"']),
        ("budget = 60", ["budget = 60", "a duration"]),
        ("budget = 2026-11-21", ['budget = "2026-11-21"', "a duration"]),
        ("kernels = 'mine.py'", ['kernels = "mine.py"', "a list of one or more names"]),
        ("kernels = []", ["kernels = []", "a list of one or more names"]),
        ("kernels = ['']", ['kernels = [""]', "a list of one or more names"]),
        ("kernels = [3]", ["kernels = [3]"]),
        ("regressions = ''", ['regressions = ""', "name of a folder"]),
        ("regressions = 3", ["regressions = 3", "name of a folder"]),
        ("workers = 0", ["workers = 0", 'must be "auto" or a number between 1 and 256']),
        ("workers = true", ["workers = true"]),
        ("workers = 'many'", ['workers = "many"']),
        ("device = 'tpu'", ['device = "tpu"', "one of auto, cpu, cuda"]),
        ("oracles = ['a psychic']", ["a psychic", "dead_memory, determinism, accuracy"]),
        ("seed = -1", ["seed = -1", "between 0 and 4294967295"]),
        ("fail_fast = 'yes'", ['fail_fast = "yes"', "true or false"]),
        ("tolerance = 'loose'", ['tolerance = "loose"', '"bound"']),
        ("tolerance = { atol = -1.0, rtol = 0.0 }", ['"atol":-1.0', "finite numbers >= 0"]),
        ("tolerance = { atol = inf, rtol = 0.0 }", ["finite numbers >= 0"]),
        ("tolerance = { atol = 1.0 }", ["both atol and rtol"]),
        ("tolerance = { atol = 1.0, rtol = 1.0, ulp = 3 }", ["both atol and rtol"]),
    ],
)
@pytest.mark.parametrize("table", ["tool.attnfuzz", "tool.attnfuzz.profiles.nightly"])
def test_a_mistake_is_named_with_file_table_key_value_and_remedy(table: str, line: str, words: list[str]) -> None:
    """A setting that is passed over in silence, in a profile that runs once a week, is noticed too late."""
    sentence = refusal(f"[{table}]\n{line}\n")
    assert sentence.startswith(f"{Path.cwd() / 'pyproject.toml'}: [{table}] ")
    assert "secret" not in sentence
    assert "; " in sentence
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tool.attnfuzz\n", ["cannot be read", "repair it"]),
        ("a = " + "[" * 20_000, ["nested too deeply"]),
        ("[tool]\nattnfuzz = 3\n", ["attnfuzz = 3 must be a table", "write [tool.attnfuzz]"]),
        ("[tool.attnfuzz]\nprofiles = 3\n", ["profiles = 3 must be tables", "[tool.attnfuzz.profiles.NAME]"]),
        ("[tool.attnfuzz.profiles]\nci = 3\n", ["ci = 3 must be a table", "write [tool.attnfuzz.profiles.ci]"]),
        ("[tool.attnfuzz]\nprofile = 'ci'\n", ['profile = "ci" is not among', "add [tool.attnfuzz.profiles.NAME]"]),
        ("[tool.attnfuzz]\nprofile = ['ci']\nprofiles.ci = {}\n", ['profile = ["ci"] is not among', "name one of ci"]),
        ("[tool.attnfuzz.profiles.ci]\nprofile = 'ci'\n", ["profile", "is no setting"]),
    ],
)
def test_a_table_that_is_none_is_named(text: str, words: list[str]) -> None:
    """A traceback of the TOML reader helps nobody to find the line."""
    for word in ("pyproject.toml", *words):
        assert word in refusal(text)


def test_a_profile_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Going on without it would run with other settings than were asked for."""
    assert "profile 'weekly' is not among the profiles; name one of quick, nightly" in refusal(FULL, profile="weekly")
    assert "add [tool.attnfuzz.profiles.ci]" in refusal("[project]\n", profile="ci")
    Path("pyproject.toml").unlink()
    monkeypatch.setenv(PROFILE_VARIABLE, "ci")
    with pytest.raises(ConfigurationError, match=r"profile 'ci' cannot be found, since there is no pyproject\.toml"):
        load_settings()


@pytest.mark.parametrize(
    ("name", "reason"), [("a" * 300, "File name too long"), ("a\\u0000", "NUL"), ("loop", "symbolic links")]
)
def test_a_folder_that_cannot_be_is_named(name: str, reason: str) -> None:
    """The command that looks for regressions there would end in a traceback."""
    Path("loop").symlink_to("loop")
    sentence = refusal(f'[tool.attnfuzz]\nregressions = "{name}"\n')
    assert re.search(rf'\[tool\.attnfuzz\] regressions = ".* names no folder \(.*{reason}.*\); name another', sentence)


def test_a_file_that_is_too_large_is_named() -> None:
    """A sparse file of a terabyte would be read until the memory ends."""
    write("[tool.attnfuzz]\n")
    os.truncate("pyproject.toml", 1 << 40)
    with pytest.raises(ConfigurationError, match=r"pyproject\.toml cannot be read \(larger than 1048576 bytes\)"):
        load_settings()


def test_a_named_pipe_is_no_settings() -> None:
    """Every command in that folder would wait for somebody to write to it."""
    os.mkfifo("pyproject.toml")
    assert find_pyproject() != Path.cwd() / "pyproject.toml"


def test_a_file_that_is_no_text_is_named() -> None:
    """Bytes that are not UTF-8 end in a traceback otherwise."""
    Path("pyproject.toml").write_bytes(b"[tool.attnfuzz]\nbudget = '\xff'\n")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_settings()


@pytest.mark.parametrize("key", RULES)
def test_the_example_in_the_remedy_is_valid(key: str) -> None:
    """Whoever does what the error says would get the next error."""
    value = tomllib.loads(f"{key} = {RULES[key].example}")[key]
    assert RULES[key].convert(value) is not None


def test_every_key_is_a_setting() -> None:
    """A key that is valid but has no place to go could not be used."""
    assert set(RULES) == {field.name for field in msgspec.structs.fields(Settings)} - {"profile", "file"}
