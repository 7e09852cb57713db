"""Proposals for the query tokens of a paged_attention case. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attnfuzz.cases.domain import Domain
from attnfuzz.cases.edits import changed, with_lengths
from attnfuzz.cases.search import Proposal, first_of, lower_integer
from attnfuzz.problems.boundaries import query_steps, tile_sizes
from attnfuzz.problems.cases import AttentionCase, PagedAttentionCase
from attnfuzz.problems.choices import min_seq_len

__all__ = ["lower_queries"]


def lower_queries(case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
    """No slack and no padding; then each sequence with fewer query tokens, or with less context before them."""
    if not isinstance(case, PagedAttentionCase):
        return case
    case = yield from lower_integer(case, case.seq_slack, 0, lambda case, slack: changed(case, seq_slack=slack))
    case = yield from lower_integer(case, case.query_slack, 0, lambda case, slack: changed(case, query_slack=slack))
    case = yield from lower_integer(case, case.padding_tokens, 0, lambda case, rows: changed(case, padding_tokens=rows))
    case = yield from first_of(case, [changed(case, query_lens=tuple(min(1, n) for n in case.query_lens))])
    for seq in range(case.num_seqs):
        query_len, low = case.query_lens[seq], min_seq_len(domain.supports)
        fewer, shorter = _with_queries(seq), _with_context(seq)
        case = yield from first_of(case, [fewer(case, 1), shorter(case, 0)])  # 1 is simpler than 0, too
        likely = set(_likely(case, query_len))
        case = yield from lower_integer(case, case.query_lens[seq], low, fewer, likely=likely)
        context = case.seq_lens[seq] - case.query_lens[seq]
        case = yield from lower_integer(case, context, 0, shorter)
    return case


Edit = Callable[[PagedAttentionCase, int], PagedAttentionCase | None]


def _with_queries(seq: int) -> Edit:
    """Fewer query tokens: those that are gone become context, or are gone altogether if that does not matter."""

    def edit(case: PagedAttentionCase, count: int) -> PagedAttentionCase | None:
        return changed(case, query_lens=(*case.query_lens[:seq], count, *case.query_lens[seq + 1 :]))

    return edit


def _with_context(seq: int) -> Edit:
    """The same query tokens behind another number of context tokens."""

    def edit(case: PagedAttentionCase, context: int) -> PagedAttentionCase | None:
        lengths = [*case.seq_lens[:seq], context + case.query_lens[seq], *case.seq_lens[seq + 1 :]]
        shortened = with_lengths(case, lengths, lambda at, old, new: max(0, at - (old - new)))
        return shortened and changed(shortened, query_lens=case.query_lens)

    return edit


def _likely(case: PagedAttentionCase, query_len: int) -> Iterator[int]:
    """Within one of a tile of queries, and what ends where ``query_len`` does in its tile."""
    for step in query_steps(tile_sizes(case.options), case.gqa_ratio):
        yield from (step - 1, step, step + 1, query_len % step, query_len % step + step)
