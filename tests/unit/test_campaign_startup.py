"""attnfuzz.campaign.startup: what a campaign is started with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

import pytest

from attnfuzz.campaign.startup import load_searchable, number_of_workers
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.execution.runner import Runner
from attnfuzz.problems.supports import Supports


class PretendedRunner:
    """Declares what it is given."""

    def __init__(self, *declarations: Declaration) -> None:
        self._declarations = list(declarations)

    def declarations(self, targets: Sequence[str]) -> list[Declaration]:
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


def test_workers_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker a core, except where they share a GPU; what the user asks for comes first."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert number_of_workers(None, "cpu") == 16
    assert number_of_workers(None, "cuda") == 8
    assert number_of_workers(3, "cuda") == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert number_of_workers(None, "cuda") == 1
