"""Launches in parts, and launches made again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.compiler import CompiledKernel

from attnfuzz.kernels.common import launch_again
from attnfuzz.kernels.paged.launch_partitioned import paged_attention_v1, paged_attention_v2

Make = Callable[..., Any]

EACH = {"v1": paged_attention_v1, "v2": paged_attention_v2}
each = pytest.mark.parametrize("attend", EACH.values(), ids=EACH)
dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])


@pytest.mark.by_day
@each
@dtypes
def test_lengths_around_pages_and_tiles(attend: Make, dtype: torch.dtype, paged_problem: Make, check: Make) -> None:
    """Tokens at the end of a page, of a tile or of the sequence would be left out, or dead ones taken in."""
    problem = paged_problem([0, 1, 3, 4, 5, 17, 33], heads=(4, 2), layout="packed", dtype=dtype)
    check(attend(*problem.args[:-1], tile=16), problem.expected)


@each
@pytest.mark.parametrize("block_size", [1, 3, 16, 24])
@pytest.mark.parametrize("head_size", [8, 24])
@pytest.mark.by_day("8-24-*", "24-3-*")
def test_any_page_and_head_size(
    attend: Make, block_size: int, head_size: int, paged_problem: Make, check: Make
) -> None:
    """Pages that are no power of two, or heads that fill no block, would be read past their end."""
    problem = paged_problem([0, 7, 40], layout="packed", block_size=block_size, head_size=head_size)
    check(attend(*problem.args[:-1]), problem.expected)


@each
def test_empty_sequences_are_written(attend: Make, paged_problem: Make) -> None:
    """A row without tokens would keep what was in the buffer."""
    problem = paged_problem([0, 1], layout="packed")
    out, lse = torch.full((2, 2, 8), math.nan, dtype=torch.float16), torch.full((2, 2), math.nan)
    attend(*problem.args[:-1], out=out, lse=lse)
    assert not out[0].any()
    assert bool((lse[0] == -math.inf).all())
    assert out.isfinite().all()


@each
def test_very_negative_scores_do_not_vanish(attend: Make, paged_problem: Make) -> None:
    """With a finite stand-in for minus infinity a row whose real scores lie below it would come out empty."""
    problem = paged_problem([5], heads=(1, 1), layout="packed", dtype=torch.float32)
    q, k, v, *rest = problem.args[:-1]
    k = torch.where(k.isnan(), k, 1e6)
    out, lse = attend(torch.full_like(q, -1e6), k, v, *rest)
    torch.testing.assert_close(out[0, 0], problem.values[0][:, 0].mean(0))
    assert lse[0, 0].item() == pytest.approx(-8e12 * rest[2], rel=1e-6)


@dtypes
@pytest.mark.parametrize("partial_dtype", ["float32", "input"])
@pytest.mark.parametrize("partition_size", [1, 3, 8, 2**40])
@pytest.mark.by_day("3-*-dtype0", "8-input-dtype1", "1-float32-dtype2")
def test_partitions_make_no_difference(
    partition_size: int, partial_dtype: str, dtype: torch.dtype, paged_problem: Make
) -> None:
    """A token at a partition's end would be lost or counted twice, or a partition weighed wrongly or left out."""
    problem = paged_problem([0, 1, 3, 8, 9], heads=(2, 1), layout="packed", dtype=dtype)
    options: dict[str, Any] = {"partition_size": partition_size, "partial_dtype": partial_dtype, "tile": 16}
    out, lse = paged_attention_v2(*problem.args[:-1], **options)
    rounding = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-6
    torch.testing.assert_close(out.double(), problem.expected[0], rtol=rounding, atol=2 * rounding)
    torch.testing.assert_close(lse.double(), problem.expected[1], rtol=2e-6, atol=2e-6)


def test_partitions_beyond_the_length_are_not_read(
    paged_problem: Make, check: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier call left in the workspace would be taken for partial results of this one."""

    def dirty(shape: Any, **options: Any) -> torch.Tensor:
        return torch.full(shape, math.nan, **options)

    problem = paged_problem([0, 2, 9, 64], layout="packed")
    monkeypatch.setattr(torch, "empty", dirty)
    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full_like(like, math.nan))
    check(paged_attention_v2(*problem.args[:-1], partition_size=8), problem.expected)


@pytest.mark.parametrize("num_combined", [1, 2, 16])
def test_partitions_are_reduced_in_steps(num_combined: int, paged_problem: Make, check: Make) -> None:
    """All partitions but those of the last step would be lost, or left out of the maximum or the sum."""
    problem = paged_problem([0, 1, 9, 40], layout="packed")
    check(paged_attention_v2(*problem.args[:-1], partition_size=3, num_combined=num_combined), problem.expected)


def test_a_step_that_is_no_power_of_two_is_refused(paged_problem: Make) -> None:
    """Triton would say that the arguments of an arange are wrong."""
    with pytest.raises(ValueError, match="num_combined=3 must be a power of two"):
        paged_attention_v2(*paged_problem([3], layout="packed").args[:-1], num_combined=3)


@pytest.mark.parametrize("partition_size", [0, -512, 2.0])
def test_wrong_partition_size_is_refused(partition_size: Any, paged_problem: Make) -> None:
    """A division by zero in the kernel would be an error about a launch."""
    with pytest.raises(ValueError, match=r"partition_size=.* must be an integer of at least 1"):
        paged_attention_v2(*paged_problem([3], layout="packed").args[:-1], partition_size=partition_size)


@each
def test_other_layouts_are_refused(attend: Make, paged_problem: Make) -> None:
    """A cache in another layout would be read at the wrong places."""
    with pytest.raises(ValueError, match=r"k_cache.shape=.* must be \[num_blocks, num_kv_heads, head_chunks"):
        attend(*paged_problem([3], layout="NHD").args[:-1])


def test_more_partitions_than_a_grid_has_programs_are_refused(paged_problem: Make) -> None:
    """CUDA would refuse the launch with an error that names neither argument nor remedy."""
    args = list(paged_problem([1], block_size=1, layout="packed").args[:7])
    args[3] = args[3][:, :1].expand(1, 65536).contiguous()
    message = r"num_partitions=65536 must be at most 65535, as .*; make partition_size=1 larger"
    with pytest.raises(ValueError, match=message):
        paged_attention_v2(*args, partition_size=1)


GRID = (3, 1, 1)


class Compiled(CompiledKernel):  # type: ignore[misc]  # triton's classes have no types
    """What a kernel's first launch returns."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.launches.append((grid, *args))


class Kernel:
    """Returns a compilation of its own for each launch that goes through it."""

    arg_names = ("p_x", "n", "scale", "TILE")

    def __init__(self) -> None:
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> Compiled:
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return launch


def run(kernel: Kernel, *args: Any, **options: int) -> None:
    launch_again._launch(kernel, GRID, args, options)


def test_the_same_launch_takes_the_compiled_kernel() -> None:
    """Each launch would cost the host a look at all arguments, or go out with those of an earlier one."""
    kernel, x, y = Kernel(), torch.zeros(8), torch.ones(8)
    run(kernel, x, 5, 0.5, 16, num_warps=4)
    run(kernel, y, 5, 0.5, 16, num_warps=4)
    assert len(kernel.compiled) == 1
    assert kernel.compiled[0].launches == [(GRID, y, 5, 0.5, 16)]


@pytest.mark.parametrize(
    ("args", "num_warps"),
    [
        ((torch.zeros(8, device="cpu").half(), 5, 0.5, 16), 4),
        ((torch.zeros(9, device="cpu")[1:], 5, 0.5, 16), 4),
        ((torch.zeros(8, device="cpu"), 16, 0.5, 16), 4),
        ((torch.zeros(8, device="cpu"), 5, 0.5, 32), 4),
        ((torch.zeros(8, device="cpu"), 5, 0.5, 16), 8),
        ((None, 5, 0.5, 16), 4),
    ],
    ids=["dtype", "alignment", "number", "constant", "option", "tensor left out"],
)
def test_what_is_compiled_in_asks_for_another_kernel(args: tuple[Any, ...], num_warps: int) -> None:
    """A kernel would read 16 bytes at once from an address that allows 4, or with another tile than its strides."""
    kernel, first = Kernel(), torch.zeros(8, device="cpu")
    run(kernel, first, first, 5, 0.5, 16, num_warps=4)
    run(kernel, first, *args, num_warps=num_warps)
    assert len(kernel.compiled) == 2


def test_kernels_do_not_share_what_they_launched() -> None:
    """A kernel would be replaced by another one with equal arguments."""
    kernels, x = (Kernel(), Kernel()), torch.zeros(8)
    for kernel in kernels:
        run(kernel, x, 5, 0.5, 16)
    assert [len(kernel.compiled) for kernel in kernels] == [1, 1]


def test_the_interpreter_gets_every_launch() -> None:
    """It returns nothing that could be launched, and takes arguments by name."""
    calls: list[tuple[Any, ...]] = []

    class Interpreted:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **named: calls.append((grid, args, named))

    x = torch.zeros(8, device="cpu")
    for _ in range(2):
        launch_again.launch_again(Interpreted(), GRID, (x, 5), {"scale": 0.5}, {"num_warps": 4})
    assert calls == [(GRID, (x, 5), {"scale": 0.5, "num_warps": 4})] * 2
