"""What a test suite uses: ``check`` for one case, ``fuzz`` for drawn ones, and the exception that both raise."""

from attnfuzz.checking import check as check
from attnfuzz.fuzzing import fuzz as fuzz
from attnfuzz.kernel_failure import KernelFailure as KernelFailure

__all__ = ["KernelFailure", "check", "fuzz"]
