"""From a kernel to its tree: candidates, measurements, tree. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attnfuzz.bench.kernels.messages import L2State
from attnfuzz.bench.kernels.run import Measures
from attnfuzz.bench.kernels.shapes import PROBLEMS_OF, Shape
from attnfuzz.bench.kernels.suites import smoke_suite
from attnfuzz.bench.tuning.batches import tuning_batches
from attnfuzz.bench.tuning.search import Measurements, configurations, measure_batches
from attnfuzz.bench.tuning.source import Tuned, tuned_tree
from attnfuzz.bench.tuning.tree import cross_validated_regret, grow_tree, regret
from attnfuzz.declaration import Declaration
from attnfuzz.problems.supports import OptionValue

__all__ = ["Tuning", "tune"]

_LEAST_GAIN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """``options``: values to try in place of all that are declared. ``seconds``: of one measurement."""

    options: Mapping[str, tuple[OptionValue, ...]]
    features: tuple[str, ...]
    max_batches: int = 40
    max_configurations: int = 48
    max_leaves: int = 8
    l2: L2State = "cold"
    seconds: float = 0.02
    budget_s: float = float("inf")


def tune(
    laboratory: Measures, kernel: Declaration, plan: Tuning, note: Callable[[str], None] = lambda _: None
) -> tuple[Tuned, Measurements]:
    """Measure and grow. Raises ValueError for a kernel that cannot be tuned, or of which nothing ran."""
    for name in plan.options:
        if name not in kernel.options:
            known = ", ".join(kernel.options) or "none"
            raise ValueError(f"--option {name}: {kernel.target} has no such option; it has {known}")
    candidates = configurations(kernel.options, plan.options, plan.max_configurations)
    if len(candidates) < 2:
        raise ValueError(f"{kernel.target} has only one configuration, so there is nothing to choose; declare options")
    measured = measure_batches(
        laboratory,
        kernel,
        candidates,
        _batches(laboratory.machine.device, kernel, plan.max_batches),
        l2=plan.l2,
        seconds=plan.seconds,
        budget_s=plan.budget_s,
        note=note,
    )
    if not measured.samples:
        raise ValueError(f"no configuration of {kernel.target} ran on any batch; try it with attnfuzz bench kernels")
    samples = measured.samples
    node = grow_tree(samples, plan.features, max_leaves=plan.max_leaves, least_gain=_LEAST_GAIN)
    tuned = Tuned(
        kernel=kernel.target,
        device=laboratory.machine.name,
        versions=laboratory.machine.versions,
        batches=len(samples),
        configurations=len(candidates),
        regret=regret(samples, node),
        regret_of_one=regret(samples, grow_tree(samples, plan.features, max_leaves=1)),
        regret_unseen=cross_validated_regret(
            samples, plan.features, max_leaves=plan.max_leaves, least_gain=_LEAST_GAIN
        ),
        features=plan.features,
        tree=tuned_tree(node, measured.configurations),
    )
    return tuned, measured


def _batches(device: str, kernel: Declaration, count: int) -> list[Shape]:
    """Tiny ones where Triton's interpreter has to get through them."""
    batches = tuning_batches(str(kernel.problem), count)
    if device == "cuda":
        return batches
    return [shape for shape in smoke_suite() if kernel.problem in PROBLEMS_OF[shape.kind]][:count]
