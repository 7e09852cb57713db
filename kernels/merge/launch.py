"""Checked wrappers of the merges: of two states by the plain and by the wide kernel, also in place, and of many.

As in ``dense.launch``: results are allocated unless given, strides are honoured, nothing waits for the device.
"""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

import triton
from torch import Tensor

from attnfuzz.kernels.common.alignment import common_alignment, in_units
from attnfuzz.kernels.common.checks import check_launch
from attnfuzz.kernels.common.device import on_device_of
from attnfuzz.kernels.common.prepare import Wanted, prepare_merge, prepare_merge_many
from attnfuzz.kernels.merge.merge_blocks import block_of, takes_place_of
from attnfuzz.kernels.merge.merge_many import merge_many_kernel
from attnfuzz.kernels.merge.merge_states import merge_states_kernel
from attnfuzz.kernels.merge.merge_states_wide import merge_states_wide_kernel


class _Options(TypedDict, total=False):
    """All but ``output_lse``, which decides what is returned."""

    lse_layout: str
    output: Tensor | None
    num_warps: int


class _BlockOptions(_Options, total=False):
    block_elements: int
    block_tokens: int


@overload
def merge_states(
    prefix_output: Tensor, prefix_lse: Tensor, suffix_output: Tensor, suffix_lse: Tensor,
    *, output_lse: None, **options: Unpack[_Options],
) -> tuple[Tensor, None]: ...  # fmt: skip
@overload
def merge_states(
    prefix_output: Tensor, prefix_lse: Tensor, suffix_output: Tensor, suffix_lse: Tensor,
    *, output_lse: Tensor | Literal["new"] = "new", **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def merge_states(
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    *,
    lse_layout: str = "HT",
    output: Tensor | None = None,
    output_lse: Wanted = "new",
    num_warps: int = 4,
) -> tuple[Tensor, Tensor | None]:
    """Merge two attention states of the same queries over disjoint keys.

    Shapes: outputs ``[num_tokens, num_q_heads, head_size]`` in float16, bfloat16 or float32; LSEs float32, natural log,
    ``[num_q_heads, num_tokens]`` for ``lse_layout="HT"``, ``[num_tokens, num_q_heads]`` for ``"TH"``. An LSE of -inf or
    +inf marks an empty side, whose output is not used. ``num_warps`` as in ``triton.Config``.

    Returns ``(output, output_lse)`` in the same shapes: 0 and -inf where both sides are empty. They may be given as
    tensors of either side, which are then replaced; otherwise they must not overlap with any. ``output_lse=None``: the
    LSE is not wanted, is not computed, and None is returned for it. Raises ValueError.
    """
    inputs = {"prefix_output": prefix_output, "prefix_lse": prefix_lse}
    inputs |= {"suffix_output": suffix_output, "suffix_lse": suffix_lse}
    output, output_lse, sizes = prepare_merge(inputs, lse_layout, output, output_lse)
    launch = check_launch(num_warps, 1)
    in_place = takes_place_of({"output": output, "output_lse": output_lse}, inputs)
    lse_strides = [_strides(lse, lse_layout) for lse in (prefix_lse, suffix_lse, output_lse)]
    with on_device_of(output):
        merge_states_kernel[(sizes["num_tokens"], sizes["num_q_heads"])](
            prefix_output, *prefix_output.stride(), suffix_output, *suffix_output.stride(),
            prefix_lse, *lse_strides[0], suffix_lse, *lse_strides[1],
            output, *output.stride(), output_lse, *lse_strides[2],
            sizes["head_size"], BLOCK_D=triton.next_power_of_2(sizes["head_size"]), IN_PLACE=in_place, **launch,
        )  # fmt: skip
    return output, output_lse


@overload
def merge_states_wide(
    prefix_output: Tensor, prefix_lse: Tensor, suffix_output: Tensor, suffix_lse: Tensor,
    *, output_lse: None, **options: Unpack[_BlockOptions],
) -> tuple[Tensor, None]: ...  # fmt: skip
@overload
def merge_states_wide(
    prefix_output: Tensor, prefix_lse: Tensor, suffix_output: Tensor, suffix_lse: Tensor,
    *, output_lse: Tensor | Literal["new"] = "new", **options: Unpack[_BlockOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def merge_states_wide(
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    *,
    lse_layout: str = "HT",
    output: Tensor | None = None,
    output_lse: Wanted = "new",
    block_elements: int = 4096,
    block_tokens: int = 4,
    num_warps: int = 4,
) -> tuple[Tensor, Tensor | None]:
    """``merge_states`` with programs that take a block of tokens × heads; arguments and result as there.

    ``block_elements``, ``block_tokens``: elements of a state that a program takes, and the tokens that they belong to
    if there are heads enough; powers of two. They change the speed only.
    """
    inputs = {"prefix_output": prefix_output, "prefix_lse": prefix_lse}
    inputs |= {"suffix_output": suffix_output, "suffix_lse": suffix_lse}
    output, output_lse, sizes = prepare_merge(inputs, lse_layout, output, output_lse)
    in_place = takes_place_of({"output": output, "output_lse": output_lse}, inputs)
    num_tokens, num_heads, head_size = (sizes[axis] for axis in ("num_tokens", "num_q_heads", "head_size"))
    launch = check_launch(num_warps, 1)
    block = block_of(num_heads, head_size, block_elements, block_tokens)
    align = common_alignment(prefix_output, suffix_output, output)
    lse_strides = [_strides(lse, lse_layout) for lse in (prefix_lse, suffix_lse, output_lse)]
    with on_device_of(output):
        merge_states_wide_kernel[(block.number_for(num_tokens, num_heads),)](
            prefix_output, *in_units(prefix_output.stride(), align),
            suffix_output, *in_units(suffix_output.stride(), align),
            prefix_lse, *lse_strides[0], suffix_lse, *lse_strides[1],
            output, *in_units(output.stride(), align), output_lse, *lse_strides[2],
            num_tokens, num_heads,
            HEAD_SIZE=head_size, ALIGN=align, BLOCK_T=block.tokens, BLOCK_H=block.heads, BLOCK_D=block.head_size,
            IN_PLACE=in_place, **launch,
        )  # fmt: skip
    return output, output_lse


def merge_states_in_place(
    output: Tensor,
    output_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    *,
    lse_layout: str = "HT",
    block_elements: int = 4096,
    block_tokens: int = 4,
    num_warps: int = 4,
) -> tuple[Tensor, Tensor]:
    """Merge a state into ``output`` and ``output_lse``, which are returned; otherwise ``merge_states_wide``."""
    return merge_states_wide(
        output, output_lse, suffix_output, suffix_lse,
        lse_layout=lse_layout, output=output, output_lse=output_lse,
        block_elements=block_elements, block_tokens=block_tokens, num_warps=num_warps,
    )  # fmt: skip


@overload
def merge_many(
    outputs: Tensor, lses: Tensor, *, output_lse: None, **options: Unpack[_BlockOptions]
) -> tuple[Tensor, None]: ...  # fmt: skip
@overload
def merge_many(
    outputs: Tensor, lses: Tensor, *, output_lse: Tensor | Literal["new"] = "new", **options: Unpack[_BlockOptions]
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def merge_many(
    outputs: Tensor,
    lses: Tensor,
    *,
    lse_layout: str = "HT",
    output: Tensor | None = None,
    output_lse: Wanted = "new",
    block_elements: int = 4096,
    block_tokens: int = 4,
    num_warps: int = 4,
) -> tuple[Tensor, Tensor | None]:
    """Merge any number of attention states of the same queries over disjoint keys.

    Shapes: ``outputs [num_states, num_tokens, num_q_heads, head_size]`` in float16, bfloat16 or float32; ``lses``
    float32, natural log, ``[num_states, num_q_heads, num_tokens]`` for ``lse_layout="HT"``,
    ``[num_states, num_tokens, num_q_heads]`` for ``"TH"``. An LSE of -inf or +inf marks an empty state, whose output is
    not used. ``block_elements``, ``block_tokens`` as for ``merge_states_wide``.

    Returns ``(output, output_lse)`` of the same shapes without the first axis: 0 and -inf where all states are empty.
    Given ones must not overlap with the inputs. ``output_lse=None`` as for ``merge_states``. Raises ValueError.
    """
    output, output_lse, sizes = prepare_merge_many(outputs, lses, lse_layout, output, output_lse)
    num_tokens, num_heads, head_size = (sizes[axis] for axis in ("num_tokens", "num_q_heads", "head_size"))
    launch = check_launch(num_warps, 1)
    block = block_of(num_heads, head_size, block_elements, block_tokens)
    align = common_alignment(outputs, output)
    with on_device_of(output):
        merge_many_kernel[(block.number_for(num_tokens, num_heads),)](
            outputs, *in_units(outputs.stride(), align), lses, *_strides(lses, lse_layout),
            output, *in_units(output.stride(), align), output_lse, *_strides(output_lse, lse_layout),
            sizes["num_states"], num_tokens, num_heads,
            HEAD_SIZE=head_size, ALIGN=align, BLOCK_T=block.tokens, BLOCK_H=block.heads, BLOCK_D=block.head_size,
            **launch,
        )  # fmt: skip
    return output, output_lse


def _strides(lse: Tensor | None, lse_layout: str) -> tuple[int, ...]:
    """With those of token and head last, in this order; 0 for none."""
    if lse is None:
        return 0, 0
    return (lse.mT if lse_layout == "HT" else lse).stride()
