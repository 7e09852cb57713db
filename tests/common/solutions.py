"""FlashInfer-Bench solutions as the tests of `attnfuzz.corpus.solution` and of ``attnfuzz verify`` need them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ATTEND = """
import math
import torch

__all__ = ["attend"]


def attend(q, k, v, scale):
    logits = q.float() @ k.float().T * scale
    return torch.softmax(logits, -1) @ v.float(), torch.logsumexp(logits, -1) / math.log(2)
"""

DECODE = """
import torch
from .attend import attend


def run(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale, output, lse):
    k, v = k_cache[:, 0], v_cache[:, 0]
    group = q.shape[1] // k.shape[1]
    output.zero_()
    lse.fill_(float("-inf"))
    for seq in range(len(q)):
        pages = kv_indices[kv_indptr[seq]:kv_indptr[seq + 1]].long()
        for head in range(q.shape[1] if len(pages) else 0):
            kv = head // group
            output[seq, head], lse[seq, head] = attend(q[seq, head], k[pages, kv], v[pages, kv], sm_scale)
"""

PREFILL = """
import torch
from .attend import attend


def run(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, sm_scale):
    group = q.shape[1] // k_cache.shape[2]
    output, lse = torch.zeros_like(q), torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    for seq in range(len(qo_indptr) - 1):
        pages = kv_indices[kv_indptr[seq]:kv_indptr[seq + 1]].long()
        if not len(pages):
            continue
        length = (len(pages) - 1) * k_cache.shape[1] + int(kv_last_page_len[seq])
        k, v = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        first, last = int(qo_indptr[seq]), int(qo_indptr[seq + 1])
        for row in range(first, last):
            seen = length - (last - 1 - row)
            for head in range(q.shape[1]):
                kv = head // group
                output[row, head], lse[row, head] = attend(q[row, head], k[:seen, kv], v[:seen, kv], sm_scale)
    return {"output": output, "lse": lse}
"""


def a_solution(source: str = DECODE, **changes: Any) -> dict[str, Any]:
    """A right one for small heads, unless ``source`` or ``changes`` say otherwise; those of ``spec`` are merged."""
    spec = {"language": "python", "target_hardware": ["cpu"], "entry_point": "src/main.py::run", "dependencies": []}
    spec |= changes.pop("spec", {})
    return {
        "name": "a decode-kernel",
        "definition": "gqa_paged_decode_h4_kv2_d64_ps1",
        "author": "somebody",
        "spec": spec,
        "sources": [{"path": "src/main.py", "content": source}, {"path": "src/attend.py", "content": _ATTEND}],
        **changes,
    }


def write_solution(folder: Path, solution: dict[str, Any]) -> Path:
    """The file of it."""
    file = folder / "solution.json"
    file.write_text(json.dumps(solution), encoding="utf-8")
    return file
