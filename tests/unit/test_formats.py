"""Files of versions before this one, and what docs/versions.md promises of each format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from attnfuzz.corpus import decode_regression, encode_regression

ROOT = Path(__file__).parents[2]
WRITTEN_BEFORE = sorted((Path(__file__).parent / "formats").glob("regression-*.json"))
"""As written by the attnfuzz of the day in the name. Files are added when the format grows, and never changed."""


def lost(before: Any, after: Any, place: str = "$") -> list[str]:
    """Where ``after`` does not say what ``before`` says."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [one for key in before for one in lost(before[key], after.get(key), f"{place}.{key}")]
    return [] if before == after else [place]


@pytest.mark.parametrize("path", WRITTEN_BEFORE, ids=lambda path: path.stem)
def test_what_older_versions_wrote_is_read(path: Path) -> None:
    """A saved case that cannot be read, or has lost a part, protects nobody any more."""
    data = path.read_bytes()
    read = decode_regression(data, path.name)
    written = encode_regression(read)
    assert lost(json.loads(data), json.loads(written)) == []
    assert decode_regression(written, path.name) == read


def test_files_of_the_past_say_all_that_a_regression_can() -> None:
    """A field that none of them has could be renamed unnoticed."""
    documents = [json.loads(path.read_bytes()) for path in WRITTEN_BEFORE]
    said = {key for document in documents for key in document}
    assert said >= {"preceding", "assumed", "assumed_numerics", "fields", "finding", "status", "note", "environment"}
    said = {key for document in documents for key in document["finding"]}
    assert said >= {"failed", "runs", "tensor", "cause", "maybe", "blame", "also", "remedy"}


def test_every_format_has_its_promise() -> None:
    """Whoever keeps a file could not know for how long."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "attnfuzz").rglob("*.py")))
    named = set(re.findall(r"attnfuzz\.[a-z-]+/\d+", source)) | {"attnfuzz.regression/1"}
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    promised = re.findall(r"`(attnfuzz\.[a-z-]+/\d+)`", page)
    assert sorted(promised) == sorted(named)
