"""Services for the tests of the isolation layer, loaded in executors by this file's path."""

import ctypes
import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from attnfuzz.isolation.progress import run_is_over
from attnfuzz.isolation.serve import ExitAfterReply

_MEBIBYTE = 1 << 20


class Rogue:
    """Does what its method's name says, mostly harm; `argument` is the decoded payload."""

    def handle(self, method: str, payload: bytes) -> bytes:
        action: Callable[[object], object] = getattr(self, method)
        return msgspec.json.encode(action(msgspec.json.decode(payload)))

    def echo(self, argument: object) -> object:
        return argument

    def pid(self, _: object) -> int:
        return os.getpid()

    def environment(self, _: object) -> dict[str, str]:
        return dict(os.environ)

    def loaded(self, names: list[str]) -> list[bool]:
        return [name in sys.modules for name in names]

    def torch_state(self, _: object) -> dict[str, object]:
        torch = sys.modules["torch"]
        return {"threads": torch.get_num_threads(), "cuda_initialized": torch.cuda.is_initialized()}

    def sockets(self, _: object) -> int:
        return len(_open_sockets())

    def limits(self, _: object) -> dict[str, object]:
        oom_score_adj = int(Path("/proc/self/oom_score_adj").read_text())
        return {
            "oom_score_adj": oom_score_adj,
            "session": os.getsid(0),
            "stdin": str(Path("/proc/self/fd/0").readlink()),
        }

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    def run(self, times_and_seconds: tuple[int, float]) -> str:
        """So many runs of so many seconds, of which each is told to be over."""
        times, seconds = times_and_seconds
        for _ in range(times):
            time.sleep(seconds)
            run_is_over()
        return "ran"

    def kill_once(self, pid_and_mark: tuple[int, str]) -> str:
        """Kill the process, unless the file is there which says that this was done."""
        pid, mark = pid_and_mark
        if not Path(mark).exists():
            Path(mark).touch()
            os.kill(pid, signal.SIGKILL)
            time.sleep(60.0)
        return "done before"

    def stop_parent(self, _: object) -> str:
        os.kill(os.getppid(), signal.SIGSTOP)
        return "stopped it"

    def stop_parent_and_hang(self, _: object) -> None:
        self.stop_parent(None)
        self.hang(None)

    def spin(self, _: object) -> None:
        while True:
            pass

    def hang(self, _: object) -> None:
        """Take no time from the tests beside."""
        while True:
            time.sleep(1000)

    def block_signals_and_sleep(self, _: object) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        libc = ctypes.CDLL(None)
        while True:
            libc.sleep(1000)

    def segfault(self, _: object) -> None:
        ctypes.string_at(0)

    def abort(self, _: object) -> None:
        os.abort()

    def os_exit(self, code: int) -> None:
        os._exit(code)

    def sys_exit(self, code: object) -> None:
        sys.exit(code)  # type: ignore[arg-type]  # any object is allowed and printed

    def interrupt(self, _: object) -> None:
        raise KeyboardInterrupt

    def fail(self, message: str) -> None:
        raise KeyError(message)

    def answer_then_exit(self, argument: object) -> None:
        raise ExitAfterReply(msgspec.json.encode(argument))

    def grow(self, max_mebibytes: int) -> int:
        """Touch ever more memory, at most `max_mebibytes` lest a broken watchdog takes the machine down."""
        held = []
        for _ in range(max_mebibytes // 4):
            held.append(bytearray(b"x") * (4 * _MEBIBYTE))
            time.sleep(0.001)
        return len(held)

    def build(self, argument: tuple[float, int]) -> str:
        """Start a compiler that takes so many seconds and mebibytes, and wait for it."""
        seconds, mebibytes = argument
        script = f"import time; held = bytearray(b'x') * ({mebibytes} << 20); time.sleep({seconds})"
        subprocess.run([sys.executable, "-c", script], check=True)
        return "built"

    def start(self, program: str) -> str:
        """Run a program to its end."""
        subprocess.run([program], check=True)
        return "ended"

    def start_for(self, argument: tuple[str, float]) -> str:
        """Run a program for so many seconds."""
        program, seconds = argument
        with subprocess.Popen([program]) as process:
            time.sleep(seconds)
            process.kill()
        return "ended"

    def build_then_hang(self, argument: tuple[float, int]) -> None:
        self.build(argument)
        self.hang(argument)

    def have_a_helper(self, busy: bool) -> str:
        """Start a process that stays, as pools of compilers do."""
        subprocess.Popen([sys.executable, "-c", "while True: pass" if busy else "import time; time.sleep(60)"])
        time.sleep(0.3)
        return "started"

    def wait_for_lock(self, argument: tuple[str, float]) -> str:
        """Wait in the system for a file's lock; ask for it again and again if the second argument is positive."""
        path, poll_s = argument
        with Path(path).open("a") as file:
            while poll_s:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(poll_s)
            else:
                fcntl.flock(file, fcntl.LOCK_EX)
        return "locked"

    def build_behind_lock(self, argument: tuple[str, float]) -> str:
        path, seconds = argument
        with Path(path).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            compiler = (
                f"import time\nend=time.time()+{seconds}\nwhile time.time()<end: sum(range(10**5)), time.sleep(0.02)"
            )
            subprocess.run([sys.executable, "-c", compiler])
        return "built"

    def kill_itself_at_first(self, argument: tuple[str, int]) -> int:
        """SIGKILL in the first runs, counted in a file; the number of this run if it survives."""
        file, kills = argument
        with Path(file).open("a") as runs:
            runs.write(".")
        run = Path(file).stat().st_size
        if run <= kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return run

    def large(self, num_bytes: int) -> str:
        return "x" * num_bytes

    def close_everything(self, _: object) -> None:
        os.closerange(0, 4096)

    def close_everything_and_hang(self, _: object) -> None:
        self.close_everything(_)
        self.hang(_)

    def close_everything_and_exit(self, code: int) -> None:
        self.close_everything(code)
        os._exit(code)

    def garble_channel(self, text: str) -> None:
        for descriptor in _open_sockets():
            os.write(descriptor, text.encode())
        self.hang(text)

    def forge(self, frame: list[int]) -> str:
        for descriptor in _open_sockets():
            os.write(descriptor, bytes(frame))
        return "forged"

    def write_stdout(self, num_bytes: int) -> str:
        data = b"\x00\xffnoise\n" * (num_bytes // 8 + 1)
        os.write(1, data[:num_bytes])
        sys.stderr.write("more\n")
        return "written"

    def print_then_exit(self, num_lines: int) -> None:
        for line in range(num_lines):
            print("line", line)
        os._exit(9)

    def print_forever(self, _: object) -> None:
        while True:
            os.write(2, b"chatter\n" * 1000)

    def fork_child(self, _: object) -> int:
        child = os.fork()
        while child == 0:
            time.sleep(1000)
        return child

    def start_program(self, new_session: bool) -> int:
        return subprocess.Popen(["sleep", "1000"], start_new_session=new_session).pid

    def start_daemon(self, _: object) -> int:
        """A program whose parent has ended and which is in a session of its own: it left no trace to follow."""
        script = "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=2).pid)"
        return int(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout)

    def fork_and_answer_twice(self, _: object) -> str:
        """As a kernel that forks and forgets to leave the child: both sides return."""
        child = os.fork()
        if child == 0:
            return "child"
        os.waitpid(child, 0)  # so that a copy that goes on serving is in the way
        return "parent"


def _open_sockets() -> list[int]:
    descriptors = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return [descriptor for descriptor in descriptors if _is_socket(descriptor)]


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:  # the one that listed the folder
        return False


class DeadGpu:
    """Answers for a GPU until a case is judged on it, which then hangs, as does whatever follows."""

    def handle(self, method: str, payload: bytes) -> bytes:
        hung = Path(os.environ["ATTNFUZZ_TEST_GPU_HUNG"])
        if method == "declarations":
            return b'{"kernels":[]}'
        if method == "device" and not hung.exists():
            return b'{"device":"cuda","name":"GPU","versions":{}}'
        if method == "device" and hung.read_text() == "recovers":
            return b'{"device":"cuda","name":"GPU","versions":{}}'
        if not hung.exists():
            hung.write_text(os.environ.get("ATTNFUZZ_TEST_GPU_THEN", ""))
        time.sleep(1000)
        return b"null"


class ColdGpu:
    """Takes a while to be initialised, which the first call does that needs a GPU."""

    def __init__(self) -> None:
        self._is_warm = False

    def handle(self, method: str, payload: bytes) -> bytes:
        if method == "declarations":
            return b'{"kernels":[]}'
        if not self._is_warm:
            time.sleep(1.0)
            self._is_warm = True
        if method == "device":
            return b'{"device":"cuda","name":"GPU","versions":{}}'
        return b'{"environment":"the case was judged"}'


class KilledAtTheStart:
    """Is killed from outside by the first calls for its device: as many as the environment says, "0" for all."""

    def handle(self, method: str, payload: bytes) -> bytes:
        if method == "declarations":
            return b'{"kernels":[]}'
        if method != "device":
            return b'{"environment":"the case was judged"}'
        calls = Path(os.environ["ATTNFUZZ_TEST_CALLS"])
        calls.write_text(calls.read_text() + "." if calls.exists() else ".")
        if len(calls.read_text()) <= int(os.environ["ATTNFUZZ_TEST_KILLS"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return b'{"device":"cuda","name":"GPU","versions":{}}'


class CannotBeMade:
    """A service whose constructor raises."""

    def __init__(self) -> None:
        raise LookupError("no kernel to run")

    def handle(self, method: str, payload: bytes) -> bytes:
        return payload


class DiesWhenMade:
    """A service whose constructor ends the process."""

    def __init__(self) -> None:
        os._exit(7)

    def handle(self, method: str, payload: bytes) -> bytes:
        return payload


not_a_service = {"handle": None}
