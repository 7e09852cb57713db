"""Right kernels of `attnfuzz.families.RecurrentDecode`: the bundled one in Triton, and the same in plain PyTorch."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

import attnfuzz
from attnfuzz.families.recurrent_decode import RecurrentDecode
from attnfuzz.kernels.recurrent import launch


@attnfuzz.kernel(RecurrentDecode())
def recurrent_decode(inputs: Any) -> None:
    """``launch.recurrent_decode``."""
    is_raw = inputs.gates == "raw"
    launch.recurrent_decode(
        inputs.q, inputs.k, inputs.v, inputs.a if is_raw else inputs.g, inputs.b if is_raw else inputs.beta,
        inputs.cu_seqlens, inputs.state, inputs.slots, inputs.out,
        log_rate=inputs.A_log if is_raw else None, bias=inputs.dt_bias if is_raw else None,
        **{name: getattr(inputs, name, None) for name in ("accepted", "steps", "steps_slots", "parents")},
        first_slot=inputs.sentinel + 1, normalised=inputs.normalised,
    )  # fmt: skip


@attnfuzz.kernel(RecurrentDecode())
def recurrent_decode_eager(inputs: Any) -> None:
    """Token by token."""
    is_first = inputs.keeps == "last"
    q, k, v = (part.float() for part in (inputs.q, inputs.k, inputs.v))
    if inputs.normalised:
        q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
    q, k = (part.repeat_interleave(inputs.values_per_key, dim=1) for part in (q * inputs.head_size**-0.5, k))
    if inputs.gates == "raw":
        rate = inputs.A_log.exp()
        g = -(rate[:, None] if inputs.per_channel else rate) * functional.softplus(inputs.a.float() + inputs.dt_bias)
        beta = inputs.b.float().sigmoid()
    else:
        g, beta = inputs.g, inputs.beta
    decay = g.exp() if inputs.per_channel else g.exp()[..., None]
    for i, (first, end) in enumerate(zip(inputs.cu_seqlens.tolist(), inputs.cu_seqlens[1:].tolist(), strict=False)):
        slots = inputs.slots[i].reshape(-1).tolist()
        slot = slots[int(inputs.accepted[i]) - 1 if inputs.keeps == "each" else 0]
        if slot <= inputs.sentinel or end == first:
            continue
        state = inputs.state[slot].float()
        for t in range(first, end):
            if inputs.keeps == "tree" and t > first:
                state = inputs.steps[inputs.steps_slots[i], inputs.parents[i, t - first]].float()
            state = state * decay[t, :, None]
            corrects = (v[t] - (state * k[t, :, None]).sum(-1)) * beta[t, :, None]
            state = state + corrects[..., None] * k[t, :, None]
            inputs.out[t] = (state * q[t, :, None]).sum(-1).to(inputs.out.dtype)
            if inputs.keeps == "each":
                inputs.state[slots[t - first]] = state.to(inputs.state.dtype)
            elif not is_first:
                inputs.steps[inputs.steps_slots[i], t - first] = state.to(inputs.steps.dtype)
        if is_first:
            inputs.state[slot] = state.to(inputs.state.dtype)
