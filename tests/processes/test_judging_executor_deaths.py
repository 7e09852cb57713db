"""Deaths and timeouts in the words of an engineer."""

from __future__ import annotations

from pathlib import Path

import pytest

import attnfuzz
from attnfuzz.isolation.memory_faults import GuardedRegion, MemoryFault
from attnfuzz.isolation.outcomes import DeathReason, Died, TimedOut
from attnfuzz.judging.executor_deaths import failure_of, guard_failure

PACKAGE = Path(attnfuzz.__file__).parent
STACK = f"""Fatal Python error: Segmentation fault

Current thread 0x00007f2b (most recent call first):
  File "/home/me/.venv/lib/python3.11/site-packages/triton/runtime/interpreter.py", line 40 in load
  File "/home/me/kernels.py", line 33 in walk_pages
  File "{PACKAGE}/kernels/paged/paged_decode.py", line 12 in paged_decode
  File "{PACKAGE}/oracles/observation.py", line 70 in observe
  File "/usr/lib/python3.11/threading.py", line 9 in run
"""


def died(status: int, name: str | None, reason: DeathReason, output: str = "") -> Died:
    return Died(status, name, output, reason)


def test_place_is_the_innermost_frame_of_the_kernel() -> None:
    """The place shown would be inside Triton or attnfuzz, where nobody can mend the kernel."""
    failure = failure_of(died(-11, "SIGSEGV", "signal", STACK))
    assert failure.message == "the kernel's process died of SIGSEGV at /home/me/kernels.py:33, in walk_pages"
    assert failure.details == (f"{PACKAGE}/kernels/paged/paged_decode.py:12, in paged_decode",)


@pytest.mark.parametrize(
    ("stack", "lines"),
    [
        (STACK, [("/home/me/kernels.py", 33)]),
        (STACK.replace("/home/me/kernels.py", "/site-packages/vllm/ops.py"), [("/site-packages/vllm/ops.py", 33)]),
        (STACK.replace("triton/runtime/interpreter.py", "torch/functional.py"), []),
        (STACK.partition("  File")[0], []),
    ],
)
def test_the_line_of_an_access_is_known_where_the_interpreter_made_it(stack: str, lines: list[tuple[str, int]]) -> None:
    """All bugs of a compiled extension would be told as one, since all of them show at the line that calls it."""
    sources = failure_of(died(-11, "SIGSEGV", "signal", stack)).sources
    assert [(one.file, one.line) for one in sources] == lines
    assert failure_of(died(-6, "SIGABRT", "signal", stack)).sources == ()


def test_projects_may_be_called_as_this_one_is() -> None:
    """A kernel in somebody's clone of this repository, or of their own attnfuzz, would be taken for the framework."""
    stack = f'''  File "/home/me/attnfuzz/my_kernels/decode.py", line 3 in load
  File "{PACKAGE}/declaration.py", line 12 in run
'''
    assert failure_of(died(-11, "SIGSEGV", "signal", stack)).details == (
        "/home/me/attnfuzz/my_kernels/decode.py:3, in load",
    )


def test_an_installed_engines_line_is_told_where_no_own_code_ran() -> None:
    """What engines ship lies beside torch and Triton, and a death there would have no place."""
    packages = "/home/me/.venv/lib/python3.11/site-packages"
    stack = f'''  File "{packages}/triton/runtime/jit.py", line 40 in run
  File "{packages}/vllm/attention/decode.py", line 7 in launch
  File "{PACKAGE}/adapters/vllm.py", line 12 in call
  File "/usr/lib/python3.11/threading.py", line 9 in run
'''
    assert failure_of(died(-11, "SIGSEGV", "signal", stack)).details == (
        f"{packages}/vllm/attention/decode.py:7, in launch",
    )


@pytest.mark.parametrize(
    ("end", "kind", "words"),
    [
        (died(-6, "SIGABRT", "signal"), "SIGABRT", "died of SIGABRT"),
        (died(-9, "SIGKILL", "signal"), "SIGKILL", "out of memory"),
        (died(-9, "SIGKILL", "memory"), "memory", "outgrew its memory limit"),
        (died(3, None, "exit"), "exit 3", "exit status 3"),
        (died(113, None, "channel"), "channel", "file descriptors"),
    ],
)
def test_kind_of_death(end: Died, kind: str, words: str) -> None:
    """Different deaths would share a signature, or not be understood."""
    failure = failure_of(end)
    assert (failure.oracle, failure.kind) == ("crash", kind)
    assert words in failure.message


def test_output_is_shown_where_there_is_no_stack() -> None:
    """What a C++ library printed before it aborted would be lost."""
    failure = failure_of(died(-6, "SIGABRT", "signal", "terminate called after throwing\n\n  what(): bad\n"))
    assert failure.details == ("terminate called after throwing", "  what(): bad")


@pytest.mark.parametrize("name", ["SIGABRT", "SIGSEGV"])
def test_a_gpu_error_that_aborts_is_the_one_that_is_raised_elsewhere(name: str) -> None:
    """One wild write would be two findings: torch aborts where it cannot raise, and which it is depends on timing."""
    said = "terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  CUDA error: "
    lost = failure_of(died(-6, name, "signal", f"{said}an illegal memory access was encountered\nCUDA kernel errors"))
    assert lost.kind == ("cuda:illegal memory access" if name == "SIGABRT" else "SIGSEGV")
    assert failure_of(died(-6, name, "signal", f"{said}out of memory\nCUDA kernel errors")).kind == name


def test_hang_says_where() -> None:
    """A hang would be reported without the line that loops."""
    failure = failure_of(TimedOut(2.5, STACK))
    assert (failure.oracle, failure.kind) == ("hang", "timeout")
    assert failure.message == (
        "the kernel did not finish within 2.5 s; it was at /home/me/kernels.py:33, in walk_pages"
    )
    assert failure_of(TimedOut(2.5, "Current thread\n")).details == ("Current thread",)
    assert failure_of(TimedOut(2.5, "")).message == "the kernel did not finish within 2.5 s"


def test_hang_on_the_gpu_is_told_from_one_on_the_host() -> None:
    """An engineer would be shown the stack of attnfuzz, which only waits for the kernel's launches."""
    stack = f"""Current thread 0x00007f2b (most recent call first):
  File "/home/me/.venv/lib/python3.11/site-packages/torch/cuda/__init__.py", line 1104 in synchronize
  File "{PACKAGE}/oracles/observation.py", line 72 in observe
"""
    failure = failure_of(TimedOut(2.5, stack))
    assert failure.message == "the kernel did not finish within 2.5 s; what it launched still runs on the GPU"
    assert failure.details == ()


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
