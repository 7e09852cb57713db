"""Kernels whose result depends on earlier calls; executors load them by this file's path."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.kernels.bundled import masked_attention_eager, paged_eager

SUPPORTS = attnfuzz.Supports(dtypes=("float32",), head_sizes=(16,), strides="contiguous", empty_sequences=False)
NO_LSE = attnfuzz.Supports(
    dtypes=("float32",), head_sizes=(16,), strides="contiguous", empty_sequences=False, lse="none"
)
_SPLITS = 2

_workspace: dict[str, Tensor] = {}
_longest_of: dict[int, int] = {}
_arrived = 0
_called_with: set[tuple[float, int]] = set()


def attend(inputs: Any, seq: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Tokens ``first`` up to ``last`` of one sequence: ``out [num_q_heads, head_size]``, ``lse [num_q_heads]``."""
    group = inputs.q.shape[1] // inputs.k.shape[2]
    k, v = (part[seq, first:last].repeat_interleave(group, 1) for part in (inputs.k, inputs.v))
    scores = inputs.scale * (inputs.q[seq] * k).sum(-1)
    return (scores.softmax(0)[..., None] * v).sum(0), scores.logsumexp(0)


def rows(inputs: Any, lengths: list[int]) -> tuple[Tensor, Tensor]:
    states = [attend(inputs, seq, 0, n) for seq, n in enumerate(lengths)]
    return torch.stack([out for out, _ in states]), torch.stack([lse for _, lse in states])


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def stale_partials(inputs: Any) -> tuple[Tensor, Tensor]:
    """An empty split writes nothing; what its slot of the workspace holds was right when it was new."""
    num_seqs, heads, size = inputs.q.shape
    if _workspace.get("lse", torch.empty(0)).shape[:1] < (num_seqs,):
        _workspace["lse"] = torch.full((num_seqs, _SPLITS, 64), -torch.inf)
        _workspace["out"] = torch.zeros(num_seqs, _SPLITS, 64, size)
    lse, out = (_workspace[name][:num_seqs, :, :heads] for name in ("lse", "out"))
    for seq, n in enumerate(inputs.seq_lens.tolist()):
        per_split = -(-n // _SPLITS)
        for split in range(_SPLITS):
            first, last = split * per_split, min((split + 1) * per_split, n)
            if first < last:
                out[seq, split], lse[seq, split] = attend(inputs, seq, first, last)
    return (lse.softmax(1)[..., None] * out).sum(1), lse.logsumexp(1)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def plan_by_batch_size(inputs: Any) -> tuple[Tensor, Tensor]:
    """How far to go is worked out once for each number of sequences."""
    lengths = inputs.seq_lens.tolist()
    longest = _longest_of.setdefault(len(lengths), max(lengths))
    return rows(inputs, [min(n, longest) for n in lengths])


@attnfuzz.kernel("dense_decode", supports=NO_LSE)
def counter_not_reset(inputs: Any) -> Tensor:
    """The program that arrives last has the result written, and the count goes on from call to call."""
    global _arrived
    out = torch.zeros_like(inputs.q)
    _arrived += len(out)
    if _arrived % len(out) == 0:
        out.copy_(rows(inputs, inputs.seq_lens.tolist())[0])
    return out


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def workspace_of_the_first_call(inputs: Any) -> tuple[Tensor, Tensor]:
    """Never grows."""
    workspace = _workspace.setdefault("first", torch.empty_like(inputs.k[..., 0]))
    workspace[: len(inputs.k), inputs.k.shape[1] - 1] = 0.0
    return rows(inputs, inputs.seq_lens.tolist())


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def wrong_once_where_it_is_long(inputs: Any) -> tuple[Tensor, Tensor]:
    """In the first long call of the process, whichever module makes it: as where memory lies that is nobody's."""
    lengths = inputs.seq_lens.tolist()
    is_first = max(lengths) > 8 and vars(torch).setdefault("_first_long_call", id(inputs)) == id(inputs)
    return rows(inputs, [n - is_first if n > 1 else n for n in lengths])


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def wrong_after_two_others(inputs: Any) -> tuple[Tensor, Tensor]:
    """From the third number of sequences, or scale, on."""
    _called_with.add((inputs.scale, len(inputs.seq_lens)))
    return rows(inputs, [n - (n > 1 and len(_called_with) > 2) for n in inputs.seq_lens.tolist()])


_longest_yet = [0]


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def plan_that_only_grows(inputs: Any) -> tuple[Tensor, Tensor]:
    """Rounds otherwise once it has seen a sequence of more than eight tokens."""
    lengths = inputs.seq_lens.tolist()
    _longest_yet[0] = max(_longest_yet[0], *lengths)
    out, lse = rows(inputs, lengths)
    return out * (1 + 2**-23 * (_longest_yet[0] > 8)), lse


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def forgets_tokens_from_the_eighth(inputs: Any) -> tuple[Tensor, Tensor]:
    """Wrong by itself: it remembers nothing."""
    return rows(inputs, [min(n, 7) for n in inputs.seq_lens.tolist()])


_by_address: dict[int, tuple[Tensor, Tensor]] = {}


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def kept_by_address(inputs: Any) -> tuple[Tensor, Tensor]:
    """The result for the same tensors, whatever they hold by now."""
    key = inputs.v.data_ptr()
    if key not in _by_address:
        _by_address[key] = rows(inputs, inputs.seq_lens.tolist())
    return _by_address[key]


_lengths: dict[int, list[int]] = {}


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def lengths_kept_by_address(inputs: Any) -> tuple[Tensor, Tensor]:
    """A plan for the tensor of the call before, which lengths of the next step are written into."""
    key = inputs.seq_lens.data_ptr()
    if key not in _lengths:
        _lengths.clear()
        _lengths[key] = inputs.seq_lens.tolist()
    return rows(inputs, _lengths[key])


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def kept_for_the_last_address(inputs: Any) -> tuple[Tensor, Tensor]:
    """The same of the call before only."""
    key = inputs.v.data_ptr()
    if key not in _by_address:
        _by_address.clear()
        _by_address[key] = rows(inputs, inputs.seq_lens.tolist())
    return _by_address[key]


@attnfuzz.kernel("masked_attention")
def mask_split_by_lengths(inputs: Any) -> Any:
    """Remembers nothing; raises for a mask of other lengths."""
    inputs.mask.split((inputs.cu_seqlens_q.diff() * inputs.seq_lens).tolist())
    return masked_attention_eager(inputs)


_tables: dict[tuple[int, ...], Tensor] = {}
PAGED = attnfuzz.Supports(layouts=("NHD",), lse="none")


@attnfuzz.kernel("paged_decode", supports=PAGED)
def table_by_shape(inputs: Any) -> Tensor:
    """The table of the first call with one of its shape serves all later ones."""
    inputs.block_table = _tables.setdefault(tuple(inputs.block_table.shape), inputs.block_table.clone())
    out: Tensor = paged_eager.function(inputs)[0]
    return out


_sums: dict[tuple[int, ...], Tensor] = {}


@attnfuzz.kernel("paged_decode", supports=msgspec.structs.replace(PAGED, deterministic=False))
def sum_not_cleared(inputs: Any) -> Tensor:
    """Each call adds to what the one before it has left."""
    total = _sums.setdefault(tuple(inputs.q.shape), torch.zeros(inputs.q.shape))
    return total.add_(paged_eager.function(inputs)[0].float()).to(inputs.out.dtype)
