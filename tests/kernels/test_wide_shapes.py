"""Shapes beyond the usual, heads of V among them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attnfuzz.cases.supported import adapt_options, why_unsupported
from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.judging.runner import Runner
from attnfuzz.kernels import eager, eager_attention
from attnfuzz.kernels.dense import launch
from attnfuzz.kernels.grouped import launch as launch_grouped
from attnfuzz.kernels.paged import launch as launch_paged
from attnfuzz.kernels.paged import launch_attention, launch_partitioned
from attnfuzz.kernels.q_block import launch as launch_q_block
from attnfuzz.problems.cases import Case, case_from_builtins

_SHAPE: dict[str, Any] = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "seq_lens": [37], "scale": 0.25}
_WIDE: dict[str, dict[str, Any]] = {
    **{f"{ratio} heads on one": {"num_q_heads": ratio} for ratio in (32, 64, 71, 128)},
    **{f"heads of {size}": {"head_size": size, "scale": 0.03125} for size in (512, 576, 1024)},
    **{f"pages of {size}": {"block_size": size, "seq_lens": [size + 9]} for size in (272, 528)},
}
_DAY = ("heads of 576",)
KERNELS = [kernel for kernel in load_kernels("*") if kernel.declaration.problem != "merge_states"]


def _case(kernel: Kernel, wide: str) -> Case | None:
    """None where the kernel does not take it."""
    declared = kernel.declaration
    fields: dict[str, Any] = {**_SHAPE, "block_size": 16, **_WIDE[wide]}
    if declared.problem == "dense_decode":
        del fields["block_size"]
    if declared.problem == "split_decode":
        fields["num_splits"] = 3
    if declared.problem in ("paged_attention", "masked_attention"):
        fields["query_lens"] = [3]
    if declared.problem == "latent_decode":
        head_size = fields["head_size"]
        fields["v_head_size"] = head_size - 64 if head_size > 64 else head_size // 2
    if len(declared.supports.layouts) == 1:
        fields["layout"] = declared.supports.layouts[0]
    case = adapt_options(case_from_builtins(declared.problem, fields), declared.options)
    return case if why_unsupported(declared.supports, declared.options, case) is None else None


_CLAIMED = [
    pytest.param(kernel, case, id=f"{kernel.declaration.name}, {wide}", marks=() if wide in _DAY else pytest.mark.night)
    for kernel in KERNELS
    for wide in _WIDE
    if (case := _case(kernel, wide)) is not None
]


@pytest.fixture(scope="module", name="runner")
def _runner() -> Iterator[Runner]:
    with Runner(device="cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda") as runner:
        yield runner


@pytest.mark.parametrize(("kernel", "case"), _CLAIMED)
def test_claimed_shapes(kernel: Kernel, case: Case, runner: Runner) -> None:
    """A kernel that says it takes any shape would be wrong on one that no search draws."""
    failure = runner.judge(kernel.declaration, case).failure
    assert failure is None, failure.message


def test_nearly_all_is_claimed() -> None:
    """Kernels that declare less than they take would be left out here unnoticed."""
    refused = {(kernel.declaration.name, wide) for kernel in KERNELS for wide in _WIDE if _case(kernel, wide) is None}
    of_models = ("71 heads on one", "heads of 512", "heads of 1024")  # no latent cache has these
    latent = ("latent_eager", "latent_grouped", "latent_grouped_auto")
    assert refused == {(name, wide) for name in latent for wide in of_models}


LENGTHS = [0, 1, 9, 33]
SIZES = [(16, 8), (8, 16), (24, 40), (40, 24), (16, 13)]
"""Of K and of V: powers of two, others that fill one block of a power of two or different ones, and an odd one."""
SPLIT = {"num_splits": 3}

Make = Callable[..., Any]


@pytest.mark.by_day
@pytest.mark.parametrize(("head_size", "v_head_size"), SIZES)
@pytest.mark.parametrize("kernel", [launch.dense_decode, eager.dense_decode], ids=["triton", "eager"])
def test_dense(kernel: Make, head_size: int, v_head_size: int, dense_problem: Make, check: Make) -> None:
    """V would be read, or the output written, in steps of K's heads, or in as many columns."""
    problem = dense_problem(LENGTHS, heads=(4, 2), head_size=head_size, v_head_size=v_head_size)
    for each in (problem, problem.spread()):
        out, lse = kernel(*each.args)
        assert out.shape == (len(LENGTHS), 4, v_head_size)
        check((out, lse), each.expected)


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
@pytest.mark.parametrize(("head_size", "v_head_size"), SIZES)
@pytest.mark.parametrize(
    ("kernel", "more"),
    [
        (launch_paged.paged_decode, {"tile": 16}),
        (launch_paged.split_paged_decode, {**SPLIT, "tile": 16}),
        (eager.paged_decode, {}),
        (eager.split_paged_decode, SPLIT),
    ],
    ids=["triton", "triton split", "eager", "eager split"],
)
@pytest.mark.by_day("*-16-8-NHD", "*-24-40-packed")
def test_paged(
    kernel: Make,
    more: dict[str, Any],
    head_size: int,
    v_head_size: int,
    layout: str,
    paged_problem: Make,
    check: Make,
) -> None:
    """V would be read, or partial and final outputs written, in steps of K's heads, or in as many columns."""
    problem = paged_problem(LENGTHS, heads=(4, 2), head_size=head_size, v_head_size=v_head_size, layout=layout)
    for each in (problem, problem.spread()):
        out, lse = kernel(*each.args, **more)
        assert out.shape == (len(LENGTHS), 4, v_head_size)
        check((out, lse), each.expected)


@pytest.mark.parametrize(("head_size", "v_head_size"), SIZES)
@pytest.mark.parametrize(
    ("kernel", "more"),
    [
        (launch_partitioned.paged_attention_v1, {}),
        (launch_partitioned.paged_attention_v2, {"partition_size": 5}),
        (launch_partitioned.paged_attention_v2, {"partition_size": 16, "partial_dtype": "input"}),
    ],
    ids=["v1", "v2", "v2 short partials"],
)
@pytest.mark.by_day("*-24-40")
def test_partitioned(
    kernel: Make,
    more: dict[str, Any],
    head_size: int,
    v_head_size: int,
    paged_problem: Make,
    check: Make,
) -> None:
    """Logits or partitions would take their sizes from the wrong one of K and V."""
    lens = LENGTHS[:-1] if "partial_dtype" in more else LENGTHS
    problem = paged_problem(
        lens, heads=(4, 2), head_size=head_size, v_head_size=v_head_size, layout="packed", dtype=torch.float16
    )
    for each in (problem, problem.spread()):
        check(kernel(*each.args[:-1], **more), each.expected)


@pytest.mark.by_day
@pytest.mark.parametrize(("head_size", "v_head_size"), SIZES)
@pytest.mark.parametrize(
    ("kernel", "more"),
    [
        (launch_attention.paged_attention, {}),
        (eager_attention.paged_attention, {}),
        (launch_q_block.q_block_attention, {"num_segments": 1}),
        (launch_q_block.q_block_attention, {"num_segments": 3, "tile": 16, "static_grid": True}),
    ],
    ids=["triton", "eager", "q_block", "q_block segments"],
)
def test_a_query_token_each(
    kernel: Make, more: dict[str, Any], head_size: int, v_head_size: int, paged_problem: Make, check: Make
) -> None:
    """What works in decode would not where rows are query tokens."""
    sizes = {"head_size": head_size, "v_head_size": v_head_size}
    problem = paged_problem(LENGTHS[1:], heads=(4, 2), dtype=torch.float32, **sizes)  # in which weights are not rounded
    q, k_cache, v_cache, table, seq_lens, *rest = problem.args
    starts = torch.arange(len(LENGTHS), dtype=torch.int32)
    state = kernel(q, k_cache, v_cache, table, seq_lens, starts, *rest, max_query_len=1, max_seq_len=33, **more)
    check(state, problem.expected)


def test_partials_have_the_size_of_v(paged_problem: Make) -> None:
    """The second stage would merge columns of neighbouring heads."""
    problem = paged_problem(LENGTHS, head_size=16, v_head_size=40)
    for module in (launch_paged, eager):
        partial_out, _ = module.split_decode(*problem.args, 3)
        assert partial_out.shape == (len(LENGTHS), 2, 3, 40)


def test_multi_head_latent_attention(paged_problem: Make, check: Make) -> None:
    """The sizes that DeepSeek's models have, one head of K and V for all query heads, would not run."""
    problem = paged_problem([1, 21], heads=(4, 1), head_size=576, v_head_size=512, dtype=torch.bfloat16)
    check(launch_paged.paged_decode(*problem.args, tile=16), problem.expected)


@pytest.mark.parametrize(("head_size", "v_head_size"), SIZES)
@pytest.mark.parametrize("more", [{}, {"num_splits": 3, "tile": 16}, {"num_splits": 3, "tile": 16, "counters": True}])
@pytest.mark.by_day("*-24-40")
def test_grouped(more: dict[str, Any], head_size: int, v_head_size: int, paged_problem: Make) -> None:
    """Partial states would lie as far apart as heads of K, or one mask serve both."""
    problem = paged_problem([1, 9, 33, 70], heads=(4, 2), head_size=head_size, v_head_size=v_head_size)
    if more.get("counters"):
        more = more | {"counters": torch.zeros(4, 4, dtype=torch.int32, device=problem.q.device)}
    for each in (problem, problem.spread()):
        out, lse = launch_grouped.grouped_decode(*each.args, **more)
        expected, expected_lse = each.expected
        torch.testing.assert_close(out.double(), expected, rtol=4e-3, atol=4e-3)  # weights are rounded to float16
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_an_interleaved_cache_has_one_size(paged_problem: Make) -> None:
    """K and V that lie in one tensor would be taken apart in the wrong place."""
    problem = paged_problem(LENGTHS, head_size=16, v_head_size=8)
    with pytest.raises(ValueError, match=r"v_cache.shape=.* with head_size=16 as q has it, not 8"):
        launch_paged.paged_decode(*(*problem.args[:-1], "interleaved"))
