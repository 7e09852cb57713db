"""`attnfuzz.families.RecurrentDecode`: planted bugs of its kind are found, and right kernels are silent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnfuzz
from attnfuzz.families import recurrent_decode_kernels as bundled
from attnfuzz.kernels.recurrent import launch
from tests.families import recurrent_decode_kernels as kernels
from tests.families.searched import smallest_cases


@pytest.mark.parametrize("bug", kernels.PLANTED)
@pytest.mark.by_day("sentinel_is_slot_0", "accepted", "gate_step")
def test_planted_bugs_are_found_and_shrunk(bug: str) -> None:
    """A kernel that takes another's state, or keeps none, would pass."""
    for case in smallest_cases(getattr(kernels, bug)):
        assert sum(case.tokens) <= 4
        assert (case.head_size, case.v_head_size) == (16, 16)


@pytest.mark.parametrize("kernel", [kernels.right, bundled.recurrent_decode_eager, bundled.recurrent_decode])
@pytest.mark.by_day("recurrent_decode_eager")
def test_right_kernels_are_silent(kernel: Any) -> None:
    """Padded rows, slots that stay, or what float32 makes of a gate would be called bugs."""
    attnfuzz.fuzz(kernel, max_examples=40 if kernel is kernels.right else 12, device="cpu")(lambda: None)()


def test_tokens_one_by_one_are_tokens_at_once() -> None:
    """A state that is kept in float32 would differ from one that never left its registers."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, g, beta, state = (
        torch.randn(shape, generator=generator)
        for shape in ((5, 2, 16), (5, 2, 16), (5, 4, 48), (5, 4), (5, 4), (2, 4, 48, 16))
    )
    g, beta, slots = -g.abs(), beta.sigmoid(), torch.tensor([1], dtype=torch.int32)
    at_once, by_one = state.clone(), state.clone()
    out, outs = torch.empty_like(v), torch.empty_like(v)
    launch.recurrent_decode(q, k, v, g, beta, torch.tensor([0, 5]), at_once, slots, out, normalised=True)
    for t in range(5):
        q_t, k_t, v_t, g_t, beta_t, out_t = (part[t : t + 1] for part in (q, k, v, g, beta, outs))
        launch.recurrent_decode(q_t, k_t, v_t, g_t, beta_t, torch.tensor([0, 1]), by_one, slots, out_t, normalised=True)
    assert torch.equal(out, outs)
    assert torch.equal(at_once, by_one)
    assert torch.equal(at_once[0], state[0])
