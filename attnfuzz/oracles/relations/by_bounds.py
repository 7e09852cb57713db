"""Relations that compare two runs on inputs with the same exact result by the sum of their error bounds.

Accuracy holds each run against float64, so by the triangle inequality these see nothing that accuracy does not see on
the changed case (docs/oracles.md has the figures). They judge where they are asked for by name, and never otherwise.
Bits they cannot compare:

* `layout`: the same numbers with other strides, or in another layout of the cache. Compilers and libraries choose how
  they load and add by strides and alignment.
* `repaging`: the same tokens on pages of another size. Tiles may follow pages, and the order of additions with them.
* `gqa_expansion`: K and V repeated, so that each query head has its own. Kernels that serve several query heads at once
  multiply matrices where others multiply vectors.
* `split_count`: another number of splits. Each split rounds its own sums, and so does their reduction.
* `compose`: attention over parts of each sequence, as ranks of context parallelism have them, merged by their LSEs: the
  first and the last half, blocks of which the last ones may be empty, and every third token.

Of `compose`, two runs are merged in float64, then the result with the next one, with weights
`w = exp(lse - lse_merged)`. If the LSEs are off by `d` and `e`, the weights are off by at most
`w_first w_last expm1(d + e)`, since the logarithm of their ratio is off by `d + e`. So the merged output is off by at
most

    w_first b_first + w_last b_last + w_first w_last expm1(d + e) |o_first - o_last|

with the bounds `b` of both outputs, and the merged LSE by `max(d, e)`. An LSE to another base or in another layout than
declared gives other weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec
import torch
from torch import Tensor

from attnfuzz.cases.supported import supports_case
from attnfuzz.declaration import Declaration
from attnfuzz.oracles import registry
from attnfuzz.oracles.registry import Oracle
from attnfuzz.oracles.relations.relation import Changed, Relation, fits, run_on
from attnfuzz.problems.cases import AttentionCase, Case, PagedDecodeCase, has_query_lens
from attnfuzz.problems.choices import block_sizes_of, layouts_of, split_counts_of, stride_kinds_of, strided_tensors_of
from attnfuzz.problems.variants import PLAIN_VARIANT
from attnfuzz.problems.wording import element, number, ratio
from attnfuzz.trials.comparison import Comparison, compare, extent, first_index
from attnfuzz.trials.trial import Trial
from attnfuzz.values import LogicalAttention
from attnfuzz.verdict import Failure

Parts = dict[str, Comparison]
Others = Callable[[Declaration, Any], Iterator[tuple[str, Case]]]
"""Cases with the same exact result, each in words that end the sentence "the kernel returns x originally and y"."""


def _relation(
    oracle: Oracle, others: Others, cases: type = object, values_of: Callable[[Any, Any], Any] | None = None
) -> Relation:
    """Each of ``others`` gives what one of ``cases`` does; ``values_of``: its numbers, if not those of the case."""

    def applies(declaration: Declaration, case: Any) -> bool:
        return any(others(declaration, case))

    def check(trial: Trial) -> Failure | None:
        values = trial.reference.values_on(trial.device)
        for words, case in others(trial.kernel.declaration, trial.case):
            changed = Changed(words, case, values if values_of is None else values_of(trial.case, values))
            failure = _beyond(oracle, trial, _compared(trial, changed), words)
            if failure is not None:
                return failure
        return None

    return Relation(oracle, applies, check, cases=cases, under_a_mask=False)


def _may_run(declaration: Declaration, case: Case) -> bool:
    return supports_case(declaration.supports, declaration.options, case) and fits(case)


def _compared(trial: Trial, changed: Changed) -> Parts:
    """A run on `changed` against its own reference, in host memory: `out`, and `lse` if the kernel returns it."""
    return _on_host(compare(trial.reference_of(changed.case, changed.values), run_on(trial, changed).results))


def _beyond(oracle: Oracle, trial: Trial, found: Parts, words: str) -> Failure | None:
    """An objection to the first element that is further from the run on the case than both bounds together allow."""
    for before in _on_host(trial.comparison).values():
        after = found[before.name]
        pair = Comparison(before.name, before.axes, after.got.double(), before.got.double(), before.bound + after.bound)
        mask = pair.ratio > 1
        if mask.any():
            return _objection(oracle, pair, mask, words, float(before.expected[first_index(mask)]))
    return None


def _objection(oracle: Oracle, pair: Comparison, mask: Tensor, words: str, expected: float) -> Failure:
    index = first_index(mask)
    worst = float(pair.ratio[index])
    as_it_is, changed = number(float(pair.expected[index])), number(float(pair.got[index]))
    return Failure(
        oracle=oracle.name,
        kind=pair.name,
        message=(
            f"{element(pair.name, pair.axes, index)} is {as_it_is} originally, but {changed} {words}: "
            f"the difference is {ratio(worst)} x what both error bounds allow together"
        ),
        details=(f"both should be {number(expected)}", f"it concerns {extent(pair.name, pair.axes, mask)}"),
        error_ratio=worst,
        tensor=pair.name,
    )


def _on_host(comparisons: list[Comparison]) -> Parts:
    return {
        one.name: Comparison(one.name, one.axes, one.got.cpu(), one.expected.cpu(), one.bound.cpu())
        for one in comparisons
        if one.name in ("out", "lse")
    }


def _with_other_layouts(declaration: Declaration, case: Case) -> Iterator[tuple[str, Case]]:
    """With other strides, if there are any, and in each other layout of the cache."""
    found = [*_with_other_strides(declaration, case)]
    own: Any = getattr(case, "layout", None)
    for layout in layouts_of(declaration.supports):
        if own is not None and layout != own:
            try:
                found.append((f"in the layout {layout}", msgspec.structs.replace(case, layout=layout)))
            except ValueError:  # a head size or strides that it does not have
                continue
    yield from ((words, changed) for words, changed in found if _may_run(declaration, changed))


def _with_other_strides(declaration: Declaration, case: Case) -> Iterator[tuple[str, Case]]:
    if case.strides:
        yield "with contiguous tensors", msgspec.structs.replace(case, strides={})
        return
    supports = declaration.supports
    names = strided_tensors_of(case.problem, supports, getattr(case, "layout", None))
    kinds = {name: stride_kinds_of(supports.strides, name)[1:2] for name in names}
    strides = {name: kind[0] for name, kind in kinds.items() if kind}
    if strides:
        yield "with rows that have gaps between them", msgspec.structs.replace(case, strides=strides)


def _with_other_pages(declaration: Declaration, case: PagedDecodeCase) -> Iterator[tuple[str, Case]]:
    """On pages of the next size that the kernel takes; none is shared, which its number would no longer say."""
    sizes = sorted(block_sizes_of(declaration.supports))
    larger = [size for size in sizes if size > case.block_size]
    own = case.with_own_pages()
    tried = (*larger, *sizes) if declaration.supports.combinations else (*larger[:1], *sizes[:1])
    changed = (msgspec.structs.replace(case, block_size=size, **own) for size in tried if size != case.block_size)
    for one in islice((one for one in changed if _may_run(declaration, one)), 1):
        yield f"on pages of {one.block_size} tokens instead of {case.block_size}", one


def _with_heads_repeated(declaration: Declaration, case: AttentionCase) -> Iterator[tuple[str, Case]]:
    if case.gqa_ratio > 1 and not case.values_in_keys:
        changed: Any = msgspec.structs.replace(case, num_kv_heads=case.num_q_heads)
        if _may_run(declaration, changed):
            yield f"with K and V repeated for {case.num_q_heads} KV heads instead of {case.num_kv_heads}", changed


def _repeated(case: Any, values: LogicalAttention) -> LogicalAttention:
    k, v = (part.repeat_interleave(case.gqa_ratio, dim=1) for part in (values.k, values.v))
    scales = None if values.kv_scales is None else values.kv_scales.repeat_interleave(case.gqa_ratio, dim=1)
    return replace(values, k=k, v=v, kv_scales=scales)


def _with_other_splits(declaration: Declaration, case: Any) -> Iterator[tuple[str, Case]]:
    """The case with the fewest and the most splits that the kernel takes, without its own."""
    if "num_splits" in case.__struct_fields__:
        counts = [count for count in split_counts_of(declaration.supports) if count != case.num_splits]
        found: dict[int, Case] = {count: msgspec.structs.replace(case, num_splits=count) for count in counts}
    else:
        counts = [one for one in declaration.options.get("num_splits", ()) if type(one) is int]
        own = case.options.get("num_splits", counts[0] if counts else None)
        options = {count: {**case.options, "num_splits": count} for count in counts if count != own}
        found = {count: msgspec.structs.replace(case, options=of_case) for count, of_case in options.items()}
    supported = [
        count for count, other in found.items() if supports_case(declaration.supports, declaration.options, other)
    ]
    for count in sorted({min(supported), max(supported)}) if supported else ():
        if fits(found[count]):
            yield f"in {count} split{'s' * (count != 1)}", found[count]


_Ownership = Callable[[int], Sequence[range]]
"""Of so many tokens, those that each rank has."""
_OWNERSHIPS: dict[str, _Ownership] = {
    "runs on the first and the last half of its tokens": lambda n: (range(n // 2), range(n // 2, n)),
    "runs of 4 ranks that have one block of its tokens each": lambda n: _blocks(n, 4),
    "runs of 3 ranks that have every third of its tokens": lambda n: [range(rank, n, 3) for rank in range(3)],
}


def _blocks(length: int, count: int) -> list[range]:
    """Equal ones; of few tokens the last are empty."""
    size = -(-length // count)
    return [range(min(i * size, length), min((i + 1) * size, length)) for i in range(count)]


def _ownerships(declaration: Declaration, case: AttentionCase) -> Iterator[tuple[str, _Ownership]]:
    """None with variants: where a key stands in its sequence, and a sink, count once for the whole of it."""
    if declaration.supports.lse == "none" or case.variant != PLAIN_VARIANT:
        return
    if has_query_lens(case.problem):  # the query tokens of one sequence would have to be cut differently
        return
    for words, parts in _OWNERSHIPS.items() if max(case.seq_lens) > 1 else ():
        if declaration.supports.empty_sequences or all(all(parts(length)) for length in case.seq_lens):
            yield words, parts


def _check_merged(trial: Trial) -> Failure | None:
    case: Any = trial.case
    values: LogicalAttention = trial.reference.values_on(trial.device)
    for words, parts in _ownerships(trial.kernel.declaration, case):
        owned = [parts(length) for length in case.seq_lens]
        found = [_part(trial, values, tokens, words) for tokens in zip(*owned, strict=True)]
        if "lse" not in found[0]:
            return None
        if failure := _beyond(registry.COMPOSE, trial, functools.reduce(_merged, found), f"merged from {words}"):
            return failure
    return None


def _part(trial: Trial, values: LogicalAttention, tokens: Sequence[range], words: str) -> Parts:
    """The run on these tokens of each sequence."""
    case: Any = trial.case
    changes: dict[str, Any] = {
        "seq_lens": tuple(map(len, tokens)),
        "values": msgspec.structs.replace(case.values, needles=()),
        **case.with_own_pages(),
    }
    pieces = [
        (k[own.start : own.stop : own.step], v[own.start : own.stop : own.step])
        for own, (k, v) in zip(tokens, map(values.sequence, range(case.num_seqs)), strict=True)
    ]
    k, v = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    starts = tuple(sum(changes["seq_lens"][:i]) for i in range(case.num_seqs + 1))
    changed = msgspec.structs.replace(case, **changes)
    return _compared(trial, Changed(f"in one of the {words}", changed, replace(values, k=k, v=v, starts=starts)))


def _merged(first: Parts, last: Parts) -> Parts:
    lse = torch.stack((first["lse"].got, last["lse"].got)).double()
    out = torch.stack((first["out"].got, last["out"].got)).double()
    bound = torch.stack((first["out"].bound, last["out"].bound))
    lse_bound = torch.stack((first["lse"].bound, last["lse"].bound))
    weights = lse.softmax(0).nan_to_num(0.0).unsqueeze(-1)  # NaN where both are empty
    spread = weights.prod(0) * lse_bound.sum(0).expm1().unsqueeze(-1) * (out[0] - out[1]).abs()
    merged_out, merged_lse = (weights * out).sum(0), lse.logsumexp(0)
    return {
        "out": _comparison(first["out"], merged_out, (weights * bound).sum(0) + spread),
        "lse": _comparison(first["lse"], merged_lse, lse_bound.amax(0)),
    }


def _comparison(like: Comparison, got: torch.Tensor, bound: torch.Tensor) -> Comparison:
    return Comparison(like.name, like.axes, got, got, bound)


LAYOUT = _relation(registry.LAYOUT, _with_other_layouts)
REPAGING = _relation(registry.REPAGING, _with_other_pages, PagedDecodeCase)
GQA_EXPANSION = _relation(registry.GQA_EXPANSION, _with_heads_repeated, AttentionCase, _repeated)
SPLIT_COUNT = _relation(registry.SPLIT_COUNT, _with_other_splits)
COMPOSE = Relation(
    registry.COMPOSE,
    lambda declaration, case: any(_ownerships(declaration, case)),
    _check_merged,
    cases=AttentionCase,
    under_a_mask=False,
)
