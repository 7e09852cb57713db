"""The parts that cases are put together from: decisions, what parts reach, what they shrink to, what is refused."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import find, settings
from hypothesis import strategies as st

from attnfuzz import strategies
from attnfuzz.problems.boundaries import DEFAULT_TILES
from attnfuzz.problems.cases import CASE_TYPES, PROBLEMS, DenseDecodeCase, Problem, encode_case
from attnfuzz.problems.choices import default_scale, lse_kinds_of, paddings_of
from attnfuzz.problems.quantised_kv import KV_DTYPES
from attnfuzz.problems.recipes import STRIDE_KINDS, KeyRecipe, Needle, Pages, ValueRecipe, Values
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import VARIANTS
from attnfuzz.strategies.cases import cases
from attnfuzz.strategies.decisions import Decisions, decided
from attnfuzz.strategies.formats import decide_gqa_heads, decide_options
from attnfuzz.strategies.lengths import LengthLimits, decide_seq_lens
from attnfuzz.strategies.storage import PAGES_BYTES, STRIDES_BYTES, decide_pages, decide_strides
from attnfuzz.strategies.values import (
    LSE_PAIRS_BYTES,
    NEEDLES_BYTES,
    VALUES_BYTES,
    decide_lse_pairs,
    decide_needles,
    decide_scale,
    decide_values,
)
from attnfuzz.values import attention_values
from tests.common.drawing import drawn_from


def shrunk(strategy: st.SearchStrategy[Any], condition: Callable[[Any], bool] = lambda _: True) -> Any:
    return find(strategy, condition, random=random.Random(7), settings=settings(database=None, max_examples=4000))


def lengths(*, steps: tuple[int, ...] = (), num_splits: int = 1, least: int = 1, most: int = 4, work: int = 512) -> Any:
    limits = LengthLimits(
        steps=steps,
        num_splits=num_splits,
        min_seqs=least,
        max_seqs=most,
        min_len=0,
        max_len=128,
        max_padded=1 << 24,
        work=work,
        tile=1,
    )
    return decided(lambda decisions: decide_seq_lens(decisions, limits), size=1 + most)


def needles(*seq_lens: int, num_kv_heads: int = 1, steps: tuple[int, ...] = (), num_splits: int = 1) -> Any:
    how: Any = {"num_kv_heads": num_kv_heads, "steps": steps, "num_splits": num_splits}
    return decided(lambda decisions: decide_needles(decisions, seq_lens, **how), size=NEEDLES_BYTES)


def numbers(*seq_lens: int, num_splits: int = 1, reach: float = 8.0) -> Any:
    how: Any = {"num_kv_heads": 1, "steps": DEFAULT_TILES, "num_splits": num_splits, "reach": reach}
    return decided(lambda decisions: decide_values(decisions, seq_lens, **how), size=VALUES_BYTES)


def page_maps(supports: Supports) -> Any:
    how: Any = {"max_shared_blocks": 3}
    return decided(lambda decisions: decide_pages(decisions, paddings_of(supports), **how), size=PAGES_BYTES)


def lse_pairs(least: int) -> Any:
    how: Any = {"min_pairs": least, "max_pairs": 8}
    return decided(lambda decisions: decide_lse_pairs(decisions, lse_kinds_of(Supports()), **how), size=LSE_PAIRS_BYTES)


def scales(head_size: int) -> Any:
    return decided(lambda decisions: decide_scale(decisions, head_size), size=1)


def strides(problem: Problem, supports: Supports) -> Any:
    return decided(lambda decisions: decide_strides(decisions, problem, supports, None), size=STRIDES_BYTES)


@pytest.mark.parametrize(
    ("strategy", "simplest"),
    [
        (lengths(), (1,)),
        (lengths(least=2), (1, 1)),
        (decided(lambda decisions: decide_gqa_heads(decisions, (3, 5), 32), size=2), (3, 1)),
        (page_maps(Supports()), Pages()),
        (lse_pairs(1), (("finite", "finite"),)),
        (lse_pairs(2), (("finite", "finite"),) * 2),
        (strides("paged_decode", Supports()), {}),
        (needles(5, 7), ()),
        (numbers(5, 7), Values()),
        (scales(64), 0.125),
        (
            decided(lambda decisions: decide_options(decisions, {"tile": (32, 16), "fast": (True, False)}), size=2),
            {"tile": 32, "fast": True},
        ),
    ],
)
def test_each_part_shrinks_to_its_simplest_value(strategy: st.SearchStrategy[Any], simplest: object) -> None:
    """Counterexamples would carry details that have nothing to do with the bug."""
    assert shrunk(strategy) == simplest


def test_lengths_reach_every_boundary() -> None:
    """Off-by-one errors at the end of a page, tile or split would not be met."""
    drawn = {length for batch in drawn_from(lengths(steps=(24,), num_splits=5, work=4096), 1500) for length in batch}
    assert {0, 1, 2, 23, 24, 25, 47, 48, 49, 4, 5, 6, 119, 120, 121, 15, 16, 17, 63, 64, 65} <= drawn


def test_long_sequences_come_last_as_often_as_first() -> None:
    """A mistake with the index of a sequence would show in short ones only: the first take most of the work."""
    batches = drawn_from(lengths(least=4, most=4, work=160))
    first, last = (sum(batch[seq] == max(batch) for batch in batches) for seq in (0, -1))
    assert 0.7 < first / last < 1.4


def test_a_batch_of_many_sequences_can_be_drawn() -> None:
    """Launch limits and batch strides would only be tried with a few sequences."""
    assert any(len(batch) >= 33 for batch in drawn_from(lengths(most=64, work=1 << 14), 200))


def test_page_maps_reach_every_kind() -> None:
    """A page order, shared, spare or unused entries would never be tried."""
    drawn = drawn_from(page_maps(Supports(unused_table_entries="garbage")))
    assert {pages.order for pages in drawn} == {"identity", "reversed", "shuffled"}
    assert {pages.padding for pages in drawn} == {"zero", "wrong_page", "garbage"}
    for field in ("spare_blocks", "extra_columns", "shared_blocks"):
        assert len({getattr(pages, field) for pages in drawn}) >= 3


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_tensor_meets_every_stride(problem: Problem) -> None:
    """A wrapper that assumes a contiguous tensor would pass."""
    kinds = set(STRIDE_KINDS) - {"contiguous"}
    expected = {(tensor, kind) for tensor in CASE_TYPES[problem].tensor_names for kind in kinds}
    vectors = ("seq_lens", "cu_seqlens_q", "alibi_slopes", "sinks", "k_scale", "v_scale")
    expected -= {(name, kind) for name in vectors for kind in ("outer_gap", "padded_rows", "transposed")}
    matrices = ("block_table", "lse", "prefix_lse", "suffix_lse", "output_lse")
    expected -= {(name, "outer_gap") for name in matrices}  # whose rows padded ones move apart
    drawn = drawn_from(strides(problem, Supports(strides="any", variants=VARIANTS, kv_dtypes=KV_DTYPES)))
    assert {recipe for one in drawn for recipe in one.items()} == expected


def test_needles_reach_first_and_last_token_of_every_part() -> None:
    """A dropped token at a boundary would vanish in the average of all others."""
    drawn = drawn_from(needles(40, 0, num_kv_heads=2, steps=(16,), num_splits=3))
    found = {needle for several in drawn for needle in several}
    assert {needle.seq for needle in found} == {0}
    assert {needle.kv_head for needle in found} == {0, 1}
    assert {0, 39, 15, 16, 31, 32, 13, 14, 27, 28} <= {needle.position for needle in found}


def test_a_needle_can_be_shrunk_away_from_among_others() -> None:
    """The needle that matters would keep those that do not."""
    last = Needle(seq=1, position=6, kv_head=0)
    assert shrunk(needles(5, 7), lambda several: last in several) == (last,)


def test_values_reach_every_recipe() -> None:
    """A regime of scores or magnitudes would never be tried."""
    drawn = drawn_from(numbers(9))
    assert {values.keys for values in drawn} == set(get_args(KeyRecipe))
    assert {values.values for values in drawn} == set(get_args(ValueRecipe))
    assert {values.logit_exponent for values in drawn} >= {-6, -2, 0, 1, 4, 8}
    assert len({values.seed for values in drawn}) > 30


def test_scores_of_split_sequences_often_all_lie_low() -> None:
    """A maximum that begins above -inf, in a split or in their merge, changes nothing where some score is high."""
    drawn = drawn_from(numbers(40, num_splits=3), 400)
    low = [values for values in drawn if values.keys == "negative" and not values.needles]
    assert len(low) > len(drawn) // 5
    assert sum(values.logit_exponent == 7 for values in low) > len(low) // 4


@pytest.mark.parametrize(("head_size", "scale"), [(8, 0.3535), (16, 0.25), (64, 0.125), (128, 1.0), (256, 2.0)])
def test_low_scores_pass_what_stands_in_for_minus_infinity_by_little(head_size: int, scale: float) -> None:
    """FlashInfer's -5e4 would not be met; or scores of -5e6 would have bounds within which an output may be doubled."""
    drawn = drawn_from(numbers(40, reach=head_size * scale), 200)
    lowest = max(values.logit_exponent for values in drawn if values.keys == "negative")
    values = Values(keys="negative", logit_exponent=lowest)
    shape: Any = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": head_size, "scale": scale}
    made = attention_values(DenseDecodeCase(**shape, seq_lens=(40,), values=values))
    scores = scale * torch.einsum("hd,nd->hn", made.q[0].double(), made.k[:, 0].double())
    assert scores.min() > -4e5
    assert scores.max() < -3.5e4


def test_scores_that_lie_low_seldom_have_needles_among_them() -> None:
    """The largest score of each row would be that of a needle, far above 0."""
    drawn = drawn_from(numbers(40, num_splits=3), 400)
    low = [values for values in drawn if values.keys == "negative"]
    assert 0.05 < sum(len(values.needles) for values in low) / len(low) < 0.3
    assert max(len(values.needles) for values in drawn) == 3


def test_scales_include_the_usual_one_and_others() -> None:
    """A kernel that ignores the scale it is given would pass."""
    drawn = drawn_from(scales(80))
    assert {default_scale(80), 1.0, 0.125} <= set(drawn)
    assert sum(scale == default_scale(80) for scale in drawn) > len(drawn) // 3


def test_zero_bytes_and_missing_bytes_are_the_simplest_option() -> None:
    """Shrinking, which lowers bytes, would not lead to the simplest option."""
    decisions = Decisions(bytes(1))
    assert [decisions.pick("abc"), decisions.pick("abc")] == ["a", "a"]


def test_every_option_is_as_likely_as_another() -> None:
    """Some options would hardly ever be drawn."""
    counts = Counter(Decisions(bytes([byte])).pick(range(5)) for byte in range(256))
    assert set(counts) == set(range(5))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_a_smaller_byte_is_never_a_less_simple_option() -> None:
    """The shrinker would have to guess which bytes to try."""
    picks = [Decisions(bytes([byte])).pick(range(7)) for byte in range(256)]
    assert picks == sorted(picks)


def test_more_than_256_options_are_no_error() -> None:
    """A kernel that lists 300 head sizes could not be tested."""
    assert Decisions(b"\xff").pick(range(300)) == 298


def test_parts_do_not_shift_each_other() -> None:
    """Shrinking one part of a case would change all that follow."""
    decisions = Decisions(bytes([255, 0, 255, 0, 255]))
    first, second = decisions.part(2), decisions.part(2)
    first.pick("ab")
    assert (second.pick("ab"), second.pick("ab"), second.pick("ab")) == ("b", "a", "a")
    assert decisions.pick("ab") == "b"


def test_decided_reads_the_whole_string() -> None:
    """The last decisions of a value would always be the simplest."""
    three = decided(lambda decisions: tuple(decisions.pick([False, True]) for _ in range(3)), size=3)
    assert len({*drawn_from(three, 50)}) == 8


def test_generated_cases_are_not_variations_of_each_other() -> None:
    """Five of six cases would share most fields with the one before, and hard combinations come up that much later."""
    drawn = drawn_from(cases("paged_decode"), 200)
    assert len({encode_case(case) for case in drawn}) == len(drawn)
    repeated = sum(one.num_seqs > 1 and one.seq_lens == other.seq_lens for one, other in itertools.pairwise(drawn))
    assert repeated < len(drawn) // 20


INVALID: list[tuple[Callable[[], object], str]] = [
    (lambda: strategies.cases("prefill"), "problem='prefill' must be one of"),
    (lambda: strategies.cases("dense_decode", options={"a b": (1,)}), "must be an identifier"),
    (
        lambda: strategies.cases("paged_decode", supports=Supports(head_sizes=(13,), layouts=("packed",))),
        r"head_sizes=\(13,\).*add such a size or another layout",
    ),
    (
        lambda: strategies.Sizes(
            max_seqs=0, max_seq_len=1, max_tokens=1, max_heads=1, max_splits=1, max_head_elements=1,
            max_page_elements=1, max_cache_elements=1, work=(1,),
        ),
        r"Sizes\(max_seqs=0\): must be an integer >= 1",
    ),
    (
        lambda: strategies.Sizes(
            max_seqs=1, max_seq_len=1, max_tokens=1, max_heads=1, max_splits=1, max_head_elements=1,
            max_page_elements=1, max_cache_elements=1, work=(),
        ),
        r"Sizes\(work=\(\)\): must be a non-empty tuple",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("build", "message"), INVALID, ids=[message for _, message in INVALID])
def test_invalid_arguments_name_the_value_and_the_rule(build: Callable[[], object], message: str) -> None:
    """A wrong argument would draw nonsense, or fail in the middle of a run with someone else's message."""
    with pytest.raises(ValueError, match=message):
        build()
