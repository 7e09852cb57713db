"""What the zygote prepares for its executors."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.memory_faults import new_record
from attnfuzz.isolation.messages import (
    MAX_CONTROL_BYTES,
    ControlReply,
    Exited,
    Forked,
    Signal,
    encode_fork_request,
    receive_frame,
)
from attnfuzz.isolation.outcomes import ExecutorUnavailable, Reply
from attnfuzz.isolation.process import child_pids
from attnfuzz.isolation.zygote_client import Zygote

SERVICES = Path(__file__).parents[1] / "common" / "execution_services.py"


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
            loaded = ["torch", "triton", "numpy", "triton.experimental.gluon.nvidia.hopper", "attnfuzz.cli"]
            assert call(executor, "loaded", loaded) == [True, True, True, True, False]
            assert call(executor, "torch_state") == {"threads": 1, "cuda_initialized": False}
            executor.restart()


def test_modules_that_are_not_installed_are_passed_over() -> None:
    """Without Triton, which some systems lack, nothing could be run at all; its import takes longest."""
    preload = ("no_such_module", "fractions")
    with Zygote.start(service=f"{SERVICES}:Rogue", preload=preload) as zygote, Executor(zygote) as executor:
        assert call(executor, "loaded", ["fractions", "triton"]) == [True, False]


def test_a_zygote_that_is_stopped_takes_nothing_apart(tmp_path: Path) -> None:
    """At the end of each command a user would wait until all that torch has loaded is taken apart."""
    module, apart = tmp_path / "ending_service.py", tmp_path / "apart"
    module.write_text(f"import atexit, pathlib\natexit.register(pathlib.Path({str(apart)!r}).touch)\nService = int\n")
    with Zygote.start(service=f"{module}:Service", preload=()):
        pass
    assert not apart.exists()


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
    code = "import sys, attnfuzz.isolation; sys.exit(bool({'torch', 'triton', 'hypothesis'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def hear(control: socket.socket) -> ControlReply:
    control.settimeout(10)
    message: ControlReply = msgspec.json.decode(control.recv(MAX_CONTROL_BYTES), type=ControlReply)
    return message


@pytest.mark.parametrize("message", [b"nonsense", b"{}", encode_fork_request({}), b'{"type":"fork"}'])
def test_driver_that_talks_nonsense_is_dropped_alone(zygote: Zygote, message: bytes) -> None:
    """One driver's mistake, a request to fork without a channel among them, would end every other's executors."""
    with Executor(zygote) as executor, zygote.connect() as control:
        pid = executor.pid
        control.settimeout(10)
        control.send(message)
        assert control.recv(MAX_CONTROL_BYTES) == b""
        assert executor.call("pid", b"null", timeout_s=20) == Reply(str(pid).encode())


@pytest.fixture
def raw(zygote: Zygote) -> Iterator[tuple[socket.socket, socket.socket, list[int]]]:
    """A control connection, the driver's end of a channel, and the executor's descriptors."""
    channel, executor_end = socket.socketpair()
    reader, writer = os.pipe()
    record = new_record()
    assert record is not None
    with zygote.connect() as control, channel, executor_end:
        yield control, channel, [executor_end.fileno(), writer, record]
    for descriptor in (reader, writer, record):
        os.close(descriptor)


def test_second_fork_on_one_connection_is_refused(
    zygote: Zygote, raw: tuple[socket.socket, socket.socket, list[int]]
) -> None:
    """The first executor would be forgotten, and run for ever."""
    control, _, descriptors = raw
    for _ in range(2):
        socket.send_fds(control, [encode_fork_request({})], descriptors)
    forked = hear(control)
    assert isinstance(forked, Forked)
    assert control.recv(MAX_CONTROL_BYTES) == b""
    deadline = time.monotonic() + 10
    while forked.pid in child_pids(zygote.pid):
        assert time.monotonic() < deadline, "the first executor is still there"
        time.sleep(0.005)


def test_exit_status_is_sent_and_a_signal_that_crosses_it_is_harmless(
    zygote: Zygote, raw: tuple[socket.socket, socket.socket, list[int]]
) -> None:
    """A kill that comes too late would hit another process, or the status would be lost with the connection."""
    control, channel, descriptors = raw
    socket.send_fds(control, [encode_fork_request({})], descriptors)
    forked = hear(control)
    assert isinstance(forked, Forked)
    assert receive_frame(channel) is not None
    os.kill(forked.pid, signal.SIGTERM)
    deadline = time.monotonic() + 10
    while forked.pid in child_pids(zygote.pid):  # until the zygote has collected it
        assert time.monotonic() < deadline, "the executor is still there"
        time.sleep(0.005)
    control.send(msgspec.json.encode(Signal(signal.SIGKILL)))
    assert hear(control) == Exited(-signal.SIGTERM)
    with Executor(zygote) as executor:
        assert executor.call("echo", b"1", timeout_s=20) == Reply(b"1")
