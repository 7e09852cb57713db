"""FlashInfer's latent decode (fa3): one token of a low score, and one page past 2^32 elements (needs 9 GB of a GPU)."""

import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper

MADE = {"dtype": torch.float16, "device": "cuda"}
LIST = {"dtype": torch.int32, "device": "cuda"}


def decode(q: torch.Tensor, cache: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One query token that sees one token, on a page of its own."""
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"))
    one, starts = torch.ones(1, **LIST), torch.arange(2, **LIST)
    wrapper.plan(
        starts, starts, torch.tensor([page], **LIST), one, 1, 512, 64, 1, False, 576**-0.5, q.dtype, cache.dtype
    )
    return wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], return_lse=True)


token = torch.full((1, 1, 576), 1.0, **MADE)
for low in (-80.0, -100.0):  # scores of -1920 and -2400 with the scale; -46080 and -57600 without it
    out, lse = decode(torch.full((1, 1, 576), low, **MADE), token, 0)
    print(f"score {low * 24:.0f}: out is {out[0, 0, 0]:.3g}, expected 1")

page = (1 << 32) // 576 + 1
cache = torch.empty((page + 1, 1, 576), **MADE)
cache[:2], cache[page] = 2, 1
out, lse = decode(torch.ones((1, 1, 576), **MADE), cache, page)
print(f"page {page}: out is {out[0, 0, 0]:.3g}, expected 1")
