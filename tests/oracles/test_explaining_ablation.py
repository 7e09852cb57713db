"""attnfuzz.explaining: changes of a case, and which of them make it pass."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec

from attnfuzz.cases.supported import supports_case
from attnfuzz.explaining.ablation import ablate, changes_of
from attnfuzz.problems.cases import Case, MergeStatesCase, PagedDecodeCase, encode_case
from attnfuzz.problems.recipes import Pages
from attnfuzz.problems.supports import Supports

OPTIONS = {"tile": (16, 32)}
CASE = PagedDecodeCase(
    num_q_heads=4,
    num_kv_heads=2,
    head_size=16,
    seq_lens=(7, 4),
    scale=0.25,
    block_size=3,
    dtype="bfloat16",
    strides={"q": "every_other"},
    pages=Pages(order="reversed", spare_blocks=2),
    options={"tile": 32},
)


def changes(case: Case = CASE, **supports: Any) -> dict[str, Case]:
    return dict(changes_of(case, supports=Supports(**{"strides": "any"} | supports), options=OPTIONS))


def test_every_change_is_in_one_respect_and_supported() -> None:
    """What makes a case pass could not be told, or a kernel would be blamed for what it never promised."""
    found = changes()
    assert {
        "block_size 4 instead of 3",
        f"seq_len {CASE.seq_lens[0] - 1} instead of {CASE.seq_lens[0]} in sequence 0",
        "sequence 1 left out",
        "float32 instead of bfloat16",
        "q contiguous instead of every_other",
        "page order identity instead of reversed",
        "tile=16 instead of 32",
        "1 query head on each KV head instead of 2",
    } <= set(found)
    assert all(supports_case(Supports(strides="any"), OPTIONS, case) for case in found.values())
    assert len({encode_case(case) for case in (CASE, *found.values())}) == len(found) + 1


def test_what_a_kernel_does_not_support_is_not_tried() -> None:
    """The kernel would raise, and the change would be said to fail."""
    found = changes(dtypes=("bfloat16",), block_sizes=(3,))
    assert not [words for words in found if "float" in words or "block_size" in words]


def test_heads_of_v_can_be_as_large_as_those_of_k() -> None:
    """That a bug needs two sizes is the first thing to know of it."""
    case = msgspec.structs.replace(CASE, v_head_size=40)
    words = f"v_head_size {case.head_size} instead of 40"
    assert changes(case, v_head_sizes="any")[words].value_size == case.head_size


def test_states_can_be_made_finite() -> None:
    """Of a merge, the one change that tells most would be missing."""
    case = MergeStatesCase(num_q_heads=2, num_tokens=2, head_size=8, lse_pairs=(("-inf", "finite"),))
    found = dict(changes_of(case, supports=Supports(strides="any"), options={}))
    assert {"finite LSEs only", "1 token instead of 2", "1 query head instead of 2"} <= set(found)


def ablated(fails: Any, until: float = math.inf) -> tuple[str, ...]:
    return ablate(CASE, fails, supports=Supports(strides="any"), options=OPTIONS, until=until)


def test_what_passes_is_told_from_what_fails() -> None:
    """A maintainer would be sent after the wrong condition."""
    (passes,) = ablated(lambda case: case.block_size == 3)
    assert passes == "passes if changed to: block_size 2 instead of 3; block_size 4 instead of 3"


def test_what_tells_nothing_is_not_told() -> None:
    """Most changes leave a bug as it is, and the few lines of a finding would be about them."""
    assert ablated(lambda case: True) == ()


def test_lines_stay_short() -> None:
    """A finding's details would be flooded."""
    (line,) = ablated(lambda case: False)
    assert line.count(";") == 4


def test_time_is_kept() -> None:
    """A campaign would wait for a kernel that takes seconds a case."""
    assert ablated(lambda case: True, until=time.monotonic()) == ()
