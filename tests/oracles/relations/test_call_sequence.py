"""What is left over from an earlier call is found; what is wrong by itself is not blamed on one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest

from attnfuzz.declaration import load_kernels
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.registry import KNOWN, OracleName
from attnfuzz.oracles.relations.call_sequence import relatives_of
from attnfuzz.oracles.relations.fresh_copy import fresh_copy
from attnfuzz.problems.cases import DenseDecodeCase, MergeStatesCase, PagedDecodeCase
from attnfuzz.problems.recipes import Values
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supported import adapt_options
from attnfuzz.verdict import Failure
from tests.quality.mutants import Edit, Mutant
from tests.quality.planting import plant

KERNELS = Path(__file__).with_name("remembering_kernels.py")
CASE = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(5, 1), scale=0.25, dtype="float32")
PLANNED = PagedDecodeCase(
    num_q_heads=2,
    num_kv_heads=1,
    head_size=16,
    seq_lens=(7, 5),
    scale=0.25,
    block_size=4,
    dtype="float32",
    values=Values(keys="normal", values="normal"),
    options={"num_splits": 8},
)


def judged(runner: Runner, kernel: str, *relations: OracleName) -> Failure | None:
    (declaration,) = runner.declarations([f"{KERNELS}:{kernel}"])
    runner.restart()
    return runner.judge(declaration, CASE, relations=relations).failure


@pytest.mark.parametrize(
    ("kernel", "kind", "message"),
    [
        ("stale_partials", "bits", "at first, but .* after a call with seq_lens="),
        ("plan_by_batch_size", "next call: out:value", r"^a call with seq_lens=\[10, 2\] after this case gives out"),
        ("counter_not_reset", "bits", r"at first, but 0.0 after a call with seq_lens=\[3\]"),
        ("workspace_of_the_first_call", "next call: IndexError", r"after this case gives IndexError: index 9 is out"),
    ],
)
def test_leftovers_are_found_and_told_in_words(kernel: str, kind: str, message: str, runner: Runner) -> None:
    """A kernel that is right in each test by itself, and wrong in a server, would pass."""
    others = [name for name, one in KNOWN.items() if one.is_relation and name != "call_sequence"]
    assert judged(runner, kernel, *others) is None
    failure = judged(runner, kernel, "call_sequence")
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("call_sequence", kind)
    assert re.search(message, failure.message), failure.message
    assert any("the result depends on an earlier call" in line for line in failure.details)


@pytest.mark.parametrize("kernel", ["kept_by_address", "kept_for_the_last_address"])
def test_results_that_are_kept_by_address_are_found(kernel: str, runner: Runner) -> None:
    """A kernel that is only ever timed on the same tensors would do nothing from the second call on."""
    failure = judged(runner, kernel, "call_sequence")
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("call_sequence", "bits")
    assert "when V is negated in place, and the same tensors are passed again" in failure.message


def test_a_plan_that_grows_changes_bits_within_their_bounds(runner: Runner, tmp_path: Path) -> None:
    """Accuracy is content, and so is determinism, and yet a server's answer depends on who asked before."""
    plans = Edit("paged/launch.py", '\n__all__ = ["paged_decode"', '\n_PLANS: dict = {}\n__all__ = ["paged_decode"')
    grows = """    key = len(q), num_splits
    num_splits = _PLANS[key] = max(_PLANS.get(key, 1), min(num_splits, block_table.shape[1]))
"""
    first = "    partial_out = empty_partials(q, num_splits, partial_dtype, v_head_size)\n"
    edits = (plans, Edit("paged/launch.py", first, grows + first))
    target = plant(Mutant("growing_plan", "paged_split_k", "", "Q", "call_sequence", {}, edits), tmp_path)
    (declaration,) = runner.declarations([target])
    case = adapt_options(PLANNED, declaration.options)
    assert runner.judge(declaration, case, relations=()).failure is None
    runner.restart()
    failure = runner.judge(declaration, case, relations=("call_sequence",)).failure
    assert failure is not None
    assert failure.message.endswith("after a call with seq_lens=[14, 10]: the bits must be equal")


def test_a_kernel_that_is_wrong_by_itself_is_not_blamed_on_a_call(runner: Runner) -> None:
    """Every bug of longer sequences would be found twice, the second time with a wrong cause."""
    assert judged(runner, "forgets_tokens_from_the_eighth", "call_sequence") is None


@pytest.mark.parametrize("kernel", ["dense_naive", "paged_split_k", "split_k_partials_eager", "merge_states_triton_th"])
def test_right_kernels_are_left_alone(kernel: str, runner: Runner) -> None:
    """A false alarm on a kernel that remembers nothing."""
    (declaration,) = runner.declarations([kernel])
    case = simplest_case(declaration.problem, declaration.supports, declaration.options)
    assert runner.judge(declaration, case, relations=("call_sequence",)).failure is None


def test_relatives_are_bigger_and_smaller_and_supported() -> None:
    """Nothing would be left over, or the kernel would be blamed for a case that it does not take."""
    (kernel,) = load_kernels(f"{KERNELS}:plan_by_batch_size")
    declaration = kernel.declaration
    longer, shorter = relatives_of(declaration, CASE)
    assert getattr(longer.case, "seq_lens", None) == (10, 2)
    assert getattr(shorter.case, "seq_lens", None) == (3,)
    limited = msgspec.structs.replace(
        declaration, supports=msgspec.structs.replace(declaration.supports, max_seq_len=5)
    )
    assert [one.words for one in relatives_of(limited, CASE)] == [
        "a call with seq_lens=[5, 2]",
        "a call with seq_lens=[3]",
    ]
    merge = msgspec.structs.replace(declaration, problem="merge_states")
    case = MergeStatesCase(num_q_heads=1, num_tokens=3, head_size=16, dtype="float32")
    assert [getattr(one.case, "num_tokens", None) for one in relatives_of(merge, case)] == [6, 1]


def test_fresh_copy_remembers_nothing_and_leaves_the_original_alone() -> None:
    """A leftover would be taken for the kernel's own mistake, or later calls would go to another module."""
    (kernel,) = load_kernels(f"{KERNELS}:plan_by_batch_size")
    module = sys.modules[kernel.function.__module__]
    module._longest_of[17] = 3
    copy = fresh_copy(kernel)
    assert copy is not None
    assert copy.function.__globals__["_longest_of"] == {}
    assert sys.modules[kernel.function.__module__] is module
    assert load_kernels(f"{KERNELS}:plan_by_batch_size")[0].function is kernel.function
    (bundled,) = load_kernels("paged_naive")
    fresh = fresh_copy(bundled)
    assert fresh is not None
    assert fresh.function is not bundled.function
    assert load_kernels("paged_naive")[0].function is bundled.function
