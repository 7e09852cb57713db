"""Kernels whose programs count on the order in which Triton's interpreter runs them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.relations.schedules import PROGRAM_ORDER
from attnfuzz.problems.recipes import Values
from tests.sample_cases import dense_case
from tests.scripts import run_script

from .objections import objection

KERNELS = Path(__file__).with_name("racing_kernels.py")
CASE = dense_case(seq_lens=(5, 0), dtype="float32", values=Values(keys="normal", values="normal"))


def kernel(name: str) -> Kernel:
    (found,) = load_kernels(f"{KERNELS}:{name}")
    return found


@pytest.mark.parametrize(
    ("name", "line", "other_line"),
    [
        ("added_without_atomics", "tl.store(p_acc, tl.load(p_acc) + acc)", ""),
        ("zeroed_by_the_first_program", "tl.store(p_acc, tl.zeros([D], tl.float32))", "tl.atomic_add(p_acc, acc)"),
        ("counts_before_it_stores", "tl.store(p_acc + at * D + i_d, acc)", "acc += tl.load(p_acc +"),
        ("last_program_reads_partials", "tl.store(p_acc + at * D + i_d, acc)", "acc += tl.load(p_acc +"),
        (
            "cleared_by_other_programs",
            "tl.store(p_out + i_row * D + i_d, tl.z",
            "tl.store(p_out + i_row * D + i_d, acc /",
        ),
    ],
)
def test_programs_that_count_on_their_order_are_found(name: str, line: str, other_line: str) -> None:
    """A race passes in the interpreter, where a program finds all that those before it have written."""
    failure = objection("program_order", kernel(name), CASE)
    assert failure is not None
    assert failure.cause == "race"
    assert "may count on when another one runs" in failure.message
    source = KERNELS.read_text(encoding="utf-8").splitlines()
    (told,) = (one for one in failure.details if one.startswith("program "))
    for text in (line, other_line or line):
        at = next(number for number, one in enumerate(source, 1) if text in one)
        assert f"{KERNELS.name}:{at}" in told


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated:UserWarning")
def test_block_pointers_are_accesses_too() -> None:
    """A right kernel would be told to raise an error, which looking at the masks of its block pointers raises."""
    found = judge(kernel("stored_through_block_pointers"), CASE, device="cpu", relations=("program_order",))
    assert found.failure is None


@pytest.mark.parametrize(
    "name", ["added_by_atomics", "last_to_arrive_reads_partials", "waits_for_all_programs", "stored_by_one_program"]
)
def test_programs_that_wait_for_one_another_are_right(name: str) -> None:
    """Split-K that counts who has arrived, waits in a loop or adds atomically would be accused, or hang."""
    assert judge(kernel(name), CASE, device="cpu", relations=("program_order",)).failure is None


def test_a_kernel_with_atomics_has_to_declare_that_its_bits_may_differ() -> None:
    """Sums in another order would be told as a race, without a word of what declares them."""
    atomic = kernel("added_by_atomics")
    supports = msgspec.structs.replace(atomic.declaration.supports, deterministic=True)
    failure = objection("program_order", atomic.declared(supports=supports), CASE)
    assert failure is not None
    assert any(one.endswith("declare Supports(deterministic=False)") for one in failure.details)


LAUNCHES = """
import os
os.environ["TRITON_INTERPRET"] = "1"
from attnfuzz.declaration import load_kernels
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.relations.schedules import PROGRAM_ORDER
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.triton_compat.interpreter import set_up_interpreter

set_up_interpreter()
case = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(5, 0), scale=0.25, dtype="float32")
for name, has_programs in (("dense_eager", False), ("dense_naive", True)):
    (kernel,) = load_kernels(name)
    assert PROGRAM_ORDER.applies(kernel.declaration, case), "it may launch something"
    for _ in range(2):
        verdict = judge(kernel, case, device="cpu", relations=("program_order",))
        assert verdict.failure is None
        assert ("program_order" in verdict.related) is has_programs, (name, verdict)
        assert PROGRAM_ORDER.applies(kernel.declaration, case) is has_programs, name
"""


def test_kernels_that_launch_nothing_have_no_order() -> None:
    """Kernels in torch would be run for nothing in place of another relation, and be told to have passed this one."""
    done = run_script(LAUNCHES)
    assert done.returncode == 0, done.stderr


def test_without_an_interpreter_there_is_nothing_to_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled kernels would be run again for nothing."""
    declaration = kernel("added_by_atomics").declaration
    assert PROGRAM_ORDER.applies(declaration, CASE)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not PROGRAM_ORDER.applies(declaration, CASE)
