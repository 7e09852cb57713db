"""attnfuzz.campaign.startup: what a campaign is started with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from attnfuzz.campaign import startup
from attnfuzz.campaign.request import CampaignRequest
from attnfuzz.campaign.result import Reporter
from attnfuzz.campaign.startup import load_searchable
from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.supports import Supports
from tests.campaign import pretended_gpu

SELF_BUILDING = Path(__file__).parents[1] / "common" / "self_building_kernels.py"


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


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of attnfuzz in ``folder``, which the kernels build in."""
    return subprocess.run(
        [sys.executable, "-m", "attnfuzz", *arguments],
        cwd=folder,
        env={
            **os.environ,
            **environment,
            "ATTNFUZZ_TEST_BUILDS": str(folder),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.night
def test_kernels_that_are_ready_are_searched_while_others_are_built(tmp_path: Path) -> None:
    """One kernel that compiles itself for minutes would keep all others waiting, and their budget would not begin."""
    kernels = [f"{SELF_BUILDING}:{name}" for name in ("builds_itself", "is_ready", "builds_itself_too")]
    done = run(tmp_path, "explore", *kernels, "--budget", "3s", "--json", "s.json", ATTNFUZZ_TEST_WAITS="1")
    assert done.returncode == 2, done.stdout + done.stderr  # nothing is known of two of them
    summary = json.loads((tmp_path / "s.json").read_text())
    cases = {one["name"]: one["cases"] for one in summary["kernels"]}
    assert cases["is_ready"] > 0
    assert cases["builds_itself"] == cases["builds_itself_too"] == 0
    assert summary["unreached"] == ["builds_itself", "builds_itself_too"]
    unbuilt = " ".join(done.stdout.split())
    assert "builds_itself: 0 of 4 combinations of dtype, head size and options are built" in unbuilt
    assert summary["kernels"][0]["unbuilt"] or summary["kernels"][1]["unbuilt"]


@pytest.mark.night
def test_a_kernel_is_searched_in_what_is_built_of_it_and_builds_are_made_one_at_a_time(tmp_path: Path) -> None:
    """Build tools that share a folder would spoil each other's log; a kernel of many formats would never be reached."""
    kernels = [f"{SELF_BUILDING}:{name}" for name in ("builds_itself", "builds_itself_too")]
    done = run(tmp_path, "explore", *kernels, "--budget", "25s", "--workers", "2", "--json", "s.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "overlaps").exists()
    begun = (tmp_path / "begun").read_text().split()
    assert begun[:2] == ["torch.float16-16", "too-torch.float16-16"]
    assert len(set(begun)) == len(begun)
    assert all(one["cases"] > 0 for one in json.loads((tmp_path / "s.json").read_text())["kernels"])


@pytest.mark.night
def test_a_kernel_that_cannot_be_prepared_does_not_end_the_search_of_others(tmp_path: Path) -> None:
    """A missing compiler would cost the kernels that need none their campaign, or not show in its exit status."""
    kernels = [f"{SELF_BUILDING}:{name}" for name in ("cannot_be_prepared", "is_ready")]
    done = run(tmp_path, "explore", *kernels, "--budget", "15s", "--json", "s.json")
    assert done.returncode == 2
    assert "no compiler is installed" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert json.loads((tmp_path / "s.json").read_text())["unreached"] == ["cannot_be_prepared"]


@pytest.mark.night
def test_what_a_kernel_declares_to_prepare_is_done_once(tmp_path: Path) -> None:
    """A minute's build would be repeated by each worker, or the first cases would fail for want of it."""
    done = run(tmp_path, "explore", f"{SELF_BUILDING}:is_prepared", "--budget", "5s", "--workers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is_prepared compiles itself" in done.stdout
    assert (tmp_path / "begun").read_text().split() == ["prepared"]


@pytest.mark.night
def test_a_kernel_that_cannot_be_prepared_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """The campaign would find that every case raises, and blame the kernel for a missing compiler."""
    done = run(tmp_path, "explore", f"{SELF_BUILDING}:cannot_be_prepared", "--budget", "5s")
    assert done.returncode == 2
    assert "failed: RuntimeError: no compiler is installed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.night
def test_a_kernel_that_is_built_and_never_gives_a_result_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """Once built, it would be searched to the end of the budget, and be a finding in a saved case."""
    kernel = f"{SELF_BUILDING}:builds_itself_and_returns_elsewhere"
    done = run(tmp_path, "explore", kernel, "--budget", "60s")
    assert done.returncode == 2, done.stdout + done.stderr
    assert (
        f"{kernel} never returned a result on the device of its inputs: the kernel returned out on meta" in done.stderr
    )
    assert not (tmp_path / "regressions").exists()


def test_an_import_that_takes_long_is_told_and_one_that_does_not_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would be heard for as long as a module waits for itself."""
    told, heard = list[str](), threading.Event()

    class Listening(Reporter):
        def note(self, text: str) -> None:
            told.append(text)
            heard.set()

    request = CampaignRequest(kernels=("slow.py",), started=0.0, budget_s=60.0, save_folder=Path("found"))
    with startup._saying_what_is_imported(request, Listening()):
        pass
    assert told == []
    monkeypatch.setattr(startup, "_SAY_AFTER_S", 0.0)
    with startup._saying_what_is_imported(request, Listening()):
        assert heard.wait(60)
    assert told == ["slow.py is still being imported; if it does nothing for 1m00s, it is given up"]


@pytest.mark.night
def test_a_campaign_on_a_gpu_says_where_compiled_kernels_are_kept(tmp_path: Path) -> None:
    """Whoever keeps nothing between runs of a CI waits for compilers each time, and would not know where to look."""
    kept = tmp_path / "kept"
    command = [
        sys.executable,
        "-m",
        "tests.campaign.pretended_gpu",
        "explore",
        "merge_states_eager",
        "--device",
        "cuda",
    ]
    command += ["--workers", "1", "--budget", "1s", "--save-dir", str(tmp_path / "found")]
    environment = {**os.environ, pretended_gpu.LIMIT: str(1 << 30), "TRITON_CACHE_DIR": str(kept)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=240)
    assert f"no kernel has been compiled into {kept} yet" in done.stdout + done.stderr


def test_launchers_that_triton_keeps_are_no_kernels(tmp_path: Path) -> None:
    """Whoever has compiled nothing would be told that all is kept, and not look for the folder."""
    kept = tmp_path / "kept"
    assert f"no kernel has been compiled into {kept} yet" in startup.what_is_compiled(kept)
    (kept / "launcher").mkdir(parents=True)
    (kept / "launcher" / "cuda_utils.so").touch()
    assert startup.what_is_compiled(kept).startswith("no kernel")
    (kept / "launcher" / "kernel.json").touch()
    assert startup.what_is_compiled(kept).startswith(f"compiled kernels are kept in {kept};")
