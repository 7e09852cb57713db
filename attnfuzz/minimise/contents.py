"""Proposals for where an attention case's pages lie and what its tensors hold. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgspec

from attnfuzz.cases.domain import Domain
from attnfuzz.cases.edits import changed, with_lengths
from attnfuzz.cases.search import Proposal, first_of, lower_integer
from attnfuzz.problems.cases import AttentionCase, DenseDecodeCase, PagedDecodeCase
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.quantised_kv import KV_DTYPES, KV_GRANULARITIES, KV_SCALE_RECIPES, KV_SCALE_TENSORS
from attnfuzz.problems.recipes import KeyRecipe, Padding, PageOrder, ValueRecipe
from attnfuzz.problems.variants import ALIBI_RECIPES, SINK_RECIPES, absent_tensors

__all__ = ["lower_needles", "lower_pages", "lower_quantised_kv", "lower_values", "lower_variant"]

_SIMPLE_CAPS = (1.0, 30.0)


def lower_pages(case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
    if isinstance(case, DenseDecodeCase):
        return (yield from lower_integer(case, case.extra_rows, 0, lambda case, rows: changed(case, extra_rows=rows)))
    if not isinstance(case, PagedDecodeCase):
        return case
    for name in ("shared_blocks", "spare_blocks", "extra_columns"):
        case = yield from lower_integer(case, getattr(case.pages, name), 0, _set_pages(name))
    for name, simpler in (("order", get_args(PageOrder)), ("padding", get_args(Padding)), ("seed", (0,))):
        edit = _set_pages(name)
        case = yield from first_of(case, [edit(case, value) for value in simpler])
    return case


def lower_needles(case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
    case = yield from first_of(case, [_set_values(case, needles=())])
    for i in range(len(case.values.needles) - 1, -1, -1):
        needles = list(case.values.needles)
        needle = needles.pop(i)
        first = msgspec.structs.replace(needle, kv_head=0, position=0)
        fewer, moved = tuple(needles), tuple(sorted({*needles, first}))
        case = yield from first_of(case, [_set_values(case, needles=fewer), _set_values(case, needles=moved)])
    return case


def lower_values(case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
    case = yield from first_of(case, [_set_values(case, keys=keys) for keys in get_args(KeyRecipe)])
    case = yield from first_of(case, [_set_values(case, values=values) for values in get_args(ValueRecipe)])
    size = abs(case.values.logit_exponent)
    case = yield from lower_integer(case, size, 0, _set_exponent)
    case = yield from first_of(case, [_set_values(case, seed=0)])
    return (yield from first_of(case, [changed(case, scale=scale) for scale in (default_scale(case.head_size), 1.0)]))


def lower_variant(case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
    """One variant after another left out; then a smaller window, for shorter sequences too, and simpler numbers."""
    for name in case.variant.names:
        case = yield from first_of(case, [_set_variant(case, **{name: None})])
    if case.variant.freed_pages:
        case = yield from first_of(case, [_set_variant(case, freed_pages=False)])
    if case.variant.window is not None:
        case = yield from lower_integer(case, case.variant.window, 1, _shift_window)
    if case.variant.window is not None:
        case = yield from lower_integer(case, case.variant.window, 1, lambda case, w: _set_variant(case, window=w))
    for name, simpler in (("soft_cap", _SIMPLE_CAPS), ("alibi", ALIBI_RECIPES), ("sinks", SINK_RECIPES)):
        if getattr(case.variant, name) is not None:
            case = yield from first_of(case, [_set_variant(case, **{name: value}) for value in simpler])
    return case


def lower_quantised_kv(case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
    """A plain cache; or scales that are simpler."""
    if case.kv is None:
        return case
    strides = {name: kind for name, kind in case.strides.items() if name not in KV_SCALE_TENSORS}
    case = yield from first_of(case, [changed(case, kv=None, strides=strides)])
    choices = {"dtype": KV_DTYPES, "per": KV_GRANULARITIES, "scales": KV_SCALE_RECIPES}
    for name, simpler in choices.items():
        if case.kv is not None:
            kv = case.kv
            others = [msgspec.structs.replace(kv, **{name: value}) for value in simpler]
            case = yield from first_of(case, [changed(case, kv=other) for other in others])
    return case


def _set_variant(case: AttentionCase, **fields: Any) -> AttentionCase | None:
    """Strides of tensors that are gone go too."""
    variant = msgspec.structs.replace(case.variant, **fields)
    absent = absent_tensors(variant)
    strides = {name: kind for name, kind in case.strides.items() if name not in absent}
    return changed(case, variant=variant, strides=strides)


def _shift_window(case: AttentionCase, window: int) -> AttentionCase | None:
    """A smaller window that leaves out as many tokens."""
    fewer = (case.variant.window or window) - window
    lengths = [max(min(length, 1), length - fewer) for length in case.seq_lens]
    shorter = with_lengths(case, lengths, lambda at, old, new: max(0, at + new - old))
    return shorter and _set_variant(shorter, window=window)


def _set_pages(name: str) -> Callable[[PagedDecodeCase, Any], PagedDecodeCase | None]:
    return lambda case, value: changed(case, pages=msgspec.structs.replace(case.pages, **{name: value}))


def _set_values(case: AttentionCase, **fields: Any) -> AttentionCase | None:
    return changed(case, values=msgspec.structs.replace(case.values, **fields))


def _set_exponent(case: AttentionCase, size: int) -> AttentionCase | None:
    return _set_values(case, logit_exponent=-size if case.values.logit_exponent < 0 else size)
