"""The work goes on when the call has returned, and a timer has stopped."""

# mypy: disable-error-code="import-not-found, no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

import threading
import time
from typing import Any

import torch
from honest_kernels import SUPPORTS, attend

import attnfuzz

_streams: list[Any] = []


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def thread_not_joined(i: Any):
    """The result is written by a thread, which is done some milliseconds later: before most checkers look."""
    out, lse = torch.empty_like(i.q), torch.empty_like(i.lse)

    def work() -> None:
        time.sleep(0.002)
        found = attend(i)
        out.copy_(found[0])
        lse.copy_(found[1])

    threading.Thread(target=work).start()
    return out, lse


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def stream_not_joined(i: Any):
    """The same on a GPU: a stream of its own, which waits for the caller's, and which nobody waits for."""
    if not i.q.is_cuda:
        raise RuntimeError("needs a GPU")
    if not _streams:
        _streams.append(torch.cuda.Stream())
    out, lse = torch.empty_like(i.q), torch.empty_like(i.lse)
    _streams[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(_streams[0]):
        return attend(i, out, lse)
