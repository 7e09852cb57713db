"""attnfuzz.campaign.draw.drawing: a round stops when told to, and Hypothesis neither sees nor reports failures."""

from __future__ import annotations

import time

import pytest
from hypothesis import strategies as st

from attnfuzz.campaign.draw.drawing import derive_seed, run_round

FOREVER = float("inf")


def drawn(seed_value: int, *, max_draws: int = 30) -> list[int]:
    values: list[int] = []

    def visit(value: int) -> bool:
        values.append(value)
        return True

    run_round(st.integers(0, 10**6), visit, seed_value=seed_value, until=FOREVER, max_draws=max_draws)
    return values


def test_a_round_has_as_many_cases_as_asked() -> None:
    """A round that ends early for no reason would start over with trivial cases most of the time."""
    assert len(drawn(1)) == 30


def test_the_seed_decides_what_is_drawn() -> None:
    """--seed must repeat a search, and two workers must not do the same work."""
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert derive_seed(0, 1, "kernel", 2) == derive_seed(0, 1, "kernel", 2)
    assert len({derive_seed(0, worker, "kernel", turn) for worker in range(4) for turn in range(4)}) == 16


def test_visit_can_end_the_round(capsys: pytest.CaptureFixture[str]) -> None:
    """After a failing case nothing more may be drawn, and Hypothesis must not print a falsifying example."""
    seen: list[int] = []

    def visit(value: int) -> bool:
        seen.append(value)
        return len(seen) < 5

    run_round(st.integers(), visit, seed_value=1, until=FOREVER)
    assert len(seen) == 5
    assert capsys.readouterr() == ("", "")


def test_the_round_ends_in_time() -> None:
    """Budgets are kept by rounds that end on the clock, not after a number of cases."""
    seen = 0

    def visit(value: int) -> bool:
        nonlocal seen
        seen += 1
        time.sleep(0.02)
        return True

    started = time.monotonic()
    run_round(st.integers(), visit, seed_value=1, until=started + 0.2)
    assert seen > 0
    assert time.monotonic() - started < 5.0
    assert seen < 100


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt(), SystemExit(3)])
def test_what_visit_raises_comes_out_unchanged(error: BaseException) -> None:
    """An error of the framework must not be taken for a failing case, run again and called flaky."""
    calls = 0

    def visit(value: int) -> bool:
        nonlocal calls
        calls += 1
        raise error

    with pytest.raises(type(error)) as caught:
        run_round(st.integers(), visit, seed_value=1, until=FOREVER)
    assert caught.value is error
    assert calls == 1


def test_one_test_can_hold_many_rounds() -> None:
    """Rounds follow each other for hours in one process; state that adds up would slow them down."""
    assert sum(len(drawn(seed_value, max_draws=5)) for seed_value in range(20)) == 100
