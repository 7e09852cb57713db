"""What a project settles in pyproject.toml, where it ends, and which code is its own."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from attnfuzz.config import PROFILE_VARIABLE, RULES, ConfigurationError, Settings, find_pyproject, load_settings
from attnfuzz.problems.declared_numerics import FixedTolerance
from attnfuzz.project import project_root, search_path, why_foreign

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


STRANGER = 54321


@pytest.fixture
def owned_by_others(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Paths that seem to belong to another user, which only root could arrange otherwise."""
    paths: set[Path] = set()
    stat = Path.stat

    def pretended(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = stat(path, follow_symlinks=follow_symlinks)
        return os.stat_result((*found[:4], STRANGER, *found[5:10])) if path in paths else found

    monkeypatch.setattr(Path, "stat", pretended)
    return paths


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``tmp_path/a/b``, the working directory; nothing above has a marker that counts."""
    folder = tmp_path.resolve() / "a" / "b"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def test_the_root_is_the_nearest_folder_with_a_marker(folder: Path) -> None:
    """From a subfolder a project's own kernels would be strangers, or all that lies above would be its own."""
    assert project_root() == folder
    (folder.parents[1] / "pyproject.toml").touch()
    assert project_root() == folder.parents[1]
    (folder.parent / ".git").touch()  # a file, as in a work tree
    assert project_root() == folder.parent
    assert project_root(folder.parents[1]) == folder.parents[1]


def test_where_a_search_has_run_is_a_project_if_nothing_else_is(folder: Path) -> None:
    """`attnfuzz replay ../x.json` would find no kernel in a folder that has no pyproject.toml, as a newcomer's."""
    (folder.parent / ".attnfuzz").mkdir()
    assert project_root() == folder.parent
    (folder.parents[1] / "pyproject.toml").touch()
    assert project_root() == folder.parents[1]


def test_settings_above_the_root_do_not_count(folder: Path) -> None:
    """A pyproject.toml around a clone would decide what runs in it."""
    (folder.parents[1] / "pyproject.toml").touch()
    assert find_pyproject() == folder.parents[1] / "pyproject.toml"
    (folder.parent / ".git").mkdir()
    assert find_pyproject() is None


@pytest.mark.parametrize("mode", [0o1777, 0o777])
def test_a_folder_that_all_can_write_to_is_no_ones_project(mode: int, folder: Path, owned_by_others: set[Path]) -> None:
    """Anybody could plant a pyproject.toml, and with it a project around other people's folders."""
    (folder.parent / "pyproject.toml").touch()
    folder.parent.chmod(mode)
    if mode == 0o777:  # one's own folder may be open to all
        assert project_root() == folder.parent
        owned_by_others.add(folder.parent)
    assert project_root() == folder
    assert find_pyproject() is None


def test_another_users_folder_is_not_searched(folder: Path, owned_by_others: set[Path]) -> None:
    """Whose folder one happens to work in would decide what one runs."""
    (folder.parent / "pyproject.toml").touch()
    owned_by_others.add(folder.parent)
    assert project_root() == folder
    owned_by_others.add(folder)  # a checkout that belongs to another user as a whole, as in many containers
    assert project_root() == folder.parent


def test_in_a_folder_that_all_can_write_to_only_ones_own_settings_count(
    folder: Path, owned_by_others: set[Path]
) -> None:
    """In /tmp itself, somebody else's settings would be taken for one's own, or one's own not be found."""
    folder.chmod(0o1777)
    (folder / "pyproject.toml").touch()
    assert find_pyproject() == folder / "pyproject.toml"
    owned_by_others.add(folder / "pyproject.toml")
    assert find_pyproject() is None


def test_code_is_the_projects_own_if_it_lies_in_there(folder: Path) -> None:
    """What a stranger's file names would run, or nothing that one has written oneself."""
    outside, inside = folder.parent / "k.py", folder / "sub" / "k.py"
    inside.parent.mkdir()
    for file in (outside, inside):
        file.touch()
    assert why_foreign(inside, folder) is None
    assert why_foreign(Path("sub/../sub/k.py"), folder) is None
    assert why_foreign(folder / "not_there.py", folder) is None
    for file in (outside, Path("../k.py"), Path("sub/../../k.py"), folder.with_name("b2") / "k.py"):
        assert f"outside the project's root {folder}" in (why_foreign(file, folder) or "")
    (folder / "linked.py").symlink_to(outside)
    assert "outside" in (why_foreign(Path("linked.py"), folder) or "")
    inside.parent.chmod(0o1777)
    assert "everybody can write" in (why_foreign(inside, folder) or "")


def test_the_projects_folders_come_last_on_the_path(folder: Path) -> None:
    """A file of the project would be taken for an installed module of the same name."""
    (folder.parent / "pyproject.toml").touch()
    assert search_path()[-3:] == [str(folder), str(folder.parent), str(folder.parent / "src")]
