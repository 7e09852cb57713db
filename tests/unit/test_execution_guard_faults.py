"""Faults beside guarded tensors in words."""

from __future__ import annotations

import pytest

from attnfuzz.execution.guard_faults import guard_failure
from attnfuzz.execution.outcomes import MemoryFault
from attnfuzz.memory.fault_map import GuardedRegion

Q = GuardedRegion("q", "float32", (4, 10), 4, 0x10F60, 0x11000, 0x0F000, 0x12000)
K_CACHE = GuardedRegion("k_cache", "float16", (3, 2), 2, 0x20000, 0x2000C, 0x1F000, 0x22000)


@pytest.mark.parametrize(
    ("address", "kind", "words"),
    [
        (0x11000, "read past q", "read past q (float32 [4, 10]): 1 element (4 bytes) past its end at k.py:3"),
        (0x11003, "read past q", "1 element (4 bytes) past its end"),
        (0x11004, "read past q", "2 elements (8 bytes) past its end"),
        (0x1FFFE, "read before k_cache", "1 element (2 bytes) before its start"),
        (0x1FFFD, "read before k_cache", "2 elements (4 bytes) before its start"),
        (0x1F000, "read before k_cache", "2048 elements (4096 bytes) before its start"),
        (0x21FFE, "read past k_cache", "4090 elements (8180 bytes) past its end"),
    ],
)
def test_tensor_side_and_distance(address: int, kind: str, words: str) -> None:
    """An engineer would look for the access at the wrong tensor or the wrong end."""
    failure = guard_failure(MemoryFault(address, "read", (Q, K_CACHE)), " at k.py:3, in load", ("k.py:3",))
    assert failure is not None
    assert (failure.oracle, failure.kind, failure.details) == ("guard_page", kind, ("k.py:3",))
    assert words in failure.message


def test_writes_are_called_so() -> None:
    """A write would be taken for a read, which does less harm."""
    failure = guard_failure(MemoryFault(0x11000, "write", (Q,)), "", ())
    assert failure is not None
    assert failure.kind == "write past q"
    assert failure.message == "the kernel wrote past q (float32 [4, 10]): 1 element (4 bytes) past its end"


@pytest.mark.parametrize("address", [0, 0x0EFFF, 0x12000, 0x1EFFF, 0x22000])
def test_faults_elsewhere_are_not_put_down_to_a_tensor(address: int) -> None:
    """A null pointer would be reported as an access beside some tensor."""
    assert guard_failure(MemoryFault(address, "read", (Q, K_CACHE)), "", ()) is None
