"""Declarations of a kernel: which cases it takes and which promises it makes. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from attnfuzz.problems.masks import MASK_KINDS, MaskKind
from attnfuzz.problems.quantised_kv import KV_DTYPES, KV_GRANULARITIES, KvDtype, KvGranularity
from attnfuzz.problems.variants import VARIANTS, VariantName
from attnfuzz.untrusted_text import check_text


@cache
def _defaults(of: type[msgspec.Struct]) -> dict[str, Any]:
    return {one.name: one.default for one in msgspec.structs.fields(of)}  # which reads all annotations each time


class _Remembers(msgspec.StructMeta):
    """Notes which fields a program passed at their defaults; a copy by ``msgspec.structs.replace`` keeps the note."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:  # noqa: N805 - of a metaclass
        made = super().__call__(*args, **fields)
        if fields and "promised" not in fields:
            said = tuple(sorted(name for name, value in fields.items() if value == _defaults(cls)[name]))
            msgspec.structs.force_setattr(made, "promised", said)
        return made


class Declared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, metaclass=_Remembers):
    """Fields with defaults, of which nothing that was passed is taken to be left open: what is written is a promise.

    ``promised`` are the names of those that were passed at their defaults; it is filled in, not passed.
    """

    promised: tuple[str, ...] = ()

    def leaves_open(self, name: str) -> bool:
        """Whether nothing was said of the field ``name``."""
        return bool(getattr(self, name) == _defaults(type(self))[name]) and name not in self.promised

    def declared(self) -> dict[str, Any]:
        """The fields that something was said of, with their values."""
        names = (name for name in self.__struct_fields__ if name != "promised")
        return {name: getattr(self, name) for name in names if not Declared.leaves_open(self, name)}


Dtype = Literal["float16", "bfloat16", "float32"]
Layout = Literal["NHD", "HND", "packed", "interleaved"]
Strides = Literal["any", "last_contiguous", "hybrid", "serving", "contiguous"]
"""From what permits most to what permits least."""
UnusedTableEntries = Literal["valid", "zero", "garbage"]
LseKind = Literal["natural", "base2", "none"]
LseLayout = Literal["HT", "TH"]
EmptyStateOutputs = Literal["zeros", "anything"]
EmptyStateLse = Literal["-inf", "+inf"]
OptionValue = bool | int | float | str
VHeadSizes = Literal["equal", "any"] | tuple[int, ...]
Combination = Mapping[str, tuple[OptionValue, ...]]
"""Values that go together, by the names of a case's fields and of options."""
if TYPE_CHECKING:
    Where = Callable[[Any], bool] | Sequence[Mapping[str, Any]] | None
else:
    Where = Any  # of data, `Supports` itself says in one sentence what is wrong with it

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
EMPTY_STATE_LSES: tuple[EmptyStateLse, ...] = get_args(EmptyStateLse)
MAX_HEADS = 1024
MAX_HEAD_SIZE = 1024
MAX_COMBINATIONS = 256
"""Of which a strategy chooses with one byte."""
_MAX_NAMES = 64
_MAX_VALUES = 1024
_FIELDS_IN_WHERE = {
    "dtypes": ("dtype",),
    "layouts": ("layout",),
    "head_sizes": ("head_size",),
    "block_sizes": ("block_size",),
    "gqa_ratios": ("gqa_ratio", "num_q_heads", "num_kv_heads"),
    "max_num_splits": ("num_splits",),
    "v_head_sizes": ("v_head_size",),
    "kv_dtypes": ("kv_dtype",),
}
"""What the fields of a declaration are called in a combination."""


class Supports(Declared, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits what is drawn for a kernel and states the promises that oracles rest on.

    The defaults are what a serving engine may hand over. ``None`` means any value. What is passed is a promise, also
    at its default: ``Supports(empty_sequences=True)`` is held to that, ``Supports()`` leaves it to be found out.

    * ``dtypes``, ``head_sizes``, ``block_sizes``, ``layouts``, ``gqa_ratios`` (query heads per KV head),
      ``max_seq_len``, ``max_query_len``, ``max_num_splits``: the values that may occur.
    * ``large_sizes``: what these leave open may, now and then, be heads of 512, 576 and 1,024, pages of 272 and 528
      tokens, and 32, 64, 71 and 128 query heads per KV head. Not unless declared: kernels that keep a whole head in
      registers or shared memory run out of it.
    * ``v_head_sizes``: sizes of V's heads, which are the output's too: ``"equal"``, those of K and no others;
      ``"any"``; or the sizes that may occur, each with any of ``head_sizes``: multi-head latent attention as DeepSeek
      has it is ``head_sizes=(192,), v_head_sizes=(128,)``.
    * ``where``: which of these values go together, if not each with each: a table of combinations, of which a case must
      fit one, or a function of a case (``attnfuzz.problems.combinations``). ``where=({"head_size": (64, 128),
      "block_size": 16}, {"head_size": 256, "block_size": (32, 64), "dtype": "bfloat16"})``: what a combination
      leaves out may have any value that the other fields permit.
    * ``strides``: how tensors may lie in memory. ``"serving"``: as serving engines hand them over. q
      and out may be slices of a fused projection (tokens further apart than num_q_heads x head_size), pages of a cache
      and sequences of a dense K and V may have a gap between them that keeps the alignment, of K and V the same;
      everything else is contiguous. ``"hybrid"``, unless declared: the same, but K and V may have gaps of their own, as
      where pages are shared by layers of several kinds; where nothing is said, what fails for that alone is a question.
      Offsets pass 2^31 where those of a real tensor do: by pages of a cache, by
      sequences and tokens of a dense K and V, by partial and merged results, and by tokens of q and out where sequences
      have many; no server decodes so many sequences together. ``"any"``: all that a tensor can be (every other
      element, transposed, misaligned, any dimension so wide that offsets pass 2^31); ``"last_contiguous"``: the same as
      far as the last dimension has stride 1; ``"contiguous"``: no gaps at all.
    * ``unused_table_entries``: what block-table entries past a sequence's last page may hold: ``"zero"``, ``"valid"``
      (any page of the cache, a wrong one included) or ``"garbage"`` (also ids that do not exist; never followed).
    * ``empty_sequences``: sequences of length 0 (``out = 0``, ``lse = -inf``), sequences without query tokens in
      paged_attention and, when merging, empty states.
    * ``padding_tokens``: rows of q behind ``cu_seqlens_q[-1]`` in paged_attention, with which servers pad a batch to
      the size that a CUDA graph was captured with. What becomes of those of the results is the kernel's business.
    * ``non_causal``: cases of paged_attention with ``causal=False``, whose query tokens attend to all keys of their
      sequence, as its last token does; ``inputs.causal`` says which it is. Not unless declared.
    * ``empty_state_outputs``: what the outputs of empty states hold when merging: ``"zeros"``, which is what the
      kernels of FlashAttention, FlashInfer and vLLM write for a sequence or split without keys, or ``"anything"``, NaN
      included, as it is where nobody wrote them.
    * ``empty_state_lse``: LSEs that tell a kernel that merges of an empty state: ``"-inf"``, ``"+inf"`` or, unless
      declared, both. FlashAttention 2 returns +inf for a row without keys, so that the merges of vLLM and SGLang are
      handed it in every deployment that runs on it, and take it for -inf; all others return -inf.
    * ``lse``: base of the log-sum-exp taken and returned; ``"none"``: the kernel returns no LSE. One that returns none
      and does not declare so is told once, and judged by its output otherwise.
    * ``lse_layout``: axes of the LSE of merge_states, ``"HT"`` (heads first, vLLM) or ``"TH"`` (tokens first, SGLang).
    * ``variants``: those of ``attnfuzz.problems.variants`` that the kernel can do, each by itself and together:
      ``"window"``, ``"soft_cap"``, ``"alibi"``, ``"sinks"``. None unless declared. A kernel for the paged problems
      finds what a case asks for in ``inputs.window``, ``soft_cap``, ``alibi_slopes`` and ``sinks``.
    * ``masks``: kinds of masks that the kernel can do in masked_attention (``attnfuzz.problems.masks``). A query token
      that sees no key occurs with ``empty_sequences`` only. ``mask_per_sequence=False``: the mask's numbers are the
      same for all sequences, as where a kernel gets one table of a tree for the whole batch (vLLM's ``qq_bias``).
    * ``freed_pages``: pages that lie behind a sliding window and have been given to others, as servers do: the table
      still names pages that exist, but what they hold may be NaN.
    * ``kv_dtypes``: 8-bit formats that the cache may have instead of q's dtype (``attnfuzz.problems.quantised_kv``):
      ``"float8_e4m3fn"``, ``"float8_e5m2"``. None unless declared. ``kv_scales``: how many float32 scales there may be
      in ``inputs.k_scale`` and ``v_scale``: one for the whole cache, in a tensor of one element (``"tensor"``), or one
      for each KV head (``"head"``). Both are None where the cache is plain.
    * ``deterministic``: the same inputs give the same bits. ``batch_invariant``: a row does not depend on its batch.
    * ``infinite_scores``: a score of -inf, as an infinity in K makes it, has weight 0 beside others, and with
      ``empty_sequences`` a row of nothing but such scores is what a row without keys is. Kernels that never meet one
      leave out the guards that this takes, those of engines among them.
    * ``graph_replay``: a call can be captured into a CUDA graph, which then gives what an eager call gives for whatever
      its tensors hold at the replay. Shapes, strides and what is passed by value (``max_seq_len``, ``max_query_len``,
      ``num_splits``, options) stay as captured; lengths may be any from 0 to what these have room for. What an engine
      plans for a batch lies outside of the graph, and is planned anew, with the new contents, before each replay. Where
      nothing is said, it is tried with calls that do not wait for the GPU, and what fails is a question; False ends it.
    """

    dtypes: tuple[Dtype, ...] = DTYPES
    head_sizes: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None
    layouts: tuple[Layout, ...] = LAYOUTS
    gqa_ratios: tuple[int, ...] | None = None
    max_seq_len: int | None = None
    max_query_len: int | None = None
    max_num_splits: int | None = None
    v_head_sizes: VHeadSizes = "equal"
    strides: Strides = "hybrid"
    unused_table_entries: UnusedTableEntries = "valid"
    empty_sequences: bool = True
    padding_tokens: bool = True
    non_causal: bool = False
    empty_state_outputs: EmptyStateOutputs = "zeros"
    empty_state_lse: tuple[EmptyStateLse, ...] = EMPTY_STATE_LSES
    lse: LseKind = "natural"
    lse_layout: LseLayout = "HT"
    variants: tuple[VariantName, ...] = ()
    masks: tuple[MaskKind, ...] = MASK_KINDS
    mask_per_sequence: bool = True
    freed_pages: bool = True
    kv_dtypes: tuple[KvDtype, ...] = ()
    kv_scales: tuple[KvGranularity, ...] = KV_GRANULARITIES
    deterministic: bool = True
    batch_invariant: bool = False
    infinite_scores: bool = False
    graph_replay: bool | None = None
    large_sizes: bool = False
    where: Where = None

    @property
    def combinations(self) -> tuple[Combination, ...]:
        """The table of ``where``; empty without one. Raises ValueError for a function, which no declaration keeps."""
        if callable(self.where):
            raise ValueError("Supports(where=a function): only a kernel's declaration makes a table of it; use that")
        return self.where or ()  # type: ignore[return-value]  # __post_init__ has made it a tuple of combinations

    def leaves_open(self, name: str) -> bool:
        """Whether nothing was said of the field ``name``, and ``where`` says nothing of it either."""
        named = _FIELDS_IN_WHERE.get(name, ())
        return super().leaves_open(name) and not any(
            field in combination for combination in self.combinations for field in named
        )

    def __post_init__(self) -> None:
        if self.where is not None and not callable(self.where):
            msgspec.structs.force_setattr(self, "where", _checked_table(self.where))
        _check_choices("dtypes", self.dtypes, DTYPES)
        _check_choices("layouts", self.layouts, LAYOUTS)
        _check_sizes("head_sizes", self.head_sizes, MAX_HEAD_SIZE)
        if self.v_head_sizes not in ("equal", "any"):
            _check_v_head_sizes(self.v_head_sizes)
        _check_sizes("block_sizes", self.block_sizes, 1 << 20)
        _check_sizes("gqa_ratios", self.gqa_ratios, MAX_HEADS)
        for name in ("max_seq_len", "max_query_len", "max_num_splits"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 1):
                raise ValueError(f"Supports({name}={value!r}): must be an integer >= 1, or None for no limit")
        for name, kind in _CHOICE_FIELDS.items():
            _check_choices(name, (getattr(self, name),), get_args(kind))
        if self.variants != ():
            _check_choices("variants", self.variants, VARIANTS)
        _check_choices("masks", self.masks, MASK_KINDS)
        if self.kv_dtypes != ():
            _check_choices("kv_dtypes", self.kv_dtypes, KV_DTYPES)
        _check_choices("empty_state_lse", self.empty_state_lse, EMPTY_STATE_LSES)
        _check_choices("kv_scales", self.kv_scales, KV_GRANULARITIES)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Supports({name}={getattr(self, name)!r}): must be True or False")
        if self.graph_replay not in (None, True, False) or type(self.graph_replay) is int:
            raise ValueError(
                f"Supports(graph_replay={self.graph_replay!r}): must be True or False, or None to be asked"
            )


_FLAGS = (
    "empty_sequences",
    "infinite_scores",
    "padding_tokens",
    "non_causal",
    "mask_per_sequence",
    "freed_pages",
    "deterministic",
    "batch_invariant",
    "large_sizes",
)
_CHOICE_FIELDS: dict[str, Any] = {
    "strides": Strides,
    "unused_table_entries": UnusedTableEntries,
    "empty_state_outputs": EmptyStateOutputs,
    "lse": LseKind,
    "lse_layout": LseLayout,
}


def as_written(value: object) -> str:
    """A field's ``value`` as it is written in a program."""
    if isinstance(value, tuple):
        return f"({', '.join(map(as_written, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, Mapping):
        single = {name: one[0] if isinstance(one, tuple) and len(one) == 1 else one for name, one in value.items()}
        return f"{{{', '.join(f'{json.dumps(name)}: {as_written(one)}' for name, one in single.items())}}}"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def as_call(name: str, fields: Mapping[str, object]) -> str:
    """``name(...)`` with ``fields`` by keyword, as it is written in a program."""
    return f"{name}({', '.join(f'{field}={as_written(value)}' for field, value in fields.items())})"


def check_options(options: dict[str, tuple[OptionValue, ...]]) -> None:
    """Raise ValueError unless every option is a non-empty tuple of bool, int, float or str."""
    for name, choices in options.items():
        if not name.isidentifier():
            raise ValueError(f"options[{name!r}]: an option is passed by keyword, so its name must be an identifier")
        if not isinstance(choices, tuple) or not choices:
            raise ValueError(f"options[{name!r}]={choices!r}: must be a non-empty tuple of choices")
        for choice in choices:
            check_option(name, choice)


def check_option(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` can be what a kernel is passed as the option ``name``, and be kept as JSON."""
    check_text("the name of an option", name)
    _check_choice(f"options[{name!r}]", value)


def _check_choice(place: str, value: object) -> None:
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"{place} holds {value!r:.80}: choices are bool, int, float or str")
    if isinstance(value, str):
        check_text(place, value)
    elif not (-(2**63) <= value < 2**63 if isinstance(value, int) else math.isfinite(value)):
        raise ValueError(f"{place} holds {value!r:.40}: numbers are finite, and integers have 64 bits")


def _checked_table(table: object) -> tuple[Combination, ...]:
    """``table`` with each value in a tuple, as it is kept. Raises ValueError."""
    if not isinstance(table, tuple | list) or not table:
        raise ValueError(
            f"Supports(where={table!r:.80}): must be a function of a case, or a non-empty tuple of combinations such "
            'as {"head_size": (64, 128), "block_size": 16}'
        )
    if len(table) > MAX_COMBINATIONS:
        raise ValueError(
            f"Supports(where) has {len(table)} combinations, but at most {MAX_COMBINATIONS} are told apart; join those "
            "that differ in one field by giving it several values"
        )
    return tuple(_checked_combination(f"where[{i}]", one) for i, one in enumerate(table))


def _checked_combination(place: str, combination: object) -> Combination:
    if not isinstance(combination, Mapping) or not 0 < len(combination) <= _MAX_NAMES:
        raise ValueError(
            f"Supports({place}={combination!r:.80}): must be a dict with 1 to {_MAX_NAMES} entries, from names of a "
            "case's fields or options to a value or a tuple of values"
        )
    checked: dict[str, tuple[OptionValue, ...]] = {}
    for name, values in combination.items():
        check_text(f"a name in Supports({place})", name)
        several = tuple(values) if isinstance(values, tuple | list) else (values,)
        if not 0 < len(several) <= _MAX_VALUES:
            raise ValueError(f"Supports({place}[{name!r}]={values!r:.80}): must hold 1 to {_MAX_VALUES} values")
        for value in several:
            _check_choice(f"Supports({place}[{name!r}])", value)
        checked[name] = several
    return checked


def _check_v_head_sizes(values: object) -> None:
    if not isinstance(values, tuple):
        raise ValueError(f'Supports(v_head_sizes={values!r}): must be "equal", "any" or a tuple of integers')
    _check_sizes("v_head_sizes", values, MAX_HEAD_SIZE)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_choices(name: str, values: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(values, tuple) or not values:
        raise ValueError(f"Supports({name}={values!r}): must be a non-empty tuple drawn from {allowed}")
    for value in values:
        if value not in allowed:
            raise ValueError(f"Supports({name}={value!r}): must be one of {allowed}")


def _check_sizes(name: str, values: object, most: int) -> None:
    if values is None:
        return
    if not isinstance(values, tuple) or not values:
        raise ValueError(f"Supports({name}={values!r}): must be a non-empty tuple of integers, or None for any")
    for value in values:
        if not _is_int(value) or not 1 <= value <= most:
            raise ValueError(f"Supports({name} holds {value!r}): must be an integer between 1 and {most}")
