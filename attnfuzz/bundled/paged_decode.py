"""paged_decode: one query token for each sequence, over its pages of a cache. Torch-free by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnfuzz.bundled.attention import PagedProblem, paged_facets
from attnfuzz.problems.attention import PagedDecodeCase
from attnfuzz.problems.module import bundled
from attnfuzz.problems.supports import Layout

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int32
    from torch import Tensor


@dataclass(slots=True)
class PagedDecodeInputs:
    """Inputs of a paged_decode kernel. The caches have the shapes of ``layout``.

    Dead memory: slots past a sequence's last token, pages that no sequence owns or that were freed behind its window
    (`attnfuzz.problems.block_table`). The last six are None unless the case asks for that variant
    (`attnfuzz.problems.variants`) or for an 8-bit cache (`attnfuzz.problems.quantised_kv`): then both caches have that
    format, and there is one scale, or one for each KV head.
    """

    q: Float[Tensor, "num_seqs num_q_heads head_size"]
    k_cache: Float[Tensor, "num_blocks ..."]
    v_cache: Float[Tensor, "num_blocks ..."]
    block_table: Int32[Tensor, "num_seqs max_blocks_per_seq"]
    seq_lens: Int32[Tensor, " num_seqs"]
    scale: float
    block_size: int
    layout: Layout
    out: Float[Tensor, "num_seqs num_q_heads v_head_size"]
    lse: Float32[Tensor, "num_seqs num_q_heads"]
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Float32[Tensor, " num_q_heads"] | None = None
    sinks: Float32[Tensor, " num_q_heads"] | None = None
    k_scale: Float32[Tensor, " num_kv_scales"] | None = None
    v_scale: Float32[Tensor, " num_kv_scales"] | None = None


@bundled
class PagedDecode(PagedProblem):
    """The plain one of the paged problems, whose case type the others derive from."""

    case_type = PagedDecodeCase
    inputs_type = PagedDecodeInputs
    facets = paged_facets()
