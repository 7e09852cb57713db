"""Whether a kernel declares to support a case, and how a case of one kernel is put to another. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from attnfuzz.problems.cases import (
    AttentionCase,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    SplitDecodeCase,
)
from attnfuzz.problems.choices import lse_kinds_of, lying_alike, offers, paddings_of, permits_stride
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.shapes import strides_of, tensor_specs
from attnfuzz.problems.supports import OptionValue, Supports, as_written
from attnfuzz.problems.where import fits, value_in

__all__ = ["adapt_options", "supports_case", "why_unsupported"]

Options = Mapping[str, tuple[OptionValue, ...]]
_MOST_SHOWN = 4


def supports_case(supports: Supports, options: Options, case: Case) -> bool:
    return why_unsupported(supports, options, case) is None


def why_unsupported(supports: Supports, options: Options, case: Case) -> str | None:
    """One sentence naming the first field outside the declaration; None for a supported case.

    ``options``: the kernel's choices. The case must name every option and no other one (see ``adapt_options``).
    """
    return next(_objections(supports, options, case), None)


def adapt_options(case: Case, options: Options) -> Case:
    """``case`` for a kernel with other ``options``: what that kernel does not offer becomes its first choice."""
    adapted = {
        name: case.options[name] if name in case.options and offers(choices, case.options[name]) else choices[0]
        for name, choices in options.items()
    }
    return case if adapted == case.options else msgspec.structs.replace(case, options=adapted)


def _objections(supports: Supports, options: Options, case: Case) -> Iterator[str]:
    yield from _not_among("dtype", case.dtype, supports.dtypes)
    yield from _not_among("head_size", case.head_size, supports.head_sizes)
    if isinstance(case, MergeStatesCase):
        yield from _merge(supports, case)
    else:
        yield from _attention(supports, case)
    yield from _strides(supports, case)
    yield from _options(options, case)
    if supports.combinations and not any(fits(case, one) for one in supports.combinations):
        names = dict.fromkeys(name for one in supports.combinations for name in one)
        values = ", ".join(f"{name}={value_in(case, name)!r}" for name in names)
        shown = ", ".join(as_written(one) for one in supports.combinations[:_MOST_SHOWN])
        more = ", ..." if len(supports.combinations) > _MOST_SHOWN else ""
        yield f"{values} do not go together: the kernel declares where=({shown}{more})"


def _attention(supports: Supports, case: AttentionCase) -> Iterator[str]:
    yield from _not_among("gqa_ratio", case.gqa_ratio, supports.gqa_ratios)
    yield from _v_head_size(supports, case)
    longest = case.max_seq_len if isinstance(case, DenseDecodeCase | PagedAttentionCase) else max(case.seq_lens)
    if supports.max_seq_len is not None and longest > supports.max_seq_len:
        yield f"the case has max_seq_len={longest}, but the kernel declares at most {supports.max_seq_len}"
    if not supports.empty_sequences and 0 in case.seq_lens:
        yield f"seq_lens[{case.seq_lens.index(0)}]=0, but the kernel declares empty_sequences=False"
    if isinstance(case, SplitDecodeCase) and case.num_splits > (supports.max_num_splits or case.num_splits):
        yield f"num_splits={case.num_splits}, but the kernel declares at most {supports.max_num_splits}"
    if isinstance(case, PagedAttentionCase):
        yield from _queries(supports, case)
    if isinstance(case, PagedDecodeCase):
        yield from _not_among("block_size", case.block_size, supports.block_sizes)
        yield from _not_among("layout", case.layout, supports.layouts)
        yield from _not_among("pages.padding", case.pages.padding, paddings_of(supports))
        if case.kv is not None:
            yield from _quantised(supports, case.kv)
        for name in case.variant.names:
            if name not in supports.variants:
                yield f"variant.{name}={getattr(case.variant, name)!r}, but the kernel declares {supports.variants}"
        if case.variant.freed_pages and not supports.freed_pages:
            yield "variant.freed_pages=True, but the kernel declares freed_pages=False"


def _v_head_size(supports: Supports, case: AttentionCase) -> Iterator[str]:
    if isinstance(supports.v_head_sizes, tuple):
        yield from _not_among("v_head_size", case.value_size, supports.v_head_sizes)
    elif supports.v_head_sizes == "equal" and case.v_head_size is not None:
        yield f"v_head_size={case.v_head_size} beside head_size={case.head_size}, but the kernel declares equal ones"


def _quantised(supports: Supports, kv: QuantisedKv) -> Iterator[str]:
    if kv.dtype not in supports.kv_dtypes:
        yield f"kv.dtype={kv.dtype!r}, but the kernel declares kv_dtypes={supports.kv_dtypes}"
    elif kv.per not in supports.kv_scales:
        yield f"kv.per={kv.per!r}, but the kernel declares kv_scales={supports.kv_scales}"


def _queries(supports: Supports, case: PagedAttentionCase) -> Iterator[str]:
    if supports.max_query_len is not None and case.max_query_len > supports.max_query_len:
        most = supports.max_query_len
        yield f"the case has max_query_len={case.max_query_len}, but the kernel declares at most {most}"
    if not supports.empty_sequences and 0 in case.query_lens:
        yield f"query_lens[{case.query_lens.index(0)}]=0, but the kernel declares empty_sequences=False"
    if case.padding_tokens and not supports.padding_tokens:
        yield f"padding_tokens={case.padding_tokens}, but the kernel declares padding_tokens=False"


def _merge(supports: Supports, case: MergeStatesCase) -> Iterator[str]:
    yield from _not_among("lse_layout", case.lse_layout, (supports.lse_layout,))
    for pair in case.lse_pairs:
        for kind in pair:
            yield from _not_among("lse_pairs", kind, lse_kinds_of(supports))


def _strides(supports: Supports, case: Case) -> Iterator[str]:
    specs = tensor_specs(case) if case.strides else {}
    for name, spec in specs.items():
        kind = strides_of(case, name)
        if not permits_stride(supports.strides, name, kind, spec.shape):
            yield f"strides[{name!r}]={kind!r}, but the kernel declares strides={supports.strides!r}"
        for other in lying_alike(supports.strides, name):
            if other in specs and strides_of(case, other) != kind:
                declared = f"the kernel declares strides={supports.strides!r}, where both lie alike"
                yield f"strides[{name!r}]={kind!r} and strides[{other!r}]={strides_of(case, other)!r}, but {declared}"


def _options(options: Options, case: Case) -> Iterator[str]:
    for name, value in case.options.items():
        if name not in options:
            yield f"options[{name!r}]={value!r}, but the kernel has no such option"
        elif not offers(options[name], value):
            yield f"options[{name!r}]={value!r}, but the kernel offers {options[name]}"
    for name in options:
        if name not in case.options:
            yield f"the case leaves out options[{name!r}]; the kernel offers {options[name]}"


def _not_among(name: str, value: object, allowed: tuple[object, ...] | None) -> Iterator[str]:
    if allowed is not None and value not in allowed:
        yield f"{name}={value!r}, but the kernel declares {allowed}"
