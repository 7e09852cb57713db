"""Starting a zygote process."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from attnfuzz.execution import Executor, ExecutorUnavailable, Reply, Zygote
from attnfuzz.execution.launch import LaunchSettings, ZygoteProcess

SERVICES = Path(__file__).with_name("execution_services.py")


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
    process = ZygoteProcess(LaunchSettings("cpu", f"{SERVICES}:Rogue", (), 60.0))
    assert process.await_ready() is None
    process.stop()
    assert process.connect() is None
    process.stop()
