"""Decode by lists of blocks over a paged cache, each list cut at the causal edge, as MiniMax's sparse layers have it.

A row, which is a query token, and a KV head have a list of blocks of the row's sequence. Tokens of these are seen up to
the row's own position: in the block where that lies, those behind it are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz import Choice, Expected, Integer, Integers, TensorSpec
from attnfuzz.problems.wording import plural


class BlockSparse(attnfuzz.PagedProblem):
    """``query_len``: query tokens of each sequence, the last of its ``lengths``. ``sparse_block``: tokens of a block,
    whatever ``block_size``, that of a page, is. ``topk``: the length of a list, in ``block_lists [num_kv_heads, rows,
    topk]``; ``named``: how many blocks it names, if there are as many. ``has_last``: the block of the row's own
    position is among them. ``list_order``: "ascending", or "shuffled", with -1 between numbers, not behind them. What
    no list names holds anything.
    """

    lengths = Integers(0, 150, likely=(1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128), least=1, most=4)
    query_len = Choice((1, 2, 3))
    sparse_block = Choice((16, 32, 64))
    topk = Choice((1, 2, 4, 7))
    named = Integer(0, 7, likely=(0, 1, 7))
    has_last = Choice((True, False))
    list_order = Choice(("ascending", "shuffled"))

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """Rows are those of the first sequence, then those of the second."""
        rows = len(case.lengths) * case.query_len
        heads = (rows, case.num_kv_heads * case.gqa_ratio, case.head_size)
        q, out = (TensorSpec(heads, case.dtype, role, axes=("row", "head", "dim")) for role in ("input", "output"))
        lists = TensorSpec((case.num_kv_heads, rows, case.topk), "int32", axes=("kv head", "row", "place"))
        return {"q": q, **self.cache(case), "block_lists": lists, "out": out}

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """Lists, and of each KV head the tokens that one of them names and a row sees."""
        generator = torch.Generator("cpu").manual_seed(case.seed)
        tensors["q"].copy_(attnfuzz.numbers(tuple(tensors["q"].shape), seed=case.seed, name="q"))
        self.write_table(case, tensors)
        lists = tensors["block_lists"].fill_(-1)
        for row, edge in enumerate(self._edges(case)):
            blocks = -(-edge // case.sparse_block)
            for head in range(case.num_kv_heads):
                chosen = torch.randperm(blocks, generator=generator, device="cpu", dtype=torch.int64)[
                    : min(case.named, case.topk)
                ]
                if case.has_last and len(chosen) and blocks - 1 not in chosen.tolist():
                    chosen[0] = blocks - 1
                places: Any = slice(len(chosen))
                if case.list_order == "ascending":
                    chosen = chosen.sort().values
                else:
                    places = torch.randperm(case.topk, generator=generator, device="cpu", dtype=torch.int64)[
                        : len(chosen)
                    ]
                lists[head, row, places] = chosen.int()
        seen = self._seen(case, tensors)
        for seq, length in enumerate(case.lengths):
            pages, offsets = self.places(case, tensors, seq)
            rows = range(seq * case.query_len, (seq + 1) * case.query_len)
            for name in ("k", "v"):
                new = attnfuzz.numbers((length, case.num_kv_heads, case.head_size), seed=case.seed, name=f"{name}{seq}")
                cache = tensors[f"{name}_cache"]
                cache = cache.transpose(1, 2) if case.layout == "HND" else cache
                for head in range(case.num_kv_heads):
                    tokens = torch.cat([seen[row][head] for row in rows])
                    cache[pages[tokens], offsets[tokens], head] = new[tokens, head].to(cache.dtype)

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
        """A row and KV head whose list names none gives 0."""
        seen = self._seen(case, tensors)
        k, v = (
            [
                of_seqs[row // case.query_len][tokens, head, None]
                for row, of_heads in enumerate(seen)
                for head, tokens in enumerate(of_heads)
            ]
            for of_seqs in self.cached(case, tensors)
        )
        q = tensors["q"].reshape(-1, case.gqa_ratio, case.head_size)
        scale = case.head_size**-0.5
        out = attnfuzz.attention(q, k, v, scale=scale, dtype=case.dtype, num_partials=case.topk)["out"]
        parts = {name: getattr(out, name) for name in ("value", "where", "bound")}
        shaped = {name: part.view(tensors["out"].shape) for name, part in parts.items() if isinstance(part, Tensor)}
        return {"out": replace(out, **shaped)}

    def mistakes(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Lists that are read otherwise, or cut elsewhere."""
        lists, lengths = tensors["block_lists"], [length for length in case.lengths for _ in range(case.query_len)]
        edges = torch.tensor(self._edges(case), dtype=torch.int32, device="cpu")[:, None]
        own = (edges - 1) // case.sparse_block
        rows = torch.arange(len(edges), device="cpu")
        lacks_own = (lists != own).all(-1, keepdim=True) & (edges > 0)
        is_whole = (lists + 1) * case.sparse_block <= edges
        room = case.block_size * tensors["block_table"].shape[1]
        return {
            "a row sees what is behind its position": {"edges": lengths},
            "a row sees all of a block, also what is behind its sequence": {
                "edges": [room] * len(lengths),
                "lengths": [room] * len(case.lengths),
            },
            "the block of a row's position is left out unless it ends there": {
                "block_lists": torch.where(is_whole, lists, -1)
            },
            "-1 is taken for the first block": {"block_lists": lists.clamp(min=0)},
            "a list ends at its first -1": {
                "block_lists": torch.where((lists >= 0).int().cumprod(-1).bool(), lists, -1)
            },
            "the list of a sequence's first query token is taken for all of them": {
                "block_lists": lists[:, rows // case.query_len * case.query_len]
            },
            "blocks are taken to have as many tokens as pages": {"sparse_block": case.block_size},
            "the block of a row's position is seen where its list does not name it": {
                "block_lists": torch.cat((lists, torch.where(lacks_own, own, -1)), -1)
            },
        }

    def where_is(self, case: Any, name: str, index: tuple[int, ...]) -> str:
        """Up to which key the row of a result sees."""
        if name != "out":
            return super().where_is(case, name, index)
        seq, token = divmod(index[0], case.query_len)
        edge = plural(self._edges(case)[index[0]], "token")
        return f"query token {token} of sequence {seq}, which sees {edge} at most"

    @staticmethod
    def _edges(case: Any) -> list[int]:
        """How many tokens each row may see at most; a mistake may say it otherwise."""
        if hasattr(case, "edges"):
            return list(case.edges)
        new = range(1 - case.query_len, 1)
        return [max(0, length + t) for length in case.lengths for t in new]

    def _seen(self, case: Any, tensors: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """The tokens that each row and KV head sees."""
        tokens = torch.arange(case.sparse_block, dtype=torch.int64, device="cpu")
        found = []
        for row, edge in enumerate(self._edges(case)):
            lists = tensors["block_lists"][:, row].long()
            of_heads = [(blocks[blocks >= 0][:, None] * case.sparse_block + tokens).flatten() for blocks in lists]
            found.append([named[named < edge] for named in of_heads])
        return found
