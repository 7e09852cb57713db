"""paged_attention: prefill, decode and both in one batch, over a paged cache. Torch-free by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from attnfuzz.bundled.attention import VarlenProblem, varlen_facets
from attnfuzz.cases.facets.facet import Axis, Domain, Facet, Part, SizeRank
from attnfuzz.problems.attention import VarlenCase
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.fields import Choice
from attnfuzz.problems.module import bundled
from attnfuzz.problems.supports import Layout, Supports

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int32
    from torch import Tensor


class PagedAttentionCase(VarlenCase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Query token j of a sequence with n query tokens and length L attends to positions 0 to L - n + j.

    Unless ``causal``, it attends to all L.
    """

    problem: ClassVar[str] = "paged_attention"

    causal: bool = True
    """False: each query token stands at its sequence's last position, and sees all of it, as in an encoder."""

    @property
    def row_lens(self) -> tuple[int, ...]:
        return _row_lens(self.query_lens, self.seq_lens, self.causal)


@lru_cache(maxsize=64)
def _row_lens(query_lens: tuple[int, ...], seq_lens: tuple[int, ...], causal: bool) -> tuple[int, ...]:
    return tuple(
        length if causal else seq_len
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True)
        for length in range(seq_len - query_len + 1, seq_len + 1)
    )


@dataclass(slots=True)
class PagedAttentionInputs:
    """Inputs of a paged_attention kernel. The caches have the shapes of ``layout``; all queries' keys are in them.

    ``seq_lens`` counts context and new tokens. The query tokens of sequence s are the rows from ``cu_seqlens_q[s]`` to
    ``cu_seqlens_q[s + 1]`` of q; with n of them and length L, the j-th attends to positions 0 to L - n + j, or to all
    L unless ``causal``, as if it stood at the last position. n may be 0. ``max_query_len`` and ``max_seq_len`` are
    upper bounds, known on the host. Dead memory is that of paged_decode: keys behind a query are live, but not for this
    query. Six of the last are None unless the case asks for that variant or for an 8-bit cache, as in paged_decode.
    """

    q: Float[Tensor, "num_tokens num_q_heads head_size"]
    k_cache: Float[Tensor, "num_blocks ..."]
    v_cache: Float[Tensor, "num_blocks ..."]
    block_table: Int32[Tensor, "num_seqs max_blocks_per_seq"]
    seq_lens: Int32[Tensor, " num_seqs"]
    cu_seqlens_q: Int32[Tensor, " num_seqs_plus_1"]
    scale: float
    block_size: int
    layout: Layout
    max_query_len: int
    max_seq_len: int
    out: Float[Tensor, "num_tokens num_q_heads v_head_size"]
    lse: Float32[Tensor, "num_tokens num_q_heads"]
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Float32[Tensor, " num_q_heads"] | None = None
    sinks: Float32[Tensor, " num_q_heads"] | None = None
    k_scale: Float32[Tensor, " num_kv_scales"] | None = None
    v_scale: Float32[Tensor, " num_kv_scales"] | None = None
    causal: bool = True


class Causality(Facet[PagedAttentionCase]):
    """Whether a query token sees only the keys up to its own."""

    fields = ("causal",)
    jumps_with = "causal"
    parts = (
        Part("causal", Choice((True, False)), SizeRank.QUERIES, Feature("non-causal"), "causal={}", tries_others=True),
    )

    def told(self, case: PagedAttentionCase) -> Iterator[str]:
        yield from map(str, self.features(case))

    def draws(self, supports: Supports) -> Mapping[str, Sequence[bool]]:
        return {"causal": (True, True, False)} if supports.non_causal else {}

    def axes(self, domain: Domain) -> Iterator[Axis]:
        if domain.supports.non_causal:
            yield Axis("mask", ("causal", "none"), lambda case: ("causal" if case.causal else "none",))

    def objections(self, case: PagedAttentionCase, domain: Domain) -> Iterator[str]:
        if not case.causal and not domain.supports.non_causal:
            yield "causal=False, but the kernel declares non_causal=False"


@bundled
class PagedAttention(VarlenProblem):
    """Each query token sees the keys up to its own, or all."""

    case_type = PagedAttentionCase
    inputs_type = PagedAttentionInputs
    facets = varlen_facets(Causality())

    def told_otherwise(self, case: Any, supports: Supports) -> Sequence[tuple[str, Mapping[str, Any]]]:
        return [(f"causal={not case.causal}", {"causal": not case.causal})] if supports.non_causal else []
