"""pytest-xdist: how many workers ``-n auto`` starts, which GPU each has, and what a crash costs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.common.nvidia_smi_programs import TWO_GPUS, UUIDS, install_nvidia_smi

CONFIGURED = "[tool.attnfuzz]\nregressions = 'saved'\n"
KERNELS = """
import ctypes, os, pathlib
import attnfuzz
from attnfuzz.kernels.bundled import dense_eager

@attnfuzz.kernel("dense_decode")
def correct(inputs):
    pathlib.Path("seen by a kernel " + os.environ.get("CUDA_VISIBLE_DEVICES", "unpinned")).touch()
    return dense_eager(inputs)

@attnfuzz.kernel("dense_decode")
def segfaults(inputs):
    ctypes.string_at(0)
"""
TESTS_OF_KERNELS = """
import attnfuzz
import kernels

CASE = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "seq_lens": [3], "scale": 0.25}
"""
LEASES = """
import json, pathlib
import pytest

@pytest.hookimpl(trylast=True)
def pytest_configure_node(node):
    with pathlib.Path("leases").open("a") as file:
        print(json.dumps([node.gateway.id, node.workerinput.get("attnfuzz_device_id")]), file=file)
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A configured project on a machine with two GPUs."""
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    install_nvidia_smi(monkeypatch, pytester.path, TWO_GPUS, then=f"touch {pytester.path / 'asked'}")
    pytester.makepyprojecttoml(CONFIGURED)
    return pytester


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of workers that xdist would not arrive at by itself."""
    monkeypatch.setattr("attnfuzz.testing.xdist_leases.cores", lambda: 47)


def resolved(suite: pytest.Pytester, *arguments: str) -> tuple[int, str]:
    """What xdist makes of the options: the number of workers and how tests are distributed."""
    config = suite.parseconfig(*arguments)
    xdists_hooks(config).pytest_cmdline_main(config)
    return config.option.numprocesses, config.option.dist


def xdists_own(suite: pytest.Pytester, number: str = "auto") -> tuple[int, str]:
    config = suite.parseconfig("-n", number)
    return xdists_hooks(config).pytest_xdist_auto_num_workers(config), "load"


def xdists_hooks(config: pytest.Config) -> Any:
    return config.pluginmanager.getplugin("xdist")


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-n", "auto"], (46, "worksteal")),
        (["-n", "auto", "--dist", "loadfile"], (46, "loadfile")),
        (["-n", "auto", "--dist=load"], (46, "load")),
        (["-n", "auto", "-d"], (46, "load")),
        (["-n", "auto", "--pdb"], (0, "no")),
        (["-n", "5"], (5, "load")),
    ],
)
def test_command_line(suite: pytest.Pytester, arguments: list[str], expected: tuple[int, str]) -> None:
    """The GPUs would be crowded or idle under -n auto, or what the user has asked for would not count."""
    assert resolved(suite, *arguments) == expected


@pytest.mark.usefixtures("many_cores")
def test_distribution_in_the_ini_file(suite: pytest.Pytester) -> None:
    """A project that has settled on loadscope, as module fixtures may need, would have its tests scattered."""
    suite.makepyprojecttoml(f"{CONFIGURED}\n[tool.pytest.ini_options]\naddopts = '-n auto --dist loadscope'\n")
    assert resolved(suite) == (46, "loadscope")


@pytest.mark.usefixtures("many_cores")
def test_memory_bounds_the_number(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers would run out of memory on a GPU that somebody else uses."""
    install_nvidia_smi(monkeypatch, suite.path, TWO_GPUS.replace("81000", "5000", 1))
    assert resolved(suite, "-n", "auto") == (6, "worksteal")


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("table", [None, "[tool.other]\nuses = 'attnfuzz'\n"], ids=["no file", "no table"])
def test_suites_that_are_not_ours(suite: pytest.Pytester, table: str | None) -> None:
    """Whoever has attnfuzz installed would find all of their suites run otherwise, and slower to start."""
    (suite.path / "pyproject.toml").unlink()
    if table:
        suite.makepyprojecttoml(table)
    assert resolved(suite, "-n", "auto") == xdists_own(suite)
    assert not (suite.path / "asked").exists()


@pytest.mark.usefixtures("many_cores")
def test_kernels_on_the_cpu(suite: pytest.Pytester) -> None:
    """Tests that do not use the GPU would be held to what its memory allows."""
    assert resolved(suite, "-n", "auto", "--attnfuzz-device", "cpu") == xdists_own(suite)
    suite.makepyprojecttoml(f"{CONFIGURED}device = 'cpu'\n")
    assert resolved(suite, "-n", "auto") == xdists_own(suite)
    assert not (suite.path / "asked").exists()


@pytest.mark.usefixtures("many_cores")
def test_machine_without_gpu(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, -n auto would mean something else than everywhere."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolved(suite, "-n", "auto") == xdists_own(suite)


@pytest.mark.usefixtures("many_cores")
def test_numbers_that_others_settle(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """xdist's other ways to settle the number would be without effect."""
    assert resolved(suite, "-n", "logical") == xdists_own(suite, "logical")
    with monkeypatch.context() as changed:
        changed.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "3")
        assert resolved(suite, "-n", "auto") == (3, "load")
    suite.makeconftest("def pytest_xdist_auto_num_workers(config): return 11")
    assert resolved(suite, "-n", "auto") == (11, "load")


@pytest.mark.night
def test_workers_get_gpus_in_turn(suite: pytest.Pytester) -> None:
    """All workers would run their kernels on the first GPU."""
    suite.makeconftest(f"{LEASES}\nimport os\nos.sched_getaffinity = lambda process: range(4)")
    suite.makepyfile("def test_it(): pass")
    result = suite.runpytest_subprocess("-n", "auto", "-v")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["attnfuzz: 4 workers, 2 for each GPU: *", "4 workers [[]1 item[]]", "scheduling tests via WorkStealing*"]
    )
    assert leases(suite) == [("gw0", UUIDS[0]), ("gw1", UUIDS[1]), ("gw2", UUIDS[0]), ("gw3", UUIDS[1])]


@pytest.mark.night
def test_only_gpu_needs_no_lease(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own CUDA_VISIBLE_DEVICES would be replaced to no purpose."""
    install_nvidia_smi(monkeypatch, suite.path, TWO_GPUS.splitlines(keepends=True)[0])
    suite.makeconftest(LEASES)
    suite.makepyfile("def test_it(): pass")
    suite.runpytest_subprocess("-n", "1").assert_outcomes(passed=1)
    assert leases(suite) == [("gw0", None)]


@pytest.mark.night
def test_lease_of_a_crashed_worker_goes_to_its_replacement(suite: pytest.Pytester) -> None:
    """After crashes, all workers would end up on one GPU."""
    suite.makeconftest(LEASES)
    suite.makepyfile(
        f"""
        import os, pathlib, signal, time
        import pytest

        LEASES = pathlib.Path({str(suite.path / "leases")!r})

        def test_that_kills_the_first_worker(worker_id):
            if worker_id == "gw0":
                os.kill(os.getpid(), signal.SIGKILL)

        @pytest.mark.parametrize("number", range(6))
        def test_that_passes(number):
            give_up_at = time.monotonic() + 60.0
            while "gw3" not in LEASES.read_text() and time.monotonic() < give_up_at:
                time.sleep(0.01)  # a worker that ends before gives its own lease back
        """
    )
    result = suite.runpytest_subprocess("-n", "3", "--dist", "each")
    result.assert_outcomes(passed=20, failed=1)
    result.stdout.fnmatch_lines(["worker 'gw0' crashed while running *test_that_kills_the_first_worker'"])
    assert leases(suite) == [("gw0", UUIDS[0]), ("gw1", UUIDS[1]), ("gw2", UUIDS[0]), ("gw3", UUIDS[0])]


@pytest.mark.night
def test_kernels_run_on_the_leased_gpu(suite: pytest.Pytester) -> None:
    """Leases would be handed out, and kernels run on the first GPU all the same."""
    (suite.path / "kernels.py").write_text(KERNELS, encoding="utf-8")
    suite.makepyfile(f"{TESTS_OF_KERNELS}\n\ndef test_kernel():\n    attnfuzz.check(kernels.correct, CASE)")
    suite.runpytest_subprocess("-n", "2", "--dist", "each").assert_outcomes(passed=2)
    assert {path.name for path in suite.path.glob("seen by*")} == {f"seen by a kernel {uuid}" for uuid in UUIDS}


@pytest.mark.night
def test_segmentation_fault_fails_its_own_test(suite: pytest.Pytester) -> None:
    """A kernel that crashes would take its worker along, and what xdist reports would name no kernel."""
    (suite.path / "kernels.py").write_text(KERNELS, encoding="utf-8")
    suite.makepyfile(
        f"""
        {TESTS_OF_KERNELS}

        import pytest

        @pytest.mark.parametrize("number", range(3))
        def test_before(number):
            attnfuzz.check(kernels.correct, CASE)

        def test_that_crashes():
            attnfuzz.check(kernels.segfaults, CASE)

        @pytest.mark.parametrize("number", range(3))
        def test_after(number):
            attnfuzz.check(kernels.correct, CASE)
        """.replace("        ", "")
    )
    result = suite.runpytest_subprocess("-n", "2")
    result.assert_outcomes(passed=6, failed=1)
    result.stdout.fnmatch_lines(["*KernelFailure: *segfaults fails crash/SIGSEGV*"])
    result.stdout.no_fnmatch_line("*crashed*worker*")


def test_without_xdist(suite: pytest.Pytester) -> None:
    """Hooks of a plugin that is not loaded would be an error."""
    suite.makepyfile("def test_it(): pass")
    suite.runpytest_subprocess("-p", "no:xdist").assert_outcomes(passed=1)
    assert not (suite.path / "asked").exists()


def leases(suite: pytest.Pytester) -> list[tuple[str, str | None]]:
    """Workers in the order of their start, and what GPU they have been told to use."""
    return [tuple(json.loads(line)) for line in (suite.path / "leases").read_text(encoding="utf-8").splitlines()]
