"""Cases that tests begin with: one head of 16 and a sequence of three tokens, but for what is given."""

from __future__ import annotations

from typing import Any

from attnfuzz.problems.cases import DenseDecodeCase, PagedAttentionCase, PagedDecodeCase

_SMALL: dict[str, Any] = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "scale": 0.25, "seq_lens": (3,)}
_PAGED: dict[str, Any] = {**_SMALL, "block_size": 4}


def dense_case(**fields: Any) -> DenseDecodeCase:
    return DenseDecodeCase(**_SMALL | fields)


def paged_case(**fields: Any) -> PagedDecodeCase:
    return PagedDecodeCase(**_PAGED | fields)


def attention_case(**fields: Any) -> PagedAttentionCase:
    return PagedAttentionCase(**_PAGED | {"query_lens": (1,)} | fields)
