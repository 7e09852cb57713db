"""Every rounding is told apart from every other one, by the words of the failure."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.identity.bug import Bug, FailingCase, KnownBugs
from attnfuzz.judging.judge import judge
from attnfuzz.problems.cases import DenseDecodeCase, PagedDecodeCase
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.recipes import Values
from attnfuzz.verdict import Failure

STRICT = attnfuzz.Numerics(probabilities="float32", partials="float32")
PAIRS = (("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float32", "float16"))
"""What a case is in, and what is rounded to."""
TILE = 16


def drawn(seed: int, dtype: Any, length: int) -> DenseDecodeCase:
    """As a search draws them."""
    recipes: Any = ("integers", "normal", "fine")
    return DenseDecodeCase(
        num_q_heads=1 + seed % 2,
        num_kv_heads=1,
        head_size=16,
        scale=(0.25, 0.3)[seed // 2 % 2],
        dtype=dtype,
        seq_lens=(length,),
        values=Values(keys=recipes[seed % 3], values="normal", logit_exponent=seed % 4 - 1, seed=seed),
    )


def first_failure(kernel: Any, dtype: Any) -> Failure:
    """Of some cases of few keys and of more."""
    for seed in range(24):
        case = drawn(seed, dtype, 3 + 9 * (seed % 5))
        failure = judge(kernel, case, device="cpu", oracles=("accuracy",), relations=()).failure
        if failure is not None:
            return failure
    raise AssertionError("no case fails")


def exps(scores: Tensor) -> Tensor:
    return (scores - scores.max()).exp()


def online(dtype: torch.dtype, *, of_sum: bool = False, of_v: bool = False, of_weights: bool = False) -> dict[str, Any]:
    """Sums over tiles, kept in ``dtype`` from tile to tile as far as it is said."""

    def sums(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        top, total, out = torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros(v.shape[1])
        for start in range(0, len(v), TILE):
            part = scores[start : start + TILE].float()
            higher = torch.maximum(top, part.max())
            p, rescale = (part - higher).exp(), (top - higher).exp()
            total = total * rescale + p.sum()
            out = out * rescale + (p.to(dtype).float() if of_weights else p) @ v[start : start + TILE].float()
            total = total.to(dtype).float() if of_sum else total
            out = out.to(dtype).float() if of_v else out
            top = higher
        return out, total, top

    def average(scores: Tensor, v: Tensor) -> Tensor:
        out, total, _ = sums(scores, v)
        return out / total

    def lse(scores: Tensor) -> Tensor:
        _, total, top = sums(scores, scores[:, None])
        return top + total.log()

    return {"weights": lambda scores: scores, "average": average, "lse": lse}


def rounded_weights(dtype: torch.dtype, *, summed: bool = False) -> dict[str, Any]:
    def short(scores: Tensor) -> Tensor:
        return exps(scores).to(dtype).float()

    def average(scores: Tensor, v: Tensor) -> Tensor:
        return short(scores) @ v.float() / (short(scores) if summed else exps(scores)).sum()

    def lse(scores: Tensor) -> Tensor:
        return scores.max() + short(scores).sum().log()

    return {"weights": lambda scores: scores, "average": average} | ({"lse": lse} if summed else {})


def scores(rounded: Any) -> dict[str, Any]:
    return {"dots": rounded}


def halves(terms: Tensor) -> Tensor:
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half:]
    return terms[:, 0]


def mistakes(dtype: torch.dtype) -> dict[str, tuple[dict[str, Any], str]]:
    """Steps of a kernel, and what has to be told of it."""
    name = str(dtype).removeprefix("torch.")

    def to(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    return {
        "products": (
            scores(lambda k, q, scale: to(k.float() * q.float()).sum(-1) * scale),
            rf"the products of q and k are rounded to {name} before",
        ),
        "products and sums": (
            scores(lambda k, q, scale: halves(k.to(dtype) * q.to(dtype)).float() * scale),
            rf"the products of q and k are rounded to {name}, and so are their sums",
        ),
        "scaled query": (
            scores(lambda k, q, scale: k.float() @ to(q.float() * scale)),
            rf"q x scale is rounded to {name} before",
        ),
        "scores": (
            scores(lambda k, q, scale: to(k.float() @ q.float() * scale)),
            rf"the scores are rounded to {name}",
        ),
        "weights": (rounded_weights(dtype), rf"weights are rounded to {name} before they are multiplied with V"),
        "weights, summed": (
            rounded_weights(dtype, summed=True),
            rf"softmax weights are rounded to {name} before they are summed",
        ),
        "row sum": (online(dtype, of_sum=True), rf"the sum of the softmax weights is kept in {name}"),
        "accumulator": (online(dtype, of_v=True), rf"the sum of weights x V is kept in {name}"),
        "both sums": (
            online(dtype, of_sum=True, of_v=True),
            rf"the sums of the softmax weights and of weights x V are kept in {name}",
        ),
    }


EVERY = tuple(mistakes(torch.float16))


@pytest.mark.by_day
@pytest.mark.parametrize("lse", ["float32", "none"])
@pytest.mark.parametrize(("of_case", "rounded"), PAIRS)
@pytest.mark.parametrize("mistake", EVERY)
def test_a_rounding_is_told_as_what_it_is(mistake: str, of_case: str, rounded: str, lse: str, plant: Any) -> None:
    """A maintainer who is sent to the accumulator, where weights are narrowed, finds nothing and declares it away."""
    steps, words = mistakes(getattr(torch, rounded))[mistake]
    alone: Any = {"after": lambda inputs, out, lse: out, "supports": attnfuzz.Supports(lse="none")}
    failure = first_failure(plant(**steps, **(alone if lse == "none" else {}), numerics=STRICT), of_case)
    assert re.search(words, failure.message), failure.message
    assert "perhaps" not in failure.message


def test_a_rounding_is_told_beside_one_that_is_declared(plant: Any) -> None:
    """Nearly every kernel rounds its weights, and what else it rounds would be told of none of them."""
    steps = online(torch.float16, of_sum=True, of_weights=True)
    failure = first_failure(plant(**steps, numerics=attnfuzz.Numerics(row_sum="float32")), "float16")
    assert "; the sum of the softmax weights is kept in float16;" in failure.message


def test_a_rounding_is_told_of_a_row_that_is_long(plant: Any) -> None:
    """Where it shows in thousands of keys alone, one bug would be told a second time, as one without a name."""
    steps, words = mistakes(torch.float16)["products"]
    kernel, found = plant(**steps, numerics=STRICT), list[Failure]()
    for seed in range(1, 12):
        case = msgspec.structs.replace(drawn(3 * seed + 2, "float16", 3277), head_size=96)
        verdict = judge(kernel, case, device="cpu", oracles=("accuracy",), relations=())
        found += [] if verdict.failure is None else [verdict.failure]
    assert found
    assert [failure.message for failure in found if not re.search(words, failure.message)] == []


def test_a_sum_in_an_order_that_nobody_knows_is_told_by_the_size_of_its_errors(plant: Any) -> None:
    """Threads of a GPU add in orders that are not replayed: nothing would be told of what they round."""

    def average(weights: Tensor, v: Tensor) -> Tensor:
        total = torch.zeros(v.shape[1])
        for t in torch.randperm(len(v), generator=torch.Generator().manual_seed(len(v))).tolist():
            total = (total + weights[t] * v[t]).bfloat16().float()
        return total

    case = DenseDecodeCase(
        num_q_heads=2,
        num_kv_heads=1,
        head_size=32,
        scale=0.125,
        seq_lens=(150, 70),
        values=Values(keys="normal", values="normal", seed=3),
    )
    failure = judge(plant(average=average), case, device="cpu", oracles=("accuracy",)).failure
    assert failure is not None
    assert "; perhaps the sum of weights x V is kept in bfloat16" in failure.message


def test_no_rounding_is_told_of_numbers_that_none_makes(plant: Any) -> None:
    """Of a score that is off by a thousandth some rounding of some number is nearly that, and would be told as it."""
    kernel = plant(dots=lambda k, q, scale: 1.0013 * (k.float() @ q.float()) * scale, numerics=STRICT)
    failure = first_failure(kernel, "float16")
    assert "rounded" not in failure.message
    assert not any(one.rounding for one in failure.causes)


def test_what_is_known_of_a_rounding_foretells_cases_that_nobody_has_looked_into(plant: Any) -> None:
    """A case that is not shrunk when a campaign ends would be told as a second bug, since it has no cause."""
    for steps in (rounded_weights(torch.float16), online(torch.float16, of_sum=True)):
        kernel = plant(**steps, numerics=STRICT)
        found = []
        for seed, length in enumerate((2, 5, 17, 40, 3)):
            case = drawn(seed, "float16", length)
            failure = judge(kernel, case, device="cpu", oracles=("accuracy",), relations=(), inquire=False).failure
            if failure is not None:
                found.append(FailingCase(kernel.declaration, case, failure.undecided))
        assert len(found) > 1
        known = FailingCase(kernel.declaration, found[0].case, first_failure(kernel, "float16"))
        bugs = KnownBugs([Bug.seen_in(known)])
        assert all(bugs.predicting(one) is not None for one in found)


def test_a_rounding_may_be_behind_what_lost_tokens_give_by_chance(plant: Any) -> None:
    """An LSE that is off by its last digits lacks some token that weighs as little: nothing would foretell the case."""
    values: Any = Values(keys="normal", values="positions", logit_exponent=2, seed=13)
    case = msgspec.structs.replace(drawn(0, "float16", 11), values=values)
    kernel = plant(**online(torch.float16, of_sum=True, of_weights=True), numerics=attnfuzz.Numerics(row_sum="float32"))
    failure = judge(kernel, case, device="cpu", oracles=("accuracy",), relations=(), inquire=False).failure
    assert failure is not None
    assert "tokens_dropped" in {one.mistake for one in failure.causes}
    assert "sums_rounded" in failure.undecided.maybe


@attnfuzz.kernel(
    "paged_decode",
    supports=attnfuzz.Supports(layouts=("NHD",), lse="none", kv_dtypes=("float8_e4m3fn",), dtypes=("float16",)),
    numerics=attnfuzz.Numerics(query="scaled"),
)
def query_takes_the_scale_of_k(inputs: Any) -> Any:
    out = torch.zeros_like(inputs.q)
    group = inputs.q.shape[1] // inputs.k_cache.shape[2]
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        pages = inputs.block_table[seq, : -(-length // inputs.block_size)].long()
        k, v = (cache[pages].flatten(0, 1)[:length].float() for cache in (inputs.k_cache, inputs.v_cache))
        of_k, of_v = (scale.expand(k.shape[1]) for scale in (inputs.k_scale, inputs.v_scale))
        q = (inputs.q[seq].float() * of_k.repeat_interleave(group)[:, None]).to(inputs.q.dtype).float()
        weights = (torch.einsum("hd,thd->ht", q, k.repeat_interleave(group, 1)) * inputs.scale).softmax(-1)
        values = (v * of_v[:, None]).repeat_interleave(group, 1)
        out[seq] = torch.einsum("ht,thd->hd", weights, values).to(out.dtype)
    return out


def test_a_query_that_overflows_by_the_scale_of_the_cache_is_told() -> None:
    """It rounds as it is declared, and yet NaN comes out: a maintainer would look for a maximum not subtracted."""
    kv: Any = QuantisedKv(dtype="float8_e4m3fn", scales="large")
    shape: Any = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "scale": 0.25, "dtype": "float16"}
    told = []
    for seed in (0, 2, 5):
        values: Any = Values(keys="normal", values="normal", seed=seed)
        case = PagedDecodeCase(**shape, seq_lens=(3,), block_size=4, values=values, kv=kv)
        failure = judge(query_takes_the_scale_of_k, case, device="cpu", oracles=("accuracy",), relations=()).failure
        told += [] if failure is None else [failure.message]
    assert told
    assert all("q x the cache's scale of K is rounded to float16" in one for one in told), told
    assert all("overflows" in one for one in told)


@pytest.mark.parametrize(
    ("rescaled", "words"),
    [
        (lambda number, growth: (growth if number > 1 else -growth).exp(), ", from the third tile on"),
        (lambda number, growth: (-growth).exp() if number % 2 else 1.0, ", at every other tile from the third on"),
    ],
)
def test_sums_that_are_rescaled_wrongly_at_some_tiles_are_told(plant: Any, rescaled: Any, words: str) -> None:
    """The second tile is often dealt with apart, and two may take turns: then no single formula gives all of it."""

    def average(scores: Tensor, v: Tensor) -> Tensor:
        top, out, total = torch.tensor(-torch.inf), torch.zeros(v.shape[1]), exps(scores).sum()
        for number, start in enumerate(range(0, len(v), 4)):
            part = scores[start : start + 4].float()
            higher = torch.maximum(top, part.max())
            rescale = rescaled(number, higher - top) if number else 0.0
            out = out * rescale + (part - higher).exp() @ v[start : start + 4].float()
            top = higher
        return out / total

    values: Any = Values(keys="rising", values="normal", seed=1)
    shape: Any = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "scale": 0.25, "block_size": 4}
    case = PagedDecodeCase(**shape, seq_lens=(19,), values=values)
    kernel = plant("paged_decode", weights=lambda scores: scores, average=average)
    failure = judge(kernel, case, device="cpu", oracles=("accuracy",), relations=()).failure
    assert failure is not None
    assert failure.cause == "not_rescaled"
    assert words in failure.message
