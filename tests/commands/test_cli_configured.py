"""attnfuzz.cli.options: a project's settings become the defaults of options, and options on the command line win."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from attnfuzz.cli.explore import command as explore
from attnfuzz.cli.output import Refusal
from attnfuzz.cli.replay import command as replay
from attnfuzz.config import PROFILE_VARIABLE, RULES
from attnfuzz.problems.declared_numerics import FixedTolerance

PROJECT = """
[tool.attnfuzz]
kernels = ["mine.py"]
budget = "10m"
workers = 3
device = "cpu"
regressions = "saved"
fail_fast = true
tolerance = { atol = 1e-2, rtol = 0.0 }

[tool.attnfuzz.profiles.quick]
budget = "30s"
fail_fast = false
"""


@pytest.fixture(autouse=True)
def _in_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PROFILE_VARIABLE, raising=False)
    Path("pyproject.toml").write_text(PROJECT)


def run(*arguments: str) -> dict[str, Any]:
    context = explore.make_context("explore", list(arguments))
    return context.params | {"profile": context.obj.profile}


def test_settings_are_the_defaults() -> None:
    """A project would have to repeat its settings in every command."""
    assert {
        "kernels": ("mine.py",),
        "budget_s": 600.0,
        "workers": 3,
        "device": "cpu",
        "save_folder": Path("saved"),
        "fail_fast": True,
        "tolerance": FixedTolerance(atol=0.01, rtol=0.0),
        "profile": None,
    }.items() <= run().items()


def test_the_command_line_wins() -> None:
    """What was asked for in so many words would not be done."""
    given = ["--budget", "5s", "--workers", "auto", "--device", "auto", "--save-dir", "x", "--no-fail-fast"]
    assert {
        "kernels": ("paged_*",),
        "budget_s": 5.0,
        "workers": None,
        "device": "auto",
        "save_folder": Path("x"),
        "fail_fast": False,
        "tolerance": "bound",
    }.items() <= run("paged_*", *given, "--tolerance", "bound").items()


def test_a_profile_changes_what_it_sets_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile that forgot the table would need to repeat it."""
    values = run("--profile", "quick")
    assert (values["budget_s"], values["fail_fast"], values["workers"], values["profile"]) == (30.0, False, 3, "quick")
    monkeypatch.setenv(PROFILE_VARIABLE, "quick")
    assert run("--budget", "7s")["budget_s"] == 7.0
    assert run()["budget_s"] == 30.0


def test_a_command_takes_only_what_it_names() -> None:
    """The kernels to search are not those to replay a case on."""
    context = replay.make_context("replay", [])
    assert (context.params["kernels"], context.params["device"]) == ((), "cpu")


def test_a_broken_project_is_refused_but_help_is_given() -> None:
    """Help is what one asks for when something is wrong."""
    Path("pyproject.toml").write_text("[tool.attnfuzz]\nbudget = 3\n")
    with pytest.raises(Refusal, match="budget = 3 must be a duration"):
        run()
    assert CliRunner().invoke(explore, ["--help"]).exit_code == 0


@pytest.mark.parametrize("text", ["tight", "1", "1,2,3", "-1,0", "nan,0", ""])
def test_a_tolerance_that_is_none_is_refused(text: str) -> None:
    """A NaN for a tolerance accepts nothing, or everything."""
    refused = CliRunner().invoke(explore, ["--tolerance", text])
    assert refused.exit_code == 2
    assert "two finite numbers >= 0 such as 1e-2,1e-2" in refused.output


def test_a_tolerance_is_read() -> None:
    """Findings would be held against another tolerance than the one asked for."""
    assert run("--tolerance", "1e-3, 0.5")["tolerance"] == FixedTolerance(atol=1e-3, rtol=0.5)


def test_every_setting_has_an_option() -> None:
    """A setting that its command has no option for would be ignored by it."""
    names = {"budget": "budget_s", "regressions": "save_folder", "on": "others"}
    of_replay = {"others"}
    assert {names.get(key, key) for key in RULES} - of_replay <= {parameter.name for parameter in explore.params}
    assert of_replay <= {parameter.name for parameter in replay.params}


@pytest.mark.night
def test_a_tolerance_reaches_the_kernel(tmp_path: Path) -> None:
    """The option would be accepted, and kernels judged by the derived bounds all the same."""
    command = [str(Path(sys.executable).with_name("attnfuzz"))]
    search = ["explore", "dense_eager", "--budget", "60s", "--workers", "1", "--fail-fast", "--tolerance", "0,0"]
    found = subprocess.run([*command, *search], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 1, found.stdout + found.stderr
    for tolerance, status in (("0,0", 1), ("bound", 0)):
        replay = [*command, "replay", "--tolerance", tolerance]
        run = subprocess.run(replay, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert run.returncode == status, run.stdout + run.stderr
