"""The measurements of ``attnfuzz bench tune``, and all that is made of them without a GPU: the tree, figures, a module.

Torch-free.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from attnfuzz.bench.kernels.shapes import L2State, MachineReply, Shape
from attnfuzz.problems.supports import OptionValue
from attnfuzz.untrusted_text import only_printable

Configuration = dict[str, OptionValue]
"""Values of options, by their names."""

_LEAST_SAMPLES = 2
_COST_OF_FAILING = math.log(1000.0)
"""As if it took a thousand times as long: then the configuration that fails least often is taken, if all do."""


@dataclass(frozen=True, slots=True)
class Sample:
    """``times``: of each configuration, in any unit; infinite for one that did not run, but not for all.

    ``default``: of what the kernel does if nobody chooses.
    """

    features: Mapping[str, float]
    times: tuple[float, ...]
    default: float = math.inf

    def cost(self, taken: float) -> float:
        """The logarithm of a time over the best of the sample."""
        return min(math.log(taken / min(self.times)), _COST_OF_FAILING)


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
    root = _growing(samples, features)
    ends = [root]
    while len(ends) < max_leaves:
        best = max(ends, key=lambda one: one.gain)
        if best.gain <= 0 or best.gain < least_gain * len(samples):
            break
        best.children = [_growing(part, features) for part in best.parts]
        ends = [one for one in ends if one is not best] + best.children
    return _finished(root, configurations)


def choose(node: Node, features: Mapping[str, float]) -> Configuration:
    """The configuration for these features."""
    while isinstance(node, Split):
        node = node.then if features[node.feature] <= node.at_most else node.otherwise
    return node.options


def leaves(node: Node) -> list[Leaf]:
    """All of them, from left to right."""
    return [node] if isinstance(node, Leaf) else leaves(node.then) + leaves(node.otherwise)


def _costs(samples: Sequence[Sample], configurations: Sequence[Configuration], node: Node) -> list[float]:
    return [one.cost(one.times[configurations.index(choose(node, one.features))]) for one in samples]


@dataclass(slots=True)
class _Growing:
    """A leaf that may become a split: ``gain`` is what its best one saves of the sum of logarithms."""

    config: int
    batches: int
    gain: float = 0.0
    feature: str = ""
    at_most: float = 0.0
    parts: tuple[Sequence[Sample], ...] = ()
    children: list[_Growing] = field(default_factory=list)


def _growing(samples: Sequence[Sample], features: Sequence[str]) -> _Growing:
    whole, config = _best_config(samples)
    found = _Growing(config, len(samples))
    for feature in features:
        ordered = sorted(samples, key=lambda one: one.features[feature])
        for i in range(_LEAST_SAMPLES, len(ordered) - _LEAST_SAMPLES + 1):
            low, high = ordered[i - 1].features[feature], ordered[i].features[feature]
            parts = ordered[:i], ordered[i:]
            gain = whole - sum(_best_config(part)[0] for part in parts)
            if low < high and gain > found.gain + 1e-12:
                found.gain, found.feature, found.parts = gain, feature, parts
                found.at_most = _round_threshold(low, high)
    return found


def _finished(one: _Growing, configurations: Sequence[Configuration]) -> Node:
    """The tree from here on; a split whose two sides do the same is none."""
    sides = [_finished(child, configurations) for child in one.children]
    leaf = Leaf(configurations[one.config], one.batches)
    if not sides:
        return leaf
    then, otherwise = sides
    if isinstance(then, Leaf) and isinstance(otherwise, Leaf) and then.options == otherwise.options:
        return msgspec.structs.replace(leaf, options=then.options)
    return Split(one.feature, one.at_most, then, otherwise)


def _best_config(samples: Sequence[Sample]) -> tuple[float, int]:
    """The least sum of logarithms of time over best time, and whose it is."""
    sums = (math.fsum(one.cost(one.times[config]) for one in samples) for config in range(len(samples[0].times)))
    return min((cost, config) for config, cost in enumerate(sums))


def _round_threshold(low: float, high: float) -> float:
    """A number that a reader expects: the largest power of two from ``low`` to below ``high``, or ``low``."""
    power = 2.0 ** (math.ceil(math.log2(high)) - 1)
    return power if low <= power else low


FEATURES = (
    "batch", "max_seq_len", "heads_per_group", "head_size", "max_query_len", "rows", "pairs", "total_tokens",
)  # fmt: skip
"""Features that a decision may depend on. All but the last are known to the host when a CUDA graph is captured.

``rows``: ``max_query_len`` times ``heads_per_group``. ``pairs``: of a sequence and a KV head.
"""


def features_of(shape: Shape) -> dict[str, int]:
    """The numbers of ``FEATURES``; of a merge, its tokens are the batch."""
    lengths, kv_heads = shape.seq_lens or (1,) * shape.num_tokens, shape.num_kv_heads or shape.num_q_heads
    batch, group, queries = len(lengths), shape.num_q_heads // kv_heads, max(shape.queries, default=1)
    numbers = (batch, max(lengths), group, shape.head_size, queries, queries * group, batch * kv_heads, sum(lengths))
    return dict(zip(FEATURES, numbers, strict=True))


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Microseconds of each configuration on one batch, and of what the kernel does if nobody chooses.

    ``grown_on``: the tree may see it; the others show what it is worth. None for what has no time: it was wrong, did
    not run or, only on batches to grow on, was slow on the first of them.
    """

    shape: Shape
    grown_on: bool
    default_us: float | None
    times_us: tuple[float | None, ...]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The raw table of one run. ``default``: the options that nobody chose. ``wrong``: what was said of those left out.

    ``unreached``: batches that the budget left out.
    """

    started: str
    machine: MachineReply
    l2: L2State
    default: Configuration
    configurations: tuple[Configuration, ...]
    batches: tuple[Batch, ...]
    wrong: tuple[tuple[Configuration, str], ...] = ()
    unreached: int = 0

    def samples(self, *, grown_on: bool) -> list[Sample]:
        """Samples of one of the two kinds of batches; infinite is what has no time."""
        return [
            Sample(dict(features_of(one.shape)), tuple(map(_or_infinite, one.times_us)), _or_infinite(one.default_us))
            for one in self.batches
            if one.grown_on == grown_on and any(taken is not None for taken in one.times_us)
        ]


def _or_infinite(taken: float | None) -> float:
    return math.inf if taken is None else taken


class Loss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares by which choices are slower than the best that was measured on each batch."""

    median: float
    worst: float


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Over so many batches: of the tree, of the configuration that is best for all to grow on, and of the default,
    which may be faster than all that were tried.
    """

    batches: int
    tree: Loss
    one: Loss
    default: Loss


class Tuned(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The results of ``attnfuzz bench tune`` for one kernel: a tree, and what it is worth.

    ``seen``: on the batches that it was grown on, ``unseen``: on those that were kept back (None: there are none).
    """

    format: Literal["attnfuzz.bench-tune/2"] = "attnfuzz.bench-tune/2"
    kernel: str
    seen: Figures
    unseen: Figures | None
    features: tuple[str, ...]
    max_leaves: int
    tree: Split | Leaf
    record: Record


def grown(kernel: str, record: Record, features: Sequence[str], max_leaves: int) -> Tuned:
    """The tree of ``record``, and what it is worth. Raises ValueError if no configuration ran."""
    seen, unseen = record.samples(grown_on=True), record.samples(grown_on=False)
    if not seen:
        raise ValueError(f"no configuration of {kernel} ran on any batch; try it with attnfuzz bench kernels")
    tried = record.configurations
    node = grow_tree(seen, features, tried, max_leaves=max_leaves)
    one = grow_tree(seen, features, tried, max_leaves=1)
    return Tuned(
        kernel=kernel,
        seen=_figures(seen, tried, node, one),
        unseen=_figures(unseen, tried, node, one) if unseen else None,
        features=tuple(features),
        max_leaves=max_leaves,
        tree=node,
        record=record,
    )


def _figures(samples: Sequence[Sample], tried: Sequence[Configuration], node: Node, one: Node) -> Figures:
    costs = (*(_costs(samples, tried, tree) for tree in (node, one)), [each.cost(each.default) for each in samples])
    losses = [Loss(math.expm1(statistics.median(some)), math.expm1(max(some))) for some in costs]
    return Figures(batches=len(samples), tree=losses[0], one=losses[1], default=losses[2])


def encode_tuned(tuned: Tuned) -> bytes:
    """As JSON that people read: a line for each configuration and each batch."""
    document = msgspec.to_builtins(tuned)
    tables = {name: document["record"][name] for name in ("configurations", "batches")}
    document["record"] |= dict.fromkeys(tables, ())
    text = msgspec.json.format(msgspec.json.encode(document), indent=1)
    for name, rows in tables.items():
        lines = b",\n   ".join(map(msgspec.json.encode, rows))
        text = text.replace(b'  "%s": []' % name.encode(), b'  "%s": [\n   %s\n  ]' % (name.encode(), lines))
    return text + b"\n"


def python_source(tuned: Tuned) -> str:
    """A module with a function ``choose_options`` of the features, and what GPU it was measured on."""
    record, machine = tuned.record, tuned.record.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    types = (type(one).__name__ for leaf in leaves(tuned.tree) for one in leaf.options.values())
    value = " | ".join(dict.fromkeys(types))
    name = tuned.kernel.rpartition(":")[2]
    of_run = f"{machine.name} on {record.started[:10]} ({versions})"
    return "\n".join(
        [
            f'"""Options of {_prose(name)}, as `attnfuzz bench tune` chose them.',
            "",
            f"Measured on {_prose(of_run)}: {len(record.configurations)} configurations.",
            "Slower than the best configuration of each batch, in the median and at worst:",
            "",
            *_figure_lines("it was grown on", tuned.seen),
            *([] if tuned.unseen is None else _figure_lines("it has not seen", tuned.unseen)),
            '"""',
            "",
            f"KERNEL = {_literal(name)}",
            f"DEVICE = {_literal(machine.name)}",
            f"CAPABILITY = {machine.capability}",
            f"PROCESSORS = {machine.processors}",
            *_ranges(tuned),
            "",
            "",
            "def choose_options(",
            *(f"    {feature}: int," for feature in tuned.features),
            f") -> dict[str, {value or 'int'}]:",
            '    """Lengths in tokens; of all sequences of a batch."""',
            *_lines(tuned.tree, "    "),
            "",
        ]
    )


def _prose(text: str) -> str:
    """``text`` without characters that could end a docstring."""
    return only_printable(" ".join(text.split())).replace("\\", "/").replace('"', "'")


def _figure_lines(which: str, figures: Figures) -> Iterator[str]:
    yield f"{figures.batches} batch{'' if figures.batches == 1 else 'es'} that {which}:"
    for name, loss in (("the tree", figures.tree), ("one choice", figures.one), ("the default", figures.default)):
        yield f"    {name:<11} {loss.median:7.1%} {loss.worst:8.1%}"


def _ranges(tuned: Tuned) -> Iterator[str]:
    """Ranges of all batches that the tree was grown on."""
    samples = tuned.record.samples(grown_on=True)
    yield "RANGES = {"
    for name in tuned.features:
        values = [int(one.features[name]) for one in samples]
        yield f'    "{name}": ({min(values)}, {max(values)}),'
    yield "}"


def _lines(node: Node, indent: str) -> Iterator[str]:
    """Lines of the tree; what comes after a return needs no else."""
    if isinstance(node, Leaf):
        pairs = ", ".join(f'"{name}": {_literal(value)}' for name, value in node.options.items())
        yield f"{indent}return {{{pairs}}}"
        return
    yield f"{indent}if {node.feature} <= {int(node.at_most)}:"
    yield from _lines(node.then, indent + "    ")
    yield from _lines(node.otherwise, indent)


def _literal(value: OptionValue) -> str:
    return f'"{value}"' if isinstance(value, str) and value.isprintable() and '"' not in value else repr(value)
