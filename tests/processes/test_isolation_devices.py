"""Which GPUs there are, as CUDA_VISIBLE_DEVICES narrows them down, and how they are shared out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from attnfuzz.isolation import devices as likely_device
from attnfuzz.isolation import devices as nvidia_smi
from attnfuzz.isolation.devices import DeviceLease, Gpu, LeasePool, Listing, MigInstance, find_gpus, list_gpus
from tests.common.nvidia_smi_programs import TWO_GPUS, UUIDS, install_nvidia_smi

FIRST, SECOND = UUIDS
OTHER_KIND = TWO_GPUS + "GPU-77000000-0000-4000-8000-00000000000c, NVIDIA L4, 23034, 22000, [N/A]\n"
PARTS = ("MIG-5aa5c1e2-0000-5000-8000-000000000001", "MIG-5aa5c1e2-0000-5000-8000-000000000002")
MIG_TABLE = TWO_GPUS.replace("Disabled", "Enabled", 1)
MIG_LISTING = f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {FIRST})\n" + "".join(
    f"  MIG 3g.40gb     Device  {index}: (UUID: {uuid})\n" for index, uuid in enumerate(PARTS)
)


def ids() -> list[str]:
    return [gpu.id for gpu in find_gpus()]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_nvidia_smi(monkeypatch, tmp_path, TWO_GPUS)


@pytest.mark.usefixtures("two_gpus")
def test_all_gpus_with_their_memory() -> None:
    """GPUs would be left idle, or given more workers than their memory holds."""
    expected = [Gpu(uuid, "NVIDIA H100 80GB HBM3", 81559 << 20, 81000 << 20) for uuid in UUIDS]
    assert find_gpus() == expected


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("", []),
        (" ", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", ["0"]),
        ("1,0", ["1", "0"]),
        (" 1 , 0 ", ["1", "0"]),
        ("1gpu,0", ["1", "0"]),
        ("0,-1,1", ["0"]),
        ("0,7,1", ["0"]),
        ("0,,1", ["0"]),
        ("0,0", []),
        ("0,00", []),
        (SECOND, [SECOND]),
        (f"{SECOND},{FIRST}", [SECOND, FIRST]),
        ("GPU-9c3,GPU-1b2", [SECOND, FIRST]),
        (f"{FIRST},GPU-1b2", []),
        ("GPU-", []),
        (f"{FIRST},GPU-0000,{SECOND}", [FIRST]),
        (f"{FIRST},1", [FIRST]),
        (f"0,{SECOND}", ["0"]),
    ],
)
def test_visible_devices(visible: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker would run on a GPU that its user has hidden, or be pinned to one that CUDA refuses."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ids() == expected


@pytest.mark.usefixtures("two_gpus")
def test_memory_of_a_gpu_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind CUDA_VISIBLE_DEVICES, a GPU's memory would not be known, though all GPUs are alike."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert find_gpus() == [Gpu("1", "NVIDIA H100 80GB HBM3", 81559 << 20, 81000 << 20)]


def test_numbers_of_unequal_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small GPU would be taken for a large one: CUDA puts the fastest first, nvidia-smi goes by bus."""
    install_nvidia_smi(monkeypatch, tmp_path, OTHER_KIND)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert find_gpus() == [Gpu("2"), Gpu("0")]


@pytest.mark.parametrize(
    ("visible", "expected"), [("1,0", ["1", "0"]), ("GPU-9c3,MIG-5aa", ["GPU-9c3", "MIG-5aa"]), (None, [])]
)
def test_without_nvidia_smi(
    visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the program is missing, as in slim containers, the GPUs that a scheduler has assigned would be ignored."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ids() == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [*PARTS, SECOND]),
        (PARTS[1], [PARTS[1]]),
        (f"{PARTS[0]},{PARTS[0]}", []),
        (f"MIG-{FIRST}/1/0", [f"MIG-{FIRST}/1/0"]),
        (FIRST, [FIRST]),
        ("0", ["0"]),
    ],
    ids=["all", "one part", "one twice", "old name", "the whole", "number"],
)
def test_divided_gpu(visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All workers would share the first part of a GPU that is divided by MIG."""
    install_nvidia_smi(monkeypatch, tmp_path, MIG_TABLE, listing=MIG_LISTING)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ids() == expected


def test_part_of_a_gpu_has_the_memory_of_its_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A part would get as many workers as the memory of the whole GPU holds."""
    install_nvidia_smi(monkeypatch, tmp_path, MIG_TABLE, listing=MIG_LISTING)
    assert find_gpus()[0] == Gpu(PARTS[0], "NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40 << 30, 40 << 30)


def test_lease_hides_all_other_gpus() -> None:
    """A pinned process would use the first GPU all the same."""
    assert DeviceLease(SECOND).environment == {"CUDA_VISIBLE_DEVICES": SECOND}


def taken(pool: LeasePool, holder: str) -> str:
    lease = pool.take(holder)
    assert lease is not None
    return lease.device_id


def test_leases_are_even() -> None:
    """One GPU would be crowded while another is idle."""
    pool = LeasePool(["0", "1", "2"])
    devices = [taken(pool, f"gw{index}") for index in range(7)]
    assert devices[:3] == ["0", "1", "2"]
    assert sorted(Counter(devices).values()) == [2, 2, 3]


def test_lease_is_kept() -> None:
    """A worker would move to another GPU, where nothing is compiled or placed, each time it asks."""
    pool = LeasePool(["0", "1"])
    assert [taken(pool, holder) for holder in ("gw0", "gw1", "gw0", "gw1")] == ["0", "1", "0", "1"]


def test_lease_that_is_given_back_goes_to_the_next() -> None:
    """The replacement of a crashed worker would crowd a GPU, and the crashed one's would stay empty."""
    pool = LeasePool(["0", "1"])
    for index in range(4):
        pool.take(f"gw{index}")
    pool.give_back("gw1")
    pool.give_back("never had one")
    assert taken(pool, "gw4") == "1"


@pytest.mark.parametrize(
    ("wanted", "has_driver", "visible", "device"),
    [
        ("cpu", True, None, "cpu"),
        ("cuda", False, None, "cuda"),
        ("auto", True, None, "cuda"),
        ("auto", True, "0,1", "cuda"),
        ("auto", True, "", "cpu"),
        ("auto", True, "-1", "cpu"),
        ("auto", False, None, "cpu"),
    ],
)
def test_a_gpu_is_expected_where_there_is_a_driver_and_nobody_hides_it(
    wanted: str,
    has_driver: bool,
    visible: str | None,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels would be interpreted on a machine with a GPU, or a process wait for a driver that is not there."""
    monkeypatch.setattr(likely_device, "_DRIVER_FILES", (str(tmp_path if has_driver else tmp_path / "none"),))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert likely_device.likely_device(wanted) == device


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
    assert list_gpus() == []  # it would name two at its end
