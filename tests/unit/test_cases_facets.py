"""attnfuzz.cases.facets: what is said of a field is said by its facet, to all that go through them."""

from __future__ import annotations

from attnfuzz.cases.domain import Domain
from attnfuzz.cases.facets import facets_of
from attnfuzz.minimise import simplifications
from attnfuzz.problems.cases import PROBLEMS, AttentionCase, PagedDecodeCase, case_type_of
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.features import features
from attnfuzz.problems.input_space import InputSpace
from attnfuzz.problems.supported import why_unsupported
from attnfuzz.problems.supports import Supports

CASE = PagedDecodeCase(
    num_q_heads=1,
    num_kv_heads=1,
    head_size=64,
    v_head_size=128,
    seq_lens=(1,),
    scale=default_scale(64),
    block_size=1,
)


def test_facets_own_fields_of_their_cases() -> None:
    """A field that no case has would be looked up in vain, and one of two facets would be told twice."""
    for problem in PROBLEMS:
        case_type = case_type_of(problem)
        owned = [name for facet in facets_of(case_type) for name in facet.fields]
        assert set(owned) <= set(case_type.__struct_fields__)
        assert len(set(owned)) == len(owned)


def test_types_that_derive_from_a_case_have_its_facets() -> None:
    """A new kind of attention would lose what is said of the fields that it inherits."""

    class Derived(AttentionCase, frozen=True, kw_only=True):
        pass

    assert facets_of(Derived) == facets_of(AttentionCase) != ()
    assert facets_of(int) == ()


def test_one_facet_is_told_everywhere() -> None:
    """A size of V that matters would be missing from a finding, from the coverage or from what shrinking tries."""
    supports = Supports(v_head_sizes="any")
    assert {"v_head_size", "v_head_size>head_size"} <= features(CASE)
    assert "V head size" in [axis.name for axis in InputSpace("paged_decode", supports, {}).axes]
    assert "V head size" not in [axis.name for axis in InputSpace("paged_decode", Supports(), {}).axes]
    assert "v_head_size=128" in str(why_unsupported(Supports(), {}, CASE))
    (words, changed), *others = (
        change for facet in facets_of(type(CASE)) for change in facet.changes(CASE, Domain(supports, {}))
    )
    assert (words, others) == ("v_head_size 64 instead of 128", [])
    assert changed in list(simplifications(CASE, supports=supports, options={}))
