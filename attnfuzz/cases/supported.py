"""Whether a kernel declares to support a case, and how a case of one kernel is put to another. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from attnfuzz.cases.facets import Domain, facets_of
from attnfuzz.cases.facets.storage import wrong_strides
from attnfuzz.problems.attention import AttentionCase, CaseBase, PagedDecodeCase, packed_width
from attnfuzz.problems.cases import Case
from attnfuzz.problems.choices import (
    block_sizes_of,
    layouts_of,
    lying_alike,
    offers,
    paddings_of,
    split_counts_of,
)
from attnfuzz.problems.combinations import fits, narrowed, value_in
from attnfuzz.problems.masks import CAUSAL_MASK
from attnfuzz.problems.module import CASE_TYPES, Problem, has_query_lens, module_of
from attnfuzz.problems.open_cases import OpenCase, OpenProblem
from attnfuzz.problems.recipes import StrideKind
from attnfuzz.problems.shapes import named_in_strides
from attnfuzz.problems.supports import OptionValue, Supports, as_written

Options = Mapping[str, tuple[OptionValue, ...]]
_MOST_SHOWN = 4
C = TypeVar("C", bound=Case)
_PAGE = 16
"""Size of the pages into which a dense K and V are put, where the kernel takes it."""
_SAME_TENSOR = {"k": "k_cache", "v": "v_cache", "k_cache": "k", "v_cache": "v"}


def supports_case(supports: Supports, options: Options, case: Case) -> bool:
    return why_unsupported(supports, options, case) is None


def why_unsupported(supports: Supports, options: Options, case: Case) -> str | None:
    """One sentence naming the first field outside the declaration; None for a supported case.

    ``options``: the kernel's choices. The case must name every option and no other one (see ``adapt_options``).
    """
    return next(_objections(narrowed(case.problem, supports), options, case), None)


def adapt_options(case: C, options: Options) -> C:
    """``case`` for a kernel with other ``options``: what that kernel does not offer becomes its first choice."""
    adapted = {
        name: case.options[name] if name in case.options and offers(choices, case.options[name]) else choices[0]
        for name, choices in options.items()
    }
    return case if adapted == case.options else msgspec.structs.replace(case, options=adapted)


class Translated(NamedTuple):
    """A case as another kernel takes it, and what was changed for that, each in a few words."""

    case: Case
    changes: tuple[str, ...]


def translate(case: Case, problem: Problem, supports: Supports, options: Options) -> Translated | None:
    """The case of another kernel for one of ``problem``; None where that problem has no such case.

    Only what describes the same attention in another way is changed: the problem, the layout, how tensors lie in
    memory, what unused table entries hold, how an empty state is marked. Lengths, heads, sizes, dtypes, numbers and
    variants stay as they are, and pages as large; whether the kernel supports those is `why_unsupported`'s to say.
    """
    if isinstance(case, OpenCase) or isinstance(problem, OpenProblem):
        return _as_now(case, problem, options)
    fields = msgspec.structs.asdict(case)
    changes = [f"as {problem}"] if problem != case.problem else []
    if problem != case.problem and not _convert(case, problem, supports, fields):
        return None
    names = CASE_TYPES[problem].__struct_fields__
    fields = {name: value for name, value in fields.items() if name in names}
    changes += [*module_of(problem).as_supported(fields, supports), *_cached_alike(supports, fields)]
    fields["strides"] = _strides_in(problem, case, fields.get("layout"))
    made = adapt_options(CASE_TYPES[problem](**fields), options)
    plain, left_out = _permitted_strides(supports, made)
    return Translated(plain, (*changes, *(f"{name} contiguous" for name in left_out)))


def _as_now(case: Case, problem: Problem, options: Options) -> Translated | None:
    """A case of an open problem whose fields may have changed since it was written; None of another problem."""
    if not isinstance(case, OpenCase) or not isinstance(problem, OpenProblem) or not problem.is_same(case.problem):
        return None
    try:
        made = problem.refitted(case)
    except ValueError:
        return None
    return Translated(adapt_options(made, options), ())


def _convert(case: Any, problem: str, supports: Supports, fields: dict[str, Any]) -> bool:
    """Make ``fields`` those of ``problem``; False where that has no such case."""
    kind = CASE_TYPES[problem]
    if not isinstance(case, AttentionCase) or not issubclass(kind, AttentionCase):
        return False
    if case.values_in_keys or kind.values_in_keys:
        return False
    if case.kv is not None and not issubclass(kind, PagedDecodeCase):
        return False
    if not {*case.variant.names} <= {*kind.variant_names}:
        return False
    if getattr(case, "mask", CAUSAL_MASK) != CAUSAL_MASK:
        return False
    if has_query_lens(case.problem) and case.query_counts != tuple(min(1, keys) for keys in case.seq_lens):
        return False
    if not case.page_size:
        sizes = block_sizes_of(supports)
        fields.update(block_size=_PAGE if _PAGE in sizes or not sizes else sizes[0])
    if has_query_lens(problem):
        fields.update(query_lens=tuple(min(1, keys) for keys in case.seq_lens))
        return any(case.seq_lens)
    if "num_splits" in kind.__struct_fields__:
        fields.update(num_splits=min((count for count in split_counts_of(supports) if count > 1), default=1))
    return True


def _cached_alike(supports: Supports, fields: dict[str, Any]) -> Iterator[str]:
    if fields.get("layout", supports.layouts[0]) not in supports.layouts:
        width = packed_width(fields["dtype"] if fields["kv"] is None else fields["kv"].dtype)
        misfits = {"packed": fields["head_size"] % width, "interleaved": fields["v_head_size"]}
        if (other := next((one for one in layouts_of(supports) if not misfits.get(one)), None)) is not None:
            fields["layout"] = other
            yield f"layout {other}"
    pages = fields.get("pages")
    if pages is not None and pages.padding not in paddings_of(supports):
        fields["pages"] = msgspec.structs.replace(pages, padding=paddings_of(supports)[-1])
        yield f"unused table entries {fields['pages'].padding}"


def _strides_in(problem: str, case: CaseBase, layout: str | None) -> dict[str, StrideKind]:
    """The strides of ``case`` by what ``problem`` calls its tensors; in the interleaved layout V lies as K does."""
    given = dict(case.strides)
    if getattr(case, "layout", None) == "interleaved" and "k_cache" in given:
        given["v_cache"] = given["k_cache"]
    if layout == "interleaved":
        given.pop("v_cache", None)
    names = CASE_TYPES[problem].tensor_names
    renamed = {name if name in names else _SAME_TENSOR.get(name, ""): kind for name, kind in given.items()}
    return {name: kind for name, kind in renamed.items() if name in names}


def _permitted_strides(supports: Supports, case: CaseBase) -> tuple[CaseBase, tuple[str, ...]]:
    """``case`` with those tensors contiguous that must be, and their names."""
    left_out: list[str] = []
    while (culprit := next(wrong_strides(supports, case), None)) is not None:
        name = named_in_strides(case, culprit[0])
        left_out.append(name)
        alike = (name, *lying_alike(supports.strides, name))
        kept = {other: kind for other, kind in case.strides.items() if other not in alike}
        case = msgspec.structs.replace(case, strides=kept)
    return case, tuple(left_out)


def _objections(supports: Supports, options: Options, case: Case) -> Iterator[str]:
    domain = Domain(case.problem, supports, options)
    for facet in facets_of(type(case)):
        yield from facet.objections(case, domain)
    if supports.combinations and not any(fits(case, one) for one in supports.combinations):
        names = dict.fromkeys(name for one in supports.combinations for name in one)
        values = ", ".join(f"{name}={value_in(case, name)!r}" for name in names)
        shown = ", ".join(as_written(one) for one in supports.combinations[:_MOST_SHOWN])
        more = ", ..." if len(supports.combinations) > _MOST_SHOWN else ""
        yield f"{values} do not go together: the kernel declares where=({shown}{more})"
