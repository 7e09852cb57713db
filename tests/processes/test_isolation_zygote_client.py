"""The driver's handle on a zygote."""

import os
import signal
import stat
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import pytest

from attnfuzz.isolation import process, zygote_client
from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.outcomes import ExecutorUnavailable, Reply
from attnfuzz.isolation.zygote_client import Zygote, ZygoteProcess

SERVICES = Path(__file__).parents[1] / "common" / "execution_services.py"


def call(executor: Executor, method: str, argument: object = None) -> object:
    outcome = executor.call(method, msgspec.json.encode(argument), timeout_s=20)
    assert isinstance(outcome, Reply)
    return msgspec.json.decode(outcome.body)


def kill(zygote: Zygote) -> None:
    os.kill(zygote.pid, signal.SIGKILL)
    assert zygote.wait_ended(10)


def test_restarts_are_bounded_and_the_error_is_clear() -> None:
    """A zygote that dies each time would be restarted for ever."""
    with Zygote.start(service=f"{SERVICES}:Rogue", preload=(), max_restarts=1) as zygote, Executor(zygote) as executor:
        kill(zygote)
        assert call(executor, "echo", 1) == 1
        kill(zygote)
        for _ in range(2):
            with pytest.raises(ExecutorUnavailable, match=r"died 2 times, more than max_restarts=1|was closed"):
                executor.call("echo", b"1", timeout_s=20)


def test_restarts_do_not_add_up_over_a_long_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A campaign of days would end at the third time that the system kills its zygote."""
    monkeypatch.setattr(zygote_client, "_SETTLED_S", 0.0)
    with Zygote.start(service=f"{SERVICES}:Rogue", preload=(), max_restarts=1) as zygote, Executor(zygote) as executor:
        for restarts in range(1, 4):
            kill(zygote)
            assert call(executor, "echo", 1) == 1
            assert zygote.restarts == restarts


def test_a_zygote_that_is_not_waited_for_is_ready_for_whoever_connects(tmp_path: Path) -> None:
    """What needs no torch would wait for its import; or an executor would find nobody there."""
    go = tmp_path / "go"
    service = tmp_path / "slow.py"
    source = Path(SERVICES).read_text()
    service.write_text(f"{source}\nwhile not Path({str(go)!r}).exists(): time.sleep(0.001)\n")
    with Zygote.start(service=f"{service}:Rogue", preload=(), wait=False) as zygote:
        assert not zygote.is_ready
        go.touch()
        with Executor(zygote) as executor:
            assert call(executor, "echo", 1) == 1
        assert zygote.is_ready


def test_a_zygote_that_fails_tells_whoever_connects(tmp_path: Path) -> None:
    """A missing library would be waited for, or be taken for a kernel's death."""
    service = tmp_path / "broken.py"
    service.write_text("raise ImportError('no such GPU library')")
    with (
        Zygote.start(service=f"{service}:Rogue", preload=(), wait=False) as zygote,
        pytest.raises(ExecutorUnavailable, match="no such GPU library"),
    ):
        zygote.connect()


def kill_when_it_starts(old_pid: int, zygote: Zygote) -> None:
    """Wait for another process than ``old_pid``, and kill it before it can be ready."""
    while zygote.pid == old_pid:
        time.sleep(0.001)
    os.kill(zygote.pid, signal.SIGKILL)


def test_a_zygote_killed_while_it_starts_is_started_again() -> None:
    """For the seconds that torch takes to import, a single kill would end the campaign."""
    with Zygote.start(service=f"{SERVICES}:Rogue", preload=()) as zygote, Executor(zygote) as executor:
        old_pid = zygote.pid
        killer = threading.Thread(target=kill_when_it_starts, args=(old_pid, zygote))
        killer.start()
        kill(zygote)
        assert call(executor, "echo", 1) == 1
        killer.join()
        assert zygote.restarts == 2


def test_closing_does_not_wait_for_a_zygote_that_starts(tmp_path: Path) -> None:
    """Ctrl-C would wait until another thread's zygote has imported everything, or for ever."""
    started = tmp_path / "started"
    service = tmp_path / "slow.py"
    service.write_text("def make():\n    return None\n")
    zygote = Zygote.start(service=f"{service}:make", preload=())
    service.write_text(f"import pathlib, time\npathlib.Path({str(started)!r}).touch()\ntime.sleep(1000)\n")
    kill(zygote)
    errors: list[ExecutorUnavailable] = []

    def connect() -> None:
        try:
            zygote.connect().close()
        except ExecutorUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    while not started.exists():
        time.sleep(0.001)
    zygote.close()
    thread.join(20)
    assert not thread.is_alive()
    assert len(errors) == 1


def test_without_proc_no_zygote_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch then cannot convert a dtype on the CPU, for which correct kernels would be blamed."""
    monkeypatch.setattr(process, "resident_bytes", lambda pid: None)
    with pytest.raises(
        ExecutorUnavailable, match=r"^/proc is not mounted here, .*; mount it: mount -t proc proc /proc$"
    ):
        Zygote.start(service=f"{SERVICES}:Rogue", preload=())


def test_closed_zygote_refuses_executors() -> None:
    """A closed zygote would quietly start again."""
    zygote = Zygote.start(service=f"{SERVICES}:Rogue", preload=())
    zygote.close()
    with pytest.raises(ExecutorUnavailable, match="was closed"):
        Executor(zygote)


def test_unknown_device_is_refused() -> None:
    """A typing error would run kernels on whatever device is there."""
    with pytest.raises(ValueError, match="device='gpu' must be 'cpu' or 'cuda'"):
        Zygote.start("gpu", service="x:y")  # type: ignore[arg-type]  # the mistake under test


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ImportError('no such GPU library')", "no such GPU library"),
        ("import os; os._exit(3)", "ended with status 3"),
        ("print('ready'); raise SystemExit('changed my mind')", "changed my mind"),
        ("service = 1", "which .* does not define"),
    ],
)
def test_service_that_does_not_load_is_explained(tmp_path: Path, source: str, message: str) -> None:
    """The driver would wait for ever, or say only that something failed."""
    module = tmp_path / "broken_service.py"
    module.write_text(source)
    with pytest.raises(ExecutorUnavailable, match=message):
        Zygote.start(service=f"{module}:Missing", preload=())


def test_missing_service_file_is_explained(tmp_path: Path) -> None:
    """A wrong path would show as a failure to import."""
    with pytest.raises(ExecutorUnavailable, match=r"nowhere\.py' does not exist"):
        Zygote.start(service=f"{tmp_path}/nowhere.py:Service", preload=())


def test_slow_import_is_given_up(tmp_path: Path) -> None:
    """A service that hangs at import would hang the driver."""
    module = tmp_path / "slow_service.py"
    module.write_text("import time, sys\nprint('connecting', flush=True)\nsys.stdin.buffer.read()\nsys.exit()")
    with pytest.raises(ExecutorUnavailable, match=r"not ready within startup_timeout_s=0\.5"):
        Zygote.start(service=f"{module}:Service", preload=(), startup_timeout_s=0.5)


def test_long_temporary_folder_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On systems with long temporary paths no zygote could be started: a socket's path has 108 bytes at most."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with Zygote.start(service=f"{SERVICES}:Rogue", preload=()) as zygote, Executor(zygote) as executor:
        assert executor.call("echo", b"1", timeout_s=20) == Reply(b"1")
    assert list(long.iterdir()) == []


def test_socket_is_private_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users could run code as this one, or folders would pile up."""
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # tmp_path would be too long for a socket
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        with Zygote.start(service=f"{SERVICES}:Rogue", preload=()):
            (folder,) = Path(temporary).iterdir()
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert [path.name for path in folder.iterdir()] == ["zygote.sock"]
        assert list(Path(temporary).iterdir()) == []


def test_zygote_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An uninstalled clone would work only from its own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    with Zygote.start(service=f"{SERVICES}:Rogue", preload=()) as zygote, Executor(zygote) as executor:
        assert executor.call("echo", b"1", timeout_s=20) == Reply(b"1")


def test_stopped_process_accepts_no_connection() -> None:
    """A connection would be waited on that nobody accepts."""
    process = ZygoteProcess("cpu", service=f"{SERVICES}:Rogue", startup_timeout_s=60.0)
    assert process.await_ready() is None
    process.stop()
    assert process.connect() is None
    process.stop()
