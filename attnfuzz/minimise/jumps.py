"""Proposals that make many fields simplest at once. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attnfuzz.cases.domain import Domain
from attnfuzz.cases.edits import changed, first_head_needles
from attnfuzz.cases.search import Proposal, first_of
from attnfuzz.problems.cases import AttentionCase, Case
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.simplest import simplest_cases
from attnfuzz.problems.supports import Combination
from attnfuzz.problems.where import fields_of, fits

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

_FIELDS_OF = {
    "gqa_ratio": ("num_q_heads", "num_kv_heads"),
    "num_q_heads": ("num_q_heads", "num_kv_heads"),
    "num_kv_heads": ("num_q_heads", "num_kv_heads"),
    "v_head_size": ("head_size", "v_head_size"),
    "kv_dtype": ("dtype", "kv"),
}
"""What has to change for another value of something in a combination, where that is no field by itself."""
_MOST_COMBINATIONS = 16

_ALL_BUT_OPTIONS = tuple(name for group in _GROUPS[:-1] for name in group)


def jump(case: Any, domain: Domain) -> Proposal[Any]:
    """Everything simplest; everything but lengths and tiles; one group of fields after another; other combinations."""
    each = simplest_cases(case.problem, domain.supports, domain.options)
    simplest = each[0][1]
    case = yield from first_of(case, [simplest, _simplified(case, simplest, _ALL_BUT_OPTIONS)])
    for group in _GROUPS:
        case = yield from first_of(case, [_simplified(case, simplest, group)])
    others = [(one.combinations[0], own) for one, own in each[:_MOST_COMBINATIONS] if one.combinations]
    return (yield from first_of(case, [_onto(case, combination, own) for combination, own in others]))


def _onto(case: Case, combination: Combination, simplest: Case) -> Case | None:
    """``case`` with what ``combination`` does not permit of it as in that one's simplest case; the rest stays."""
    misfits = [name for name, values in combination.items() if not fits(case, {name: values})]
    own = [name for name in misfits if name in fields_of(case.problem)]
    options = {name: simplest.options[name] for name in misfits if name not in own}
    moved = _simplified(case, simplest, [field for name in own for field in _FIELDS_OF.get(name, (name,))])
    return moved and changed(moved, options={**case.options, **options})


def _simplified(case: Case, simplest: Case, names: Iterable[str]) -> Case | None:
    """``case`` with the named fields, as far as it has them, as they are in ``simplest``."""
    fields = {name: getattr(simplest, name) for name in names if hasattr(case, name)}
    if isinstance(case, AttentionCase):
        if "scale" in fields or case.scale == default_scale(case.head_size):
            fields["scale"] = default_scale(fields.get("head_size", case.head_size))
        if "num_kv_heads" in fields and "values" not in fields:
            fields["values"] = first_head_needles(case.values)
    return changed(case, **fields)
