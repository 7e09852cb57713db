"""What a user reads of an error that nobody expected."""

from __future__ import annotations

import pytest

from attnfuzz.internal_errors import gpu_memory_ran_out, in_one_sentence

TORCH_ERROR = """Traceback (most recent call last):
  File "worker.py", line 3, in main
    x = torch.empty(1, device="cuda")
        ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
torch.AcceleratorError: CUDA error: {words}
Search for `{name}' in https://docs.nvidia.com/cuda/ for more information.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


def test_the_sentence_is_the_error_and_not_the_advice_that_torch_appends() -> None:
    """Every CUDA error would be told as "Compile with `TORCH_USE_CUDA_DSA`"."""
    text = TORCH_ERROR.format(words="invalid argument", name="cudaErrorInvalidValue")
    assert in_one_sentence(text).startswith(
        "attnfuzz itself failed: torch.AcceleratorError: CUDA error: invalid argument"
    )


def test_a_bare_error_of_one_line_is_the_sentence() -> None:
    """A file would be named that says no more."""
    assert in_one_sentence("no space left\n") == "no space left"


@pytest.mark.parametrize(
    "text",
    [
        TORCH_ERROR.format(words="out of memory", name="cudaErrorMemoryAllocation"),
        "the service raised in the executor:\n" + TORCH_ERROR.format(words="out of memory", name="cudaErrorMemory..."),
        "paged_naive on {} cannot be judged: CUDA out of memory. Tried to allocate 126.00 MiB. GPU 0 has a total ...",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "HIP out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_a_full_gpu_is_told_as_such(text: str) -> None:
    """A user would be asked to report as a bug of attnfuzz what somebody else's process does to the GPU."""
    assert gpu_memory_ran_out(text)
    sentence = in_one_sentence(text)
    assert sentence.startswith("the GPU has no memory left (")
    assert "report" not in sentence
    assert "\n" not in sentence


def test_other_errors_of_a_gpu_are_not_taken_for_a_full_one() -> None:
    """A lost GPU would be told as one without memory."""
    assert not gpu_memory_ran_out("CUDA error: an illegal memory access was encountered")
