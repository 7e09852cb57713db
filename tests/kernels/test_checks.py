"""What wrappers refuse, and what they tell Triton of their arguments."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attnfuzz.kernels import eager
from attnfuzz.kernels.common.alignment import common_alignment, in_units
from attnfuzz.kernels.dense import launch
from attnfuzz.kernels.merge import launch as launch_merge
from attnfuzz.kernels.paged import launch as launch_paged

Make = Callable[..., Any]

PAGED_NAMES = ["q", "k_cache", "v_cache", "block_table", "seq_lens", "scale", "block_size", "layout"]
WRONG_PAGED: list[tuple[str, Callable[[Any], Any], str]] = [
    ("q", lambda q: q[0], r"q.shape=\[2, 8\] must be \[num_seqs, num_q_heads, head_size\]; reshape"),
    ("q", lambda q: q[:, :3], "num_q_heads=3 must be a multiple of num_kv_heads=2"),
    ("q", lambda q: q.float(), r"k_cache.dtype=torch.float16 must be torch.float32, that of q; convert"),
    ("q", lambda q: q.to("meta"), r"k_cache.device=(cpu|cuda:0) must be meta"),
    ("k_cache", lambda k: k[..., :7], r"k_cache.shape=.* with head_size=8 as q has it, not 7; pass the k_cache"),
    ("v_cache", lambda v: v[:, :3], r"v_cache.shape=.* with block_size=4 as k_cache has it, not 3; pass the v_cache"),
    ("block_table", lambda table: table[:1], "with num_seqs=2 as q has it, not 1"),
    ("block_table", lambda table: table.float(), "block_table.dtype=torch.float32 must be torch.int32 or torch.int64"),
    ("seq_lens", lambda lens: lens[:, None], r"seq_lens.shape=\[2, 1\] must be \[num_seqs\]"),
    ("block_size", lambda _: 16, "block_size=16 must be 4, that of k_cache"),
    ("layout", lambda _: "NHWC", "layout='NHWC' must be one of"),
    ("layout", lambda _: "packed", r"k_cache.shape=.* must be \[num_blocks, num_kv_heads, head_chunks"),
]
"""Argument, what is done to it, message."""


@pytest.mark.parametrize("kernels", [launch_paged, eager], ids=["triton", "eager"])
@pytest.mark.parametrize(("name", "spoil", "message"), WRONG_PAGED)
def test_wrong_paged_arguments(
    kernels: ModuleType, name: str, spoil: Callable[[Any], Any], message: str, paged_problem: Make
) -> None:
    """A mismatch would read out of bounds instead of being named."""
    args = dict(zip(PAGED_NAMES, paged_problem([1, 5], heads=(2, 2)).args, strict=True))
    if "multiple" in message:
        args["q"] = torch.zeros(2, 4, 8, dtype=torch.float16)
    args[name] = spoil(args[name])
    with pytest.raises(ValueError, match=message):
        kernels.paged_decode(**args)


def test_packed_cache_must_hold_the_whole_head(paged_problem: Make) -> None:
    """Half a head would be taken for a whole one."""
    args = dict(zip(PAGED_NAMES, paged_problem([5], layout="packed", head_size=16).args, strict=True))
    args["k_cache"] = args["k_cache"][:, :, :1]
    with pytest.raises(ValueError, match="must hold head_size=16 as head_chunks"):
        launch_paged.paged_decode(**args)


@pytest.mark.parametrize("tile", [0, -8, 3, 24, 8.0])
def test_tile_must_be_a_power_of_two(tile: Any, dense_problem: Make, paged_problem: Make) -> None:
    """Triton's own error would not say which argument to change."""
    paged = dict(zip(PAGED_NAMES, paged_problem([1]).args, strict=True))
    with pytest.raises(ValueError, match=r"tile=.* must be a power of two"):
        launch.dense_decode(*dense_problem([1]).args, tile=tile)
    with pytest.raises(ValueError, match=r"tile=.* must be a power of two"):
        launch_paged.paged_decode(**paged, tile=tile)
    with pytest.raises(ValueError, match=r"tile=.* must be a power of two"):
        launch_paged.split_decode(**paged, num_splits=2, tile=tile)


@pytest.mark.parametrize("num_warps", [0, 3, 64, -4, 4.0, None])
def test_num_warps_must_be_launchable(num_warps: Any, dense_problem: Make, paged_problem: Make) -> None:
    """Triton would fail an assertion in its compiler, and its interpreter would take anything."""
    paged = dict(zip(PAGED_NAMES, paged_problem([1]).args, strict=True))
    with pytest.raises(ValueError, match=r"num_warps=.* must be one of \(1, 2, 4, 8, 16, 32\).*; use 4"):
        launch.dense_decode(*dense_problem([1]).args, num_warps=num_warps)
    with pytest.raises(ValueError, match=r"num_warps=.* must be one of"):
        launch_paged.paged_decode(**paged, num_warps=num_warps)
    with pytest.raises(ValueError, match=r"num_warps=.* must be one of"):
        launch_paged.split_paged_decode(**paged, num_splits=2, num_warps=num_warps)


@pytest.mark.parametrize("num_stages", [0, -1, 2.0])
def test_num_stages_must_be_positive(num_stages: Any, dense_problem: Make, paged_problem: Make) -> None:
    """A launch that Triton refuses would not say which argument to change."""
    paged = dict(zip(PAGED_NAMES, paged_problem([1]).args, strict=True))
    with pytest.raises(ValueError, match=r"num_stages=.* must be an integer of at least 1"):
        launch.dense_decode(*dense_problem([1]).args, num_stages=num_stages)
    with pytest.raises(ValueError, match=r"num_stages=.* must be an integer of at least 1"):
        launch_paged.paged_decode(**paged, num_stages=num_stages)
    with pytest.raises(ValueError, match=r"num_stages=.* must be an integer of at least 1"):
        launch_paged.reduce_splits(torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2), num_stages=num_stages)


@pytest.mark.parametrize("kernels", [launch_paged, eager], ids=["triton", "eager"])
def test_wrong_split_arguments(kernels: ModuleType, paged_problem: Make) -> None:
    """Splits would be lost, or partials written outside their buffer."""
    args = paged_problem([5]).args
    with pytest.raises(ValueError, match=r"num_splits=0 must be an integer of at least 1"):
        kernels.split_decode(*args, 0)
    with pytest.raises(ValueError, match=r"num_splits=-1 must be an integer of at least 1"):
        kernels.split_paged_decode(*args, -1)
    with pytest.raises(
        ValueError, match=r"partial_lse.shape=\[1, 2, 3\] must be .* with num_splits=2 as partial_out has it, not 3"
    ):
        kernels.split_decode(*args, 3, partial_out=torch.zeros(1, 2, 2, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"num_splits=3 must be partial_out.shape"):
        kernels.split_decode(*args, 3, partial_out=torch.zeros(1, 2, 2, 8), partial_lse=torch.zeros(1, 2, 2))
    with pytest.raises(ValueError, match="partial_dtype='half' must be one of"):
        kernels.split_paged_decode(*args, 2, partial_dtype="half")


@pytest.mark.parametrize("kernels", [launch, eager], ids=["triton", "eager"])
def test_wrong_results(kernels: ModuleType, dense_problem: Make) -> None:
    """A result buffer of another shape or dtype would be written out of bounds or rounded silently."""
    args = dense_problem([1, 5]).args
    with pytest.raises(ValueError, match=r"out.shape=.* with num_seqs=2 as q has it, not 1"):
        kernels.dense_decode(*args, out=torch.zeros(1, 2, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"lse.dtype=torch.float16 must be torch.float32"):
        kernels.dense_decode(*args, lse=torch.zeros(2, 2, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"q.dtype=torch.float64 must be torch.float16 or"):
        kernels.dense_decode(*(a.double() for a in args[:3]), *args[3:])


@pytest.mark.parametrize("kernels", [launch_merge, eager], ids=["triton", "eager"])
def test_wrong_merge_arguments(kernels: ModuleType) -> None:
    """LSEs in the other layout would be read as if transposed."""
    out, lse = torch.zeros(3, 2, 8), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"prefix_lse.shape=\[3, 2\] must be \[num_q_heads, num_tokens\] with"):
        kernels.merge_states(out, lse, out, lse)
    with pytest.raises(ValueError, match="lse_layout='ht' must be one of"):
        kernels.merge_states(out, lse, out, lse, lse_layout="ht")


def test_a_call_that_has_passed_does_not_vouch_for_another(paged_problem: Make) -> None:
    """What is remembered of one call's tensors would be taken for the next one's, of another shape, dtype or layout."""
    args = dict(zip(PAGED_NAMES, paged_problem([1, 5], heads=(2, 2)).args, strict=True))
    for _ in range(2):
        launch_paged.paged_decode(**args)
    for name, spoil, message in WRONG_PAGED:
        if "multiple" not in message:
            with pytest.raises(ValueError, match=message):
                launch_paged.paged_decode(**{**args, name: spoil(args[name])})


def test_alignment_is_that_of_every_row() -> None:
    """Strides in units would lose their remainder, and rows be read from elsewhere."""
    tensors = [torch.zeros(3, 2, size) for size in (64, 24, 12)]
    assert common_alignment(*(t.half() for t in tensors[:2])) == 8
    assert common_alignment(*(t.half() for t in tensors)) == 4
    assert common_alignment(*tensors) == 4
    assert common_alignment(tensors[0], tensors[2][..., 1:], torch.zeros(3, 2, 7)) == 1
    assert in_units(tensors[1].stride(), 8) == (6, 3, 1)


KERNELS = Path(__file__).parents[2] / "kernels"
OF_A_BATCH = {"num_seqs", "num_tokens", "stride_table_s", "stride_len", "max_blocks_per_seq"}
"""The stride of a table's rows is their number of pages, and that of lengths may be anything."""


def launched() -> Iterator[tuple[str, set[str], set[str]]]:
    """Each kernel that a host launches: its name, its parameters, and those that Triton leaves alone."""
    for path in KERNELS.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and function.name.endswith("_kernel"):
                names = {argument.arg for argument in function.args.args}
                decorators = [one for one in function.decorator_list if isinstance(one, ast.Call)]
                spared = [keyword.value for one in decorators for keyword in one.keywords]
                yield function.name, names, {name for one in spared for name in ast.literal_eval(one)}


def test_kernels_are_not_compiled_again_for_another_batch() -> None:
    """Triton compiles for seconds where a number is 1 or 16 divides it: a server would stall at its next batch."""
    found = {name: (names & OF_A_BATCH) - spared for name, names, spared in launched()}
    assert len(found) > 12
    assert {name: missing for name, missing in found.items() if missing} == {}
