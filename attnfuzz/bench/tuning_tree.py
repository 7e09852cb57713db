"""A small decision tree over measured configurations. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from attnfuzz.problems.supports import OptionValue

Configuration = dict[str, OptionValue]
"""Values of options, by their names."""

_LEAST_SAMPLES = 2
_COST_OF_FAILING = math.log(1000.0)
"""As if it took a thousand times as long: then the configuration that fails least often is taken, if all do."""


@dataclass(frozen=True, slots=True)
class Sample:
    """``times``: of each configuration, in any unit; infinite for one that did not run, but not for all."""

    features: Mapping[str, float]
    times: tuple[float, ...]


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="options", tag_field="kind"):
    """Take these options. ``batches``: how many of those that were measured led here."""

    options: Configuration
    batches: int


class Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="if", tag_field="kind"):
    """``then`` if the feature is at most ``at_most``."""

    feature: str
    at_most: float
    then: Split | Leaf
    otherwise: Split | Leaf


Node = Split | Leaf


def grow_tree(
    samples: Sequence[Sample],
    features: Sequence[str],
    configurations: Sequence[Configuration],
    *,
    max_leaves: int = 8,
    least_gain: float = 0.01,
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
    return root.finished(configurations)


def choose(node: Node, features: Mapping[str, float]) -> Configuration:
    """The configuration for these features."""
    while isinstance(node, Split):
        node = node.then if features[node.feature] <= node.at_most else node.otherwise
    return node.options


def leaves(node: Node) -> list[Leaf]:
    """All of them, from left to right."""
    return [node] if isinstance(node, Leaf) else leaves(node.then) + leaves(node.otherwise)


def regret(samples: Sequence[Sample], configurations: Sequence[Configuration], node: Node) -> float:
    """By what share the chosen configurations are slower than the best ones, in the geometric mean."""
    chosen = [cost(one, one.times[configurations.index(choose(node, one.features))]) for one in samples]
    return math.expm1(sum(chosen) / len(chosen))


class _Growing:
    """A leaf that may become a split: ``gain`` is what its best one saves of the sum of logarithms."""

    def __init__(self, samples: Sequence[Sample], cost: float, config: int) -> None:
        self.gain = 0.0
        self._config, self._batches = config, len(samples)
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

    def finished(self, configurations: Sequence[Configuration]) -> Node:
        """The tree from here on; a split whose two sides do the same is none."""
        if self._children is None or self._cut is None:
            return Leaf(configurations[self._config], self._batches)
        feature, threshold, *_ = self._cut
        then, otherwise = (child.finished(configurations) for child in self._children)
        if isinstance(then, Leaf) and isinstance(otherwise, Leaf) and then.options == otherwise.options:
            return Leaf(then.options, self._batches)
        return Split(feature, threshold, then, otherwise)

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
    sums = (math.fsum(cost(one, one.times[config]) for one in samples) for config in range(len(samples[0].times)))
    return min((cost, config) for config, cost in enumerate(sums))


def cost(sample: Sample, taken: float) -> float:
    """The logarithm of a time over the best of the sample."""
    return min(math.log(taken / min(sample.times)), _COST_OF_FAILING)


def _round_threshold(low: float, high: float) -> float:
    """A number that a reader expects: the largest power of two from ``low`` to below ``high``, or ``low``."""
    power = 2.0 ** math.floor(math.log2(high)) if high >= 1 else low
    power = power / 2 if power >= high else power
    return power if low <= power < high else low
