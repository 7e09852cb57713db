"""What is left over from an earlier call is found; what is wrong by itself is not blamed on one."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.cases.supported import adapt_options
from attnfuzz.declaration import load_kernels
from attnfuzz.inputs.registry import problem_of
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.registry import KNOWN, OracleName
from attnfuzz.oracles.relations.call_sequence import CALL_SEQUENCE, other_calls_of
from attnfuzz.oracles.relations.fresh_copy import fresh_copy
from attnfuzz.problems.cases import (
    Case,
    DenseDecodeCase,
    MaskedAttentionCase,
    MergeStatesCase,
    encode_case,
)
from attnfuzz.problems.formats import format_key, format_of
from attnfuzz.problems.recipes import Pages, Values
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.trials.observation import observe
from attnfuzz.trials.trial import Trial
from attnfuzz.verdict import Failure
from tests.quality.mutants import Edit, Mutant
from tests.quality.planting import plant
from tests.sample_cases import paged_case

KERNELS = Path(__file__).with_name("remembering_kernels.py")
PLANNING = Path(__file__).with_name("planning_kernels.py")
CASE = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(5, 1), scale=0.25, dtype="float32")
PLANNED = paged_case(
    num_q_heads=2,
    seq_lens=(7, 5),
    dtype="float32",
    values=Values(keys="normal", values="normal"),
    options={"num_splits": 8},
)


def judged(
    runner: Runner, kernel: str, *relations: OracleName, file: Path = KERNELS, case: Case = CASE
) -> Failure | None:
    (declaration,) = runner.declarations([f"{file}:{kernel}"])
    runner.restart()
    return runner.judge(declaration, case, relations=relations).failure


@pytest.mark.parametrize(
    ("kernel", "kind", "message"),
    [
        ("stale_partials", "bits", "at first, but .* after a call with seq_lens="),
        ("plan_by_batch_size", "next call: out:value", r"^a call with seq_lens=\[10, 2\] after this case gives out"),
        ("counter_not_reset", "bits", r"at first, but 0.0 after a call with seq_lens=\[3\]"),
        ("wrong_after_two_others", "next call: out:value", r"scale=0.5 after 3 other calls gives out"),
        ("workspace_of_the_first_call", "next call: IndexError", r"after this case gives IndexError: index 9 is out"),
    ],
)
@pytest.mark.by_day("stale_partials*", "plan_by_batch*", "workspace*")
def test_leftovers_are_found_and_told_in_words(kernel: str, kind: str, message: str, runner: Runner) -> None:
    """A kernel that is right in each test by itself, and wrong in a server, would pass."""
    others = [name for name, one in KNOWN.items() if one.is_relation and name != "call_sequence"]
    assert judged(runner, kernel, *others) is None
    failure = judged(runner, kernel, "call_sequence")
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("call_sequence", kind)
    assert re.search(message, failure.message), failure.message
    assert any("the result depends on an earlier call" in line for line in failure.details)


FOUND_BY_SHAPE = paged_case(num_q_heads=2, seq_lens=(9, 5), dtype="float32")


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("plan_without_scale", "the same call with scale=0.5 after this case gives out["),
        ("plan_without_window", "the same call with window=5 after this case gives out["),
        ("plan_without_strides", "the same call with strides.q=outer_gap after this case gives out["),
        ("plan_without_table", "the same call with seq_lens shortened from [9, 5] to [4, 2] after"),
    ],
)
@pytest.mark.by_day("plan_without_scale*", "plan_without_table*")
def test_plans_kept_under_a_key_that_leaves_something_out_are_found(kernel: str, message: str, runner: Runner) -> None:
    """Kernels that keep a plan by shapes would be right in all that a search draws, and wrong in a server."""
    assert judged(runner, kernel, file=PLANNING, case=FOUND_BY_SHAPE) is None
    failure = judged(runner, kernel, "call_sequence", file=PLANNING, case=FOUND_BY_SHAPE)
    assert failure is not None
    assert failure.oracle == "call_sequence"
    assert failure.message.startswith(message)
    assert failure.message.endswith("before any other call it is right")


def test_a_plan_kept_under_all_that_it_was_made_of_is_left_alone(runner: Runner) -> None:
    """Whoever keeps a plan at all would be accused."""
    assert judged(runner, "plan_with_all", "call_sequence", file=PLANNING, case=FOUND_BY_SHAPE) is None


@pytest.mark.parametrize("kernel", ["kept_by_address", "kept_for_the_last_address"])
def test_results_that_are_kept_by_address_are_found(kernel: str, runner: Runner) -> None:
    """A kernel that is only ever timed on the same tensors would do nothing from the second call on."""
    failure = judged(runner, kernel, "call_sequence")
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("call_sequence", "bits")
    assert "when V is negated in place, and the same tensors are passed again" in failure.message


def test_lengths_that_are_kept_by_address_are_found(runner: Runner) -> None:
    """Servers overwrite the lengths of each step in place: answers would be those of the step before."""
    failure = judged(runner, "lengths_kept_by_address", "call_sequence")
    assert failure is not None
    assert failure.oracle == "call_sequence"


def test_lengths_of_a_mask_are_not_overwritten(runner: Runner) -> None:
    """A right kernel would be accused of raising for a mask that has the rows of other lengths."""
    case = MaskedAttentionCase(
        num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(3, 2), scale=0.25, block_size=4, query_lens=(1, 2)
    )
    assert judged(runner, "mask_split_by_lengths", "call_sequence", case=case) is None


def test_sequences_without_tokens_stay_empty_when_others_are_shortened(runner: Runner) -> None:
    """A right kernel would be accused of reading pages that no sequence has."""
    pages = Pages(padding="garbage", extra_columns=1)
    case = msgspec.structs.replace(PLANNED, seq_lens=(6, 0), options={}, pages=pages)
    assert judged(runner, "plan_with_all", "call_sequence", file=PLANNING, case=case) is None
    failure = runner.judge(runner.declarations(["paged_eager"])[0], case, relations=("call_sequence",)).failure
    assert failure is None


def test_a_plan_that_grows_changes_bits_within_their_bounds(runner: Runner, tmp_path: Path) -> None:
    """Accuracy is content, and so is determinism, and yet a server's answer depends on who asked before."""
    plans = Edit("paged/launch.py", "\n_SPLITS_PER_STEP = 4", "\n_PLANS: dict = {}\n_SPLITS_PER_STEP = 4")
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


def test_what_no_earlier_call_brings_about_is_not_blamed_on_one(runner: Runner) -> None:
    """A kernel that reads memory which is nobody's would be said to keep something, of calls that change nothing."""
    assert judged(runner, "wrong_once_where_it_is_long", "call_sequence") is None


def test_the_mistake_that_a_later_call_shows_is_kept(runner: Runner) -> None:
    """A known bug that the next call shows as well would be a second finding."""
    failure = judged(runner, "plan_by_batch_size", "call_sequence")
    assert failure is not None
    assert "tokens_dropped" in failure.maybe


@pytest.mark.parametrize("kernel", ["dense_naive", "paged_split_k", "split_k_partials_eager", "merge_states_triton_th"])
def test_right_kernels_are_left_alone(kernel: str, runner: Runner) -> None:
    """A false alarm on a kernel that remembers nothing."""
    (declaration,) = runner.declarations([kernel])
    case = simplest_case(declaration.problem, declaration.supports, declaration.options)
    assert runner.judge(declaration, case, relations=("call_sequence",)).failure is None


def test_other_calls_are_bigger_and_smaller_and_supported() -> None:
    """Nothing would be left over, or the kernel would be blamed for a case that it does not take."""
    (kernel,) = load_kernels(f"{KERNELS}:plan_by_batch_size")
    declaration = kernel.declaration
    longer, shorter, *_ = other_calls_of(declaration, CASE)
    assert getattr(longer.case, "seq_lens", None) == (10, 2)
    assert getattr(shorter.case, "seq_lens", None) == (3,)
    limited = msgspec.structs.replace(
        declaration, supports=msgspec.structs.replace(declaration.supports, max_seq_len=5)
    )
    assert [one.words for one in other_calls_of(limited, CASE)] == [
        "a call with seq_lens=[5, 2]",
        "a call with seq_lens=[3]",
        "the same call with scale=0.5",
        "the same call with seq_lens shortened from [5, 1] to [2, 1]",
        "the same call with seq_lens grown from [5, 1] to [5, 5]",
    ]
    merge = msgspec.structs.replace(declaration, problem="merge_states")
    case = MergeStatesCase(num_q_heads=1, num_tokens=3, head_size=16, dtype="float32")
    assert [getattr(one.case, "num_tokens", None) for one in other_calls_of(merge, case)] == [6, 1, 3]


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


def test_a_case_that_is_one_of_many_is_followed_by_a_few_calls(plant: Any) -> None:
    """Half of a search would be calls of the same shapes, on a GPU all of it compilers; or some would never be made."""
    declaration = plant("paged_decode").declaration
    of_one_format = [msgspec.structs.replace(FOUND_BY_SHAPE, values=Values(seed=seed)) for seed in range(60)]
    of_many = [msgspec.structs.replace(FOUND_BY_SHAPE, num_q_heads=2 * heads) for heads in range(1, 61)]
    further, closer = CALL_SEQUENCE.further, CALL_SEQUENCE.looking_closer().further
    assert further is not None
    assert closer is not None
    formats, met = set[bytes](), set[str]()
    for case in (*of_one_format, *of_many):
        (in_it,) = problem_of(case).contents([case], "cpu", declaration.supports)
        words = {encode_case(one.case): one.words for one in other_calls_of(declaration, case)}
        runs = further(declaration, case, in_it).runs  # type: ignore[union-attr]  # it has some of any case
        assert len(runs) == 2 + 4 + 1 + 1
        assert len(closer(declaration, case, in_it).runs) == len(words) + 1  # type: ignore[union-attr]  # as above
        met |= {words[encode_case(one.case)].partition("=")[0] for one in runs[:-1]}
        if case in of_one_format:
            formats |= {format_key(format_of(one.case)) for one in runs}
    assert len(formats) == 2
    assert met == {words.partition("=")[0] for words in words.values()}


def test_other_calls_leave_no_memory_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right kernel would outgrow the memory of its process while it is called on many others, and be accused."""
    seen: list[weakref.ref[Any]] = []

    def noted(*args: Any, **how: Any) -> Any:
        found = observe(*args, **how)
        seen.append(weakref.ref(found.allocated))
        return found

    monkeypatch.setattr("attnfuzz.trials.trial.observe", noted)
    (kernel,) = load_kernels("dense_eager")
    trial = Trial(kernel, CASE, device="cpu", tolerance="bound")
    assert CALL_SEQUENCE.check(trial) is None
    gc.collect()
    kept = [one for one in seen if one() is not None]
    assert (len(seen) > 3, len(kept)) == (True, 1)  # that of the trial's own call
