"""What the project says of itself, in several files, is one thing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import attnfuzz

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


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
