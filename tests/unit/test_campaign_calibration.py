"""attnfuzz.campaign.workers: how many workers are chosen, from what they are seen to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attnfuzz.campaign.workers import PROBE_KERNEL, Choice, ProbeLoad, by_formula, calibrate, levels
from attnfuzz.isolation.devices import Gpu
from attnfuzz.isolation.outcomes import ExecutorUnavailable
from attnfuzz.isolation.zygote_client import Zygote
from attnfuzz.judging.runner import SERVICE, Runner

GIB = 1 << 30
LARGE = Gpu("GPU-a", "large", 80 * GIB, 79 * GIB)


def chosen(measure: Callable[[int], float], *, gpus: int = 1, budget_s: float = 3600.0) -> Choice:
    ticks = iter(range(100))
    return calibrate(16 * gpus, [LARGE] * gpus, budget_s=budget_s, measure=measure, clock=lambda: float(next(ticks)))


def test_without_a_gpu_every_core_has_a_worker() -> None:
    """Cores would be idle, or shared."""
    assert by_formula(6, ()).workers == 6


def test_gpus_share_the_cores() -> None:
    """Workers of all GPUs together would be more than there are cores."""
    assert by_formula(16, [LARGE] * 4).workers == 16
    assert by_formula(2, [LARGE] * 4).workers == 4, "each GPU has one at least"


def test_a_small_gpu_takes_what_its_memory_holds() -> None:
    """Executors would run out of GPU memory, which looks like a fault of the kernel."""
    assert by_formula(16, [Gpu("0", "small", 8 * GIB, 6 * GIB)]).workers == 4
    assert max(levels(16, [Gpu("0", "small", 8 * GIB, 6 * GIB)])) == 4


def test_more_workers_are_tried_while_they_help() -> None:
    """A GPU would be left half idle, or shared by more than it serves."""
    assert chosen(lambda level: float(level)).workers == 24
    assert chosen(lambda level: float(min(level, 16))).workers == 16
    assert chosen(lambda level: 100.0).workers == 8


def test_one_gpu_among_many_cores_is_not_crowded_without_a_try() -> None:
    """Twice as many processes as a GPU serves would share it, since there are cores for them."""
    assert levels(64, [LARGE]) == [16, 32]
    assert levels(16, [LARGE]) == [8, 16, 24]
    assert levels(2, [LARGE]) == [1, 2, 3]


def test_the_choice_for_one_gpu_holds_for_each() -> None:
    """Three GPUs of four would get nothing to do."""
    assert chosen(lambda level: float(level), gpus=4).workers == 96


def test_the_line_says_what_was_measured() -> None:
    """Nobody could tell why there are so many."""
    assert "8: 1.00, 16: 1.05" in chosen(lambda level: 1.0 if level == 8 else 1.05).reason


def test_what_does_not_fit_is_not_taken() -> None:
    """A campaign would end before it begins where fewer workers would do."""

    def measure(level: int) -> float:
        if level > 8:
            raise ExecutorUnavailable("no memory")
        return 1.0

    assert chosen(measure).workers == 8


def test_a_short_campaign_is_not_calibrated() -> None:
    """A minute's budget would go into finding out how to use it."""

    def measure(level: int) -> float:
        raise AssertionError("nothing is to be measured")

    assert chosen(measure, budget_s=60.0).workers == 16


@pytest.fixture(scope="module")
def zygote() -> Zygote:
    return Zygote.start("cpu", service=SERVICE)


def test_the_probe_judges_its_cases(zygote: Zygote) -> None:
    """The choice would rest on cases that fail, or on none."""
    with zygote, Runner(device="cpu", zygote=zygote) as runner:
        (kernel,) = runner.declarations((PROBE_KERNEL,))
        with ProbeLoad(kernel, zygote, device="cpu", environment={}) as load:
            assert load.measure(2) > 0
