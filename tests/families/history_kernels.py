"""Backends for `attnfuzz.families.History` with a bug each, of the kinds that schedulers bring out."""

from __future__ import annotations

from typing import Any

import torch

import attnfuzz
from attnfuzz.families.history import History, steps_of


class _Backend:
    """Made for a history, planned for each step."""

    def __init__(self, inputs: Any, bug: str) -> None:
        self.inputs, self.bug = inputs, bug
        self.plans: dict[int, Any] = {}
        self.longest = 0

    def plan(self, step: Any) -> None:
        self.lens, self.table = step.lens.tolist(), step.table
        count = len(self.lens)
        if self.bug == "plan_by_batch_size":
            self.lens = self.plans.setdefault(count, self.lens)
        if self.bug == "old_table":
            old = self.plans.get(count)
            width = min(old.shape[1], self.table.shape[1]) if old is not None else 0
            self.table = self.table.clone()
            if old is not None:
                self.table[:, :width] = old[:, :width]
            self.plans[count] = self.table
        self.longest = self.longest or max(self.lens)
        if self.bug == "first_maximum":
            self.lens = [min(length, self.longest) for length in self.lens]

    def write(self, step: Any) -> None:
        for name in ("k", "v"):
            cache, new = getattr(self.inputs, f"{name}_cache").flatten(0, 1), getattr(step, name)
            if self.bug == "first_write_stays":  # rejected drafts are never written over
                is_free = cache[step.slots].isnan().flatten(1).any(1)
                cache[step.slots[is_free]] = new[is_free]
            else:
                cache[step.slots] = new

    def run(self, step: Any) -> None:
        inputs, starts = self.inputs, step.starts.tolist()
        if self.bug != "writes_late":
            self.write(step)
        for seq, length in enumerate(self.lens):
            size, count = inputs.block_size, starts[seq + 1] - starts[seq]
            at = torch.arange(length, device=step.q.device)
            slots = self.table[seq, (at // size).clamp(max=self.table.shape[1] - 1)].long() * size + at % size
            k, v = (cache.flatten(0, 1)[slots].float() for cache in (inputs.k_cache, inputs.v_cache))
            k, v = (rows.repeat_interleave(inputs.gqa_ratio, 1) for rows in (k, v))
            for token in range(count):
                seen = length - count + token + 1
                if self.bug == "not_causal":
                    seen = length
                if self.bug == "chunks_begin_anew" and count > 1:
                    seen = token + 1
                seen = max(1, min(seen, length))
                row = starts[seq] + token
                scores = torch.einsum("hd,thd->ht", step.q[row].float(), k[:seen]) * inputs.head_size**-0.5
                step.out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), v[:seen]).to(step.out.dtype)
        if self.bug == "writes_late":
            self.write(step)


PLANTED = {
    "plan_by_batch_size": "lengths are planned once for each batch size",
    "old_table": "pages of the table that were there in the last step are not read again",
    "first_maximum": "no sequence is longer than the longest of the first step",
    "first_write_stays": "a slot that has been written is not written again: rejected drafts stay",
    "writes_late": "new tokens are written after attention has read",
    "not_causal": "drafts and chunks see what comes after them",
    "chunks_begin_anew": "the query tokens of a later chunk take themselves for the first ones",
}


def _planted(bug: str) -> Any:
    def decode(inputs: Any) -> None:
        backend = _Backend(inputs, bug)
        for step in steps_of(inputs):
            backend.plan(step)
            backend.run(step)

    decode.__name__ = decode.__qualname__ = bug or "right"
    return attnfuzz.kernel(History())(decode)


right = _planted("")
for _bug in PLANTED:
    globals()[_bug] = _planted(_bug)
