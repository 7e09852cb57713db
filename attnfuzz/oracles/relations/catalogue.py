"""All relations, and which of them judge a case."""

import hashlib
from collections.abc import Sequence
from functools import partial

from attnfuzz.declaration import Declaration
from attnfuzz.inputs.registry import problem_of
from attnfuzz.oracles.registry import KNOWN, OracleName, oracle_of
from attnfuzz.oracles.relations.relation import Relation
from attnfuzz.problems.cases import Case, case_number
from attnfuzz.verdict import Drawn, Relations

RELATIONS: tuple[Relation, ...] = tuple(one.load() for one in KNOWN.values() if one.is_relation)
"""In the order in which they are asked."""

_ONE_IN = {"cpu": 2, "cuda": 8}
"""Cases of which one draws a relation. Its runs cost as much as the case, or several times that, and most bugs show
without. On a GPU those that are not made along with a batch (see `Relation.further`) wait for the device as well."""

_OF_A_USERS_ONE_IN = {"cpu": 8, "cuda": 32}
"""Share of cases of users' problems that draw a relation: nearly all that judges them is the sequence of calls, which
takes as long as ten cases, and took half of a search's time when every second case had it."""

_COSTLY_ONE_IN = 32
"""Share of these that draw a costly one. Drawn as often as others, when they took 0.4 to 0.9 s on an H100 shared by
eight executors, the three that are left 287 of 2,780 cases a second. A campaign, which sees what they take, gives them
a share of each kernel's time besides (`attnfuzz.campaign.draw.costly_relations`): a kernel that judges 800 cases in its
time draws three, of all that are costly."""


def applicable(
    declaration: Declaration, case: Case, oracles: Sequence[OracleName], *, device: str = "cpu"
) -> list[Relation]:
    """The relations among `oracles` that can judge `case` on `device`."""
    return [one for one in _able(oracles, device) if _knows(one, case) and one.applies(declaration, case)]


def drawn(
    declaration: Declaration, case: Case, oracles: Sequence[OracleName], *, device: str = "cpu", turn: int | None = None
) -> Relation | None:
    """The one that `case` draws among those applicable: the same case draws the same anywhere and always.

    `turn`: the one among those that are costly there whose turn it is, see `Drawn`; first those of what the kernel has
    promised by name, then those that compile little.
    """
    number = case_number(case)
    one_in = _ONE_IN if problem_of(case).targets is None else _OF_A_USERS_ONE_IN
    if turn is None and number % one_in[device]:
        return None
    candidates = [one for one in _able(oracles, device) if device in one.drawn_on and _knows(one, case)]
    costly, others = (
        [one for one in candidates if (device in one.oracle.costly_on) is is_costly] for is_costly in (True, False)
    )
    if turn is not None:
        costly = [one for one in costly if one.applies(declaration, case)]
        # a kernel that is searched for seconds has few
        costly.sort(key=lambda one: (not one.is_promised(declaration), one.oracle.compilations))
        return costly[turn % len(costly)] if costly else None
    if others and number // one_in[device] % _COSTLY_ONE_IN:
        costly = []
    lot = partial(_lot, number, declaration, case)
    in_order = (*sorted(costly, key=lot), *sorted(others, key=lot))
    return next((relation for relation in in_order if relation.applies(declaration, case)), None)


def chosen(
    declaration: Declaration, case: Case, oracles: Sequence[OracleName], relations: Relations, *, device: str
) -> list[Relation]:
    """The relations that judge ``case``, as `relations` says."""
    if relations is None or isinstance(relations, Drawn):
        how = relations or Drawn()
        left = [name for name in oracles if name not in how.without]
        one = drawn(declaration, case, left, device=device, turn=how.turn)
        return [] if one is None else [one]
    if relations == "all":
        return applicable(declaration, case, oracles, device=device)
    named = [name for name in relations if name in oracles or oracle_of(name).asked == "by name"]
    return [one.looking_closer() for one in applicable(declaration, case, named, device=device)]


def _knows(relation: Relation, case: Case) -> bool:
    """Whether it says something of the problem of `case`: most are laws of attention."""
    if problem_of(case).targets is not None:
        return relation.of_any_problem
    return isinstance(case, relation.cases) and (relation.under_a_mask or not case.hides_keys)


def _able(oracles: Sequence[OracleName], device: str) -> list[Relation]:
    return [relation for relation in RELATIONS if relation.name in oracles and device in relation.oracle.devices]


def _lot(number: int, declaration: Declaration, case: Case, relation: Relation) -> bytes:
    """The lowest one wins; a relation has as many as it weighs."""
    weight = relation.weight if isinstance(relation.weight, int) else relation.weight(declaration, case)
    names = (f"{number} {relation.name} {i}".encode() for i in range(weight))
    return min(hashlib.blake2b(name, digest_size=8).digest() for name in names)
