"""Rows of many cases in a few padded tensors: where each row's numbers come from, and where its result goes.

The numbers of all cases lie one after another in flat tensors. A row is then a few offsets, and one indexing operation
fetches a bucket's rows whatever the cases' shapes. The offsets of all rows travel to a GPU in one copy. A block is one
query token, whose rows are KV heads, or one merge, whose rows are its (token, head) pairs; blocks of similar size are
padded to one size and computed together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor

from attnfuzz.numerics.bounds import largest_chunk
from attnfuzz.numerics.row_units import RowUnits
from attnfuzz.numerics.rows import RowResult


class RowBlockSize(NamedTuple):
    """Its elements are the products of query heads, tokens and head size."""

    num_tokens: int
    head_size: int
    group: int
    num_rows: int


@dataclass(slots=True)
class Bucket:
    """Blocks, by index, and the size that all their rows are padded to."""

    blocks: list[int]
    num_tokens: int
    head_size: int
    group: int
    num_rows: int

    @property
    def row_elements(self) -> int:
        """Elements of one padded row."""
        return self.num_tokens * self.head_size * self.group


def buckets(sizes: Sequence[RowBlockSize], *, most_padding: int, most_elements: int) -> list[Bucket]:
    """Put each block, the longest first, where it adds the least padding, unless that is more than `most_padding`.

    A bucket takes a number of operations that does not depend on its size, and padding takes the time that other
    elements take. On drawn cases, a quarter of the elements that take the time of a bucket's launches was the best
    `most_padding`. Only a block of its own has more than `most_elements`.
    """
    found: list[Bucket] = []
    for block in sorted(range(len(sizes)), key=lambda block: sizes[block], reverse=True):
        num_tokens, head_size, group, num_rows = size = sizes[block]
        best, least = None, most_padding
        for bucket in found:
            padding, elements = _when_added(bucket, size)
            if padding <= least and elements <= most_elements:
                best, least = bucket, padding
                if padding == 0:
                    break
        if best is None:
            found.append(Bucket([block], num_tokens, head_size, group, num_rows))
            continue
        best.blocks.append(block)
        best.head_size, best.group = max(head_size, best.head_size), max(group, best.group)
        best.num_rows += num_rows
    return found


def _when_added(bucket: Bucket, size: RowBlockSize) -> tuple[int, int]:
    """How many elements of padding a block adds, which is no longer than the others, and all elements then."""
    num_tokens, head_size, group, num_rows = size
    row_elements = bucket.num_tokens * max(head_size, bucket.head_size) * max(group, bucket.group)
    elements = row_elements * (bucket.num_rows + num_rows)
    return elements - bucket.row_elements * bucket.num_rows - num_tokens * head_size * group * num_rows, elements


_LAUNCHES_IN_ELEMENTS = {"cpu": 100_000, "cuda": 1 << 23}
"""How many elements a core, or a GPU that several processes use, takes in the time of a bucket's launches."""


Place = tuple[int, int, tuple[int, int, int]]
"""Where out and LSE of a case begin in all cases' results, and the shape of its out."""


class RowBlock(NamedTuple):
    """The rows of one query token, or of one merge; places are offsets in flat tensors.

    Row r, query head g and token t have their key at `key + r key_row + t key_token`, their value at
    `value + r value_row + t value_token`, their query at `query + (r group + g) head_size`, their result at
    `out + (r group + g) v_head_size` and their LSE at `lse + r group + g`.
    """

    num_tokens: int
    head_size: int
    v_head_size: int
    group: int
    num_rows: int
    query: int
    out: int
    lse: int
    key: int
    key_row: int
    key_token: int
    value: int
    value_row: int
    value_token: int


@dataclass(frozen=True, slots=True)
class RowBatch:
    """A bucket's rows, or some of them, and the sizes that they are padded to.

    `key_and_value`: where those of a row's first token are; `token`: how far on the next token's are. `queries`: where
    the query of each query head begins; `lse`: where its LSE is. Heads beyond a row's own repeat its last one, to the
    same result. `own_dims`: which dimensions of a query are a row's own. `dims`: where each number of a result is, -1
    for dimensions beyond a row's own. Keys and values are padded to one `head_size`.
    """

    num_tokens: int
    head_size: int
    last_token: Int64[Tensor, "rows 1"]
    key_and_value: Int64[Tensor, "2 rows 1"]
    token: Int64[Tensor, "2 rows 1"]
    queries: Int64[Tensor, "rows group"]
    own_dims: Bool[Tensor, "rows 1 head_size"]
    dims: Int64[Tensor, "rows group head_size"]
    lse: Int64[Tensor, "rows group"]
    units: RowUnits


class Results:
    """Expected results and bounds of many cases; a sequence without tokens, which is no row, has 0, -inf and bounds 0.

    `num_out`, `num_lse`: elements of `out` and `lse` of all cases.
    """

    def __init__(self, num_out: int, num_lse: int, device: torch.device) -> None:
        # expected, then bound; the last number of `out` is for dimensions that are padding
        self._out = torch.zeros((2, num_out + 1), dtype=torch.float64, device=device)
        self._lse = torch.zeros((2, num_lse), dtype=torch.float64, device=device)
        self._lse[0] = float("-inf")

    def put(self, batch: RowBatch, rows: RowResult) -> None:
        """Store the results of a batch's rows."""
        self._out[:, batch.dims] = torch.stack([rows.out, rows.out_error])
        self._lse[:, batch.lse] = torch.stack([rows.lse, rows.lse_error])

    def bound_all(self, bound: Callable[[Tensor], Tensor]) -> None:
        """Let every bound be that of its expected result."""
        self._out[1] = bound(self._out[0])
        self._lse[1] = bound(self._lse[0])

    def of_case(self, out: int, lse: int, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Expected out and LSE and their bounds, of a case whose numbers begin at `out` and `lse` of all cases'."""
        outs = self._out[:, out : out + math.prod(shape)].view(2, *shape)
        lses = self._lse[:, lse : lse + math.prod(shape[:2])].view(2, *shape[:2])
        return outs[0], lses[0], outs[1], lses[1]


def row_batches(
    blocks: Sequence[RowBlock], units: Float64[Tensor, "units blocks"], device: torch.device
) -> Iterator[RowBatch]:
    """All rows of `blocks`, each with its block's units (columns as for `RowUnits`, on the CPU).

    Batches are as few as padding and memory allow. Each takes the same number of operations.
    """
    largest = largest_chunk(device)
    found = buckets(
        [
            RowBlockSize(block.num_tokens, max(block.head_size, block.v_head_size), block.group, block.num_rows)
            for block in blocks
        ],
        most_padding=_LAUNCHES_IN_ELEMENTS[device.type] // 4,
        most_elements=largest,
    )
    order = [block for bucket in found for block in bucket.blocks]
    table = to_device(_row_table([blocks[i] for i in order], units[:, order]), device)
    offsets, columns = table[:_NUM_OFFSETS].long(), table[_NUM_OFFSETS:]
    first = 0
    for bucket in found:
        end = first + bucket.num_rows
        at_once = max(1, largest // bucket.row_elements)
        for start in range(first, end, at_once):
            rows = slice(start, min(end, start + at_once))
            yield _batch(bucket, offsets[:, rows, None], RowUnits.of_columns(columns[:, rows]))
        first = end


def joined(tensors: Sequence[Float[Tensor, "..."]], spare: int) -> Float[Tensor, " elements"]:
    """All numbers, one tensor after another, and `spare` zeros. Neighbours of one dtype are joined at once.

    Of several dtypes the result has float32, or float64 if one of them is, which hold the others' numbers exactly.
    """
    runs = [list(run) for _, run in groupby(tensors, key=lambda tensor: tensor.dtype)]
    runs[-1].append(tensors[-1].new_zeros(spare))
    parts = [torch.cat([tensor.reshape(-1) for tensor in run]) for run in runs]
    if len(parts) == 1:
        return parts[0]
    widest = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    return torch.cat([part.to(widest) for part in parts])


def windows(flat: Float[Tensor, " elements"], size: int) -> Float[Tensor, "starts size"]:
    """A view with `size` successive numbers from each place."""
    return flat.as_strided((flat.numel() - size + 1, size), (1, 1))


def to_device(table: Shaped[Tensor, "..."], device: torch.device) -> Shaped[Tensor, "..."]:
    """A small tensor from the CPU, without waiting: a copy from memory that is not pinned would wait for the device."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


_NUM_OFFSETS = 11


def _row_table(blocks: Sequence[RowBlock], units: Float64[Tensor, "units blocks"]) -> Float64[Tensor, "columns rows"]:
    """Offsets and units of each row in float64, which holds integers up to 2^53."""
    of = dict(zip(RowBlock._fields, torch.tensor(blocks, dtype=torch.int64, device="cpu").unbind(1), strict=True))
    first_row = of["num_rows"].cumsum(0) - of["num_rows"]
    num_rows = int(of["num_rows"].sum())
    block = torch.arange(len(blocks), device="cpu").repeat_interleave(of["num_rows"], output_size=num_rows)
    row = torch.arange(num_rows, device="cpu") - first_row[block]
    of_row_0 = [of["key"], of["value"], of["key_token"], of["value_token"]]
    of_row_0 += [of["num_tokens"] - 1, of["group"] - 1, of["head_size"], of["v_head_size"]]
    of_row_0 += [of["query"], of["out"], of["lse"]]
    none = torch.zeros_like(first_row)
    per_row = [of["key_row"], of["value_row"], *[none] * 6]
    per_row += [of["group"] * of["head_size"], of["group"] * of["v_head_size"], of["group"]]
    offsets = torch.stack(of_row_0)[:, block] + torch.stack(per_row)[:, block] * row
    return torch.cat([offsets.to(torch.float64), units[:, block]])


def _batch(bucket: Bucket, offsets: Int64[Tensor, "offsets rows 1"], units: RowUnits) -> RowBatch:
    last_token, last_head, *_ = offsets[4:].unbind()
    sizes, places, lse = offsets[6:8], offsets[8:10], offsets[10]  # of queries, and of results
    heads = torch.minimum(torch.arange(bucket.group, device=offsets.device), last_head)
    dims = torch.arange(bucket.head_size, device=offsets.device)
    queries, results = torch.addcmul(places, heads, sizes).unbind()
    own_dims, own_results = (dims < sizes).unsqueeze(2).unbind()
    return RowBatch(
        num_tokens=bucket.num_tokens,
        head_size=bucket.head_size,
        last_token=last_token,
        key_and_value=offsets[:2],
        token=offsets[2:4],
        queries=queries,
        own_dims=own_dims,
        dims=(results.unsqueeze(-1) + dims).where(own_results, -1),
        lse=lse + heads,
        units=units,
    )
