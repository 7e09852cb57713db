"""attnfuzz.triton_compat.configurations: which configuration an autotuned function takes, compiled or interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

from attnfuzz.triton_compat.configurations import cannot_run, taking, tuned_calls

from .interpreted_kernels import static_assert_kernel, tuned_kernel

CONFIGS = [triton.Config({"TILE": size}, num_warps=warps) for size, warps in ((16, 4), (32, 4), (32, 8))]


class Compiled:
    """Stands for a compiled function: it writes down what it is launched with."""

    def __init__(self) -> None:
        self.launched: list[dict[str, Any]] = []
        self.fn = function

    def run(self, *arguments: Any, **named: Any) -> None:
        del arguments
        self.launched.append(named)


def function(n: int) -> None:
    """What the autotuner names."""


@pytest.fixture(autouse=True)
def times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of functions that are compiled here; an interpreted one takes its first configuration without that."""
    interpreted = vars(Autotuner)["_bench"]

    def bench(self: Any, *arguments: Any, config: Any, **others: Any) -> Any:
        if isinstance(self.fn, Compiled):
            raise TimeoutError("a configuration was timed")
        return interpreted(self, *arguments, config=config, **others)

    monkeypatch.setattr(Autotuner, "_bench", bench)


def tuner_of(compiled: Compiled, **how: Any) -> Any:
    made: Any = Autotuner(compiled, ["n"], [*CONFIGS], ["n"], None, None, **how)
    return made


def test_a_call_takes_the_configuration_that_it_is_given_and_times_none() -> None:
    """On a GPU another one would be judged than the one that is told, or all would be timed for each case."""
    compiled = Compiled()
    tuner = tuner_of(compiled)
    with taking(None) as choices, pytest.raises(TimeoutError):
        tuner.run(5, grid=(1,))
    assert [one.words for one in choices] == ["TILE=16, num_warps=4", "TILE=32, num_warps=4", "TILE=32, num_warps=8"]
    assert {one.kernel for one in choices} == {"function"}
    before = tuned_calls()
    for one in choices:
        with taking(one):
            tuner.run(5, grid=(1,))
    assert [(one["TILE"], one["num_warps"]) for one in compiled.launched] == [(16, 4), (32, 4), (32, 8)]
    assert tuned_calls() == (before or 0) + 3
    assert tuner.configs == CONFIGS


def test_a_configuration_that_pruning_leaves_out_is_not_taken() -> None:
    """A kernel would be accused of what its own pruning excludes for these arguments."""
    compiled = Compiled()

    def small(configs: list[Any], named: dict[str, Any], **others: Any) -> list[Any]:
        del others
        return configs[:1] if named["n"] < 10 else configs

    tuner = tuner_of(compiled, prune_configs_by={"early_config_prune": small})
    with taking(None) as choices, pytest.raises(TimeoutError):
        tuner.run(50, grid=(1,))
    with taking(choices[2]), pytest.raises(TimeoutError):
        tuner.run(5, grid=(1,))
    with taking(choices[2]):
        tuner.run(50, grid=(1,))
    assert [one["num_warps"] for one in compiled.launched] == [8]


def test_interpreted_calls_take_it_too() -> None:
    """Without a GPU the first configuration would be judged again and again."""
    out = torch.zeros(32)
    with taking(None) as choices:
        tuned_kernel[(1,)](out, 5)
    with taking(choices[1]):
        tuned_kernel[(1,)](out, 5)
    assert out.tolist() == [32.0] * 32


def test_errors_with_which_a_tuner_passes_over_a_configuration_are_known() -> None:
    """A tile that is too large for a GPU's shared memory would be told as a finding, though it is never chosen."""
    assert cannot_run(OutOfResources(300_000, 232_448, "shared memory"))
    assert not cannot_run(RuntimeError("out of resource"))
    with pytest.raises(triton.runtime.errors.InterpreterError) as raised:
        static_assert_kernel[(1,)](torch.zeros(16), TILE=16)
    assert cannot_run(raised.value)
