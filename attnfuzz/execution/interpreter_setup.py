"""Triton's interpreter as attnfuzz runs it, where kernels are interpreted."""

from __future__ import annotations

import os

from attnfuzz.execution.interpreter import install_fast_patching, install_shortcuts
from attnfuzz.execution.interpreter_repairs import install_repairs

__all__ = ["set_up_interpreter"]


def set_up_interpreter() -> None:
    """Repair it and leave out needless work; nothing where ``TRITON_INTERPRET`` says that kernels are compiled."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        install_fast_patching()
        install_shortcuts()
        install_repairs()
