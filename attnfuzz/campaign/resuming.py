"""Going on with an interrupted campaign: what is asked for comes from its state, unless it is given anew."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnfuzz.campaign.duration import format_duration
from attnfuzz.campaign.request import Request
from attnfuzz.campaign.state import Asked, State, StateError

__all__ = ["asked_of", "resumed"]

_SAME = ("kernels", "workers", "device", "oracles", "fail_fast", "tolerance", "shared", "pedantic")


def resumed(request: Request, state: State, *, given: Collection[str], trust: bool = False) -> Request:
    """``request`` for the next part of the campaign, with the fields that were not ``given`` as they were.

    Kernels that only the state names must be bundled or lie in the project, unless ``trust`` says otherwise.
    Raises StateError if the budget is spent and no other is given.
    """
    if "seed" in given:
        raise StateError("--seed cannot be given with --resume, which goes on with the campaign's own; leave it out")
    if "budget_s" not in given and not state.remaining_s:
        raise StateError(
            f"the budget of {format_duration(state.asked.budget_s)} is spent; give more time to --resume with --budget"
        )
    if _path_of(request) != state.asked.python:
        was = f"with --python {state.asked.python}" if state.asked.python else "without --python"
        raise StateError(f"the interrupted campaign ran {was}, which --resume does not change; give it the same")
    changes: dict[str, Any] = {name: getattr(state.asked, name) for name in _SAME if name not in given}
    if "budget_s" not in given:
        changes["budget_s"] = state.remaining_s
    if "save_folder" not in given:
        changes["save_folder"] = Path(state.asked.save_folder)
    is_users_word = trust or "kernels" in given or set(state.asked.kernels) <= set(request.kernels)
    return replace(request, **changes, seed=state.seed, resume=state, trust=is_users_word)


def asked_of(request: Request) -> Asked:
    """What of ``request`` is kept for the next part."""
    return Asked(
        budget_s=request.budget_s,
        save_folder=str(request.save_folder),
        python=_path_of(request),
        **{name: getattr(request, name) for name in _SAME},
    )


def _path_of(request: Request) -> str:
    return "" if request.python is None else str(request.python.path)
