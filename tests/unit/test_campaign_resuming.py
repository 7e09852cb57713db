"""attnfuzz.campaign.request: the next part is asked for what the last one was, unless it is given anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from attnfuzz.campaign.request import CampaignRequest, asked_of, resumed
from attnfuzz.campaign.saved.state import CampaignState, StateError
from attnfuzz.isolation.pythons import Python

FIRST = CampaignRequest(
    kernels=("a", "b"), started=0.0, budget_s=60.0, save_folder=Path("mine"), workers=3, device="cpu", seed=7,
    oracles=("accuracy",), fail_fast=True,
)  # fmt: skip
DEFAULTS = CampaignRequest(kernels=("*",), started=100.0, budget_s=60.0, save_folder=Path("regressions"))
STATE = CampaignState(
    asked=asked_of(FIRST), seed=7, elapsed_s=45.0, parts=1, kernels=(), interval_s=1.0, throughput={}
)  # fmt: skip


def test_without_anything_given_all_is_as_it_was() -> None:
    """Whoever types --resume wants the same search, not another with the same findings."""
    request = resumed(DEFAULTS, STATE, given=())
    assert (request.kernels, request.save_folder, request.workers) == (("a", "b"), Path("mine"), 3)
    assert (request.device, request.oracles, request.fail_fast) == ("cpu", ("accuracy",), True)
    assert (request.started, request.budget_s, request.seed) == (100.0, 15.0, 7)
    assert request.resume is STATE


def test_what_is_given_counts() -> None:
    """More time, or fewer workers, would be ignored without a word."""
    request = resumed(DEFAULTS, STATE, given={"budget_s", "workers", "save_folder"})
    assert (request.budget_s, request.workers, request.save_folder) == (60.0, None, Path("regressions"))
    assert request.kernels == ("a", "b")


def test_a_budget_that_is_spent_needs_more() -> None:
    """The campaign would end before it begins."""
    spent = msgspec.structs.replace(STATE, elapsed_s=61.0)
    with pytest.raises(StateError, match=r"budget of 1m00s is spent.*--budget"):
        resumed(DEFAULTS, spent, given=())
    assert resumed(DEFAULTS, spent, given={"budget_s"}).budget_s == 60.0


def test_another_seed_is_refused() -> None:
    """It would have no effect on what has been searched already."""
    with pytest.raises(StateError, match="--seed"):
        resumed(DEFAULTS, STATE, given={"seed"})


def test_kernels_that_only_the_state_names_are_not_the_users_word() -> None:
    """A folder from somebody else would have its code run as if its user had typed the name."""
    assert not resumed(DEFAULTS, STATE, given=()).trust
    assert resumed(DEFAULTS, STATE, given=(), trust=True).trust
    assert resumed(DEFAULTS, STATE, given={"kernels"}).trust
    from_settings = replace(DEFAULTS, kernels=("b", "a"))
    assert resumed(from_settings, STATE, given=()).trust


@pytest.mark.parametrize(("folder", "why"), [
    ("../elsewhere", "lies outside of the project"),
    ("/elsewhere", "lies outside of the project"),
    ("sub/../../elsewhere", "lies outside of the project"),
    ("link", "is a symbolic link"),
    ("link/found", "has a symbolic link on the way"),
])  # fmt: skip
def test_a_state_does_not_say_where_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, why: str
) -> None:
    """A folder from somebody else would have findings written, and files removed, anywhere its state says."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "pyproject.toml").touch()
    (tmp_path / "project" / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "project")
    state = msgspec.structs.replace(STATE, asked=asked_of(replace(FIRST, save_folder=Path(folder))))
    with pytest.raises(StateError, match=rf"{folder}', which {why}.*--resume --save-dir {folder}$"):
        resumed(DEFAULTS, state, given=())
    assert resumed(DEFAULTS, state, given={"save_folder"}).save_folder == DEFAULTS.save_folder
    assert resumed(DEFAULTS, state, given=(), trust=True).save_folder == Path(folder)
    in_settings = replace(DEFAULTS, save_folder=Path(folder))
    assert resumed(in_settings, state, given=()).save_folder == Path(folder)


def test_another_environment_is_refused_and_none_is_taken_from_the_state() -> None:
    """Half of a campaign would be of another Triton, or a stranger's folder say which program is run."""
    python = Python(Path("/old/bin/python"), {"triton": "3.6.0"})
    state = msgspec.structs.replace(STATE, asked=asked_of(replace(FIRST, python=python)))
    assert resumed(replace(DEFAULTS, python=python), state, given=()).python == python
    with pytest.raises(StateError, match=r"ran with --python /old/bin/python"):
        resumed(DEFAULTS, state, given=())
    with pytest.raises(StateError, match="ran without --python"):
        resumed(replace(DEFAULTS, python=python), STATE, given=())
