"""The zygote: a process that has imported what executors need and forks them on request.

Run as `python -m attnfuzz.execution.zygote SOCKET --service module:attribute`. Forking a process that has torch loaded
takes milliseconds, importing torch seconds. It never initialises CUDA, which does not survive a fork, so each executor
may still choose its device. It lives as long as its standard input is open: the driver holds the other end.
"""

import argparse
import importlib
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from attnfuzz.execution.compiler_key import compute_compiler_key
from attnfuzz.execution.nursery import Nursery
from attnfuzz.execution.service import load_service

__all__ = ["READY", "main", "prepare_environment"]

READY = b"ready\n"
"""Written to the original standard output once connections are accepted."""

_LIFELINE = 0


def prepare_environment(device: str) -> None:
    """Set what torch and Triton read from the environment when they are imported."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch.cuda.is_available() must not initialise CUDA here
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        os.environ.pop("TRITON_INTERPRET", None)


def _preload(modules: Sequence[str]) -> None:
    """Import `modules`, as far as they are installed: Triton is not, on some systems."""
    for name in modules:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
        if name == "torch":
            _use_one_thread()


def _load(preload: Sequence[str], service: str) -> object:
    """The service. Meanwhile Triton hashes its compiler, for all executors: hundreds of megabytes."""
    with ThreadPoolExecutor(1) as beside:  # which has ended before anything is forked
        key = beside.submit(compute_compiler_key)
        _preload(preload)
        loaded = load_service(service)
    key.result()
    return loaded


def _use_one_thread() -> None:
    """An OpenMP pool started before a fork would hang the child's first parallel loop, so none may start here."""
    import torch

    torch.set_num_threads(1)


def _check_cuda_untouched() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(
            "importing the service initialised CUDA in the zygote, which does not survive a fork; "
            "move calls to torch.cuda from module level into functions"
        )


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="attnfuzz.execution.zygote", description=__doc__)
    parser.add_argument("socket", type=Path, help="Unix domain socket to listen on")
    parser.add_argument("--service", required=True, help="module:attribute or path/to/file.py:attribute")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--preload", action="append", default=[], metavar="MODULE", help="import before forking")
    return parser.parse_args(arguments)


def _exit_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as an exception, so that executors are killed on the way


def main(arguments: Sequence[str] | None = None) -> None:
    """Import, listen, fork; returns when standard input ends."""
    options = _parse_arguments(arguments)
    ready = os.dup(1)
    os.dup2(2, 1)  # what imports print must not be taken for the ready message
    _exit_on_sigterm()
    prepare_environment(options.device)
    loaded = _load(options.preload, options.service)
    _check_cuda_untouched()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(options.socket))
        try:
            listener.listen()
            os.write(ready, READY)
            os.close(ready)
            Nursery(listener, _LIFELINE, loaded).run()
        finally:
            with suppress(OSError):  # the driver may have removed them first
                options.socket.unlink()
                options.socket.parent.rmdir()


if __name__ == "__main__":
    main()
