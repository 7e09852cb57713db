"""attnfuzz.cases.facets: what is said of a field is said by its facet, to all that go through them."""

from __future__ import annotations

import pytest

from attnfuzz.cases.facets import Domain, changed, facets_of
from attnfuzz.cases.features import InputSpace, features
from attnfuzz.cases.supported import why_unsupported
from attnfuzz.minimise import simplifications
from attnfuzz.problems.cases import PROBLEMS, PagedDecodeCase, Problem, case_type_of
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.fields import Choice, Integer
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.supports import Supports
from tests.unit.named_features import words

CASE = PagedDecodeCase(
    num_q_heads=1,
    num_kv_heads=1,
    head_size=64,
    v_head_size=128,
    seq_lens=(1,),
    scale=default_scale(64),
    block_size=1,
)


OPEN = OpenProblem(place="x.py:Copy", fields={"n": Integer(0, 100), "kind": Choice(("a", "b"))})


@pytest.mark.parametrize("problem", [*PROBLEMS, OPEN], ids=str)
def test_each_field_of_a_case_is_that_of_one_facet(problem: Problem) -> None:
    """A field of no facet would be drawn, and never shrunk or told; one of two would be told twice."""
    case_type = case_type_of(problem)
    owned = [name for facet in facets_of(case_type) for name in facet.fields]
    assert sorted(owned) == sorted(case_type.__struct_fields__)


def test_types_that_derive_from_a_case_have_its_facets() -> None:
    """A new kind of attention would lose what is said of the fields that it inherits."""

    class Derived(PagedDecodeCase, frozen=True, kw_only=True):
        pass

    assert facets_of(Derived) == facets_of(PagedDecodeCase) != ()


def test_one_facet_is_told_everywhere() -> None:
    """A size of V that matters would be missing from a finding, from the coverage or from what shrinking tries."""
    supports = Supports(v_head_sizes="any")
    assert {"v_head_size", "v_head_size>head_size"} <= words(features(CASE))
    assert "V head size" in [axis.name for axis in InputSpace("paged_decode", supports, {}).axes]
    assert "V head size" not in [axis.name for axis in InputSpace("paged_decode", Supports(), {}).axes]
    assert "v_head_size=128" in str(why_unsupported(Supports(), {}, CASE))
    domain = Domain("paged_decode", supports, {})
    told = dict(change for facet in facets_of(type(CASE)) for change in facet.changes(CASE, domain))
    smaller = changed(CASE, **told["v_head_size 64 instead of 128"])
    assert smaller in list(simplifications(CASE, supports=supports, options={}))
