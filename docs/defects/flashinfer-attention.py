"""FlashInfer's BatchAttention: a low score, a page past 2^32 elements, an output with gaps (needs 9 GB of a GPU)."""

import flashinfer
import torch

MADE = {"dtype": torch.float16, "device": "cuda"}
LIST = {"dtype": torch.int32, "device": "cuda"}
attention = flashinfer.BatchAttention("NHD", "cuda")


def attend(q: torch.Tensor, cache: torch.Tensor, page: int, out: torch.Tensor) -> torch.Tensor:
    """As many query tokens as the page has, causal."""
    count = torch.tensor([len(q)], **LIST)
    attention.plan(
        torch.tensor([0, len(q)], **LIST), torch.arange(2, **LIST), torch.tensor([page], **LIST), count, 1, 1, 64, 64,
        cache.shape[1], causal=True, sm_scale=0.125, q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    attention.run(q, (cache, cache), out=out)
    return out


ones = torch.ones((1, 1, 1, 64), **MADE)
for low in (-700.0, -900.0):  # scores of -5600 and -7200 with the scale; -44800 and -57600 without it
    out = attend(torch.full((1, 1, 64), low, **MADE), ones, 0, torch.empty((1, 1, 64), **MADE))
    print(f"score {low * 8:.0f}: out is {out[0, 0, 0]:.3g}, expected 1")

buffer = torch.zeros((2, 2, 64), **MADE)
attend(torch.ones((2, 1, 64), **MADE), torch.ones((1, 2, 1, 64), **MADE), 0, buffer[:, :1])
print(f"rows with gaps: {buffer[:, 0, 0].tolist()}, expected [1, 1]; between them {buffer[0, 1, 0]:.3g}, expected 0")

page = (1 << 32) // 64
cache = torch.empty((page + 1, 1, 1, 64), **MADE)
cache[0], cache[page] = 2, 1
out = attend(torch.ones((1, 1, 64), **MADE), cache, page, torch.empty((1, 1, 64), **MADE))
print(f"page {page}: out is {out[0, 0, 0]:.3g}, expected 1")
