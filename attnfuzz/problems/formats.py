"""The part of a case that decides what is compiled for it: everything a kernel may take as a compile-time constant.

A compiler for GPUs makes a program of its own for each combination of these, which takes longer than thousands of runs
of it. The rest of a case (lengths, pages, values, scale) a kernel reads at run time. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from attnfuzz.problems.module import Case
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.recipes import StrideKind
from attnfuzz.problems.supports import Dtype, Layout, OptionValue
from attnfuzz.problems.variants import PLAIN_VARIANT, Variant


class Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Fields of a case by their names there; None for one that the problem does not have, and for no variant."""

    dtype: Dtype
    head_size: int
    num_q_heads: int
    num_kv_heads: int | None = None
    layout: Layout | None = None
    block_size: int | None = None
    num_splits: int | None = None
    variant: Variant | None = None
    v_head_size: int | None = None
    kv: QuantisedKv | None = None
    strides: Mapping[str, StrideKind] = {}
    options: Mapping[str, OptionValue] = {}

    def with_strides(self, strides: Mapping[str, StrideKind]) -> Format:
        """This format with tensors that lie in memory as ``strides`` says; those that it does not name are
        contiguous."""
        return msgspec.structs.replace(self, strides=strides)


def format_of(case: Case) -> Format:
    """The format of ``case``."""
    fields: dict[str, Any] = {name: getattr(case, name, None) for name in Format.__struct_fields__}
    if fields["variant"] == PLAIN_VARIANT:
        fields["variant"] = None
    return Format(**fields)


def format_key(format_: Format) -> bytes:
    """Equal for equal formats, which cannot be hashed themselves."""
    return msgspec.json.encode(format_, order="deterministic")
