"""docs/: templates are valid, their commands exist, and every setting is described."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from attnfuzz.cli import command_called
from attnfuzz.config import RULES, read_settings

DOCS = Path(__file__).parents[2] / "docs"
TEMPLATES = sorted((DOCS / "templates").iterdir())
PAGES = [DOCS / name for name in ("configuration.md", "cluster.md", "ci.md")]
ALL_PAGES = [*DOCS.parent.glob("*.md"), *DOCS.rglob("*.md")]
YAML = [path for path in TEMPLATES if path.suffix in (".yml", ".yaml")]
SCRIPTS = [path for path in TEMPLATES if path.suffix == ".sh"]


def documents(name: str) -> list[dict[Any, Any]]:
    text = (DOCS / "templates" / name).read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


def strings(value: object) -> Iterator[str]:
    """Every text in a YAML document; a command that is a list is one text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and value and value[0] == "attnfuzz":
        yield shlex.join(value)
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)


def texts() -> Iterator[tuple[str, str]]:
    for path in YAML:
        for document in documents(path.name):
            yield from ((path.name, text) for text in strings(document))
    for path in SCRIPTS:
        yield path.name, path.read_text(encoding="utf-8")
    for path in ALL_PAGES:
        yield (
            path.name,
            "\n".join(re.findall(r"```(?:sh|console)\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)),
        )


def commands() -> Iterator[tuple[str, str, list[str]]]:
    """File, command and arguments of every attnfuzz command line."""
    for name, text in texts():
        for match in re.finditer(
            r"^\s*(?:srun |run: |xargs -0 -r |\$ )?attnfuzz (\w+)((?:[^\n|<\\]|\\\n)*)", text, re.M
        ):
            yield name, match[1], shlex.split(match[2].replace("\\\n", " "), comments=True)


COMMANDS = list(commands())


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_yaml_is_valid(path: Path) -> None:
    """A template that does not parse is worse than none."""
    for document in documents(path.name):
        assert isinstance(document, dict)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid(path: Path) -> None:
    """A typo would be found in the queue, an hour later."""
    run = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False, timeout=30)
    assert (run.returncode, run.stderr) == (0, "")


def test_the_templates_have_the_commands_that_they_are_for() -> None:
    """The test below would pass if it found no command."""
    found = {(name, command) for name, command, _ in COMMANDS}
    assert found >= {
        ("github-actions.yml", "explore"),
        ("github-actions.yml", "doctor"),
        ("kubernetes.yaml", "explore"),
        ("kubernetes.yaml", "merge"),
        ("slurm-array.sh", "explore"),
        ("slurm-merge.sh", "merge"),
        ("cluster.md", "merge"),
    }


@pytest.mark.parametrize(("name", "command", "arguments"), COMMANDS, ids=lambda value: str(value)[:40])
def test_commands_and_options_exist(name: str, command: str, arguments: list[str]) -> None:
    """Options are renamed, and templates are forgotten."""
    called = command_called(command)
    if isinstance(called, click.Group):
        called = called.commands[arguments[0]]
    options = {option for parameter in called.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = {argument.partition("=")[0] for argument in arguments if re.match(r"-{1,2}[a-z]", argument)}
    assert given - options == set()


def test_the_workflow_runs_what_it_promises() -> None:
    """A GPU job that never starts, or passes whatever happens, protects nobody."""
    (workflow,) = documents("github-actions.yml")
    assert set(workflow[True]) == {"pull_request", "schedule", "workflow_dispatch"}  # YAML 1.1 reads "on" as true
    job = workflow["jobs"]["gpu"]
    assert "gpu" in job["runs-on"]
    assert "continue-on-error" not in str(workflow)
    runs = [step.get("run", "") for step in job["steps"]]
    search = next(run for run in runs if "attnfuzz explore" in run)
    assert "pipefail" not in search  # which GitHub sets for "shell: bash" only
    assert job["defaults"]["run"]["shell"] == "bash"


def test_the_kubernetes_job_gives_each_machine_its_own_seed_and_folder() -> None:
    """Eight machines with one seed search the same cases eight times."""
    jobs = {document["metadata"]["name"]: document for document in documents("kubernetes.yaml")}
    spec = jobs["attnfuzz"]["spec"]
    container = spec["template"]["spec"]["containers"][0]
    assert spec["completionMode"] == "Indexed"
    assert "--seed=$(INDEX)" in container["command"]
    assert container["volumeMounts"][0]["subPathExpr"] == "$(INDEX)"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_settings_on_a_page_are_valid(path: Path, tmp_path: Path) -> None:
    """Pasted into a project, an example must not be refused."""
    for example in re.findall(r"```toml\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        (tmp_path / "pyproject.toml").write_text(example)
        assert read_settings(tmp_path / "pyproject.toml").kernels


def test_every_setting_is_described() -> None:
    """A setting that nobody can read of is not used."""
    described = re.findall(r"^\| `(\w+)` \|", (DOCS / "configuration.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert described == [*RULES, "profile"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """A template that moved could not be found."""
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []
