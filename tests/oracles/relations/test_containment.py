"""Numbers that are not finite, and rows that are told of those of others."""

from __future__ import annotations

import math
import sys
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor

import attnfuzz
from attnfuzz.declaration import Kernel
from attnfuzz.inputs.layouts import token_views
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.relations.containment import CONTAINMENT
from attnfuzz.problems.cases import Case, DenseDecodeCase, PagedAttentionCase, PagedDecodeCase, SplitDecodeCase
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.recipes import Pages, Values
from attnfuzz.problems.variants import Variant
from attnfuzz.strategies import cases
from attnfuzz.testing.loading import load_here
from attnfuzz.verdict import Failure

FIELDS: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 8, "scale": 0.25, "dtype": "float16"}
VALUES: Any = Values(keys="fine", values="normal", seed=4)
DENSE = DenseDecodeCase(**FIELDS, seq_lens=(5, 70, 2), values=VALUES)
PAGED = PagedDecodeCase(**FIELDS, seq_lens=(5, 0, 21), values=VALUES, block_size=8)
SHARED = PagedDecodeCase(**FIELDS, seq_lens=(16, 5, 21), values=VALUES, block_size=8, pages=Pages(shared_blocks=2))
SPLIT = SplitDecodeCase(**FIELDS, seq_lens=(5, 0, 21), values=VALUES, block_size=8, num_splits=3)
CAUSAL = PagedAttentionCase(**FIELDS, seq_lens=(5, 21), query_lens=(2, 3), values=VALUES, block_size=8)


PROMISES = attnfuzz.Supports(infinite_scores=True)


def contained(kernel: Kernel, case: Case) -> Failure | None:
    return judge(kernel, case, device="cpu", relations=("containment",)).failure


def guarded(scores: Tensor) -> Tensor:
    """What a textbook's softmax makes NaN of, where no score is above -inf."""
    return torch.where(scores.isneginf(), 0.0, scores.softmax(0))


def without_a_guard(scores: Tensor) -> Tensor:
    """Online softmax over tiles of 16, whose maximum is subtracted from itself while it is -inf."""
    top, weights = torch.tensor(-torch.inf), torch.zeros(0)
    for part in scores.split(16):  # type: ignore[no-untyped-call]  # torch does not annotate it
        higher = torch.maximum(top, part.max())
        weights = (
            torch.cat([weights * (top - higher).exp(), (part - higher).exp()])
            if len(weights)
            else (part - higher).exp()
        )
        top = higher
    return weights / weights.sum()


def of_empty_splits(scores: Tensor) -> Tensor:
    """Four splits, each divided by its own sum: one of 0, where all of its scores are -inf."""
    parts = scores.split(-(-len(scores) // 4))  # type: ignore[no-untyped-call]
    states = torch.stack([part.logsumexp(0) for part in parts])
    shares = (states - states.max()).exp() / (states - states.max()).exp().sum()
    return torch.cat([share * (part - part.max()).exp() / (part - part.max()).exp().sum() for share, part in zip(
        shares, parts, strict=True)])  # fmt: skip


def large_instead(scores: Tensor) -> Tensor:
    """As kernels write it that have a large number for -inf."""
    return scores.clamp(min=-1e30).logsumexp(0)


def as_zeros(scores: Tensor) -> Tensor:
    return scores.nan_to_num(neginf=0.0).softmax(0)


def lse_of_tiles(scores: Tensor) -> Tensor:
    """Added tile by tile: -inf - -inf."""
    found = scores[0]
    for score in scores[1:]:
        found = (
            score + torch.log1p((found - score).exp()) if score > found else found + torch.log1p((score - found).exp())
        )
    return found


def told_of_the_other_head(inputs: Any, out: Tensor, lse: Tensor) -> Any:
    """Of a sequence's values for all KV heads, multiplied at once with weights of which some are 0."""
    live = [v[:n].sum(0) for v, n in zip(inputs.v, inputs.seq_lens.tolist(), strict=True)]
    return out + 0 * torch.stack(live).sum(1, keepdim=True).to(out.dtype), lse


def one_maximum_for_all(inputs: Any, out: Tensor, lse: Tensor) -> Any:
    """A maximum that rows of one tile share: that of the row with NaN is everybody's."""
    return out, lse - (lse.max() - lse.max())


def gives_up(inputs: Any, out: Tensor, lse: Tensor) -> Any:
    """A check of what went in, and zeros for the whole batch."""
    last = torch.stack([v[n - 1] for v, n in zip(inputs.v, inputs.seq_lens.tolist(), strict=True)])
    return (out, lse) if bool(last.isfinite().all()) else (torch.zeros_like(out), lse)


def behind_the_end(inputs: Any, out: Tensor, lse: Tensor) -> Any:
    """Of the last page all tokens, times 0 where the sequence has not reached them, if another one has."""
    lens, table = inputs.seq_lens.tolist(), inputs.block_table
    v_slots = token_views(inputs.k_cache, inputs.v_cache, inputs.layout).v
    for seq, n in enumerate(lens):
        page = (n - 1) // inputs.block_size
        reached = [
            m - page * inputs.block_size for i, m in enumerate(lens) if m > n and table[i, page] == table[seq, page]
        ]
        if n and reached:
            tail = v_slots[table[seq, page], (n - 1) % inputs.block_size + 1 : reached[0]]
            out[seq] += (0 * tail.float().sum(0)).repeat_interleave(2, 0).to(out.dtype)
    return out, lse


def rescaled_together(inputs: Any, out: Tensor, lse: Tensor) -> Any:
    """By the largest number in the cache of all sequences, as it is done to make another format of it."""
    k_slots, v_slots = token_views(inputs.k_cache, inputs.v_cache, inputs.layout)
    tokens = [
        slots.view(torch.uint8)[page, : min(n - i * inputs.block_size, inputs.block_size)].view(slots.dtype).float()
        for slots in (k_slots, v_slots)
        for seq, n in enumerate(inputs.seq_lens.tolist())
        for i, page in enumerate(inputs.block_table[seq, : -(-n // inputs.block_size)].tolist())
    ]
    largest = torch.stack([part.abs().max() for part in tokens]).max()
    return out / largest * largest, lse


PLANTED: dict[str, tuple[str, dict[str, Any]]] = {
    "a row of nothing but -inf": ("only scores of -inf", {"weights": lambda scores: scores.softmax(0)}),
    "its LSE is that of a large number": ("only scores of -inf", {"weights": guarded, "lse": large_instead}),
    "a maximum of -inf is subtracted from itself": ("score of -inf", {"weights": without_a_guard}),
    "a split of -inf is divided by its sum": ("score of -inf", {"weights": of_empty_splits}),
    "-inf is replaced by 0": ("score of -inf", {"weights": as_zeros}),
    "the LSE of two scores of -inf": ("score of -inf", {"weights": guarded, "lse": lse_of_tiles}),
    "a sum over all heads": ("inf in V", {"weights": guarded, "after": told_of_the_other_head}),
    "one maximum for a tile of rows": ("nan in K", {"weights": guarded, "after": one_maximum_for_all}),
    "a batch that is given up": ("inf in V", {"weights": guarded, "after": gives_up}),
}


@pytest.mark.parametrize("bug", PLANTED)
@pytest.mark.by_day("a row of*", "a maximum of*", "a split of*", "a sum over*", "one maximum*")
def test_what_is_not_finite_and_leaks_or_counts(bug: str, plant: Any) -> None:
    """One request whose cache holds an infinity would spoil others, or its own masked tokens would count."""
    kind, steps = PLANTED[bug]
    failure = contained(plant(**steps, supports=PROMISES), DENSE)
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("containment", kind), failure.message
    rule = "the row is an empty one" if kind == "only scores of -inf" else "the bits must be equal"
    assert rule in failure.message


@pytest.mark.parametrize("is_torchs", [True, False])
def test_what_torchs_own_product_does_is_not_the_kernels_fault(
    is_torchs: bool, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some processors each eager kernel would be accused of what a product of bfloat16 matrices does there."""

    def spread(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        spoilt = out.isnan().any()
        return out.masked_fill(spoilt, math.nan), lse

    monkeypatch.setattr(sys.modules["attnfuzz.oracles.relations.containment"], "_products_leak", lambda: is_torchs)
    case = msgspec.structs.replace(DENSE, dtype="bfloat16", values=Values(keys="fine", values="normal", seed=4))
    failure = contained(plant(after=spread), case)
    assert (failure is not None and "in K" in failure.message) is not is_torchs


def test_a_token_on_a_shared_page_that_one_sequence_has_not_reached(plant: Any) -> None:
    """A system prompt that one request is through with would show in another one that is still in the middle of it."""
    kernel = plant("paged_decode", after=behind_the_end)
    failure = contained(kernel, SHARED)
    assert failure is not None
    assert failure.kind == "inf in V"
    assert "out[seq 1, head 2" in failure.message
    assert "token 5 of sequence 2, KV head 1" in failure.message
    assert "only rows that read KV head 1 of a sequence that has this token may show it" in failure.details
    assert contained(kernel, msgspec.structs.replace(SHARED, pages=Pages())) is None


@pytest.mark.parametrize(
    ("leak", "cause"), [(told_of_the_other_head, "read_without_weight"), (gives_up, ""), (one_maximum_for_all, "")]
)
def test_a_number_that_has_no_weight_is_told_from_one_that_matters(leak: Any, cause: str, plant: Any) -> None:
    """A load that lacks a mask would be two bugs, where NaN lies behind the end and where inf does in another row."""
    failure = contained(plant("dense_decode", weights=guarded, after=leak), DENSE)
    assert failure is not None
    assert failure.cause == cause
    assert ("0 x inf and 0 x NaN are NaN" in failure.message) == bool(cause)


def test_who_reads_a_shared_page_may_show_what_is_on_it(plant: Any) -> None:
    """Each request that has come past the token would be a finding."""
    assert contained(plant("paged_decode", weights=guarded, supports=PROMISES), SHARED) is None
    everyone = msgspec.structs.replace(SHARED, seq_lens=(16, 16, 16))
    assert contained(plant("paged_decode", weights=guarded, supports=PROMISES), everyone) is None


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.by_day("float8_e4m3fn")
def test_nan_in_an_8_bit_cache_that_spreads(kv_dtype: Any) -> None:
    """A request whose cache holds 0x7F would spoil all others."""
    eager = load_here("paged_eager")

    @attnfuzz.kernel("paged_decode", supports=attnfuzz.Supports(kv_dtypes=(kv_dtype,)))
    def spreading(inputs: Any) -> Any:
        return rescaled_together(inputs, *eager(inputs))

    case = msgspec.structs.replace(PAGED, kv=QuantisedKv(dtype=kv_dtype, scales="scattered"))
    failure = contained(spreading, case)
    assert failure is not None
    assert failure.kind == "nan in K"
    assert contained(eager, case) is None


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_what_an_8_bit_cache_holds_then(kv_dtype: Any) -> None:
    """The format without an infinity would get a number in its place, and the other no infinity."""
    case = msgspec.structs.replace(PAGED, kv=QuantisedKv(dtype=kv_dtype))
    seen = set[float]()

    @attnfuzz.kernel("paged_decode", supports=attnfuzz.Supports(kv_dtypes=(kv_dtype,), infinite_scores=True))
    def looking(inputs: Any) -> Any:
        slots = token_views(inputs.k_cache, inputs.v_cache, inputs.layout)
        for part in slots:
            row = part.view(torch.uint8)[inputs.block_table[2, 2], 4, 1].view(part.dtype).float()
            seen.update(float(one) for one in row.flatten() if not one.isfinite())
        return load_here("paged_eager")(inputs)

    assert contained(looking, case) is None
    kinds = {"nan" if math.isnan(one) else str(one) for one in seen}
    assert kinds - {"-inf"} == ({"nan"} if kv_dtype == "float8_e4m3fn" else {"nan", "inf"})


@pytest.mark.by_day
@pytest.mark.parametrize("sinks", [None, "level", "high", "low"])
@pytest.mark.parametrize("alibi", [None, "geometric"])
def test_an_empty_row_keeps_its_sink(sinks: Any, alibi: Any) -> None:
    """-inf would be asked for where a sink is left, or a sink that was rounded on the way would be a finding."""
    case = msgspec.structs.replace(PAGED, variant=Variant(sinks=sinks, alibi=alibi))
    for name in ("paged_eager", "paged_split_k_eager"):
        kernel = load_here(name)
        options = {option: choices[0] for option, choices in kernel.declaration.options.items()}
        assert contained(kernel, msgspec.structs.replace(case, options=options)) is None


def test_an_empty_row_without_its_sink(plant: Any) -> None:
    """The sink of a row whose scores are all -inf could be forgotten."""
    eager = load_here("paged_eager")

    @attnfuzz.kernel("paged_decode", supports=eager.declaration.supports)
    def forgetful(inputs: Any) -> Any:
        out, lse = eager(inputs)
        k_slots = token_views(inputs.k_cache, inputs.v_cache, inputs.layout).k
        last = [
            k_slots[table[(n - 1) // 8], (n - 1) % 8]
            for table, n in zip(inputs.block_table, inputs.seq_lens, strict=True)
        ]
        is_infinite = torch.stack([row.flatten(1).isinf().any(1) for row in last]).repeat_interleave(2, 1)
        return out, lse.masked_fill(is_infinite & (inputs.seq_lens > 0)[:, None], -math.inf)

    failure = contained(forgetful, msgspec.structs.replace(PAGED, variant=Variant(sinks="level")))
    assert failure is not None
    assert failure.kind == "only scores of -inf"
    assert failure.tensor == "lse"


def test_a_kernel_without_empty_rows(plant: Any) -> None:
    """What a kernel declares away with rows without keys would be asked of rows without weights."""
    textbook = {"weights": lambda scores: scores.softmax(0)}
    declared = attnfuzz.Supports(infinite_scores=True, empty_sequences=False)
    assert contained(plant(**textbook, supports=PROMISES), DENSE) is not None
    assert contained(plant(**textbook, supports=declared), DENSE) is None


def test_infinite_scores_in_splits(plant: Any) -> None:
    """A state that becomes empty would be a finding, or one of NaN none."""
    guards = {"weights": guarded, "supports": PROMISES}
    assert contained(plant("split_decode", **guards), SPLIT) is None
    failure = contained(plant("split_decode", lse=lse_of_tiles, **guards), SPLIT)
    assert failure is not None
    assert failure.kind == "score of -inf"


def test_a_key_that_leaks_across_the_batch(plant: Any) -> None:
    """Sequences that are shorter would read it, times 0."""
    case = msgspec.structs.replace(DENSE, seq_lens=(5, 2, 1))
    failure = contained(plant(after=lambda i, out, lse: (out + 0 * i.k[0, 4].sum().to(out.dtype), lse)), case)
    assert failure is not None
    assert failure.kind == "nan in K"
    assert "out[seq 1" in failure.message or "out[seq 0, head 0" in failure.message
    assert failure.details[-1] == "only rows that read KV head 1 of sequence 0 may show it"


def test_a_leak_has_the_mistake_that_gives_it(plant: Any) -> None:
    """A head that reads another one's keys would be told twice: where these hold other numbers, and where NaN."""

    def of_another_head(inputs: Any, seq: int, n: int, kv_head: int) -> tuple[Tensor, Tensor]:
        return inputs.k[seq, :n, -1].float(), inputs.v[seq, :n, kv_head]

    kernel = plant(tokens=of_another_head)
    wrong = judge(kernel, DENSE, device="cpu", relations=()).failure
    assert wrong is not None
    one_token = msgspec.structs.replace(DENSE, seq_lens=(1,), values=Values(keys="equal", values="normal"))
    leak = contained(kernel, one_token)
    assert leak is not None
    assert (wrong.oracle, leak.oracle) == ("accuracy", "containment")
    assert {one.mistake for one in wrong.causes} & {one.mistake for one in leak.causes}


def test_a_mask_that_is_added(plant: Any) -> None:
    """Torch's own attention would be accused: what is masked by adding -inf shows NaN of its own sequence's keys."""

    def added(inputs: Any, out: Tensor, lse: Tensor) -> Any:
        k_cache = inputs.k_cache
        last = [int(inputs.block_table[seq, (n - 1) // 8]) for seq, n in enumerate(inputs.seq_lens.tolist())]
        seq = torch.repeat_interleave(
            torch.arange(2), (inputs.cu_seqlens_q[1:] - inputs.cu_seqlens_q[:-1]).long(), output_size=len(out)
        )
        tails = torch.stack(
            [k_cache[last[s], (n - 1) % 8].repeat_interleave(2, 0) for s, n in enumerate(inputs.seq_lens.tolist())]
        )
        return out + 0 * tails[seq].to(out.dtype), lse

    assert contained(plant("paged_attention", after=added), msgspec.structs.replace(CAUSAL, layout="NHD")) is None


@pytest.mark.parametrize("case", [DENSE, PAGED, CAUSAL])
def test_a_right_kernel_is_not_accused(case: Any, plant: Any) -> None:
    """NaN in the row that reads NaN would be a finding."""
    assert contained(plant(case.problem, weights=guarded, supports=PROMISES), case) is None


@pytest.mark.parametrize("problem", ["dense_decode", "paged_decode", "split_decode", "paged_attention"])
@pytest.mark.by_day("paged_attention")
def test_right_kernels_are_not_accused_on_drawn_cases(problem: Any, plant: Any) -> None:
    """Recipes, exponents, windows and sinks would each have a case in which the law does not hold."""
    name = {
        "dense_decode": "dense_eager",
        "paged_decode": "paged_eager",
        "split_decode": "split_k_partials_eager",
        "paged_attention": "paged_attention_eager",
    }[problem]
    kernel = load_here(name)
    kernel = kernel.declared(
        supports=msgspec.structs.replace(kernel.declaration.supports, max_seq_len=64, infinite_scores=True)
    )
    judged = 0

    @settings(
        max_examples=60, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @seed(11)
    @given(cases(problem, supports=kernel.declaration.supports, options=kernel.declaration.options))
    def run(case: Case) -> None:
        nonlocal judged
        if CONTAINMENT.applies(kernel.declaration, case):
            judged += 1
            assert contained(kernel, case) is None, case

    run()
    assert judged >= 15


def test_what_a_kernel_does_not_promise_is_not_asked(plant: Any) -> None:
    """A kernel that never meets -inf would need a guard; what leaks to other rows is a bug of any kernel."""
    assert contained(plant(weights=without_a_guard), DENSE) is None
    assert contained(plant(after=gives_up), DENSE) is not None


def test_a_soft_cap_makes_a_number_of_minus_infinity() -> None:
    """-cap is a score like any other, and both runs would differ from the case."""
    kernel = load_here("paged_eager")
    case = msgspec.structs.replace(PAGED, variant=Variant(soft_cap=2.0))
    assert contained(kernel, case) is None
