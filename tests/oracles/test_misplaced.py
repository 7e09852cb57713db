"""Of problems that attnfuzz does not know it is told what a kernel reads or writes in wrong places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.explaining.explain import explain_case
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.explaining.own_problems import read_elsewhere
from attnfuzz.explaining.reruns import Reruns
from attnfuzz.judging.judge import judge

KERNELS = Path(__file__).with_name("misplacing_kernels.py")
FAMILIES = Path(__file__).parents[1] / "families"


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


def test_a_whole_row_is_told_beside_a_field_that_is_as_large() -> None:
    """A reader would look for the number of tokens, where it is the row before that is read."""
    words = told("scatter_previous", num_tokens=8, spare=3, seed=1)
    assert [of for of, _ in words] == ["read_elsewhere"]
    assert words[0][1].endswith("8 elements before their places, as many as num_tokens says or 1 row has")


@pytest.mark.parametrize("name", ["scatter", "dequantise"])
def test_nothing_is_said_of_a_right_kernel(name: str) -> None:
    """A reader of a failure that has another reason would look at an address that is right."""
    assert not explained(name).causes


PACKED = {
    "lengths": (3,), "num_kv_heads": 1, "gqa_ratio": 1, "head_size": 32, "block_size": 4, "layout": "NHD",
    "page_order": "identity", "shared_pages": 0, "spare_pages": 0, "extra_columns": 0, "unused_entries": "zero",
    "cache_strides": "contiguous", "v_cache_strides": "", "kernel_blocks": 0, "dtype": "float16", "seed": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("bug", "cache_format", "words"),
    [
        ("high_first", "int4", "the two halves of each byte of k_cache and v_cache are exchanged"),
        ("zeros_of_k", "int4", "k_zeros is read in place of v_zeros"),
        ("first_block", "nvfp4", "k_scales and v_scales: the first block's is taken for each block"),
    ],
)
def test_what_is_taken_for_another_is_told(bug: str, cache_format: str, words: str) -> None:
    """Of a cache of 4 bits a wrong number would say nothing about halves of bytes, blocks and zero points."""
    (kernel,) = load_kernels(f"{FAMILIES / 'packed_decode_kernels.py'}:{bug}")
    problem: Any = kernel.declaration.problem
    case = problem.case_type(**PACKED, cache_format=cache_format)
    causes = explain_case(kernel, case, device="cpu", seconds=600.0).causes or ()
    assert [(one.mistake, one.words) for one in causes] == [("taken_for_another", words)]


@pytest.mark.parametrize(("bug", "cache_format"), [("symmetric", "int4"), ("right", "mxfp4")])
def test_another_mistake_is_not_called_one_of_formats(bug: str, cache_format: str) -> None:
    """A cause that no replay of the reference has shown would send a reader to the wrong line."""
    (kernel,) = load_kernels(f"{FAMILIES / 'packed_decode_kernels.py'}:{bug}")
    problem: Any = kernel.declaration.problem
    case = problem.case_type(**PACKED, cache_format=cache_format)
    causes = explain_case(kernel, case, device="cpu", seconds=600.0).causes or ()
    assert "taken_for_another" not in [one.mistake for one in causes]


LISTS: dict[str, Any] = {"named": (3, 4, 2), "topk": 64, "num_heads": 1, "head_size": 32, "v_head_size": 32}


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("neighbour", "indices: that of the token before is taken for each"),
        ("first_length", "topk_length: that of the first token is taken for each"),
        ("right", ""),
        ("whole_tiles", ""),
    ],
)
@pytest.mark.by_day("neighbour*", "first_length*", "right*")
def test_another_rows_list_or_length_is_told(bug: str, words: str) -> None:
    """A reader of wrong numbers would look for what is wrong with a row, not for whose list it has."""
    (kernel,) = load_kernels(f"{FAMILIES / 'sparse_decode_kernels.py'}:{bug}")
    problem: Any = kernel.declaration.problem
    case = problem.case_type(**LISTS, has_lengths=True, scattered=bug == "first_length")
    causes = explain_case(kernel, case, device="cpu", seconds=600.0).causes or ()
    assert [one.words for one in causes if one.mistake == "taken_for_another"] == ([words] if words else [])


def test_one_scale_for_all_of_a_latent_vector_is_told() -> None:
    """Wrong numbers from the 129th on would not say that they have another's scale."""
    (kernel,) = load_kernels(f"{FAMILIES / 'latent_verify_kernels.py'}:one_scale")
    problem: Any = kernel.declaration.problem
    case = problem.case_type(contexts=(3,), query_len=1, rank=256, rope_size=16, latents="fp8", num_heads=1)
    causes = explain_case(kernel, case, device="cpu", seconds=600.0).causes or ()
    assert [one.words for one in causes] == ["latent_scales: the first block's is taken for each block"]


def test_a_query_that_does_not_matter_beside_a_single_key_is_no_cause() -> None:
    """Of a kernel that sees one key of three, whose weight is 1, a reader would look for where it reads its query."""
    reruns = Reruns(kernel_of("attend_without_the_last_two"), _attending(3), device="cpu", is_over=lambda: False)
    assert [(one.mistake, one.way) for one in read_elsewhere(reruns)] == [("not_read", "k")]


def test_a_place_that_gives_the_results_by_chance_is_not_told() -> None:
    """Of keys that are left out, whose weights are small, a reader would look for an address that is wrong."""
    words = "32 of 48 elements of k (key 1-2, dim 0-15) do not matter, although they must"
    assert told("attend_without_the_last_two", keys=3) == [("not_read", words)]


def test_a_query_that_never_matters_is_told() -> None:
    """Nothing else says of a mean that it is one."""
    words = "16 of 16 elements of q (dim 0-15) do not matter, although they must"
    assert told("average", keys=3) == [("not_read", words)]


def _attending(keys: int) -> Any:
    problem: Any = kernel_of("average").declaration.problem
    return problem.case_type(keys=keys)
