"""The measurements of ``attnfuzz bench tune``, and all that is made of them without a GPU: the tree, figures, a module.

Torch-free.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from attnfuzz.bench.kernels.shapes import L2State, MachineReply, Shape
from attnfuzz.problems.supports import OptionValue, check_options
from attnfuzz.untrusted_text import only_printable

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


FEATURES = (
    "batch", "max_seq_len", "heads_per_group", "head_size", "max_query_len", "rows", "pairs", "total_tokens",
)  # fmt: skip
"""Features that a decision may depend on. All but the last are known to the host when a CUDA graph is captured.

``rows``: ``max_query_len`` times ``heads_per_group``. ``pairs``: of a sequence and a KV head.
"""

LEAST_GAIN = 0.01


def features_of(shape: Shape) -> dict[str, int]:
    """The numbers of ``FEATURES``; of a merge, its tokens are the batch."""
    if shape.kind == "merge":
        tokens = shape.num_tokens
        numbers = (tokens, 1, 1, shape.head_size, 1, 1, tokens * shape.num_q_heads, tokens)
        return dict(zip(FEATURES, numbers, strict=True))
    batch, group, queries = len(shape.seq_lens), shape.num_q_heads // shape.num_kv_heads, max(shape.queries)
    numbers = (
        batch,
        shape.longest,
        group,
        shape.head_size,
        queries,
        queries * group,
        batch * shape.num_kv_heads,
        sum(shape.seq_lens),
    )
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

    def __post_init__(self) -> None:
        for one in (self.default, *self.configurations):
            check_options({name: (value,) for name, value in one.items()})
        for batch in self.batches:
            if len(batch.times_us) != len(self.configurations):
                raise ValueError(
                    f"{batch.shape.label} has {len(batch.times_us)} times; there must be one for each of the "
                    f"{len(self.configurations)} configurations"
                )

    def samples(self, *, grown_on: bool) -> list[Sample]:
        """Samples of one of the two kinds of batches; infinite is what has no time."""
        return [
            Sample(
                {name: float(value) for name, value in features_of(one.shape).items()},
                tuple(math.inf if taken is None else taken for taken in one.times_us),
            )
            for one in self._with_times(grown_on)
        ]

    def defaults(self, *, grown_on: bool) -> list[float]:
        """Times of the default for these batches, in the same order."""
        return [math.inf if one.default_us is None else one.default_us for one in self._with_times(grown_on)]

    def _with_times(self, grown_on: bool) -> list[Batch]:
        return [
            one for one in self.batches if one.grown_on == grown_on and any(taken is not None for taken in one.times_us)
        ]


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
    """The results of ``attnfuzz bench tune`` for one kernel.

    Regrets are shares by which the choices are slower than the best configuration of each batch, in the geometric mean:
    of the tree, of the best configuration for all, and of the tree on batches that it has not seen (None: there are
    none). ``seen`` and ``unseen`` say the same in more words.
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
    seen: Figures
    unseen: Figures | None
    features: tuple[str, ...]
    max_leaves: int
    tree: Split | Leaf
    record: Record

    def __post_init__(self) -> None:
        if not self.features or not set(self.features) <= set(FEATURES):
            raise ValueError(f"features={list(self.features)} must be some of {', '.join(FEATURES)}")


def grown(kernel: str, record: Record, features: Sequence[str], max_leaves: int) -> Tuned:
    """The tree of ``record``, and what it is worth. Raises ValueError if no configuration ran."""
    seen, unseen = record.samples(grown_on=True), record.samples(grown_on=False)
    if not seen:
        raise ValueError(f"no configuration of {kernel} ran on any batch; try it with attnfuzz bench kernels")
    tried = record.configurations
    node = grow_tree(seen, features, tried, max_leaves=max_leaves, least_gain=LEAST_GAIN)
    one = grow_tree(seen, features, tried, max_leaves=1)
    return Tuned(
        kernel=kernel,
        device=record.machine.name,
        versions=record.machine.versions,
        batches=len(seen),
        configurations=len(tried),
        regret=regret(seen, tried, node),
        regret_of_one=regret(seen, tried, one),
        regret_unseen=regret(unseen, tried, node) if unseen else None,
        seen=_figures(seen, record.defaults(grown_on=True), tried, node, one),
        unseen=_figures(unseen, record.defaults(grown_on=False), tried, node, one) if unseen else None,
        features=tuple(features),
        max_leaves=max_leaves,
        tree=node,
        record=record,
    )


def _figures(
    samples: Sequence[Sample], defaults: Sequence[float], tried: Sequence[Configuration], node: Node, one: Node
) -> Figures:
    def of(tree: Node) -> Loss:
        return _loss([cost(each, each.times[tried.index(choose(tree, each.features))]) for each in samples])

    default = _loss([cost(each, taken) for each, taken in zip(samples, defaults, strict=True)])
    return Figures(batches=len(samples), tree=of(node), one=of(one), default=default)


def _loss(costs: Sequence[float]) -> Loss:
    return Loss(math.expm1(statistics.median(costs)), math.expm1(max(costs)))


def encode_tuned(tuned: Tuned) -> bytes:
    """As JSON that people read: a line for each configuration and each batch."""
    document = msgspec.to_builtins(tuned)
    record = document["record"]
    tables = {name: record[name] for name in ("configurations", "batches")}
    for name in tables:
        record[name] = []
    text = msgspec.json.format(msgspec.json.encode(document), indent=1)
    for name, rows in tables.items():
        lines = b",\n   ".join(map(msgspec.json.encode, rows))
        text = text.replace(b'  "%s": []' % name.encode(), b'  "%s": [\n   %s\n  ]' % (name.encode(), lines))
    return text + b"\n"


def decode_tuned(data: bytes) -> Tuned:
    """Strictly; raises msgspec.ValidationError or msgspec.DecodeError (both ValueError)."""
    return msgspec.json.decode(data, type=Tuned)


_WIDTH = 120


def python_source(tuned: Tuned) -> str:
    """A module with a function ``choose_options`` of the features, and what GPU it was measured on."""
    record, machine = tuned.record, tuned.record.machine
    versions = ", ".join(f"{name} {version}" for name, version in tuned.versions.items())
    types = (type(one).__name__ for leaf in leaves(tuned.tree) for one in leaf.options.values())
    value = " | ".join(dict.fromkeys(types))
    name = tuned.kernel.rpartition(":")[2]
    of_run = f"{tuned.device} on {record.started[:10]} ({versions})"
    return "\n".join(
        [
            f'"""Options of {_prose(name)}, as `attnfuzz bench tune` chose them.',
            "",
            f"Measured on {_prose(of_run)}: {tuned.configurations} configurations.",
            "`attnfuzz bench tree` makes this file again of the record of that run.",
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
            *_signature(tuned.features, value or "int"),
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


def _signature(features: Sequence[str], value: str) -> list[str]:
    """On one line if that is short enough, else as formatters break it."""
    arguments = ", ".join(f"{name}: int" for name in features)
    line = f"def choose_options({arguments}) -> dict[str, {value}]:"
    if len(line) <= _WIDTH:
        return [line]
    inner = [arguments] if len(arguments) + 4 <= _WIDTH else [f"{name}: int," for name in features]
    return ["def choose_options(", *(f"    {one}" for one in inner), f") -> dict[str, {value}]:"]


def _lines(node: Node, indent: str) -> Iterator[str]:
    """Lines of the tree; what comes after a return needs no else."""
    if isinstance(node, Leaf):
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
