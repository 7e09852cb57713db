"""What is said to CUDA's driver, and how it is understood when it refuses; `tests/gpu` talks to a real one."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from attnfuzz.memory import cuda_virtual
from attnfuzz.memory.cuda_virtual import CudaVirtualMemory, DriverError

NAMES = {2: b"CUDA_ERROR_OUT_OF_MEMORY", 1: b"CUDA_ERROR_INVALID_VALUE"}


class Driver:
    """Answers each call with a result, and notes it."""

    def __init__(self, result: int = 0, *, context: int = 1) -> None:
        self.result = result
        self.context = context
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._answer(name, *arguments)

    def _answer(self, name: str, *arguments: Any) -> int:
        self.calls.append((name, *arguments))
        if name == "cuCtxGetCurrent":
            arguments[0]._obj.value = self.context
        elif name == "cuMemGetAllocationGranularity":
            arguments[0]._obj.value = 1 << 21
        elif name == "cuGetErrorName":
            arguments[1]._obj.value = NAMES.get(arguments[0])
        return self.result


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    pretended = Driver()
    monkeypatch.setattr(cuda_virtual, "_load", lambda: pretended)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return pretended


def test_structs_are_those_of_the_header() -> None:
    """The driver would read a flag where a device is meant. Offsets as a C compiler lays them out on x86-64."""
    properties = cuda_virtual._AllocationProperties
    fields = ("type", "requestedHandleTypes", "location", "win32HandleMetaData", "allocFlags")
    assert [getattr(properties, field).offset for field in fields] == [0, 4, 8, 16, 24]
    flags = ("compressionType", "gpuDirectRDMACapable", "usage", "reserved")
    assert [getattr(cuda_virtual._AllocationFlags, field).offset for field in flags] == [0, 1, 2, 4]
    assert ctypes.sizeof(properties) == 32
    assert (cuda_virtual._Access.flags.offset, ctypes.sizeof(cuda_virtual._Access)) == (8, 12)


def test_calls_name_the_device_and_how_it_may_use_the_memory(driver: Driver) -> None:
    """Memory would be that of another GPU, or not be accessible."""
    memory = CudaVirtualMemory(3)
    assert memory.granule == 1 << 21
    memory.map(1 << 30, 1 << 21, 7)
    memory.allow(1 << 30, 1 << 21)
    (mapped, allowed) = driver.calls[-2:]
    assert mapped == ("cuMemMap", 1 << 30, 1 << 21, 0, 7, 0)
    name, address, nbytes, access, count = allowed
    assert (name, address, nbytes, count) == ("cuMemSetAccess", 1 << 30, 1 << 21, 1)
    assert (access._obj.location.type, access._obj.location.id, access._obj.flags) == (1, 3, 3)


def test_what_the_driver_refuses_is_an_error_with_its_name(driver: Driver) -> None:
    """Memory that is not there would be used."""
    memory = CudaVirtualMemory(0)
    driver.result = 1
    with pytest.raises(DriverError, match="cuMemUnmap failed with CUDA_ERROR_INVALID_VALUE"):
        memory.unmap(1 << 30, 1 << 21)
    driver.result = 12345
    with pytest.raises(DriverError, match="cuMemRelease failed with error 12345"):
        memory.release(7)
    driver.result = 2
    with pytest.raises(torch.OutOfMemoryError, match="cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY"):
        memory.create(1 << 21)


def test_a_thread_without_a_context_is_told_so(driver: Driver) -> None:
    """Each call would fail with an error that nobody can place."""
    driver.context = 0
    with pytest.raises(DriverError, match="no CUDA context is current"):
        CudaVirtualMemory(0)


def test_no_driver_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an old driver would end in a traceback of ctypes."""
    monkeypatch.setattr(cuda_virtual, "_LIBRARY", "libcuda-is-not-here.so")
    with pytest.raises(DriverError, match="has no virtual memory management"):
        cuda_virtual._load()
