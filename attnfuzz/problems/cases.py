"""All bundled problems, each of which is a file in `attnfuzz.bundled`: their case types, and cases in and out of JSON.

``encode_case`` and ``decode_case`` are the only way in and out of JSON; decoding is strict and executes nothing.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Literal

import msgspec

import attnfuzz.bundled.paged_decode  # noqa: F401 - whose case type is a building block
from attnfuzz.bundled.dense_decode import DenseDecodeCase as DenseDecodeCase
from attnfuzz.bundled.latent_decode import LatentDecodeCase as LatentDecodeCase
from attnfuzz.bundled.masked_attention import MaskedAttentionCase as MaskedAttentionCase
from attnfuzz.bundled.merge_states import MergeStatesCase as MergeStatesCase
from attnfuzz.bundled.paged_attention import PagedAttentionCase as PagedAttentionCase
from attnfuzz.bundled.split_decode import SplitDecodeCase as SplitDecodeCase
from attnfuzz.problems.attention import AttentionCase as AttentionCase
from attnfuzz.problems.attention import CaseBase
from attnfuzz.problems.attention import PagedDecodeCase as PagedDecodeCase
from attnfuzz.problems.attention import VarlenCase as VarlenCase
from attnfuzz.problems.attention import packed_width as packed_width
from attnfuzz.problems.module import CASE_TYPES as CASE_TYPES
from attnfuzz.problems.module import Case as Case
from attnfuzz.problems.module import Problem as Problem
from attnfuzz.problems.module import case_type_of as case_type_of
from attnfuzz.problems.module import has_query_lens as has_query_lens
from attnfuzz.problems.recipes import LsePair as LsePair

BundledCase = CaseBase
PROBLEMS: tuple[str, ...] = tuple(kind.problem for kind in CASE_TYPES.values())
if TYPE_CHECKING:
    BundledProblem = str
else:
    BundledProblem = Literal[PROBLEMS]  # which is checked where JSON is read


def encode_case(case: Case) -> bytes:
    """Canonical JSON: equal cases give equal bytes."""
    return msgspec.json.encode(case, order="deterministic")


def case_number(case: Case) -> int:
    """64 bits by which a case draws what is done with it: the same anywhere and always, and unlike for alike cases."""
    return int.from_bytes(hashlib.blake2b(encode_case(case), digest_size=8).digest(), "little")


def decode_case(problem: Problem, data: bytes) -> Case:
    """Parse strictly; raises msgspec.ValidationError (a ValueError) naming the path and the rule."""
    return msgspec.json.decode(data, type=case_type_of(problem))


def case_from_builtins(problem: Problem, data: object) -> Case:
    """``decode_case`` for JSON that is already parsed into dicts and lists."""
    return msgspec.convert(data, type=case_type_of(problem))
