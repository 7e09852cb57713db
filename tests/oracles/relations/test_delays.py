"""What waits at random on a GPU, with stand-ins for the waits; real ones are in tests/gpu/test_delays.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.oracles.relations import schedules
from attnfuzz.oracles.relations.relation import run_on, unchanged
from attnfuzz.oracles.relations.schedules import DELAYS
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.trials.observation import Observation
from attnfuzz.trials.trial import Trial
from attnfuzz.triton_compat.launches import Delayed, with_delays
from attnfuzz.verdict import Failure
from tests.scripts import run_script

CASE = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(3,), scale=0.25, dtype="float32")
COMPILE = """
from types import SimpleNamespace
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnfuzz.triton_compat.launches import delayed
from tests.oracles.relations.racing_kernels import _merge

loaded, launched = [], []


def load_binary(name, cubin, shared, device):
    loaded.append(cubin)
    return 1, len(loaded), 32, 0, 1024


utils = SimpleNamespace(load_binary=load_binary, get_device_properties=lambda device: {"max_shared_mem": 1 << 20})
target = GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(SimpleNamespace(
    utils=utils, get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target,
    launcher_cls=lambda source, metadata: lambda x, y, z, stream, function, *rest: launched.append(function),
))
names = dict.fromkeys(("p_q", "p_k", "p_v", "p_acc", "p_total", "p_out", "p_lse"), "*fp32")
names |= {"p_lens": "*i32", "p_arrived": "*i32", "stride_s": "i32", "stride_t": "i32", "scale": "fp32"}
fixed = {"HEADS": 1, "SPLITS": 4, "D": 128, "HOW": "counts"}
signature = {name: names.get(name, "constexpr") for name in _merge.arg_names}
source = ASTSource(_merge, signature, {(_merge.arg_names.index(name),): value for name, value in fixed.items()})
compiled = triton.compile(source, target=target)
compiled[1, 4, 1]()
for _ in range(2):
    with delayed() as seen:
        compiled[1, 4, 1]()
    assert seen.launches == 1
compiled[1, 4, 1]()
plain, waiting = loaded
assert launched == [1, 2, 2, 1], launched
assert len(waiting) > len(plain) == len(compiled.asm["cubin"])
"""


def kernel(outputs: Sequence[float], **supports: Any) -> Kernel:
    """The right one, with these numbers added to the output of one call after the other."""
    (right,) = load_kernels("dense_eager")
    calls = iter(outputs)

    def altered(inputs: Any) -> Any:
        out, lse = right.function(inputs)
        return out + next(calls), lse

    changed = msgspec.structs.replace(right.declaration.supports, **supports)
    return Kernel(altered, right.declaration).declared(supports=changed)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where all that is launched waits, and where nothing else is going on."""

    @contextlib.contextmanager
    def delayed() -> Iterator[Delayed]:
        yield Delayed(launches=1)

    def elsewhere(trial: Trial) -> tuple[Observation, str]:
        return run_on(trial, unchanged(trial, "elsewhere")), "elsewhere"

    monkeypatch.setattr(schedules, "delayed", delayed)
    monkeypatch.setattr(schedules, "_elsewhere", elsewhere)


def objection(kernel: Kernel) -> Failure | None:
    return DELAYS.check(Trial(kernel, CASE, device="cpu", tolerance="bound"))


SMALL = 2.0**-20
"""Within the bounds."""


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([0, 0, 1, 0, 0, 0], "where its programs and warps wait at random: no program"),
        ([0, SMALL, 0, 0, 0, 0], "where they wait otherwise, but"),
        ([0, 0, 0, 0, 0, SMALL], "originally, but"),
    ],
    ids=["beyond its bound", "other bits", "elsewhere"],
)
def test_what_changes_as_other_things_wait_is_told(outputs: list[float], words: str) -> None:
    """A race would pass that no run at the usual pace shows."""
    failure = objection(kernel(outputs))
    assert failure is not None
    assert failure.oracle == "delays"
    assert words in failure.message
    assert failure.cause == ("" if "originally" in words else "race")


@pytest.mark.usefixtures("waits")
def test_right_kernels_and_those_that_promise_no_bits_are_not_accused() -> None:
    """A sum in another order, as a kernel declares it, would be told as a race; so would any kernel."""
    assert objection(kernel([0] * 6)) is None
    assert objection(kernel([0, 0, SMALL, 0, 0, SMALL], deterministic=False)) is None


def test_what_is_launched_meanwhile_is_a_twin_that_waits(tmp_path: Path) -> None:
    """No launch would wait, or all of them for good; or the PTX would be one that no assembler takes."""
    done = run_script(COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_each_access_to_global_memory_gets_a_wait() -> None:
    """A store that nothing delays is the one that a race is about; shared memory is nobody else's."""
    ptx = (
        ".visible .entry k(\n\t.param .u64 a\n)\n.reqntid 128\n{\n\tld.param.b64 %r, [a];\n"
        "\t@%p1 st.global.v4.b32 [ %rd1 + 0 ], { %r1 };\n\tld.global.L1::evict_last.b32 %r1, [ %rd1 ];\n"
        "\t@!%p3 atom.global.gpu.acq_rel.add.u32 %r8, [ %rd4 ], %r9;\n\tred.global.add.f32 [ %rd4 ], %f1;\n"
        "\t@%p3 st.shared.b32 [ %r10 ], %r8;\n\tret;\n}\n"
    )
    waiting = with_delays(ptx)
    assert waiting.count("nanosleep") == 5
    before = [
        waiting[:at].rpartition("nanosleep")[2].count("\n") for at in map(waiting.index, ("st.g", "ld.g", "red.g"))
    ]
    assert before == [2, 2, 2]
