"""The two states that merge_states merges."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from attnfuzz.problems.cases import MergeStatesCase
from attnfuzz.problems.hashing import fold, stream_key
from attnfuzz.problems.limits import HASH_CHUNK_ELEMENTS
from attnfuzz.problems.recipes import LSE_KINDS
from attnfuzz.values.draws import Stream, draw, drawn_as, element_words, exact

__all__ = ["LogicalStates", "lse_of_kinds", "merge_values"]

LSE_FAR = 192
""""high" and "low": exp and exp2 of ±192 leave float32 on either side, so a merge that skips the maximum fails."""


@dataclass(frozen=True, slots=True)
class LogicalStates:
    """Two states per (token, query head). An LSE of -inf or +inf says that the state is empty and its output unused.

    ``empty_are_zeros``: that output holds zeros nevertheless; else nobody writes it.
    ``lse_base2``: the LSE numbers are base-2 logarithms (the numbers themselves are the same for both bases).
    """

    prefix_output: Float[Tensor, "num_tokens num_q_heads head_size"]
    suffix_output: Float[Tensor, "num_tokens num_q_heads head_size"]
    prefix_lse: Float32[Tensor, "num_tokens num_q_heads"]
    suffix_lse: Float32[Tensor, "num_tokens num_q_heads"]
    lse_base2: bool = False
    empty_are_zeros: bool = False

    @property
    def prefix_live(self) -> Bool[Tensor, "num_tokens num_q_heads"]:
        """Rows whose prefix state holds keys."""
        return self.prefix_lse.isfinite()

    @property
    def suffix_live(self) -> Bool[Tensor, "num_tokens num_q_heads"]:
        """Rows whose suffix state holds keys."""
        return self.suffix_lse.isfinite()


def merge_values(
    case: MergeStatesCase, device: torch.device | str = "cpu", *, lse_base2: bool = False, empty_are_zeros: bool = False
) -> LogicalStates:
    """The numbers of ``case``: outputs about N(0, 1.15²), or fine, LSE multiples of 1/16.

    LSE kinds: ``finite`` is drawn from [-4, 4) for each side, ``equal`` from the same range once for both sides,
    ``high`` from [192, 196), ``low`` from [-196, -192); ``-inf`` and ``+inf`` are what they say.
    """
    kinds = torch.tensor(
        [[LSE_KINDS.index(kind) for kind in pair] for pair in case.lse_pairs], dtype=torch.int64, device=device
    )
    rows = torch.arange(case.num_tokens * case.num_q_heads, device=device)
    kinds = kinds[rows % len(case.lse_pairs)]
    common = _uniform(case, Stream.COMMON_LSE, rows)
    return LogicalStates(
        _outputs(case, Stream.PREFIX_OUTPUT, device),
        _outputs(case, Stream.SUFFIX_OUTPUT, device),
        lse_of_kinds(kinds[:, 0], _uniform(case, Stream.PREFIX_LSE, rows), common).view(
            case.num_tokens, case.num_q_heads
        ),
        lse_of_kinds(kinds[:, 1], _uniform(case, Stream.SUFFIX_LSE, rows), common).view(
            case.num_tokens, case.num_q_heads
        ),
        lse_base2,
        empty_are_zeros,
    )


def _uniform(case: MergeStatesCase, stream: Stream, rows: Int64[Tensor, " rows"]) -> Int64[Tensor, " rows"]:
    """0 to 127, per (token, head)."""
    words: Tensor = fold(stream_key(case.seed, stream), rows)
    return words >> 8 & 127


def lse_of_kinds(
    kinds: Int64[Tensor, " rows"], own: Int64[Tensor, " rows"], common: Int64[Tensor, " rows"]
) -> Float32[Tensor, " rows"]:
    """LSEs of the kinds ``LSE_KINDS[kinds]``, from numbers 0 to 127 drawn for one side and for both sides in common."""
    far = 16 * LSE_FAR
    by_kind = {
        "finite": own - 64,
        "equal": common - 64,
        "high": far + own // 2,
        "low": -far - 1 - own // 2,
        "-inf": own.new_zeros(()),
        "+inf": own.new_zeros(()),
    }
    sixteenths = torch.stack([by_kind[kind].expand_as(own) for kind in LSE_KINDS]).gather(0, kinds[None])[0]
    lse = exact(sixteenths, torch.float32, -4)
    for kind in ("-inf", "+inf"):
        lse.masked_fill_(kinds == LSE_KINDS.index(kind), float(kind))
    return lse


def _outputs(
    case: MergeStatesCase, stream: Stream, device: torch.device | str
) -> Float[Tensor, "num_tokens num_q_heads head_size"]:
    states: Tensor = fold(stream_key(case.seed, stream), torch.arange(case.num_tokens, device=device))
    chunk = max(1, HASH_CHUNK_ELEMENTS // (case.num_q_heads * case.head_size))
    dtype = getattr(torch, case.dtype)
    recipe, exponent = drawn_as(case.outputs, dtype)
    parts = [
        exact(draw(element_words(part, case.num_q_heads, case.head_size), recipe), dtype, exponent)
        for part in torch.split(states, chunk)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
