"""What a kernel should give, with variants and far apart as well."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attnfuzz.numerics.bounds as attention_module
from attnfuzz.declaration import Declaration
from attnfuzz.inputs.registry import problem_of
from attnfuzz.memory.image import Fetch
from attnfuzz.numerics import attention_bound, merge_bound
from attnfuzz.problems.cases import (
    PROBLEMS,
    AttentionCase,
    Case,
    DenseDecodeCase,
    MergeStatesCase,
    PagedDecodeCase,
    SplitDecodeCase,
)
from attnfuzz.problems.declared_numerics import FixedTolerance, Numerics
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.recipes import Needle, Values
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import ALIBI_RECIPES, SINK_RECIPES, VARIANTS, Variant
from attnfuzz.strategies import cases
from attnfuzz.trials import expectations as distant_expectations
from attnfuzz.trials.expectations import DistantExpectations, Expectation, expectations, on_device
from attnfuzz.values.tokens import all_on_device
from tests.sample_cases import paged_case

Request = tuple[Declaration, Case, Any]

STRICT = Numerics(probabilities="float32", partials="float32", matmul="ieee")


def attention(**more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 16, "seq_lens": (5, 0, 9), "scale": 0.25}
    return base | {"values": Values(keys="normal", values="normal", seed=1)} | more


HUGE = Values(keys="rising", values="large", logit_exponent=8, seed=3)
NEEDLE = Values(keys="integers", needles=(Needle(seq=0, position=3, kv_head=0),), seed=4)

CASES: tuple[Case, ...] = (
    DenseDecodeCase(**attention()),
    MergeStatesCase(num_q_heads=3, head_size=5, num_tokens=7, seed=2),
    DenseDecodeCase(**attention(seq_lens=(0, 0))),
    DenseDecodeCase(**attention(v_head_size=40)),
    PagedDecodeCase(**attention(block_size=4, head_size=40, v_head_size=16, num_kv_heads=4)),
    PagedDecodeCase(**attention(block_size=4, dtype="float32", values=HUGE, scale=8.0)),
    SplitDecodeCase(**attention(block_size=4, num_splits=3, head_size=13, values=NEEDLE)),
    MergeStatesCase(
        num_q_heads=2,
        head_size=80,
        num_tokens=6,
        dtype="bfloat16",
        lse_pairs=(("finite", "-inf"), ("+inf", "-inf"), ("high", "low"), ("equal", "equal"), ("+inf", "finite")),
    ),
    PagedDecodeCase(**attention(block_size=1, num_q_heads=6, num_kv_heads=1, seq_lens=(1, 300, 2), dtype="bfloat16")),
    DenseDecodeCase(**attention(num_q_heads=3, num_kv_heads=3, head_size=128, seq_lens=(33, 32, 31), scale=0.1)),
    MergeStatesCase(num_q_heads=1, head_size=1, num_tokens=1, dtype="float32", lse_pairs=(("-inf", "+inf"),)),
)


def request(case: Case, numerics: Numerics | None = None, supports: Supports | None = None) -> Request:
    declaration = Declaration(
        name="any", problem=case.problem, numerics=numerics or Numerics(), supports=supports or Supports()
    )
    return declaration, case, problem_of(case).values(case, "cpu", declaration.supports)


def expected_and_bounds(found: Expectation) -> tuple[Tensor, ...]:
    return found.expected.out, found.expected.lse, found.bound.out, found.bound.lse


def assert_same(one: Expectation, other: Expectation) -> None:
    """The same but for the order of float64 sums.

    Errors of weights are differences of numbers near 1, of which few are above 4e-7: what is certain of a bound is the
    16th decimal place of those numbers, its 9th digit.
    """
    for tensor, reference, tolerance in zip(
        expected_and_bounds(one), expected_and_bounds(other), (1e-12, 1e-12, 1e-9, 1e-9), strict=True
    ):
        torch.testing.assert_close(tensor, reference, rtol=tolerance, atol=tolerance * 1e-3)


def together(requests: list[Request], **more: Any) -> list[Expectation]:
    keywords: dict[str, Any] = {"tolerance": "bound", "one_copy": False} | more
    return expectations(requests, **keywords)


def bound_by_sequence(declaration: Declaration, case: Case, values: Any, *, num_partials: int) -> tuple[Tensor, Tensor]:
    dtype = getattr(torch, case.dtype)
    if isinstance(case, MergeStatesCase):
        lses = (torch.where(lse.isinf(), -math.inf, lse.double()) for lse in (values.prefix_lse, values.suffix_lse))
        bound = merge_bound(values.prefix_output.double(), values.suffix_output.double(), *lses, out_dtype=dtype)
        return bound.out, bound.lse
    assert isinstance(case, AttentionCase)
    sequences = [[part.double() for part in values.sequence(seq)] for seq in range(case.num_seqs)]
    rows = [
        attention_bound(
            values.q[seq].double(),
            k,
            v,
            case.scale,
            in_dtype=dtype,
            out_dtype=dtype,
            numerics=declaration.numerics,
            num_partials=num_partials,
            partial_merge=isinstance(case, SplitDecodeCase),
        )
        for seq, (k, v) in enumerate(sequences)
    ]
    return torch.stack([row.out for row in rows]), torch.stack([row.lse for row in rows])


@pytest.mark.parametrize("numerics", [Numerics(), STRICT, Numerics(matmul="tf32")], ids=["loose", "strict", "tf32"])
def test_all_problems_at_once_are_each_by_itself(numerics: Numerics) -> None:
    """Results of a batch would be another case's, or depend on what else is in the batch."""
    requests = [request(case, numerics) for case in CASES]
    for found, (declaration, case, values) in zip(together(requests), requests, strict=True):
        expected = problem_of(case).reference(case, values)
        torch.testing.assert_close(found.expected.out, expected.out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.expected.lse, expected.lse, rtol=1e-12, atol=1e-12)
        out, lse = bound_by_sequence(declaration, case, values, num_partials=2)
        torch.testing.assert_close(found.bound.out, out, rtol=1e-9, atol=0)
        torch.testing.assert_close(found.bound.lse, lse, rtol=1e-9, atol=0)


def test_order_does_not_matter() -> None:
    """Expectations would go to the wrong cases, whose dtypes decide how they are put together."""
    requests = [request(case) for case in CASES]
    for found, backwards in zip(together(requests), reversed(together(requests[::-1])), strict=True):
        assert_same(found, backwards)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.by_day("paged_attention*", "merge_states*")
def test_drawn_cases_together_are_each_alone(problem: Any) -> None:
    """A combination of sizes that nobody thought of would get wrong bounds, in batches only."""

    @settings(max_examples=10, deadline=None, database=None, derandomize=True)
    @given(st.lists(cases(problem), min_size=2, max_size=12))
    def check(drawn: list[Case]) -> None:
        requests = [request(case) for case in drawn]
        for found, alone in zip(together(requests), requests, strict=True):
            assert_same(found, together([alone])[0])
            assert all(not part.isnan().any() for part in expected_and_bounds(found))

    check()


def test_empty_sequences_must_be_exact() -> None:
    """Length 0 gives 0 and -inf without arithmetic: any bound above 0 would hide an unwritten row."""
    for case in (DenseDecodeCase(**attention(seq_lens=(0, 3, 0))), DenseDecodeCase(**attention(seq_lens=(0,)))):
        (found,) = together([request(case)])
        empty = torch.tensor(case.seq_lens) == 0
        assert not found.expected.out[empty].any()
        assert bool(found.expected.lse[empty].isneginf().all())
        assert not found.bound.out[empty].any()
        assert not found.bound.lse[empty].any()
        assert bool((found.bound.out[~empty] > 0).all())
        assert bool((found.bound.lse[~empty] > 0).all())


def test_a_merge_of_empty_states_must_be_exact() -> None:
    """As for empty sequences, where both LSEs say that there is no state."""
    pairs: Any = (("-inf", "+inf"), ("finite", "-inf"))
    (found,) = together([request(MergeStatesCase(num_q_heads=2, head_size=4, num_tokens=3, lse_pairs=pairs))])
    assert bool(found.expected.lse[:, 0].isneginf().all())
    assert not torch.cat([found.expected.out[:, 0], found.bound.out[:, 0]]).any()
    assert not found.bound.lse[:, 0].any()
    assert bool((found.bound.out[:, 1] > 0).all())


def test_lses_of_a_merge_count_in_their_base() -> None:
    """Kernels with base-2 LSEs would be compared with a merge of other numbers."""
    natural, base2 = Supports(), Supports(lse="base2")
    case = MergeStatesCase(num_q_heads=2, head_size=4, num_tokens=3)
    found = together([request(case, supports=natural), request(case, supports=base2)])
    for one, (_, _, values) in zip(
        found, (request(case, supports=natural), request(case, supports=base2)), strict=True
    ):
        expected = problem_of(case).reference(case, values)
        torch.testing.assert_close(one.expected.lse, expected.lse, rtol=1e-13, atol=1e-13)
    assert not torch.allclose(found[0].expected.lse, found[1].expected.lse)


def test_a_fixed_tolerance_replaces_the_bound() -> None:
    """Suites that must agree with another one's tolerance would be judged by the derived bound."""
    fixed = FixedTolerance(atol=0.25, rtol=0.5)
    for found in together([request(case) for case in CASES], tolerance=fixed):
        assert torch.equal(found.bound.out, fixed.bound(found.expected.out))
        assert torch.equal(found.bound.lse, fixed.bound(found.expected.lse))


def test_what_a_kernel_declares_widens_its_own_bounds_only() -> None:
    """One kernel's declaration would excuse another's errors in the same batch."""
    case = DenseDecodeCase(**attention(seq_lens=(40,), dtype="float32"))
    strict, loose = together([request(case, STRICT), request(case, Numerics(matmul="tf32"))])
    assert bool((loose.bound.out > 10 * strict.bound.out).all())
    assert_same(strict, together([request(case, STRICT)])[0])


def test_a_kernel_may_split_unless_it_says_otherwise() -> None:
    """Kernels that split without an option would be reported for the roundings of their partial results."""
    case = DenseDecodeCase(**attention(seq_lens=(40,)))
    declaration, _, values = request(case)
    whole = Declaration(name="any", problem=case.problem, options={"num_splits": (1,)})
    bounds = [found.bound.out for found in together([(declaration, case, values), (whole, case, values)])]
    assert bool((bounds[0] > bounds[1]).all())


def test_only_kernels_on_a_gpu_may_round_copies_of_a_score_differently() -> None:
    """A CPU has one copy of each score: slack for more would let small bugs through there."""
    case = DenseDecodeCase(**attention(dtype="float32"))
    (found,), (compiled,) = together([request(case)], one_copy=True), together([request(case)])
    live = torch.tensor(case.seq_lens) > 0
    assert bool((found.bound.out[live] < compiled.bound.out[live]).all())
    assert torch.equal(found.bound.lse, compiled.bound.lse)


def test_large_sequences_are_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long sequence would fill the memory, or lose heads where its parts are put together."""
    requests = [request(case) for case in CASES]
    whole = together(requests)
    for chunk in (1, 900, 5000):
        monkeypatch.setattr(attention_module, "_LARGEST_CHUNK", chunk)
        for one, other in zip(together(requests), whole, strict=True):
            assert_same(one, other)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Counts what a GPU would launch, and what would wait for it."""

    VIEWS = ("view", "as_strided", "unbind", "slice", "select", "squeeze", "expand", "transpose", "split", "alias")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if not any(view in name for view in self.VIEWS):
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("case_type", [DenseDecodeCase, MergeStatesCase])
def test_cases_of_one_size_cost_no_operation_more(case_type: Any) -> None:
    """Each operation is a launch of several microseconds on a GPU: a batch would be no faster than its cases alone."""
    fields = (
        attention() if issubclass(case_type, AttentionCase) else {"num_q_heads": 2, "head_size": 8, "num_tokens": 3}
    )
    counts = []
    together([request(case_type(**fields))])  # what a process makes once is no case's
    for number in (1, 20):
        requests = [request(case_type(**fields)) for _ in range(number)]
        with Operations() as operations:
            together(requests)
        counts.append(operations.found.total())
    assert counts[0] == counts[1] < 405


def test_no_requests_give_no_expectations() -> None:
    """A batch in which every kernel raised would end in an error of its own."""
    assert together([]) == []


def test_on_device_keeps_everything() -> None:
    """Expectations computed on the CPU would be compared with another case's run."""
    (found,) = together([request(CASES[0])])
    for one, other in zip(expected_and_bounds(on_device(found, "cpu")), expected_and_bounds(found), strict=True):
        assert torch.equal(one, other)


DECLARATION = Declaration(name="any", problem="paged_decode", supports=Supports(variants=VARIANTS), options={})


def of_variants(case: PagedDecodeCase) -> tuple[Declaration, PagedDecodeCase, Any]:
    return DECLARATION, case, problem_of(case).values(case, "cpu", Supports())


def drawn(source: random.Random, seed: int) -> PagedDecodeCase:
    fields: dict[str, Any] = {
        "window": source.choice([None, 1, 2, 5, 40]),
        "sinks": source.choice([None, *SINK_RECIPES]),
    }
    fields |= source.choice([{}, {"soft_cap": source.choice([0.5, 30.0])}, {"alibi": source.choice(ALIBI_RECIPES)}])
    num_kv_heads = source.choice([1, 2, 3])
    return paged_case(
        num_q_heads=num_kv_heads * source.choice([1, 2, 5]),
        num_kv_heads=num_kv_heads,
        head_size=source.choice([8, 20]),
        v_head_size=source.choice([None, 5, 24]),
        dtype=source.choice(["float16", "float32"]),
        seq_lens=tuple(source.choice([0, 1, 5, 9, 33]) for _ in range(source.choice([1, 2, 3]))),
        values=Values(
            keys=source.choice(["normal", "rising", "negative"]), logit_exponent=source.choice([0, 6]), seed=seed
        ),
        variant=Variant(**fields),
    )


def test_they_are_the_reference_whatever_is_beside_them() -> None:
    """A verdict would be on another case's slopes, on a sink that padding moved, or on keys outside of the window."""
    source = random.Random(0)
    requests = [of_variants(drawn(source, seed)) for seed in range(120)]
    found = expectations(requests, tolerance="bound", one_copy=False)
    for (_, case, values), one in zip(requests, found, strict=True):
        expected = problem_of(case).reference(case, values)
        torch.testing.assert_close(one.expected.out, expected.out, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(one.expected.lse, expected.lse, rtol=1e-10, atol=1e-10)
        assert bool(one.bound.out.isfinite().all())
        assert bool((one.bound.lse >= 0).all() & one.bound.lse.isfinite().all())


def operations(cases: Iterable[PagedDecodeCase]) -> int:
    requests = [of_variants(case) for case in cases]
    expectations(requests, tolerance="bound", one_copy=False)  # what a process makes once does not count
    with Operations() as counted:
        expectations(requests, tolerance="bound", one_copy=False)
    return int(counted.found.total())


def case_of_one_size(**fields: Any) -> PagedDecodeCase:
    shape: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 8, "seq_lens": (9,), "scale": 0.25}
    return PagedDecodeCase(**shape, block_size=4, variant=Variant(**fields))


def test_a_window_costs_no_operation_and_other_variants_a_fixed_number() -> None:
    """Plain cases would pay for variants, or a batch take longer with each case that has one."""
    plain, window, sinks = (case_of_one_size(**fields) for fields in ({}, {"window": 5}, {"sinks": "level"}))
    assert operations([window] * 8) == operations([plain] * 8)
    assert operations([sinks]) == operations([sinks] * 20) < 475


def test_a_lone_sequence_without_keys_has_its_sinks() -> None:
    """A batch of nothing but empty sequences with sinks would be looked up outside of all values."""
    case = paged_case(num_q_heads=6, num_kv_heads=3, head_size=8, seq_lens=(0, 0), variant=Variant(sinks="level"))
    (found,) = expectations([of_variants(case)], tolerance="bound", one_copy=False)
    expected = problem_of(case).reference(case, problem_of(case).values(case, "cpu", Supports()))
    assert torch.equal(found.expected.out, expected.out)
    torch.testing.assert_close(found.expected.lse, expected.lse, rtol=1e-10, atol=0.0)


ELSEWHERE = "cuda" if torch.cuda.is_available() else "cpu:0"  # not the string for "stay here"


@pytest.mark.by_day
@pytest.mark.parametrize("work", [0, 300, 1 << 30])
@pytest.mark.parametrize("fixture", ["dense", "paged", "split", "states"])
def test_same_numbers_as_here(
    fixture: str, work: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case would be compared with another one's expectation, or with half of its own."""
    monkeypatch.setattr(distant_expectations, "_HOST_WORK", work)
    case = request.getfixturevalue(fixture)
    cases = [msgspec.structs.replace(case, dtype=dtype) for dtype in ("float16", "float32", "bfloat16")]
    cases.append(msgspec.structs.replace(case, num_q_heads=2 * case.num_q_heads))
    declaration = Declaration(name="any", problem=case.problem)
    contents = problem_of(case).contents(cases, "cpu", Supports())
    requests: Any = [(declaration, one, of_one.values) for one, of_one in zip(cases, contents, strict=True)]
    found = DistantExpectations(requests, ELSEWHERE, "bound", False, Fetch())
    if ELSEWHERE == "cuda":
        torch.cuda.synchronize()
    expected = expectations(requests, tolerance="bound", one_copy=False)
    for one, other in zip(found.at_home(), expected, strict=True):
        torch.testing.assert_close(one.expected.out, other.expected.out)
        torch.testing.assert_close(one.expected.lse, other.expected.lse)
        torch.testing.assert_close(one.bound.out, other.bound.out)
        torch.testing.assert_close(one.bound.lse, other.bound.lse)


def test_caches_of_8_bits_and_others_in_one_batch(paged: PagedDecodeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales would stay behind on the host, or those that a case does not have be looked for."""
    sent_to = "meta"  # no numbers can be worked out there, and none be taken for those on the host
    quantised = msgspec.structs.replace(paged, kv=QuantisedKv(dtype="float8_e4m3fn"))
    cases = [paged, quantised, paged, quantised]
    contents = problem_of(paged).contents(cases, "cpu", Supports())
    declaration = Declaration(name="any", problem=paged.problem)
    seen: list[Any] = []
    monkeypatch.setattr(distant_expectations, "_HOST_WORK", 0)
    monkeypatch.setattr(distant_expectations, "all_on_device", lambda hosts, to: [host.to(to) for host in hosts])

    def expect(requests: Any, **_: Any) -> list[Any]:
        seen.extend(requests)
        return []

    monkeypatch.setattr(distant_expectations, "expectations", expect)
    requests: Any = [(declaration, case, of_one.values) for case, of_one in zip(cases, contents, strict=True)]
    DistantExpectations(requests, sent_to, "bound", False, Fetch())
    assert [values.kv_scales is not None for *_, values in seen] == [False, True, False, True]
    for *_, values in seen:
        parts = [getattr(values, field.name) for field in fields(values)]
        assert {part.device.type for part in parts if isinstance(part, torch.Tensor)} == {sent_to}


def test_tensors_of_several_dtypes_arrive_in_their_order() -> None:
    """One case would be given another's numbers."""
    tensors = [
        torch.arange(4.0).view(2, 2),
        torch.arange(3),
        torch.ones(1, 5),
        torch.empty(0, 2),
        torch.arange(6).view(2, 3).T,
    ]
    for one, other in zip(all_on_device(tensors, ELSEWHERE), tensors, strict=True):
        assert torch.equal(one.cpu(), other)
    assert all_on_device([], ELSEWHERE) == []
