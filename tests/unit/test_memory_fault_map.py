"""The map of guarded tensors that outlives the process which wrote it."""

from __future__ import annotations

from attnfuzz.memory.fault_map import FaultMap, GuardedRegion, read_regions

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
