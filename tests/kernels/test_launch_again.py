"""Repeated launches: the compiled kernel of an earlier one, and only where nothing that was compiled in has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.compiler import CompiledKernel

from attnfuzz.kernels.common import launch_again

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
