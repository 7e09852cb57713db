"""The float64 references, against the definition written with Python floats, and against laws."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attnfuzz.inputs.reference import attention_reference, merge_all
from attnfuzz.inputs.registry import problem_of
from attnfuzz.problems.cases import DenseDecodeCase, MergeStatesCase
from attnfuzz.problems.recipes import LSE_KINDS, Values
from attnfuzz.values import LogicalAttention, attention_values, merge_values

INF = math.inf


def dense(**more: Any) -> DenseDecodeCase:
    base: dict[str, Any] = {"num_q_heads": 6, "num_kv_heads": 2, "head_size": 5, "seq_lens": (4, 0, 7), "scale": 0.7}
    return DenseDecodeCase(**base | {"values": Values(keys="normal", values="normal", seed=1)} | more)


def by_definition(case: Any, values: LogicalAttention, seq: int, head: int) -> tuple[list[float], float]:
    """One head's output and LSE in plain Python; query heads 0, 1, 2 read KV head 0, and 3, 4, 5 KV head 1."""
    k, v = values.sequence(seq)
    kv_head = 0 if head < 3 else 1
    q = values.q[seq, head].tolist()
    scores = [case.scale * math.fsum(a * b for a, b in zip(q, row, strict=True)) for row in k[:, kv_head].tolist()]
    if not scores:
        return [0.0] * case.value_size, -INF
    total = math.fsum(math.exp(s) for s in scores)
    columns = zip(*v[:, kv_head].tolist(), strict=True)
    return [math.fsum(math.exp(s) * x for s, x in zip(scores, c, strict=True)) / total for c in columns], math.log(
        total
    )


@pytest.mark.parametrize("v_head_size", [None, 3, 8])
def test_attention_is_its_definition(v_head_size: int | None) -> None:
    """Every verdict would be measured against something else than attention."""
    case = dense(v_head_size=v_head_size)
    values = attention_values(case)
    expected = attention_reference(case, values)
    for seq in range(3):
        for head in range(6):
            out, lse = by_definition(case, values, seq, head)
            assert expected.out[seq, head].tolist() == pytest.approx(out, rel=1e-13, abs=1e-13)
            assert expected.lse[seq, head].item() == pytest.approx(lse, rel=1e-13)


@pytest.mark.parametrize("keys", ["rising", "negative"])
def test_extreme_scores_stay_finite(keys: Any) -> None:
    """The reference itself would overflow where kernels must not."""
    case = dense(values=Values(keys=keys, logit_exponent=8), scale=8.0)
    expected = attention_reference(case, attention_values(case))
    assert expected.out.isfinite().all()
    assert expected.lse[[0, 2]].isfinite().all()
    assert expected.lse[0].abs().min() > 710  # exp overflows float64 above 709.8


def test_position_coded_values_come_out_of_a_single_key() -> None:
    """The output would not name the token that was read."""
    case = dense(seq_lens=(1,), values=Values())
    values = attention_values(case)
    assert torch.equal(attention_reference(case, values).out[0, 5], values.v[0, 1].double())


def test_only_empty_splits_give_the_empty_state() -> None:
    """An empty sequence's splits would merge to NaN instead of 0 and -inf."""
    merged, lse = merge_all(torch.full((1, 1, 2, 3), math.nan), torch.full((1, 1, 2), -INF))
    assert merged.tolist() == [[[0.0, 0.0, 0.0]]]
    assert lse.tolist() == [[-INF]]


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_bad_partial_lse_stays_visible(bad: float) -> None:
    """A NaN or +inf that a kernel left in one split would vanish in the merge."""
    merged, _ = merge_all(torch.ones(1, 1, 2, 3), torch.tensor([[[0.5, bad]]]))
    assert merged.isnan().all()
    merged, _ = merge_all(torch.tensor([[[[math.nan], [1.0]]]]), torch.zeros(1, 1, 2))
    assert merged.isnan().all()


def merged_by_definition(prefix: tuple[Any, float], suffix: tuple[Any, float], base: float) -> tuple[Any, float]:
    live = [(out, lse) for out, lse in (prefix, suffix) if math.isfinite(lse)]
    if not live:
        return [0.0] * len(prefix[0]), -INF
    top = max(lse for _, lse in live)
    weights = [base ** (lse - top) for _, lse in live]
    columns = zip(*(out for out, _ in live), strict=True)
    out = [math.fsum(w * x for w, x in zip(weights, c, strict=True)) / math.fsum(weights) for c in columns]
    return out, top * math.log(base) + math.log(math.fsum(weights))


@pytest.mark.parametrize("lse_base2", [False, True])
@pytest.mark.parametrize("suffix", LSE_KINDS)
@pytest.mark.parametrize("prefix", LSE_KINDS)
def test_merge_is_its_definition(prefix: Any, suffix: Any, lse_base2: bool) -> None:
    """States, empty or not, would be merged to something else than the state over both sets of keys."""
    case = MergeStatesCase(num_q_heads=2, head_size=3, num_tokens=2, lse_pairs=((prefix, suffix),), seed=5)
    values = merge_values(case, lse_base2=lse_base2)
    expected = problem_of(case).reference(case, values)
    for token in range(2):
        for head in range(2):
            at = (token, head)
            first = (values.prefix_output[at].tolist(), values.prefix_lse[at].item())
            second = (values.suffix_output[at].tolist(), values.suffix_lse[at].item())
            out, lse = merged_by_definition(first, second, 2.0 if lse_base2 else math.e)
            assert expected.out[at].tolist() == pytest.approx(out, rel=1e-13, abs=1e-13)
            assert expected.lse[at].item() == pytest.approx(lse, rel=1e-13)
