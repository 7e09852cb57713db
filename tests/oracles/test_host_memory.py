"""Freed memory of the host is kept."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from attnfuzz.trials.expectations import keep_freed_memory

def faults(nbytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        parts = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(4)]
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults(2 << 20)
keep_freed_memory()
faults(2 << 20)
print(given_back, faults(2 << 20))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have their own rules")
def test_freed_memory_is_not_asked_for_again() -> None:
    """Most of the time of an error bound would be page faults, as it was before."""
    output = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    given_back, kept = map(int, output.split())
    assert kept < given_back / 10
