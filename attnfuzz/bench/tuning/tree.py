"""A small decision tree that picks a configuration, grown greedily over measured times (CART: Breiman et al., 1984).

The cost of a configuration on a sample is the logarithm of its time over the best one's, so that twice as slow counts
the same on short and on long batches; a leaf takes the configuration with the least sum. Of all leaves the one whose
split saves most is split next, until there are enough or nothing worth it is left. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Leaf", "Node", "Sample", "Split", "choose", "cross_validated_regret", "grow_tree", "leaves", "regret"]

_LEAST_SAMPLES = 2
_FOLDS = 5
_COST_OF_FAILING = math.log(1000.0)
"""As if it took a thousand times as long: then the configuration that fails least often is taken, if all do."""


@dataclass(frozen=True, slots=True)
class Sample:
    """``times``: of each configuration, in any unit; infinite for one that did not run, but not for all."""

    features: Mapping[str, float]
    times: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """``config``: the number of the configuration to take. ``samples``: how many of them led here."""

    config: int
    samples: int


@dataclass(frozen=True, slots=True)
class Split:
    """``left`` if the feature is at most ``threshold``."""

    feature: str
    threshold: float
    left: Node
    right: Node


Node = Leaf | Split


def grow_tree(
    samples: Sequence[Sample], features: Sequence[str], *, max_leaves: int = 8, least_gain: float = 0.01
) -> Node:
    """``least_gain``: by what share the mean time must fall for a split to be worth a line of code.

    Of equal splits that on the first feature is taken. Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("a tree needs at least one sample; measure something first")
    root = _Growing.of(samples, features)
    growing = [root]
    while len(growing) < max_leaves:
        best = max(growing, key=lambda one: one.gain)
        if best.gain <= 0 or best.gain < least_gain * len(samples):
            break
        growing.remove(best)
        growing += best.split(features)
    return root.finished()


def choose(node: Node, features: Mapping[str, float]) -> int:
    """The configuration for these features."""
    while isinstance(node, Split):
        node = node.left if features[node.feature] <= node.threshold else node.right
    return node.config


def leaves(node: Node) -> list[Leaf]:
    """All of them, from left to right."""
    return [node] if isinstance(node, Leaf) else leaves(node.left) + leaves(node.right)


def regret(samples: Sequence[Sample], node: Node) -> float:
    """By what share the chosen configurations are slower than the best ones, in the geometric mean."""
    chosen = [_cost(one, choose(node, one.features)) for one in samples]
    return math.expm1(sum(chosen) / len(chosen))


def cross_validated_regret(
    samples: Sequence[Sample], features: Sequence[str], *, max_leaves: int, least_gain: float
) -> float | None:
    """The regret on samples that the tree has not seen, a fifth at a time; None for too few."""
    if len(samples) < 2 * _FOLDS:
        return None
    total = 0.0
    for fold in range(_FOLDS):
        seen = [one for i, one in enumerate(samples) if i % _FOLDS != fold]
        node = grow_tree(seen, features, max_leaves=max_leaves, least_gain=least_gain)
        unseen = samples[fold::_FOLDS]
        total += len(unseen) * math.log1p(regret(unseen, node))
    return math.expm1(total / len(samples))


class _Growing:
    """A leaf that may become a split: ``gain`` is what its best one saves of the sum of logarithms."""

    def __init__(self, samples: Sequence[Sample], cost: float, config: int) -> None:
        self.gain = 0.0
        self._leaf = Leaf(config, len(samples))
        self._cost = cost
        self._cut: tuple[str, float, Sequence[Sample], Sequence[Sample]] | None = None
        self._children: tuple[_Growing, _Growing] | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample], features: Sequence[str]) -> _Growing:
        found = cls(samples, *_best_config(samples))
        for feature in features:
            found._look_for_cuts(samples, feature)
        return found

    def split(self, features: Sequence[str]) -> tuple[_Growing, _Growing]:
        """The two that take its place. Only for one with a gain."""
        if self._cut is None:
            raise ValueError("there is nothing to split; look at the gain first")
        _, _, left, right = self._cut
        self._children = (_Growing.of(left, features), _Growing.of(right, features))
        return self._children

    def finished(self) -> Node:
        """The tree from here on; a split whose two sides do the same is none."""
        if self._children is None or self._cut is None:
            return self._leaf
        feature, threshold, *_ = self._cut
        left, right = (child.finished() for child in self._children)
        if isinstance(left, Leaf) and isinstance(right, Leaf) and left.config == right.config:
            return Leaf(left.config, self._leaf.samples)
        return Split(feature, threshold, left, right)

    def _look_for_cuts(self, samples: Sequence[Sample], feature: str) -> None:
        ordered = sorted(samples, key=lambda one: one.features[feature])
        for i in range(_LEAST_SAMPLES, len(ordered) - _LEAST_SAMPLES + 1):
            low, high = ordered[i - 1].features[feature], ordered[i].features[feature]
            if low == high:
                continue
            gain = self._cost - _best_config(ordered[:i])[0] - _best_config(ordered[i:])[0]
            if gain > self.gain + 1e-12:
                self.gain = gain
                self._cut = (feature, _round_threshold(low, high), ordered[:i], ordered[i:])


def _best_config(samples: Sequence[Sample]) -> tuple[float, int]:
    """The least sum of logarithms of time over best time, and whose it is."""
    sums = (math.fsum(_cost(one, config) for one in samples) for config in range(len(samples[0].times)))
    return min((cost, config) for config, cost in enumerate(sums))


def _cost(sample: Sample, config: int) -> float:
    return min(math.log(sample.times[config] / min(sample.times)), _COST_OF_FAILING)


def _round_threshold(low: float, high: float) -> float:
    """A number that a reader expects: the largest power of two from ``low`` to below ``high``, or ``low``."""
    power = 2.0 ** math.floor(math.log2(high)) if high >= 1 else low
    power = power / 2 if power >= high else power
    return power if low <= power < high else low
