"""The runner: verdicts, and every way in which a kernel can take its process down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.isolation.outcomes import ServiceError
from attnfuzz.judging.runner import DEFAULT_TIMEOUT_S, Runner
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.verdict import Failure

KERNELS = Path(__file__).parents[1] / "common" / "misbehaving_kernels.py"
CASE = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=8, seq_lens=(3, 0, 9), scale=0.25)
MEMORY_LIMIT_BYTES = 2 << 30


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(device="cpu", memory_limit_bytes=MEMORY_LIMIT_BYTES) as runner:
        yield runner


@pytest.fixture(scope="module")
def declared(runner: Runner) -> dict[str, Declaration]:
    return {declaration.name: declaration for declaration in runner.declarations([str(KERNELS)])}


def failure(runner: Runner, declaration: Declaration, timeout_s: float = 30.0) -> Failure:
    found = runner.judge(declaration, CASE, timeout_s=timeout_s).failure
    assert found is not None
    return found


def test_correct_kernel_passes(runner: Runner, declared: dict[str, Declaration]) -> None:
    """No kernel could be judged."""
    verdict = runner.judge(declared["correct"], CASE)
    assert verdict.failure is None
    assert 0 < verdict.error_ratio < 1
    assert verdict.timing.total_s > 0
    assert declared["correct"].options == {"tile": (16, 32)}


def test_wrong_number_comes_back_as_a_failure(runner: Runner, declared: dict[str, Declaration]) -> None:
    """The verdict would lose its words on the way."""
    found = runner.judge(declared["wrong_from_seven"], CASE, inquire=True).failure
    assert found is not None
    assert (found.oracle, found.kind) == ("accuracy", "out:value")
    assert "token 2 of sequence 0 is dropped" in found.message
    assert runner.judge(declared["wrong_from_seven"], msgspec.structs.replace(CASE, seq_lens=(6,))).failure is None


def test_infinite_ratio_survives_the_pipe(runner: Runner, declared: dict[str, Declaration]) -> None:
    """JSON has no infinity: a NaN in the output would break the protocol. What kernels print would, too."""
    verdict = runner.judge(declared["prints_nan"], CASE)
    assert verdict.failure is not None
    assert verdict.failure.kind == "out:nan"
    assert verdict.failure.error_ratio == float("inf")
    assert verdict.error_ratio == float("inf")


def test_segmentation_fault(runner: Runner, declared: dict[str, Declaration]) -> None:
    """A segmentation fault would end the driver, or be told without its place."""
    found = failure(runner, declared["segfaults"])
    assert (found.oracle, found.kind) == ("crash", "SIGSEGV")
    assert found.message.startswith(f"the kernel's process died of SIGSEGV at {KERNELS}:")
    assert found.message.endswith("in segfaults")
    assert found.details == (found.message.partition(" at ")[2],)


def test_exit(runner: Runner, declared: dict[str, Declaration]) -> None:
    """A kernel that ends its process would be taken for one that passed."""
    found = failure(runner, declared["exits"])
    assert (found.oracle, found.kind) == ("crash", "exit 3")
    assert found.message == "the kernel ended its process with exit status 3"


def test_sys_exit_is_an_exception(runner: Runner, declared: dict[str, Declaration]) -> None:
    """sys.exit in a kernel would look like a crash without a place."""
    restarts = runner.restarts
    found = failure(runner, declared["calls_sys_exit"])
    assert (found.oracle, found.kind) == ("exception", "SystemExit in calls_sys_exit")
    assert runner.restarts <= restarts + 1


def test_hang(runner: Runner, declared: dict[str, Declaration]) -> None:
    """An endless loop would stop the campaign."""
    found = failure(runner, declared["never_returns"], timeout_s=1.0)
    assert (found.oracle, found.kind) == ("hang", "timeout")
    assert found.message.startswith(f"the kernel did not finish within 1 s; it was at {KERNELS}:")


def test_memory(runner: Runner, declared: dict[str, Declaration]) -> None:
    """A kernel that allocates without end would bring the machine down."""
    found = failure(runner, declared["eats_memory"])
    assert (found.oracle, found.kind) == ("crash", "memory")
    assert found.message == "the kernel's process outgrew its memory limit"


def test_closed_descriptors(runner: Runner, declared: dict[str, Declaration]) -> None:
    """A kernel that closes the pipe to the driver would look like a fault of the framework."""
    found = failure(runner, declared["closes_descriptors"], timeout_s=20.0)
    assert (found.oracle, found.kind) == ("crash", "channel")


def test_lost_gpu_context_ends_the_executor(runner: Runner, declared: dict[str, Declaration]) -> None:
    """Every later case would fail in a process whose GPU context is lost."""
    runner.judge(declared["correct"], CASE)
    restarts = runner.restarts
    verdict = runner.judge(declared["leaves_cuda_error"], CASE)
    assert verdict.fatal
    assert verdict.failure is not None
    assert verdict.failure.kind == "cuda:illegal memory access"
    assert runner.judge(declared["correct"], CASE).failure is None
    assert runner.restarts == restarts + 1


def test_exhausted_executor_is_replaced(runner: Runner, declared: dict[str, Declaration]) -> None:
    """A kernel that keeps GPU memory would be followed by cases that cannot be judged."""
    assert runner.judge(declared["leaves_no_memory"], CASE).failure is None
    restarts = runner.restarts
    assert runner.judge(declared["correct"], CASE).failure is None
    assert runner.restarts == restarts + 1


DAMAGING = """
import attnfuzz
from attnfuzz.kernels import eager
from attnfuzz.problems.cases import CASE_TYPES

calls = []


@attnfuzz.kernel("dense_decode")
def damages(inputs):
    calls.append(1)
    if len(calls) == 2:  # the last run of the first case
        CASE_TYPES.clear()
    return eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)
"""


def test_a_process_that_a_kernel_has_damaged_is_not_asked_again(runner: Runner, tmp_path: Path) -> None:
    """What a stray write broke in attnfuzz would be told as its own fault from then on, and the kernel's bug never."""
    path = tmp_path / "damaging.py"
    path.write_text(DAMAGING)
    (declaration,) = runner.declarations([str(path)])
    before = runner.restarts
    assert runner.judge(declaration, CASE, relations=()).failure is None
    with pytest.raises(ServiceError):  # said once, by whoever asked
        runner.judge(declaration, CASE, relations=())
    assert runner.judge(declaration, CASE, relations=()).failure is None
    assert runner.restarts == before + 1
    with pytest.raises(ServiceError):
        runner.judge_together(declaration, [CASE, CASE], timeout_s=60.0)
    assert runner.judge(declaration, CASE, relations=()).failure is None
    assert runner.restarts == before + 2
    runner.restart()


RAISES_ONCE = """
import attnfuzz
from attnfuzz.kernels import eager

calls = []


@attnfuzz.kernel("dense_decode")
def raises_once(inputs):
    calls.append(1)
    if len(calls) == 3:  # after both runs that are judged
        raise RuntimeError("the third call")
    return eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)
"""


def test_what_a_kernel_raises_in_a_call_that_nobody_judges_is_told(tmp_path: Path) -> None:
    """It may raise once in two thousand calls, and of these hardly any are judged."""
    path = tmp_path / "once.py"
    path.write_text(RAISES_ONCE)
    with Runner(device="cpu", watching=True) as watching:
        (declaration,) = watching.declarations([str(path)])
        failure = watching.judge(declaration, CASE, relations=()).failure
        assert failure is not None
        assert (failure.oracle, "the third call" in failure.message) == ("exception", True)
        assert watching.judge(declaration, CASE, relations=()).failure is None


def test_case_that_finds_no_memory_in_a_fresh_process_is_too_large(runner: Runner, tmp_path: Path) -> None:
    """Executors would be replaced without end for a case that a GPU full of something else has no room for."""
    path = tmp_path / "starving.py"
    path.write_text(f"{KERNELS.read_text()}\n\nvars(judging)['judge'] = starve\n")
    (declaration,) = runner.declarations([f"{path}:correct"])
    with pytest.raises(CaseTooLarge, match="does not fit into the GPU's memory"):
        runner.judge(declaration, CASE)


def test_next_case_passes_after_a_death(runner: Runner, declared: dict[str, Declaration]) -> None:
    """One crash would spoil the verdicts that follow."""
    failure(runner, declared["segfaults"])
    assert runner.judge(declared["correct"], CASE).failure is None


def test_import_does_not_count_against_the_timeout(runner: Runner, tmp_path: Path) -> None:
    """A kernel whose module takes long to import would be reported as hanging."""
    path = tmp_path / "slow_to_import.py"
    path.write_text(f"import time\ntime.sleep(1.5)\n{KERNELS.read_text().replace('from __future__', '# ')}")
    (declaration,) = runner.declarations([f"{path}:correct"])
    runner.judge(declaration, CASE)
    runner._executor.restart()
    assert runner.judge(declaration, CASE, timeout_s=1.2).failure is None


def test_only_oracles_asked_for_are_applied(runner: Runner, declared: dict[str, Declaration]) -> None:
    """A crash would be reported to a user who asked about accuracy alone."""
    with Runner(device="cpu", oracles=("accuracy",), zygote=runner.zygote) as other:
        assert other.judge(declared["segfaults"], CASE).failure is None
        assert other.judge(declared["wrong_from_seven"], CASE).failure is not None


BATCH = [msgspec.structs.replace(CASE, seq_lens=(n, 1)) for n in (3, 7, 5)]


def test_batch_is_judged_in_one_call(
    runner: Runner, declared: dict[str, Declaration], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches would be no faster than single cases, or lose verdicts on the way."""
    runner.judge(declared["wrong_from_seven"], CASE)
    monkeypatch.setattr(runner, "judge", None)
    verdicts = runner.judge_together(declared["wrong_from_seven"], BATCH, timeout_s=30.0) or []
    assert [verdict.failure is None for verdict in verdicts] == [True, False, True]
    assert all(verdict.timing.total_s > 0 for verdict in verdicts)


@pytest.mark.parametrize(
    ("kernel", "oracle", "kind"),
    [
        ("segfaults_at_seven", "crash", "SIGSEGV"),
        ("hangs_at_seven", "hang", "timeout"),
        ("loses_context_at_seven", "crash", "cuda:illegal memory access"),
    ],
)
def test_death_of_a_batch_is_blamed_on_one_case(
    kernel: str, oracle: str, kind: str, runner: Runner, declared: dict[str, Declaration]
) -> None:
    """A deadly case would take its neighbours in the batch with it."""
    assert runner.judge_together(declared[kernel], BATCH, timeout_s=2.0) is None
    verdicts = [runner.judge(declared[kernel], case, timeout_s=1.0) for case in BATCH]
    passed, failed, passed_too = (verdict.failure for verdict in verdicts)
    assert failed is not None
    assert (failed.oracle, failed.kind) == (oracle, kind)
    assert passed is passed_too is None


def test_too_large_a_case_of_a_batch_is_refused_here(runner: Runner, declared: dict[str, Declaration]) -> None:
    """A case of ten terabytes would reach an executor among others."""
    with pytest.raises(CaseTooLarge):
        runner.judge_together(
            declared["correct"], [CASE, msgspec.structs.replace(CASE, seq_lens=(1 << 24,) * 64)], timeout_s=1.0
        )


def test_an_heir_goes_on_in_the_process_that_has_imported_the_kernels(
    runner: Runner, declared: dict[str, Declaration]
) -> None:
    """The first case of a user's kernel would wait until another process has started a GPU and imported its file."""
    with runner.sibling() as first:
        first.judge(declared["correct"], CASE)
        pid = first.pid
        with first.heir() as heir:
            assert heir.judge(declared["correct"], CASE).failure is None
            assert heir.pid == pid != first.pid
        assert first.judge(declared["correct"], CASE).failure is None


def test_sibling_has_its_own_executor(runner: Runner, declared: dict[str, Declaration]) -> None:
    """A crash on one worker would cost another one its executor."""
    runner.judge(declared["correct"], CASE)
    restarts = runner.restarts
    with runner.sibling() as other:
        failure(other, declared["segfaults"])
        assert other.zygote is runner.zygote
    assert runner.judge(declared["correct"], CASE).failure is None
    assert runner.restarts == restarts


def test_what_nobody_waits_for_starts_in_the_background(declared: dict[str, Declaration]) -> None:
    """The first bug of a campaign on a GPU was confirmed 1.5 s later: what may be needed to shrink it was imported."""
    with Runner(device="cpu", wait=False) as runner:
        assert runner.pid is None
        assert runner.judge(declared["correct"], CASE).failure is None
        assert runner.pid is not None


def test_device_is_described(runner: Runner) -> None:
    """Reports would not say what the figures were taken on."""
    assert runner.device == "cpu"
    assert runner.timeout_s == DEFAULT_TIMEOUT_S["cpu"]
    assert runner.device_name
    assert set(runner.environment.versions) == {"python", "torch", "triton", "numpy"}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "does not exist"),
        ("x = 1\n", "declares no kernel"),
        ("import nowhere_to_be_found\n", "does not import: ModuleNotFoundError"),
        ("import attnfuzz\nattnfuzz.Supports(\n  head_size=(64,))\n", "argument 'head_size' (line 2)"),
        ("import sys\nsys.exit(1)\n", "does not import: SystemExit: 1"),
        ("import ctypes\nctypes.string_at(0)\n", "the kernel's process died of SIGSEGV"),
    ],
)
def test_kernel_that_cannot_be_loaded(source: str | None, words: str, runner: Runner, tmp_path: Path) -> None:
    """A user would get a traceback, or nothing, for a file that does not import."""
    path = tmp_path / "users_kernel.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(KernelLoadError) as error:
        runner.declarations([str(path)])
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_files_beside_a_kernel_come_before_those_of_a_clone(runner: Runner, tmp_path: Path) -> None:
    """Users whose kernels are in a folder of that name would be told that attnfuzz's folder lacks them."""
    (tmp_path / "kernels.py").write_text("NAME = 'beside'\n")
    (tmp_path / "users_kernel.py").write_text(
        "import attnfuzz, kernels\n\n@attnfuzz.kernel('dense_decode', name=kernels.NAME)\ndef mine(inputs): ...\n"
    )
    assert [one.name for one in runner.declarations([str(tmp_path / "users_kernel.py")])] == ["beside"]


@pytest.mark.parametrize("below", ["", "src"])
def test_a_kernel_imports_the_packages_of_its_project(below: str, runner: Runner, tmp_path: Path) -> None:
    """A file of tests that pytest runs, with `pythonpath = ["."]`, would not load where its kernels run."""
    package = tmp_path / below / f"package_in_{below or 'root'}"
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    (package / "__init__.py").write_text("NAME = 'of_the_project'\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_mine.py").write_text(
        f"import attnfuzz, {package.name} as p\n\n@attnfuzz.kernel('dense_decode', name=p.NAME)\ndef mine(i): ...\n"
    )
    assert [one.name for one in runner.declarations([str(tmp_path / "tests" / "test_mine.py")])] == ["of_the_project"]


def test_kernel_inside_a_function_cannot_be_isolated(runner: Runner, declared: dict[str, Declaration]) -> None:
    """A kernel that no other process can import would fail with words about its target."""
    local = msgspec.structs.replace(declared["correct"], target="")
    with pytest.raises(KernelLoadError, match="isolated=False"):
        runner.judge(local, CASE)


def test_too_large_a_case_is_refused_here(runner: Runner, declared: dict[str, Declaration]) -> None:
    """A case of ten terabytes would reach an executor."""
    with pytest.raises(CaseTooLarge):
        runner.judge(declared["correct"], msgspec.structs.replace(CASE, seq_lens=(1 << 24,) * 64))


def test_wrong_device_is_refused() -> None:
    """A misspelt device would silently mean the CPU."""
    with pytest.raises(ValueError, match="'auto', 'cpu' or 'cuda'"):
        Runner(device="gpu")


def test_an_import_that_does_nothing_is_given_up(tmp_path: Path) -> None:
    """A module that waits for itself would keep a search of seconds for minutes."""
    path = tmp_path / "waits_for_itself.py"
    path.write_text("import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()\n")
    with Runner(device="cpu", import_patience_s=0.5) as impatient, pytest.raises(KernelLoadError) as error:
        impatient.declarations([str(path)])
    assert str(error.value).startswith(f"importing {path} does not end: the kernel did not finish within 0.5 s")
    assert f"it was at {path}:4" in str(error.value)


def test_an_import_that_computes_is_waited_for(tmp_path: Path) -> None:
    """An engine takes longer to import than many a search; its kernels could not be searched for seconds."""
    path = tmp_path / "computes.py"
    path.write_text(
        KERNELS.read_text()
        + "\n\nimport time\nuntil = time.process_time() + 1.5\nwhile time.process_time() < until:\n    pass\n"
    )
    with Runner(device="cpu", import_patience_s=0.5) as impatient:
        assert impatient.declarations([f"{path}:correct"])[0].name == "correct"
