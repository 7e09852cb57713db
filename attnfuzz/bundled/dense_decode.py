"""dense_decode: one query token for each sequence, over keys that lie in one tensor. Torch-free by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from attnfuzz.bundled.attention import AttentionProblem, attention_facets
from attnfuzz.cases.facets.facet import Axis, Changes, Domain, Facet, Part, SizeRank
from attnfuzz.cases.facets.storage import DEAD_ROWS
from attnfuzz.problems.attention import MAX_SEQ_LEN, AttentionCase
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.fields import Integer
from attnfuzz.problems.module import bundled
from attnfuzz.problems.recipes import check_range
from attnfuzz.problems.shapes import Specs, TensorSpec
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import PLAIN_VARIANT

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int32
    from torch import Tensor

_COUNTED = Integer(0, 1 << 24)
_EXTRA_ROWS = (0, 0, 1, 3, 17, 64)


class DenseDecodeCase(AttentionCase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """``k [num_seqs, max_seq_len, num_kv_heads, head_size]``, v likewise; rows past a sequence's length are dead."""

    problem: ClassVar[str] = "dense_decode"
    tensor_names: ClassVar[tuple[str, ...]] = ("q", "k", "v", "seq_lens", "out", "lse")

    extra_rows: int = 0
    """Rows of ``k`` and ``v`` beyond the longest sequence."""

    def __post_init__(self) -> None:
        AttentionCase.__post_init__(self)
        check_range("extra_rows", self.extra_rows, 0, MAX_SEQ_LEN)
        if self.variant != PLAIN_VARIANT:
            raise ValueError(f"variant.{self.variant.names[0]} must be left out in dense_decode; use paged_decode")
        if self.kv is not None:
            raise ValueError(
                f"kv={self.kv!r} must be left out in dense_decode, whose K and V are no cache; use paged_decode"
            )

    @property
    def max_seq_len(self) -> int:
        return max(1, max(self.seq_lens) + self.extra_rows)


@dataclass(slots=True)
class DenseDecodeInputs:
    """Inputs of a dense_decode kernel. Rows of ``k`` and ``v`` at or past a sequence's length are dead memory."""

    q: Float[Tensor, "num_seqs num_q_heads head_size"]
    k: Float[Tensor, "num_seqs max_seq_len num_kv_heads head_size"]
    v: Float[Tensor, "num_seqs max_seq_len num_kv_heads v_head_size"]
    seq_lens: Int32[Tensor, " num_seqs"]
    scale: float
    max_seq_len: int
    out: Float[Tensor, "num_seqs num_q_heads v_head_size"]
    lse: Float32[Tensor, "num_seqs num_q_heads"]


class ExtraRows(Facet[DenseDecodeCase]):
    """Rows of a dense K and V beyond the longest sequence."""

    fields = ("extra_rows",)
    jumps_with = "storage"
    parts = (
        Part("extra_rows", _COUNTED, SizeRank.STORAGE, Feature("extra rows", role="surroundings"), "extra rows {}"),
    )

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("dead rows", ("none", "some"), lambda case: ("some" if case.extra_rows else "none",))

    def general(self, case: DenseDecodeCase, domain: Domain) -> Iterator[Feature]:
        """Rows behind a sequence that is shorter than others, or than all rows."""
        if any(0 < length < case.max_seq_len for length in case.seq_lens):
            yield DEAD_ROWS

    def alternatives(self, case: DenseDecodeCase, domain: Domain) -> Iterator[Changes]:
        """Rows behind a sequence that belong to a longer one, or to none."""
        longest = max(case.seq_lens)
        if case.extra_rows:
            yield {"seq_lens": (*case.seq_lens, longest + case.extra_rows), "extra_rows": 0}
        elif (shortest := min(case.seq_lens)) < longest:
            yield {"seq_lens": (shortest,), "extra_rows": longest - shortest}


@bundled
class DenseDecode(AttentionProblem):
    """K and V of each sequence in rows of its own."""

    case_type = DenseDecodeCase
    inputs_type = DenseDecodeInputs
    facets = attention_facets(ExtraRows())

    def keys_and_values(self, case: Any) -> Specs:
        tokens = (case.num_seqs, case.max_seq_len, case.num_kv_heads)
        sizes = {"k": case.head_size, "v": case.value_size}
        return {name: TensorSpec((*tokens, size), case.dtype) for name, size in sizes.items()}

    def draw(self, decisions: Any, plan: Any) -> DenseDecodeCase:
        from attnfuzz.strategies.cases import attention_fields

        fields = attention_fields(decisions, plan)
        most, longest = plan.supports.max_seq_len, max(fields["seq_lens"])
        rows = [count for count in _EXTRA_ROWS if most is None or longest + count <= most]
        return DenseDecodeCase(extra_rows=decisions.pick(rows), **fields)

    def dead_words(self, case: Any, supports: Supports, row: int) -> list[str]:
        seq_len = case.seq_lens[row]
        return [f"sequence {row} has no token in rows {seq_len} and up of k and v (its length is {seq_len})"]

    def write(self, case: Any, tensors: dict[str, Tensor], values: Any, placement: Any) -> None:
        tensors["q"].copy_(values.q)
        tensors["seq_lens"].copy_(placement.seq_lens)
        seqs, rows = placement.slots
        tensors["k"][:, seqs, rows] = values.k
        tensors["v"][:, seqs, rows] = values.v
