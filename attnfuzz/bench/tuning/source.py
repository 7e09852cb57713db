"""A tuned tree as a file to commit: a Python function of if and else, or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from attnfuzz.bench.tuning.tree import Leaf, Node
from attnfuzz.problems.supports import OptionValue

__all__ = ["Tuned", "TunedLeaf", "TunedSplit", "python_source", "tuned_tree"]

_WIDTH = 100


class TunedLeaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="options", tag_field="kind"):
    """Take these options. ``batches``: how many of those that were measured led here."""

    options: dict[str, OptionValue]
    batches: int


class TunedSplit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="if", tag_field="kind"):
    """``then`` if the feature is at most ``at_most``."""

    feature: str
    at_most: float
    then: TunedSplit | TunedLeaf
    otherwise: TunedSplit | TunedLeaf


class Tuned(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What ``attnfuzz bench tune`` found for one kernel.

    Regrets are shares by which the choices are slower than the best configuration of each batch, in the geometric mean:
    of the tree, of the best configuration for all, and of trees on batches that they have not seen (None: too few).
    """

    format: Literal["attnfuzz.bench-tune/1"] = "attnfuzz.bench-tune/1"
    kernel: str
    device: str
    versions: dict[str, str]
    batches: int
    configurations: int
    regret: float
    regret_of_one: float
    regret_unseen: float | None
    features: tuple[str, ...]
    tree: TunedSplit | TunedLeaf


def tuned_tree(node: Node, configurations: Sequence[dict[str, OptionValue]]) -> TunedSplit | TunedLeaf:
    """``node`` with options in place of numbers."""
    if isinstance(node, Leaf):
        return TunedLeaf(configurations[node.config], node.samples)
    left, right = (tuned_tree(side, configurations) for side in (node.left, node.right))
    return TunedSplit(node.feature, node.threshold, left, right)


def python_source(tuned: Tuned) -> str:
    """A module with a function ``choose_options`` of the features."""
    versions = ", ".join(f"{name} {version}" for name, version in tuned.versions.items())
    unseen = "" if tuned.regret_unseen is None else f", {tuned.regret_unseen:.1%} on batches left out"
    types = (type(one).__name__ for leaf in _leaves(tuned.tree) for one in leaf.options.values())
    value = " | ".join(dict.fromkeys(types))
    return "\n".join(
        [
            f'"""Options of {tuned.kernel.rpartition(":")[2]}, as `attnfuzz bench tune` chose them.',
            "",
            f"Measured on {tuned.device} ({versions}): {tuned.configurations} configurations, {tuned.batches} batches.",
            f"Slower than the best configuration of each batch by {tuned.regret:.1%} in the mean{unseen};",
            f"the best single configuration by {tuned.regret_of_one:.1%}.",
            '"""',
            "",
            '__all__ = ["choose_options"]',
            "",
            "",
            *_signature(tuned.features, value or "int"),
            '    """Lengths in tokens; of all sequences of a batch."""',
            *_lines(tuned.tree, "    "),
            "",
        ]
    )


def _signature(features: Sequence[str], value: str) -> list[str]:
    """On one line if that is short enough, else as formatters break it."""
    arguments = ", ".join(f"{name}: int" for name in features)
    line = f"def choose_options({arguments}) -> dict[str, {value}]:"
    return [line] if len(line) <= _WIDTH else ["def choose_options(", f"    {arguments}", f") -> dict[str, {value}]:"]


def _lines(node: TunedSplit | TunedLeaf, indent: str) -> Iterator[str]:
    """What comes after a return needs no else."""
    if isinstance(node, TunedLeaf):
        pairs = ", ".join(f'"{name}": {_literal(value)}' for name, value in node.options.items())
        yield f"{indent}return {{{pairs}}}"
        return
    yield f"{indent}if {node.feature} <= {_number(node.at_most)}:"
    yield from _lines(node.then, indent + "    ")
    yield from _lines(node.otherwise, indent)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _literal(value: OptionValue) -> str:
    return f'"{value}"' if isinstance(value, str) and value.isprintable() and '"' not in value else repr(value)


def _leaves(node: TunedSplit | TunedLeaf) -> Iterator[TunedLeaf]:
    if isinstance(node, TunedLeaf):
        yield node
    else:
        yield from _leaves(node.then)
        yield from _leaves(node.otherwise)
