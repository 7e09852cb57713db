"""Which levels of the input space go together, shown by examples: what a kernel's ``Supports`` makes possible.

Most axes are independent of each other. The others stand in a group: formats, cuts of a sequence, batches. Every
supported choice of a group's fields is written down as a *witness*, by the same functions that place a drawn case, so
that a pair of levels without a witness cannot occur. What strategies happen to draw plays no part. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice, product

from attnfuzz.problems.axes import (
    BATCHES,
    GQA_CLASSES,
    HEAD_SIZE_CLASSES,
    HEADS_CLASSES,
    PAGE_CLASSES,
    Axis,
    Levels,
    cache_level,
    heads_class,
    option_axes,
    query_phase,
    size_class,
    split_class,
    v_head_size_axes,
    v_head_size_class,
)
from attnfuzz.problems.boundaries import (
    boundary_lengths,
    boundary_positions,
    causal_positions,
    query_steps,
    split_count,
    tile_sizes,
)
from attnfuzz.problems.cases import CASE_TYPES, BundledProblem, PagedDecodeCase, Problem
from attnfuzz.problems.choices import (
    KV_HEADS,
    block_sizes_of,
    caches_of,
    dtypes_of,
    gqa_ratios_of,
    head_counts_of,
    head_sizes_of,
    kv_dtypes_of,
    layouts_of,
    lse_kinds_of,
    merge_heads_of,
    min_seq_len,
    options_of,
    paddings_of,
    split_counts_of,
    stride_kinds_of,
    strided_tensors_of,
    v_head_sizes_of,
)
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.row_axes import LENGTHS, Row, row_axes
from attnfuzz.problems.simplest import simplest_cases
from attnfuzz.problems.supports import OptionValue, Supports

__all__ = ["LONGEST", "Witness", "witnesses"]

Witness = tuple[tuple[str, Levels], ...]
"""Levels by the name of their axis."""
Options = Mapping[str, tuple[OptionValue, ...]]

LONGEST = {"cpu": 300, "cuda": 8192}
"""The longest sequences that campaigns draw, by device."""
_LONG = 1024
_ANY_LENGTHS = (8, 24, 200)
_MOST_LAUNCHES = 64
_STRIDES = {
    "cache strides": {"k", "v", "k_cache", "v_cache"},
    "input strides": {"prefix_output", "suffix_output", "prefix_lse", "suffix_lse"},
    "result strides": {"output", "output_lse"},
}
"""Tensors by axis; the others count for "other strides"."""


def witnesses(problem: Problem, supports: Supports, options: Options, *, longest: int) -> list[set[Witness]]:
    """Groups of axes that depend on each other or on ``supports``; an axis that is in none of them is free."""
    if isinstance(problem, OpenProblem):
        return []
    groups: list[Iterable[Witness]] = [_formats(problem, supports), *_strides(problem, supports)]
    if problem == "merge_states":
        groups.append(_lse_pairs(supports))
    else:
        groups += [_gqa_ratios(supports), _cuts(problem, supports, options, longest)]
    if _is_paged(problem):
        groups += [_batches(), _paddings(supports), _caches(problem, supports)]
    if problem == "paged_attention":
        groups += [_queries(supports, longest), _mixtures(), _bounds(supports), _padding_tokens(supports)]
    if supports.combinations:
        groups.append(_combinations(problem, supports, options))
    return [set(group) for group in groups]


def _is_paged(problem: Problem) -> bool:
    return not isinstance(problem, OpenProblem) and issubclass(CASE_TYPES[problem], PagedDecodeCase)


def _formats(problem: BundledProblem, supports: Supports) -> Iterator[Witness]:
    for dtype in dtypes_of(supports):
        for layout in layouts_of(supports) if _is_paged(problem) else (None,):
            for size in head_sizes_of(supports, dtype, layout):
                levels: Witness = ("dtype", (dtype,)), ("head size", (size_class(size, HEAD_SIZE_CLASSES),))
                levels = levels if layout is None else (*levels, ("layout", (layout,)))
                if not v_head_size_axes(problem, supports):
                    yield levels
                    continue
                for v_size in v_head_sizes_of(supports, size, layout):
                    yield (*levels, ("V head size", (v_head_size_class(size, v_size),)))


def _combinations(problem: BundledProblem, supports: Supports, options: Options) -> Iterator[Witness]:
    """All that goes together in each combination of ``where``; only axes that one of them names."""
    named = {name for one in supports.combinations for name in one}
    sized = bool(v_head_size_axes(problem, supports))
    shown = {axis.name: axis.levels for axis in option_axes(options)}
    for one, _ in simplest_cases(problem, supports, options):
        found: dict[str, Iterable[str]] = {}
        sizes = head_sizes_of(one, dtypes_of(one)[0])
        if named & {"dtype", "kv_dtype"}:
            found["dtype"] = dtypes_of(one)
        if "layout" in named:
            found["layout"] = layouts_of(one)
        if named & {"head_size", "v_head_size"}:
            found["head size"] = (size_class(size, HEAD_SIZE_CLASSES) for size in sizes)
        if sized and "v_head_size" in named:
            pairs = ((size, v_size) for size in sizes for v_size in v_head_sizes_of(one, size))
            found["V head size"] = (v_head_size_class(*pair) for pair in pairs)
        if "block_size" in named:
            found["page size"] = (size_class(size, PAGE_CLASSES) for size in block_sizes_of(one))
        if "num_splits" in named:
            found["splits"] = map(split_class, split_counts_of(one))
        if "kv_dtype" in named and kv_dtypes_of(problem, supports):
            caches = {cache for dtype in dtypes_of(one) for cache in caches_of(problem, one, dtype)}
            kinds = [QuantisedKv(dtype=cache, per=per) for cache in caches if cache for per in supports.kv_scales]
            found["cache"] = map(cache_level, (*([None] if None in caches else []), *kinds))
        if named & {"gqa_ratio", "num_q_heads", "num_kv_heads"}:
            found |= _head_levels(problem, one)
        if problem != "split_decode" and any(split_count({name: 2}) > 1 for name in named & options.keys()):
            launches = _launches(options_of(one, options))
            found["splits"] = {split_class(split_count(launch)) for launch in launches}
        for name, choices in options_of(one, options).items():
            if name in named and f"option {name}" in shown:
                found[f"option {name}"] = map(str, choices)
        yield tuple((axis, tuple(dict.fromkeys(levels))) for axis, levels in found.items())


def _head_levels(problem: BundledProblem, supports: Supports) -> dict[str, Iterable[str]]:
    if problem == "merge_states":
        named = merge_heads_of(supports)
        return {"heads": HEADS_CLASSES if named is None else map(heads_class, named)}
    heads = head_counts_of(supports)
    ratios = gqa_ratios_of(supports) if heads is None else tuple(q // kv for q, kv in heads)
    counts = KV_HEADS if heads is None else tuple(kv for _, kv in heads)
    return {
        "GQA ratio": (size_class(ratio, GQA_CLASSES) for ratio in ratios),
        "KV heads": map(heads_class, counts),
    }


def _caches(problem: Problem, supports: Supports) -> Iterator[Witness]:
    """In the packed layout, fewer head sizes than of a plain cache are made of whole pieces of 16 bytes."""
    dtypes = kv_dtypes_of(problem, supports)
    kinds = [QuantisedKv(dtype=dtype, per=per) for dtype in dtypes for per in supports.kv_scales]
    for kv in (None, *kinds) if kinds else ():
        for dtype in dtypes_of(supports):
            for layout in layouts_of(supports):
                for size in head_sizes_of(supports, dtype if kv is None else kv.dtype, layout):
                    levels = ("cache", (cache_level(kv),)), ("head size", (size_class(size, HEAD_SIZE_CLASSES),))
                    yield *levels, ("layout", (layout,)), ("dtype", (dtype,))


def _strides(problem: BundledProblem, supports: Supports) -> Iterator[Iterator[Witness]]:
    kinds: dict[str, set[str]] = {}
    for tensor in strided_tensors_of(problem, supports):
        axis = next((name for name, tensors in _STRIDES.items() if tensor in tensors), "other strides")
        kinds.setdefault(axis, set()).update(stride_kinds_of(supports.strides, tensor))
    return (_one(axis, found) for axis, found in kinds.items())


def _one(axis: str, levels: Iterable[str]) -> Iterator[Witness]:
    return (((axis, (level,)),) for level in levels)


def _lse_pairs(supports: Supports) -> Iterator[Witness]:
    for prefix, suffix in product(lse_kinds_of(supports), repeat=2):
        yield ("prefix LSE", (prefix,)), ("suffix LSE", (suffix,))


def _gqa_ratios(supports: Supports) -> Iterator[Witness]:
    return _one("GQA ratio", (size_class(ratio, GQA_CLASSES) for ratio in gqa_ratios_of(supports)))


def _paddings(supports: Supports) -> Iterator[Witness]:
    """An empty sequence has unused entries, since a table has at least one column."""
    yield ("table padding", ("none",)), ("length", tuple(length for length in LENGTHS if length != "0"))
    for padding in paddings_of(supports):
        yield ("table padding", (padding,)), ("length", tuple(LENGTHS))


def _batches() -> Iterator[Witness]:
    """Only several sequences can share a page."""
    for order in ("identity", "reversed", "shuffled"):
        yield ("sequences", ("1",)), ("page order", (order,))
    for sequences in ("several, equal", "several, ragged"):
        yield ("sequences", (sequences,)), ("page order", ("identity", "reversed", "shuffled", "shared"))


def _queries(supports: Supports, longest: int) -> Iterator[Witness]:
    """What a sequence can be in a batch of each kind; one without query tokens needs another one beside it."""
    least, most = min_seq_len(supports), min(longest, supports.max_seq_len or longest)
    axes = [axis for axis in row_axes("paged_attention", {}) if axis.name in ("length", "query length", "phase")]
    for length in (0, 1, 2, 3, 15, 16, 17, 18, 127, 128, 1024, most):
        for query_len in _query_lens(supports, length) if least <= length <= most else ():
            row = Row(length, 0, (), 1, (), query_len)
            phase = query_phase(query_len, length)
            batches = BATCHES if phase == "no query" else ("mixed", phase)
            yield ("batch", batches), *((axis.name, axis.of(row)) for axis in axes)


def _mixtures() -> Iterator[Witness]:
    yield ("sequences", ("1",)), ("batch", BATCHES[:-1])
    yield ("sequences", ("several, ragged",)), ("batch", BATCHES)
    yield ("sequences", ("several, equal",)), ("batch", BATCHES)


def _bounds(supports: Supports) -> Iterator[Witness]:
    """Bounds that are loose have to be below what a kernel declares."""
    return _one("bounds", ("tight", "loose") if supports.max_seq_len != 1 else ("tight",))


def _padding_tokens(supports: Supports) -> Iterator[Witness]:
    return _one("padding tokens", ("none", "some") if supports.padding_tokens else ("none",))


def _query_lens(supports: Supports, length: int) -> list[int]:
    """Of a sequence of ``length`` tokens, on every level that it can be on."""
    least, most = min_seq_len(supports), min(length, supports.max_query_len or length)
    return sorted({n for n in (0, 1, 2, 15, 16, 17, length - 1, length) if least <= n <= most})


def _cuts(problem: Problem, supports: Supports, options: Options, longest: int) -> Iterator[Witness]:
    """A sequence with its pages, tiles, splits and every needle that it may have or not."""
    shown = {axis.name for axis in option_axes(options)}
    least, most = min_seq_len(supports), min(longest, supports.max_seq_len or longest)
    axes = row_axes(problem, options)
    optional = {axis.name for axis in axes} & {"needle", "causal needle"}
    queries = partial(_query_lens, supports) if problem == "paged_attention" else _one_query
    for page, launch, num_splits in _ways_to_cut(problem, supports, options):
        fixed: list[tuple[str, Levels]] = [("splits", (split_class(num_splits),))]
        fixed += [("page size", (size_class(page, PAGE_CLASSES),))] if page else []
        named = ((f"option {name}", (str(value),)) for name, value in launch.items())
        fixed += [level for level in named if level[0] in shown]
        for row in _rows(Row(0, page, tile_sizes(launch), num_splits), axes, least, most, queries):
            levels = {axis.name: axis.of(row) for axis in axes}
            yield (*fixed, *(levels | {name: ("none", *levels[name]) for name in optional}).items())


def _ways_to_cut(
    problem: Problem, supports: Supports, options: Options
) -> Iterator[tuple[int, dict[str, OptionValue], int]]:
    """Page size (0: no pages), options and number of splits; sizes of one class are told by two of them."""
    pages = _extremes(block_sizes_of(supports), lambda size: size_class(size, PAGE_CLASSES))
    splits = _extremes(split_counts_of(supports), split_class)
    for page in pages if _is_paged(problem) else (0,):
        for launch in _launches(options):
            for num_splits in splits if problem == "split_decode" else (split_count(launch),):
                yield page, launch, num_splits


def _launches(options: Options) -> Iterator[dict[str, OptionValue]]:
    """Combinations of the options that cut a sequence."""
    cutting = {
        name: choices
        for name, choices in options.items()
        if any(tile_sizes({name: choice}) or split_count({name: choice}) > 1 for choice in choices)
    }
    return (dict(zip(cutting, choice, strict=True)) for choice in islice(product(*cutting.values()), _MOST_LAUNCHES))


def _one_query(length: int) -> list[int]:
    del length  # in the decode problems every sequence has one query token
    return [1]


def _rows(
    cut: Row, axes: Iterable[Axis], least: int, most: int, query_lens: Callable[[int], list[int]]
) -> Iterator[Row]:
    """Sequences cut like ``cut``, with needles wherever one can be; of those on the same levels, one."""
    steps = (*((cut.page,) if cut.page else ()), *cut.tiles)
    lengths = {*boundary_lengths(steps, cut.num_splits, most), *_long_lengths(steps, cut.num_splits), *_ANY_LENGTHS}
    rows = (
        cut._replace(length=length, query_len=query_len)
        for length in sorted(lengths)
        if least <= length <= most
        for query_len in query_lens(length)
    )
    for row in _distinct(rows, axes):
        ends = boundary_positions(row.length, steps, row.num_splits)
        limits = causal_positions(row.length, row.query_len, query_steps(row.tiles, 1))
        yield row._replace(needles=tuple(sorted({*ends, *limits})) if query_lens is not _one_query else ends)


def _distinct(rows: Iterable[Row], axes: Iterable[Axis]) -> Iterable[Row]:
    return {tuple(axis.of(row) for axis in axes): row for row in rows}.values()


def _long_lengths(steps: tuple[int, ...], num_splits: int) -> Iterator[int]:
    for step in (*steps, num_splits):
        start = -(-_LONG // step) * step
        yield from (start, start + 1, start + 2, start + step - 1)


def _extremes(values: Iterable[int], classify: Callable[[int], Hashable]) -> tuple[int, ...]:
    """The smallest and the largest of each class."""
    by_class: dict[Hashable, list[int]] = {}
    for value in sorted(values):
        by_class.setdefault(classify(value), []).append(value)
    return tuple(sorted({value for found in by_class.values() for value in (found[0], found[-1])}))
