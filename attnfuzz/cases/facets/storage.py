"""Facets that kernels are compiled for (types, layouts, strides, page sizes, options), and where pages lie.
Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, get_args

from attnfuzz.cases.facets.facet import (
    Axis,
    Change,
    Changes,
    Domain,
    Facet,
    Levels,
    Options,
    Part,
    SizeRank,
    changed,
    classes,
    not_among,
    size_class,
)
from attnfuzz.cases.facets.heads import nearest
from attnfuzz.cases.facets.sequences import rescaled, with_lengths
from attnfuzz.problems.attention import AttentionCase, CaseBase, PagedDecodeCase
from attnfuzz.problems.boundaries import has_empty_split, num_splits_of
from attnfuzz.problems.choices import (
    CACHE_TENSORS,
    block_size_rank,
    block_sizes_of,
    is_power_of_two,
    lying_alike,
    offers,
    paddings_of,
    permits_stride,
    stride_kinds_of,
)
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.fields import Choice, Integer, Integers, Proposal, Seed, first_of, number_traits
from attnfuzz.problems.module import Case, case_type_of
from attnfuzz.problems.quantised_kv import KV_SCALE_TENSORS
from attnfuzz.problems.recipes import MOST_TAKEN, STRIDE_KINDS, Padding, PageOrder, StrideKind
from attnfuzz.problems.shapes import ITEMSIZE, strided_layout, strides_of, tensor_specs
from attnfuzz.problems.supports import DTYPES, LAYOUTS, OptionValue, Supports
from attnfuzz.problems.variants import absent_tensors

CACHE_STRIDES = Feature("cache strides")
KV_STRIDES_DIFFER = Feature("K and V strides differ")
SHARED_PAGES = Feature("shared pages", role="place")
EXTRA_COLUMNS = Feature("extra columns", role="surroundings")
DEAD_ROWS = Feature("dead rows", role="size")
BLOCK_SIZE_NOT_POW2 = Feature("block_size", " not pow2")
SEVERAL_PER_PAGE = Feature("block_size", ">1", "size")
FULL_PAGE = Feature("full last page", role="size")
PARTIAL_PAGE = Feature("partial last page", role="size")
SEVERAL_PAGES = Feature("seq_len", ">block_size", "size")
SEVERAL_SPLITS = Feature("num_splits", ">1", "size")

_STRIDES = "strides:"
MOST_RESCALED = 4
_MOST_CHOICES = 2
_MANY_CHOICES = 8
_PAGE_SIZES = (16,)
_SPLITS = ("1", "2 to 4", "5 to 8", "over 8")
_COUNTED = Integer(0, 1 << 24, likely=(0, 1, 2))
_PAGE_ORDERS = get_args(PageOrder)
_DTYPE, _PADDING = Feature("dtype", "={}"), Feature("padding", "={}", "size")
_PADDINGS = get_args(Padding)


def strided(tensor: str, value: str = "") -> Feature:
    """The feature of ``tensor``'s strides; without ``value``, that they are not those of the simplest case."""
    return Feature(f"{_STRIDES}{tensor}", value)


def strided_tensor(feature: Feature) -> str:
    """The tensor of whose strides it is said; empty if it is said of something else."""
    return feature.field.removeprefix(_STRIDES) if feature.field.startswith(_STRIDES) else ""


class Splits(Facet[AttentionCase]):
    """Into how many parts each sequence is cut, whether the case says so or an option."""

    def features(self, case: AttentionCase) -> Iterator[Feature]:
        num_splits = num_splits_of(case)
        if num_splits > 1:
            yield SEVERAL_SPLITS
            if any(has_empty_split(seq_len, num_splits) for seq_len in case.seq_lens):
                yield Feature("empty split")

    def traits(self, case: AttentionCase) -> Iterator[Feature]:
        yield from number_traits("num_splits", num_splits_of(case))

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("splits", _SPLITS, lambda case: (_split_class(num_splits_of(case)),))


def _split_class(num_splits: int) -> str:
    return "1" if num_splits == 1 else "2 to 4" if num_splits <= 4 else "5 to 8" if num_splits <= 8 else "over 8"


class BlockSize(Facet[PagedDecodeCase]):
    """How many tokens a page holds."""

    fields = ("block_size",)
    asked = 0

    def features(self, case: PagedDecodeCase) -> Iterator[Feature]:
        if case.block_size > 1:
            yield SEVERAL_PER_PAGE
        if not is_power_of_two(case.block_size):
            yield BLOCK_SIZE_NOT_POW2
        if max(case.seq_lens) > case.block_size:
            yield SEVERAL_PAGES
        if any(seq_len % case.block_size for seq_len in case.seq_lens):
            yield PARTIAL_PAGE
        if case.block_size > 1 and any(seq_len and seq_len % case.block_size == 0 for seq_len in case.seq_lens):
            yield FULL_PAGE

    def traits(self, case: PagedDecodeCase) -> Iterator[Feature]:
        yield from number_traits("block_size", case.block_size) | number_traits("columns", case.max_blocks_per_seq)
        if max(case.seq_lens) <= case.block_size:
            yield Feature("one page holds any sequence")
        if all(length % case.block_size == 0 for length in case.seq_lens):
            yield Feature("every page is full")

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("page size", classes(_PAGE_SIZES), lambda case: (size_class(case.block_size, _PAGE_SIZES),))

    def objections(self, case: PagedDecodeCase, domain: Domain) -> Iterator[str]:
        yield from not_among("block_size", case.block_size, domain.supports.block_sizes)

    def size(self, case: PagedDecodeCase, options: Options) -> Iterator[tuple[SizeRank, object]]:
        """The fewest pages, each as small as can be."""
        yield SizeRank.STORAGE, sum(case.blocks_of(i) for i in range(case.num_seqs))
        yield SizeRank.STORAGE, block_size_rank(case.block_size)

    def shrink(self, case: PagedDecodeCase, domain: Domain) -> Proposal[PagedDecodeCase]:
        """Fewer pages for the same tokens; or smaller pages with lengths that end at the same place of a page."""
        sizes = block_sizes_of(domain.supports)
        simplest: dict[tuple[int, bool], int] = {}
        for size in sizes:
            pages = sum(-(-length // size) for length in case.seq_lens)
            simplest.setdefault((pages, not is_power_of_two(size)), size)
        found = yield from first_of(case, [changed(case, block_size=size) for _, size in sorted(simplest.items())])
        smaller = [size for size in sizes if size < found.block_size]
        alike = [size for size in smaller if is_power_of_two(size) == is_power_of_two(found.block_size)]
        for size in dict.fromkeys((*smaller[:MOST_RESCALED], *alike[:MOST_RESCALED])):
            followed = rescaled(found, found.block_size, size)
            full = with_lengths(found, [found.blocks_of(seq) * size for seq in range(found.num_seqs)])
            found = yield from first_of(found, [one and changed(one, block_size=size) for one in (followed, full)])
        return found

    def changes(self, case: PagedDecodeCase, domain: Domain) -> Iterator[Change]:
        for size in nearest(block_sizes_of(domain.supports), case.block_size):
            yield f"block_size {size} instead of {case.block_size}", {"block_size": size}

    def alternatives(self, case: PagedDecodeCase, domain: Domain) -> Iterator[Changes]:
        """As many pages as can be, one that is full, and one that is not; of full ones, one token more."""
        sizes, longest = block_sizes_of(domain.supports), max(case.seq_lens)
        full = longest if longest in sizes else None
        larger = next((size for size in sorted(sizes) if size > longest), None)
        others = (size for size in (min(sizes), full, larger) if size not in (None, case.block_size))
        yield from ({"block_size": size} for size in others)
        if FULL_PAGE in self.features(case):
            yield {"seq_lens": tuple(seq_len + 1 for seq_len in case.seq_lens)}


class Dtype(Facet[CaseBase]):
    """The type of q and of what is returned, and of K and V unless the cache has another."""

    fields = ("dtype",)
    jumps_with = "format"
    asked = 2
    parts = (
        Part(
            "dtype",
            Choice(DTYPES),
            SizeRank.DTYPE,
            Feature("dtype", "={}"),
            "{}",
            "dtype",
            tries_others=True,
            supports="dtypes",
        ),
    )


class CacheLayout(Facet[PagedDecodeCase]):
    """The order of the dimensions of a paged cache."""

    fields = ("layout",)
    jumps_with = "format"
    parts = (
        Part(
            "layout",
            Choice(LAYOUTS),
            SizeRank.STORAGE,
            Feature("layout", "={}"),
            "layout {}",
            "layout",
            tries_others=True,
            supports="layouts",
        ),
    )

    def general(self, case: PagedDecodeCase, domain: Domain) -> Iterator[Feature]:
        """Another layout moves K and V in memory, as strides do."""
        if case.layout != domain.simplest.layout:
            yield from (strided("k_cache"), strided("v_cache"), CACHE_STRIDES)


class PageMap(Facet[PagedDecodeCase]):
    """Where the pages lie in the cache, and what else the block table names."""

    fields = ("pages",)
    jumps_with = "storage"
    parts = (
        Part("pages.order", Choice(_PAGE_ORDERS), SizeRank.STORAGE, Feature("pages", "={}", "place"), "page order {}"),
        Part(
            "pages.padding",
            Choice(_PADDINGS),
            SizeRank.STORAGE,
            Feature("padding", "={}", "size"),
            "unused table entries {}",
        ),
        Part("pages.shared_blocks", _COUNTED, SizeRank.STORAGE, SHARED_PAGES, "shared pages {}"),
        Part("pages.spare_blocks", _COUNTED, SizeRank.STORAGE, Feature("spare blocks", role="place"), "spare pages {}"),
        Part("pages.extra_columns", _COUNTED, SizeRank.STORAGE, EXTRA_COLUMNS, "unused table columns {}"),
        Part("pages.seed", Seed(), SizeRank.STORAGE),
        Part(
            "pages.taken",
            Integers(0, 1 << 20, least=0, most=MOST_TAKEN),
            SizeRank.STORAGE,
            Feature("pages as recorded", role="place"),
            "pages taken {}",
        ),
    )

    def features(self, case: PagedDecodeCase) -> Iterator[Feature]:
        yield from (one for one in super().features(case) if one != SHARED_PAGES or case.num_seqs > 1)

    def without(self, feature: Feature, case: PagedDecodeCase, domain: Domain) -> Iterator[Changes]:
        if feature == SHARED_PAGES and case.pages.shared_blocks:
            yield case.with_own_pages()

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("page order", (*_PAGE_ORDERS, "shared"), _orders)
        yield Axis("table padding", ("none", *_PADDINGS), _padding)

    def objections(self, case: PagedDecodeCase, domain: Domain) -> Iterator[str]:
        yield from not_among("pages.padding", case.pages.padding, paddings_of(domain.supports))


def _orders(case: PagedDecodeCase) -> Levels:
    shared = case.pages.shared_blocks and len(case.seq_lens) > 1
    return (case.pages.order, "shared") if shared else (case.pages.order,)


def _padding(case: PagedDecodeCase) -> Levels:
    """The contents of unused block-table entries, if there are any."""
    blocks = {-(-seq_len // case.block_size) for seq_len in case.seq_lens}
    unused = case.pages.extra_columns or len(blocks) > 1 or 0 in blocks
    return (case.pages.padding,) if unused else ("none",)


class TensorStrides(Facet[CaseBase]):
    """How each tensor lies in memory."""

    fields = ("strides",)
    jumps_with = "storage"
    asked = 2

    def features(self, case: CaseBase) -> Iterator[Feature]:
        yield from (strided(name, f"={kind}") for name, kind in case.strides.items() if kind != "contiguous")

    def general(self, case: CaseBase, domain: Domain) -> Iterator[Feature]:
        """Whether K or V has strides of its own, and whether the numbers of both differ."""
        if any(_kind(case, name) != "contiguous" for names in CACHE_TENSORS for name in names):
            yield CACHE_STRIDES
        if _kv_strides_differ(case) and not _kv_strides_differ(domain.simplest):
            yield KV_STRIDES_DIFFER

    def traits(self, case: CaseBase) -> Iterator[Feature]:
        yield from (strided(name, f" is {_kind(case, name)}") for name in case.tensor_names)

    def axes(self, domain: Domain) -> Iterator[Axis]:
        """The kinds of strides among tensors of one use; "contiguous" if all of them are."""
        case_type: Any = case_type_of(domain.problem)
        for axis, tensors in _STRIDES_OF.items():
            if set(tensors) & set(case_type.tensor_names):
                yield Axis(axis, STRIDE_KINDS, partial(_strides_of, frozenset(tensors)))

    def objections(self, case: CaseBase, domain: Domain) -> Iterator[str]:
        yield from (sentence for _, sentence in wrong_strides(domain.supports, case))

    def size(self, case: CaseBase, options: Options) -> Iterator[tuple[SizeRank, object]]:
        strides = sorted((name, STRIDE_KINDS.index(kind)) for name, kind in case.strides.items())
        strided = tuple((name, kind) for name, kind in strides if kind)
        yield SizeRank.STRIDES, (len(strided), sum(kind for _, kind in strided))
        yield SizeRank.EACH_STRIDE, strided

    def shrink(self, case: CaseBase, domain: Domain) -> Proposal[CaseBase]:
        """Each tensor as near to contiguous as it can be, together with those that lie alike."""
        allowed = domain.supports.strides
        for names in self._alike(case, domain):
            kinds = stride_kinds_of(allowed, names[0])
            strided = [name for name in names if name in case.strides]
            case = yield from first_of(case, [changed(case, **with_strides(case, strided, kind)) for kind in kinds])
        return case

    def changes(self, case: CaseBase, domain: Domain) -> Iterator[Change]:
        for names in self._alike(case, domain):
            strided = [name for name in names if _kind(case, name) != "contiguous"]
            words = f"{' and '.join(strided)} contiguous instead of {case.strides[strided[0]]}"
            yield words, with_strides(case, strided, "contiguous")

    def alternatives(self, case: CaseBase, domain: Domain) -> Iterator[Changes]:
        for name, kind in case.strides.items():
            kinds = stride_kinds_of(domain.supports.strides, name)
            yield from (with_strides(case, [name], other) for other in kinds if other not in ("contiguous", kind))

    def without(self, feature: Feature, case: CaseBase, domain: Domain) -> Iterator[Changes]:
        layout = {"layout": domain.simplest.layout} if hasattr(domain.simplest, "layout") else {}
        caches = cache_names(case)
        if feature == KV_STRIDES_DIFFER:
            yield from self._both_alike(case, layout)
        elif feature == CACHE_STRIDES:
            yield {**layout, **with_strides(case, caches, "contiguous")}
        elif name := strided_tensor(feature):
            yield with_strides(case, lying_alike(domain.supports.strides, name), "contiguous")

    def follow(self, case: CaseBase, changes: Changes) -> Changes:
        """Tensors that are gone have no strides; where one cache becomes two, both lie as it did."""
        if "strides" in changes:
            return {}
        gone: set[str] = set()
        if "variant" in changes:
            gone |= absent_tensors(changes["variant"])
        if "kv" in changes and changes["kv"] is None:
            gone |= set(KV_SCALE_TENSORS)
        strides = {name: kind for name, kind in case.strides.items() if name not in gone}
        was_one = getattr(case, "layout", None) == "interleaved"
        if was_one and changes.get("layout", "interleaved") != "interleaved" and "k_cache" in strides:
            strides["v_cache"] = strides["k_cache"]
        return {} if strides == case.strides else {"strides": strides}

    def _alike(self, case: CaseBase, domain: Domain) -> Iterator[tuple[str, ...]]:
        strided = sorted(name for name, kind in case.strides.items() if kind != "contiguous")
        yield from dict.fromkeys(lying_alike(domain.supports.strides, name) for name in strided)

    def _both_alike(self, case: CaseBase, simplest_layout: Changes) -> Iterator[Changes]:
        """The strides of K for V too, and those of V for K: of heads of one size. Packed caches know no such thing."""
        k, v = cache_names(case)
        layout = simplest_layout if getattr(case, "layout", None) == "packed" else {}
        sizes = {"v_head_size": None} if getattr(case, "v_head_size", None) is not None else {}
        for kind in dict.fromkeys((_kind(case, k), _kind(case, v))):
            if layout or sizes or kind != "contiguous":
                yield {**layout, **sizes, **with_strides(case, (k, v), kind)}


def _kv_strides_differ(case: Case) -> bool:
    """Also where only a gap behind the one sequence or page differs: relations may add others to it."""
    specs = tensor_specs(case)
    for names in CACHE_TENSORS:
        if set(names) <= specs.keys():
            gaps = {strides_of(case, name) for name in names}
            return len(gaps - {"offset"}) > 1 or len({_effective_strides(case, name) for name in names}) > 1
    return False


def _effective_strides(case: Case, name: str) -> tuple[int, ...]:
    """The strides of tensor ``name``, with 0 where its only index is 0."""
    shape, dtype = tensor_specs(case)[name][:2]
    strides = strided_layout(shape, strides_of(case, name), ITEMSIZE[dtype]).strides
    return tuple(stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True))


def cache_names(case: CaseBase) -> tuple[str, str]:
    """Names of the tensors of K and V; empty where there are none."""
    of_case = (names for names in CACHE_TENSORS if set(names) <= set(case.tensor_names))
    return next(((names[0], names[-1]) for names in of_case), ("", ""))


def strides_swapped(case: Any) -> Changes:
    """The strides of K and V exchanged."""
    k, v = cache_names(case)
    swapped = {name: kind for name, kind in ((k, _kind(case, v)), (v, _kind(case, k))) if kind != "contiguous"}
    return {"strides": {name: kind for name, kind in case.strides.items() if name not in (k, v)} | swapped}


def _kind(case: CaseBase, name: str) -> StrideKind:
    return case.strides.get(name, "contiguous")


def with_strides(case: CaseBase, names: Sequence[str], kind: StrideKind) -> dict[str, Any]:
    """Other strides of tensors ``names``. What is contiguous is left out: a case is written in one way only."""
    others = {name: stride for name, stride in case.strides.items() if name not in names and stride != "contiguous"}
    return {"strides": others if kind == "contiguous" else {**others, **dict.fromkeys(names, kind)}}


def wrong_strides(supports: Supports, case: CaseBase) -> Iterator[tuple[str, str]]:
    """Each tensor that may not lie as it does, or not beside another that lies otherwise, and a sentence on it."""
    specs = tensor_specs(case) if case.strides else {}
    for name, spec in specs.items():
        kind = strides_of(case, name)
        if not permits_stride(supports.strides, name, kind, spec.shape):
            yield name, f"strides[{name!r}]={kind!r}, but the kernel declares strides={supports.strides!r}"
        for other in lying_alike(supports.strides, name):
            if other in specs and strides_of(case, other) != kind:
                declared = f"the kernel declares strides={supports.strides!r}, where both lie alike"
                both = f"strides[{name!r}]={kind!r} and strides[{other!r}]={strides_of(case, other)!r}"
                yield name, f"{both}, but {declared}"


_STRIDES_OF = {
    "cache strides": ("k", "v", "k_cache", "v_cache", "kv_cache"),
    "other strides": (
        "q", "block_table", "seq_lens", "cu_seqlens_q", "out", "lse", "partial_out", "partial_lse"
    ),
    "input strides": ("prefix_output", "suffix_output", "prefix_lse", "suffix_lse"),
    "result strides": ("output", "output_lse"),
}  # fmt: skip


def _strides_of(names: frozenset[str], case: CaseBase) -> Levels:
    kinds = {kind for name, kind in case.strides.items() if name in names and kind != "contiguous"}
    return tuple(kinds) or ("contiguous",)


class KernelOptions(Facet[Any]):
    """The choices of a kernel's own options."""

    fields = ("options",)
    jumps_with = "options"
    asked = 2

    def told(self, case: Any) -> Iterator[str]:
        yield from (f"{name}={value}" for name, value in case.options.items())

    def features(self, case: Any) -> Iterator[Feature]:
        yield from (Feature(f"option {name}", f"={value}") for name, value in case.options.items())

    def traits(self, case: Any) -> Iterator[Feature]:
        for name, value in case.options.items():
            if type(value) is int:
                yield from number_traits(f"option {name}", value)
            else:
                yield Feature(f"option {name}", f" is {value}")

    def axes(self, domain: Domain) -> Iterator[Axis]:
        """One for each option with a few choices; split counts have an axis of their own."""
        for name, choices in domain.options.items():
            if 1 < len(choices) <= _MANY_CHOICES and not _counts_splits(name, choices):
                yield Axis(f"option {name}", tuple(map(str, choices)), partial(_option, name))

    def objections(self, case: Any, domain: Domain) -> Iterator[str]:
        for name, value in case.options.items():
            if name not in domain.options:
                yield f"options[{name!r}]={value!r}, but the kernel has no such option"
            elif not offers(domain.options[name], value):
                yield f"options[{name!r}]={value!r}, but the kernel offers {domain.options[name]}"
        for name, choices in domain.options.items():
            if name not in case.options:
                yield f"the case leaves out options[{name!r}]; the kernel offers {choices}"

    def size(self, case: Any, options: Options) -> Iterator[tuple[SizeRank, object]]:
        chosen = sorted(case.options.items())
        yield SizeRank.OPTIONS, tuple(_option_rank(value, options.get(name, ())) for name, value in chosen)

    def shrink(self, case: Any, domain: Domain) -> Proposal[Any]:
        """Each to an earlier choice; then again, if it is a number of tokens, with lengths that follow it."""
        for name, choices in sorted(domain.options.items()):
            case = yield from first_of(case, [changed(case, **_with_option(case, name, choice)) for choice in choices])
            old = case.options.get(name)
            if isinstance(case, AttentionCase) and isinstance(old, int):
                followed = [(choice, rescaled(case, old, choice)) for choice in choices if isinstance(choice, int)]
                case = yield from first_of(
                    case, [other and changed(other, **_with_option(other, name, new)) for new, other in followed]
                )
        return case

    def changes(self, case: Any, domain: Domain) -> Iterator[Change]:
        for name, choices in sorted(domain.options.items()):
            old = case.options.get(name)
            for choice in [choice for choice in choices if choice != old][:_MOST_CHOICES]:
                yield f"{name}={choice} instead of {old}", _with_option(case, name, choice)

    def alternatives(self, case: Any, domain: Domain) -> Iterator[Changes]:
        for name, value in case.options.items():
            first, *others = domain.options[name]
            if value != first:
                yield from (_with_option(case, name, other) for other in others if other != value)


def _with_option(case: Any, name: str, value: OptionValue) -> dict[str, Any]:
    return {"options": {**case.options, name: value}}


def _option_rank(value: OptionValue, choices: tuple[OptionValue, ...]) -> tuple[Any, ...]:
    """Its place among the choices; without any, the number of its type keeps values of different types comparable."""
    ranks = [i for i, choice in enumerate(choices) if type(choice) is type(value) and choice == value]
    return (0, ranks[0]) if ranks else (1, isinstance(value, str), value)


def _counts_splits(name: str, choices: tuple[OptionValue, ...]) -> bool:
    return "split" in name.lower() and all(isinstance(choice, int) for choice in choices)


def _option(name: str, case: Any) -> Levels:
    return (str(case.options[name]),) if name in case.options else ()
