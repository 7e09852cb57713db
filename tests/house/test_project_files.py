"""Versions, pinned packages and forms of this repository."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import attnfuzz

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def test_versions_and_names_agree() -> None:
    """A release would call itself by the version before, or be cited as it."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changes = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert PROJECT["version"] == attnfuzz.__version__ == citation["version"] == changes[0]
    assert PROJECT["license"] == citation["license"]
    assert PROJECT["authors"] == citation["authors"]
    assert PROJECT["keywords"] == citation["keywords"]
    assert citation["title"] == f"attnfuzz: {PROJECT['description']}"


def test_pythons_are_named_from_the_oldest_on() -> None:
    """pip would refuse a version that is said to work, or install on one that is not."""
    named = [match[1] for one in PROJECT["classifiers"] if (match := re.fullmatch(r"Programming .* :: (3\.\d+)", one))]
    oldest = int(named[0].partition(".")[2])
    assert named == [f"3.{minor}" for minor in range(oldest, oldest + len(named))]
    assert PROJECT["requires-python"] == f">={named[0]}"
    said = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
    assert f"Python {named[0]} to {named[-1]}" in said


def test_a_bug_report_asks_for_a_saved_case() -> None:
    """GitHub drops a form that is not valid without a word, and reports would come without what repeats them."""
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(form)
    fields = {field["id"]: field for field in form["body"] if field["type"] != "markdown"}
    assert all(field["attributes"]["label"] for field in fields.values())
    assert fields["case"]["validations"]["required"]
    assert fields["case"]["attributes"]["render"] == "json"


OF_TORCH = ("nvidia-", "cuda-", "pytorch-triton", "triton-")
"""What builds of torch for a GPU bring, in versions that they ask for themselves."""


def pinned() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def needed(requirements: list[str], extras: frozenset[str] = frozenset()) -> Iterator[Requirement]:
    """Those that hold for this Python and these ``extras`` of whoever has them."""
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield requirement


def reached() -> set[str]:
    """All packages that the project and its extras lead to, as far as they are installed."""
    own = [*PYPROJECT["build-system"]["requires"], *PROJECT["dependencies"]]
    own += [one for extra in PROJECT["optional-dependencies"].values() for one in extra]
    queue = [(canonicalize_name(one.name), frozenset(one.extras)) for one in needed(own) if one.name != "attnfuzz"]
    found: set[str] = set()
    while queue:
        name, extras = queue.pop()
        if name in found:
            continue
        found.add(name)
        try:
            further = requires(name) or []
        except PackageNotFoundError:  # of an extra that this environment does without
            continue
        queue += [(canonicalize_name(one.name), frozenset(one.extras)) for one in needed(further, extras)]
    return found


def test_every_package_is_pinned() -> None:
    """A new version of something that something else needs would break a clone that nobody touched."""
    names = {canonicalize_name(one.name) for one in pinned()}
    assert {name for name in reached() - names if not name.startswith(OF_TORCH)} == set()
    assert all([specifier.operator for specifier in one.specifier] == ["=="] for one in pinned())


def test_what_is_pinned_accepts_every_python_that_attnfuzz_does() -> None:
    """With one that refuses the user's, pip searches older versions of everything else for half an hour or more."""
    oldest = Version(next(iter(SpecifierSet(PROJECT["requires-python"]))).version)
    refusing = set()
    for name in map(canonicalize_name, (one.name for one in pinned())):
        try:
            wanted = metadata(name).json.get("requires_python")
        except PackageNotFoundError:  # as above
            continue
        if wanted and not SpecifierSet(str(wanted)).contains(oldest):
            refusing.add(f"{name} needs Python {wanted}")
    assert refusing == set()


def test_torch_brings_its_own_triton() -> None:
    """A direct requirement would put PyPI's triton over the files of the one that ROCm's torch has brought."""
    assert "triton" not in {Requirement(one).name for one in PROJECT["dependencies"]}
    assert [Requirement(one).name for one in PROJECT["optional-dependencies"]["interpreter"]] == ["triton"]


def test_each_triton_that_is_permitted_is_tried() -> None:
    """A release of Triton that breaks every kernel on a CPU would be noticed by users first."""
    (tried,) = re.findall(r"^TRITON \?= (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    oldest, *_, newest = tried.split()
    permitted = next(needed(PROJECT["optional-dependencies"]["interpreter"]))
    assert str(permitted.specifier) == f">={'.'.join(oldest.split('.')[:2])}"
    assert next(str(one.specifier) for one in pinned() if one.name == "triton").removeprefix("==") in tried.split()
    jobs = yaml.safe_load((ROOT / ".github/workflows/triton.yml").read_text(encoding="utf-8"))["jobs"]
    assert jobs["versions"]["strategy"]["matrix"]["triton"] == [*tried.split(), "newest-torch"]
    assert newest == "newest"
