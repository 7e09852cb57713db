"""All relations, and which of them judge a case."""

import zlib
from collections.abc import Sequence

from attnfuzz.declaration import Declaration
from attnfuzz.oracles.relations.batch_invariance import BATCH_INVARIANCE
from attnfuzz.oracles.relations.block_table_slack import BLOCK_TABLE_SLACK
from attnfuzz.oracles.relations.guard_page import GUARD_PAGE
from attnfuzz.oracles.relations.merge_laws import MERGE_LAWS
from attnfuzz.oracles.relations.page_permutation import PAGE_PERMUTATION
from attnfuzz.oracles.relations.page_relocation import PAGE_RELOCATION
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.oracles.relations.value_affinity import VALUE_AFFINITY
from attnfuzz.oracles.verdict import FATAL_ORACLES, OracleName, Relations
from attnfuzz.problems.cases import Case, encode_case

__all__ = ["RELATIONS", "applicable", "chosen", "drawn"]

RELATIONS: tuple[Relation, ...] = (
    PAGE_PERMUTATION,
    PAGE_RELOCATION,
    BLOCK_TABLE_SLACK,
    BATCH_INVARIANCE,
    VALUE_AFFINITY,
    MERGE_LAWS,
    GUARD_PAGE,
)
"""In the order of `attnfuzz.oracles.verdict.RELATION_ORACLES`. What may end the process comes last: where all relations
judge a case, the others have had their say then."""

_ONE_IN_ON_GPU = 8
"""Cases of which one draws a relation on a GPU: there a relation's run waits for the device by itself, while the case's
own runs share the wait with a batch."""


def applicable(declaration: Declaration, case: Case, oracles: Sequence[OracleName]) -> list[Relation]:
    """Those among `oracles` that can judge `case`."""
    return [relation for relation in RELATIONS if relation.name in oracles and relation.applies(declaration, case)]


def drawn(
    declaration: Declaration, case: Case, oracles: Sequence[OracleName], *, device: str = "cpu"
) -> Relation | None:
    """The one that `case` draws among those applicable: the same case draws the same anywhere and always."""
    number = zlib.crc32(encode_case(case))
    if device == "cuda":
        number, rest = divmod(number, _ONE_IN_ON_GPU)
        if rest:
            return None
    beside_accuracy = "accuracy" in oracles
    candidates = [
        relation
        for relation in applicable(declaration, case, oracles)
        if not (relation.by_bounds and beside_accuracy)
        for _ in range(relation.weight)
    ]
    return candidates[number % len(candidates)] if candidates else None


def chosen(
    declaration: Declaration, case: Case, oracles: Sequence[OracleName], relations: Relations, *, device: str
) -> list[Relation]:
    """What `relations` means for `case`."""
    if relations == "survivable":
        oracles = [name for name in oracles if name not in FATAL_ORACLES]
    if relations is None or relations == "survivable":
        one = drawn(declaration, case, oracles, device=device)
        return [] if one is None else [one]
    found = applicable(declaration, case, oracles)
    return found if relations == "all" else [relation for relation in found if relation.name in relations]
