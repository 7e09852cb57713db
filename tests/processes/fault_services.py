"""A service whose calls end in memory faults; executors load it by this file's path."""

from __future__ import annotations

import ctypes
import mmap
import signal
import threading

import torch

from attnfuzz.isolation.memory_faults import installed
from attnfuzz.memory.guarded import GuardedArena, HostGuardedMemory


class Faulty:
    """`payload` is ignored; the method says what to do, with a guarded tensor of three int32 noted in the map."""

    def handle(self, method: str, payload: bytes) -> bytes:
        fault_map = installed()
        if fault_map is None:
            return b'"no map"'
        arena = GuardedArena(HostGuardedMemory(), fault_map, guard="end", poison="nan", prefill="nan")
        address = arena.tensor("noted", (3,), torch.int32, role="input").data_ptr()
        read_only = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ)
        match method:
            case "read past":
                ctypes.string_at(address + 12, 1)
            case "write past":
                ctypes.memset(address + 16, 0, 1)
            case "read before the block":
                ctypes.string_at(address + 12 - mmap.PAGESIZE - 2, 1)
            case "null":
                ctypes.string_at(0)
            case "no canonical address":
                ctypes.string_at(0xDEAD << 48, 1)
            case "a handler of its own":
                ctypes.CDLL(None).signal(int(signal.SIGSEGV), None)
            case "write to read-only memory":
                ctypes.memset(_address_of(read_only), 0, 1)
            case "another thread":
                thread = threading.Thread(target=ctypes.string_at, args=(address + 12, 1))
                thread.start()
                thread.join()
        return b"null"


def _address_of(memory: mmap.mmap) -> int:
    """Of a mapping that ctypes does not take because it is read-only."""
    return torch.frombuffer(memoryview(memory), dtype=torch.uint8).data_ptr()
