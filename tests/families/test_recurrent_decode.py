"""The bundled kernel of `attnfuzz.families.RecurrentDecode`."""

from __future__ import annotations

import torch

from attnfuzz.kernels.recurrent import launch


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
