"""What is built for others to install, and the commands of docs/installing.md that install it."""

from __future__ import annotations

import hashlib
import os
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
    "attnfuzz", *FOLDERS, "regressions", "tests", "docs", ".ci", "constraints.txt", "pyproject.toml",
    *(path.name for path in [*ROOT.glob("*.md"), ROOT / "LICENSE", ROOT / "Makefile", ROOT / ".gitignore"]),
)  # fmt: skip


def tree(folder: Path) -> Path:
    """A copy of what archives are built from, as from a clone."""
    folder.mkdir()
    for name in BUILT_FROM:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    return folder


def elsewhere(folder: Path) -> Path:
    """The same as it lies where there are no links: git writes where they lead into a file. Another umask and day."""
    tree(folder)
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
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist."""
    folder = tmp_path_factory.mktemp("built")
    return build(tree(folder / "tree"), folder / "dist", "sdist", "wheel")


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files(folder: Path) -> set[str]:
    """Those that belong to the package; links to folders are not followed."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in found}


def test_archives_are_the_same_wherever_they_are_built(archives: Path, tmp_path: Path) -> None:
    """Nobody could tell a wheel that was tampered with from one that another machine has built."""
    other = build(elsewhere(tmp_path / "tree"), tmp_path / "dist", "sdist", "wheel")
    for pattern in ("*.whl", "*.tar.gz"):
        assert digest(only(archives, pattern)) == digest(only(other, pattern))
    with tarfile.open(only(archives, "*.tar.gz")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    again = build(only(tmp_path / "unpacked", "*"), tmp_path / "again", "wheel")
    assert digest(only(again, "*.whl")) == digest(only(archives, "*.whl"))


def test_archives_hold_the_package_and_folders_in_place_of_links(archives: Path) -> None:
    """An installed attnfuzz would have no kernels, strategies or templates, or would need a compiler."""
    package = {f"attnfuzz/{path}" for path in files(ROOT / "attnfuzz")}
    package |= {f"attnfuzz/{name}/{path}" for name in FOLDERS for path in files(ROOT / name)}
    assert {"attnfuzz/kernels/paged/launch.py", "attnfuzz/kernels/equivalent_mutants.toml"} <= package
    assert {"attnfuzz/py.typed", "attnfuzz/report/templates/campaign.html.jinja"} <= package
    wheel = only(archives, "*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == package
    with tarfile.open(only(archives, "*.tar.gz")) as archive:
        assert all(member.isfile() for member in archive)
        assert package <= {member.name.partition("/")[2] for member in archive}


def test_a_tree_without_links_is_not_installed_editable(tmp_path: Path) -> None:
    """It would install, and then find no kernels."""
    command = [sys.executable, "-c", "import backend; backend.build_editable('.')"]
    environment = {**os.environ, "PYTHONPATH": ".ci"}
    run = subprocess.run(
        command, cwd=elsewhere(tmp_path / "tree"), env=environment, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert run.returncode != 0
    assert run.stderr.startswith("attnfuzz/kernels must be a link to ../kernels, and links are what this file system")
