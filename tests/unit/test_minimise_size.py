"""Which of two cases is simpler."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from attnfuzz.minimise import size_key
from attnfuzz.problems.cases import PROBLEMS, Case, Problem, encode_case
from attnfuzz.problems.recipes import Needle, Pages, Values
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import OptionValue, Supports
from attnfuzz.strategies.cases import cases

OPTIONS: dict[str, tuple[OptionValue, ...]] = {"tile": (32, 16), "variant": ("b", "a")}
PAGED = simplest_case("paged_decode", Supports(), OPTIONS)


def paged(**fields: Any) -> Case:
    return msgspec.structs.replace(PAGED, **fields)


@pytest.mark.parametrize("problem", PROBLEMS)
@settings(max_examples=60, phases=[Phase.generate], database=None, derandomize=True, deadline=None)
@given(data=st.data())
def test_order_is_total_and_ends_at_the_simplest_case(problem: Problem, data: st.DataObject) -> None:
    """Two workers would keep different cases of one bug, or reduction would not know where to stop."""
    strategy = cases(problem, options=OPTIONS)
    one, other = data.draw(strategy), data.draw(strategy)
    sizes = [size_key(case, options=OPTIONS) for case in (one, other)]
    assert (sizes[0] == sizes[1]) == (encode_case(one) == encode_case(other))
    assert sizes[0] <= sizes[1] or sizes[1] <= sizes[0]
    assert size_key(simplest_case(problem, Supports(), OPTIONS), options=OPTIONS) <= min(sizes)


@pytest.mark.parametrize(
    ("simpler", "other"),
    [
        (paged(seq_lens=(900,)), paged(seq_lens=(1, 1))),
        (paged(seq_lens=(1,)), paged(seq_lens=(0,))),
        (paged(seq_lens=(0,)), paged(seq_lens=(2,))),
        (paged(num_q_heads=2), paged(num_q_heads=3)),
        (paged(head_size=16, scale=0.25), paged(head_size=13, scale=13**-0.5)),
        (paged(seq_lens=(17,), block_size=32), paged(seq_lens=(17,), block_size=16)),
        (paged(block_size=8), paged(block_size=3)),
        (paged(dtype="float16"), paged(dtype="bfloat16")),
        (paged(layout="HND"), paged(layout="packed")),
        (paged(pages=Pages(order="reversed")), paged(pages=Pages(order="shuffled"))),
        (paged(pages=Pages(padding="zero")), paged(pages=Pages(padding="wrong_page"))),
        (paged(strides={"q": "padded_rows"}), paged(strides={"q": "every_other"})),
        (paged(strides={"q": "every_other"}), paged(strides={"q": "padded_rows", "out": "padded_rows"})),
        (paged(options={"tile": 32, "variant": "b"}), paged(options={"tile": 16, "variant": "b"})),
        (paged(values=Values(keys="integers")), paged(values=Values(keys="negative"))),
        (paged(values=Values(logit_exponent=-1)), paged(values=Values(logit_exponent=2))),
        (paged(values=Values(seed=1)), paged(values=Values(needles=(Needle(seq=0, position=0, kv_head=0),)))),
        (paged(scale=0.25), paged(scale=1.0)),
        (paged(scale=1.0), paged(scale=0.125)),
    ],
)
def test_what_a_reader_would_call_simpler_is_smaller(simpler: Case, other: Case) -> None:
    """Reduction would end in a case that is harder to understand."""
    assert size_key(simpler, options=OPTIONS) < size_key(other, options=OPTIONS)


def test_without_the_kernels_choices_the_smaller_option_is_simpler() -> None:
    """Cases of unknown kernels could not be compared."""
    small = paged(options={"tile": 16, "variant": "a"})
    assert size_key(small) < size_key(paged(options={"tile": 32, "variant": "a"}))
    assert size_key(small) < size_key(paged(options={"tile": "large", "variant": "a"}))
