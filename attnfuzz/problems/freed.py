"""Pages behind a sliding window, which servers free and give to other sequences. Torch-free.

What a window has passed is never seen again, so vLLM and SGLang give its pages back while the sequence still runs. The
table still names pages that exist, and what they hold is another's, or NaN that an earlier one left. Only whole pages
are freed: the tokens before the window in the page that it begins in stay.
"""

from __future__ import annotations

from attnfuzz.problems.cases import AttentionCase

__all__ = ["freed_tokens"]


def freed_tokens(case: AttentionCase) -> tuple[int, ...]:
    """Of each sequence, how many of its first tokens lie in pages that were freed: dead memory to it.

    A page is freed once it lies before the windows of all query tokens of this call.
    """
    window = case.variant.window
    if window is None or not case.variant.freed_pages or not case.page_size:
        return (0,) * case.num_seqs
    found = []
    for seq_len, query_len in zip(case.seq_lens, case.query_counts, strict=True):
        seen = seq_len - max(0, query_len - 1)  # by the first of its query tokens
        found.append(max(0, seen - window) // case.page_size * case.page_size)
    return tuple(found)
