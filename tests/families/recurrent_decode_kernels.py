"""Kernels of `attnfuzz.families.RecurrentDecode` with a bug each, of the kinds that recurrent kernels had."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

import attnfuzz
from attnfuzz.families import RecurrentDecode

PLANTED = {
    "sentinel_is_slot_0": "a padded row's -1 has become 0, and its state is another's",
    "padding": "a padded row is computed and stored in the last slot, as Python counts",
    "accepted": "a sequence begins from its first slot, however many tokens were accepted",
    "accepted_before": "the number of the sequence before says with which slot a sequence begins",
    "last_only": "of speculative tokens only the last one's state is kept",
    "verify_writes": "verifying overwrites the state of the sequence",
    "chain": "a token of a tree goes on from the one before it",
    "decay_after": "the state decays after it was corrected",
    "asked_first": "what the state says of a key is taken before it decays",
    "beta_of_v": "beta is not multiplied with what the state says of the key",
    "head_map": "heads share keys in turn, not side by side",
    "key_length": "keys are not divided by their length",
    "gate_step": "the gates of a second token are read one number further, not one head size",
    "short_state": "the state is rounded to the dtype of q after every token",
    "stale": "a sequence begins from the state of the one before it",
}


def _decode(i: Any, bug: str = "") -> None:
    q, k, v = (part.float() for part in (i.q, i.k, i.v))
    if i.normalised:
        q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, i.k.float()))
        k = i.k.float() if bug == "key_length" else k
    heads = torch.arange(v.shape[1], device=v.device)
    of_head = heads % i.num_heads if bug == "head_map" else heads // i.values_per_key
    q, k = q[:, of_head] * i.head_size**-0.5, k[:, of_head]
    gate = i.g if i.gates == "given" else i.a.float() + i.dt_bias
    beta = i.beta if i.gates == "given" else i.b.float().sigmoid()
    for n, (first, end) in enumerate(zip(i.cu_seqlens.tolist(), i.cu_seqlens[1:].tolist(), strict=False)):
        slots = i.slots[max(0, n - (bug == "stale"))].reshape(-1).tolist()
        number = n - (bug == "accepted_before")
        begin = slots[int(i.accepted[number]) - 1 if i.keeps == "each" and bug != "accepted" else 0]
        if begin <= i.sentinel:
            if bug not in ("sentinel_is_slot_0", "padding"):
                continue
            slots = [0 if bug == "sentinel_is_slot_0" else len(i.state) - 1] * len(slots)
            begin = slots[0]
        if end == first:
            continue
        state = i.state[begin].float()
        for t in range(first, end):
            if i.keeps == "tree" and t > first and bug != "chain":
                state = i.steps[i.steps_slots[n], i.parents[n, t - first]].float()
            g = gate[t]
            if bug == "gate_step" and i.per_channel and t > first:
                g = gate[first:].reshape(-1)[(t - first) * v.shape[1] :][: g.numel()].view_as(g)
            if i.gates == "raw":
                g = -(i.A_log.exp()[:, None] if i.per_channel else i.A_log.exp()) * functional.softplus(g)
            decay = g.exp()[:, None] if i.per_channel else g.exp()[:, None, None]
            said = (state * k[t][:, None]).sum(-1)
            state = state if bug == "decay_after" else state * decay
            said = said if bug == "asked_first" else (state * k[t][:, None]).sum(-1)
            corrects = (v[t] - said) * beta[t][:, None]
            if bug == "beta_of_v":
                corrects = v[t] * beta[t][:, None] - said
            state = state + corrects[..., None] * k[t][:, None]
            state = state * decay if bug == "decay_after" else state
            state = state.to(i.q.dtype).float() if bug == "short_state" else state
            i.out[t] = (state * q[t][:, None]).sum(-1).to(i.out.dtype)
            if i.keeps == "each" and (bug != "last_only" or t == end - 1):
                i.state[slots[t - first]] = state.to(i.state.dtype)
            elif i.keeps in ("aside", "tree") and begin > i.sentinel:
                i.steps[i.steps_slots[n], t - first] = state.to(i.steps.dtype)
        if i.keeps == "last" or bug == "verify_writes":
            i.state[begin] = state.to(i.state.dtype)


@attnfuzz.kernel(RecurrentDecode())
def right(inputs: Any) -> None:
    _decode(inputs)


def _planted(bug: str) -> Any:
    def decode(inputs: Any) -> None:
        _decode(inputs, bug)

    decode.__name__ = decode.__qualname__ = bug
    return attnfuzz.kernel(RecurrentDecode())(decode)


for _bug in PLANTED:
    globals()[_bug] = _planted(_bug)
