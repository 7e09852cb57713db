"""Errors within their bounds that are too large together, or biased."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz import Numerics
from attnfuzz.declaration import Kernel
from attnfuzz.judging.judge import judge
from attnfuzz.numerics.residuals import residuals
from attnfuzz.oracles.relations.residuals import RESIDUALS
from attnfuzz.problems import repeated
from attnfuzz.problems.cases import DenseDecodeCase, PagedAttentionCase, PagedDecodeCase, SplitDecodeCase
from attnfuzz.problems.recipes import Values
from attnfuzz.problems.variants import Variant
from attnfuzz.testing.loading import load_here
from attnfuzz.verdict import Failure
from tests.quality.designs import DESIGNS, Design, Result
from tests.quality.tightness import Mistake

SUMS_IN_FLOAT32 = Numerics(partials="float32", row_sum="float32", matmul="ieee")
FIELDS: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 64, "scale": 0.125, "dtype": "float16"}
SHORT = DenseDecodeCase(**FIELDS, seq_lens=(20, 0, 100))
LONG = DenseDecodeCase(**FIELDS, seq_lens=(1500,))

Attend = Callable[[Tensor, Tensor, Tensor, float], Result]
Judged = Callable[[Attend, DenseDecodeCase, Numerics], Failure | None]


def dense(attend: Attend, numerics: Numerics) -> Kernel:
    """A kernel of ``attend(q, k, v, scale)`` for one sequence, heads first."""

    @attnfuzz.kernel("dense_decode", numerics=numerics)
    def kernel(inputs: Any) -> Result:
        group = inputs.q.shape[1] // inputs.k.shape[2]
        inputs.out.zero_()
        inputs.lse.fill_(-torch.inf)
        for i, length in enumerate(inputs.seq_lens.tolist()):
            k, v = (part[i, :length].repeat_interleave(group, 1).transpose(0, 1) for part in (inputs.k, inputs.v))
            if length:
                inputs.out[i], inputs.lse[i] = attend(inputs.q[i], k, v, inputs.scale)
        return inputs.out, inputs.lse

    return kernel


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Judged:
    """What the relation says of an eager kernel, of as many rows as on a GPU."""
    monkeypatch.setitem(repeated._ENOUGH_ROWS, "cpu", 512)
    monkeypatch.setitem(repeated._MOST_NUMBERS, "cpu", 1 << 26)

    def judged(attend: Attend, case: DenseDecodeCase, numerics: Numerics) -> Failure | None:
        return judge(
            dense(attend, numerics), case, device="cpu", oracles=("residuals",), relations=("residuals",)
        ).failure

    return judged


def run(design: Design, tile: int) -> Attend:
    return lambda q, k, v, scale: design.run(q, k, v, scale, tile)


@pytest.mark.parametrize("case", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design.name)
@pytest.mark.by_day("sum of rounded weights-short", "chain of five merges-short")
def test_designs_of_engines_are_not_accused(design: Design, case: DenseDecodeCase, judged: Judged) -> None:
    """A kernel whose roundings are those that it may make would be accused of more."""
    assert judged(run(design, 64), case, design.numerics) is None


def test_an_error_beyond_its_bound_is_told_as_such(judged: Judged) -> None:
    """A kernel without the scale was told that each of its errors is within its bound, as a second finding."""
    failure = judged(lambda q, k, v, scale: run(DESIGNS[0], 64)(q, k, v, 1.0), SHORT, Numerics())
    assert failure is not None
    assert (failure.oracle, failure.kind, failure.cause) == ("residuals", "out:value", "scale")
    assert failure.message.startswith("with other numbers, out[")
    assert failure.message.endswith("; the scale is left out")  # as a fact: cases beside it are asked as of any other


@pytest.mark.night
@pytest.mark.parametrize("case", [SHORT, LONG], ids=["short", "long"])
def test_a_row_sum_in_16_bits_is_named(case: DenseDecodeCase, judged: Judged) -> None:
    """A sum of weights that is rounded from tile to tile would go unseen: its LSE is within the bound."""
    failure = judged(run(Mistake("", "", short_sum=True), 16), case, Numerics())
    assert failure is not None
    assert (failure.tensor, failure.cause) == ("lse", "sums_rounded")
    assert "the sum of the softmax weights is kept in float16" in failure.message


@pytest.mark.parametrize(
    ("tile", "dtype", "numerics", "rows"),
    [
        pytest.param(16, "float16", Numerics(), 512, id="16-float16"),
        pytest.param(16, "bfloat16", Numerics(), 128, id="16-bfloat16"),
        pytest.param(32, "bfloat16", Numerics(), 128, id="32-bfloat16"),
        # half as many roundings are no more than those of partial results, which a kernel may make that declares none
        pytest.param(32, "float16", SUMS_IN_FLOAT32, 512, id="32-float16"),
    ],
)
@pytest.mark.by_day("16-bfloat16")
def test_a_row_sum_in_16_bits_shows_without_a_log_sum_exp(
    tile: int, dtype: Any, numerics: Numerics, rows: int, judged: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that returns its output alone could keep the sum of its weights in 16 bits: each error is small.

    Where the elements are too large together as well, that rows are wrong by a factor would go untold.
    """
    case = msgspec.structs.replace(LONG, dtype=dtype)
    monkeypatch.setitem(repeated._ENOUGH_ROWS, "cpu", rows)

    def without_lse(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Result:
        out, _ = run(Mistake("", "", short_sum=True), tile)(q, k, v, scale)
        scores = torch.einsum("hd,hnd->hn", q.float(), k.float()) * scale
        return out, scores.logsumexp(-1)  # right, so that nothing else shows it

    failure = judged(without_lse, case, numerics)
    assert failure is not None
    assert failure.kind == "out:factor"
    assert "by a common factor" in failure.message


@pytest.mark.night
def test_an_accumulator_in_16_bits_is_named(judged: Judged) -> None:
    """An output that is rounded from tile to tile would go unseen: each of its errors is within the bound."""
    failure = judged(run(Mistake("", "", short_out=True), 16), LONG, SUMS_IN_FLOAT32)
    assert failure is not None
    assert (failure.tensor, failure.cause) == ("out", "sums_rounded")
    assert "the sum of weights x V is kept in float16" in failure.message


def cut(x: Tensor) -> Tensor:
    """To float16, towards zero."""
    return (x.view(torch.int32) & -(1 << 13)).view(torch.float32)


def test_an_output_that_is_cut_off_is_named(judged: Judged) -> None:
    """A result that is never rounded up would go unseen: its errors are within the bound for partial results."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Result:
        scores = torch.einsum("hd,hnd->hn", q.float(), k.float()) * scale
        out = torch.einsum("hn,hnd->hd", scores.softmax(-1), v.float())
        return cut(out).half(), scores.logsumexp(-1)

    failure = judged(attend, SHORT, SUMS_IN_FLOAT32)
    assert failure is not None
    assert (failure.kind, failure.cause) == ("out:lean", "cut_off")
    assert "they are biased towards zero" in failure.message
    assert "the output is cut off to float16, not rounded" in failure.message


def test_summed_weights_that_are_cut_off_lean_downwards(judged: Judged) -> None:
    """A sum of weights of which a part is always left out would go unseen."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Result:
        scores = torch.einsum("hd,hnd->hn", q.float(), k.float()) * scale
        weights = cut((scores - scores.amax(-1, keepdim=True)).exp())
        out = torch.einsum("hn,hnd->hd", weights, v.float()) / weights.sum(-1, keepdim=True)
        return out.half(), scores.amax(-1) + weights.sum(-1).log()

    failure = judged(attend, SHORT, Numerics(partials="float32", matmul="ieee"))
    assert failure is not None
    assert failure.tensor == "lse"
    assert "each softmax weight is cut off to float16" in failure.message


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("paged_eager", PagedDecodeCase(**FIELDS, seq_lens=(40, 17), block_size=16)),
        ("split_k_partials_eager", SplitDecodeCase(**FIELDS, seq_lens=(40, 17), block_size=16, num_splits=3)),
        ("paged_attention_eager", PagedAttentionCase(**FIELDS, seq_lens=(40, 17), query_lens=(5, 1), block_size=16)),
        (
            "paged_attention_eager",
            PagedAttentionCase(
                **FIELDS, seq_lens=(90, 17), query_lens=(5, 1), block_size=16, variant=Variant(window=30)
            ),
        ),
    ],
    ids=["paged", "split", "prefill", "window"],
)
def test_other_problems_are_judged(name: str, case: Any) -> None:
    """A correct kernel for pages, splits, prompts or windows would be accused or could not be judged."""
    assert judge(load_here(name), case, device="cpu", relations=("residuals",)).failure is None


def test_few_kernels_are_accused_by_chance() -> None:
    """Errors as large as they may be, or going either way, would be accused of being larger or one-sided."""
    torch.manual_seed(0)
    ones = torch.ones(600, 64, dtype=torch.float64)
    for share in (0.0, 0.3, 0.9):
        for _ in range(50):
            told = residuals(torch.randn_like(ones), ones, share * ones, most_sharing=4)
            assert not told.is_too_large
            assert not told.is_one_sided
        assert residuals(1.6 * torch.randn_like(ones), ones, share * ones, most_sharing=4).is_too_large
    assert residuals(torch.randn_like(ones) - 0.5, ones, 0 * ones, most_sharing=4).is_one_sided


def test_float32_and_8_bit_caches_are_left_alone() -> None:
    """Roundings that are not taken apart would be judged as if they were."""
    from attnfuzz.oracles.relations.residuals import RESIDUALS

    declaration = load_here("dense_eager").declaration
    assert RESIDUALS.applies(declaration, SHORT)
    assert not RESIDUALS.applies(declaration, msgspec.structs.replace(SHORT, dtype="float32"))
    assert not RESIDUALS.applies(declaration, msgspec.structs.replace(SHORT, seq_lens=(3, 2)))
    assert RESIDUALS.applies(declaration, msgspec.structs.replace(SHORT, values=Values(keys="negative")))


def test_sums_of_weights_without_a_log_sum_exp_are_tried_in_rows_of_several_tiles() -> None:
    """One that is kept in 16 bits, which nothing else shows, was looked for in one case of hundreds."""
    without, usual = (attnfuzz.Supports(lse=lse) for lse in ("none", "natural"))
    several = msgspec.structs.replace(SHORT, dtype="bfloat16")
    few = msgspec.structs.replace(several, seq_lens=(20, 0, 40))

    def weight(supports: attnfuzz.Supports, case: DenseDecodeCase) -> Any:
        @attnfuzz.kernel("dense_decode", supports=supports)
        def kernel(inputs: Any) -> None:
            """Whatever it does."""

        assert callable(RESIDUALS.weight)
        return RESIDUALS.weight(kernel.declaration, case)

    assert weight(without, several) > weight(without, few) == weight(usual, several)
    assert weight(without, msgspec.structs.replace(several, seq_lens=(0,))) == weight(usual, several)
