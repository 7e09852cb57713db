"""Other lengths for a case: the fields that change together. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnfuzz.problems.cases import AttentionCase, VarlenCase

__all__ = ["with_seq_lens"]


def with_seq_lens(case: AttentionCase, seq_lens: Sequence[int]) -> dict[str, Any]:
    """Fields of ``case`` with other lengths of the same sequences.

    A prefill stays one; otherwise the query tokens stay as many as they are, as far as the sequence still has them.
    Nothing of this looks after needles.
    """
    fields: dict[str, Any] = {"seq_lens": tuple(seq_lens)}
    if isinstance(case, VarlenCase):
        fields["query_lens"] = tuple(
            new if 1 < query_len == old else min(query_len, new)
            for query_len, old, new in zip(case.query_lens, case.seq_lens, seq_lens, strict=True)
        )
    return fields
