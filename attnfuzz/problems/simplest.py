"""The simplest case that a kernel supports: the minimum that shrinking can reach. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from attnfuzz.problems.attention import AttentionCase, PagedDecodeCase
from attnfuzz.problems.choices import (
    block_size_rank,
    caches_of,
    dtypes_of,
    head_size_rank,
    head_sizes_of,
    layouts_of,
    needed_variants,
    options_of,
    variants_of,
)
from attnfuzz.problems.combinations import alternatives, narrowed, put_into, simplest_queries
from attnfuzz.problems.module import Case, Problem, case_type_of, has_query_lens, module_of
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.quantised_kv import KV_GRANULARITIES, QuantisedKv
from attnfuzz.problems.supports import DTYPES, LAYOUTS, Dtype, Layout, OptionValue, Supports, as_written
from attnfuzz.problems.variants import PLAIN_VARIANT, with_variants

Options = Mapping[str, tuple[OptionValue, ...]]


def simplest_case(problem: Problem, supports: Supports, options: Options) -> Case:
    """One sequence of one token, one KV head, everything else at its first choice.

    Of several combinations that ``where`` permits, of the one whose simplest case is the simplest. Raises ValueError if
    no supported head size fits any supported layout and dtype, or no combination anything else that is declared.
    """
    return simplest_cases(problem, supports, options)[0][1]


def simplest_cases(problem: Problem, supports: Supports, options: Options) -> list[tuple[Supports, Case]]:
    """The simplest case of each combination of ``where`` that there are cases of, the simplest first.

    Each with ``supports`` as if that combination were the only one. Raises ValueError where there are none.
    """
    if isinstance(problem, OpenProblem):
        first = problem.case_type(options={name: choices[0] for name, choices in options.items()})
        own = [(one, put_into(first, next(iter(one.combinations), {}))) for one in alternatives(supports)]
        return sorted(own, key=lambda entry: entry[1] != first)
    supports = narrowed(problem, supports)
    each = [(one, _simplest(problem, one, options)) for one in alternatives(supports)]
    found = [(one, case) for one, case in each if case is not None]
    if found:
        return sorted(found, key=lambda entry: _rank(entry[1], options)) if len(found) > 1 else found
    if supports.combinations:
        raise ValueError(
            f"Supports(where={as_written(supports.combinations):.200}): no case has any of these combinations beside "
            "the other fields and the options that are declared; correct one of them"
        )
    raise ValueError(
        f"Supports(head_sizes={supports.head_sizes!r}, layouts={supports.layouts!r}): the packed layout needs head "
        "sizes that are multiples of 8 (4 for float32), the interleaved one such as are among "
        f"v_head_sizes={supports.v_head_sizes!r}; add such a size or another layout"
    )


def check_combinations(problem: Problem, supports: Supports, options: Options) -> None:
    """Raise ValueError for a value in ``where`` that no supported case has: it is a mistake, there or elsewhere."""
    each = [] if isinstance(problem, OpenProblem) else alternatives(supports)  # fields that go with any others
    for i, one in enumerate(each):
        for name, values in next(iter(one.combinations), {}).items():
            for value in values:
                table = ({**one.combinations[0], name: (value,)},)
                if _simplest(problem, msgspec.structs.replace(one, where=table), options) is None:
                    raise ValueError(
                        f"Supports(where[{i}]={as_written(one.combinations[0]):.200}): no case has {name}={value!r} "
                        "there beside the other fields that are declared; leave it out, or permit it in its own field"
                    )


def _simplest(problem: Problem, supports: Supports, options: Options) -> Case | None:
    """None if there is no case at all. ``supports`` has one combination at most."""
    first = {name: choices[:1] for name, choices in options_of(supports, options).items()}
    found = next(_formats(problem, supports), None)
    if found is None or () in first.values():
        return None
    dtype, kv, layout, head_size = found
    module = module_of(problem)
    fields = module.simplest_fields(supports, head_size, layout)
    if fields is None:
        return None
    (combination,) = supports.combinations or ({},)
    needed = needed_variants(supports)
    if not {*needed} <= {*variants_of(problem, supports)} or {"alibi", "soft_cap"} <= {*needed}:
        return None
    if needed:
        fields["variant"] = with_variants(PLAIN_VARIANT, needed)
    if "causal" in combination:
        fields["causal"] = combination["causal"][0]
        if not (fields["causal"] or supports.non_causal):
            return None
    if has_query_lens(problem):
        fields |= simplest_queries(combination)
        longest = {"max_query_len": fields["query_lens"], "max_seq_len": fields["seq_lens"]}
        if any(max(lengths) > (getattr(supports, name) or max(lengths)) for name, lengths in longest.items()):
            return None
    fields |= {"dtype": dtype, "head_size": head_size, "kv": kv, "layout": layout}
    fields["options"] = {name: choice for name, (choice,) in first.items()}
    names = module.case_type.__struct_fields__
    return module.case_type(**{name: value for name, value in fields.items() if name in names})


def _formats(problem: Problem, supports: Supports) -> Iterator[tuple[Dtype, QuantisedKv | None, Layout | None, int]]:
    """Combinations of dtype, cache, layout and head size, the simplest first."""
    layouts = layouts_of(supports) if issubclass(case_type_of(problem), PagedDecodeCase) else (None,)
    per = next(one for one in KV_GRANULARITIES if one in supports.kv_scales)
    for dtype in dtypes_of(supports):
        for cache in caches_of(problem, supports, dtype):
            kv = None if cache is None else QuantisedKv(dtype=cache, per=per)
            for layout in layouts:
                for head_size in head_sizes_of(supports, cache or dtype, layout):
                    yield dtype, kv, layout, head_size


def _rank(case: Any, options: Options) -> tuple[Any, ...]:
    """In the order in which shrinking takes one case for simpler than another."""
    heads: tuple[Any, ...] = (case.num_q_heads, head_size_rank(case.head_size), head_size_rank(case.value_size))
    if isinstance(case, AttentionCase):
        heads = (case.num_q_heads, case.num_kv_heads, case.v_head_size is not None, *heads[1:])
    if isinstance(case, PagedDecodeCase):
        heads += (case.partial_states or 1, block_size_rank(case.block_size), LAYOUTS.index(case.layout))
    chosen = tuple(options[name].index(value) for name, value in sorted(case.options.items()))
    quantised = isinstance(case, AttentionCase) and case.kv is not None
    return (*heads, DTYPES.index(case.dtype), chosen, quantised)
