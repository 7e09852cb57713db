"""Of problems that attnfuzz does not know it is told what a kernel reads or writes in wrong places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.explaining.explain import explain_case
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.judging.judge import judge

KERNELS = Path(__file__).with_name("misplacing_kernels.py")


def kernel_of(name: str) -> Kernel:
    (kernel,) = load_kernels(f"{KERNELS}:{name}")
    return kernel


def explained(name: str, **fields: Any) -> Explanation:
    kernel = kernel_of(name)
    problem: Any = kernel.declaration.problem
    return explain_case(kernel, problem.case_type(**fields), device="cpu", seconds=600.0)


def told(name: str, **fields: Any) -> list[tuple[str, str]]:
    return [(one.mistake, one.words) for one in explained(name, **fields).causes or ()]


def test_rows_that_lie_elsewhere_are_told_with_their_distance() -> None:
    """A reader would be told that a row is missing, and look for what skips it."""
    ((mistake, words),) = told("scatter_displaced", num_tokens=5, spare=8, seed=3)
    assert mistake == "written_elsewhere"
    assert words.startswith("what belongs at cache[slot ")
    assert "elements behind its place" in words


def test_where_rows_leave_the_tensor_a_larger_case_tells() -> None:
    """The smallest case is the one in which what is displaced is lost."""
    kernel = kernel_of("scatter_displaced")
    problem: Any = kernel.declaration.problem
    lost = next(
        case
        for case in (problem.case_type(num_tokens=2, seed=seed) for seed in range(20))
        if (failure := judge(kernel, case, device="cpu").failure) is not None and failure.oracle == "unwritten"
    )
    causes = explain_case(kernel, lost, device="cpu", seconds=600.0).causes or ()
    assert [one.mistake for one in causes] == ["written_elsewhere"]
    assert causes[0].words.startswith("in a similar case (")
    assert "elements behind its place" in causes[0].words


@pytest.mark.parametrize("padding", [12, 20])
def test_bytes_that_are_read_elsewhere_are_told_with_their_distance(padding: int) -> None:
    """A wrong number would say nothing about which of the bytes that it is made of were not those."""
    words = [words for mistake, words in told("dequantise_as_if_packed", num_pages=1, padding=padding, seed=0)]
    assert len(words) == 1
    assert f"are read {padding} elements before their places, as many as padding says" in words[0]
    assert "of pages (" in words[0]


@pytest.mark.parametrize("name", ["scatter", "dequantise"])
def test_nothing_is_said_of_a_right_kernel(name: str) -> None:
    """A reader of a failure that has another reason would look at an address that is right."""
    assert not explained(name).causes
