"""The attention bound from both sides: correct kernels in emulated rounding stay below it, wrong ones do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.numerics import Bound, attention_bound, error_ratio
from attnfuzz.problems.declared_numerics import Numerics

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
STRICT = Numerics(probabilities="float32", partials="float32", matmul="ieee")
Rounding = Callable[[Tensor], Tensor]
Result = tuple[Tensor, Tensor]


def unrounded(x: Tensor) -> Tensor:
    return x


def rounded_to(dtype: torch.dtype) -> Rounding:
    return lambda x: x.to(dtype).float()


def truncated(num_bits: int) -> Rounding:
    """Drop the low fraction bits of float32, as TF32 operands (13) and the interpreter's bfloat16 (16) do."""
    return lambda x: (x.contiguous().view(torch.int32) >> num_bits << num_bits).view(torch.float32)


@dataclass(frozen=True)
class Problem:
    """One sequence in float64 (every value exact in `dtype`), and its exact result."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    dtype: torch.dtype
    label: str = ""

    @property
    def exact(self) -> Result:
        k, v = self.per_q_head()
        scores = self.scale * torch.einsum("hd,hnd->hn", self.q, k)
        return torch.einsum("hn,hnd->hd", scores.softmax(-1), v), scores.logsumexp(-1)

    def per_q_head(self) -> tuple[Tensor, Tensor]:
        group = self.q.shape[0] // self.k.shape[1]
        k, v = (cache.repeat_interleave(group, 1).transpose(0, 1) for cache in (self.k, self.v))
        return k, v

    def bound(self, numerics: Numerics, **more: Any) -> Bound:
        keywords: dict[str, Any] = {"in_dtype": self.dtype, "out_dtype": self.dtype, "numerics": numerics} | more
        return attention_bound(self.q, self.k, self.v, self.scale, **keywords)

    def ratios(self, got: Result, numerics: Numerics, **more: Any) -> tuple[float, float]:
        """Largest error over bound, of out stored in the out dtype and of the LSE."""
        (out, lse), bound = self.exact, self.bound(numerics, **more)
        stored = got[0].to(more.get("out_dtype", self.dtype))
        return error_ratio(stored, out, bound.out).max().item(), error_ratio(got[1], lse, bound.lse).max().item()


@dataclass(frozen=True)
class Style:
    """How an emulated float32 kernel is written; `tile=None` computes all scores before one softmax."""

    tile: int | None = 16
    num_splits: int = 1
    by_lse: bool = False
    base2: bool = False
    scale_q_first: bool = False
    weights: Rounding = unrounded
    operands: Rounding = unrounded
    partials: Rounding = unrounded
    accumulator: Rounding = unrounded

    def scores(self, problem: Problem, k: Tensor) -> Tensor:
        q, k, scale = problem.q.float(), k.float(), torch.tensor(problem.scale, dtype=F32)
        if self.scale_q_first:
            scores = ((q * scale)[:, None] * k).sum(-1)
        else:
            scores = torch.einsum("hd,hnd->hn", self.operands(q), self.operands(k)) * scale
        return scores * torch.tensor(math.log2(math.e), dtype=F32) if self.base2 else scores

    def weighted_sum(self, weights: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("hn,hnd->hd", self.weights(weights), self.operands(v.float()))


def naive(problem: Problem, style: Style) -> Result:
    k, v = problem.per_q_head()
    scores = style.scores(problem, k)
    return style.weighted_sum(scores.softmax(-1), v), scores.logsumexp(-1)


def online(problem: Problem, style: Style, k: Tensor, v: Tensor) -> Result:
    """Online softmax over tiles, unnormalised until the end."""
    exp = torch.exp2 if style.base2 else torch.exp
    num_heads, num_tokens, head_size = k.shape
    maximum, total = torch.full((num_heads,), -torch.inf), torch.zeros(num_heads)
    accumulator = torch.zeros(num_heads, head_size)
    for start in range(0, num_tokens, style.tile or num_tokens):
        tile = slice(start, start + (style.tile or num_tokens))
        scores = style.scores(problem, k[:, tile])
        new_maximum = torch.maximum(maximum, scores.amax(-1))
        rescale, weights = exp(maximum - new_maximum), exp(scores - new_maximum[:, None])
        total = total * rescale + weights.sum(-1)
        accumulator = style.accumulator(accumulator * rescale[:, None] + style.weighted_sum(weights, v[:, tile]))
        maximum = new_maximum
    lse = (maximum + total.log2()) * math.log(2) if style.base2 else maximum + total.log()
    return accumulator / total[:, None], lse


def partial_states(problem: Problem, style: Style) -> Result:
    k, v = problem.per_q_head()
    per_split = -(-k.shape[1] // style.num_splits)
    splits = [slice(start, start + per_split) for start in range(0, k.shape[1], per_split)]
    states = [online(problem, style, k[:, split], v[:, split]) for split in splits]
    return torch.stack([style.partials(out) for out, _ in states]), torch.stack([lse for _, lse in states])


def combine(outs: Tensor, lses: Tensor, *, by_lse: bool = False) -> Result:
    """`by_lse`: with the weights exp(lse_s - lse), as FlashAttention 2 does; else divided by their sum."""
    maximum = lses.amax(0)
    weights = (lses - maximum).exp()
    total = weights.sum(0)
    if by_lse:
        lse = maximum + total.log()
        return ((lses - lse).exp()[..., None] * outs).sum(0), lse
    return (weights[..., None] * outs).sum(0) / total[..., None], maximum + total.log()


def run(problem: Problem, style: Style) -> Result:
    if style.num_splits > 1:
        return combine(*partial_states(problem, style), by_lse=style.by_lse)
    return naive(problem, style) if style.tile is None else online(problem, style, *problem.per_q_head())


VALUES = ("normal", "equal scores", "rising scores", "needle", "positive values", "large values", "tiny values")


def problem(
    seq_len: int,
    head_size: int,
    dtype: torch.dtype = F16,
    values: str = "normal",
    logit_scale: float = 1.0,
    seed: int = 0,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(4, head_size), normal(seq_len, 2, head_size), normal(seq_len, 2, head_size)
    if values == "equal scores":
        k = k[:1].expand(seq_len, -1, -1)
    elif values == "rising scores":
        k = q[:2] * torch.linspace(0, 1, seq_len, dtype=torch.float64)[:, None, None]
    elif values == "needle":
        k = k * 0.3
        k[seq_len // 2] = q[:2] * 1.5
    v = {"positive values": v.abs(), "large values": v * 1000, "tiny values": v * 1e-5}.get(values, v)
    q, k, v = (x.to(dtype).double() for x in (q * logit_scale, k, v))
    label = f"seq_len={seq_len} head_size={head_size} {dtype} {values} logit_scale={logit_scale}"
    return Problem(q, k, v, scale=head_size**-0.5, dtype=dtype, label=label)


def sample(dtype: torch.dtype, seed: int) -> Problem:
    """Draw a problem; logit scales beyond float16's range only for the wide dtypes."""
    generator = torch.Generator().manual_seed(seed)
    logit_scales = [0.1, 1.0, 1.0, 3.0, 10.0, 100.0, 3000.0] + [1e30] * (dtype != F16)

    def pick(choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    seq_len = pick([1, 2, 3, 7, 16, 17, 64, 100, 257, 700, 1500])
    return problem(seq_len, pick([13, 16, 64, 80, 128, 256]), dtype, pick(VALUES), pick(logit_scales), seed)


def styles(dtype: torch.dtype, seed: int, seq_len: int = 1) -> dict[str, tuple[Style, Numerics]]:
    """The kernels of one round and what each would declare; details vary with the seed."""
    rounded = Numerics(probabilities="input", partials="input", matmul="ieee")
    tile = max((1, 4, 16, 64, 128)[seed % 5], seq_len // 100)
    plain = Style(tile=tile, base2=bool(seed & 1), scale_q_first=bool(seed & 2))
    short = replace(plain, weights=rounded_to(dtype))
    num_splits = (2, 3, 8)[seed % 3]
    return {
        "naive, float32 weights": (replace(plain, tile=None, base2=False), STRICT),
        "naive, rounded weights": (replace(short, tile=None, base2=False), rounded),
        "online, float32 weights": (plain, STRICT),
        "online, rounded weights": (short, rounded),
        "split, float32 partials": (replace(plain, num_splits=num_splits, by_lse=bool(seed & 1)), STRICT),
        "split, rounded partials": (replace(short, num_splits=num_splits, partials=rounded_to(dtype)), rounded),
    }


NAMES = tuple(styles(F16, 0))
NUM_ROUNDS = 14


@dataclass
class Seen:
    """Error over bound of each round: out as stored, out before it is stored, LSE; and where the largest was."""

    out: list[float] = field(default_factory=list)
    unstored: list[float] = field(default_factory=list)
    lse: list[float] = field(default_factory=list)
    worst: tuple[float, str] = (0.0, "")

    def add(self, problem: Problem, got: Result, numerics: Numerics, num_partials: int) -> None:
        out, lse = problem.ratios(got, numerics, num_partials=num_partials)
        unstored = out
        if problem.dtype != F32:
            unstored, _ = problem.ratios(got, numerics, num_partials=num_partials, out_dtype=F32)
        self.out.append(out)
        self.lse.append(lse)
        self.unstored.append(unstored)
        self.worst = max(self.worst, (max(out, lse, unstored), problem.label))


@pytest.fixture(scope="module")
def seen() -> dict[tuple[torch.dtype, str], Seen]:
    results = {(dtype, name): Seen() for dtype in (F16, BF16, F32) for name in NAMES}
    for dtype in (F16, BF16, F32):
        for seed in range(NUM_ROUNDS):
            drawn = sample(dtype, seed)
            for name, (style, numerics) in styles(dtype, seed, len(drawn.k)).items():
                results[dtype, name].add(drawn, run(drawn, style), numerics, style.num_splits)
    return results


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_correct_kernels_stay_below_the_bound(
    seen: dict[tuple[torch.dtype, str], Seen], dtype: torch.dtype, name: str
) -> None:
    """A bound that correct rounding can exceed reports bugs that do not exist."""
    largest, label = seen[dtype, name].worst
    assert largest < 1, label


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_the_bound_is_not_slack(seen: dict[tuple[torch.dtype, str], Seen], dtype: torch.dtype, name: str) -> None:
    """A bound far above every error that rounding makes would let small bugs through.

    Splits may have weights exp(lse_s - lse), whose exponents are rounded apart from those that the LSE has summed
    (`normaliser_error`): of each |s_i| three times as many roundings as where a sum divides, and random ones partly
    make up for each other.
    """
    results = seen[dtype, name]
    rounds_to_short = dtype != F32 and "rounded" in name
    assert max(results.unstored) > (0.15 if rounds_to_short else 0.005 if "split" in name else 0.01)
    assert dtype == F32 or max(results.out) > 0.3


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_the_lse_bound_is_not_slack(seen: dict[tuple[torch.dtype, str], Seen], dtype: torch.dtype) -> None:
    """The LSE is the sharper check of the two, which a slack bound would waste."""
    assert max(max(seen[dtype, name].lse) for name in NAMES) > 0.01


@pytest.mark.parametrize("numerics", [Numerics(), STRICT], ids=["undeclared", "strict"])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_one_token_of_1328_dropped_is_found(dtype: torch.dtype, numerics: Numerics) -> None:
    """Dropping the last of 1328 ordinary tokens must show: at the usual 1e-2 it does not."""
    whole = problem(1328, 128, dtype)
    k, v = whole.per_q_head()
    out_ratio, lse_ratio = whole.ratios(online(whole, Style(), k[:, :-1], v[:, :-1]), numerics)
    assert out_ratio > 2
    assert lse_ratio > 1


def test_a_dropped_token_shows_in_the_lse_where_bfloat16_hides_it() -> None:
    """The LSE is float32 whatever the dtype, so its bound must be fine enough to miss one token of 1328."""
    whole = problem(1328, 128, BF16)
    k, v = whole.per_q_head()
    numerics = Numerics(row_sum="float32")
    assert whole.ratios(online(whole, Style(), k[:, :-1], v[:, :-1]), numerics)[1] > 1


@pytest.mark.parametrize("numerics", [Numerics(), STRICT], ids=["undeclared", "strict"])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_a_scale_off_by_one_percent_is_found(dtype: torch.dtype, numerics: Numerics) -> None:
    """A wrong constant in the scale changes every weight a little and must show in out and in the LSE."""
    given = problem(1328, 128, dtype)
    wrong = replace(given, scale=given.scale * 1.01)
    out_ratio, lse_ratio = given.ratios(run(wrong, Style()), numerics)
    assert out_ratio > 2
    assert lse_ratio > 10


@pytest.mark.parametrize("values", ["normal", "positive values"])
def test_a_float16_accumulator_is_found_where_weights_are_float32(values: str) -> None:
    """Rounding the accumulator to float16 in each tile is the classic loss of precision."""
    given = problem(1328, 128, F16, values)
    assert given.ratios(run(given, Style(accumulator=rounded_to(F16))), STRICT)[0] > 1


def test_a_float16_accumulator_is_found_with_undeclared_numerics() -> None:
    """With equal scores an unnormalised float16 accumulator outgrows its precision: no declaration excuses that."""
    given = problem(1328, 128, F16, "equal scores")
    given = replace(given, v=given.v.abs())
    assert given.ratios(run(given, Style(accumulator=rounded_to(F16))), Numerics())[0] > 1.5


def test_tf32_must_be_declared() -> None:
    """TF32 costs float32 three digits: allowed where declared, found where not."""
    given = problem(257, 64, F32)
    got = run(given, Style(operands=truncated(13), weights=truncated(13)))
    tf32 = Numerics(matmul="tf32")
    assert 0.03 < given.ratios(got, tf32)[0] < 1
    assert 0.03 < given.ratios(got, tf32)[1] < 1
    assert given.ratios(got, Numerics())[0] > 5


def test_conversions_that_drop_bits_are_found() -> None:
    """A kernel that makes bfloat16 numbers by dropping bits errs by twice as much as one that rounds, on any device."""
    rounded: list[float] = []
    cut: list[float] = []
    for seed in range(4):
        given = problem(17, 16, BF16, "positive values", seed=seed)
        for change, ratios in ((rounded_to(BF16), rounded), (truncated(16), cut)):
            out, lse = run(given, Style(weights=change, num_splits=2, partials=change))
            ratios.append(given.ratios((change(out), lse), Numerics(), num_partials=2, one_copy=True)[0])
    assert max(rounded) < 1
    assert max(cut) > 1


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_partials_merged_by_the_caller_stay_below_their_bound(dtype: torch.dtype) -> None:
    """Partial states merged in float64 must pass, though the checker does not know where the kernel split."""
    largest = []
    for seed in range(8):
        given = sample(dtype, seed)
        style = Style(num_splits=1 + seed % 5, partials=rounded_to(dtype), weights=rounded_to(dtype))
        outs, lses = partial_states(given, style)
        out, lse = combine(outs.double(), lses.double())
        bound = given.bound(Numerics(), num_partials=style.num_splits, partial_merge=True)
        largest.append(error_ratio(out, given.exact[0], bound.out).max().item())
        assert error_ratio(lse, given.exact[1], bound.lse).max().item() < 1
    assert (0.01 if dtype == F32 else 0.2) < max(largest) < 1


@pytest.mark.parametrize("logit_scale", [1e4, 1e12, 1e30])
def test_huge_logits_do_not_make_the_bound_vacuous(logit_scale: float) -> None:
    """Where float32 cannot order the scores the bound must stay near the values' range, with one copy of each."""
    given = problem(1500, 128, F32, "normal", logit_scale)
    bound = given.bound(Numerics(), one_copy=True)
    spread = (given.v.amax(0) - given.v.amin(0)).repeat_interleave(2, 0)
    assert bool((bound.out <= 1.01 * spread).all())
    assert bool(bound.lse.isfinite().all())
    assert bool(given.bound(Numerics()).out.isfinite().all())


def test_a_dropped_winner_is_found_at_huge_logits() -> None:
    """At logits of 1e4 one token takes all the weight: losing it must be a gross error, not excused by the bound."""
    given = problem(1500, 128, F32, "normal", 1e4)
    k, v = given.per_q_head()
    winner = torch.einsum("hd,hnd->hn", given.q, k).argmax(-1)[0]
    kept = torch.arange(1500) != winner
    out, lse = online(given, Style(), k[:, kept], v[:, kept])
    exact, bound = given.exact, given.bound(Numerics())
    assert error_ratio(out, exact[0], bound.out)[0].max().item() > 100
    assert error_ratio(lse, exact[1], bound.lse)[0].item() > 100


def test_the_bound_is_far_below_the_usual_tolerance() -> None:
    """On ordinary float16 data the median bound must be well below the 1e-2 of fixed-tolerance suites."""
    medians = [problem(n, 128, F16, seed=n).bound(Numerics()).out.median().item() for n in (64, 257, 1500, 3000)]
    assert max(medians) < 1e-3
