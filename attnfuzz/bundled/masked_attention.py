"""masked_attention: a mask says of each query token which keys it sees. Torch-free by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from attnfuzz.bundled.attention import VarlenProblem, varlen_facets
from attnfuzz.cases.facets.facet import (
    Axis,
    Change,
    Changes,
    Domain,
    Facet,
    Levels,
    Options,
    SizeRank,
    changed,
    not_among,
)
from attnfuzz.problems.attention import VarlenCase, share_default
from attnfuzz.problems.choices import masks_of
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.fields import Proposal, first_of, lower_integer
from attnfuzz.problems.masks import CAUSAL_MASK, MASK_KINDS, PERIOD, Mask, parents_of, seen_keys, table_starts
from attnfuzz.problems.module import bundled
from attnfuzz.problems.shapes import Specs, TensorSpec
from attnfuzz.problems.supports import Layout, Supports
from attnfuzz.problems.variants import VariantName
from attnfuzz.problems.wording import plural, query_of_row, ranges

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32, Int32
    from torch import Tensor

_SEES_NO_KEY = Feature("a query sees no key", role="empty")
_SEEN = ("every key up to itself", "some keys hidden", "keys behind it", "no key")


class MaskedAttentionCase(VarlenCase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Attention under a mask, which says of each query token which keys of its sequence it sees.

    A query token that sees none has ``out = 0`` and ``lse = -inf``, or its sink.
    """

    problem: ClassVar[str] = "masked_attention"
    tensor_names: ClassVar[tuple[str, ...]] = tuple(name for name in VarlenCase.tensor_names if name != "alibi_slopes")
    variant_names: ClassVar[tuple[VariantName, ...]] = ("soft_cap", "sinks")
    hides_keys: ClassVar[bool] = True

    mask: Mask = CAUSAL_MASK

    def __post_init__(self) -> None:
        VarlenCase.__post_init__(self)
        for name in self.variant.names:
            if name not in self.variant_names:
                raise ValueError(
                    f"variant.{name} must be left out in masked_attention: the mask says which keys are seen, and no "
                    "engine says how far away they are; use paged_attention"
                )
        share_default(self, "mask", CAUSAL_MASK)

    @property
    def rows_seen(self) -> tuple[bytes, ...]:
        return seen_keys(self.mask, self.query_lens, self.seq_lens, self.block_size)

    def of_sequences(self, kept: Sequence[int]) -> dict[str, Any]:
        numbers = tuple(self.mask.of(seq) for seq in kept) if self.mask.seqs else ()
        return {**VarlenCase.of_sequences(self, kept), "mask": msgspec.structs.replace(self.mask, seqs=numbers)}

    @property
    def row_lens(self) -> tuple[int, ...]:
        """Up to the last key that each row sees; 0 for one that sees none."""
        return tuple(row.rfind(1) + 1 for row in self.rows_seen)


@dataclass(slots=True)
class MaskedAttentionInputs:
    """Inputs of a masked_attention kernel: the batch as in paged_attention, and a mask.

    ``mask`` holds the tables of all sequences one after another: that of sequence s, with n query tokens and length L,
    begins at ``mask_indptr[s]`` and has n rows of L entries, so that query token j sees key t where
    ``mask[mask_indptr[s] + j * L + t]`` is True. FlashInfer's ``custom_mask`` and SGLang's lie so. In a large batch the
    last table may begin before entry 2^31 and reach beyond: then ``mask_indptr`` does not say where it ends. A query
    token that sees no key has ``out = 0`` and ``lse = -inf``, or that of its sink. Keys that a query does not see are
    live memory: they are finite numbers, and may be read. The last four are None unless the case asks for them.
    """

    q: Float[Tensor, "num_tokens num_q_heads head_size"]
    k_cache: Float[Tensor, "num_blocks ..."]
    v_cache: Float[Tensor, "num_blocks ..."]
    block_table: Int32[Tensor, "num_seqs max_blocks_per_seq"]
    seq_lens: Int32[Tensor, " num_seqs"]
    cu_seqlens_q: Int32[Tensor, " num_seqs_plus_1"]
    mask: Bool[Tensor, " mask_size"]
    mask_indptr: Int32[Tensor, " num_seqs_plus_1"]
    scale: float
    block_size: int
    layout: Layout
    max_query_len: int
    max_seq_len: int
    out: Float[Tensor, "num_tokens num_q_heads v_head_size"]
    lse: Float32[Tensor, "num_tokens num_q_heads"]
    soft_cap: float | None = None
    sinks: Float32[Tensor, " num_q_heads"] | None = None
    k_scale: Float32[Tensor, " num_kv_scales"] | None = None
    v_scale: Float32[Tensor, " num_kv_scales"] | None = None


class MaskFacet(Facet[MaskedAttentionCase]):
    """``mask``: causal is the simplest."""

    fields = ("mask",)
    jumps_with = "mask"

    def told(self, case: MaskedAttentionCase) -> Iterator[str]:
        yield from map(str, self.features(case))

    def features(self, case: MaskedAttentionCase) -> Iterator[Feature]:
        if case.mask.kind != "causal":
            yield _of_kind(case)
        if any(map(_sees_nothing, case.rows_seen)):
            yield _SEES_NO_KEY

    def traits(self, case: MaskedAttentionCase) -> Iterator[Feature]:
        yield _of_kind(case)
        yield from (Feature("some query sees", f" {level}") for level in _seen(case))

    def size(self, case: MaskedAttentionCase, options: Options) -> Iterator[tuple[SizeRank, object]]:
        """Fewer numbers come first, and smaller ones."""
        numbers = [number for of_seq in case.mask.seqs for number in of_seq]
        rank = MASK_KINDS.index(case.mask.kind)
        sizes = (len(case.mask.seqs), len(numbers), sum(map(abs, numbers)))
        yield SizeRank.QUERIES, (rank, *sizes)
        yield SizeRank.EACH_TOKEN, case.mask.seqs

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("mask", domain.supports.masks, lambda case: (case.mask.kind,))
        yield Axis("keys seen", _SEEN, _seen)

    def objections(self, case: MaskedAttentionCase, domain: Domain) -> Iterator[str]:
        yield from not_among("mask.kind", case.mask.kind, domain.supports.masks)
        if not domain.supports.mask_per_sequence and len({case.mask.of(seq) for seq in range(case.num_seqs)}) > 1:
            yield f"mask.seqs={case.mask.seqs!r} differ, but the kernel declares mask_per_sequence=False"
        if not domain.supports.empty_sequences:
            for row, seen in enumerate(case.rows_seen):
                if _sees_nothing(seen):
                    yield f"query token {row} sees no key, but the kernel declares empty_sequences=False"

    def shrink(self, case: MaskedAttentionCase, domain: Domain) -> Proposal[MaskedAttentionCase]:
        """Another kind without numbers, the same numbers for all sequences, fewer of them, and smaller ones."""
        case = yield from first_of(case, [_with_mask(case, Mask(kind=kind)) for kind in domain.supports.masks])
        seqs = case.mask.seqs
        needed = seqs[: case.num_seqs]
        case = yield from first_of(case, [_with(case, (one,)) for one in dict.fromkeys(seqs)])
        case = yield from first_of(case, [_with(case, needed)])
        for place in range(len(case.mask.seqs)):
            case = yield from self._lower_numbers(case, place)
        return case

    def _lower_numbers(self, case: MaskedAttentionCase, place: int) -> Proposal[MaskedAttentionCase]:
        i = 0
        while place < len(case.mask.seqs) and i < len(case.mask.seqs[place]):
            before = case.mask.seqs[place]
            shorter = [before[:i], before[:i] + before[i + 1 :]]
            case = yield from first_of(case, [_with_numbers(case, place, numbers) for numbers in shorter])
            if place >= len(case.mask.seqs) or case.mask.seqs[place] != before:
                continue
            case = yield from lower_integer(case, before[i], case.mask.least_number, _number(place, i))
            i += 1
        return case

    def changes(self, case: MaskedAttentionCase, domain: Domain) -> Iterator[Change]:
        for kind in domain.supports.masks:
            if kind != case.mask.kind and kind in ("causal", "full"):
                yield f"a {kind} mask instead of {case.mask.kind}", {"mask": Mask(kind=kind)}

    def alternatives(self, case: MaskedAttentionCase, domain: Domain) -> Iterator[Changes]:
        """Another kind: bits that hide the same of the first keys, the first page, or all other query tokens."""
        others = {"bits": _as_bits(case), "pages": ((0,),), "tree": ((-1, -1),)}
        for kind in domain.supports.masks:
            if kind in others and case.mask.kind not in ("causal", kind):
                yield {"mask": Mask(kind=kind, seqs=others[kind])}

    def without(self, feature: Feature, case: MaskedAttentionCase, domain: Domain) -> Iterator[Changes]:
        if feature == _of_kind(case) and case.mask != CAUSAL_MASK:
            yield {"mask": CAUSAL_MASK}
        if feature == _SEES_NO_KEY:
            yield {"mask": CAUSAL_MASK}
            yield {"mask": Mask(kind="full")}


def _of_kind(case: MaskedAttentionCase) -> Feature:
    return Feature("mask", f"={case.mask.kind}")


def _as_bits(case: MaskedAttentionCase) -> tuple[tuple[int, ...], ...]:
    """Numbers of a mask of bits under which each row sees what it does, if no sequence is longer than their period."""

    def number(row: int) -> int:
        return sum(1 << key for key, seen in enumerate(case.rows_seen[row][:PERIOD]) if not seen)

    return tuple(tuple(map(number, case.rows_of(seq))) for seq in range(case.num_seqs))


def _sees_nothing(seen: bytes) -> bool:
    return 1 not in seen


def _seen(case: MaskedAttentionCase) -> Levels:
    """The keys that rows see, next to those of a causal mask."""
    found = set()
    for row, seen in enumerate(case.rows_seen):
        rows = case.rows_of(case.row_seqs[row])
        own = len(seen) - (rows.stop - row) + 1
        is_hidden = 0 in seen[:own]
        found |= {_SEEN[3]} if _sees_nothing(seen) else {_SEEN[1]} if is_hidden else set()
        found |= {_SEEN[2]} if 1 in seen[own:] else set()
    return tuple(sorted(found, key=_SEEN.index)) or _SEEN[:1]


def _with_mask(case: MaskedAttentionCase, mask: Mask) -> MaskedAttentionCase | None:
    return changed(case, mask=mask)


def _with(case: MaskedAttentionCase, seqs: tuple[tuple[int, ...], ...]) -> MaskedAttentionCase | None:
    try:
        return _with_mask(case, msgspec.structs.replace(case.mask, seqs=seqs))
    except ValueError:
        return None


def _with_numbers(case: MaskedAttentionCase, place: int, numbers: tuple[int, ...]) -> MaskedAttentionCase | None:
    seqs = case.mask.seqs
    if place >= len(seqs):
        return None
    return _with(case, (*seqs[:place], numbers, *seqs[place + 1 :]))


def _number(place: int, i: int) -> Callable[[MaskedAttentionCase, int], MaskedAttentionCase | None]:
    def edit(case: MaskedAttentionCase, number: int) -> MaskedAttentionCase | None:
        numbers = case.mask.seqs[place] if place < len(case.mask.seqs) else ()
        return _with_numbers(case, place, (*numbers[:i], number, *numbers[i + 1 :])) if i < len(numbers) else None

    return edit


@bundled
class MaskedAttention(VarlenProblem):
    """Its masks lie one after another."""

    case_type = MaskedAttentionCase
    inputs_type = MaskedAttentionInputs
    facets = varlen_facets(MaskFacet())

    def queries(self, case: Any) -> Specs:
        size = table_starts(case.query_counts, case.seq_lens)[-1]
        starts = {"mask_indptr": TensorSpec((case.num_seqs + 1,), "int32"), "mask": TensorSpec((size,), "uint8")}
        return super().queries(case) | starts

    def simplest_fields(self, supports: Supports, head_size: int, layout: Layout | None) -> dict[str, Any] | None:
        fields = super().simplest_fields(supports, head_size, layout)
        return None if fields is None else {**fields, "mask": Mask(kind=masks_of(supports)[0])}

    def told_otherwise(self, case: Any, supports: Supports) -> Sequence[tuple[str, Mapping[str, Any]]]:
        kind = next((kind for kind in masks_of(supports) if kind != case.mask.kind), None)
        return [] if kind is None else [(f"mask.kind={kind}", {"mask": Mask(kind=kind)})]

    def length_words(self, case: Any, row: int) -> list[str]:
        seq, query, seen = case.row_seqs[row], query_of_row(case, row), case.rows_seen[row]
        keys = ranges(t for t, is_seen in enumerate(seen) if is_seen)
        what = f"sees keys {keys} of {len(seen)}" if keys else f"sees none of {plural(len(seen), 'key')}"
        found = [f"token {row} of the batch is {query} and {what} (mask: {case.mask.kind})"]
        if case.mask.kind == "tree":
            number = row - case.rows_of(seq).start
            parent = parents_of(case.mask.of(seq), case.query_lens[seq])[number]
            found += [f"in the tree, query {number} follows " + ("the context" if parent < 0 else f"query {parent}")]
        return found

    def write(self, case: Any, tensors: dict[str, Tensor], values: Any, placement: Any) -> None:
        import torch

        super().write(case, tensors, values, placement)
        if table := bytearray(b"".join(case.rows_seen)):
            tensors["mask"].copy_(torch.frombuffer(table, dtype=torch.uint8))
        starts = table_starts(case.query_counts, case.seq_lens)
        tensors["mask_indptr"].copy_(torch.tensor(starts, dtype=torch.int32, device="cpu"))

    def inputs(self, case: Any, tensors: dict[str, Tensor]) -> Any:
        import torch

        return super().inputs(case, tensors | {"mask": tensors["mask"].view(torch.bool)})
