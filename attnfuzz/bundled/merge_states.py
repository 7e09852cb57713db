"""merge_states: two states of the same queries over disjoint keys, merged into one. Torch-free by itself.

The numbers of the states are drawn in `attnfuzz.values.states`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from attnfuzz.cases.facets.facet import Axis, Change, Changes, Domain, Facet, Levels, Options, Part, SizeRank, changed
from attnfuzz.cases.facets.heads import HeadSize, heads_class
from attnfuzz.cases.facets.storage import Dtype, KernelOptions, TensorStrides
from attnfuzz.problems.attention import CaseBase, share_default
from attnfuzz.problems.choices import lse_kinds_of, merge_heads_of
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.fields import Choice, Integer, Proposal, Seed, first_of
from attnfuzz.problems.limits import HASH_CHUNK_ELEMENTS
from attnfuzz.problems.module import Contents, ProblemModule, bundled
from attnfuzz.problems.recipes import LSE_KINDS, STATE_RECIPES, LseKind, LsePair, StateRecipe, check_range
from attnfuzz.problems.shapes import ITEMSIZE, Specs, TensorSpec
from attnfuzz.problems.supports import Layout, LseLayout, Supports

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, Float32
    from torch import Tensor

PAIR, SOME = "lse", "some lse"
ONE_EMPTY, BOTH_EMPTY = Feature("one state empty", role="empty"), Feature("both states empty", role="empty")
SIDES_EMPTY = Feature("prefix empty", role="empty"), Feature("suffix empty", role="empty")
FAR_APART = Feature(SOME, " far apart")

_COUNTED = Integer(1, 1 << 20, likely=(1, 2))
_PLAIN: tuple[LsePair, ...] = (("finite", "finite"),)
_TOKEN_COUNTS = (1, 2, 3, 4, 5, 8, 16, 17, 64, 257, 1024)
_ORDINARY_HEAD_SIZE = 256
"""Larger ones would need more memory than a case may take, with as many tokens."""
_EMPTY = ("-inf", "+inf")
_OTHER_SEEDS = (0x11, 0x22)


class MergeStatesCase(CaseBase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Two states of the same queries over disjoint keys, to be merged into one.

    The LSE pair of token ``t`` and head ``h`` is ``lse_pairs[(t * num_q_heads + h) % len(lse_pairs)]``. ``outputs``
    says how both outputs are filled, as V is by the recipe of that name.
    """

    problem: ClassVar[str] = "merge_states"
    tensor_names: ClassVar[tuple[str, ...]] = (
        "prefix_output", "suffix_output", "prefix_lse", "suffix_lse", "output", "output_lse",
    )  # fmt: skip

    part_noun: ClassVar[str] = "token"

    num_tokens: int
    lse_pairs: tuple[LsePair, ...] = _PLAIN
    lse_layout: LseLayout = "HT"
    seed: int = 0
    outputs: StateRecipe = "normal"

    def __post_init__(self) -> None:
        CaseBase.__post_init__(self)
        check_range("num_tokens", self.num_tokens, 1, 1 << 20)
        check_range("len(lse_pairs)", len(self.lse_pairs), 1, 64)
        check_range("seed", self.seed, 0, (1 << 32) - 1)
        share_default(self, "lse_pairs", _PLAIN)

    @property
    def num_parts(self) -> int:
        return self.num_tokens

    @property
    def num_rows(self) -> int:
        return self.num_tokens

    @property
    def work(self) -> int:
        return self.num_tokens * self.num_q_heads * self.head_size

    def alone(self, part: int) -> Self:
        return msgspec.structs.replace(self, num_tokens=1)


@dataclass(slots=True)
class MergeStatesInputs:
    """Inputs of a merge_states kernel; LSE axes as ``lse_layout`` says.

    A state whose LSE is -inf or +inf is empty: its output rows are zeros, or dead memory where the kernel declares
    ``Supports(empty_state_outputs="anything")``.
    """

    prefix_output: Float[Tensor, "num_tokens num_q_heads head_size"]
    prefix_lse: Float32[Tensor, "lse_rows lse_columns"]
    suffix_output: Float[Tensor, "num_tokens num_q_heads head_size"]
    suffix_lse: Float32[Tensor, "lse_rows lse_columns"]
    lse_layout: LseLayout
    output: Float[Tensor, "num_tokens num_q_heads head_size"]
    output_lse: Float32[Tensor, "lse_rows lse_columns"]


class Tokens(Facet[MergeStatesCase]):
    """How many tokens have states."""

    fields = ("num_tokens",)
    parts = (Part("num_tokens", _COUNTED, SizeRank.SEQUENCES, Feature("num_tokens", ">1", "size"), "{} token"),)

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("tokens", ("1", "2 to 16", "over 16"), _tokens)

    def shrink(self, case: MergeStatesCase, domain: Domain) -> Proposal[MergeStatesCase]:
        """One token and one head, with each kind of pair in turn; else fewer tokens."""
        if case.num_tokens * case.num_q_heads > 1:
            pairs = dict.fromkeys(case.lse_pairs)
            alone = [changed(case, num_tokens=1, num_q_heads=1, lse_pairs=(pair,)) for pair in pairs]
            case = yield from first_of(case, alone)
        return (yield from super().shrink(case, domain))


def _tokens(case: MergeStatesCase) -> Levels:
    tokens = case.num_tokens
    return ("1" if tokens == 1 else "2 to 16" if tokens <= 16 else "over 16",)


class StateHeads(Facet[MergeStatesCase]):
    """How many heads have states."""

    fields = ("num_q_heads",)
    jumps_with = "heads"
    parts = (Part("num_q_heads", _COUNTED, SizeRank.HEADS, Feature("num_q_heads", ">1", "size"), "{} query head"),)

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("heads", ("1", "pow2", "other"), lambda case: (heads_class(case.num_q_heads),))


class LsePairs(Facet[MergeStatesCase]):
    """Which kinds of LSE meet."""

    fields = ("lse_pairs",)

    def features(self, case: MergeStatesCase) -> Iterator[Feature]:
        for pair in case.lse_pairs:
            if pair != _PLAIN[0]:
                yield Feature(PAIR, f" {pair[0]}/{pair[1]}", "empty" if any(map(_is_empty, pair)) else "part")

    def traits(self, case: MergeStatesCase) -> Iterator[Feature]:
        for prefix, suffix in case.lse_pairs:
            yield Feature("some prefix LSE", f" {prefix}")
            yield Feature("some suffix LSE", f" {suffix}")
            yield Feature("some LSE", f" {prefix}/{suffix}")
        kinds = {kind for pair in case.lse_pairs for kind in pair}
        if len(kinds) == 1:
            yield Feature("every LSE", f" {kinds.pop()}")

    def general(self, case: MergeStatesCase, domain: Domain) -> Iterator[Feature]:
        """Which side is empty, and what kinds of LSE there are: a mistake cannot tell others of these from them."""
        for pair in case.lse_pairs:
            empty = tuple(map(_is_empty, pair))
            if any(empty):
                yield BOTH_EMPTY if all(empty) else ONE_EMPTY
            yield from (side for side, is_empty in zip(SIDES_EMPTY, empty, strict=True) if is_empty)
            for kind in pair:
                if kind != "finite":
                    yield Feature(SOME, f" {kind}", "empty" if _is_empty(kind) else "part")
            if {"high", "low"} & set(pair):
                yield FAR_APART

    def row_axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("prefix LSE", LSE_KINDS, partial(_lse, 0))
        yield Axis("suffix LSE", LSE_KINDS, partial(_lse, 1))

    def rows(self, case: MergeStatesCase) -> Iterable[LsePair]:
        return set(case.lse_pairs)

    def objections(self, case: MergeStatesCase, domain: Domain) -> Iterator[str]:
        declared = lse_kinds_of(domain.supports)
        others = (kind for pair in case.lse_pairs for kind in pair if kind not in declared)
        yield from (f"lse_pairs={kind!r}, but the kernel declares {declared}" for kind in others)

    def size(self, case: MergeStatesCase, options: Options) -> Iterator[tuple[SizeRank, object]]:
        kinds = tuple((LSE_KINDS.index(prefix), LSE_KINDS.index(suffix)) for prefix, suffix in case.lse_pairs)
        yield SizeRank.TOKENS, (len(kinds), sum(map(sum, kinds)), kinds)

    def shrink(self, case: MergeStatesCase, domain: Domain) -> Proposal[MergeStatesCase]:
        """Fewer pairs, then simpler kinds on each side."""
        for i in range(len(case.lse_pairs) - 1, -1, -1):
            case = yield from first_of(case, [_with_pairs(case, [*case.lse_pairs[:i], *case.lse_pairs[i + 1 :]])])
        kinds = lse_kinds_of(domain.supports)
        for i in range(len(case.lse_pairs)):
            _, suffix = case.lse_pairs[i]
            case = yield from first_of(case, [_with_pair(case, i, (kind, suffix)) for kind in kinds])
            prefix, _ = case.lse_pairs[i]
            case = yield from first_of(case, [_with_pair(case, i, (prefix, kind)) for kind in kinds])
        return case

    def changes(self, case: MergeStatesCase, domain: Domain) -> Iterator[Change]:
        if case.lse_pairs != _PLAIN:
            has_empty = any(_is_empty(kind) for pair in case.lse_pairs for kind in pair)
            yield "finite LSEs only" if has_empty else "LSEs between -4 and 4 only", {"lse_pairs": _PLAIN}

    def alternatives(self, case: MergeStatesCase, domain: Domain) -> Iterator[Changes]:
        """Each side of each pair of another kind, and the sides exchanged; an empty state stays empty."""
        for i, (prefix, suffix) in enumerate(case.lse_pairs):
            swapped = (suffix, prefix)
            others = [(kind, suffix) for kind in _alike(prefix)] + [(prefix, kind) for kind in _alike(suffix)]
            both = zip(_alike(prefix), _alike(suffix), strict=False)
            for pair in (swapped, *others, *both):
                if pair != (prefix, suffix):
                    yield {"lse_pairs": (*case.lse_pairs[:i], pair, *case.lse_pairs[i + 1 :])}


def _is_empty(kind: LseKind) -> bool:
    return kind in _EMPTY


def _lse(side: int, pair: LsePair) -> Levels:
    return (pair[side],)


def _with_pair(case: MergeStatesCase, i: int, pair: LsePair) -> MergeStatesCase | None:
    return _with_pairs(case, [*case.lse_pairs[:i], pair, *case.lse_pairs[i + 1 :]])


def _with_pairs(case: MergeStatesCase, pairs: Sequence[LsePair]) -> MergeStatesCase | None:
    return changed(case, lse_pairs=tuple(pairs))


def _alike(kind: LseKind) -> tuple[LseKind, ...]:
    """Other kinds of a state that is as empty or not."""
    groups: tuple[tuple[LseKind, ...], ...] = (("-inf", "+inf"), ("finite", "equal", "high", "low"))
    return next(tuple(other for other in group if other != kind) for group in groups if kind in group)


class StatesLayout(Facet[MergeStatesCase]):
    """The order of the dimensions of the LSEs, which the kernel declares."""

    fields = ("lse_layout",)
    parts = (Part("lse_layout", Choice(("HT", "TH")), SizeRank.STORAGE, Feature("lse_layout", "={}")),)

    def objections(self, case: MergeStatesCase, domain: Domain) -> Iterator[str]:
        if case.lse_layout != domain.supports.lse_layout:
            yield f"lse_layout={case.lse_layout!r}, but the kernel declares {(domain.supports.lse_layout,)}"


class StateNumbers(Facet[MergeStatesCase]):
    """The numbers in the states."""

    fields = ("outputs", "seed")
    jumps_with = "numbers"
    parts = (
        Part("outputs", Choice(STATE_RECIPES), SizeRank.CONTENTS, Feature("values", "={}", "numbers"), "outputs {}"),
        Part("seed", Seed(), SizeRank.CONTENTS),
    )

    def draws(self, supports: Supports) -> Mapping[str, Sequence[object]]:
        return {"seed": range(64), "outputs": STATE_RECIPES}


@bundled
class MergeStates(ProblemModule):
    """``out`` and ``lse`` of what two parts of the keys gave."""

    case_type = MergeStatesCase
    inputs_type = MergeStatesInputs
    results = ("output", "output_lse")
    facets = (
        Tokens(), StateHeads(), LsePairs(), HeadSize(), Dtype(), KernelOptions(), StatesLayout(), StateNumbers(),
        TensorStrides(),
    )  # fmt: skip

    def tensors(self, case: Any) -> Specs:
        out = (case.num_tokens, case.num_q_heads, case.head_size)
        lse = out[:2] if case.lse_layout == "TH" else (out[1], out[0])
        return {
            "prefix_output": TensorSpec(out, case.dtype),
            "prefix_lse": TensorSpec(lse, "float32"),
            "suffix_output": TensorSpec(out, case.dtype),
            "suffix_lse": TensorSpec(lse, "float32"),
            "output": TensorSpec(out, case.dtype, "output"),
            "output_lse": TensorSpec(lse, "float32", "output"),
        }

    def nbytes(self, case: Any) -> int:
        """Both states, hash words, and float64 intermediates of their size: mostly the error bound's."""
        elements = case.num_tokens * case.num_q_heads * (case.head_size + 2)
        hash_words = 3 * 8 * max(case.num_q_heads * case.head_size, min(elements, HASH_CHUNK_ELEMENTS))
        return int(2 * elements * ITEMSIZE[case.dtype] + hash_words + 20 * 8 * elements)

    def simplest_fields(self, supports: Supports, head_size: int, layout: Layout | None) -> dict[str, Any]:
        heads = (merge_heads_of(supports) or (1,))[0]
        return {"num_q_heads": heads, "num_tokens": 1, "lse_layout": supports.lse_layout}

    def draw(self, decisions: Any, plan: Any) -> MergeStatesCase:
        from attnfuzz.strategies.cases import decide_format_and_work, decide_plain
        from attnfuzz.strategies.values import LSE_PAIRS_BYTES, decide_lse_pairs

        format_, work = decide_format_and_work(decisions, plan)
        heads = format_.num_q_heads
        work_of_token = heads * max(1, format_.head_size // _ORDINARY_HEAD_SIZE)
        possible = [count for count in _TOKEN_COUNTS if count * work_of_token <= work]
        num_tokens = decisions.pick(possible or _TOKEN_COUNTS[:1])
        plain = decide_plain(decisions, plan)
        kinds, most = lse_kinds_of(plan.supports), min(8, num_tokens * heads)
        pairs = decide_lse_pairs(decisions.part(LSE_PAIRS_BYTES), kinds, min_pairs=1, max_pairs=most)
        return MergeStatesCase(
            num_q_heads=heads,
            num_tokens=num_tokens,
            head_size=format_.head_size,
            dtype=format_.dtype,
            **plain,
            lse_layout=plan.supports.lse_layout,
            options=format_.options,
            strides=format_.strides,
            lse_pairs=pairs,
        )

    def other_contents(self, case: Any, supports: Supports) -> Sequence[tuple[MergeStatesCase, str]]:
        first, second = (case.seed ^ seed for seed in _OTHER_SEEDS)
        swapped = tuple((suffix, prefix) for prefix, suffix in case.lse_pairs)
        others = [(msgspec.structs.replace(case, lse_pairs=swapped, seed=first), "with other states")]
        if "-inf" in lse_kinds_of(supports):
            empty = msgspec.structs.replace(case, lse_pairs=(("-inf", "-inf"),), seed=second)
            others.append((empty, "with both states of every row empty"))
        return others

    def as_supported(self, fields: dict[str, Any], supports: Supports) -> list[str]:
        """An LSE in the kernel's layout, and empty states as it marks them."""
        changes = []
        if fields["lse_layout"] != supports.lse_layout:
            fields["lse_layout"] = supports.lse_layout
            changes.append(f"LSE as {supports.lse_layout}")
        kinds = lse_kinds_of(supports)
        empty = next((kind for kind in kinds if kind in _EMPTY), None)
        pairs = tuple(
            tuple(empty if kind in _EMPTY and kind not in kinds and empty else kind for kind in pair)
            for pair in fields["lse_pairs"]
        )
        if pairs != tuple(fields["lse_pairs"]):
            fields["lse_pairs"] = pairs
            changes.append(f"empty states as {empty}")
        return changes

    def axes(self, case: Any, name: str) -> tuple[str, ...]:
        if name == "output_lse":
            return ("head", "token") if case.lse_layout == "HT" else ("token", "head")
        return ("token", "head") if name.endswith("lse") else ("token", "head", "dim")

    def dead_words(self, case: Any, supports: Supports, row: int) -> list[str]:
        is_dead = supports.empty_state_outputs == "anything"
        states = "outputs of states whose LSE is -inf or +inf, and " if is_dead else ""
        return [f"what must not matter here: {states}whatever lies around the tensors"]

    def seqs_of(self, case: Any, row: int) -> tuple[int, ...]:
        return ()

    def contents(self, cases: Sequence[Any], device: torch.device | str, supports: Supports) -> list[Contents]:
        from attnfuzz.values.states import merge_values_of_many

        values = merge_values_of_many(
            cases,
            device,
            lse_base2=supports.lse == "base2",
            empty_are_zeros=supports.empty_state_outputs == "zeros",
        )
        return [Contents(states, None) for states in values]

    def write(self, case: Any, tensors: dict[str, Tensor], values: Any, placement: Any) -> None:
        """The states that are not dead."""
        import torch

        from attnfuzz.inputs.layouts import tokens_first

        for name, source, live in (
            ("prefix_output", values.prefix_output, values.prefix_live),
            ("suffix_output", values.suffix_output, values.suffix_live),
        ):
            target = tensors[name]
            empty = torch.zeros_like(source) if values.empty_are_zeros else target
            target.copy_(torch.where(live[..., None], source, empty))
        tokens_first(tensors["prefix_lse"], case.lse_layout).copy_(values.prefix_lse)
        tokens_first(tensors["suffix_lse"], case.lse_layout).copy_(values.suffix_lse)

    def reference(self, case: Any, values: Any) -> Any:
        """The merged state in float64, axes ``[num_tokens num_q_heads]``; both empty: ``out = 0``, ``lse = -inf``."""
        import torch

        from attnfuzz.inputs.reference import ExactResult, merge_all

        unit = math.log(2) if values.lse_base2 else 1.0
        lse = torch.stack((values.prefix_lse, values.suffix_lse), dim=-1).double() * unit
        out = torch.stack((values.prefix_output, values.suffix_output), dim=-2)
        return ExactResult(*merge_all(out, torch.where(lse == float("inf"), float("-inf"), lse)))

    def logical_result(self, case: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        from attnfuzz.inputs.layouts import tokens_first

        return out.double(), tokens_first(lse, case.lse_layout).double()
