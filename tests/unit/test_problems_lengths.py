"""Fields that change together with the lengths of a case."""

from __future__ import annotations

import msgspec

from attnfuzz.problems.cases import PagedAttentionCase, PagedDecodeCase

FIELDS = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "scale": 0.25, "block_size": 4}
DECODE = PagedDecodeCase(**FIELDS, seq_lens=(4, 9, 1))  # type: ignore[arg-type]  # ints and a float
QUERIES = PagedAttentionCase(**FIELDS, seq_lens=(4, 9, 1), query_lens=(4, 3, 1))  # type: ignore[arg-type]  # as above


def test_a_prefill_stays_one_and_others_keep_their_queries() -> None:
    """A shorter or longer relative of a case would be no case, or of another kind than the case."""
    assert QUERIES.with_seq_lens((6, 2, 5)) == {"seq_lens": (6, 2, 5), "query_lens": (6, 2, 1)}
    assert msgspec.structs.replace(QUERIES, **QUERIES.with_seq_lens((0, 9, 9))).query_lens == (0, 3, 1)


def test_sequences_keep_their_queries() -> None:
    """A sequence alone, or without its neighbours, would get another one's query tokens."""
    assert QUERIES.of_sequences([2, 0]) == {"seq_lens": (1, 4), "query_lens": (1, 4)}


def test_decode_knows_lengths_only() -> None:
    """A field that the case type does not have would be refused."""
    assert DECODE.with_seq_lens((1, 2, 3)) == {"seq_lens": (1, 2, 3)}
    assert DECODE.of_sequences([1]) == {"seq_lens": (9,)}
