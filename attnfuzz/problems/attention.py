"""The case types that bundled problems are made of: any case, attention, a paged cache, any number of query tokens.

A case is everything needed to rebuild its tensors bit for bit. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar, Self

import msgspec

from attnfuzz.problems.quantised_kv import KvDtype, QuantisedKv
from attnfuzz.problems.recipes import Needle, Pages, StrideKind, Values, check_range
from attnfuzz.problems.supports import MAX_HEAD_SIZE, MAX_HEADS, Dtype, Layout, OptionValue, check_option
from attnfuzz.problems.variants import PLAIN_VARIANT, VARIANTS, Variant, VariantName

MAX_SEQS = 1 << 16
MAX_SEQ_LEN = 1 << 24
MAX_QUERY_TOKENS = 1 << 20

_PLAIN_VALUES = Values()
_PLAIN_PAGES = Pages()


def packed_width(dtype: Dtype | KvDtype) -> int:
    """Elements in 16 bytes: the innermost K dimension ``x`` of the packed layout."""
    return {"float32": 4, "float16": 8, "bfloat16": 8}.get(dtype, 16)


def share_default(case: msgspec.Struct, name: str, default: object) -> None:
    """``omit_defaults`` leaves out a struct or tuple only if it *is* the default: make an equal one the same one."""
    if getattr(case, name) == default:
        msgspec.structs.force_setattr(case, name, default)


class CaseBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The fields that cases of all bundled problems share."""

    problem: ClassVar[str]
    tensor_names: ClassVar[tuple[str, ...]]
    """Tensors whose strides a case can choose."""
    values_in_keys: ClassVar[bool] = False
    """Whether V is no tensor of its own but the first ``value_size`` numbers of each key."""
    variant_names: ClassVar[tuple[VariantName, ...]] = ()
    """Variants that a case can ask for."""
    hides_keys: ClassVar[bool] = False
    """Whether a mask says which keys a query token sees."""
    part_noun: ClassVar[str] = "sequence"
    """What a batch consists of, each independent of the others: see `num_parts`."""

    num_q_heads: int
    head_size: int
    dtype: Dtype = "float16"
    strides: Mapping[str, StrideKind] = {}
    options: Mapping[str, OptionValue] = {}

    def __post_init__(self) -> None:
        check_range("num_q_heads", self.num_q_heads, 1, MAX_HEADS)
        check_range("head_size", self.head_size, 1, MAX_HEAD_SIZE)
        for name, value in self.options.items():
            check_option(name, value)
        for name in self.strides:
            if name not in self.tensor_names:
                raise ValueError(f"strides[{name!r}]: {self.problem} has no such tensor; it has {self.tensor_names}")

    @property
    def value_size(self) -> int:
        """Size of a head of the output, and of what it is an average of."""
        return self.head_size

    @property
    def scores_read_values(self) -> bool:
        """Whether scores depend on the numbers of V: with others in their place, tokens have other weights."""
        return False

    @property
    def page_size(self) -> int:
        """Tokens of a page of the cache; 0 where there are no pages."""
        return 0

    @property
    def partial_states(self) -> int:
        """How many partial states each row of the result has; 0 where it is not left in parts."""
        return 0

    @property
    def seed(self) -> int:
        """The seed of the numbers."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        """Rows of the result that belong to a part."""
        raise NotImplementedError

    @property
    def num_query_slots(self) -> int:
        """Rows of the result; only the first ``num_rows`` belong to a part."""
        return self.num_rows

    @property
    def work(self) -> int:
        """Numbers that are averaged, times the rows that they are averaged in."""
        raise NotImplementedError

    @property
    def num_parts(self) -> int:
        """How many sequences, or tokens, there are in the batch."""
        raise NotImplementedError

    def rows_of(self, part: int) -> range:
        """The rows of the result that belong to a part."""
        return range(part, part + 1)

    def alone(self, part: int) -> Self:
        """The case of one part by itself."""
        raise NotImplementedError


class AttentionCase(CaseBase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A case of an attention problem: query tokens over the ``seq_lens`` keys of their sequences.

    A *row* is one query token: row ``i`` of q and of the result belongs to sequence ``row_seqs[i]`` and attends to its
    first ``row_lens[i]`` keys, or to the last of them and some before (``seen``). In the decode problems each sequence
    has one row, over all of its keys.
    """

    num_kv_heads: int
    seq_lens: tuple[int, ...]
    scale: float
    values: Values = _PLAIN_VALUES
    variant: Variant = PLAIN_VARIANT
    v_head_size: int | None = None
    """Size of a head of V and of the output, where it is not ``head_size``, that of q and K (see ``value_size``)."""
    kv: QuantisedKv | None = None
    """None: K and V have the dtype of q."""

    def __post_init__(self) -> None:
        CaseBase.__post_init__(self)
        if self.v_head_size is not None:
            check_range("v_head_size", self.v_head_size, 1, MAX_HEAD_SIZE)
        if self.v_head_size == self.head_size:  # equal cases are written in one way
            msgspec.structs.force_setattr(self, "v_head_size", None)
        check_range("num_kv_heads", self.num_kv_heads, 1, MAX_HEADS)
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(f"num_q_heads={self.num_q_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        check_range("len(seq_lens)", len(self.seq_lens), 1, MAX_SEQS)
        for i, seq_len in enumerate(self.seq_lens):
            check_range(f"seq_lens[{i}]", seq_len, 0, MAX_SEQ_LEN)
        if not math.isfinite(self.scale) or not 0 < self.scale <= 64:
            raise ValueError(f"scale={self.scale!r} must be a finite number in (0, 64]")
        for i, needle in enumerate(self.values.needles):
            self._check_needle(i, needle)
        share_default(self, "values", _PLAIN_VALUES)
        share_default(self, "variant", PLAIN_VARIANT)

    def _check_needle(self, i: int, needle: Needle) -> None:
        check_range(f"needles[{i}].seq", needle.seq, 0, self.num_seqs - 1)
        check_range(f"needles[{i}].kv_head", needle.kv_head, 0, self.num_kv_heads - 1)
        check_range(f"needles[{i}].position", needle.position, 0, self.seq_lens[needle.seq] - 1)

    @property
    def value_size(self) -> int:
        return self.v_head_size or self.head_size

    @property
    def kv_dtype(self) -> Dtype | KvDtype:
        return self.dtype if self.kv is None else self.kv.dtype

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def gqa_ratio(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def num_rows(self) -> int:
        return self.num_seqs

    @property
    def row_seqs(self) -> Sequence[int]:
        return range(self.num_seqs)

    @property
    def row_lens(self) -> tuple[int, ...]:
        return self.seq_lens

    @property
    def num_parts(self) -> int:
        return self.num_seqs

    def alone(self, part: int) -> Self:
        values = msgspec.structs.replace(self.values, needles=())
        return msgspec.structs.replace(self, **self.of_sequences([part]), values=values)

    @property
    def query_counts(self) -> tuple[int, ...]:
        """How many query tokens each sequence has."""
        return (1,) * self.num_seqs

    @property
    def max_seq_len(self) -> int:
        """The longest sequence; where a kernel is told a bound or gets room for it, that."""
        return max(self.seq_lens)

    @property
    def seed(self) -> int:
        return self.values.seed

    @property
    def shared_tokens(self) -> int:
        """A position below this is stored on sequence 0's page, whichever sequence reads it."""
        return 0

    @property
    def work(self) -> int:
        return sum(self.row_lens) * self.num_q_heads * max(self.head_size, self.value_size)

    @property
    def rows_seen(self) -> tuple[bytes, ...] | None:
        """The keys of its sequence that a mask lets each row attend to, 1 or 0 for each; None without a mask."""
        return None

    def seen(self, row: int) -> bytes | None:
        """``rows_seen`` of one row."""
        return None if self.rows_seen is None else self.rows_seen[row]

    def of_sequences(self, kept: Sequence[int]) -> dict[str, Any]:
        """Fields of the case with only the sequences ``kept``, in this order. Nothing of this looks after needles."""
        return {"seq_lens": tuple(self.seq_lens[seq] for seq in kept)}

    def with_seq_lens(self, seq_lens: Sequence[int]) -> dict[str, Any]:
        """Fields of the case with other lengths of the same sequences. Nothing of this looks after needles."""
        return {"seq_lens": tuple(seq_lens)}

    def with_own_pages(self) -> dict[str, Any]:
        """Fields of the case with no page that sequences share."""
        return {}


class PagedDecodeCase(AttentionCase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """K and V in pages of ``block_size`` tokens, found through a block table."""

    problem: ClassVar[str] = "paged_decode"
    tensor_names: ClassVar[tuple[str, ...]] = (
        "q", "k_cache", "v_cache", "block_table", "seq_lens", "alibi_slopes", "sinks", "k_scale", "v_scale",
        "out", "lse",
    )  # fmt: skip
    variant_names: ClassVar[tuple[VariantName, ...]] = VARIANTS

    block_size: int
    layout: Layout = "NHD"
    pages: Pages = _PLAIN_PAGES

    def __post_init__(self) -> None:
        AttentionCase.__post_init__(self)
        check_range("block_size", self.block_size, 1, 1 << 20)
        width = packed_width(self.kv_dtype)
        if self.layout == "packed" and self.head_size % width:
            raise ValueError(
                f"head_size={self.head_size} must be a multiple of {width} (16 bytes of {self.kv_dtype}) "
                "in the packed layout; choose another head size or layout"
            )
        if self.layout == "interleaved" and self.strides.get("v_cache", "contiguous") != "contiguous":
            raise ValueError(
                "strides['v_cache'] must be left out in the interleaved layout: K and V are views of one tensor; "
                "strides['k_cache'] shapes both"
            )
        if self.layout == "interleaved" and self.v_head_size is not None:
            raise ValueError(
                f"v_head_size={self.v_head_size} must be left out in the interleaved layout: K and V are halves of one "
                "tensor, whose rows have one size; choose another layout"
            )
        share_default(self, "pages", _PLAIN_PAGES)

    def blocks_of(self, seq: int) -> int:
        """Pages that sequence ``seq`` owns."""
        return -(-self.seq_lens[seq] // self.block_size)

    @property
    def max_blocks_per_seq(self) -> int:
        return max(1, max(self.blocks_of(i) for i in range(self.num_seqs)) + self.pages.extra_columns)

    def with_own_pages(self) -> dict[str, Any]:
        return {"pages": msgspec.structs.replace(self.pages, shared_blocks=0)}

    @property
    def page_size(self) -> int:
        return self.block_size

    @property
    def shared_tokens(self) -> int:
        return min(self.pages.shared_blocks, self.blocks_of(0)) * self.block_size


class VarlenCase(PagedDecodeCase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Attention of the last ``query_lens`` tokens of each sequence over its paged cache, which holds them too.

    ``seq_lens`` counts context and new tokens. Of a sequence of length L prefill has L query tokens, decode one, and
    one with none gets no token this step. A batch has at least one query token, since no kernel is launched for none.
    Which keys each of them sees is what the problems differ in.
    """

    tensor_names: ClassVar[tuple[str, ...]] = (
        "q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q", "alibi_slopes", "sinks",
        "k_scale", "v_scale", "out", "lse",
    )  # fmt: skip

    query_lens: tuple[int, ...]
    query_slack: int = 0
    seq_slack: int = 0
    """By how much ``max_query_len`` and ``max_seq_len``, the bounds that a kernel is told, exceed the longest."""
    padding_tokens: int = 0
    """Rows of q and of the result behind the last sequence's: servers pad a batch to the size of a captured graph."""

    def __post_init__(self) -> None:
        PagedDecodeCase.__post_init__(self)
        check_range("query_slack", self.query_slack, 0, MAX_SEQ_LEN)
        check_range("seq_slack", self.seq_slack, 0, MAX_SEQ_LEN)
        if len(self.query_lens) != self.num_seqs:
            raise ValueError(
                f"len(query_lens)={len(self.query_lens)} must be len(seq_lens)={self.num_seqs}; "
                "give every sequence a query length, 0 for none"
            )
        for i, (query_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            check_range(f"query_lens[{i}]", query_len, 0, seq_len)
        check_range("sum(query_lens)", sum(self.query_lens), 1, MAX_QUERY_TOKENS)
        check_range("padding_tokens", self.padding_tokens, 0, MAX_QUERY_TOKENS)

    @property
    def num_rows(self) -> int:
        return sum(self.query_lens)

    @property
    def num_query_slots(self) -> int:
        return self.num_rows + self.padding_tokens

    @property
    def query_counts(self) -> tuple[int, ...]:
        return self.query_lens

    @property
    def row_seqs(self) -> Sequence[int]:
        return _row_seqs(self.query_lens)

    def rows_of(self, part: int) -> range:
        first = sum(self.query_lens[:part])
        return range(first, first + self.query_lens[part])

    def of_sequences(self, kept: Sequence[int]) -> dict[str, Any]:
        lengths = tuple(self.query_lens[seq] for seq in kept)
        return {**PagedDecodeCase.of_sequences(self, kept), "query_lens": lengths}

    def with_seq_lens(self, seq_lens: Sequence[int]) -> dict[str, Any]:
        """A prefill stays one; otherwise there are as many query tokens, as far as the sequence still has them."""
        lengths = zip(self.query_lens, self.seq_lens, seq_lens, strict=True)
        kept = tuple(new if 1 < count == old else min(count, new) for count, old, new in lengths)
        return {**PagedDecodeCase.with_seq_lens(self, seq_lens), "query_lens": kept}

    @property
    def equal_queries(self) -> bool:
        return len({*self.query_lens}) == 1

    @property
    def context(self) -> bool:
        """Whether all sequences that have query tokens have keys before these."""
        return all(own < length for own, length in zip(self.query_lens, self.seq_lens, strict=True) if own)

    @property
    def cu_seqlens_q(self) -> tuple[int, ...]:
        """Where each sequence's query tokens begin, and their number at the end."""
        return (0, *accumulate(self.query_lens))

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens) + self.query_slack

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens) + self.seq_slack


@lru_cache(maxsize=64)
def _row_seqs(query_lens: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(seq for seq, query_len in enumerate(query_lens) for _ in range(query_len))
