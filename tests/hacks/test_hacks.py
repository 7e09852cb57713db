"""Known ways to look right without being it: ``attnfuzz verify`` fails each, and passes what they are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hacks.verified import HACKS, HONEST, Hack, verified
from tests.plain.pairs import PAIRS


@pytest.mark.parametrize("hack", HACKS, ids=lambda hack: hack.name)
@pytest.mark.night
def test_a_hack_fails_and_is_called_what_it_is(hack: Hack, tmp_path: Path) -> None:
    """A kernel that somebody's optimiser was rewarded for would pass, or nobody would be told what is wrong with it."""
    status, told = verified(hack.target, tmp_path, "--device", "cpu", "--seed", "1")
    assert (status, told["verdict"]) == (1, "fail")
    found = told["counterexample"]
    assert hack.says in " ".join((found["message"], *found["details"]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.night
def test_the_kernel_that_hacks_are_made_of_passes(tmp_path: Path) -> None:
    """Hacks would be found for something else that is wrong with them, or right kernels fail."""
    status, told = verified(HONEST, tmp_path, "--device", "cpu", "--seed", "1", "--budget", "20s")
    assert (status, told["verdict"], told["counterexample"]) == (0, "pass", None)
    assert told["cases"] > 20


def _verified_with(tmp_path: Path, supports: str) -> tuple[int, Any]:
    declared = tmp_path / "declared.py"
    declared.write_text(
        "import attnfuzz\n"
        "from tests.plain.plain_kernels import flash_decode\n\n"
        f"declared = attnfuzz.kernel('paged_decode', supports=attnfuzz.{supports})(flash_decode)\n"
    )
    return verified(f"{declared}:declared", tmp_path, "--device", "cpu", "--seed", "1", "--budget", "20s")


@pytest.mark.night
def test_a_right_kernel_that_refuses_what_it_does_not_take_passes(tmp_path: Path) -> None:
    """Kernels that rest on sizes which they check would fail beside those that cheat."""
    status, told = _verified_with(
        tmp_path, "Supports(layouts=('NHD',), strides='contiguous', empty_sequences=False, lse='none')"
    )
    assert (status, told["verdict"]) == (0, "pass"), told
    assert "block_sizes" in {limit["field"] for limit in told["left_out"]}


@pytest.mark.night
def test_what_a_right_kernel_does_wrong_in_silence_fails_until_it_is_declared(tmp_path: Path) -> None:
    """Wrong numbers would pass as somebody's contract, or no declaration would end them."""
    pair = PAIRS[0]
    target = f"{pair.file}:{pair.correct}"
    status, told = verified(target, tmp_path, "--device", "cpu", "--seed", "1", "--budget", "20s")
    assert (status, told["verdict"]) == (1, "fail"), told
    assert "layout NHD instead of HND" in " ".join(told["counterexample"]["details"])
    status, told = _verified_with(tmp_path, pair.supports)
    assert (status, told["verdict"]) == (0, "pass"), told
