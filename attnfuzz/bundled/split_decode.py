"""split_decode: paged_decode whose result is left in parts, to be merged. Torch-free by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from attnfuzz.bundled.attention import PagedProblem, paged_facets
from attnfuzz.cases.facets.facet import Change, Domain, Facet, Options, SizeRank, changed
from attnfuzz.cases.facets.heads import nearest
from attnfuzz.cases.facets.sequences import rescaled
from attnfuzz.cases.facets.storage import MOST_RESCALED
from attnfuzz.problems.attention import PagedDecodeCase
from attnfuzz.problems.choices import split_counts_of
from attnfuzz.problems.fields import Proposal, first_of, lower_integer
from attnfuzz.problems.module import bundled
from attnfuzz.problems.recipes import check_range
from attnfuzz.problems.shapes import Specs, TensorSpec
from attnfuzz.problems.supports import Layout, Supports
from attnfuzz.problems.variants import VARIANTS, VariantName

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int32
    from torch import Tensor


class SplitDecodeCase(PagedDecodeCase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """paged_decode whose result is left as ``num_splits`` partial states."""

    problem: ClassVar[str] = "split_decode"
    tensor_names: ClassVar[tuple[str, ...]] = (
        "q", "k_cache", "v_cache", "block_table", "seq_lens", "alibi_slopes", "k_scale", "v_scale",
        "partial_out", "partial_lse",
    )  # fmt: skip
    variant_names: ClassVar[tuple[VariantName, ...]] = tuple(name for name in VARIANTS if name != "sinks")

    num_splits: int

    def __post_init__(self) -> None:
        PagedDecodeCase.__post_init__(self)
        check_range("num_splits", self.num_splits, 1, 4096)
        if self.variant.sinks is not None:
            raise ValueError(
                f"variant.sinks={self.variant.sinks!r} must be left out in split_decode: a sink belongs to a row, "
                "and which of the partial states holds it is a kernel's own business; use paged_decode"
            )

    @property
    def partial_states(self) -> int:
        return self.num_splits


@dataclass(slots=True)
class SplitDecodeInputs:
    """Inputs of a split_decode kernel: as for paged_decode, with ``num_splits`` and room for the partial states."""

    q: Float[Tensor, "num_seqs num_q_heads head_size"]
    k_cache: Float[Tensor, "num_blocks ..."]
    v_cache: Float[Tensor, "num_blocks ..."]
    block_table: Int32[Tensor, "num_seqs max_blocks_per_seq"]
    seq_lens: Int32[Tensor, " num_seqs"]
    scale: float
    block_size: int
    layout: Layout
    num_splits: int
    partial_out: Float[Tensor, "num_seqs num_q_heads num_splits v_head_size"]
    partial_lse: Float32[Tensor, "num_seqs num_q_heads num_splits"]
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Float32[Tensor, " num_q_heads"] | None = None
    k_scale: Float32[Tensor, " num_kv_scales"] | None = None
    v_scale: Float32[Tensor, " num_kv_scales"] | None = None


class SplitCount(Facet[SplitDecodeCase]):
    """The number of partial states of split_decode."""

    fields = ("num_splits",)

    def told(self, case: SplitDecodeCase) -> Iterator[str]:
        yield f"num_splits={case.num_splits}"

    def objections(self, case: SplitDecodeCase, domain: Domain) -> Iterator[str]:
        most = domain.supports.max_num_splits
        if most is not None and case.num_splits > most:
            yield f"num_splits={case.num_splits}, but the kernel declares at most {most}"

    def size(self, case: SplitDecodeCase, options: Options) -> Iterator[tuple[SizeRank, object]]:
        yield SizeRank.STORAGE, case.num_splits

    def shrink(self, case: SplitDecodeCase, domain: Domain) -> Proposal[SplitDecodeCase]:
        """Fewer; or a few, of lengths that end at the same place of a split."""
        likely = split_counts_of(domain.supports) if domain.supports.combinations else ()
        found = yield from lower_integer(
            case, case.num_splits, 1, lambda case, count: changed(case, num_splits=count), likely=likely
        )
        for count in range(1, min(found.num_splits, MOST_RESCALED)):
            followed = rescaled(found, found.num_splits, count)
            found = yield from first_of(found, [followed and changed(followed, num_splits=count)])
        return found

    def changes(self, case: SplitDecodeCase, domain: Domain) -> Iterator[Change]:
        for count in nearest(split_counts_of(domain.supports), case.num_splits):
            yield f"num_splits {count} instead of {case.num_splits}", {"num_splits": count}


@bundled
class SplitDecode(PagedProblem):
    """Partial states of each row, which the reference has merged."""

    case_type = SplitDecodeCase
    inputs_type = SplitDecodeInputs
    facets = paged_facets(SplitCount())
    results = ("partial_out", "partial_lse")

    def outputs(self, case: Any) -> Specs:
        shape = (case.num_seqs, case.num_q_heads, case.num_splits, case.value_size)
        out, lse = TensorSpec(shape, case.dtype, "output"), TensorSpec(shape[:3], "float32", "output")
        return {"partial_out": out, "partial_lse": lse}

    def simplest_fields(self, supports: Supports, head_size: int, layout: Layout | None) -> dict[str, Any] | None:
        fields, splits = super().simplest_fields(supports, head_size, layout), split_counts_of(supports)
        return {**fields, "num_splits": splits[0]} if fields is not None and splits else None

    def axes(self, case: Any, name: str) -> tuple[str, ...]:
        """Axes of the partial states, or of the results that they are merged to."""
        axes = ("seq", "head", "split") if name.startswith("partial") else ("seq", "head")
        return axes if name.endswith("lse") else (*axes, "dim")

    def logical_result(self, case: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        from attnfuzz.inputs.reference import merge_all

        return merge_all(out, lse)
