"""Memory of the host that is used again instead of being given back and asked for anew."""

from functools import cache

import torch

__all__ = ["keep_freed_memory"]

_LARGEST_KEPT = 31 << 20


@cache
def keep_freed_memory() -> None:
    """Let this process keep up to 64 MiB of freed memory; once is enough.

    The error bound makes tensors of a few MiB and drops them. By default glibc gives such memory back to the system at
    once, and most of the bound's time goes into page faults when it is asked for again. Dropping one large piece raises
    both limits, as mallopt(3) says of M_MMAP_THRESHOLD: that of what is mapped by itself to the piece's size, 32 MiB at
    most, and that of what is given back to twice as much. No page of the piece is ever touched.
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8, device="cpu")
