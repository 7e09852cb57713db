"""Stand-ins for the program nvidia-smi: what it prints, put on the PATH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

UUIDS = ("GPU-1b2e6f5a-0000-4000-8000-00000000000a", "GPU-9c3d7f6b-0000-4000-8000-00000000000b")
TWO_GPUS = "".join(f"{uuid}, NVIDIA H100 80GB HBM3, 81559, 81000, Disabled\n" for uuid in UUIDS)

_SCRIPT = """#!/bin/sh
if [ "$1" = "-L" ]; then
cat <<'END'
{listing}END
else
cat <<'END'
{table}END
fi
{then}
"""


def install_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, folder: Path, table: str, *, listing: str = "", then: str = "exit 0"
) -> None:
    """Have ``nvidia-smi`` answer with these texts and end with the shell command ``then``; CUDA hides nothing."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    program = programs / "nvidia-smi"
    program.write_text(_SCRIPT.format(table=table, listing=listing, then=then), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
