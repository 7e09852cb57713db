"""Heads of V of another size shrink: to K's where the failure does not need them, else to the smallest such pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attnfuzz.minimise import minimise
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.supports import Supports


def shrunk(still_fails: Callable[[Any], bool], sizes: tuple[int, int], **supports: Any) -> tuple[int, int]:
    """Sizes of K and V."""
    case = PagedDecodeCase(
        num_q_heads=1,
        num_kv_heads=1,
        head_size=sizes[0],
        v_head_size=sizes[1],
        seq_lens=(3,),
        scale=default_scale(sizes[0]),
        block_size=16,
    )
    assert still_fails(case)
    found = minimise(case, still_fails, supports=Supports(**{"v_head_sizes": "any"} | supports), options={})
    assert isinstance(found, PagedDecodeCase)
    assert found.scale == default_scale(found.head_size)
    return found.head_size, found.value_size


@pytest.mark.parametrize(
    ("still_fails", "sizes", "expected"),
    [
        (lambda case: case.seq_lens, (128, 40), (16, 16)),
        (lambda case: case.value_size > 16, (40, 192), (40, 40)),
        (lambda case: case.value_size > 16, (16, 80), (40, 40)),
        (lambda case: case.v_head_size is not None, (40, 192), (16, 13)),
        (lambda case: case.v_head_size is not None, (13, 16), (16, 13)),
        (lambda case: case.value_size < case.head_size, (40, 16), (16, 13)),
        (lambda case: case.value_size > case.head_size, (40, 192), (16, 40)),
        (lambda case: case.value_size > 2 * case.head_size, (40, 192), (16, 40)),
        (lambda case: case.head_size >= 96 and case.value_size < 64, (128, 40), (96, 16)),
    ],
)
def test_to_what_the_failure_needs(
    still_fails: Callable[[Any], bool], sizes: tuple[int, int], expected: tuple[int, int]
) -> None:
    """A report would name two sizes for a bug of one, or sizes that mean nothing."""
    assert shrunk(still_fails, sizes) == expected


def test_a_kernel_for_one_pair_keeps_it() -> None:
    """The smallest case would be none that the kernel takes."""
    assert shrunk(lambda case: True, (192, 128), head_sizes=(192,), v_head_sizes=(128,)) == (192, 128)
