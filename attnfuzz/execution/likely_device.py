"""What device there seems to be, without loading a driver into this process. Torch-free."""

import os
from pathlib import Path
from typing import Literal

__all__ = ["Device", "likely_device"]

Device = Literal["cpu", "cuda"]

_DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")


def likely_device(wanted: str) -> Device:
    """What a zygote is started for; "auto" looks for a driver's files."""
    if wanted == "cuda":
        return "cuda"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    has_driver = any(Path(file).exists() for file in _DRIVER_FILES)
    return "cuda" if wanted == "auto" and has_driver and not hidden else "cpu"
