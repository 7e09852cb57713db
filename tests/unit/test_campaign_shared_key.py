"""attnfuzz.campaign.shared_key: machines share what they know of the very same kernel, and of no other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attnfuzz.campaign.shared_key import shared_key
from attnfuzz.declaration import Declaration


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    Path("mine.py").write_text("one")
    (tmp_path / "package").mkdir()
    Path("package/module.py").write_text("one")


def key(target: str, **declared: object) -> bytes:
    return shared_key(Declaration(name="mine", problem="dense_decode", target=target, **declared))  # type: ignore[arg-type]  # fields of any type


def test_equal_kernels_have_equal_keys() -> None:
    """Machines would not hear of each other."""
    assert key("mine.py:mine") == key("mine.py:mine")
    assert key("mine.py:mine").startswith(b"mine.py:mine@")


@pytest.mark.parametrize(
    ("target", "file"), [("mine.py:mine", "mine.py"), ("package.module:mine", "package/module.py")]
)
def test_repaired_code_has_another_key(target: str, file: str) -> None:
    """What was known of yesterday's code would hide the bugs of today's."""
    before = key(target)
    Path(file).write_text("two")
    assert key(target) != before


def test_another_declaration_has_another_key() -> None:
    """A kernel that promises more has bugs that it did not have before."""
    assert key("mine.py:mine", options={"tile": (16,)}) != key("mine.py:mine")


def test_a_bundled_kernel_and_one_that_cannot_be_found_have_keys() -> None:
    """A target whose file is out of sight must not end the campaign."""
    assert key("paged_naive") != key("paged_eager")
    assert key("nowhere.module:mine") == key("nowhere.module:mine")
