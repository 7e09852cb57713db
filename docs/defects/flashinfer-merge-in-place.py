"""FlashInfer's merge_state_in_place of two empty states."""

import flashinfer
import torch

out = torch.zeros((1, 1, 64), dtype=torch.float16, device="cuda")
lse = torch.full((1, 1), -torch.inf, device="cuda")
flashinfer.merge_state_in_place(out, lse, out.clone(), lse.clone())
print(f"out is {out[0, 0, 0]}, expected 0; the log-sum-exp is {lse[0, 0]}, expected -inf")
