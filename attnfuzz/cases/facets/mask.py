"""The mask of masked_attention. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from attnfuzz.cases.facets.facet import Axis, Change, Changes, Domain, Facet, Levels, Options, Place, changed, not_among
from attnfuzz.problems.cases import MaskedAttentionCase
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.fields import Proposal, first_of, lower_integer
from attnfuzz.problems.masks import CAUSAL_MASK, MASK_KINDS, PERIOD, Mask

__all__ = ["MaskFacet"]

_SEES_NO_KEY = Feature("a query sees no key", role="empty")
_SEEN = ("every key up to itself", "some keys hidden", "keys behind it", "no key")


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

    def size(self, case: MaskedAttentionCase, options: Options) -> Iterator[tuple[Place, object]]:
        """Fewer numbers come first, and smaller ones."""
        numbers = [number for of_seq in case.mask.seqs for number in of_seq]
        rank = MASK_KINDS.index(case.mask.kind)
        sizes = (len(case.mask.seqs), len(numbers), sum(map(abs, numbers)))
        yield Place.QUERIES, (rank, *sizes)
        yield Place.EACH_TOKEN, case.mask.seqs

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
    """What rows see, next to those of a causal mask."""
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
