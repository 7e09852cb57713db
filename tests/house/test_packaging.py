"""What is built for others to install, and the commands of docs/installing.md that install it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("kernels", "strategies")
BUILT_FROM = (
    "attnfuzz", *FOLDERS, "regressions", "tests", "docs", ".ci", ".github", "constraints.txt", "pyproject.toml",
    "LICENSE", "Makefile", ".gitignore", "CITATION.cff", *(path.name for path in ROOT.glob("*.md")),
)  # fmt: skip


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what archives are built from, in which no other test leaves anything."""
    folder = tmp_path_factory.mktemp("clone")
    for name in BUILT_FROM:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    return folder


@pytest.fixture
def elsewhere(clone: Path, tmp_path: Path) -> Path:
    """The same as it lies where there are no links: git writes where they lead into a file. Another umask and day."""
    folder = shutil.copytree(clone, tmp_path / "elsewhere", symlinks=True)
    for name in FOLDERS:
        (folder / "attnfuzz" / name).unlink()
        (folder / "attnfuzz" / name).write_text(f"../{name}")
    (folder / "kernels" / "__pycache__").mkdir()
    (folder / "kernels" / "__pycache__" / "bundled.cpython-311.pyc").write_bytes(b"left over")
    for path in folder.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
        os.utime(path, (1_600_000_000, 1_600_000_000))
    return folder


def build(source: Path, into: Path, *targets: str) -> Path:
    """``into``, with the archives of ``source``."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(into)]
    for target in targets:
        command += ["--target", target]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    return into


@pytest.fixture(scope="module")
def archives(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist."""
    return build(clone, tmp_path_factory.mktemp("dist"), "sdist", "wheel")


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files(folder: Path) -> set[str]:
    """Those that belong to the package; links to folders are not followed."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in found}


def test_archives_are_the_same_wherever_they_are_built(archives: Path, elsewhere: Path, tmp_path: Path) -> None:
    """Nobody could tell a wheel that was tampered with from one that another machine has built."""
    other = build(elsewhere, tmp_path / "dist", "sdist", "wheel")
    for pattern in ("*.whl", "*.tar.gz"):
        assert digest(only(archives, pattern)) == digest(only(other, pattern))
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "-xzf", only(archives, "*.tar.gz"), "-C", unpacked], check=True)
    again = build(only(unpacked, "*"), tmp_path / "again", "wheel")
    assert digest(only(again, "*.whl")) == digest(only(archives, "*.whl"))


def test_archives_hold_the_package_and_folders_in_place_of_links(clone: Path, archives: Path) -> None:
    """An installed attnfuzz would have no kernels, strategies or templates, or would need a compiler."""
    package = {f"attnfuzz/{path}" for path in files(clone / "attnfuzz")}
    package |= {f"attnfuzz/{name}/{path}" for name in FOLDERS for path in files(clone / name)}
    assert {"attnfuzz/kernels/paged/launch.py", "attnfuzz/kernels/equivalent_mutants.toml"} <= package
    assert {"attnfuzz/py.typed", "attnfuzz/report/templates/campaign.html.jinja"} <= package
    wheel = only(archives, "*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == package
    with tarfile.open(only(archives, "*.tar.gz")) as archive:
        assert all(member.isfile() for member in archive)
        named = {member.name.partition("/")[2] for member in archive}
        assert package | {path.name for path in clone.glob("*.md")} <= named


def test_a_tree_without_links_is_not_installed_editable(elsewhere: Path) -> None:
    """It would install, and then find no kernels."""
    command = [sys.executable, "-c", "import backend; backend.build_editable('.')"]
    environment = {**os.environ, "PYTHONPATH": ".ci"}
    run = subprocess.run(
        command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert run.returncode != 0
    assert run.stderr.startswith("attnfuzz/kernels must be a link to ../kernels, and links are what this file system")


def commands(section: str) -> list[str]:
    """The shell blocks of a section of docs/installing.md, in order."""
    text = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"```sh\n(.*?)```", body, re.DOTALL)


class Machine:
    """An environment beside those of the tests, which has their packages but for attnfuzz, and no network."""

    def __init__(self, folder: Path, clone: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
        others = folder / "packages"
        others.mkdir()
        for path in (path for one in reversed(sys.path) if one.endswith("-packages") for path in Path(one).iterdir()):
            if "attnfuzz" not in path.name and path.suffix != ".pth":
                (others / path.name).unlink(missing_ok=True)
                (others / path.name).symlink_to(path)
        self.packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        (self.packages / "others.pth").write_text(str(others))
        self.clone = clone
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        paths = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self.environment.update(PATH=paths, PIP_NO_INDEX="1", PIP_DISABLE_PIP_VERSION_CHECK="1")

    def run(self, script: str, folder: Path | None = None) -> str:
        """What ``script`` prints, which must succeed. Packages are built with what is installed."""
        script = script.replace("pip wheel ", "pip wheel --no-build-isolation ")
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=folder or self.clone, env=self.environment,
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout


@pytest.mark.night
def test_it_is_installed_beside_an_engine_and_searches(clone: Path, tmp_path: Path) -> None:
    """The first five minutes of everybody who has an engine would end in an error, or with another torch."""
    machine = Machine(tmp_path / "engine", shutil.copytree(clone, tmp_path / "clone", symlinks=True))
    where = "import torch, triton, numpy; print(*(one.__file__ for one in (torch, triton, numpy)))"
    before = machine.run(f'python -c "{where}"', tmp_path)
    (block,) = commands("Beside an engine, whose torch and Triton stay")
    assert "ok      torch" in machine.run(block)
    assert machine.run(f'python -c "{where}"', tmp_path) == before
    assert {line.split("==")[0] for line in (tmp_path / "clone/kept.txt").read_text().split()} == {
        "torch", "triton", "numpy",
    }  # fmt: skip
    found = machine.run('python -c "import attnfuzz; print(attnfuzz.__file__)"', tmp_path)
    assert Path(found.strip()).is_relative_to(tmp_path / "engine")
    assert "paged_split_k" in machine.run("attnfuzz list", tmp_path)
    machine.run("attnfuzz explore dense_eager --budget 4s --workers 1 --seed 0 --json summary.json", tmp_path)
    (kernel,) = json.loads((tmp_path / "summary.json").read_text())["kernels"]
    assert kernel["cases"] >= 2


@pytest.mark.night
def test_an_engine_whose_torch_is_too_old_keeps_it(clone: Path, tmp_path: Path) -> None:
    """pip would put another torch in place of the one that the engine was built for, and the engine would not start."""
    machine = Machine(tmp_path / "engine", shutil.copytree(clone, tmp_path / "clone", symlinks=True))
    (machine.packages / "torch-2.9.0.dist-info").mkdir()
    (machine.packages / "torch-2.9.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n"
    )
    (block,) = commands("Beside an engine, whose torch and Triton stay")
    with pytest.raises(AssertionError, match=r"depends on torch>=2\.11"):
        machine.run(block)


def test_sums_are_those_of_the_archives(clone: Path, archives: Path, tmp_path: Path) -> None:
    """Who checks a release would compare other files."""
    (block,) = commands("The same archive on every machine")
    block = block.replace("python ", f"{sys.executable} ").replace("dist", str(tmp_path))
    command = ["bash", "-euo", "pipefail", "-c", block]
    told = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True, timeout=120).stdout
    for pattern in ("*.whl", "*.tar.gz"):
        assert f"{digest(only(archives, pattern))}  {tmp_path / only(archives, pattern).name}" in told


@pytest.mark.night
def test_it_is_installed_without_network_or_runs_from_a_clone(clone: Path, tmp_path: Path) -> None:
    """On a machine that reaches no index, nothing of what is written would help."""
    machine = Machine(tmp_path / "venv", shutil.copytree(clone, tmp_path / "clone", symlinks=True))
    fetched, installed, uninstalled = commands("Without network")
    assert "paged_split_k" in machine.run(uninstalled)
    machine.environment["PIP_NO_DEPS"] = "1"  # of the dependencies there are no wheels here, and no need
    machine.run(fetched)
    del machine.environment["PIP_NO_DEPS"]
    machine.run(installed)
    assert "paged_split_k" in machine.run("attnfuzz list", tmp_path)


def test_the_container_is_built_from_what_there_is() -> None:
    """No container is built here: this holds the syntax, the constraint and the name of the wheel."""
    text = (ROOT / "docs/templates/Containerfile").read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line.partition(" ")[::2] for line in text.splitlines() if line and not line.startswith("#")]
    assert [instruction for instruction, _ in lines] == ["ARG", "FROM", "COPY", "RUN", "WORKDIR", "ENTRYPOINT"]
    said = dict(lines)
    assert said["ARG"].startswith("BASE=")
    assert said["FROM"] == "${BASE}"
    assert json.loads(said["ENTRYPOINT"]) == ["attnfuzz"]
    subprocess.run(["bash", "-n", "-c", said["RUN"]], check=True, timeout=30)
    (beside,) = commands("Beside an engine, whose torch and Triton stay")
    kept = next(line for line in beside.splitlines() if "grep" in line).removeprefix("python -m ")
    assert kept.replace("kept.txt", "/opt/attnfuzz/kept.txt") in said["RUN"]
    assert "--constraint /opt/attnfuzz/kept.txt /opt/attnfuzz/attnfuzz-*.whl" in said["RUN"]
    build, run = commands("In a container")[0].splitlines()
    assert "--file docs/templates/Containerfile" in build
    assert build.endswith("--tag attnfuzz dist")
    assert " attnfuzz explore " in run
