"""A short history of batches over one paged cache, as an engine's scheduler makes them: one case for a whole backend.

Requests arrive one after the other, may find the first pages of request 0 in the cache, are read in chunks, then
decoded a token and some drafts at a time, of which some are accepted and the slots of the others written again; one may
be preempted, lose its pages to others and be computed anew. All outputs of each step are compared, then the cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attnfuzz
from attnfuzz import Choice, Expected, Integer, Integers, Seed, TensorSpec

_OF_STEP = ("q", "k", "v", "slots", "table", "lens", "starts", "out")


class _Entry(NamedTuple):
    """A request in a batch: ``new`` tokens behind ``start`` others, in these pages."""

    request: int
    start: int
    new: int
    pages: tuple[int, ...]


class History(attnfuzz.Problem):
    """Step i has ``q<i>``, ``k<i>`` and ``v<i>`` of the new tokens, ``slots<i>``, into which these go,
    ``table<i>``, ``lens<i>`` (with the new tokens) and ``starts<i>`` (cumulated new tokens) of the sequences, and
    ``out<i>``; ``k_cache`` and ``v_cache`` ``[pages, block_size, num_kv_heads, head_size]`` are all steps'. `steps_of`
    gives a namespace for each. A new token sees all before it and itself.

    ``prompts``: tokens of each request; ``stagger``: steps between two arrivals; ``chunk``: most new tokens that a
    request has in a step, 0 for no limit; ``drafts``: beside a token that is decoded; ``prefix_pages``: that a request
    shares with the first one, if they are there; ``preempts``: the last request loses its pages halfway.
    """

    prompts = Integers(1, 40, likely=(1, 3, 4, 5, 8, 16, 17, 33), least=1, most=3)
    num_steps = Integer(1, 8)
    chunk = Choice((0, 4, 16))
    drafts = Choice((0, 1, 3))
    stagger = Integer(0, 2)
    prefix_pages = Integer(0, 2)
    preempts = Choice((False, True))
    spare_pages = Integer(0, 3)
    num_kv_heads = Choice((1, 2))
    gqa_ratio = Choice((1, 4))
    head_size = Choice((16, 64))
    block_size = Choice((4, 16, 1))
    dtype = Choice(("float16", "bfloat16"))
    seed = Seed()

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """The caches, and those of each step."""
        axes, of_heads = ("token", "head", "dim"), (case.num_kv_heads, case.head_size)
        shape = (_num_pages(case), case.block_size, *of_heads)
        cache = TensorSpec(shape, case.dtype, "in_place", axes=("page", "offset", "head", "dim"))
        found = {"k_cache": cache, "v_cache": cache}
        for i, batch in enumerate(_batches(case)):
            tokens, heads = sum(one.new for one in batch), case.num_kv_heads * case.gqa_ratio
            new = TensorSpec((tokens, *of_heads), case.dtype, axes=axes)
            found |= {
                f"q{i}": TensorSpec((tokens, heads, case.head_size), case.dtype, axes=axes),
                f"k{i}": new,
                f"v{i}": new,
                f"slots{i}": TensorSpec((tokens,), "int64"),
                f"table{i}": TensorSpec((len(batch), max(len(one.pages) for one in batch)), "int32"),
                f"lens{i}": TensorSpec((len(batch),), "int32"),
                f"starts{i}": TensorSpec((len(batch) + 1,), "int32"),
                f"out{i}": TensorSpec((tokens, heads, case.head_size), case.dtype, "output", axes=axes),
            }
        return found

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """No slot of the caches, which steps write before they read."""
        for i, batch in enumerate(_batches(case)):
            for name in ("q", "k", "v"):
                into = tensors[f"{name}{i}"]
                into.copy_(attnfuzz.numbers(tuple(into.shape), seed=case.seed, name=f"{name}{i}"))
            slots = [slot for one in batch for slot in _slots(case, one)]
            lens, counts = (
                [one.start + one.new for one in batch],
                torch.tensor([one.new for one in batch], dtype=torch.int32, device="cpu"),
            )
            tensors[f"slots{i}"].copy_(torch.tensor(slots, dtype=torch.int64, device="cpu"))
            tensors[f"lens{i}"].copy_(torch.tensor(lens, dtype=torch.int32, device="cpu"))
            tensors[f"starts{i}"].fill_(0)[1:] = counts.cumsum(0)
            tensors[f"table{i}"].fill_(0)
            for row, one in zip(tensors[f"table{i}"], batch, strict=True):
                row[: len(one.pages)] = torch.tensor(one.pages, dtype=torch.int32, device="cpu")

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
        """Step by step, over a cache that is written as they say."""
        cache = {name: torch.zeros_like(tensors[f"{name}_cache"]).flatten(0, 1) for name in ("k", "v")}
        where = torch.zeros(len(cache["k"]), dtype=torch.bool, device="cpu")
        found = {}
        for i, batch in enumerate(_batches(case)):
            where[tensors[f"slots{i}"]] = True
            for name, slots in cache.items():
                slots[tensors[f"slots{i}"]] = tensors[f"{name}{i}"]
            rows: list[list[int]] = []
            for one in batch:
                every = _slots(case, one._replace(start=0, new=one.start + one.new))
                rows += [every[: one.start + t + 1] for t in range(one.new)]
            k, v = ([slots[row] for row in rows] for slots in cache.values())
            scale = case.head_size**-0.5
            found[f"out{i}"] = attnfuzz.attention(tensors[f"q{i}"], k, v, scale=scale, dtype=case.dtype)["out"]
        for name, slots in cache.items():
            shape = tuple(tensors[f"{name}_cache"].shape)
            is_written = where.view(*shape[:2], 1, 1).expand(shape).clone()
            found[f"{name}_cache"] = Expected(slots.double().view(shape), is_written, 0.0)
        return found

    def where_is(self, case: Any, name: str, index: tuple[int, ...]) -> str:
        """Which token of which request it is, and in which step, of an output."""
        if not name.startswith("out"):
            return ""
        step, token = int(name[3:]), index[0]
        for one in _batches(case)[step]:
            if token < one.new:
                return f"step {step}: new token {token} of request {one.request}, which has {one.start} in the cache"
            token -= one.new
        return ""


def steps_of(inputs: Any) -> Iterator[SimpleNamespace]:
    """The tensors of each step, without its number in their names."""
    i = 0
    while hasattr(inputs, f"q{i}"):
        yield SimpleNamespace(**{name: getattr(inputs, f"{name}{i}") for name in _OF_STEP})
        i += 1


def _num_pages(case: Any) -> int:
    most = (prompt + case.num_steps * (1 + case.drafts) for prompt in case.prompts)
    return sum(-(-int(tokens) // int(case.block_size)) for tokens in most) + int(case.spare_pages)


def _slots(case: Any, one: _Entry) -> list[int]:
    size = case.block_size
    return [one.pages[t // size] * size + t % size for t in range(one.start, one.start + one.new)]


def _batches(case: Any) -> list[list[_Entry]]:
    """The batches that a scheduler makes of the requests, one for each step in which there is anything to do."""
    chance = random.Random(case.seed)
    free = list(range(_num_pages(case)))
    chance.shuffle(free)
    known, computed = list(case.prompts), [0] * len(case.prompts)
    pages: list[list[int]] = [[] for _ in case.prompts]
    shared, is_new = [0] * len(case.prompts), [True] * len(case.prompts)
    batches = []
    for step in range(case.num_steps):
        last = len(case.prompts) - 1
        if case.preempts and step == case.num_steps // 2 and step > 0 and pages[last]:
            free += pages[last][shared[last] :]
            pages[last], computed[last], shared[last], is_new[last] = [], 0, 0, True
        batch = []
        for request in range(len(case.prompts)):
            if step < request * case.stagger:
                continue
            if is_new[request]:
                is_new[request] = False
                whole = min(computed[0], case.prompts[0], known[request] - 1) // case.block_size
                shared[request] = min(case.prefix_pages, whole) if request else 0
                pages[request] = pages[0][: shared[request]]
                computed[request] = shared[request] * case.block_size
            start, left = computed[request], known[request] - computed[request]
            count = min(left, case.chunk or left) if left else 1 + case.drafts
            while len(pages[request]) * case.block_size < start + count:
                pages[request].append(free.pop())
            batch.append(_Entry(request, start, count, tuple(pages[request])))
            accepted = count if left else 1 + chance.randint(0, case.drafts)
            computed[request] = start + accepted
            known[request] = max(known[request], computed[request])
        batches.append(batch)
    return batches
