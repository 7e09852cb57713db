"""A kernel's computation as a graph of operations, and the lines in it that a rounding comes from. Torch-free.

Each operation on floating-point numbers has its place in the source and what it was computed of.
`attnfuzz.triton_compat.interpreter_operations`, `attnfuzz.explaining.torch_operations` and `attnfuzz.explaining.ttir`
make a graph of what ran.

A replay has found which rounding gives a result (`attnfuzz.explaining.low_precision`). `places_of` looks for the
operation that does this: not by names in the source, but by what was computed of what. A score is what two inputs
multiplied come to before exp; a weight is what comes of exp; and a weighted value, of a weight and an input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "add", "argument", "convert", "div", "dot", "exp", "load", "log", "max", "move", "mul", "other", "softmax", "store",
    "sum", "tf32_dot",
]  # fmt: skip
"""``move`` leaves numbers as they are (a shape, a choice, a loop's variable); ``add`` subtracts, too, and ``max`` is
also the minimum. ``argument`` is a number that was given as such, ``load`` numbers from memory."""

SourcePlace = tuple[str, int]
"""A file, as the code says, and a line in it, from 1 on."""

BITS = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8, "float8": 8,
}  # fmt: skip
"""Of a number in each format; ``float8`` stands for those that attnfuzz has no cases of."""

_TRITONS = ("/triton/language/", "/triton/runtime/", "/attnfuzz/triton_compat/")
"""Folders of Triton's own files, and of what attnfuzz has in their place."""


@dataclass(eq=False, slots=True)
class Operation:
    """``dtype`` is that of the result, of the names in `BITS`. ``launch`` tells kernels apart that ran."""

    kind: Kind
    dtype: str
    place: SourcePlace | None = None
    launch: int = 0
    operands: list[Operation] = field(default_factory=list)

    @property
    def rounds(self) -> bool:
        """Whether numbers of 16 or 8 bits are made here that were not there before."""
        bits = BITS[self.dtype]
        if bits > BITS["float16"] or self.kind in ("argument", "load", "max", "move", "store"):
            return False
        if self.kind != "convert":
            return True
        return any(other.dtype != self.dtype and BITS[other.dtype] >= bits for other in self.operands)


class Operations:
    """A graph of operations, which a loop may make cyclic."""

    def __init__(self, operations: Iterable[Operation] = ()) -> None:
        self._all = list(operations)
        self._users: dict[Operation, list[Operation]] = {one: [] for one in self._all}
        for user in self._all:
            for operand in user.operands:
                self._users.setdefault(operand, []).append(user)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._all)

    def of_kind(self, *kinds: Kind) -> set[Operation]:
        """All operations of these kinds."""
        return {one for one in self._all if one.kind in kinds}

    def after(
        self, starts: Collection[Operation], through: Callable[[Operation, Operation], bool] = lambda *_: True
    ) -> set[Operation]:
        """``starts`` and what is computed of them: by operations that ``through(user, operand)`` lets pass."""
        return _closure(starts, lambda one: [user for user in self._users[one] if through(user, one)])

    def before(
        self, ends: Collection[Operation], through: Callable[[Operation], bool] = lambda _: True
    ) -> set[Operation]:
        """``ends`` and what they are computed of: each operand that ``through`` lets pass, and so on."""
        return _closure(ends, lambda one: list(filter(through, one.operands)))


class Recording:
    """Writes operations down as they run.

    One that a loop does again, at the same ``place`` of the program and on numbers of the same origin, is the same one.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._known: dict[object, Operation] = {}
        self._origins: dict[Operation, frozenset[Operation]] = {}

    def add(
        self,
        kind: Kind,
        dtype: str,
        operands: Iterable[Operation] = (),
        *,
        calls: object = None,
        place: SourcePlace | None = None,
        launch: int = 0,
    ) -> Operation:
        """Add what ``kind`` makes of ``operands``. ``calls``: all that tells where in the program it is done."""
        given = list(dict.fromkeys(operands))
        origins = frozenset().union(*(self._origins[one] for one in given))
        key = calls, kind, dtype, launch, origins
        made = self._known.get(key)
        if made is None:
            made = self._known[key] = Operation(kind, dtype, place, launch)
            self._origins[made] = frozenset({made}) if kind == "load" else origins
            self.operations.append(made)
        made.operands += [one for one in given if one not in made.operands]
        return made


def _closure(starts: Collection[Operation], following: Callable[[Operation], list[Operation]]) -> set[Operation]:
    found, open_ = set(starts), list(starts)
    while open_:
        more = [one for one in following(open_.pop()) if one not in found]
        found.update(more)
        open_.extend(more)
    return found


def first_of_users(places: Iterable[SourcePlace]) -> SourcePlace | None:
    """Find, among places that called one another, innermost first, the first that is not in Triton's own files."""
    return next((place for place in places if not any(part in place[0] for part in _TRITONS)), None)


MOST_LINES = 3
"""Of more lines that may be meant none is told."""

Found = set[Operation]

_MOVES = ("move", "convert")
_SUMS = ("add", "sum", "dot", "tf32_dot")
_PRODUCTS: tuple[Kind, ...] = ("mul", "dot", "tf32_dot")
_OF_WEIGHTS = re.compile(r"weights in (?P<dtype>\w+)")
_OF_FORMAT = re.compile(r"(?P<name>.+) in (?:b?float16)")
_CONVERTED = re.compile(r"(?P<parts>(?:q |K |V )+)to (?P<dtype>\w+)")


def places_of(names: Sequence[str], operations: Operations) -> tuple[SourcePlace, ...]:
    """Where one of the roundings ``names`` (`Failure.replays`, the likeliest first) is done; empty if it is not known.

    Of several that would give the same result, the first that the kernel does at all. A replay cannot know every order
    in which a kernel adds, so where products or scores are said to be rounded, any rounding of these will do.
    """
    roles = _Roles(operations)
    of_own = {name if (match := _OF_FORMAT.fullmatch(name)) is None else match["name"] for name in names}
    related = _OF_SCORES if set(_OF_SCORES) & of_own else ()
    for name in dict.fromkeys((*names, *related)):
        rule = _rule(name)
        found = set() if rule is None else rule(roles)
        if not found:
            continue
        for some in (found, roles.beginnings(found)):
            places = sorted({one.place for one in some if one.place is not None})
            if 0 < len(places) <= MOST_LINES:
                return tuple(places)
        return ()
    return ()


class _Roles:
    """Roles of the operations of a kernel: scores, weights, outputs."""

    def __init__(self, graph: Operations) -> None:
        self.graph = graph
        self.exps = {one for one in graph.of_kind("exp", "softmax") if not self._is_of_scores(one)}
        self.weights = graph.after(self.exps)
        self.loaded = graph.after(graph.of_kind("load")) - self.weights
        self.products = {
            one
            for one in graph.of_kind(*_PRODUCTS) - self.weights
            if sum(operand in self.loaded for operand in one.operands) > 1 and self._ends_as_score(one)
        }
        """Of two inputs: q and k, element by element or as matrices."""
        self.multiplied = graph.after(
            {one for one in self.products if one.kind == "mul"}, lambda user, _: user.kind in _MOVES
        )
        """Single products, not added up."""
        self.scores = {one for one in graph.after(self.products) if one not in self.weights} - self.multiplied
        self.scores &= self._becoming_weights
        self.weighted = graph.after({one for one in graph.of_kind(*_PRODUCTS) if self.weighs(one)})
        """Values times weights, and what comes of them."""

    @property
    def _becoming_weights(self) -> Found:
        """Operations that lead to what exp is taken of; in a kernel without exp, to what is stored."""
        launches = {one.launch for one in self.exps}
        return self.graph.before(self.exps | {one for one in self.graph.of_kind("store") if one.launch not in launches})

    def _is_of_scores(self, exp: Operation) -> bool:
        """Whether a soft cap is made of it: of its numbers exp is taken once more, with no logarithm in between."""
        after = self.graph.after({exp}, lambda user, _: user.kind != "log") - {exp}
        return any(one.kind in ("exp", "softmax") for one in after)

    def _ends_as_score(self, product: Operation) -> bool:
        """Whether no further input multiplies it before it is added up, or exp is taken of it."""

        def is_passed(user: Operation, operand: Operation) -> bool:
            others = (other for other in user.operands if other is not operand)
            return user.kind not in _PRODUCTS or not any(other in self.loaded for other in others)

        if product.kind != "mul":
            return True
        reached = self.graph.after({product}, is_passed)
        return any(one.kind == "sum" or one in self.exps for one in reached)

    def weighs(self, product: Operation) -> bool:
        """Whether it is one of a weight and an input."""
        return any(one in self.weights for one in product.operands) and any(
            one in self.loaded for one in product.operands
        )

    def beginnings(self, found: Found) -> Found:
        """Keep the operations that are not computed of others of them, unless in a loop of each other."""
        return {
            one
            for one in found
            if not any(other in found and one not in self.graph.before({other}) for other in self.graph.before({one}))
        }

    def computed_by(self, one: Operation, kinds: Sequence[str]) -> bool:
        """Whether the numbers that ``one`` holds, perhaps in another format, come of an operation of ``kinds``."""
        return one.kind in kinds or (one.kind == "convert" and any(source.kind in kinds for source in _sources(one)))


def _sources(one: Operation) -> Found:
    """Find the operations that computed numbers which have only been moved or converted since."""
    found: Found = set()
    seen, open_ = {one}, [one]
    while open_:
        for operand in open_.pop().operands:
            if operand.kind not in _MOVES:
                found.add(operand)
            elif operand not in seen:
                seen.add(operand)
                open_.append(operand)
    return found


def _rounding(found: Found) -> Found:
    return {one for one in found if one.rounds}


def _products(roles: _Roles) -> Found:
    return _rounding(roles.multiplied)


def _products_and_sums(roles: _Roles) -> Found:
    products = _products(roles)
    sums = {one for one in _rounding(roles.scores) if one.kind in _SUMS}
    dots = {one for one in _rounding(roles.products) if one.kind != "mul"}
    return products | sums | dots if sums or dots else set()


def _scores(roles: _Roles) -> Found:
    return roles.beginnings(_rounding(roles.scores))


def _scaled(roles: _Roles) -> Found:
    """Rounded operands of q·k that have been multiplied by a number."""

    def is_scaled(one: Operation) -> bool:
        return one.kind == "mul" and sum(operand in roles.loaded for operand in one.operands) == 1

    operands = {operand for one in roles.products for operand in one.operands}
    found = _rounding(roles.graph.before(operands, lambda one: one.kind in (*_MOVES, "mul")) - roles.scores)
    return {
        one
        for one in found
        if one not in roles.products
        and (is_scaled(one) or (one.kind == "convert" and any(map(is_scaled, _sources(one)))))
    }


def _exponential(roles: _Roles) -> Found:
    """exp of few bits, or of numbers that are rounded for it."""
    exps = {one for one in roles.exps if one.kind == "exp"}
    before = {one for exp in exps for one in roles.graph.before(set(exp.operands), lambda one: one.kind in _MOVES)}
    return roles.beginnings(_rounding(exps | {one for one in before if one.kind == "convert"}))


def _weights(dtype: str) -> Callable[[_Roles], Found]:
    """Weights that are converted to ``dtype``; of those of 8 bits, some have no name here."""

    def found(roles: _Roles) -> Found:
        every = {one for one in _rounding(roles.weights - roles.weighted) if one.kind == "convert"}
        return {one for one in every if dtype == one.dtype or (one.dtype == "float8" and BITS[dtype] == BITS["float8"])}

    return found


def _row_sums(roles: _Roles) -> Found:
    return {one for one in _rounding(roles.weights - roles.weighted) if roles.computed_by(one, ("add", "sum"))}


def _accumulators(roles: _Roles) -> Found:
    """Sums of weights x V that go on being computed with: not what is stored as it is."""

    def goes_on(one: Operation) -> bool:
        return any(user.kind not in (*_MOVES, "store") for user in roles.graph.after({one}) - {one})

    return {one for one in _rounding(roles.weighted) if roles.computed_by(one, _SUMS) and goes_on(one)}


def _partial_lse(roles: _Roles) -> Found:
    after = roles.graph.after(roles.graph.of_kind("log"), lambda user, _: user not in roles.exps)
    return roles.beginnings(_rounding(after))


def _not_subtracted(roles: _Roles) -> Found:
    """exp of scores that no maximum has to do with."""
    of_maximum = roles.graph.after(roles.graph.of_kind("max"))
    exps = {one for one in roles.exps - of_maximum if one.kind == "exp"}
    return {one for one in exps if roles.scores & roles.graph.before({one}) - {one}}


def _converted(parts: Sequence[str], dtype: str) -> Callable[[_Roles], Found]:
    """Find loads converted to ``dtype`` before they are multiplied: of V by weights, of q and K to scores."""

    def found(roles: _Roles) -> Found:
        products = {one for one in roles.graph.of_kind(*_PRODUCTS) if roles.weighs(one)} if "V" in parts else set()
        products |= roles.products if {"q", "K"} & set(parts) else set()
        operands = {one for product in products for one in product.operands if one in roles.loaded}
        before = roles.graph.before(operands, lambda one: one.kind in (*_MOVES, "mul")) & roles.loaded
        converted = {one for one in _rounding(before - roles.products) if one.kind == "convert" and one.dtype == dtype}
        is_clear = len({one.place for one in converted}) <= len(parts)
        return converted if is_clear else set()

    return found


_OF_SCORES = ("products", "products and sums", "scores")
"""What rounds the same numbers, in another place."""

_RULES: dict[str, Callable[[_Roles], Found]] = {
    "products": _products,
    "products and sums": _products_and_sums,
    "scores": _scores,
    "scaled query": _scaled,
    "scaled query in base 2": _scaled,
    "both scaled": _scaled,
    "row sum": _row_sums,
    "accumulator": _accumulators,
    "both sums": lambda roles: _row_sums(roles) | _accumulators(roles),
    "short exp2": _exponential,
    "partial LSE": _partial_lse,
    "no maximum": _not_subtracted,
    "tf32": lambda roles: roles.graph.of_kind("tf32_dot"),
}


def _rule(name: str) -> Callable[[_Roles], Found] | None:
    """How to look for a rounding; None if no operation does it: an exp made of a polynomial, a number to begin with."""
    if match := _OF_WEIGHTS.fullmatch(name):
        return _weights(match["dtype"])
    if match := _CONVERTED.fullmatch(name):
        return _converted(match["parts"].split(), match["dtype"])
    match = _OF_FORMAT.fullmatch(name)
    return _RULES.get(match["name"] if match else name)
