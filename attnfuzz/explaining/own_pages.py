"""Which tokens and pages a kernel of a user's problem over a paged cache takes in place of the right ones.

Mistakes are replayed by the problem's own reference: it is asked what comes of a cache that is read through other
entries of the block table, of other heads, of longer or shorter sequences. Results are sums of V by weights, so that
two more answers say what they are without some tokens, or with these counted twice: what the tokens add to a result,
and, with V of 1 in their places alone, their weight. A mistake is told where no other gives all of the kernel's
results, right ones included, with other numbers too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from attnfuzz.bundled.own_paged import PagedProblem, token_slots
from attnfuzz.explaining.explanation import in_words
from attnfuzz.explaining.own_problems import AskedProblem, is_given, tell_memory_apart
from attnfuzz.explaining.reruns import Reruns, Results
from attnfuzz.inputs.open_module import Target
from attnfuzz.mistake import PAST_THE_END
from attnfuzz.problems.fields import Integer, Seed
from attnfuzz.problems.open_cases import OpenCase, implementation_of
from attnfuzz.verdict import Cause

_OTHER_SEEDS = (1, 2)
_MORE = (5, 40)
"""Of what is counted, as the keys of a window, in cases that tell mistakes apart: part of a sequence, and all of it."""
_BEHIND_PAGES = (3, 0, 2, 5)
"""Tokens of each sequence of such a case, beside two or three pages: one ends with a page."""
_TILES = (16, 32, 64)
_BOUNDS = 8.0
"""A result without some tokens may miss the kernel's by this many bounds of the right one."""
_WHOLE = 1 - 1e-9
"""Of all weight: what is left of a row without it is nothing that can be told."""

_Sums = Mapping[str, Tensor]
"""By result."""
Key = tuple[str, str]
_Causes = dict[Key, Cause]
_Positions = Callable[[int], Sequence[int]]
"""Those of a sequence of a length."""


class _Replay(NamedTuple):
    cause: Cause
    results: Callable[[], Sequence[Target]]

    @property
    def key(self) -> Key:
        return self.cause.mistake, self.cause.way


def misread(reruns: Reruns) -> Iterator[Cause]:
    """The one mistake that gives what the kernel makes of the case, or of one like it that tells more."""
    case: Any = reruns.case
    problem = implementation_of(case.problem) if isinstance(case, OpenCase) else None
    if not isinstance(problem, PagedProblem) or not problem.tensors(case).keys() & {"k_cache", "kv_cache"}:
        return
    left: _Causes = {}
    for one in (*_telling(case), case):
        found = _told_by(reruns.of(one))
        if one is not case and found:
            here = _given(reruns, found) or {}
            which = f"in a similar case (lengths {', '.join(map(str, one.lengths))}, block_size {one.block_size}), "
            there = {key: msgspec.structs.replace(cause, words=which + cause.words) for key, cause in found.items()}
            found = {**there, **here}
        if len({cause.words for cause in found.values()}) == 1:
            yield next(iter(found.values()))
            return
        is_one_mistake = len({mistake for mistake, _ in found}) == 1
        if is_one_mistake and (not left or len(found) < len(left)):
            left = found
    if words := in_words(left.values()):
        yield Cause(mistake=next(iter(left))[0], words=words)


def _telling(case: Any) -> Iterator[Any]:
    """Cases like this one in which mistakes that coincide here give different results."""
    fields = case.problem.fields
    own = {name: kind for name, kind in fields.items() if name not in vars(PagedProblem)}
    some, many = (
        {name: min(kind.low + more, kind.high) for name, kind in own.items() if isinstance(kind, Integer)}
        for more in _MORE
    )
    spare = getattr(fields["spare_pages"], "high", 0)
    apart = {"shared_pages": fields["shared_pages"].simplest, "spare_pages": spare, "page_order": "shuffled"}
    high = getattr(fields["lengths"], "high", max(case.lengths))
    sizes = [size for size in getattr(fields["block_size"], "values", ()) if size not in (1, case.block_size)][:1]
    sizes.insert(case.block_size == 1, case.block_size)  # where a page is a token, these are not told apart

    def longer(size: int, count: int) -> dict[str, Any]:
        lengths = tuple(min((2 + seq % 2) * size + more, high) for seq, more in enumerate(_BEHIND_PAGES[:count]))
        return {"lengths": lengths, "block_size": size, **apart}

    every = len(_BEHIND_PAGES)
    for changes in (
        {**longer(sizes[0], every), **many},
        {**longer(sizes[0], every), **some},
        *({**longer(size, every), **many} for size in sizes[1:]),
        {**longer(case.block_size, len(case.lengths)), **many},
        many,
    ):
        try:
            changed = msgspec.structs.replace(case, **changes)
        except ValueError:  # a field does not have such a value
            continue
        if changed != case:
            yield changed


def _told_by(reruns: Reruns) -> _Causes:
    """The mistakes that give the results of this case, and of it with other numbers."""
    case: Any = reruns.case
    seeds = {name: getattr(case, name) for name, kind in case.problem.fields.items() if isinstance(kind, Seed)}
    found = _given(reruns) or {}
    for more in _OTHER_SEEDS if seeds and found else ():
        others = reruns.of(msgspec.structs.replace(case, **{name: seed ^ more for name, seed in seeds.items()}))
        again = _given(others, found)
        found = found if again is None else again
    return found


def _given(reruns: Reruns, among: _Causes | None = None) -> _Causes | None:
    """The mistakes that give the kernel's results; None where all of these are right.

    ``among``: those of which it is asked whether they still do, or say nothing of what is wrong here.
    """
    pages = _Pages(reruns)
    if is_given(pages.got, pages.right):
        return None
    return {
        one.key: one.cause
        for one in pages.replays()
        if (among is None or one.key in among) and _predicts(pages, one.results(), may_be_silent=among is not None)
    }


def _predicts(pages: _Pages, wanted: Sequence[Target], *, may_be_silent: bool) -> bool:
    """Whether these are the results, and something that is wrong, and not just 0, is among those that they say."""
    if not wanted:
        return False
    got = {name: part.double() for name, part in pages.got.items()}
    silent = {one.name: one.value.isnan() for one in wanted}
    said = [_with(one, torch.where(silent[one.name], got[one.name], one.value)) for one in wanted]
    says_little = {name: is_silent | (got[name] == 0) for name, is_silent in silent.items()}
    shown = {one.name: torch.where(says_little[one.name], one.value, got[one.name]) for one in pages.right}
    return is_given(got, said) and (may_be_silent or not is_given(shown, pages.right))


def _with(one: Target, value: Tensor, times: float = 1.0) -> Target:
    return Target(one.name, value, times * one.bound)


class _Pages:
    """A run of the kernel, and what the reference makes of the same memory if it is read otherwise."""

    def __init__(self, reruns: Reruns) -> None:
        case: Any = reruns.case
        self.case = case
        self._reruns = reruns
        tell_memory_apart(reruns)
        inputs = reruns.reset()
        names = [
            name for name in ("k_cache", "v_cache", "kv_cache", "block_table", "seq_lens") if hasattr(inputs, name)
        ]
        self._memory = {name: getattr(inputs, name).cpu().clone() for name in names}
        self.got: Results = reruns.run()
        self._problem = AskedProblem(case)
        self.right = self._problem.asked(self._memory)

    def replays(self) -> Iterator[_Replay]:
        """All mistakes, each with the results that it gives once these are asked for."""
        yield from self._through_the_table()
        yield from self._of_other_heads()
        yield from self._of_other_lengths()
        yield from self._of_other_weights()

    def _through_the_table(self) -> Iterator[_Replay]:
        table: list[list[int]] = self._memory["block_table"].tolist()
        last_row, last, of = len(table) - 1, len(table[0]) - 1 if table else 0, "of the block table"
        rules: dict[Key, tuple[str, Callable[[int, int], int]]] = {
            ("block_table", "the next entry"): ("", lambda s, c: table[s][min(c + 1, last)]),
            ("block_table", "the entry before"): ("", lambda s, c: table[s][max(c - 1, 0)]),
            ("block_table", "the first entry"): ("", lambda s, c: table[s][0]),
            ("block_table", "the page's number"): (
                "a page's number in its sequence is taken for a physical page",
                lambda s, c: c,
            ),
            ("another_sequence", "the row of the next sequence"): ("", lambda s, c: table[min(s + 1, last_row)][c]),
            ("another_sequence", "the row of the sequence before"): ("", lambda s, c: table[max(s - 1, 0)][c]),
            ("another_sequence", "the first row"): ("", lambda s, c: table[0][c]),
            ("another_sequence", "the last row"): ("", lambda s, c: table[last_row][c]),
            ("another_sequence", "the row of half the sequence's number"): ("", lambda s, c: table[s // 2][c]),
            ("another_page", "the page behind"): (
                "the page behind the one in the table is read",
                lambda s, c: table[s][c] + 1,
            ),
            ("another_page", "the page before"): (
                "the page before the one in the table is read",
                lambda s, c: table[s][c] - 1,
            ),
        }
        pages = len(self._slots()["k"])
        for (mistake, way), (words, entry) in rules.items():
            read = [[entry(seq, column) % pages for column in range(len(row))] for seq, row in enumerate(table)]
            through = torch.tensor(read, dtype=torch.int32, device="cpu")
            told = words or f"pages are read through {way} {of}, in place of their own"
            yield _Replay(_cause(mistake, way, told), partial(self._asked, block_table=through))

    def _of_other_heads(self) -> Iterator[_Replay]:
        count = self.case.num_kv_heads
        orders = {
            "the first": [0] * count,
            "the last": [count - 1] * count,
            "the next": [(head + 1) % count for head in range(count)],
        }
        for formula, order in orders.items() if count > 1 else ():
            for what, names in (("", "kv"), ("K of ", "k"), ("V of ", "v")):
                others = {name: slots[:, :, order] for name, slots in self._slots().items() if name in names}
                words = f"{what}{formula} KV head is read in place of each head's own"
                yield _Replay(_cause("head_map", f"{what}{formula}", words), partial(self._cached, others))
        k, v = (part.flatten(3) for part in self._slots().values())
        if k.shape == v.shape:
            for words, others in (
                ("K is read in place of V", {"v": k}),
                ("V is read in place of K", {"k": v}),
                ("K and V are exchanged", {"k": v, "v": k}),
            ):
                yield _Replay(_cause("another_tensor", words, words), partial(self._cached, others))

    def _of_other_lengths(self) -> Iterator[_Replay]:
        size, room = self.case.block_size, self._memory["block_table"].shape[1] * self.case.block_size
        longer = {
            "the token behind the last one of each sequence": [n + 1 for n in self.case.lengths],
            "the rest of the last page of each sequence": self._rounded_up(size),
        }
        longer |= {f"up to the end of a tile of {tile}": self._rounded_up(tile) for tile in _TILES if tile != size}
        for way, lengths in longer.items():
            words = (
                f"what is behind the last token, {way}, takes weight" if way.startswith("up") else f"{way} takes weight"
            )
            read = partial(self._of_lengths, [min(length, room) for length in lengths])
            yield _Replay(_cause(PAST_THE_END, way, words), read)
        for rule, lengths in (
            ("the last token", [max(n - 1, 0) for n in self.case.lengths]),
            ("the last, partial page", [n // size * size for n in self.case.lengths]),
        ):
            read = partial(self._of_lengths, lengths)
            yield _Replay(_cause("tokens_dropped", rule, _dropped(rule)), read)

    def _rounded_up(self, size: int) -> list[int]:
        return [-(-length // size) * size for length in self.case.lengths]

    def _of_other_weights(self) -> Iterator[_Replay]:
        size = self.case.block_size
        rules: dict[str, _Positions] = {
            "the last token": lambda n: range(n)[-1:],
            "the first token": lambda n: range(n)[:1],
            "the token before the last": lambda n: range(n)[-2:-1],
            "the last page": lambda n: range(n)[(n - 1) // size * size :] if n else (),
            "the last, partial page": lambda n: range(n)[n // size * size :],
            "the first page": lambda n: range(n)[:size],
            "every page but the first": lambda n: range(n)[size:],
            "the first token of each page": lambda n: range(n)[::size],
            "the last token of each page": lambda n: range(n)[size - 1 :: size],
        }
        for rule, positions in rules.items():
            added = functools.cache(partial(self._added, positions))
            for mistake, words, weight, value in (
                ("tokens_dropped", _dropped(rule), -1, -1),
                ("tokens_counted_twice", f"{rule} of each sequence is counted twice", 1, 1),
                ("values_dropped", f"{rule} of each sequence has weight, but its V is left out", 0, -1),
            ):
                yield _Replay(_cause(mistake, rule, words), partial(self._weighed, added, weight, value))

    def _added(self, positions: _Positions) -> tuple[_Sums, _Sums]:
        """Compute what the V of these tokens add to each result, and their weight."""
        slots = self._slots()["v"]
        chosen = torch.zeros(slots.shape[:2], dtype=torch.bool, device="cpu")
        for seq, length in enumerate(self.case.lengths):
            for token in positions(length):
                page = self._memory["block_table"][seq, token // self.case.block_size]
                chosen[page, token % self.case.block_size] = True
        here = chosen.view(*chosen.shape, *(1,) * (slots.dim() - 2))
        alone, ones = (torch.where(here, part, torch.zeros_like(slots)) for part in (slots, torch.ones_like(slots)))
        return self._without_v(alone), self._without_v(ones)

    def _without_v(self, others: Tensor) -> _Sums:
        return {one.name: one.value for one in self._cached({"v": others})}

    @functools.cached_property
    def _of_no_v(self) -> _Sums:
        return self._without_v(torch.zeros_like(self._slots()["v"]))

    def _weighed(self, of_tokens: Callable[[], tuple[_Sums, _Sums]], weight: int, value: int) -> Sequence[Target]:
        """The results with so much more of some tokens' weight, and of what their V adds.

        A result that V does not enter is taken for the logarithm of what the weights are divided by.
        """
        added, share = of_tokens()
        if not added or not share or not self._of_no_v:
            return ()
        masses = {
            name: 1 + weight * share[name] for name, without in self._of_no_v.items() if bool((without == 0).all())
        }
        of_rows = {mass.shape[:-1]: mass[..., 0] for mass in masses.values() if mass.dim()}
        found = []
        for one in self.right:
            mass = masses.get(one.name, of_rows.get(one.value.shape))
            if mass is None:
                return ()
            changed = (one.value + value * added[one.name]) / mass if one.name in masses else one.value + mass.log()
            found.append(_with(one, torch.where(mass > 1 - _WHOLE, changed, torch.nan), _BOUNDS))
        return found

    def _asked(self, case: Any = None, **others: Tensor) -> Sequence[Target]:
        self._reruns.check_time()
        try:
            return self._problem.asked(self._memory | others, case)
        except (IndexError, RuntimeError, ValueError):  # a reference need not take what its case does not have
            return ()

    def _of_lengths(self, lengths: Sequence[int]) -> Sequence[Target]:
        try:
            case = msgspec.structs.replace(self.case, lengths=tuple(lengths))
        except ValueError:  # longer than sequences of the problem are
            return ()
        return self._asked(case, seq_lens=torch.tensor(lengths, dtype=torch.int32, device="cpu"))

    def _slots(self, memory: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        return token_slots(self.case, memory or self._memory)

    def _cached(self, others: dict[str, Tensor]) -> Sequence[Target]:
        """With these numbers in the tokens of K or V."""
        memory = {name: tensor.clone() for name, tensor in self._memory.items()}
        for name, slots in self._slots(memory).items():
            if name in others:
                slots.copy_(others[name].view_as(slots))
        return self._asked(**memory)


def _cause(mistake: str, way: str, words: str) -> Cause:
    return Cause(mistake=mistake, way=way, words=words)


def _dropped(rule: str) -> str:
    return f"{rule} of each sequence is dropped"
