"""Users' problems in batches, far away in memory, and with lists that are empty or name the same place twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.families import IndexerTopk, SparseDecode
from attnfuzz.families.indexer_topk import chosen_scores
from attnfuzz.judging import batch as batches
from attnfuzz.judging.judge import judge, judge_batch
from attnfuzz.strategies import cases
from attnfuzz.verdict import Verdict
from tests.common.drawing import drawn_from
from tests.families import cache_write_kernels, packed_decode_kernels, sparse_decode_kernels
from tests.families import wide_kernels as kernels
from tests.families.searched import smallest_cases
from tests.families.sparse_decode_kernels import attend

KERNELS = {
    "cache_write": (cache_write_kernels, ("right", "padding", "token", "packed", "zeros")),
    "packed_decode": (packed_decode_kernels, ("right", "planes", "zeros_of_k")),
    "sparse_decode": (sparse_decode_kernels, ("right", "minus_one", "nan_times_zero")),
}
PAIRS = [(kernels, name) for kernels, names in KERNELS.values() for name in names]


def told(verdict: Verdict) -> tuple[str, str] | None:
    return None if verdict.failure is None else (verdict.failure.oracle, verdict.failure.kind)


@pytest.mark.parametrize(("kernels", "name"), PAIRS, ids=[f"{k.__name__.split('.')[-1]}-{name}" for k, name in PAIRS])
@pytest.mark.by_day("cache_write_kernels-*", "sparse_decode_kernels-right")
def test_together_cases_get_the_verdicts_that_they_get_alone(kernels: Any, name: str) -> None:
    """On a GPU a campaign would miss bugs, or blame a kernel for what another case of the batch wrote."""
    kernel = getattr(kernels, name)
    declaration = kernel.declaration
    drawn = drawn_from(cases(declaration.problem, supports=declaration.supports), draws=30)
    together = judge_batch(kernel, drawn, device="cpu", relations=())
    alone = [judge(kernel, case, device="cpu", relations=()) for case in drawn]
    assert list(map(told, together)) == list(map(told, alone))
    assert any(verdict.failure for verdict in together) == (name != "right")


def test_runs_of_a_batch_are_made_before_any_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case would wait for the device by itself, and a GPU judge a few cases a second."""
    events: list[str] = []

    def note(name: str) -> None:
        old: Any = getattr(batches.Batch, name)

        def noted(*arguments: Any, **more: Any) -> Any:
            events.append(name)
            return old(*arguments, **more)

        monkeypatch.setattr(batches.Batch, name, noted)

    note("_run")
    note("_look")
    kernel = sparse_decode_kernels.right
    drawn = drawn_from(cases(kernel.declaration.problem), draws=6)
    assert all(verdict.failure is None for verdict in judge_batch(kernel, drawn, device="cpu", relations="all"))
    assert events.count("_run") >= 2 * len(drawn)
    assert events.index("_look") == events.count("_run")
    assert events.count("_look") == 1


@pytest.mark.parametrize("name", ["write", "attend"])
@pytest.mark.by_day("write")
def test_offsets_of_32_bits_are_found_in_larger_tensors(name: str) -> None:
    """What wraps would be seen by whoever serves with a cache of gigabytes first."""

    @attnfuzz.fuzz(getattr(kernels, f"{name}_narrow"), max_examples=200, device="cpu")
    def search() -> None:
        pass

    with pytest.raises(attnfuzz.KernelFailure) as caught:
        search()
    failure = caught.value.failure
    assert (failure.oracle, failure.cause) == ("page_relocation", "narrow_offsets")
    assert {"write": "slot_mapping", "attend": "indices"}[name] in failure.message


@pytest.mark.parametrize("name", ["write", "attend"])
@pytest.mark.by_day("write")
def test_right_kernels_are_silent_however_large_the_tensors_are(name: str) -> None:
    """Memory far away, or what names it, would be wrong itself."""
    attnfuzz.fuzz(getattr(kernels, f"{name}_wide"), max_examples=30, device="cpu")(lambda: None)()


def test_offsets_in_float_are_wrong_below_the_limit_of_32_bits_too() -> None:
    """Whoever has 64 bits already would be told to widen offsets; on a GPU nothing else tells the two apart."""

    @attnfuzz.fuzz(kernels.attend_in_float, max_examples=200, device="cpu")
    def search() -> None:
        pass

    with pytest.raises(attnfuzz.KernelFailure) as caught:
        search()
    failure = caught.value.failure
    assert (failure.oracle, failure.cause) == ("page_relocation", "")
    assert any("wrong with all of them below 2^31 bytes" in line for line in failure.details)


class Double(attnfuzz.Problem):
    """Rows times two; there may be none."""

    rows = attnfuzz.Integer(0, 8)
    seed = attnfuzz.Seed()

    def tensors(self, case: Any) -> dict[str, attnfuzz.TensorSpec]:
        x, out = (attnfuzz.TensorSpec((case.rows, 4), "float32", role) for role in ("input", "output"))
        return {"x": x, "out": out}

    def write(self, case: Any, tensors: Any) -> None:
        tensors["x"].copy_(attnfuzz.numbers((case.rows, 4), seed=case.seed, name="x"))

    def reference(self, case: Any, tensors: Any) -> dict[str, Tensor]:
        return {"out": tensors["x"].double() * 2}


@attnfuzz.kernel(Double())
def leaves_the_first_row(inputs: Any) -> None:
    inputs.out[1:] = inputs.x[1:] * 2


def test_results_without_elements_are_nobodys() -> None:
    """A case that has none would have the symptoms of the one behind it, or end the batch."""
    drawn = drawn_from(cases(leaves_the_first_row.declaration.problem), draws=60)
    with_rows, without = ([case for case in drawn if (case.rows > 0) is some][:2] for some in (True, False))
    (one, another), none = with_rows, without[0]
    for batch in ([one, none], [none, one], [one, none, another], without):
        verdicts = judge_batch(leaves_the_first_row, batch, device="cpu", relations=())
        assert [told(verdict) is not None for verdict in verdicts] == [case.rows > 0 for case in batch]


_INF, _NONE = torch.inf, torch.finfo(torch.float32).min


def _finite(inputs: Any) -> tuple[Tensor, Tensor]:
    out, lse = attend(inputs)
    return out, torch.where(lse == -torch.inf, -6.9e29, lse)


def _highest(inputs: Any) -> Tensor:
    indices = torch.full(inputs.chosen.shape, -1, dtype=torch.int32, device=inputs.chosen.device)
    for row, length in enumerate(inputs.lengths_of_rows.tolist()):
        found = inputs.scores[row, :length].topk(min(inputs.topk, length)).indices
        indices[row, : len(found)] = found.int()
    return chosen_scores(inputs, indices)


@attnfuzz.kernel(SparseDecode())
def finite(inputs: Any) -> tuple[Tensor, Tensor]:
    return _finite(inputs)


@attnfuzz.kernel(SparseDecode(empty_lse=attnfuzz.Choice(("any",))))
def finite_as_declared(inputs: Any) -> tuple[Tensor, Tensor]:
    return _finite(inputs)


@attnfuzz.kernel(SparseDecode(empty_lse=attnfuzz.Choice(("any",))))
def doubled(inputs: Any) -> tuple[Tensor, Tensor]:
    out, lse = _finite(inputs)
    return out, lse * 2


@attnfuzz.kernel(IndexerTopk(nans=attnfuzz.Choice(("absent", "highest"))))
def nan_first_as_declared(inputs: Any) -> Tensor:
    return _highest(inputs)


@pytest.mark.parametrize("kernel", [finite_as_declared, nan_first_as_declared], ids=["empty_lse", "nans"])
def test_declared_conventions_are_no_findings(kernel: Any) -> None:
    """What a kernel's callers do not take, or its documentation says of NaN, would be called a bug."""
    attnfuzz.fuzz(kernel, max_examples=60, device="cpu")(lambda: None)()


def test_a_finite_sum_of_an_empty_list_is_found_unless_declared() -> None:
    """A merge that takes it would give weight to nothing."""
    assert [case.named for case in smallest_cases(finite)] == [(0,)]


def test_other_rows_are_judged_where_empty_ones_are_not() -> None:
    """A wrong log-sum-exp would hide behind the declaration of empty lists."""
    assert all(any(case.named) for case in smallest_cases(doubled))


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([2, 0, -1], [3.0, 1.0, _NONE]),
        ([0, 2, -1], [3.0, 1.0, _NONE]),
        ([1, 1, 0], [_INF, 1.0, -_INF]),
        ([3, 0, -1], [_INF, 1.0, _NONE]),
        ([-2, 0, -1], [_INF, 1.0, _NONE]),
    ],
    ids=["order", "other order", "repeat", "behind the row", "below -1"],
)
def test_named_places_become_scores(indices: list[int], expected: list[float]) -> None:
    """A place that is named twice, or is none of the row's, would pass for one more score."""
    scores = torch.tensor([[1.0, torch.nan, 3.0, 4.0]])
    inputs = SimpleNamespace(scores=scores, lengths_of_rows=torch.tensor([3], dtype=torch.int32))
    assert chosen_scores(inputs, torch.tensor([indices], dtype=torch.int32)).tolist() == [expected]
