"""Merges of two states, of many, and of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnfuzz.inputs.reference import merge_all
from attnfuzz.kernels import eager
from attnfuzz.kernels.merge import launch as launch_merge
from attnfuzz.kernels.merge.launch import merge_many, merge_states_in_place, merge_states_wide
from attnfuzz.kernels.merge.merge_blocks import Block, block_of, takes_place_of

Make = Callable[..., Any]
INF = math.inf
LSES = [0.0, 3.0, -40.0, -INF, INF]
"""Every pair of these is one token."""

KERNELS = {"triton": launch_merge.merge_states, "wide": merge_states_wide, "eager": eager.merge_states}

each = pytest.mark.parametrize("merge_states", KERNELS.values(), ids=KERNELS)
layouts = pytest.mark.parametrize("lse_layout", ["HT", "TH"])


def states(
    lse_layout: str, head_size: int = 8, dtype: torch.dtype = torch.float16, num_heads: int = 2
) -> tuple[Tensor, ...]:
    """``prefix_output, prefix_lse, suffix_output, suffix_lse`` of 25 tokens; NaN where a side is empty."""
    pairs = torch.cartesian_prod(torch.tensor(LSES), torch.tensor(LSES))
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    sides: list[Tensor] = []
    for side in (0, 1):
        lse = pairs[:, side, None] + torch.arange(num_heads) / 2
        out = torch.randn(*lse.shape, head_size, generator=generator).to(dtype)
        out[lse.isinf()] = math.nan
        sides += [out, lse.t().contiguous() if lse_layout == "HT" else lse]
    return tuple(sides)


def expected(inputs: tuple[Tensor, ...], lse_layout: str, merge: Make) -> Any:
    prefix, prefix_lse, suffix, suffix_lse = inputs
    if lse_layout == "HT":
        prefix_lse, suffix_lse = prefix_lse.t(), suffix_lse.t()
    return merge([(prefix, prefix_lse), (suffix, suffix_lse)])


@each
@layouts
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_pair_of_lses(merge_states: Make, lse_layout: str, dtype: torch.dtype, merge: Make, check: Make) -> None:
    """Sides that are empty (-inf or +inf), equal or far apart would give NaN, leak a NaN, or be weighed wrongly."""
    inputs = states(lse_layout, dtype=dtype)
    output, lse = merge_states(*inputs, lse_layout=lse_layout)
    assert lse.shape == inputs[1].shape
    check((output, lse.t() if lse_layout == "HT" else lse), expected(inputs, lse_layout, merge))


@each
def test_an_empty_side_changes_nothing(merge_states: Make) -> None:
    """Merging with nothing would round the other side."""
    prefix, prefix_lse, suffix, _ = states("TH")
    live = prefix_lse.isfinite()
    output, lse = merge_states(prefix, prefix_lse, suffix, torch.full_like(prefix_lse, -INF), lse_layout="TH")
    assert torch.equal(output[live], prefix[live])
    assert torch.equal(lse[live], prefix_lse[live])


@each
def test_two_empty_sides_are_empty(merge_states: Make) -> None:
    """A token that attends to nothing would come out as NaN and poison the layers above."""
    nothing = torch.full((3, 2, 8), math.nan, dtype=torch.float16)
    output, lse = merge_states(nothing, torch.full((2, 3), -INF), nothing, torch.full((2, 3), INF))
    assert torch.equal(output, torch.zeros_like(output))
    assert torch.equal(lse, torch.full((2, 3), -INF))


@each
def test_result_may_replace_an_input(merge_states: Make, merge: Make, check: Make) -> None:
    """Merging in place, as engines do to save memory, would read what it has already overwritten."""
    inputs = states("HT")
    answer = expected(tuple(t.clone() for t in inputs), "HT", merge)
    output, lse = merge_states(*inputs, output=inputs[0], output_lse=inputs[3])
    check((output, lse.t()), answer)


class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """The shapes of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty.memory_format:
            self.shapes.append(tuple(args[0]))
        return func(*args, **(kwargs or {}))


@layouts
@pytest.mark.parametrize("kernel", ["merge_states", "merge_states_wide", "merge_many"])
def test_an_lse_that_nobody_wants_is_not_written(kernel: str, lse_layout: str) -> None:
    """Servers that merge a last time would pay for a number for each head that they never read."""
    prefix, prefix_lse, suffix, suffix_lse = states(lse_layout)
    inputs: tuple[Tensor, ...] = (prefix, prefix_lse, suffix, suffix_lse)
    if kernel == "merge_many":
        inputs = torch.stack((prefix, suffix)), torch.stack((prefix_lse, suffix_lse))
    merge: Any = getattr(launch_merge, kernel)
    with Allocated() as with_lse:
        expected, expected_lse = merge(*inputs, lse_layout=lse_layout)
    with Allocated() as without:
        output, lse = merge(*inputs, lse_layout=lse_layout, output_lse=None)
    assert lse is None
    assert torch.equal(output, expected)
    assert tuple(expected_lse.shape) in with_lse.shapes
    assert tuple(expected_lse.shape) not in without.shapes


@pytest.mark.parametrize("merge_states", [launch_merge.merge_states, merge_states_wide], ids=["triton", "wide"])
def test_an_output_may_replace_one_side_and_its_lse_stay(merge_states: Make) -> None:
    """The LSE of a side would be lost though only the output was to be replaced."""
    inputs = states("HT")
    expected, _ = merge_states(*inputs)
    kept = inputs[1].clone()
    merge_states(*inputs, output=inputs[0], output_lse=None)
    assert torch.equal(inputs[0], expected)
    assert torch.equal(inputs[1], kept)


def test_a_word_is_no_lse() -> None:
    """It would be taken for a tensor, and fail where nobody understands it."""
    with pytest.raises(ValueError, match=r"output_lse='none' must be a tensor, None for no LSE"):
        merge_states_wide(*states("HT"), output_lse="none")  # type: ignore[call-overload]


@pytest.mark.by_day
@layouts
@pytest.mark.parametrize(("block_elements", "block_tokens"), [(8, 1), (32, 4), (128, 2), (1024, 8)])
def test_blocks_cover_every_row_once(
    lse_layout: str, block_elements: int, block_tokens: int, merge: Make, check: Make
) -> None:
    """Rows at the end of a block, of the tokens or of the heads would be left out, or taken from another row."""
    inputs = states(lse_layout, num_heads=5)
    options: dict[str, Any] = {"block_elements": block_elements, "block_tokens": block_tokens}
    output, lse = merge_states_wide(*inputs, lse_layout=lse_layout, **options)
    check((output, lse.t() if lse_layout == "HT" else lse), expected(inputs, lse_layout, merge))


@layouts
def test_merging_in_place_returns_the_prefix(lse_layout: str, merge: Make, check: Make) -> None:
    """The state of a long prefix would be copied, or the suffix changed."""
    prefix, prefix_lse, suffix, suffix_lse = states(lse_layout)
    answer = expected((prefix.clone(), prefix_lse.clone(), suffix, suffix_lse), lse_layout, merge)
    kept = suffix.clone(), suffix_lse.clone()
    output, lse = merge_states_in_place(prefix, prefix_lse, suffix, suffix_lse, lse_layout=lse_layout)
    assert output is prefix
    assert lse is prefix_lse
    check((output, lse.t() if lse_layout == "HT" else lse), answer)
    assert torch.equal(suffix.nan_to_num(), kept[0].nan_to_num())
    assert torch.equal(suffix_lse, kept[1])


@pytest.mark.parametrize("merge_states", [launch_merge.merge_states, merge_states_wide], ids=["triton", "wide"])
def test_an_input_is_replaced_element_for_element_or_not_at_all(merge_states: Make) -> None:
    """A result in another order than the input whose memory it takes would overwrite what is yet to be read."""
    out, lse = torch.zeros(2, 2, 8), torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"output.stride\(\)=\(8, 16, 1\) must be \(16, 8, 1\), as prefix_output has"):
        merge_states(out, lse, out.clone(), lse.clone(), output=out.transpose(0, 1))
    with pytest.raises(ValueError, match=r"output_lse.stride\(\)=\(1, 2\) must be \(2, 1\), as suffix_lse has them"):
        merge_states(out, lse.clone(), out.clone(), lse, output_lse=lse.t())


@pytest.mark.parametrize("wrong", [{"block_elements": 48}, {"block_tokens": 0}])
def test_wrong_blocks_are_refused(wrong: dict[str, Any]) -> None:
    """Triton's own error would not say which argument to change."""
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* must be"):
        merge_states_wide(*states("TH"), lse_layout="TH", **wrong)


def many_states(
    num_states: int, lse_layout: str, dtype: torch.dtype = torch.float16, head_size: int = 8
) -> tuple[Tensor, Tensor]:
    """Of 7 tokens and 3 heads, half of them empty, with NaN for an output; the first token has no keys at all."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(7)
    lses = 20 * torch.randn(num_states, 7, 3, generator=generator)
    lses[torch.rand(lses.shape, generator=generator) < 0.25] = math.inf
    lses[torch.rand(lses.shape, generator=generator) < 0.25] = -math.inf
    lses[:, 0] = -math.inf
    outputs = torch.randn(*lses.shape, head_size, generator=generator).to(dtype)
    outputs[lses.isinf()] = math.nan
    return outputs, lses.mT.contiguous() if lse_layout == "HT" else lses


def check_merged(got: tuple[Tensor, Tensor], inputs: tuple[Tensor, Tensor], lse_layout: str, check: Make) -> None:
    """Against the harness' float64 reference for any number of states."""
    (output, lse), (outputs, lses) = got, inputs
    if lse_layout == "HT":
        lse, lses = lse.mT, lses.mT
    states = lses.double().masked_fill(lses == math.inf, -math.inf).movedim(0, -1)
    check((output, lse), merge_all(outputs.double().nan_to_num().movedim(0, -2), states))


@layouts
@pytest.mark.parametrize("num_states", [1, 2, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_number_of_states(num_states: int, lse_layout: str, dtype: torch.dtype, check: Make) -> None:
    """A state would be left out, counted twice or weighed wrongly, or an empty one's NaN would leak."""
    inputs = many_states(num_states, lse_layout, dtype)
    check_merged(merge_many(*inputs, lse_layout=lse_layout), inputs, lse_layout, check)


@pytest.mark.parametrize(("block_elements", "block_tokens"), [(8, 1), (32, 4), (64, 2), (1024, 8)])
def test_blocks_of_many_cover_every_row_once(block_elements: int, block_tokens: int, check: Make) -> None:
    """Rows at the end of a block, of the tokens or of the heads would be left out, or taken from another row."""
    inputs = many_states(3, "TH")
    options: dict[str, Any] = {"block_elements": block_elements, "block_tokens": block_tokens}
    check_merged(merge_many(*inputs, lse_layout="TH", **options), inputs, "TH", check)


def test_no_states_at_all_are_empty() -> None:
    """An engine with nothing to merge for a batch would get whatever was in the buffer."""
    output, lse = merge_many(torch.zeros(0, 2, 3, 8), torch.zeros(0, 3, 2))
    assert torch.equal(output, torch.zeros(2, 3, 8))
    assert torch.equal(lse, torch.full((3, 2), -math.inf))


def test_lses_in_the_other_layout_are_refused() -> None:
    """They would be read as if transposed."""
    with pytest.raises(
        ValueError, match=r"lses.shape=\[4, 2, 3\] must be \[num_states, num_q_heads, num_tokens\] with"
    ):
        merge_many(torch.zeros(4, 2, 3, 8), torch.zeros(4, 2, 3))


@pytest.mark.parametrize(
    ("num_heads", "head_size", "elements", "tokens", "expected"),
    [
        (32, 128, 4096, 8, Block(8, 4, 128)),
        (32, 128, 4096, 1, Block(1, 32, 128)),
        (2, 64, 4096, 1, Block(32, 2, 64)),  # few heads: tokens in their place
        (5, 80, 1024, 2, Block(2, 4, 128)),
        (8, 1024, 512, 4, Block(1, 1, 1024)),  # a block has a row at least
        (1, 13, 64, 64, Block(4, 1, 16)),
    ],
)
def test_block(num_heads: int, head_size: int, elements: int, tokens: int, expected: Block) -> None:
    """Programs would be wider than their tensors, and idle, or larger than asked for, and out of registers."""
    assert block_of(num_heads, head_size, elements, tokens) == expected


def test_blocks_are_counted_up() -> None:
    """Heads or tokens that do not fill a block would be left out."""
    assert [Block(4, 2, 16).number_for(tokens, 3) for tokens in (0, 1, 4, 5)] == [0, 2, 2, 4]


def test_memory_of_another_tensor_is_known() -> None:
    """A kernel would load LSEs after other threads have overwritten them."""
    memory = torch.zeros(4, 4)
    assert takes_place_of({"output": memory}, {"prefix": torch.zeros(4, 4), "suffix": memory})
    assert not takes_place_of({"output": memory[1:]}, {"suffix": memory[:1]})
    assert not takes_place_of({"output": torch.zeros(0, 4)}, {"suffix": torch.zeros(0, 4)})
    with pytest.raises(ValueError, match=r"output.stride\(\)=\(1, 4\) must be \(4, 1\), as suffix has them"):
        takes_place_of({"output": memory.t()}, {"suffix": memory})


def test_results_that_overlap_with_an_input_are_refused() -> None:
    """Programs would read rows that others have replaced already: another result each time."""
    memory = torch.zeros(6, 2, 8)
    with pytest.raises(ValueError, match="output, which begins 64 bytes behind suffix, must not overlap"):
        takes_place_of({"output": memory[1:]}, {"suffix": memory[:-1]})
    with pytest.raises(ValueError, match="-128 bytes behind suffix, must not overlap"):
        takes_place_of({"output": memory[:4, :, ::2]}, {"suffix": memory[2:, :, ::2]})
    with pytest.raises(ValueError, match="must not overlap"):
        takes_place_of({"output": memory[:2].view(4, 8)}, {"suffix": memory[1:]})


def test_tensors_that_lie_between_each_other_do_not_overlap() -> None:
    """States that are kept side by side could not be merged into memory beside them."""
    memory = torch.zeros(6, 4, 8)
    assert not takes_place_of({"output": memory[:, 0]}, {"prefix": memory[:, 1], "suffix": memory[:, 3]})
    assert not takes_place_of({"output": memory[:, :, ::2]}, {"prefix": memory[:, :, 1::2]})
    assert not takes_place_of({"output": memory[1::2]}, {"prefix": memory[::2]})
