"""attnfuzz.campaign.startup: what a campaign is started with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from attnfuzz.campaign.startup import Request, choose_workers, load_searchable
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.execution.devices import Gpu
from attnfuzz.execution.runner import Runner
from attnfuzz.problems.supports import Supports

SELF_BUILDING = Path(__file__).with_name("self_building_kernels.py")


class PretendedRunner:
    """Declares what it is given."""

    def __init__(self, *declarations: Declaration) -> None:
        self._declarations = list(declarations)

    def declarations(self, targets: Sequence[str], *, within: Path | None = None) -> list[Declaration]:
        return self._declarations

    def prepare(self, declarations: Sequence[Declaration]) -> list[Declaration]:
        return list(declarations)


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


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of attnfuzz in ``folder``, which the kernels build in."""
    return subprocess.run(
        [sys.executable, "-m", "attnfuzz", *arguments],
        cwd=folder,
        env={**os.environ, "ATTNFUZZ_TEST_BUILDS": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_kernel_that_compiles_itself_is_built_once_and_then_searched(tmp_path: Path) -> None:
    """Each worker would build what all of them need, be killed for it and begin again; no case would be judged."""
    done = run(
        tmp_path, "explore", f"{SELF_BUILDING}:builds_itself", "--budget", "20s", "--workers", "2", "--json", "s.json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    begun = (tmp_path / "begun").read_text().split()
    assert sorted(begun) == [f"torch.{dtype}-{size}" for dtype in ("bfloat16", "float16") for size in (16, 32)]
    assert json.loads((tmp_path / "s.json").read_text())["cases"] > 0


def test_what_a_kernel_declares_to_prepare_is_done_once(tmp_path: Path) -> None:
    """A minute's build would be repeated by each worker, or the first cases would fail for want of it."""
    done = run(tmp_path, "explore", f"{SELF_BUILDING}:is_prepared", "--budget", "5s", "--workers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "preparing" in done.stdout
    assert (tmp_path / "begun").read_text().split() == ["prepared"]


def test_a_kernel_that_cannot_be_prepared_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """The campaign would find that every case raises, and blame the kernel for a missing compiler."""
    done = run(tmp_path, "explore", f"{SELF_BUILDING}:cannot_be_prepared", "--budget", "5s")
    assert done.returncode == 2
    assert "failed: RuntimeError: no compiler is installed" in done.stderr
    assert "Traceback" not in done.stderr
