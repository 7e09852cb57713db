"""The request for a campaign, new or to go on with one that was interrupted."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnfuzz.campaign.result import Earlier
from attnfuzz.campaign.saved.state import AskedOf, CampaignState, StateError
from attnfuzz.campaign.stopping import format_duration
from attnfuzz.isolation.pythons import Python
from attnfuzz.oracles.registry import DEFAULT_ORACLES, KNOWN, ORACLES, OracleName
from attnfuzz.own_files import LinkError, refuse_links
from attnfuzz.problems.declared_numerics import Tolerance
from attnfuzz.project import project_root

_LEAST_IMPORT_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignRequest:
    """The request for a campaign.

    ``started`` is when the command began, on the monotonic clock; ``budget_s`` counts from when the first worker can
    judge, or from a few seconds later than ``started``. With ``pedantic`` all that a kernel does not declare away is
    searched, and what it takes is not inferred. ``workers`` and ``seed`` are chosen if None; without ``oracles`` all of
    them judge. ``resume`` is the state of an interrupted campaign to go on with; ``trust`` is false where that alone
    names ``kernels``, and no user. ``against``: the earlier campaign whose bugs are known. ``python``: where executors
    run, if not in the driver's environment. ``verifying``: it is about one kernel, of whose contract only what it
    refuses is left out, and where tensors lie (`infer`). ``asks_first``: what kernels take is found out before the
    search begins, not beside it, of those that are settled as well. ``max_seq_len``, ``max_seqs``: how long a sequence
    of a case may be, and how many there may be; None: as usual.
    """

    kernels: tuple[str, ...]
    started: float
    budget_s: float
    save_folder: Path
    workers: int | None = None
    device: str = "auto"
    seed: int | None = None
    oracles: tuple[str, ...] = ()
    fail_fast: bool = False
    tolerance: Tolerance = "bound"
    resume: CampaignState | None = None
    trust: bool = True
    pedantic: bool = False
    against: Earlier | None = None
    python: Python | None = None
    verifying: bool = False
    asks_first: bool = False
    max_seq_len: int | None = None
    max_seqs: int | None = None

    @property
    def import_patience_s(self) -> float:
        """How long the import of a kernel may do nothing, that of a short search too."""
        return max(self.budget_s, _LEAST_IMPORT_PATIENCE_S)

    @property
    def judging_oracles(self) -> tuple[OracleName, ...]:
        """The oracles that judge: all of them where the user has named none."""
        if not self.oracles:
            return DEFAULT_ORACLES
        asked = (name for name in ORACLES if name in self.oracles or KNOWN[name].asked == "always")
        return (*asked, *(name for name in self.oracles if name not in KNOWN))


_SAME = ("kernels", "workers", "device", "oracles", "fail_fast", "tolerance", "pedantic", "max_seq_len", "max_seqs")


def resumed(
    request: CampaignRequest, state: CampaignState, *, given: Collection[str], trust: bool = False
) -> CampaignRequest:
    """``request`` for the next part of the campaign, with the fields that were not ``given`` as they were.

    Kernels that only the state names must be bundled or lie in the project, unless ``trust`` says otherwise, and so
    must the folder for findings, without a link on the way. Raises StateError if not so, or if the budget is spent and
    no other is given.
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
        changes["save_folder"] = folder = Path(state.asked.save_folder)
        if not trust and folder != request.save_folder and (reason := _why_not_ours(folder)) is not None:
            raise StateError(
                f"the interrupted campaign saved findings in {str(folder)!r}, which {reason}, and a state has no say "
                f"in that; name the folder yourself: attnfuzz explore --resume --save-dir {shlex.quote(str(folder))}"
            )
    is_users_word = trust or "kernels" in given or set(state.asked.kernels) <= set(request.kernels)
    return replace(request, **changes, seed=state.seed, resume=state, trust=is_users_word)


def asked_of(request: CampaignRequest) -> AskedOf:
    """The part of ``request`` that is kept for the next part of the campaign."""
    return AskedOf(
        budget_s=request.budget_s,
        save_folder=str(request.save_folder),
        python=_path_of(request),
        **{name: getattr(request, name) for name in _SAME},
    )


def needs_save_folder(request: CampaignRequest) -> bool:
    """Whether only the user can say where the next part of the campaign saves its findings."""
    return _why_not_ours(request.save_folder) is not None


def _why_not_ours(folder: Path) -> str | None:
    """Why a state may not name the folder for findings; None if it may."""
    try:
        refuse_links(folder)
    except LinkError as error:
        return "has a symbolic link on the way" if Path(error.filename) != folder else "is a symbolic link"
    place, root = Path(os.path.abspath(folder)), project_root()  # noqa: PTH100 - there are no links to resolve
    return None if place.is_relative_to(root) else f"lies outside of the project's root {root}"


def _path_of(request: CampaignRequest) -> str:
    return "" if request.python is None else str(request.python.path)
