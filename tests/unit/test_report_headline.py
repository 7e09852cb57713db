"""attnfuzz.report.findings: a case can be told from others by one line."""

from __future__ import annotations

from typing import Any

import pytest

from attnfuzz.problems.cases import Problem, case_from_builtins
from attnfuzz.report.findings import one_line

HEADS: dict[str, Any] = {"num_q_heads": 2, "head_size": 16}
DENSE: dict[str, Any] = {**HEADS, "num_kv_heads": 1, "scale": 0.25, "seq_lens": [3, 0]}
PAGED: dict[str, Any] = {**DENSE, "block_size": 4}


@pytest.mark.parametrize(
    ("problem", "fields", "end"),
    [
        ("dense_decode", DENSE, "2 query heads on 1 KV head, seq_lens 3, 0"),
        ("dense_decode", {**DENSE, "seq_lens": [1] * 9}, "seq_lens 1, 1, 1, 1, 1, 1, 1, 1, ..."),
        (
            "paged_decode",
            {**PAGED, "variant": {"sinks": "high"}, "options": {"num_splits": 2}},
            "pages of 4 tokens, seq_lens 3, 0, sinks, num_splits=2",
        ),
        ("split_decode", {**PAGED, "num_splits": 3}, "seq_lens 3, 0, num_splits=3"),
        ("paged_attention", {**PAGED, "query_lens": [2, 0]}, "query_lens 2, 0, seq_lens 3, 0"),
        ("merge_states", {**HEADS, "num_tokens": 1, "options": {"warps": 4}}, "1 token, 2 query heads, warps=4"),
    ],
)
def test_a_case_in_one_line(problem: Problem, fields: dict[str, Any], end: str) -> None:
    """The reader of a report would have to open the file to see which lengths, options or variants fail."""
    line = one_line(case_from_builtins(problem, fields))
    assert line.startswith(f"{problem}, float16, head_size 16, ")
    assert line.endswith(end)
