"""What the measured weights of one row say: tokens dropped or doubled, places that are not its own, other scores.

In places that the row must not read: whose they are, and what they were read in place of. Of partial states: splits
that overlap, leave out tokens, or have a wrong log-sum-exp. Which mistake that comes of is for `diagnose` to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from attnfuzz.explaining.measured_row import Counts, MeasuredRow, Reading
from attnfuzz.explaining.row import Query
from attnfuzz.explaining.words import descriptions, row_name, weight
from attnfuzz.problems.block_table import block_table_rows
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.wording import number

__all__ = ["another_page", "read_row", "split_mistakes"]

_NOBODYS = "a physical page is read that no sequence owns"
_ANOTHER = "a page is read that is not the one in the block table"

_SHOWN = 3


def read_elsewhere(row: MeasuredRow, gained: list[int], lost: list[int]) -> Reading:
    """A row with weight in places `gained`, none of which it owns, and none at its positions `lost`."""
    for explain in (_another_head, _behind_the_query, _past_the_end, _another_sequence, another_page, _other_slots):
        found = explain(row, gained, lost)
        if found is not None:
            return found
    shown = [f"{row.places.name(place, reader=row.seq)} has weight {weight(row.got[place])}" for place in gained]
    text = f"{', '.join(shown[:_SHOWN])}{', ...' if len(shown) > _SHOWN else ''}, expected 0"
    if lost:
        has = "has" if len(lost) == 1 else "have"
        text += f"; {row.tokens(lost)} {has} weight 0, expected {weight(row.expected[row.own[lost]].sum())}"
    return Reading(text, tuple(_owners_of(row, gained)))


def _owners_of(row: MeasuredRow, gained: list[int]) -> Iterator[str]:
    """What all places have in common."""
    contents = {row.places.contents(*row.places.coordinates(place)[:2]) for place in gained}
    if contents == {"which no sequence owns"}:
        yield "memory is read that no sequence owns"
    elif all(text.startswith("past the end") for text in contents):
        yield "memory past the end of a sequence is read"


def _another_head(row: MeasuredRow, gained: list[int], lost: list[int]) -> Reading | None:
    slots = {row.places.coordinates(int(place))[:2]: t for t, place in enumerate(row.own.tolist())}
    found = [row.places.coordinates(place) for place in gained]
    heads = {head for _, _, head in found}
    if len(heads) != 1 or any((a, b) not in slots for a, b, _ in found):
        return None
    (head,) = heads
    read = torch.tensor(
        [row.places.number(*row.places.coordinates(int(place))[:2], head) for place in row.own],
        dtype=torch.int64,
        device="cpu",
    )
    what = ""
    if not row.fits(row.predicted(read, read)):
        what = "V of " if row.fits(row.predicted(row.own, read)) else ""
    where = "" if len(lost) == row.num_tokens - row.first_seen or not lost else f" for {row.tokens(lost)}"
    formulas = _head_formulas(row, head)
    return Reading(
        f"query head {row.head} reads {what}KV head {head}, expected {row.kv_head}{where}",
        (
            *(f"query head h reads {what}KV head {f}, expected h // {row.case.gqa_ratio}" for f in formulas),
            f"{what or 'K and V of '}another KV head are read",
        ),
    )


def _head_formulas(row: MeasuredRow, head: int) -> Iterator[str]:
    case = row.case
    ambiguous = case.gqa_ratio == case.num_kv_heads
    if head == row.head % case.gqa_ratio and case.gqa_ratio > 1:
        yield f"h % {case.gqa_ratio}" + ("" if ambiguous else " (the group size)")
    if head == row.head % case.num_kv_heads and not ambiguous:
        yield f"h % {case.num_kv_heads} (the number of KV heads)"
    if head == row.head:
        yield "h"
    yield str(head)
    for divisor in range(1, 2 * case.gqa_ratio + 2):
        if divisor != case.gqa_ratio and head == min(row.head // divisor, case.num_kv_heads - 1):
            yield f"h // {divisor}"


def _past_the_end(row: MeasuredRow, gained: list[int], lost: list[int]) -> Reading | None:
    if lost or not row.num_tokens:
        return None
    length = row.case.seq_lens[row.seq]
    last, first = row.places.slot(row.seq, length - 1)
    found = [row.places.coordinates(place) for place in gained]
    if any(a != last or b <= first or head != row.kv_head for a, b, head in found):
        return None
    offsets = [b for _, b, _ in found]
    positions = [length + offset - first - 1 for offset in offsets]
    total = weight(row.got[gained].sum())
    several = "s" if len(offsets) > 1 else ""
    ends = f"{positions[0]}" if not several else f"{positions[0]}-{positions[-1]}"
    where = f" ({row.places.slot_name(last, offsets[0])}{' on' if several else ''})" if row.case.page_size else ""
    return Reading(
        f"slot{several} {ends}{where} past the end of the sequence {'have' if several else 'has'} weight {total}, "
        "expected 0",
        ("slots past the end of a sequence are read",),
    )


def _behind_the_query(row: MeasuredRow, gained: list[int], lost: list[int]) -> Reading | None:
    """Tokens of the same sequence that the query must not see yet."""
    if lost:
        return None
    behind = row.places.own(row.seq, row.kv_head)[row.num_tokens :].tolist()
    if not set(gained) <= set(behind):
        return None
    positions = sorted(row.num_tokens + behind.index(place) for place in gained)
    total = weight(row.got[gained].sum())
    has, last = ("has" if len(positions) == 1 else "have"), row.tokens([row.num_tokens - 1])
    return Reading(
        f"{row.tokens(positions)}, behind the query at {last}, {has} weight {total}, expected 0",
        (
            f"{'the next token' if len(positions) == 1 else f'{len(positions)} tokens'} behind the query "
            f"{'is' if len(positions) == 1 else 'are'} read",
            "tokens behind the query are read",
        ),
    )


def _another_sequence(row: MeasuredRow, gained: list[int], lost: list[int]) -> Reading | None:
    others = [row.places.owners.get(row.places.coordinates(place)[:2], []) for place in gained]
    heads = {row.places.coordinates(place)[2] for place in gained}
    for seq in {seq for owners in others for seq, _ in owners} - {row.seq}:
        positions = [position for owners in others for owner, position in owners if owner == seq]
        if len(positions) == len(gained) and heads == {row.kv_head} and len(lost) == row.num_tokens - row.first_seen:
            start = min(positions) if row.first_seen else 0
            if sorted(positions) != list(range(start, start + len(positions))):
                continue
            step = seq - row.seq
            return Reading(
                f"the tokens of sequence {seq} are read, expected those of sequence {row.seq}",
                (
                    f"the tokens of sequence {seq} are read",
                    f"sequence s reads the tokens of sequence s{step:+d}",
                ),
            )
    return None


def another_page(row: MeasuredRow, gained: list[int], lost: list[int]) -> Reading | None:
    """Whole pages, or what of them is live, read from elsewhere at the same offsets; None if that is not what it is."""
    case = row.case
    if not isinstance(case, PagedDecodeCase) or not lost:
        return None
    wanted: dict[int, list[int]] = {}
    for position in lost:
        wanted.setdefault(position // case.block_size, []).append(position % case.block_size)
    found: dict[int, list[int]] = {}
    for place in gained:
        page, offset, head = row.places.coordinates(place)
        if head != row.kv_head:
            return None
        found.setdefault(page, []).append(offset)
    if len(found) > len(wanted) or any(offsets not in wanted.values() for offsets in found.values()):
        return None
    pairs = _paired(wanted, found)
    if pairs is None:
        return None
    table = block_table_rows(case)
    texts, general = [], []
    for page, read in pairs[:_SHOWN]:
        tokens = row.tokens([page * case.block_size + offset for offset in wanted[page]])
        is_are = "are" if len(wanted[page]) > 1 else "is"
        texts.append(f"{tokens} {is_are} read from physical page {read}, where the table says {table[row.seq][page]}")
        general.append(set(_origins(row, read)))
    common = set.intersection(*general)
    return Reading("; ".join(texts), tuple(origin for origin in _ORIGINS if origin in common))


_ORIGINS = (_NOBODYS, _ANOTHER)
"""The most telling first."""


def _origins(row: MeasuredRow, read: int) -> Iterator[str]:
    """What is to be said of physical page `read`, which is not the row's."""
    if not any(slot[0] == read for slot in row.places.owners):
        yield _NOBODYS
    yield _ANOTHER


def _paired(wanted: dict[int, list[int]], found: dict[int, list[int]]) -> list[tuple[int, int]] | None:
    """Which page was read in place of which; one that is found once may stand for several."""
    left = dict(found)
    pairs = []
    for page, offsets in wanted.items():
        fitting = [read for read, its in left.items() if its == offsets]
        fitting = fitting or [read for read, its in found.items() if its == offsets]
        if not fitting:
            return None
        pairs.append((page, fitting[0]))
        left.pop(fitting[0], None)
    return None if left else pairs


def _other_slots(row: MeasuredRow, gained: list[int], lost: list[int]) -> Reading | None:
    """Token by token, in the order of memory."""
    if len(gained) != len(lost):
        return None
    texts = [
        f"{row.tokens([position])} is read from {row.places.name(place, reader=row.seq)}"
        for position, place in zip(lost, gained, strict=True)
    ]
    more = ", ..." if len(texts) > _SHOWN else ""
    return Reading("; ".join(texts[:_SHOWN]) + more, ("tokens are read from places that are not theirs",))


_LEAST = 2.0**-12
_BOUNDS = 8.0
_ROUNDOFF = 1e-5


def split_mistakes(row: MeasuredRow) -> Iterator[str]:
    """One clause on each mistake that can be seen in a split by itself. Which split a token is in is free."""
    by_split, lse = row.weights.by_split, row.weights.split_lse
    if by_split is None:
        return
    mine = by_split[row.number][:, row.own] if row.num_tokens else by_split.new_zeros((by_split.shape[1], 0))
    read = mine > _LEAST
    yield from _overlaps(row, read)
    if lse is not None:
        yield from _wrong_lses(row, read, lse[row.number])


def _overlaps(row: MeasuredRow, read: Bool[Tensor, "num_splits seq_len"]) -> Iterator[str]:
    several = (read.sum(0) > 1).nonzero()[:, 0].tolist()
    if several:
        splits = read[:, several[0]].nonzero()[:, 0].tolist()
        is_are = "is" if len(several) == 1 else "are"
        yield f"{row.tokens(several)} {is_are} in splits {' and '.join(map(str, splits))}"


def _wrong_lses(
    row: MeasuredRow, read: Bool[Tensor, "num_splits seq_len"], lse: Float64[Tensor, " num_splits"]
) -> Iterator[str]:
    """Of each split, compared with the tokens that it gave weight to."""
    scores = row.final_scores
    for split, got in enumerate(lse.tolist()):
        tokens = read[split].nonzero()[:, 0]
        if not len(tokens):
            if got != -math.inf:
                yield f"split {split} has no token, but lse = {number(got)}, expected -inf"
            continue
        expected = float(torch.logsumexp(scores[tokens], 0))
        slack = _BOUNDS * float(row.weights.lse_bound[row.number]) + _ROUNDOFF * (1 + abs(expected))
        if not abs(got - expected) <= slack:
            which = row.tokens(tokens.tolist())
            yield f"split {split} has {which}, but lse = {number(got)}, expected {number(expected)}"


def _beyond_the_window(row: MeasuredRow) -> Reading | None:
    """Tokens that have weight and lie outside the window."""
    if row.case.variant.window is None or not (outside := _outside_the_window(row)):
        return None
    lies, has = ("lies", "has") if len(outside) == 1 else ("lie", "have")
    total = weight(row.got[row.own[outside]].sum())
    text = f"{row.tokens(outside)} {lies} outside the window of {row.case.variant.window} and {has} weight {total}"
    return Reading(f"{text}, expected 0", ("tokens outside the window are read",))


def _outside_the_window(row: MeasuredRow) -> list[int]:
    """Positions before the window that have weight, unless others' places have some as well: then pages are wrong."""
    is_own = row.got.new_zeros(len(row.got)).index_fill_(0, row.own, 1.0) > 0
    if bool(((row.got > row.bound) & ~is_own).any()):
        return []
    before = row.own[: row.first_seen]
    found: list[int] = (row.got[before] > row.bound[before]).nonzero()[:, 0].tolist()
    return found


def read_row(row: MeasuredRow) -> Reading | None:
    """What is wrong with a row; None if its weights and its LSE are right."""
    if row.num_tokens == 0:
        return _empty(row)
    if not bool(row.got.isfinite().all()):
        return Reading("weights are NaN or infinite", ("weights are NaN or infinite",))
    if not bool(row.weights.wrong[row.number].any()):
        return _lse_alone(row)
    if not bool((row.got.abs() > row.bound).any()):
        return _nothing_read(row)
    for read in _READERS:
        if (found := read(row)) is not None:
            return found
    return _largest_errors(row)


def _empty(row: MeasuredRow) -> Reading | None:
    lse = row.weights.lse
    expected_lse = float(row.weights.expected_lse[row.number])
    right_lse = lse is None or not bool(row.weights.wrong_lse[row.number])
    constant = row.weights.constant[row.number]
    if right_lse and bool((constant == 0).all()) and not bool((row.got != 0).any()):
        return None
    seen = "" if lse is None else f" and lse = {number(float(lse[row.number]))}"
    out = number(float(constant[0])) if not bool((row.got > 0).any()) else "an average of slots that are not its own"
    what, general = "the sequence is empty", "the result of an empty sequence is wrong"
    if row.case.seen(row.row) is not None:
        what, general = "the query sees no key", "the result of a query that sees no key is wrong"
    return Reading(f"{what}: got out = {out}{seen}, expected 0 and {number(expected_lse)}", (general,))


def _nothing_read(row: MeasuredRow) -> Reading:
    seen = range(row.first_seen, row.num_tokens)
    tokens = row.tokens(list(seen))
    has = "has" if len(seen) == 1 else "have"
    lse = row.weights.lse
    as_empty = lse is not None and _is_of_no_token(row, float(lse[row.number]))
    why = ": the sequence is treated as empty" if as_empty else ""
    top = float(row.scores(row.own).max())
    scores = f" (its largest score is {number(top)})" if abs(top) > 80 else ""
    total = weight(row.expected.sum())
    return Reading(f"{tokens} {has} weight 0, expected {total}{why}{scores}", ("no token has any weight",))


def _is_of_no_token(row: MeasuredRow, lse: float) -> bool:
    """-inf, or the sink."""
    if not row.beside_tokens:
        return lse == -math.inf
    sink = float(row.weights.expected_lse[row.number]) + math.log(row.beside_tokens)
    return math.isclose(lse, sink, rel_tol=1e-4, abs_tol=1e-4)


def _result_of_another_row(row: MeasuredRow) -> Reading | None:
    for i, expected in enumerate(row.weights.expected):
        if i == row.number or torch.equal(expected, row.expected) or not _same(row, i):
            continue
        other = Query.numbered(row.case, i)
        if other.kv_head != row.kv_head and other.row == row.row:
            continue  # another KV head says more
        if other.seq != row.seq and other.head == row.head and other.num_tokens == row.num_tokens:
            continue  # as does another sequence's page
        if other.seq == row.seq and other.row != row.row and torch.equal(_q(row, other), _q(row, row)):
            continue  # the same query with another causal limit: which tokens it reads says more
        text = f"the result is that of {row_name(row.case, i)}"
        return Reading(text, ("rows are exchanged or written to another row's place",))
    return None


def _q(row: MeasuredRow, query: Query) -> Float[Tensor, " head_size"]:
    return row.values.q[query.row, query.head]


def _same(row: MeasuredRow, other: int) -> bool:
    expected, bound = row.weights.expected[other], row.weights.bound[other]
    lse = row.weights.lse
    if lse is not None and abs(float(lse[row.number] - row.weights.expected_lse[other])) > float(
        8 * row.weights.lse_bound[other]
    ):
        return False
    return bool(((row.got - expected).abs() <= 2 * bound).all()) and bool((expected > 8 * bound).any())


def _elsewhere(row: MeasuredRow) -> Reading | None:
    is_own = torch.zeros_like(row.got, dtype=torch.bool)
    is_own[row.own] = True
    gained = ((row.got > row.bound) & ~is_own).nonzero()[:, 0].tolist()
    if not gained:
        return None
    got, expected, bound = (part[row.own] for part in (row.got, row.expected, row.bound))
    lost = ((got <= bound) & (expected > 8 * bound)).nonzero()[:, 0].tolist()
    return read_elsewhere(row, gained, lost)


def _counted(row: MeasuredRow) -> Reading | None:
    counts = row.counts
    if counts is None:
        return None
    dropped, repeated = counts.positions(0), counts.repeated
    if not dropped and not repeated:
        return _factor(counts)
    if dropped and repeated and int((counts.times[repeated] - 1).sum()) == len(dropped):
        return _read_twice(row, counts, dropped, repeated)
    texts, general = [], []
    if dropped:
        total = weight(row.expected[row.own[dropped]].sum())
        verb = "has" if len(dropped) == 1 else "have"
        what = "dropped" if counts.sum != "all" else "in the sum of weights, but V is left out"
        if row.reads_outside:
            what = "read from outside the cache"
        texts.append(f"{row.tokens(dropped)} {verb} weight 0, expected {total}: {what}")
        general += [f"{name} is {what}" for name in descriptions(row.case, row.num_tokens, dropped, row.first_seen)]
        general.append(f"tokens are {what}")
    for times in sorted({int(counts.times[position]) for position in repeated}):
        positions = counts.positions(times)
        got, expected = (weight(part[row.own[positions]].sum()) for part in (row.got, row.expected))
        often = _often(times)
        verb = "has" if len(positions) == 1 else "have"
        texts.append(f"{row.tokens(positions)} {verb} weight {got}, expected {expected}: counted {often}")
        names = descriptions(row.case, row.num_tokens, positions, row.first_seen)
        general += [f"{name} is counted {often}" for name in names]
        general.append("tokens are counted more than once")
    return Reading("; ".join(texts), tuple(general))


def _read_twice(row: MeasuredRow, counts: Counts, dropped: list[int], repeated: list[int]) -> Reading:
    """As many tokens missing as there are too many: some are read from the places of others."""
    pages = another_page(row, row.own[repeated].tolist(), dropped)
    if pages is not None:
        return pages
    sources = [position for position in repeated for _ in range(int(counts.times[position]) - 1)]
    texts = [
        f"{row.tokens([position])} has weight 0, expected {weight(row.expected[row.own[position]])}, and "
        f"{row.tokens([source])} is counted {_often(int(counts.times[source]))}: it is read in its place"
        for position, source in zip(dropped, sources, strict=True)
    ]
    steps = {source - position for position, source in zip(dropped, sources, strict=True)}
    general = ["tokens are read from places of other tokens"]
    if len(steps) == 1:
        general.insert(0, f"token t is read from the place of token t{steps.pop():+d}")
    return Reading("; ".join(texts[:_SHOWN]) + ("; ..." if len(texts) > _SHOWN else ""), tuple(general))


def _often(times: int) -> str:
    return "twice" if times == 2 else f"{times} times"


def _factor(counts: Counts) -> Reading:
    """All weights too large or too small by the same factor."""
    told = weight(counts.factor)
    text = f"all weights are {told if told != weight(1.0) else f'{counts.factor:.7g}'} x the right ones"
    return Reading(text, (text, "all weights are off by a factor"))


def _query_of_another_row(row: MeasuredRow) -> Reading | None:
    """The right keys and values with another query."""
    for i in range(row.case.num_rows * row.case.num_q_heads):
        other = Query.numbered(row.case, i)
        q = _q(row, other).double()
        if i == row.number or torch.equal(q, row.q):
            continue
        if row.num_tokens > 1 and row.fits(row.predicted(row.own, row.own, q)):
            other_than = "head" if other.row == row.row else "token" if other.seq == row.seq else "sequence"
            return Reading(
                f"the query of {row_name(row.case, i)} is read", (f"the query of another {other_than} is read",)
            )
    return None


def _lse_alone(row: MeasuredRow) -> Reading | None:
    if row.weights.lse is None or not bool(row.weights.wrong_lse[row.number]):
        return None
    got, expected = (number(float(part[row.number])) for part in (row.weights.lse, row.weights.expected_lse))
    text = f"the weights are right, but lse = {got}, expected {expected}"
    return Reading(text, ("the weights are right, the LSE is wrong",))


def _largest_errors(row: MeasuredRow) -> Reading:
    errors = (row.got - row.expected).abs()[row.own]
    worst = errors.argsort(descending=True)[:_SHOWN].sort().values.tolist()
    texts = [
        f"{row.tokens([t])} has weight {weight(row.got[row.own[t]])}, expected {weight(row.expected[row.own[t]])}"
        for t in worst
        if float(errors[t]) > float(row.bound[row.own[t]])
    ]
    return Reading("; ".join(texts), ("the scores are wrong",), vague=True)


_READERS: tuple[Callable[[MeasuredRow], Reading | None], ...] = (
    _beyond_the_window,
    _result_of_another_row,
    _elsewhere,
    _counted,
    _query_of_another_row,
)
"""The most telling first."""
