"""Proposals that make many fields simplest at once. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attnfuzz.minimise.domain import Domain
from attnfuzz.minimise.edits import changed, first_head_needles
from attnfuzz.minimise.search import Proposal, first_of
from attnfuzz.problems.cases import AttentionCase, Case
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.simplest import simplest_case

__all__ = ["jump"]

_GROUPS: tuple[tuple[str, ...], ...] = (
    ("num_q_heads", "num_kv_heads"),
    ("values", "scale", "seed"),
    ("variant",),
    ("kv",),
    ("strides", "pages", "extra_rows", "query_slack", "seq_slack", "padding_tokens"),
    ("dtype", "layout"),
    ("v_head_size",),
    ("head_size", "v_head_size"),
    ("options",),
)
"""Fields that seldom matter together. Lengths, pages' sizes and splits are left to their own proposals."""

_ALL_BUT_OPTIONS = tuple(name for group in _GROUPS[:-1] for name in group)


def jump(case: Any, domain: Domain) -> Proposal[Any]:
    """Everything simplest; everything but lengths and tiles; then one group of fields after another."""
    simplest = simplest_case(case.problem, domain.supports, domain.options)
    case = yield from first_of(case, [simplest, _simplified(case, simplest, _ALL_BUT_OPTIONS)])
    for group in _GROUPS:
        case = yield from first_of(case, [_simplified(case, simplest, group)])
    return case


def _simplified(case: Case, simplest: Case, names: Iterable[str]) -> Case | None:
    """``case`` with the named fields, as far as it has them, as they are in ``simplest``."""
    fields = {name: getattr(simplest, name) for name in names if hasattr(case, name)}
    if isinstance(case, AttentionCase):
        if "scale" in fields or case.scale == default_scale(case.head_size):
            fields["scale"] = default_scale(fields.get("head_size", case.head_size))
        if "num_kv_heads" in fields and "values" not in fields:
            fields["values"] = first_head_needles(case.values)
    return changed(case, **fields)
