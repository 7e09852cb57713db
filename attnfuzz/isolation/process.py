"""Calls of the operating system that the isolation layer makes, each guarded here and nowhere else."""

import contextlib
import ctypes
import errno
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
"""Unit of the times in /proc/PID/stat."""

# include/uapi/linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOKS = 10
_BETWEEN_LOOKS_S = 0.001
"""Between looks at a process that may be about to stop."""


def _prctl(option: int, value: int) -> None:
    """prctl(2); does nothing where the system has no such call, so that other clean-up paths remain."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed: {os.strerror(ctypes.get_errno())}")


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel kill this process when the thread that forked it ends.

    With `parent_pid`, also end now if that parent is gone already: the request comes too late to notice its death.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def wake_with_parent() -> None:
    """Have the kernel let this process go on, should it be stopped, when the thread that started it ends.

    And when each does that takes that one's place as its parent, up to the last thread of the process that started it.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that none can escape by starting a new session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def disable_core_dumps() -> None:
    """Write no core file: one of a process with torch loaded takes gigabytes and seconds.

    One byte rather than none, because Linux also skips a core-dump *handler* only at that value (core(5)).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    soft = 1 if hard == resource.RLIM_INFINITY else min(1, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def prefer_as_oom_victim() -> None:
    """When the machine runs out of memory, have the executor killed and not the driver."""
    with contextlib.suppress(OSError):  # the file is absent or read-only in some containers
        Path("/proc/self/oom_score_adj").write_text("1000")


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process in bytes, shared pages included; None if it is gone or /proc is not there."""
    resident, _ = _resident_and_shared(pid)
    return resident


def private_bytes(pid: int) -> int:
    """Resident memory of a process in bytes, without pages of files; 0 if it is gone."""
    resident, shared = _resident_and_shared(pid)
    return 0 if resident is None else resident - shared


def _resident_and_shared(pid: int) -> tuple[int | None, int]:
    """Bytes of memory, and of pages of files among it (proc(5)); None for a process that is gone."""
    try:
        resident, shared = map(int, Path(f"/proc/{pid}/statm").read_bytes().split()[1:3])
    except (OSError, ValueError):
        return None, 0
    return resident * resource.getpagesize(), shared * resource.getpagesize()


def descendant_bytes(pid: int) -> int:
    """Memory of all that a process has started, in bytes, without pages of files: those are shared with many.

    0 where the kernel does not list the children of a process; looking for them among all processes takes too long.
    """
    return sum(private_bytes(child) + descendant_bytes(child) for child in _listed_children(pid))


def _listed_children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended, or the kernel does not list children
                children += map(int, (task / "children").read_bytes().split())
    return children


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """One process at one moment.

    ``cpu_ticks`` is what it and the children that it has waited for have computed, ``start_ticks`` when it started
    after the machine did, both in clock ticks. ``has_ended``: it is a zombie. ``name``: that of the program, of which
    Linux keeps 15 bytes.
    """

    name: str
    parent: int
    has_ended: bool
    cpu_ticks: int
    start_ticks: int


def all_processes() -> dict[int, ProcessSeen]:
    """Every process that can be seen, by process ID; empty where there is no /proc.

    Takes milliseconds, and finds a process's children on kernels too that do not list them.
    """
    seen: dict[int, ProcessSeen] = {}
    with contextlib.suppress(OSError), os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal() and (found := _name_and_stat(Path(entry.path))) is not None:
                name, fields = found
                cpu_ticks = sum(map(int, fields[11:15]))  # proc(5): utime, stime, cutime, cstime
                seen[int(entry.name)] = ProcessSeen(name, int(fields[1]), fields[0] == b"Z", cpu_ticks, int(fields[19]))
    return seen


def descendants(processes: Mapping[int, ProcessSeen], pid: int) -> list[int]:
    """Process IDs of all that ``pid`` has started, and what those have, that still run."""
    children = [child for child, seen in processes.items() if seen.parent == pid and child != pid]
    found = [child for child in children if not processes[child].has_ended]
    return found + [one for child in children for one in descendants(processes, child)]


def now_in_ticks() -> int:
    """The time on the clock of `ProcessSeen.start_ticks`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_PER_S)


def waits_for_file_lock(pid: int) -> bool:
    """Whether a process is blocked in flock(2) or fcntl(2) until another lets go of a file; False if not known."""
    try:
        locks = Path("/proc/locks").read_bytes().splitlines()
    except OSError:
        return False
    waiting = (line.split() for line in locks if b"->" in line)
    return any(len(fields) > 5 and fields[5] == b"%d" % pid for fields in waiting)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that could be had without swapping: of the machine, or of the container if that is less; None unknown."""
    known = [value for value in (_available_to_machine(root), _available_to_container(root)) if value is not None]
    return min(known, default=None)


def _available_to_machine(root: Path) -> int | None:
    for line in _text_of(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _available_to_container(root: Path) -> int | None:
    """As control groups of version 2 or 1 bound it, seen from inside."""
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        bound, used = (_text_of(root / "sys/fs/cgroup" / name).strip() for name in (limit, usage))
        if bound.isdecimal() and used.isdecimal():
            return max(0, int(bound) - int(used))
    return None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def child_pids(parent_pid: int) -> list[int]:
    """Process IDs of a process's children, zombies included (proc(5); /proc/*/children is not in every kernel)."""
    return [pid for pid, seen in all_processes().items() if seen.parent == parent_pid]


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; with its ID it names a process for good. None if gone."""
    fields = _stat_fields(Path(f"/proc/{pid}"))
    return int(fields[19]) if fields else None


def cpu_wait_s(pid: int) -> float:
    """Seconds for which a process's first thread was ready to run and no CPU was free; 0 if that is not known."""
    try:
        fields = Path(f"/proc/{pid}/schedstat").read_bytes().split()
    except OSError:
        return 0.0
    return int(fields[1]) * 1e-9 if len(fields) > 1 else 0.0


def cpu_s(pid: int) -> float:
    """Seconds that a process has computed, with the children that it has waited for; 0 if it is gone."""
    fields = _stat_fields(Path(f"/proc/{pid}"))
    return sum(map(int, fields[11:15])) / TICKS_PER_S if fields else 0.0


def is_blocked(pid: int) -> bool:
    """Whether a process's first thread waits uninterruptibly within the kernel: for a disk, a driver's lock."""
    fields = _stat_fields(Path(f"/proc/{pid}"))
    return bool(fields) and fields[0] == b"D"


def is_stopped(pid: int) -> bool:
    """Whether a process stands still until somebody sends it SIGCONT, or is about to; not one that a debugger looks at.

    A process that sleeps takes a moment to take in a SIGSTOP: it is pending so long (proc(5), ``ShdPnd``), and then the
    process runs until it stands. So one that runs is looked at again, for some milliseconds.
    """
    for _ in range(_LOOKS):
        fields = _stat_fields(Path(f"/proc/{pid}"))
        if not fields or fields[0] == b"T":
            return bool(fields)
        if fields[0] != b"R" or _is_stop_pending(pid):
            break
        time.sleep(_BETWEEN_LOOKS_S)
    return _is_stop_pending(pid)


def _is_stop_pending(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:  # it has gone
        return False
    pending = next((line.split()[1] for line in status.splitlines() if line.startswith(b"ShdPnd:")), b"0")
    return bool(int(pending, 16) >> (signal.SIGSTOP - 1) & 1)


def peer_of(connection: socket.socket) -> tuple[int, int | None]:
    """The process that listened where ``connection`` was made, a Unix domain socket: its ID, and when it started."""
    size = struct.calcsize("3i")  # struct ucred: process, user, group
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, start_time(pid)


def signal_process(pid: int, started: int | None, number: int) -> None:
    """Send a signal to the process that had this ID and started then, if it still lives."""
    if started is not None and start_time(pid) == started:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended, or is somebody else's
            os.kill(pid, number)


def ended_child() -> int | None:
    """The process ID of a child that has ended, still reserved for it until waitpid is called."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid


def _name_and_stat(entry: Path) -> tuple[str, list[bytes]] | None:
    """Name of the program, and fields of /proc/PID/stat from the third, the state, on; None if it has ended."""
    try:
        stat = (entry / "stat").read_bytes()
    except OSError:
        return None
    head, _, rest = stat.rpartition(b")")  # the name before may itself hold brackets and blanks
    return head.partition(b"(")[2].decode(errors="replace"), rest.split()


def _stat_fields(entry: Path) -> list[bytes]:
    """The fields alone; none if the process has ended."""
    found = _name_and_stat(entry)
    return [] if found is None else found[1]


def why_no_proc() -> str | None:
    """Why nothing can be judged where /proc is not mounted, one sentence with the remedy; None where it is.

    Without it torch cannot even convert a dtype on the CPU, which would look like the kernel's mistake.
    """
    if not sys.platform.startswith("linux") or resident_bytes(os.getpid()) is not None:
        return None
    return "/proc is not mounted here, and torch cannot work without it; mount it: mount -t proc proc /proc"


def why_starved(error: BaseException) -> str | None:
    """A sentence with the remedy for an error that means that no process or thread can be had; None for others."""
    no_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)  # CPython has no better type
    if not no_thread and not (isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.ENOMEM)):
        return None
    return f"no process or thread can be started ({error}); free process IDs or memory, or raise their limits"


def kill_group(pid: int) -> None:
    """SIGKILL the process group led by `pid`, and `pid` itself in case it has not made itself a leader yet."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or leads no group
            send(pid, signal.SIGKILL)
