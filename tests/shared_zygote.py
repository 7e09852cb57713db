"""One zygote for all runners of a test run: importing torch and triton for each takes longer than most tests."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from attnfuzz.isolation.devices import Device
from attnfuzz.isolation.serve import Service, instantiate_service, load_service
from attnfuzz.isolation.zygote_client import DEFAULT_PRELOAD, Zygote
from attnfuzz.judging.runner import SERVICE, Runner

_NOT_FOR_EXECUTORS = ("PYTEST_", "PY_COLORS", "TORCHINDUCTOR_CACHE_DIR", "GITHUB_", "BUILDKITE", "CI", "STAND_IN_")
_OF_THE_CPU = ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET")
"""What a zygote for the CPU sets itself."""
_HANDED_ON = "PATH"
"""Read when a program is started, and not by what a zygote imports: each runner's own executor gets its own."""


class SharedZygote(Zygote):
    """Goes on when a runner that it was lent to is done; executors end when their drivers hang up."""

    def close(self) -> None:
        """Nothing."""

    @classmethod
    @contextmanager
    def for_all(cls) -> Iterator[None]:
        """Lent to each runner that would start one for the CPU, in the environment that tests start in."""
        start_one, shared, environment, path = Runner._start_zygote, list[SharedZygote](), _environment(), _path()
        preload = [*DEFAULT_PRELOAD, SERVICE.partition(":")[0]]

        def start(runner: Runner, device: Device) -> Zygote:
            if device != "cpu" or runner._python is not None or _environment() != environment:
                return start_one(runner, device)
            if _path() != path:
                runner._executor_environment.setdefault(_HANDED_ON, _path())
            if not shared:
                shared.append(cls.start("cpu", service=f"{__name__}:service", preload=preload, max_restarts=20))
            return shared[0]

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Runner, "_start_zygote", start)
            yield
        for one in shared:
            Zygote.close(one)


def _environment() -> dict[str, str]:
    """All but what pytest changes with every test, torch._inductor by itself, and a CI system for commands."""
    others = (*_NOT_FOR_EXECUTORS, *_OF_THE_CPU, _HANDED_ON)
    return {name: value for name, value in os.environ.items() if not name.startswith(others)}


def _path() -> str:
    return os.environ.get(_HANDED_ON, "")


def service() -> Service:
    """In the executor: change to the working directory of the driver, as if that had started the zygote."""
    os.chdir(f"/proc/{_driver()}/cwd")
    return instantiate_service(load_service(SERVICE))


def _driver() -> int:
    """The process that has made the one socket of this executor, its channel."""
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and str(link.readlink()).startswith("socket:"):
            with socket.socket(fileno=os.dup(int(link.name))) as channel:
                pid, *_ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                return int(pid)
    raise OSError("this executor has no channel")
