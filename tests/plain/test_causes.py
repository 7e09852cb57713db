"""What is said of a plain kernel's bug is its cause, and nothing that fits by chance."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import CASE_TYPES
from attnfuzz.problems.recipes import Values
from attnfuzz.problems.supports import Supports
from tests.plain.pairs import PAIRS

FILES = {pair.wrong: pair.file for pair in PAIRS}
WITHOUT_LSE = Supports(empty_sequences=False, lse="none")
HEAD: dict[str, Any] = {"num_q_heads": 1, "num_kv_heads": 1}

LAST_PAGE_OF_LITTLE_WEIGHT = {
    "head_size": 72, "dtype": "bfloat16", "seq_lens": (8,), "scale": 1.0, "block_size": 5,
    "values": Values(keys="normal", values="integers", seed=57),
}  # fmt: skip
LAST_PAGE_IN_FLOAT32 = {
    "head_size": 256, "dtype": "float32", "seq_lens": (1, 1, 62), "scale": 0.5, "block_size": 32,
    "values": Values(keys="fine", values="large", seed=104),
}  # fmt: skip
LAST_OF_TWO_SPLITS = {
    "head_size": 40, "dtype": "bfloat16", "seq_lens": (15,), "scale": 0.15811388194561005, "block_size": 16,
    "values": Values(keys="fine", values="positions", logit_exponent=1, seed=34), "num_splits": 2,
}  # fmt: skip
DEAD_ROW = {
    "head_size": 40, "seq_lens": (9,), "scale": 1.0, "extra_rows": 1,
    "values": Values(keys="fine", values="integers", seed=27),
}  # fmt: skip
DEAD_ROW_OF_MUCH_THE_SAME = {"head_size": 16, "seq_lens": (1, 2), "scale": 0.25}
TWO_PAGES = {"head_size": 16, "seq_lens": (17,), "scale": 0.25, "block_size": 16}


@pytest.mark.parametrize(
    ("kernel", "supports", "fields", "oracle", "causes"),
    [
        (
            "eager_split_decode_drops_last_page",
            WITHOUT_LSE,
            LAST_PAGE_OF_LITTLE_WEIGHT,
            "accuracy",
            {"", "tokens_dropped"},
        ),
        ("eager_split_decode_drops_last_page", WITHOUT_LSE, LAST_PAGE_IN_FLOAT32, "accuracy", {"", "tokens_dropped"}),
        ("eager_partials_drop_the_rest", Supports(), LAST_OF_TWO_SPLITS, "accuracy", {"tokens_dropped"}),
        ("sdpa_decode_masks_one_less", WITHOUT_LSE, DEAD_ROW, "dead_memory", {"", "past_the_end"}),
        ("sdpa_decode_masks_one_less", WITHOUT_LSE, DEAD_ROW_OF_MUCH_THE_SAME, "dead_memory", {"past_the_end"}),
        ("triton_flash_decode_mixes_bases", WITHOUT_LSE, TWO_PAGES, "accuracy", {"", "partial_lse"}),
    ],
)
@pytest.mark.by_day("*-fields0-*", "*-fields5-*")
def test_a_cause_is_named_only_if_it_is_the_one(
    runner: Runner, kernel: str, supports: Supports, fields: dict[str, Any], oracle: str, causes: set[str]
) -> None:
    """One bug would be several findings, and engineers would look for a bug that is not there."""
    (declaration,) = runner.declarations([f"{FILES[kernel]}:{kernel}"])
    case = CASE_TYPES[declaration.problem](**HEAD, **fields)
    failure = runner.judge(
        msgspec.structs.replace(declaration, supports=supports), case, relations=(), inquire=True
    ).failure
    assert failure is not None
    assert failure.oracle == oracle
    assert failure.cause in causes, failure.message
