"""Attnfuzz for test suites: ``check`` for one case, ``fuzz`` for drawn ones, and the exception that both raise."""

from attnfuzz.testing.checking import check as check
from attnfuzz.testing.fuzzing import fuzz as fuzz
from attnfuzz.testing.kernel_failure import KernelFailure as KernelFailure
