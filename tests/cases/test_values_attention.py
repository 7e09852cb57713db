"""Numbers of cases of attention and of states to merge."""

from __future__ import annotations

import hashlib
import itertools
import math
from typing import Any

import pytest
import torch
from jaxtyping import config as shape_checks
from torch import Tensor

from attnfuzz.problems.cases import MergeStatesCase, PagedDecodeCase
from attnfuzz.problems.recipes import KEY_RECIPES, LSE_KINDS, VALUE_RECIPES, Needle, Pages, Values
from attnfuzz.problems.supports import DTYPES, Dtype
from attnfuzz.values import draws
from attnfuzz.values.attention import LogicalAttention, attention_values
from attnfuzz.values.states import merge_values, merge_values_of_many
from tests.sample_cases import dense_case, paged_case

RECIPES = [*itertools.product(KEY_RECIPES, VALUE_RECIPES)]
COARSE = [recipes for recipes in RECIPES if not {"fine", "small"} & set(recipes)]
"""Of numbers that every dtype holds."""


def dense(seq_lens: tuple[int, ...] = (5, 0, 9), dtype: Dtype = "float16", head_size: int = 16, **values: Any) -> Any:
    return dense_case(
        num_q_heads=4,
        num_kv_heads=2,
        head_size=head_size,
        seq_lens=seq_lens,
        scale=head_size**-0.5,
        dtype=dtype,
        values=Values(**values),
    )


def scores(case: Any) -> list[Tensor]:
    """Per sequence ``[num_q_heads seq_len]``, float64."""
    values = attention_values(case)
    keys = [values.sequence(i)[0].double().repeat_interleave(case.gqa_ratio, 1) for i in range(case.num_seqs)]
    return [case.scale * torch.einsum("hd,lhd->hl", q.double(), k) for q, k in zip(values.q, keys, strict=True)]


GOLDEN = {
    ("equal", "positions"): ([-0.25, -0.25, -0.5, 0.25, 0.5], [-1, -1, -1, 1, 1], [2, 1, 1, 1, 2]),
    ("integers", "integers"): ([-2, -2, -1, 1, 2], [-1, 0, 1, 0, 1], [0, -2, 1, 2, 0]),
    ("normal", "normal"): (
        [0.125, -0.28125, 0.09375, 1.25, -0.84375],
        [-1.15625, 1.78125, -1.34375, -1.25, -0.59375],
        [1.5, 1.0, -0.75, 2.25, -1.21875],
    ),
    ("rising", "large"): ([-0.25, -0.25, -0.5, 0.25, 0.5], [-1 / 16] * 3 + [1 / 16] * 2, [764, 632, 772, -908, -784]),
    ("negative", "positions"): ([-0.25, -0.25, -0.5, 0.25, 0.5], [143, 143, 143, -143, -143], [2, 1, 1, 1, 2]),
    ("fine", "fine"): (
        [-1.171875, -0.0625, 0.666015625, 1.046875, -0.826171875],
        [0.3984375, 0.560546875, 0.88671875, -1.716796875, -1.208984375],
        [-1.376953125, 0.55859375, -1.373046875, 0.443359375, -0.6171875],
    ),
}


def named(row: torch.Tensor) -> tuple[int, int, int]:
    """The token, KV head and sequence that a row of position-coded values names."""
    assert torch.equal(row, row[:4].repeat(len(row) // 4))
    low, high, kv_head, seq = (int(number) - 1 for number in row[:4])
    return low + 128 * high, kv_head, seq


@pytest.mark.parametrize("recipe", GOLDEN, ids="-".join)
def test_golden_numbers(recipe: tuple[Any, Any]) -> None:
    """Saved cases would be rebuilt with other numbers."""
    case = dense_case(
        num_q_heads=2, head_size=5, seq_lens=(2, 1), scale=1.0, values=Values(keys=recipe[0], values=recipe[1], seed=42)
    )
    values = attention_values(case)
    assert (values.q[1, 0].tolist(), values.k[1, 0].tolist(), values.v[1, 0].tolist()) == GOLDEN[recipe]


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
def test_golden_digest_of_all_recipes(device: str) -> None:
    """Some recipe would no longer rebuild the tensors of saved cases, bit for bit, on this device."""
    digest = hashlib.sha256()
    for (keys, values), dtype, needles in itertools.product(COARSE, DTYPES, ((), (Needle(2, 8, 1),))):
        case = dense((130, 0, 9), dtype, keys=keys, values=values, seed=9, logit_exponent=-1, needles=needles)
        drawn = attention_values(case, device)
        for tensor in (drawn.q, drawn.k, drawn.v):
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == "e9edc7f6bd368b5f297c09c95cd021a433ee98472e7aad2c6e5f3d3c75b24a32"


@pytest.mark.by_day
@pytest.mark.parametrize("exponent", [-6, 0, 8])
@pytest.mark.parametrize("recipe", COARSE, ids="-".join)
def test_numbers_are_exact_in_every_dtype(recipe: tuple[Any, Any], exponent: int) -> None:
    """A number would be rounded on its way into the case's dtype, differently per machine."""
    options = {"keys": recipe[0], "values": recipe[1], "logit_exponent": exponent, "needles": (Needle(0, 1, 1),)}
    half, short, full = (attention_values(dense((200, 3), dtype, **options)) for dtype in DTYPES)
    for name in ("q", "k", "v"):
        numbers = getattr(full, name).double()
        assert numbers.isfinite().all()
        assert torch.equal(getattr(half, name).double(), numbers)
        assert torch.equal(getattr(short, name).double(), numbers)


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 24), ("float16", 11), ("bfloat16", 8)])
def test_fine_numbers_use_every_bit(dtype: Dtype, bits: int) -> None:
    """A kernel that rounds its inputs, to TF32 for one, would be right on all numbers that it is ever given."""
    values = attention_values(dense((400, 3), dtype, head_size=64, keys="fine", values="fine", logit_exponent=3))
    for tensor, exponent in ((values.q, 0), (values.k, 3), (values.v, 0)):
        units = tensor.double() * 2.0 ** (bits - 2 - exponent)
        assert torch.equal(units, units.round())
        assert int(units.min()) < -(2 ** (bits - 1)) * 0.9
        assert int(units.max()) > 2 ** (bits - 1) * 0.9
        assert (units % 2 == 1).double().mean() > 0.4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_numbers_are_subnormal_or_not_far_above(dtype: Dtype, device: str) -> None:
    """Numbers that hardware takes for 0, or does not, would never be drawn, or would be 0 before a kernel sees them."""
    drawn = attention_values(dense((400, 3), dtype, head_size=64, keys="normal", values="small"), device).v
    sizes = drawn.double().abs()
    units = drawn.double() * 2.0 ** (24 if dtype == "float16" else 133)
    assert torch.equal(units, units.round())
    if dtype == "float16":
        assert float(sizes.max()) == 2.0**-14
        assert (sizes > 2.0**-16).double().mean() > 0.5
    else:
        is_subnormal = (sizes > 0) & (sizes < 2.0**-126)
        assert 0.1 < float(is_subnormal.double().mean()) < 0.2
        assert 2.0**-112 < float(sizes.max()) < 2.0**-111


def test_sequences_lie_one_after_another() -> None:
    """sequence(i) would hand out another sequence's tokens."""
    values = attention_values(dense((5, 0, 9), keys="normal", values="positions"))
    assert values.starts == (0, 5, 5, 14)
    assert [len(values.sequence(i)[0]) for i in range(3)] == [5, 0, 9]
    assert [named(row) for row in values.sequence(2)[1][:, 1]] == [(p, 1, 2) for p in range(9)]


def test_only_empty_sequences() -> None:
    """The simplest degenerate batch could not be built."""
    for keys, values in RECIPES:
        drawn = attention_values(dense((0, 0), keys=keys, values=values))
        assert drawn.k.shape == drawn.v.shape == (0, 2, 16)


def test_seeds_and_elements_differ() -> None:
    """Heads, tokens, sequences or K and V would hold the same numbers, which hides an exchanged index."""
    first, second = (attention_values(dense(keys="normal", values="normal", seed=seed)) for seed in (1, 2))
    vectors = torch.cat([x.reshape(-1, 16) for v in (first, second) for x in (v.q, v.k, v.v)])
    assert len({tuple(vector) for vector in vectors.tolist()}) == len(vectors)


def test_normal_recipe_is_centred() -> None:
    """Scores of the "normal" recipe would not have the spread that the case's exponent promises."""
    numbers = attention_values(dense((500,), keys="normal", values="normal", seed=5)).k.double()
    assert abs(numbers.mean()) < 0.05
    assert abs(numbers.std() - 1.153) < 0.05
    assert numbers.abs().max() <= 126 / 32


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values would depend on how many are drawn at a time."""
    case = dense((50, 9), keys="normal", values="large")
    whole = attention_values(case)
    monkeypatch.setattr(draws, "_HOST_CHUNK_ELEMENTS", 100)
    parts = attention_values(case)
    assert torch.equal(whole.k, parts.k)
    assert torch.equal(whole.v, parts.v)


def test_values_do_not_depend_on_the_rest_of_the_batch() -> None:
    """Dropping sequences while a case is made smaller would change the numbers of the ones that stay."""
    for keys, values in RECIPES:
        many, one = (attention_values(dense(lens, keys=keys, values=values)) for lens in ((7, 3), (7,)))
        assert torch.equal(many.sequence(0)[0], one.k)
        assert torch.equal(many.sequence(0)[1], one.v)
        assert torch.equal(many.q[0], one.q[0])


def test_equal_scores() -> None:
    """Keys of the "equal" recipe would not weigh the same."""
    assert all((row == row[:, :1]).all() and (row > 0).all() for row in scores(dense((5, 9))))


@pytest.mark.parametrize("seq_len", [2, 100, 128])
def test_rising_and_falling_scores(seq_len: int) -> None:
    """The running maximum would not change at every token (rising), or would change after the first (falling)."""
    assert (scores(dense((seq_len,), keys="rising"))[0].diff() > 0).all()
    assert (scores(dense((seq_len,), keys="falling"))[0].diff() < 0).all()


def test_long_rising_sequences_reach_the_same_top() -> None:
    """A long rising sequence would leave float16, or stop rising half way."""
    values = attention_values(dense((1000,), keys="rising"))
    assert values.k.abs().max() == 127 / 16
    assert (scores(dense((1000,), keys="rising"))[0].diff() >= 0).all()
    assert values.k[-1].abs().max() == 127 / 16


def test_negative_scores_go_below_finite_sentinels() -> None:
    """A kernel that starts its maximum at -1e4 or -5e4 instead of -inf would not be noticed."""
    assert all((row < -5e4).all() for row in scores(dense((5, 9), keys="negative", logit_exponent=8)))


@pytest.mark.parametrize("keys", KEY_RECIPES)
def test_needle_takes_nearly_all_weight(keys: Any) -> None:
    """A dropped boundary token would be diluted in a thousand others instead of being a gross error."""
    case = dense((1000, 3), head_size=64, keys=keys, needles=(Needle(0, 999, 1),))
    weights = torch.softmax(scores(case)[0], -1)
    assert (weights[2:, 999] > 0.99).all(), "query heads 2 and 3 read KV head 1"
    if keys != "falling":
        assert (weights[:2, 999] < 0.9).all(), "the needle is not in KV head 0"


def paged(seq_lens: tuple[int, ...], shared_blocks: int, **values: Any) -> PagedDecodeCase:
    return paged_case(
        num_q_heads=2,
        num_kv_heads=2,
        head_size=8,
        seq_lens=seq_lens,
        scale=1.0,
        pages=Pages(shared_blocks=shared_blocks),
        values=Values(**values),
    )


@pytest.mark.parametrize("recipe", RECIPES, ids="-".join)
def test_shared_pages_hold_the_same_tokens(recipe: tuple[Any, Any]) -> None:
    """One physical token would have to hold two different keys."""
    # Page 1 is shared although sequence 0 fills one token of it only: sequences 1 and 2 agree on the rest.
    case = paged((5, 11, 7), 2, keys=recipe[0], values=recipe[1], needles=(Needle(1, 6, 0), Needle(2, 1, 1)))
    values = attention_values(case)
    (k0, v0), (k1, v1), (k2, v2) = (values.sequence(i) for i in range(3))
    assert torch.equal(k0, k1[:5])
    assert torch.equal(v0, v1[:5])
    assert torch.equal(k1[:7], k2)
    assert torch.equal(v1[:7], v2)


@pytest.mark.parametrize("keys", ["rising", "falling"])
def test_shared_page_far_longer_than_sequence_0(keys: Any) -> None:
    """Positions that sequence 0 never reached would get keys beyond the recipe's range, which bfloat16 rounds."""
    case = paged_case(
        head_size=8,
        seq_lens=(3, 900),
        scale=1.0,
        block_size=1024,
        pages=Pages(shared_blocks=1),
        values=Values(keys=keys),
    )
    k = attention_values(case).sequence(1)[0]
    expected = [0, 1, 2, *[2] * 897] if keys == "rising" else [2, 1, 0, *[0] * 897]
    assert (k.abs().amax(dim=(1, 2)) * 16).tolist() == expected


def test_tokens_behind_the_shared_pages_are_their_own() -> None:
    """Sequences that share a prefix would be equal altogether."""
    values = attention_values(paged((9, 9), 1, keys="normal", values="positions"))
    (k0, v0), (k1, v1) = values.sequence(0), values.sequence(1)
    assert not (k0[4:] == k1[4:]).all(dim=(1, 2)).any()
    assert [named(row) for row in v1[:, 0]] == [(p, 0, 0 if p < 4 else 1) for p in range(9)]
    assert [named(row) for row in v0[:, 0]] == [(p, 0, 0) for p in range(9)]


def test_needle_on_a_page_of_its_own_stays_there() -> None:
    """A needle would show up in sequences that do not share its page."""
    values = attention_values(paged((9, 9), 1, needles=(Needle(1, 5, 0),)))
    assert values.sequence(1)[0][5, 0].abs().max() == 16
    assert values.k.abs().sum(dim=-1).gt(8).sum() == 1


def test_values_name_late_tokens() -> None:
    """Tokens 128 apart would have equal values."""
    assert named(attention_values(dense((140,), values="positions")).v[139, 1]) == (139, 1, 0)


def test_shapes_are_enforced_in_tests() -> None:
    """The shapes written in signatures would be comments: K and V of different length would pass."""
    q = torch.zeros(2, 3, 4)
    shape_checks.update("jaxtyping_disable", False)  # by day most tests are not checked
    with pytest.raises(Exception, match="Type-check error"):
        LogicalAttention(q, q, q[:1], (0, 2))


def merge(**more: Any) -> MergeStatesCase:
    return MergeStatesCase(**{"num_q_heads": 2, "head_size": 3, "num_tokens": 2, "seed": 42} | more)


@pytest.mark.parametrize("device", DEVICES)
def test_golden_numbers_of_states(device: str) -> None:
    """Saved cases would be rebuilt with other numbers."""
    pairs = (("finite", "equal"), ("high", "low"), ("equal", "equal"), ("-inf", "+inf"))
    values = merge_values(merge(lse_pairs=pairs), device)
    assert values.prefix_lse.tolist() == [[1.1875, 192.0], [1.6875, -math.inf]]
    assert values.suffix_lse.tolist() == [[-1.4375, -194.3125], [1.6875, math.inf]]
    assert values.prefix_output[0].tolist() == [[0.78125, -1.03125, -1.40625], [0.65625, 0.03125, -1.1875]]
    assert values.suffix_output[1].tolist() == [[0.34375, -0.75, -0.375], [1.875, 0.28125, -1.90625]]
    assert values.prefix_live.tolist() == [[True, True], [True, False]]
    assert values.suffix_live.tolist() == [[True, True], [True, False]]


def test_states_are_exact_in_every_dtype() -> None:
    """A number would be rounded on its way into the case's dtype."""
    half, short, full = (merge_values(merge(dtype=dtype, num_tokens=50)) for dtype in DTYPES)
    for name in ("prefix_output", "suffix_output"):
        assert torch.equal(getattr(half, name).double(), getattr(full, name).double())
        assert torch.equal(getattr(short, name).double(), getattr(full, name).double())


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 24), ("float16", 11), ("bfloat16", 8)])
def test_fine_states_use_every_bit(dtype: Any, bits: int) -> None:
    """A kernel that rounds the states that it merges would be right on all numbers that it is ever given."""
    case = merge(dtype=dtype, num_tokens=400, outputs="fine")
    for made in (merge_values(case), *merge_values_of_many([case, merge(dtype=dtype)], "cpu")[:1]):
        units = torch.stack((made.prefix_output, made.suffix_output)).double() * 2.0 ** (bits - 2)
        assert torch.equal(units, units.round())
        assert int(units.abs().max()) > 2 ** (bits - 1) * 0.9
        assert (units % 2 == 1).double().mean() > 0.4
        assert torch.equal(made.prefix_output, merge_values(case).prefix_output)


RANGES = {"finite": (-4, 4), "equal": (-4, 4), "high": (192, 196), "low": (-196, -192)}


@pytest.mark.parametrize("pair", [*itertools.product(LSE_KINDS, LSE_KINDS)], ids=",".join)
def test_lse_kinds(pair: tuple[Any, Any]) -> None:
    """A pair would not be what its name says: far apart, equal, or empty on one side or both."""
    values = merge_values(merge(num_tokens=40, lse_pairs=(pair,)))
    for kind, lse in zip(pair, (values.prefix_lse, values.suffix_lse), strict=True):
        if kind in RANGES:
            low, high = RANGES[kind]
            assert ((lse >= low) & (lse < high) & (lse * 16 == (lse * 16).round())).all()
            assert len(set(lse.flatten().tolist())) > 10
        else:
            assert (lse == float(kind)).all()
    same = torch.equal(values.prefix_lse, values.suffix_lse)
    assert same == (pair[0] == pair[1] and pair[0] in ("equal", "-inf", "+inf"))


def test_pairs_cycle_over_tokens_and_heads() -> None:
    """The pair of a row would not be the one that the case's documentation names."""
    pairs = (("high", "low"), ("low", "high"), ("-inf", "finite"))
    values = merge_values(merge(num_q_heads=2, num_tokens=3, lse_pairs=pairs))
    empty = [[(token * 2 + head) % 3 == 2 for head in range(2)] for token in range(3)]
    assert (~values.prefix_live).tolist() == empty
    assert values.prefix_lse[0, 0] > 100 > -100 > values.prefix_lse[0, 1]


def test_base_is_noted_but_changes_no_number() -> None:
    """LSE numbers would no longer be dyadic in the kernel's own base."""
    natural, base2 = merge_values(merge()), merge_values(merge(), lse_base2=True)
    assert (natural.lse_base2, base2.lse_base2) == (False, True)
    assert torch.equal(natural.prefix_lse, base2.prefix_lse)
