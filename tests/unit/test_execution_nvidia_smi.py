"""What nvidia-smi prints, read; and what becomes of it when it does not answer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from attnfuzz.execution import nvidia_smi
from attnfuzz.execution.nvidia_smi import Listing, MigInstance, list_gpus
from tests.unit.nvidia_smi_programs import TWO_GPUS, UUIDS, install_nvidia_smi

MIB, GIB = 1 << 20, 1 << 30
H100 = "NVIDIA H100 80GB HBM3"
TWO = [Listing(uuid, H100, 81559 * MIB, 81000 * MIB) for uuid in UUIDS]


def test_table_of_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Workers would be pinned to GPUs that are not there, or to fewer than there are."""
    install_nvidia_smi(monkeypatch, tmp_path, TWO_GPUS)
    assert list_gpus() == TWO


def test_warnings_between_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with a damaged inforom, of which nvidia-smi warns with exit status 14, would seem to have no GPU."""
    table = f"WARNING: infoROM is corrupted at gpu 0000:1B:00.0\n{TWO_GPUS}\n"
    install_nvidia_smi(monkeypatch, tmp_path, table, then="exit 14")
    assert list_gpus() == TWO


def test_shared_memory_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU without memory of its own would end the campaign with a ValueError."""
    install_nvidia_smi(monkeypatch, tmp_path, f"{UUIDS[0]}, NVIDIA GB10, [N/A], [N/A], [N/A]\n")
    assert list_gpus() == [Listing(UUIDS[0], "NVIDIA GB10", None, None)]


def test_mig_instances(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A divided GPU would count as one, whose UUID shows CUDA only its first part."""
    listing = (
        f"GPU 0: {H100} (UUID: {UUIDS[0]})\n"
        f"GPU 1: {H100} (UUID: {UUIDS[1]})\n"
        "  MIG 1g.10gb     Device  0: (UUID: MIG-5aa5c1e2-0000-5000-8000-000000000001)\n"
        "  MIG 3g.40gb+me  Device  1: (UUID: MIG-5aa5c1e2-0000-5000-8000-000000000002)\n"
    )
    head, _, tail = TWO_GPUS.rpartition("Disabled")
    install_nvidia_smi(monkeypatch, tmp_path, f"{head}Enabled{tail}", listing=listing)
    whole, divided = list_gpus()
    assert whole == TWO[0]
    assert divided.instances == (
        MigInstance("MIG-5aa5c1e2-0000-5000-8000-000000000001", "1g.10gb"),
        MigInstance("MIG-5aa5c1e2-0000-5000-8000-000000000002", "3g.40gb+me"),
    )
    assert [part.memory_bytes for part in divided.instances] == [10 * GIB, 40 * GIB]
    assert MigInstance("MIG-5aa5c1e2", "graphics").memory_bytes is None


@pytest.mark.parametrize(
    "table",
    ["", "No devices were found\n", 'Field "mig.mode.current" is not a valid field to query.\n'],
    ids=["silent", "no devices", "old driver"],
)
def test_nothing_listed(table: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sentence of nvidia-smi's would be taken for a GPU."""
    install_nvidia_smi(monkeypatch, tmp_path, table, then="exit 6")
    assert list_gpus() == []


def test_absent_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without the NVIDIA driver's tools could not run a campaign."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus() == []


def test_program_that_cannot_be_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file for another machine, as a container may have it, would end the campaign with an OSError."""
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF of another machine")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus() == []


def test_program_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU that hangs would hang the command before it has said a word."""
    install_nvidia_smi(monkeypatch, tmp_path, TWO_GPUS, then="exec sleep 60")
    monkeypatch.setattr(nvidia_smi, "_TIMEOUT_S", 0.2)
    started = time.monotonic()
    assert list_gpus() == []
    assert time.monotonic() - started < 10
