"""What the zygote prepares for its executors."""

import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from attnfuzz.execution import Executor, ExecutorUnavailable, Reply, Zygote

SERVICES = Path(__file__).with_name("execution_services.py")


def call(executor: Executor, method: str, argument: object = None) -> object:
    outcome = executor.call(method, msgspec.json.encode(argument), timeout_s=20)
    assert isinstance(outcome, Reply)
    return msgspec.json.decode(outcome.body)


def environment(device: Literal["cpu", "cuda"]) -> dict[str, str]:
    with Zygote.start(device, service=f"{SERVICES}:Rogue", preload=()) as zygote, Executor(zygote) as executor:
        variables = call(executor, "environment")
        assert isinstance(variables, dict)
        return variables


def test_cpu_means_interpreter_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, `--device cpu` would still use it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    variables = environment("cpu")
    assert variables["TRITON_INTERPRET"] == "1"
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert variables["OMP_NUM_THREADS"] == "1"


def test_cuda_means_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leftover TRITON_INTERPRET would test the interpreter instead of the GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    variables = environment("cuda")
    assert "TRITON_INTERPRET" not in variables
    assert variables["CUDA_VISIBLE_DEVICES"] == "5"
    assert variables["OMP_NUM_THREADS"] == "3"


def test_executors_start_with_torch_and_triton_imported() -> None:
    """Each restart would take seconds, an OpenMP pool could deadlock after the fork, or CUDA fail to start."""
    with Zygote.start(service=f"{SERVICES}:Rogue") as zygote, Executor(zygote) as executor:
        for _ in range(2):
            assert call(executor, "loaded", ["torch", "triton", "numpy", "attnfuzz.cli"]) == [True, True, True, False]
            assert call(executor, "torch_state") == {"threads": 1, "cuda_initialized": False}
            executor.restart()


def test_modules_that_are_not_installed_are_passed_over() -> None:
    """Without Triton, which some systems lack, nothing could be run at all."""
    preload = ("no_such_module", "fractions")
    with Zygote.start(service=f"{SERVICES}:Rogue", preload=preload) as zygote, Executor(zygote) as executor:
        assert call(executor, "loaded", ["fractions"]) == [True]


def test_service_that_initialises_cuda_at_import_is_refused(tmp_path: Path) -> None:
    """Every executor would fail with an error about forked subprocesses."""
    module = tmp_path / "eager_service.py"
    module.write_text(
        "import sys, types\n"
        "sys.modules['torch'] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True))\n"
        "Service = None\n"
    )
    with pytest.raises(ExecutorUnavailable, match="initialised CUDA in the zygote"):
        Zygote.start(service=f"{module}:Service", preload=())


def test_driver_side_loads_no_torch() -> None:
    """The driver would pay seconds for what only executors need, and could touch CUDA."""
    code = "import sys, attnfuzz.execution; sys.exit(bool({'torch', 'triton', 'hypothesis'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_command_line_names_what_is_missing() -> None:
    """Starting a zygote by hand would fail without a word."""
    run = subprocess.run([sys.executable, "-m", "attnfuzz.execution.zygote"], capture_output=True, text=True)
    assert run.returncode == 2
    assert "socket, --service" in run.stderr
