"""Buffers that a kernel keeps between calls: memory that nobody wrote to, and tables and counters that somebody did."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from attnfuzz.judging.judge import judge, judge_batch
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import Case, DenseDecodeCase

MOST_SPLITS = 4
KERNELS = Path(__file__).with_name("keeping_kernels.py")
CASE = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=16, seq_lens=(5, 1), scale=0.25, dtype="float32")


def splits_kept(*, masked: bool = False) -> Any:
    """Weighs the partial results of splits in a buffer that is kept: one that has no tokens is not written, and has a
    weight of 0. `masked`: and is not read then.
    """
    kept: dict[tuple[int, ...], Tensor] = {}

    def combine(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        partials = kept.get(tuple(out.shape))
        if partials is None:
            partials = kept[tuple(out.shape)] = torch.empty(MOST_SPLITS, *out.shape)
        partials[0] = out.float()
        weights = torch.tensor([1.0] + [0.0] * (MOST_SPLITS - 1)).view(-1, *[1] * out.dim())
        products = torch.where(weights > 0, partials, 0.0) * weights if masked else partials * weights
        return products.sum(0).to(out.dtype), lse

    return combine


@pytest.mark.parametrize("together", [False, True])
def test_idle_splits_of_a_kept_workspace_are_read(together: bool, plant: Any, dense: Case) -> None:
    """0 x NaN would be told as weights that are NaN "although all memory holds finite numbers"."""
    kernel = plant(after=splits_kept())
    if together:
        verdicts = judge_batch(kernel, [dense, dense], device="cpu")
    else:
        verdicts = [judge(kernel, dense, device="cpu") for _ in range(2)]
    for verdict in verdicts:  # in the second, the buffer comes from a call before
        assert verdict.failure is not None
        assert (verdict.failure.oracle, verdict.failure.kind) == ("unwritten", "read before written")
        assert "written there, in a buffer that the kernel keeps between calls: it is nan" in verdict.failure.message
        assert any(f"it keeps between calls float32 [{MOST_SPLITS}, 3, 4, 8]" in one for one in verdict.failure.details)


@pytest.mark.parametrize("kernel", ["scratch_of_the_module", "scratch_of_an_object"])
def test_a_workspace_that_a_module_made_when_it_was_imported_is_seen(kernel: str, runner: Runner) -> None:
    """It holds zeros by chance, and whatever was there before in the process of somebody else."""
    (declaration,) = runner.declarations([f"{KERNELS}:{kernel}"])
    runner.restart()
    failure = runner.judge(declaration, CASE, relations=()).failure
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("unwritten", "read before written")
    assert "written there, in a buffer that the kernel keeps between calls: it is nan" in failure.message


def test_what_a_module_has_filled_or_a_kernel_masks_is_left_alone(runner: Runner) -> None:
    """A table that is made once would be overwritten, or scratch that nobody reads be accused."""
    (declaration,) = runner.declarations([f"{KERNELS}:scratch_that_is_masked"])
    runner.restart()
    for _ in range(2):
        assert runner.judge(declaration, CASE, relations="all").failure is None


def test_a_workspace_made_anew_is_not_told_as_a_kept_one(plant: Any, dense: Case) -> None:
    """The words would send somebody to a buffer that has nothing to do with it."""
    idle = torch.tensor([1.0] + [0.0] * (MOST_SPLITS - 1))

    def combine(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        partials = torch.empty(MOST_SPLITS, *out.shape)
        partials[0] = out.float()
        return (partials * idle.view(-1, *[1] * out.dim())).sum(0).to(out.dtype), lse

    kept = splits_kept(masked=True)
    failure = judge(plant(after=lambda *given: combine(given[0], *kept(*given))), dense, device="cpu").failure
    assert failure is not None
    assert failure.kind == "read before written"
    assert "before anything is written there: it is nan" in failure.message


def scratch_written_first() -> Any:
    return splits_kept(masked=True)


def table_that_grows() -> Any:
    table = torch.empty(64)
    known = [0]

    def scale(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        needed = int(inputs.seq_lens.max())
        if known[0] == 0:
            known.append(torch.empty(64))  # type: ignore[arg-type]  # kept like the table, made in a call
        target: Any = known[1]
        if needed > known[0]:
            target[known[0] : needed] = 1.0
            known[0] = needed
        return out * target[needed - 1].to(out.dtype), lse + table[:0].sum()

    return scale


def counter_and_lock() -> Any:
    kept: list[Tensor] = []

    def count(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        if not kept:
            kept.extend((torch.zeros(1, dtype=torch.int32), torch.empty(3)))
            kept[1].fill_(2.0)
        kept[0] += 1
        assert int(kept[0]) > 0
        return out * (kept[1][0] / 2), lse

    return count


def results_kept() -> Any:
    kept: dict[Any, Tensor] = {}

    def write(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        result = kept.setdefault((out.shape, out.dtype), torch.empty_like(out))
        result.copy_(out)
        return result, lse

    return write


@pytest.mark.parametrize("kept", [scratch_written_first, table_that_grows, counter_and_lock, results_kept])
@pytest.mark.by_day("scratch_written_first", "counter_and_lock")
def test_right_kernels_that_keep_buffers_are_left_alone(kept: Any, plant: Any, dense: Case) -> None:
    """A table, a counter, or scratch that is written before it is read, would be taken for memory nobody wrote."""
    kernel = plant(after=kept())
    longer = msgspec.structs.replace(dense, seq_lens=(9, 1, 3))
    for case in (dense, longer, dense, longer):
        assert judge(kernel, case, device="cpu", relations="all").failure is None


@pytest.mark.parametrize("period", [2, 3, 5, 7])
@pytest.mark.by_day("2", "7")
def test_what_comes_and_goes_is_not_put_down_to_memory(period: int, plant: Any, dense: Case) -> None:
    """A kernel that counts its calls gives the same bits in some two runs, and would be said to read what it has not
    written.
    """
    calls = itertools.count()

    def shake(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        return out, torch.nextafter(lse, lse + 1) if next(calls) % period == 1 else lse

    kernel = plant(after=shake)
    found = [judge(kernel, dense, device="cpu", relations=()).failure for _ in range(4 * period)]
    assert {failure.oracle for failure in found if failure is not None} == {"determinism"}
