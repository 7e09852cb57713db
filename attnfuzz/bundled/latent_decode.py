"""latent_decode: one cache of latent vectors, of which each is key and value at once. Torch-free by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attnfuzz.bundled.attention import PagedProblem, paged_facets
from attnfuzz.problems.attention import PagedDecodeCase
from attnfuzz.problems.module import bundled
from attnfuzz.problems.recipes import DRAWN_KEYS, check_range
from attnfuzz.problems.supports import Layout

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int32
    from torch import Tensor


class LatentDecodeCase(PagedDecodeCase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Multi-head latent attention: one paged ``kv_cache [num_blocks, block_size, head_size]`` of one KV head.

    A token's row is its key; the first ``value_size`` numbers of it, the latent vector, are its value, too.
    """

    problem: ClassVar[str] = "latent_decode"
    tensor_names: ClassVar[tuple[str, ...]] = (
        "q", "kv_cache", "block_table", "seq_lens", "alibi_slopes", "sinks", "out", "lse",
    )  # fmt: skip
    values_in_keys: ClassVar[bool] = True

    num_kv_heads: int = 1

    def __post_init__(self) -> None:
        PagedDecodeCase.__post_init__(self)
        check_range("num_kv_heads", self.num_kv_heads, 1, 1)
        if self.value_size > self.head_size:
            raise ValueError(
                f"v_head_size={self.v_head_size} must be at most head_size={self.head_size} in latent_decode: "
                "V is the first numbers of each key"
            )
        if self.layout != "NHD" or self.kv is not None:
            raise ValueError(
                f"layout={self.layout!r} and kv={self.kv!r} must be left out in latent_decode, whose cache is "
                "[num_blocks, block_size, head_size] in the dtype of q; use paged_decode"
            )

    @property
    def scores_read_values(self) -> bool:
        """Whether scores depend on the latent vector: in other recipes the queries are 0 where the latent vector is
        (`attnfuzz.values.attention`)."""
        return self.values.keys in DRAWN_KEYS and not self.values.needles


@dataclass(slots=True)
class LatentDecodeInputs:
    """Inputs of a latent_decode kernel: one cache, and views of it that are K and V, as Triton kernels take them.

    ``v_head_size`` is the rank of the latent vectors. ``layout`` is that of the views. Dead memory is that of
    paged_decode. The last four are None unless the case asks for that variant (`attnfuzz.problems.variants`).
    """

    q: Float[Tensor, "num_seqs num_q_heads head_size"]
    kv_cache: Float[Tensor, "num_blocks block_size head_size"]
    k_cache: Float[Tensor, "num_blocks block_size 1 head_size"]
    v_cache: Float[Tensor, "num_blocks block_size 1 v_head_size"]
    block_table: Int32[Tensor, "num_seqs max_blocks_per_seq"]
    seq_lens: Int32[Tensor, " num_seqs"]
    scale: float
    block_size: int
    v_head_size: int
    layout: Layout
    out: Float[Tensor, "num_seqs num_q_heads v_head_size"]
    lse: Float32[Tensor, "num_seqs num_q_heads"]
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Float32[Tensor, " num_q_heads"] | None = None
    sinks: Float32[Tensor, " num_q_heads"] | None = None


@bundled
class LatentDecode(PagedProblem):
    """Its cache is in ``case.values_in_keys`` form, which all that reads a cache knows."""

    case_type = LatentDecodeCase
    inputs_type = LatentDecodeInputs
    facets = paged_facets()
