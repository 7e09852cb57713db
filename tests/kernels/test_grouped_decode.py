"""Grouped decode: shared tiles, splits by turns, and the combination of their states."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.declaration import load_kernels
from attnfuzz.judging.judge import judge
from attnfuzz.kernels.common.device import GpuLimits, gpu_at
from attnfuzz.kernels.grouped import launch as grouped_launch
from attnfuzz.kernels.grouped.launch import grouped_decode, plan_grouped
from tests.sample_cases import paged_case

Make = Callable[..., Any]


def check(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Weights are rounded to float16 before they multiply V, and so is the result."""
    out, lse = got
    torch.testing.assert_close(out.double(), expected[0], rtol=2.0**-9, atol=2.0**-10)
    torch.testing.assert_close(lse.double(), expected[1], rtol=2e-6, atol=2e-6)


@pytest.mark.by_day
@pytest.mark.parametrize("layout", ["NHD", "HND", "packed", "interleaved"])
@pytest.mark.parametrize(("heads", "num_splits"), [((2, 1), 1), ((6, 2), 3), ((17, 1), 4)])
def test_every_layout_and_group(layout: str, heads: tuple[int, int], num_splits: int, paged_problem: Make) -> None:
    """A group that is no power of two, or larger than 16 heads, would read or store another one's heads."""
    problem = paged_problem([0, 1, 16, 17, 45], heads=heads, block_size=3, layout=layout)
    check(grouped_decode(*problem.args, num_splits=num_splits, tile=16), problem.expected)


def test_groups_that_are_shared_out(paged_problem: Make) -> None:
    """Heads beyond the first block of a large group would be left out or doubled."""
    problem = paged_problem([3, 20], heads=(70, 1))
    check(grouped_decode(*problem.args, num_splits=2, tile=16), problem.expected)
    problem = paged_problem([3, 20], heads=(34, 2))
    check(grouped_decode(*problem.args, num_splits=1, tile=16, block_m=16), problem.expected)


@pytest.mark.parametrize("num_splits", [1, 2, 5, 40])
@pytest.mark.by_day("2", "40")
def test_splits_take_tiles_by_turns(num_splits: int, paged_problem: Make) -> None:
    """A tile would be left out or counted twice; splits without one would be combined."""
    problem = paged_problem([15, 16, 17, 32, 33, 100], heads=(2, 2), block_size=5)
    check(grouped_decode(*problem.args, num_splits=num_splits, tile=16), problem.expected)


@pytest.mark.parametrize("num_splits", [1, 14, 40, 300])
@pytest.mark.by_day("40")
def test_splits_are_shared_out_by_length(num_splits: int, paged_problem: Make) -> None:
    """One long sequence would be read by one program; tiles would be left out, or a sequence have nobody's result."""
    problem = paged_problem([15, 0, 300, 17, 16, 0, 33], heads=(2, 2), block_size=5)
    check(grouped_decode(*problem.args, num_splits=num_splits, tile=16, balanced=True), problem.expected)


@pytest.mark.parametrize("num_seqs", [1, 63, 64, 65])
@pytest.mark.by_day("1", "65")
def test_all_sequences_are_counted(num_seqs: int, paged_problem: Make) -> None:
    """Those beyond the ones that are counted at once would get no program."""
    problem = paged_problem([1] * (num_seqs - 1) + [100], heads=(1, 1), block_size=16)
    check(grouped_decode(*problem.args, num_splits=8, tile=16, balanced=True), problem.expected)


def test_only_tiles_in_the_window_are_shared_out(paged_problem: Make) -> None:
    """Splits would go to tokens that no query sees, and those that are left have to do all the work."""
    problem = paged_problem([15, 300, 60], heads=(2, 1), block_size=5)
    whole = grouped_decode(*problem.args, num_splits=1, tile=16, window=40)
    shared = grouped_decode(*problem.args, num_splits=9, tile=16, window=40, balanced=True)
    check(shared, (whole[0].double(), whole[1].double()))


@pytest.mark.parametrize("counts", [(1, 3, 1, 1, 0, 2), (2, 0, 1, 7, 1, 1), (3, 3, 0, 2, 2, 2)])
def test_decodes_among_prompts(counts: tuple[int, ...], paged_problem: Make) -> None:
    """A decode would get a prompt's row, rows of prompts be overwritten, or a range that crosses prompts be lost."""
    problem = paged_problem([70, 5, 0, 300, 3, 40], heads=(4, 2), block_size=5)
    starts = torch.tensor([0, *counts]).cumsum(0)
    q = torch.full((int(starts[-1]) + 1, *problem.q.shape[1:]), math.nan, dtype=problem.q.dtype)
    is_decode = torch.tensor(counts) == 1
    rows = starts[:-1][is_decode]
    q[rows] = problem.q[is_decode]
    out, lse = torch.full_like(q, 7.0), torch.full(q.shape[:2], 7.0)
    grouped_decode(q, *problem.args[1:], tile=16, cu_seqlens_q=starts, out=out, lse=lse)
    check((out[rows], lse[rows]), (problem.expected[0][is_decode], problem.expected[1][is_decode]))
    others = torch.ones(len(q), dtype=torch.bool)
    others[rows] = False
    assert (out[others] == 7).all()
    assert (lse[others] == 7).all()


def test_what_cannot_be_chosen_for_decodes_among_prompts(paged_problem: Make) -> None:
    """Splits of each sequence would be those of prompts, too."""
    problem = paged_problem([70, 5])
    with pytest.raises(ValueError, match="num_splits=3, balanced=None and counters cannot be chosen with cu_seqlens_q"):
        grouped_decode(*problem.args, num_splits=3, cu_seqlens_q=torch.tensor([0, 1, 2]))


def test_more_splits_than_are_combined_at_a_time(paged_problem: Make) -> None:
    """Large heads are combined a few splits at a time; the others would be lost."""
    problem = paged_problem([330], heads=(1, 1), head_size=1024)
    check(grouped_decode(*problem.args, num_splits=20, tile=16), problem.expected)


@pytest.mark.parametrize("num_combined", [1, 2, 64])
def test_splits_are_combined_in_steps(num_combined: int, paged_problem: Make) -> None:
    """All splits but the last step's would be lost, or their weights not rescaled; 264 of them run on an H100."""
    problem = paged_problem([330, 40, 17], heads=(2, 1), head_size=24)
    check(grouped_decode(*problem.args, num_splits=7, tile=16, num_combined=num_combined), problem.expected)


def test_as_the_wrapper_plans_it(paged_problem: Make) -> None:
    """What is chosen for a batch could be what cannot be launched."""
    problem = paged_problem([0, 1, 200])
    check(grouped_decode(*problem.args), problem.expected)


@pytest.mark.by_day
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize(("heads", "num_combined"), [((6, 2), 4), ((6, 2), 1), ((70, 1), 4)])
def test_the_last_program_combines_and_leaves_the_counters_at_zero(
    heads: tuple[int, int], num_combined: int, balanced: bool, paged_problem: Make
) -> None:
    """The next call would combine before all states are stored, or never; heads beyond a block would be left out."""
    problem = paged_problem([0, 1, 16, 33, 100], heads=heads)
    counters = torch.zeros(5, heads[0], dtype=torch.int32)
    launch: dict[str, Any] = {"num_splits": 4, "tile": 16, "num_combined": num_combined, "balanced": balanced}
    for _ in range(2):
        check(grouped_decode(*problem.args, **launch, counters=counters), problem.expected)
        assert not counters.any()


def test_counters_that_do_not_fit_are_refused(paged_problem: Make) -> None:
    """Programs would count in memory that is somebody else's."""
    args = paged_problem([1, 36], heads=(4, 2)).args
    for counters in (torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 4), torch.zeros(4, 2, dtype=torch.int32).t()):
        with pytest.raises(ValueError, match=r"must be \[num_seqs, num_q_heads\]=\[2, 4\], torch.int32 and contiguous"):
            grouped_decode(*args, counters=counters)


def test_float32_is_refused(paged_problem: Make) -> None:
    """Matrix units would silently multiply in TF32."""
    with pytest.raises(ValueError, match=r"q\.dtype=torch\.float32 must be one of"):
        grouped_decode(*paged_problem([1], dtype=torch.float32).args)


def test_a_launch_fills_the_gpu_and_no_split_is_without_room() -> None:
    """Multiprocessors would idle, or splits without a tile be launched and combined."""
    for num_seqs, heads, max_seq_len, columns in itertools.product(
        (1, 8, 131, 4096), (1, 8), (1, 64, 4096, 1 << 20), (16, 1024)
    ):
        plan = plan_grouped(num_seqs, heads, max_seq_len, 132, columns, balanced=False)
        assert 1 <= plan.num_splits <= math.ceil(max_seq_len / plan.tile)
        assert num_seqs * heads * plan.num_splits <= max(num_seqs * heads, 8 * 132)
        assert plan.tile >= 16
    assert plan_grouped(1, 8, 32768, 132, 128)[:2] == (66, 32)


@pytest.mark.parametrize(
    ("num_seqs", "max_seq_len", "balanced"),
    [
        (1, 1 << 20, False),
        (64, 32768, True),
        (8, 32768, True),
        (64, 256, False),
        (8, 1024, False),
        (64, 544, False),  # 512 in pages of 272
        (8, 4128, False),  # 4,096 in pages of 48
        (5000, 32768, False),
    ],
)
def test_splits_are_shared_out_where_a_sequence_may_be_long(num_seqs: int, max_seq_len: int, balanced: bool) -> None:
    """One long sequence among short ones takes eight times as long, or short ones wait for tiles to be counted.

    Or ranges of equal length would wait for others to end.
    """
    plan = plan_grouped(num_seqs, 8, max_seq_len, 132, 128)
    assert plan.balanced is balanced
    assert not balanced or 2 * 132 <= 8 * plan.num_splits <= 3 * 132


@pytest.mark.parametrize(
    ("capability", "hip", "expected"),
    [((9, 0), None, True), ((10, 0), None, True), ((8, 9), None, False), ((9, 4), "6.4", False)],
)
def test_dependent_launch_is_for_nvidia(
    capability: tuple[int, int], hip: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On AMD's GPUs, whose capabilities begin with 9 too, no kernel would compile: "invalid instruction"."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    properties = SimpleNamespace(
        name="a GPU",
        multi_processor_count=132,
        shared_memory_per_block=65536,
        shared_memory_per_multiprocessor=102400,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    gpu = gpu_at.__wrapped__(torch.device("cuda", 0))
    assert gpu == (132, 101376 if hip is None else 65536, hip is not None, expected, "a GPU", capability)
    monkeypatch.setattr(grouped_launch, "gpu_at", lambda device: gpu)
    launch = grouped_launch._launch.__wrapped__(
        1, 4, 1, 128, 128, 4096, torch.float16, 2, torch.device("cuda", 0), *[None] * 7
    )
    assert launch.options.get("launch_pdl", False) is expected


@pytest.mark.parametrize(
    ("num_seqs", "length", "heads", "warps"),
    [(1, 4096, 16, 4), (4, 4096, 32, 8), (16, 512, 16, 4), (16, 4096, 64, 8), (128, 4096, 64, 8)],
)
def test_wide_heads_share_what_a_program_has_read(
    num_seqs: int, length: int, heads: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 heads on 1 read a cache of latent vectors eight times: twice as long as with 64 heads in a program."""
    monkeypatch.setattr(grouped_launch, "gpu_at", lambda device: GpuLimits(132, 227 << 10, False, True))
    launch = grouped_launch._launch.__wrapped__(
        num_seqs, 128, 1, 576, 512, length, torch.bfloat16, 2, torch.device("cuda", 0), *[None] * 7
    )
    assert (launch.of_splits["BLOCK_M"], launch.options["num_warps"]) == (heads, warps)


def test_lengths_of_ranges_may_lie_far_apart() -> None:
    """A sequence whose length lies 2^31 elements behind the first would be given another's tokens, or none."""
    (kernel,) = load_kernels("attnfuzz.kernels.bundled:paged_grouped")
    case = paged_case(seq_lens=(1, 1, 1), block_size=1, options={"balanced": True})
    verdict = judge(kernel, case, device=torch.get_default_device().type, relations=("page_relocation",))
    assert verdict.related == ("page_relocation",)
    assert verdict.failure is None
