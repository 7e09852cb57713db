"""Run as ``python -m attnfuzz.probe``: try what kernels need and say so in JSON. Only ever imported by that process.

``device`` prints ``{"cuda": bool, "name": str}``; ``interpreter`` runs a small Triton kernel on the CPU and prints
``{"works": bool}``. Anything that raises ends the process with a traceback on standard error.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# JIT functions are not Python: Triton gives their parameters types.

import json
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def sum_kernel(p_x, p_n, p_sum, TILE: tl.constexpr):  # noqa: N803 - Triton's constexpr arguments are upper case
    """``sum = x[:n].sum()`` in tiles, with a length that is read from memory, as decode kernels do."""
    n = tl.load(p_n)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        total += tl.sum(tl.load(p_x + i, mask=i < n, other=0.0), axis=0)
    tl.store(p_sum + tl.program_id(0), total)


def _interpreter() -> dict[str, object]:
    x = torch.arange(5, dtype=torch.float32, device="cpu")
    result = torch.zeros(1, dtype=torch.float32, device="cpu")
    sum_kernel[(1,)](x, torch.tensor([5], dtype=torch.int32, device="cpu"), result, TILE=4)
    return {"works": result.item() == 10.0}


def _device() -> dict[str, object]:
    cuda = torch.cuda.is_available()
    return {"cuda": cuda, "name": torch.cuda.get_device_name() if cuda else "cpu", "count": torch.cuda.device_count()}


def main(what: str) -> None:
    """Print the findings on ``what``: "device" or "interpreter"."""
    print(json.dumps(_interpreter() if what == "interpreter" else _device()))


if __name__ == "__main__":
    main(sys.argv[1])
