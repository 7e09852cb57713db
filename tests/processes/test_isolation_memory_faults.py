"""What an executor died of, read from the stack of its signal handler."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.memory_faults import FaultMap, GuardedRegion, new_record, read_record, read_regions
from attnfuzz.isolation.outcomes import Died, Reply
from attnfuzz.isolation.zygote_client import Zygote

SERVICES = Path(__file__).with_name("fault_services.py")


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Zygote.start(service=f"{SERVICES}:Faulty", preload=("torch",)) as zygote, Executor(zygote) as started:
        yield started


def death(executor: Executor, method: str) -> Died:
    outcome = executor.call(method, b"null", timeout_s=20)
    assert isinstance(outcome, Died), outcome
    assert outcome.signal_name == "SIGSEGV"
    return outcome


@pytest.mark.parametrize(
    ("method", "access", "offset"),
    [("read past", "read", 12), ("write past", "write", 16), ("read before the block", "read", 12 - 4096 - 2)],
)
def test_address_and_access_are_known(executor: Executor, method: str, access: str, offset: int) -> None:
    """A finding would name the wrong element, or a read where the kernel wrote."""
    died = death(executor, method)
    assert died.fault is not None
    (region,) = died.fault.regions
    assert (died.fault.access, died.fault.address - region.start) == (access, offset)
    assert "fault_services.py" in died.output_tail  # faulthandler still has the stack to write on


def test_a_library_that_handles_the_signal_itself_hides_nothing(executor: Executor) -> None:
    """What lies behind a guard page would be a crash with the stack of the interpreter, as with apache-tvm-ffi's."""
    assert executor.call("a handler of its own", b"null", timeout_s=20) == Reply(b"null")
    died = death(executor, "read past")
    assert died.fault is not None
    assert died.fault.access == "read"
    assert "fault_services.py" in died.output_tail


def test_other_faults_are_told_as_well(executor: Executor) -> None:
    """A fault elsewhere would be taken for one beside a tensor."""
    null = death(executor, "null").fault
    assert null is not None
    assert (null.address, null.access) == (0, "read")
    written = death(executor, "write to read-only memory").fault
    assert written is not None
    assert written.access == "write"
    assert all(not region.low <= written.address < region.high for region in written.regions)


@pytest.mark.parametrize("method", ["no canonical address", "another thread"])
def test_what_is_not_known_is_not_made_up(executor: Executor, method: str) -> None:
    """An address that an earlier fault had, or none, would be reported."""
    assert death(executor, method).fault is None


def test_record_of_a_process_without_a_stack_is_empty() -> None:
    """The driver would take the zeros of an executor that never got that far for a fault."""
    record = new_record()
    assert record is not None
    assert read_record(record) is None
    os.close(record)


def test_executors_start_where_there_can_be_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the size of files is limited, on a full disk as a rule, no case could be judged at all."""

    def refuse(descriptor: int, length: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", refuse)
    with Zygote.start(service=f"{SERVICES}:Faulty", preload=()) as zygote, Executor(zygote) as executor:
        assert executor.call("read past", b"null", timeout_s=20) == Reply(b'"no map"')


REGION = GuardedRegion("k_cache", "float16", (2, 3), 2, 1 << 40, (1 << 40) + 12, (1 << 40) - 4096, (1 << 40) + 8192)


def test_regions_are_read_as_they_were_noted() -> None:
    """A fault would be blamed on another tensor, or on one of an earlier run."""
    memory = bytearray(b"\xaa" * 4096)
    fault_map = FaultMap(memoryview(memory))
    assert read_regions(bytes(memory)) == ()
    with fault_map.recording():
        fault_map.add(REGION)
        fault_map.add(REGION)
        assert read_regions(bytes(memory)) == (REGION, REGION)
    assert read_regions(bytes(memory)) == ()
    with fault_map.recording():
        fault_map.add(REGION)
        assert read_regions(bytes(memory)) == (REGION,)


def test_what_does_not_fit_is_left_out() -> None:
    """A kernel with thousands of workspaces would overwrite the stack that lies behind the map."""
    memory = bytearray(300)
    fault_map = FaultMap(memoryview(memory)[:200])
    for _ in range(10):
        fault_map.add(REGION)
    assert memory[200:] == bytes(100)
    assert set(read_regions(bytes(memory[:200]))) == {REGION}


def test_map_that_was_overwritten_says_nothing() -> None:
    """The driver would fail on what a stray write left of the map."""
    memory = bytearray(4096)
    FaultMap(memoryview(memory)).add(REGION)
    memory[2:6] = b"\xff\xfe\x00\x01"
    assert read_regions(bytes(memory)) == ()


def test_what_is_full_says_so_before_anything_is_left_out() -> None:
    """A tensor would lie at unmapped memory of which nobody is told: a fault there would be a crash."""
    memory = bytearray(1 << 12)
    fault_map = FaultMap(memoryview(memory))
    added = 0
    while not fault_map.is_full:
        fault_map.add(REGION)
        added += 1
        assert len(read_regions(bytes(memory))) == added
    assert added > 10
    fault_map.clear()
    assert not fault_map.is_full
