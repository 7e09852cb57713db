"""attnfuzz.campaign.startup: what a campaign is started with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from attnfuzz.campaign.startup import Request, choose_workers, load_searchable
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.execution.devices import Gpu
from attnfuzz.execution.runner import Runner
from attnfuzz.problems.supports import Supports


class PretendedRunner:
    """Declares what it is given."""

    def __init__(self, *declarations: Declaration) -> None:
        self._declarations = list(declarations)

    def declarations(self, targets: Sequence[str], *, within: Path | None = None) -> list[Declaration]:
        return self._declarations


def test_a_kernel_named_twice_is_searched_once() -> None:
    """A glob and a name may overlap, and its share of the time must not double."""
    kernel = Declaration(name="k", problem="dense_decode", target="k")
    runner = cast(Runner, PretendedRunner(kernel, kernel))
    assert load_searchable(runner, ("*", "k")) == [kernel]


def test_a_declaration_that_no_case_fits_is_refused_by_name() -> None:
    """Found out by a worker, it would end the search of all the other kernels."""
    supports = Supports(head_sizes=(13,), layouts=("packed",))
    kernel = Declaration(name="k", problem="paged_decode", supports=supports, target="mine.py:k")
    with pytest.raises(KernelLoadError, match=r"no case fits what mine\.py:k declares: .*packed"):
        load_searchable(cast(Runner, PretendedRunner(kernel)), ("mine.py",))


def test_as_many_workers_as_were_asked_for() -> None:
    """The user's word would not count, or cost a calibration first."""
    request = Request(kernels=("*",), started=0.0, budget_s=1e6, save_folder=Path(), workers=3)
    assert choose_workers(request, cast(Runner, PretendedRunner()), [Gpu("0")]).workers == 3
