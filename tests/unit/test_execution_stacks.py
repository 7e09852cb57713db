"""Stacks as they are shown."""

from attnfuzz.execution.stacks import strip_framework_frames

STACK = """what the kernel printed
Fatal Python error: Segmentation fault

Current thread 0x00007fa2f58a4b80 (most recent call first):
  File "/home/me/kernels.py", line 5 in launch
  File "/site-packages/attnfuzz/declaration.py", line 9 in run
  File "/site-packages/attnfuzz/execution/serve.py", line 88 in _answer
  File "/site-packages/attnfuzz/execution/nursery.py", line 147 in _become_executor
  File "/site-packages/attnfuzz/execution/zygote.py", line 95 in main
  File "<frozen runpy>", line 88 in _run_code

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""


def test_only_frames_of_the_isolation_layer_are_left_out() -> None:
    """The kernel's frames would drown among the executor's, or be left out with them."""
    assert strip_framework_frames(STACK) == (
        "what the kernel printed\nFatal Python error: Segmentation fault\n\n"
        "Current thread 0x00007fa2f58a4b80 (most recent call first):\n"
        '  File "/home/me/kernels.py", line 5 in launch\n'
        '  File "/site-packages/attnfuzz/declaration.py", line 9 in run\n\n'
    )
