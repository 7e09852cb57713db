"""Checked wrapper of the recurrent decode kernel."""

from __future__ import annotations

import triton
from torch import Tensor

from attnfuzz.kernels.common.device import on_device_of
from attnfuzz.kernels.recurrent.recurrent_decode import recurrent_decode_kernel

_TILE_V = 32
"""Rows of a state per program: with 128 keys 4,096 numbers, 32 registers a thread of four warps."""


def recurrent_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    out: Tensor,
    *,
    log_rate: Tensor | None = None,
    bias: Tensor | None = None,
    accepted: Tensor | None = None,
    steps: Tensor | None = None,
    steps_slots: Tensor | None = None,
    parents: Tensor | None = None,
    first_slot: int = 0,
    scale: float | None = None,
    normalised: bool = False,
) -> None:
    """The gated delta rule for the new tokens of each sequence, into ``out [tokens, num_v_heads, v_head_size]``.

    ``q`` and ``k [tokens, num_heads, head_size]``, ``v [tokens, num_v_heads, v_head_size]``, of sequence i the tokens
    from ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``. ``gate``: the logarithm of what a state is multiplied with,
    ``[tokens, num_v_heads]`` or, for each number of a key, ``[tokens, num_v_heads, head_size]``; and ``beta [tokens,
    num_v_heads]``. With ``log_rate [num_v_heads]`` and ``bias`` these are a and b, of which both are worked out.

    ``state [slots, num_v_heads, v_head_size, head_size]``: sequence i begins from ``slots[i]``, and the state after its
    last token is stored there. With ``accepted [sequences]``, ``slots`` has a row for each sequence: it begins from
    ``slots[i, accepted[i] - 1]``, and the state after token t goes to ``slots[i, t]``. With ``steps`` and
    ``steps_slots`` it goes to ``steps[steps_slots[i], t]``, and ``state`` stays; with ``parents`` as well, token t > 0
    goes on from the state after token ``parents[i, t]``. A sequence whose slot is below ``first_slot`` is left out.

    Last dimensions are contiguous, and ``gate``, ``beta``, ``bias`` and indices dense; all other strides are honoured.
    Raises ValueError otherwise.
    """
    last = {"q": q, "k": k, "v": v, "state": state, "out": out}
    for name, tensor in last.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: the last must be 1; call .contiguous() first")
    _, num_heads, head_size = q.shape
    _, num_v_heads, v_head_size = v.shape
    if num_v_heads % num_heads:
        raise ValueError(f"{num_v_heads} heads of v must be a multiple of {num_heads} heads of q and k")
    grid = (triton.cdiv(v_head_size, _TILE_V), len(cu_seqlens) - 1, num_v_heads)
    with on_device_of(q):
        recurrent_decode_kernel[grid](
            q, q.stride(0), q.stride(1),
            k, k.stride(0), k.stride(1),
            v, v.stride(0), v.stride(1),
            gate, *gate.stride()[:2], gate.stride(2) if gate.dim() == 3 else 0,
            beta, beta.stride(0),
            log_rate, bias, 0 if bias is None else bias.stride(0),
            cu_seqlens,
            state, *state.stride()[:3],
            slots, slots.stride(0),
            accepted,
            steps, *((0, 0, 0, 0) if steps is None else steps.stride()[:4]),
            steps_slots,
            parents, 0 if parents is None else parents.stride(0),
            out, out.stride(0), out.stride(1),
            head_size**-0.5 if scale is None else scale,
            num_v_heads // num_heads, head_size, v_head_size, first_slot, int(normalised),
            TILE_V=_TILE_V, BLOCK_D=triton.next_power_of_2(head_size),
        )  # fmt: skip
