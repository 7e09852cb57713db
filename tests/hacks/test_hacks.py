"""Known ways to look right without being it: ``attnfuzz verify`` fails each, and passes what they are made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hacks.verified import HACKS, HONEST, Hack, verified
from tests.plain.pairs import PAIRS, Pair


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


@pytest.mark.night
@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[3]], ids=lambda pair: pair.correct)
def test_right_kernels_as_people_write_them_pass(pair: Pair, tmp_path: Path) -> None:
    """Kernels that rest on what they never say, as most do, would fail beside those that cheat."""
    target = f"{pair.file}:{pair.correct}"
    status, told = verified(target, tmp_path, "--device", "cpu", "--seed", "1", "--budget", "10s")
    assert (status, told["verdict"]) == (0, "pass"), told
