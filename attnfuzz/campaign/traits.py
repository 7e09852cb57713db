"""Everything that can be said of a case in a word, for learning which cases kill a kernel's process. Torch-free.

Features name what makes a case more than the simplest one. A crash may hang on anything else: one head size, odd
lengths, a length that ends with a page, the *absence* of strides. So a trait is said for either side of each question.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from attnfuzz.problems.boundaries import DEFAULT_TILES, num_splits_of, steps_of
from attnfuzz.problems.cases import (
    AttentionCase,
    BundledCase,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
)
from attnfuzz.problems.features import features
from attnfuzz.problems.open_cases import Choice, Integer, Integers, OpenCase
from attnfuzz.problems.recipes import StrideKind

__all__ = ["traits"]

_DIVISORS = (2, 4, 8, 16, 32)
_LIMITS = (1, 2, 3, 4, 5, 6, 8, 12, *(1 << power for power in range(4, 15)))
_PLAIN: StrideKind = "contiguous"

Traits = frozenset[str]


def traits(case: Case) -> Traits:
    """About a hundred words on ``case``, its features among them. Seeds and positions of needles are left out."""
    if isinstance(case, OpenCase):
        return features(case) | _open(case)
    found = {f"dtype={case.dtype}", *features(case)}
    found.update(f"strides:{name} is {case.strides.get(name, _PLAIN)}" for name in case.tensor_names)
    for name, value in case.options.items():
        found.update(_number(f"option {name}", value) if type(value) is int else {f"option {name} is {value}"})
    for name, number in _numbers(case):
        found |= _number(name, number)
    found |= _states(case) if isinstance(case, MergeStatesCase) else _attention(case)
    return frozenset(found)


def _open(case: OpenCase) -> Traits:
    """What each field is, and on which side of a few limits it lies."""
    found: set[str] = set()
    for name, field in case.problem.fields.items():
        value = getattr(case, name)
        if isinstance(field, Choice):
            found.add(f"{name} is {value}")
        elif isinstance(field, Integer):
            found |= _number(name, value)
        elif isinstance(field, Integers):
            found |= _number(f"len({name})", len(value)) | _number(f"sum({name})", sum(value))
            found |= set().union(*(_number(f"some {name}", one) for one in set(value)))
    return frozenset(found)


def _numbers(case: BundledCase) -> Iterator[tuple[str, int]]:
    yield "head_size", case.head_size
    yield "num_q_heads", case.num_q_heads
    if isinstance(case, MergeStatesCase):
        yield "num_tokens", case.num_tokens
        return
    yield "v_head_size", case.value_size
    yield "num_kv_heads", case.num_kv_heads
    yield "gqa_ratio", case.gqa_ratio
    yield "num_seqs", case.num_seqs
    yield "num_splits", num_splits_of(case)
    yield "sum of lengths", sum(case.seq_lens)
    if isinstance(case, DenseDecodeCase):
        yield "extra_rows", case.extra_rows
    if isinstance(case, PagedAttentionCase):
        yield "num_tokens", case.num_rows
        yield "max_query_len", max(case.query_lens)
        yield "query_slack", case.query_slack
        yield "seq_slack", case.seq_slack
        yield "padding_tokens", case.padding_tokens
    if isinstance(case, PagedDecodeCase):
        yield "block_size", case.block_size
        yield "columns", case.max_blocks_per_seq
        yield "spare_blocks", case.pages.spare_blocks


@lru_cache(maxsize=4096)
def _number(name: str, value: int) -> Traits:
    """What it is, what divides it, and on which side of each of a few limits it lies."""
    found = {f"{name} is {value}"}
    found.update(f"{name} is {'' if value % by == 0 else 'not '}a multiple of {by}" for by in _DIVISORS)
    found.update(f"{name} {'>=' if value >= limit else '<'} {limit}" for limit in _LIMITS)
    return frozenset(found)


def _attention(case: AttentionCase) -> Traits:
    """Of the lengths: what holds for some of them, for each of them, and for the longest."""
    steps = tuple(sorted({*steps_of(case), *DEFAULT_TILES}))
    distinct = set(case.seq_lens)
    found = set().union(*(_length("some", length, steps) for length in distinct))
    found |= frozenset.intersection(*(_length("every", length, steps) for length in distinct))
    found |= _length("longest", max(distinct), steps)
    found.add(f"keys are {case.values.keys}")
    found.add(f"values are {case.values.values}")
    found.add("with needles" if case.values.needles else "without needles")
    found.add(f"logit_exponent is {case.values.logit_exponent}")
    if len(distinct) == 1:
        found.add("equal lengths")
    if isinstance(case, PagedDecodeCase):
        found.update(_pages(case))
    return frozenset(found)


def _pages(case: PagedDecodeCase) -> Iterator[str]:
    yield f"layout is {case.layout}"
    yield f"order is {case.pages.order}"
    yield f"padding is {case.pages.padding}"
    yield "pages shared" if case.pages.shared_blocks else "pages not shared"
    if max(case.seq_lens) <= case.block_size:
        yield "one page holds any sequence"
    if all(length % case.block_size == 0 for length in case.seq_lens):
        yield "every page is full"


@lru_cache(maxsize=1 << 14)
def _length(whose: str, length: int, steps: tuple[int, ...]) -> Traits:
    places = (f"{whose} length {place}" for step in steps for place in _places(length, step))
    return frozenset(places) | _number(f"{whose} length", length)


def _places(length: int, step: int) -> Iterator[str]:
    """Where in a page or tile the length ends."""
    rest = length % step
    yield f"ends {({0: 'with', 1: 'one past', step - 1: 'one short of'}).get(rest, 'inside')} a step of {step}"
    yield f"is {'longer' if length > step else 'no longer'} than {step}"


def _states(case: MergeStatesCase) -> Traits:
    found = {f"lse_layout is {case.lse_layout}"}
    for prefix, suffix in case.lse_pairs:
        found |= {f"some prefix LSE {prefix}", f"some suffix LSE {suffix}", f"some LSE {prefix}/{suffix}"}
    kinds = {kind for pair in case.lse_pairs for kind in pair}
    if len(kinds) == 1:
        found.add(f"every LSE {kinds.pop()}")
    return frozenset(found)
