"""docs/: templates are valid, their commands exist, and every setting is described."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from attnfuzz.cli import command_called
from attnfuzz.config import RULES, read_settings
from tests.common.planted_in_ci import KERNEL, outside_of_a_ci

DOCS = Path(__file__).parents[2] / "docs"
ACTION = DOCS.parent / ".github" / "actions" / "attnfuzz" / "action.yml"
TEMPLATES = [*sorted((DOCS / "templates").iterdir()), ACTION]
PAGES = [DOCS / name for name in ("configuration.md", "cluster.md", "ci.md")]
ALL_PAGES = [*DOCS.parent.glob("*.md"), *DOCS.rglob("*.md")]
YAML = [path for path in TEMPLATES if path.suffix in (".yml", ".yaml")]
SCRIPTS = [path for path in TEMPLATES if path.suffix == ".sh"]


def documents(name: str) -> list[dict[Any, Any]]:
    (path,) = [template for template in TEMPLATES if template.name == name]
    text = path.read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


def script(name: str) -> str:
    return (DOCS / "templates" / name).read_text(encoding="utf-8")


def in_bash(text: str, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script as GitHub does, with the attnfuzz of this environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text, "script", *arguments]
        if "SLURM_SUBMIT_DIR" not in variables
        else ["bash", "-c", text, "script", *arguments],
        cwd=cwd,
        env=outside_of_a_ci() | {"PATH": path} | variables,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


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
        ("github-actions.yml", "doctor"),
        ("action.yml", "ci"),
        ("buildkite.yml", "doctor"),
        ("buildkite.yml", "merge"),
        ("gitlab-ci.yml", "ci"),
        ("kubernetes.yaml", "ci"),
        ("kubernetes.yaml", "merge"),
        ("slurm-array.sh", "ci"),
        ("slurm-merge.sh", "merge"),
        ("cluster.md", "merge"),
    }


@pytest.mark.parametrize(("name", "command", "arguments"), COMMANDS, ids=lambda value: str(value)[:40])
def test_commands_and_options_exist(name: str, command: str, arguments: list[str]) -> None:
    """Options are renamed, and templates are forgotten."""
    called = command_called(command)
    if isinstance(called, click.Group):
        called = called.commands[arguments[0]]
    parameters = [*called.params, *(command_called("explore").params if command == "ci" else ())]
    options = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    given = {argument.partition("=")[0] for argument in arguments if re.match(r"-{1,2}[a-z]", argument)}
    assert given - options == set()


def test_the_workflow_runs_what_it_promises() -> None:
    """A job that never starts, or passes whatever happens, protects nobody."""
    (workflow,) = documents("github-actions.yml")
    assert set(workflow[True]) == {"pull_request", "schedule", "workflow_dispatch"}  # YAML 1.1 reads "on" as true
    assert "continue-on-error" not in str(workflow)
    gpu, interpreter = workflow["jobs"]["gpu"], workflow["jobs"]["interpreter"]
    assert "gpu" in gpu["runs-on"]
    assert interpreter["runs-on"] == "ubuntu-latest"
    place = ACTION.parent.relative_to(DOCS.parent)
    (action,) = documents("action.yml")
    for job in (gpu, interpreter):
        (step,) = [step for step in job["steps"] if "OWNER" in step.get("uses", "")]
        assert step["uses"] == f"OWNER/attnfuzz/{place}@main"
        assert set(step["with"]) <= set(action["inputs"])
        assert any("pip install --editable ." in step.get("run", "") for step in job["steps"])  # kernels import it


def steps_of(name: str) -> list[str]:
    """The shell commands of each job of a template that installs something."""
    (template,) = documents(name)
    jobs = template.get("steps") or template.get("jobs", template).values()
    parts = [job.get("command") or job.get("script") or [step.get("run", "") for step in job["steps"]] for job in jobs]
    return [part if isinstance(part, str) else "\n".join(part) for part in parts]


@pytest.mark.parametrize("name", ["buildkite.yml", "gitlab-ci.yml", "github-actions.yml"])
def test_templates_install_attnfuzz_before_they_call_it(name: str, tmp_path: Path) -> None:
    """In a project that is not attnfuzz the first line of the job would be "command not found"."""
    (tmp_path / "bin").mkdir()
    installer = "#!/bin/bash\necho installed $@ >> told\n"
    attnfuzz = "#!/bin/bash\n[[ $(cat told) == *attnfuzz* ]] || exit 127\necho called >> told\n"
    for program, text in (("python3", installer), ("attnfuzz", attnfuzz), ("buildkite-agent", "#!/bin/bash\n")):
        (tmp_path / "bin" / program).write_text(text)
        (tmp_path / "bin" / program).chmod(0o755)
    (tmp_path / ".venv").symlink_to(tmp_path)  # what `python3 -m venv .venv` would make
    (tmp_path / "bin" / "python").symlink_to(tmp_path / "bin" / "python3")
    (tmp_path / "bin" / "activate").touch()
    called = 0
    for script_of_job in steps_of(name):
        (tmp_path / "told").write_text("")
        text = re.sub(r"\$\{\{.*?\}\}", "", script_of_job).replace("$$", "$")
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        environment = {"PATH": path, "BUILDKITE_SOURCE": "", "GITHUB_PATH": str(tmp_path / "path")}
        command = ["bash", "-eu", "-c", f"ATTNFUZZ_NIGHT=; {text}"]
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        if "venv" in text or "pip install --editable" in text:
            assert run.returncode == 0, run.stderr
            called += (tmp_path / "told").read_text().count("called")
    assert called >= 1


@pytest.mark.night
def test_the_action_finds_a_planted_bug_without_a_gpu(tmp_path: Path) -> None:
    """Whoever tries it on a hosted runner would see it pass, whatever the kernel does."""
    (tmp_path / "mine.py").write_text(KERNEL)
    (action,) = documents("action.yml")
    (search,) = [step for step in action["runs"]["steps"] if step.get("name") == "Search"]
    values = {
        "KERNELS": "mine.py",
        "ARGUMENTS": "--device cpu --workers 1 --fail-fast --quiet",
        "OUTPUT": action["inputs"]["output"]["default"],
    }
    assert set(search["env"]) == set(values)
    run = in_bash(search["run"], cwd=tmp_path, GITHUB_ACTIONS="true", **values)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "::error file=mine.py,line=7,title=mine%3A accuracy/out%3Avalue" in run.stdout
    assert len(list((tmp_path / "attnfuzz-ci" / "findings").glob("*.json"))) == 1


@pytest.mark.night
def test_a_slurm_array_finds_a_planted_bug_and_its_findings_are_merged(tmp_path: Path) -> None:
    """Tasks that write into one folder, or a merging job that looks in another one, lose a night on a cluster."""
    (tmp_path / "mine.py").write_text(KERNEL)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text('PATH="$PWD:$PATH"\n')
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nexec "$@" mine.py --device cpu --workers 1 --budget 60s --fail-fast --quiet\n')
    srun.chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_ARRAY_JOB_ID": "7", "USER": "me"}
    numbers = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_ARRAY_TASK_MIN": "0"}
    run = in_bash(script("slurm-array.sh"), cwd=tmp_path, **slurm, **numbers)
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(list((tmp_path / "runs" / "7" / "shard-4" / "findings").glob("*.json"))) == 1
    run = in_bash(script("slurm-merge.sh"), "7", cwd=tmp_path, **slurm)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "1 bug in regressions; 1 fails" in run.stdout
    run = in_bash(script("slurm-merge.sh"), "8", cwd=tmp_path, **slurm)
    assert (run.returncode, run.stdout) == (0, "nothing was found by job 8\n")


def test_the_kubernetes_job_numbers_its_machines() -> None:
    """Eight machines with one seed search the same cases eight times, in one folder."""
    jobs = {document["metadata"]["name"]: document for document in documents("kubernetes.yaml")}
    spec = jobs["attnfuzz"]["spec"]
    container = spec["template"]["spec"]["containers"][0]
    assert spec["completionMode"] == "Indexed"  # sets JOB_COMPLETION_INDEX, which says which shard it is
    assert "--output=/out" in container["command"]
    assert container["volumeMounts"][0]["mountPath"] == "/out"


def test_pipelines_are_sharded_by_what_attnfuzz_reads() -> None:
    """The jobs of a pipeline would all search the same."""
    (buildkite,) = documents("buildkite.yml")
    search, merge = buildkite["steps"]
    assert search["parallelism"] > 1
    assert merge["depends_on"] == [{"step": search["key"], "allow_failure": True}]
    (gitlab,) = documents("gitlab-ci.yml")
    assert gitlab["kernels"]["parallel"] > 1
    assert gitlab["kernels"]["artifacts"]["when"] == "always"


def test_what_was_compiled_outlives_the_job() -> None:
    """Each pull request would be searched for half of its minutes with compilers, those with findings above all."""
    (gitlab,) = documents("gitlab-ci.yml")
    kernels = gitlab["kernels"]
    kept = [f"$CI_PROJECT_DIR/{path}" for path in kernels["cache"]["paths"]]
    assert kernels["variables"]["TRITON_CACHE_DIR"] in kept
    assert kernels["cache"]["when"] == "always"
    (github,) = documents("github-actions.yml")
    assert github["jobs"]["gpu"]["env"]["TRITON_CACHE_DIR"].startswith(
        "${{ github.workspace }}/../"
    )  # the checkout ends
    (buildkite,) = documents("buildkite.yml")
    assert buildkite["steps"][0]["env"]["TRITON_CACHE_DIR"].startswith("/var/tmp/")  # of the agent's machine
    jobs = {document["metadata"]["name"]: document for document in documents("kubernetes.yaml")}
    pod = jobs["attnfuzz"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    (folder,) = [one["value"] for one in container["env"] if one["name"] == "TRITON_CACHE_DIR"]
    (volume,) = [one["name"] for one in container["volumeMounts"] if one["mountPath"] == folder]
    assert [one["name"] for one in pod["volumes"] if "hostPath" in one] == [volume]


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
