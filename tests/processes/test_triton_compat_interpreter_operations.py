"""Writing down what Triton's interpreter computes: guarded, and gone afterwards."""

from __future__ import annotations

import pytest

from tests.scripts import run_script

RECORD = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton.runtime.interpreter as runtime
from attnfuzz.triton_compat.interpreter_operations import recorded
from attnfuzz.triton_compat.interpreter import set_up_interpreter
from attnfuzz.kernels.dense.launch import dense_decode

set_up_interpreter()
classes = [runtime.InterpreterBuilder, runtime.ReduceOps, runtime.ScanOps, runtime.GridExecutor]
before = [dict(vars(one)) for one in classes]
tensors = [torch.rand(2, 2, 16).half(), *(torch.rand(2, 20, 2, 16).half() for _ in "kv")]
inputs = [*tensors, torch.tensor([20, 3], dtype=torch.int32)]
plain = [tensor.clone() for tensor in dense_decode(*inputs, 0.25, tile=16)]
with recorded() as found:
    seen = dense_decode(*inputs, 0.25, tile=16)
assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True)), "recording changes results"
assert [dict(vars(one)) for one in classes] == before, "something stays replaced"
count = len(found)
assert {"load", "exp", "sum", "max", "store"} <= {one.kind for one in found}
files = {one.place[0] for one in found if one.place is not None}
assert files and not any("triton/language" in file or "triton/runtime" in file for file in files), files
dense_decode(*inputs, 0.25, tile=16)
assert len(found) == count, "it goes on after the run"
with recorded() as again:
    for _ in range(2):
        dense_decode(*inputs, 0.25, tile=16)
assert len(again) < 2.1 * count, "operations of other programs and rounds are others"
try:
    with recorded():
        raise KeyError("of a kernel")
except KeyError:
    pass
assert [dict(vars(one)) for one in classes] == before, "an error leaves something replaced"
"""

UNKNOWN = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton.runtime.interpreter as runtime
from attnfuzz.triton_compat.interpreter_operations import recorded
from attnfuzz.kernels.dense.launch import dense_decode

{change}
before = dict(vars(runtime.InterpreterBuilder))
with recorded() as found:
    assert dict(vars(runtime.InterpreterBuilder)) == before, "an unknown interpreter is changed"
assert found == []
"""
CHANGES = (
    "del runtime.ScanOps",
    "del runtime.InterpreterBuilder.create_fmul",
    "runtime.ReduceOps.apply = lambda self, input, axis: None",
    "runtime.TensorHandle = type('TensorHandle', (), {'__init__': lambda self, numbers, type: None})",
)


def run(script: str) -> None:
    done = run_script(script)
    assert done.returncode == 0, done.stderr


def test_a_run_is_written_down_and_nothing_stays() -> None:
    """Later cases would be slower or give other results, or lines would be those of Triton's own files."""
    run(RECORD)


@pytest.mark.night
def test_an_unknown_interpreter_is_left_alone() -> None:
    """A newer Triton would end each explanation in an error."""
    run("\n".join(UNKNOWN.format(change=change) for change in CHANGES[:1]))
    for change in CHANGES[1:]:
        run(UNKNOWN.format(change=change))
