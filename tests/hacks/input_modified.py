"""An input is changed, so that the rest of the work becomes simpler."""

# mypy: disable-error-code="import-not-found, no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

from honest_kernels import SUPPORTS, attend

import attnfuzz


@attnfuzz.kernel("paged_decode", supports=SUPPORTS)
def input_modified(i: Any):
    """Entries of the block table that no sequence uses are set to 0, in the caller's table."""
    used = (i.seq_lens + i.block_size - 1) // i.block_size
    for row, count in zip(i.block_table, used.tolist(), strict=True):
        row[count:] = 0
    return attend(i)
