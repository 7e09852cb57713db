"""Results that depend on memory no sequence owns: page tails, spare pages, rows past a length, gaps, red zones."""

from torch import Tensor

from attnfuzz.judging.comparison import axes_of, blame_of, differing, extent, first_index, place_of
from attnfuzz.judging.observation import Observation
from attnfuzz.judging.trial import Trial, cause_of_difference
from attnfuzz.judging.words import ranges
from attnfuzz.oracles.diagnosis import Diagnosis, explain, past_the_end_within_bounds
from attnfuzz.oracles.verdict import IDENTIFYING_CAUSES, WITHOUT_WEIGHT, Blame, Failure
from attnfuzz.problems.cases import AttentionCase, DenseDecodeCase, PagedDecodeCase
from attnfuzz.problems.freed import freed_tokens
from attnfuzz.problems.open_cases import OpenCase

__all__ = ["check"]


def check(trial: Trial) -> Failure | None:
    """Two runs on the same live inputs, with NaN and with finite numbers everywhere else, gave different bits."""
    if cause_of_difference(trial) != "dead_memory" or trial.second is None:
        return None
    one, other = trial.first.results, trial.second.results
    masks = trial.differences(trial.first, trial.second)
    name = next(name for name, mask in masks.items() if mask.any())
    axes = axes_of(name, trial.case)
    where, got, got_otherwise, index = differing(name, axes, masks[name], one[name], other[name])
    found = _reason(trial, trial.second, index if name == "out" else None)
    return Failure(
        oracle="dead_memory",
        kind=name,
        message=f"{where} changes with memory that holds no token: it is {got} where that holds NaN, "
        f"and {got_otherwise} where it holds small numbers"
        + (f"; {found.words}" if found is not None and found.words else ""),
        details=(
            f"it changes {extent(name, axes, masks[name])}",
            *place_of(trial.case, name, index),
            *_what_is_dead(trial, masks[name]),
        ),
        tensor=name,
        cause="" if found is None else found.cause,
        blame=blame_of(trial.case, axes, index) | Blame(tokens=() if found is None else found.tokens),
    )


def _reason(trial: Trial, second: Observation, index: tuple[int, ...] | None) -> Diagnosis | None:
    """What the run with finite numbers points to: it tells what was read, where NaN only tells that something was.

    Nothing that a kernel does with scores by themselves makes it read dead memory.
    """
    comparisons = trial.compare(second)
    failed = next((part for part in comparisons if bool((part.ratio > 1).any())), None)
    if failed is None:
        read = None if index is None else past_the_end_within_bounds(trial.reference, second.poison, comparisons, index)
        without = "with small numbers the result is right, but 0 x NaN is NaN: mask the load"
        return read or Diagnosis(without, WITHOUT_WEIGHT)
    found = explain(trial.reference, second.poison, comparisons, failed, first_index(failed.ratio > 1))
    return None if found is not None and found.cause in IDENTIFYING_CAUSES else found


def _what_is_dead(trial: Trial, mask: Tensor) -> list[str]:
    case = trial.case
    if isinstance(case, OpenCase):
        return ["what must not matter here: whatever the problem does not write, and what lies around the tensors"]
    if not isinstance(case, AttentionCase):
        unwritten = trial.kernel.declaration.supports.empty_state_outputs == "anything"
        states = "outputs of states whose LSE is -inf or +inf, and " if unwritten else ""
        return [f"what must not matter here: {states}whatever lies around the tensors"]
    seq = case.row_seqs[first_index(mask)[0]]
    seq_len = case.seq_lens[seq]
    if isinstance(case, DenseDecodeCase):
        return [f"sequence {seq} has no token in rows {seq_len} and up of k and v (its length is {seq_len})"]
    return [_dead_pages(case, seq)] if isinstance(case, PagedDecodeCase) else []


def _dead_pages(case: PagedDecodeCase, seq: int) -> str:
    seq_len, last = case.seq_lens[seq], case.blocks_of(seq) - 1
    if last < 0:
        return f"sequence {seq} is empty: it has no token anywhere in the cache, and no page in its block-table row"
    used = seq_len - last * case.block_size
    free = ranges(range(used, case.block_size))
    offsets = f"offset{'s' if case.block_size - used > 1 else ''} {free}"
    tail = f"{offsets} of its page {last}, " if used < case.block_size else ""
    freed = freed_tokens(case)[seq] // case.block_size
    pages = "page 0, which lies" if freed == 1 else f"pages 0-{freed - 1}, which lie"
    behind = f"{pages} behind its window and may be another sequence's by now, " if freed else ""
    after = f"{tail}pages that its block-table row names after page {last}"
    return f"sequence {seq} (length {seq_len}) has no token in: {behind}{after}"
