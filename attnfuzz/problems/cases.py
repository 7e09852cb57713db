"""The case types of the bundled problems: one input, fully described by small JSON. Torch-free.

A case is everything needed to rebuild its tensors bit for bit. ``encode_case`` and ``decode_case`` are the only way in
and out of JSON; decoding is strict and executes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar, Literal, Self, get_args

import msgspec

from attnfuzz.problems.masks import CAUSAL_MASK, Mask, seen_keys
from attnfuzz.problems.open_cases import OpenCase, OpenProblem
from attnfuzz.problems.quantised_kv import KvDtype, QuantisedKv
from attnfuzz.problems.recipes import DRAWN_KEYS, LseKind, Needle, Pages, StateRecipe, StrideKind, Values, check_range
from attnfuzz.problems.supports import MAX_HEAD_SIZE, MAX_HEADS, Dtype, Layout, LseLayout, OptionValue, check_option
from attnfuzz.problems.variants import PLAIN_VARIANT, VARIANTS, Variant, VariantName

__all__ = [
    "CASE_TYPES",
    "PROBLEMS",
    "AttentionCase",
    "BundledCase",
    "BundledProblem",
    "Case",
    "DenseDecodeCase",
    "LatentDecodeCase",
    "LsePair",
    "MaskedAttentionCase",
    "MergeStatesCase",
    "PagedAttentionCase",
    "PagedDecodeCase",
    "Problem",
    "SplitDecodeCase",
    "VarlenCase",
    "case_from_builtins",
    "case_type_of",
    "decode_case",
    "encode_case",
    "has_query_lens",
    "packed_width",
]

BundledProblem = Literal[
    "dense_decode",
    "paged_decode",
    "split_decode",
    "merge_states",
    "paged_attention",
    "latent_decode",
    "masked_attention",
]
Problem = BundledProblem | OpenProblem
"""A bundled problem by its name, or one that a user's file defines, described."""
LsePair = tuple[LseKind, LseKind]

MAX_SEQS = 1 << 16
MAX_SEQ_LEN = 1 << 24
MAX_QUERY_TOKENS = 1 << 20


_PLAIN_VALUES = Values()
_PLAIN_PAGES = Pages()
_PLAIN_PAIRS: tuple[LsePair, ...] = (("finite", "finite"),)


def packed_width(dtype: Dtype | KvDtype) -> int:
    """Elements in 16 bytes: the innermost K dimension ``x`` of the packed layout."""
    return {"float32": 4, "float16": 8, "bfloat16": 8}.get(dtype, 16)


def _share_default(case: msgspec.Struct, name: str, default: object) -> None:
    """``omit_defaults`` leaves out a struct or tuple only if it *is* the default: make an equal one the same one."""
    if getattr(case, name) == default:
        msgspec.structs.force_setattr(case, name, default)


class _CaseBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    problem: ClassVar[BundledProblem]
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
        """Of each row of the result; 0 where that is not left in parts."""
        return 0

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


class AttentionCase(_CaseBase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What the attention problems share: query tokens over the ``seq_lens`` keys of their sequences.

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
        _CaseBase.__post_init__(self)
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
        _share_default(self, "values", _PLAIN_VALUES)
        _share_default(self, "variant", PLAIN_VARIANT)

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
    def num_query_slots(self) -> int:
        """Rows of q and of the result; only the first ``num_rows`` belong to a sequence."""
        return self.num_rows

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
        """Of the numbers."""
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
        """Of each row, which of its sequence's keys a mask lets it attend to, 1 or 0 for each; None without a mask."""
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


class DenseDecodeCase(AttentionCase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """``k [num_seqs, max_seq_len, num_kv_heads, head_size]``, v likewise; rows past a sequence's length are dead."""

    problem: ClassVar[BundledProblem] = "dense_decode"
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


class PagedDecodeCase(AttentionCase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """K and V in pages of ``block_size`` tokens, found through a block table."""

    problem: ClassVar[BundledProblem] = "paged_decode"
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
        _share_default(self, "pages", _PLAIN_PAGES)

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


class SplitDecodeCase(PagedDecodeCase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """paged_decode whose result is left as ``num_splits`` partial states."""

    problem: ClassVar[BundledProblem] = "split_decode"
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
    def cu_seqlens_q(self) -> tuple[int, ...]:
        """Where each sequence's query tokens begin, and their number at the end."""
        return (0, *accumulate(self.query_lens))

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens) + self.query_slack

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens) + self.seq_slack


class PagedAttentionCase(VarlenCase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Query token j of a sequence with n query tokens and length L attends to positions 0 to L - n + j.

    Unless ``causal``, it attends to all L.
    """

    problem: ClassVar[BundledProblem] = "paged_attention"

    causal: bool = True
    """False: each query token stands at its sequence's last position, and sees all of it, as in an encoder."""

    @property
    def row_lens(self) -> tuple[int, ...]:
        return _row_lens(self.query_lens, self.seq_lens, self.causal)


@lru_cache(maxsize=64)
def _row_seqs(query_lens: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(seq for seq, query_len in enumerate(query_lens) for _ in range(query_len))


@lru_cache(maxsize=64)
def _row_lens(query_lens: tuple[int, ...], seq_lens: tuple[int, ...], causal: bool) -> tuple[int, ...]:
    return tuple(
        length if causal else seq_len
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True)
        for length in range(seq_len - query_len + 1, seq_len + 1)
    )


class LatentDecodeCase(PagedDecodeCase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Multi-head latent attention: one paged ``kv_cache [num_blocks, block_size, head_size]`` of one KV head.

    A token's row is its key; the first ``value_size`` numbers of it, the latent vector, are its value, too.
    """

    problem: ClassVar[BundledProblem] = "latent_decode"
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
        """Of other recipes the queries are 0 where the latent vector is (`attnfuzz.values.attention`)."""
        return self.values.keys in DRAWN_KEYS and not self.values.needles


class MaskedAttentionCase(VarlenCase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Attention under a mask, which says of each query token which keys of its sequence it sees.

    A query token that sees none has ``out = 0`` and ``lse = -inf``, or its sink.
    """

    problem: ClassVar[BundledProblem] = "masked_attention"
    tensor_names: ClassVar[tuple[str, ...]] = tuple(name for name in VarlenCase.tensor_names if name != "alibi_slopes")
    variant_names: ClassVar[tuple[VariantName, ...]] = ("soft_cap", "sinks")
    hides_keys: ClassVar[bool] = True

    mask: Mask = CAUSAL_MASK

    def __post_init__(self) -> None:
        VarlenCase.__post_init__(self)
        for name in self.variant.names:
            if name not in self.variant_names:
                raise ValueError(
                    f"variant.{name} must be left out in masked_attention: the mask says which keys are seen, and no "
                    "engine says how far away they are; use paged_attention"
                )
        _share_default(self, "mask", CAUSAL_MASK)

    @property
    def rows_seen(self) -> tuple[bytes, ...]:
        return seen_keys(self.mask, self.query_lens, self.seq_lens, self.block_size)

    def of_sequences(self, kept: Sequence[int]) -> dict[str, Any]:
        numbers = tuple(self.mask.of(seq) for seq in kept) if self.mask.seqs else ()
        return {**VarlenCase.of_sequences(self, kept), "mask": msgspec.structs.replace(self.mask, seqs=numbers)}

    @property
    def row_lens(self) -> tuple[int, ...]:
        """Up to the last key that each row sees; 0 for one that sees none."""
        return tuple(row.rfind(1) + 1 for row in self.rows_seen)


class MergeStatesCase(_CaseBase, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Two states of the same queries over disjoint keys, to be merged into one.

    The LSE pair of token ``t`` and head ``h`` is ``lse_pairs[(t * num_q_heads + h) % len(lse_pairs)]``. ``outputs``
    says how both outputs are filled, as V is by the recipe of that name.
    """

    problem: ClassVar[BundledProblem] = "merge_states"
    tensor_names: ClassVar[tuple[str, ...]] = (
        "prefix_output", "suffix_output", "prefix_lse", "suffix_lse", "output", "output_lse",
    )  # fmt: skip

    part_noun: ClassVar[str] = "token"

    num_tokens: int
    lse_pairs: tuple[LsePair, ...] = _PLAIN_PAIRS
    lse_layout: LseLayout = "HT"
    seed: int = 0
    outputs: StateRecipe = "normal"

    def __post_init__(self) -> None:
        _CaseBase.__post_init__(self)
        check_range("num_tokens", self.num_tokens, 1, 1 << 20)
        check_range("len(lse_pairs)", len(self.lse_pairs), 1, 64)
        check_range("seed", self.seed, 0, (1 << 32) - 1)
        _share_default(self, "lse_pairs", _PLAIN_PAIRS)

    @property
    def num_parts(self) -> int:
        return self.num_tokens

    @property
    def num_rows(self) -> int:
        return self.num_tokens

    @property
    def num_query_slots(self) -> int:
        return self.num_tokens

    @property
    def work(self) -> int:
        return self.num_tokens * self.num_q_heads * self.head_size

    def alone(self, part: int) -> Self:
        return msgspec.structs.replace(self, num_tokens=1)


BundledCase = AttentionCase | MergeStatesCase
Case = BundledCase | OpenCase

CASE_TYPES: dict[Problem, type[BundledCase]] = {
    "dense_decode": DenseDecodeCase,
    "paged_decode": PagedDecodeCase,
    "split_decode": SplitDecodeCase,
    "merge_states": MergeStatesCase,
    "paged_attention": PagedAttentionCase,
    "latent_decode": LatentDecodeCase,
    "masked_attention": MaskedAttentionCase,
}
PROBLEMS: tuple[BundledProblem, ...] = get_args(BundledProblem)


def case_type_of(problem: Problem) -> type[Case]:
    """The type of the cases of ``problem``."""
    return problem.case_type if isinstance(problem, OpenProblem) else CASE_TYPES[problem]


def has_query_lens(problem: Problem) -> bool:
    """Whether sequences of its cases have any number of query tokens."""
    return issubclass(case_type_of(problem), VarlenCase)


def encode_case(case: Case) -> bytes:
    """Canonical JSON: equal cases give equal bytes."""
    return msgspec.json.encode(case, order="deterministic")


def decode_case(problem: Problem, data: bytes) -> Case:
    """Parse strictly; raises msgspec.ValidationError (a ValueError) naming the path and the rule."""
    return msgspec.json.decode(data, type=case_type_of(problem))


def case_from_builtins(problem: Problem, data: object) -> Case:
    """``decode_case`` for JSON that is already parsed into dicts and lists."""
    return msgspec.convert(data, type=case_type_of(problem))
