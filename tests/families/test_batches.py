"""Cases of users' problems are judged in batches as they are one by one."""

from __future__ import annotations

from typing import Any

import pytest

from attnfuzz.judging import batch as batches
from attnfuzz.judging.judge import judge, judge_batch
from attnfuzz.strategies import cases
from attnfuzz.verdict import Verdict
from tests.families import cache_write_kernels, packed_decode_kernels, sparse_decode_kernels
from tests.unit.drawing import drawn_from

KERNELS = {
    "cache_write": (cache_write_kernels, ("right", "padding", "token", "packed", "zeros")),
    "packed_decode": (packed_decode_kernels, ("right", "planes", "zeros_of_k")),
    "sparse_decode": (sparse_decode_kernels, ("right", "minus_one", "nan_times_zero")),
}
PAIRS = [(kernels, name) for kernels, names in KERNELS.values() for name in names]


def told(verdict: Verdict) -> tuple[str, str] | None:
    return None if verdict.failure is None else (verdict.failure.oracle, verdict.failure.kind)


@pytest.mark.parametrize(("kernels", "name"), PAIRS, ids=[f"{k.__name__.split('.')[-1]}-{name}" for k, name in PAIRS])
@pytest.mark.by_day("cache_write_kernels-*", "sparse_decode_kernels-right")
def test_together_cases_get_the_verdicts_that_they_get_alone(kernels: Any, name: str) -> None:
    """On a GPU a campaign would miss bugs, or blame a kernel for what another case of the batch wrote."""
    kernel = getattr(kernels, name)
    declaration = kernel.declaration
    drawn = drawn_from(cases(declaration.problem, supports=declaration.supports), draws=30)
    together = judge_batch(kernel, drawn, device="cpu", relations=())
    alone = [judge(kernel, case, device="cpu", relations=()) for case in drawn]
    assert list(map(told, together)) == list(map(told, alone))
    assert any(verdict.failure for verdict in together) == (name != "right")


def test_runs_of_a_batch_are_made_before_any_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case would wait for the device by itself, and a GPU judge a few cases a second."""
    events: list[str] = []

    def note(name: str) -> None:
        old: Any = getattr(batches.Batch, name)

        def noted(*arguments: Any, **more: Any) -> Any:
            events.append(name)
            return old(*arguments, **more)

        monkeypatch.setattr(batches.Batch, name, noted)

    note("_run")
    note("_look_on_host")
    kernel = sparse_decode_kernels.right
    drawn = drawn_from(cases(kernel.declaration.problem), draws=6)
    assert all(verdict.failure is None for verdict in judge_batch(kernel, drawn, device="cpu", relations="all"))
    assert events.count("_run") >= 2 * len(drawn)
    assert events.index("_look_on_host") == events.count("_run")
    assert events.count("_look_on_host") == 1
