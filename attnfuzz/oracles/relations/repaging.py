"""The same tokens on pages of another size: the same result, within bounds.

Not bit for bit: tiles may follow the pages, and the order of additions with them.
"""

from __future__ import annotations

import msgspec

from attnfuzz.declaration import Declaration
from attnfuzz.judging.trial import Trial
from attnfuzz.oracles.relations.bounded import too_far_apart
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.oracles.relations.transformed import Changed, fits
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import Case, PagedDecodeCase
from attnfuzz.problems.choices import block_sizes_of
from attnfuzz.problems.supported import supports_case

__all__ = ["REPAGING"]


def _applies(declaration: Declaration, case: Case) -> bool:
    return isinstance(case, PagedDecodeCase) and _changed(declaration, case) is not None


def _check(trial: Trial) -> Failure | None:
    case = trial.case
    changed = _changed(trial.kernel.declaration, case) if isinstance(case, PagedDecodeCase) else None
    if changed is None or not isinstance(case, PagedDecodeCase):
        return None
    words = f"on pages of {changed.block_size} tokens instead of {case.block_size}"
    return too_far_apart("repaging", trial, Changed(words, changed, trial.reference.values_on(trial.device)))


def _changed(declaration: Declaration, case: PagedDecodeCase) -> PagedDecodeCase | None:
    """On pages of the next size that the kernel takes; none is shared, which its number would no longer say."""
    sizes = sorted(block_sizes_of(declaration.supports))
    larger = [size for size in sizes if size > case.block_size]
    for size in (*larger, *sizes) if declaration.supports.combinations else (*larger[:1], *sizes[:1]):
        pages = msgspec.structs.replace(case.pages, shared_blocks=0)
        changed = msgspec.structs.replace(case, block_size=size, pages=pages)
        if (
            size != case.block_size
            and supports_case(declaration.supports, declaration.options, changed)
            and fits(changed)
        ):
            return changed
    return None


REPAGING = Relation("repaging", _applies, _check, by_bounds=True)
