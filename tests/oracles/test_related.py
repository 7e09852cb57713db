"""Relations whose runs are made along with those of a batch: what they find, and what they leave alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.judging import judge as judging
from attnfuzz.judging.batch import BatchLost
from attnfuzz.judging.judge import judge, judge_batch
from attnfuzz.memory.patterns import bits
from attnfuzz.oracles.registry import DEFAULT_ORACLES, OracleName
from attnfuzz.oracles.relations import relation as transformed
from attnfuzz.oracles.relations.call_sequence import CALL_SEQUENCE, other_calls_of
from attnfuzz.oracles.relations.catalogue import RELATIONS, applicable
from attnfuzz.oracles.relations.fresh_copy import fresh_copy
from attnfuzz.problems.cases import Case, DenseDecodeCase, MergeStatesCase, PagedDecodeCase
from attnfuzz.problems.recipes import Pages, Values
from attnfuzz.trials import trial
from tests.oracles.relations.test_batch_invariance import in_parts_of_the_longest
from tests.oracles.relations.test_page_permutation import in_order_of_page_ids, loosely_masked

INVARIANT = attnfuzz.Supports(batch_invariant=True)
REMEMBERING = Path(__file__).parent / "relations" / "remembering_kernels.py"
SHORT = DenseDecodeCase(num_q_heads=1, num_kv_heads=1, head_size=16, seq_lens=(5, 1), scale=0.25, dtype="float32")
ALONG: tuple[OracleName, ...] = tuple(relation.name for relation in RELATIONS if relation.further)
HEADS: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 8, "scale": 0.125, "dtype": "float32"}
VALUES = Values(keys="normal", values="positions", seed=3)
DENSE = DenseDecodeCase(**HEADS, seq_lens=(5, 0, 21), extra_rows=3, values=VALUES)
PAGED = PagedDecodeCase(
    **HEADS, seq_lens=(5, 0, 21), block_size=8, values=VALUES, pages=Pages(order="shuffled", spare_blocks=2)
)
FULL_PAGES = msgspec.structs.replace(
    PAGED,
    dtype="float16",
    seq_lens=(8, 0, 24),
    pages=Pages(padding="wrong_page"),
    values=Values(keys="normal", values="normal", seed=3),
)
STATES = MergeStatesCase(
    num_q_heads=3, head_size=8, num_tokens=3, dtype="float32", lse_pairs=(("finite", "finite"), ("finite", "-inf"))
)


def remembering(name: str) -> Callable[[Any], Kernel]:
    """A kernel that has not been called yet, each time."""

    def fresh(plant: Any) -> Kernel:
        (kernel,) = load_kernels(f"{REMEMBERING}:{name}")
        copy = fresh_copy(kernel)
        assert copy is not None
        return copy

    return fresh


def counting_empty_states(weights: Tensor, sides: Tensor) -> Tensor:
    return weights @ sides / (weights.sum() + 2e-7)


PLANTED: dict[str, tuple[OracleName, Case, Callable[[Any], Kernel]]] = {
    "order of page ids": (
        "page_permutation",
        PAGED,
        lambda plant: plant("paged_decode", tokens=in_order_of_page_ids),
    ),
    "loose mask": ("block_table_slack", FULL_PAGES, lambda plant: loosely_masked),
    "parts of the longest": ("batch_invariance", DENSE, lambda plant: in_parts_of_the_longest(plant, INVARIANT)),
    "epsilon": ("value_affinity", DENSE, lambda plant: plant(average=lambda weights, v: weights @ v + 1e-6)),
    "clamp": (
        "value_affinity",
        DENSE,
        lambda plant: plant(average=lambda weights, v: (weights @ v).clamp(-4096, 4096)),
    ),
    "one maximum for all rows": (
        "containment",
        DENSE,
        lambda plant: plant(after=lambda inputs, out, lse: (out, lse - (lse.max() - lse.max()))),
    ),
    "a first score of -inf": (
        "containment",
        DENSE,
        lambda plant: plant(
            score=lambda scores: scores - 0 * scores[0], supports=attnfuzz.Supports(infinite_scores=True)
        ),
    ),
    "empty states count": (
        "merge_laws",
        STATES,
        lambda plant: plant("merge_states", average=counting_empty_states),
    ),
    **{
        name: ("call_sequence", SHORT, remembering(name))
        for name in ("stale_partials", "plan_by_batch_size", "counter_not_reset", "workspace_of_the_first_call")
    },
}


@pytest.mark.parametrize("bug", PLANTED)
@pytest.mark.by_day(
    "loose mask", "clamp", "one maximum*", "empty states count", "plan_by_batch_size", "counter_not_reset"
)
def test_a_batch_finds_what_single_runs_find(bug: str, plant: Any) -> None:
    """In a campaign on a GPU the relation would find nothing, or tell it in other words than replay."""
    name, case, make = PLANTED[bug]
    alone = judge(make(plant), case, device="cpu", relations=(name,), inquire=False).failure
    assert alone is not None
    assert alone.oracle == name
    kernel = make(plant)
    assert judge_batch(kernel, [case], device="cpu", relations=(name,))[0].failure == alone


def test_in_a_longer_batch_too(plant: Any) -> None:
    """A relation would compare with the run of another case."""
    kernel = plant("paged_decode", tokens=in_order_of_page_ids)
    shorter = msgspec.structs.replace(PAGED, seq_lens=(21, 9))
    cases = [shorter, PAGED, msgspec.structs.replace(PAGED, seq_lens=(3,), pages=Pages()), PAGED]
    alone = [judge(kernel, case, device="cpu", relations=ALONG).failure for case in cases]
    assert [verdict.failure for verdict in judge_batch(kernel, cases, device="cpu", relations=ALONG)] == alone
    assert [failure is None for failure in alone] == [False, False, True, False]


def test_each_is_shown_to_find_something() -> None:
    """A relation would be asked along with a batch, and nobody would know whether it sees anything there."""
    assert {name for name, _, _ in PLANTED.values()} == set(ALONG)


@pytest.fixture(autouse=True)
def _batches_as_on_a_gpu() -> Iterator[None]:
    """Where relations do along with a batch what they do alone on a CPU."""
    object.__setattr__(CALL_SEQUENCE, "alone_on", ())
    yield
    object.__setattr__(CALL_SEQUENCE, "alone_on", ("cpu",))


def refuse_to_run(*arguments: Any, **named: Any) -> Any:
    raise AssertionError("a run by itself, which on a GPU waits by itself")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of inf - inf in the interpreter
@pytest.mark.parametrize(
    ("target", "case"),
    [
        ("", PAGED),
        ("dense_naive", DENSE),
        ("paged_naive", PAGED),
        ("paged_split_k", PAGED),
        ("merge_states_triton", STATES),
    ],
)
@pytest.mark.by_day("-*", "merge_*")
def test_right_kernels_pass_without_a_run_by_itself(
    target: str, case: Case, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A false alarm, or as many waits for the GPU as there are runs."""
    kernel = load_kernels(target)[0] if target else plant(case.problem, supports=INVARIANT)
    cases = [msgspec.structs.replace(case, dtype=dtype) for dtype in ("float16", "float32")]
    assert {one.name for one in applicable(kernel.declaration, case, ALONG)} >= {"batch_invariance", "call_sequence"}
    for module in (transformed, trial):
        monkeypatch.setattr(module, "observe", refuse_to_run)
    verdicts = judge_batch(kernel, cases, device="cpu", oracles=(*DEFAULT_ORACLES[:8], *ALONG), relations="all")
    assert [verdict.failure for verdict in verdicts] == [None, None]


def tensors_of(inputs: Any) -> dict[str, Tensor]:
    names = inputs.__dataclass_fields__
    return {name: part.clone() for name in names if isinstance(part := getattr(inputs, name), Tensor)}


@pytest.mark.by_day
@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("case", [DENSE, PAGED, STATES], ids=lambda case: case.problem)
def test_a_run_gets_what_it_gets_by_itself(name: OracleName, case: Case, plant: Any) -> None:
    """A batch would run a relation on other numbers, pages or poison than those that a finding is replayed on."""
    seen: list[dict[str, Tensor]] = []
    supports = attnfuzz.Supports(batch_invariant=True, unused_table_entries="garbage")
    kernel = plant(case.problem, supports=supports, before=lambda inputs: seen.append(tensors_of(inputs)))
    judge(kernel, case, device="cpu", relations=(name,))
    alone, seen[:] = list(seen), []
    judge_batch(kernel, [case], device="cpu", relations=(name,))
    if name == "call_sequence":  # by itself it calls on on the same tensors, with V negated and with shorter sequences
        alone = alone[: -1 if case is STATES else -3]
    assert len(seen) == len(alone)
    assert (len(seen) > 2) is bool(applicable(kernel.declaration, case, (name,)))
    for one, other in zip(alone, seen, strict=True):
        assert list(one) == list(other)
        assert all(torch.equal(bits(one[name]), bits(other[name])) for name in one)


def at_call(number: int, act: Callable[..., Any]) -> Callable[..., Any]:
    """`act` when it is called for the so-manieth time, counted from 0, and no more."""
    calls = itertools.count()
    return lambda *arguments: act(*arguments) if next(calls) == number else (arguments[1:] or None)


def nudge(inputs: Any, out: Tensor, lse: Tensor) -> Any:
    return out, lse * (1 + 2**-20)


def raise_error(inputs: Any) -> None:
    raise IndexError("no such page")


def interrupt(inputs: Any) -> None:
    raise KeyboardInterrupt


def exhaust(inputs: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def write_past_out(inputs: Any, out: Tensor, lse: Tensor) -> Any:
    inputs.out.as_strided((1,), (1,), inputs.out.storage_offset() + inputs.out.numel()).fill_(1)
    return out * 2, lse


def test_what_was_seen_once_counts(plant: Any, dense: Case) -> None:
    """A relation's objection would be lost if its run went well a second time."""
    (verdict,) = judge_batch(plant(after=at_call(2, nudge)), [dense], device="cpu", relations=("value_affinity",))
    assert verdict.failure is not None
    assert (verdict.failure.oracle, verdict.failure.kind) == ("value_affinity", "bits")


def test_an_exception_seen_once_counts(plant: Any, dense: Case) -> None:
    """As above, and the change that it came with would not be told."""
    kernel = plant(before=at_call(2, raise_error))
    failures = [one.failure for one in judge_batch(kernel, [dense] * 2, device="cpu", relations=("value_affinity",))]
    assert failures[1] is None
    assert failures[0] is not None
    assert (failures[0].oracle, failures[0].kind) == ("value_affinity", "raised IndexError in raise_error")
    assert failures[0].message.startswith("with V times -2**")


def test_damage_by_a_run_of_a_relation_is_not_its_result(plant: Any, dense: Case) -> None:
    """Numbers from memory that another run may have written to would be reported."""
    kernel = plant(after=at_call(2, write_past_out))
    verdicts = judge_batch(kernel, [dense] * 2, device="cpu", relations=("value_affinity",))
    assert [verdict.failure for verdict in verdicts] == [None, None]


def test_memory_that_other_cases_hold_is_not_held_against_a_relation(plant: Any, dense: Case) -> None:
    """The batch would be lost, or the kernel be blamed, where the run by itself has room."""
    kernel = plant(before=at_call(2, exhaust))
    (verdict,) = judge_batch(kernel, [dense], device="cpu", relations=("value_affinity",))
    assert verdict.failure is None


def test_a_gpu_lost_in_a_run_of_a_relation_loses_the_batch(
    plant: Any, dense: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases would go on being judged by a process whose CUDA context is gone."""
    message = "CUDA error: an illegal memory access was encountered"

    def lose(*inputs: Any) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lose)
        raise RuntimeError(message)

    with pytest.raises(BatchLost, match="illegal memory access"):
        judge_batch(plant(before=at_call(2, lose)), [dense], device="cpu", relations=("value_affinity",))


@pytest.mark.parametrize(("relation", "call"), [("value_affinity", 2), ("call_sequence", 2), ("call_sequence", 3)])
def test_interrupt_in_a_run_of_a_relation(relation: OracleName, call: int, plant: Any, dense: Case) -> None:
    """Ctrl-C would count as the kernel's answer to a change, or to another call."""
    with pytest.raises(KeyboardInterrupt):
        judge_batch(plant(before=at_call(call, interrupt)), [dense], device="cpu", relations=(relation,))


def test_a_kernel_that_is_wrong_by_itself_is_not_blamed_on_a_call() -> None:
    """Every bug of longer sequences would be found twice, the second time with a wrong cause."""
    (kernel,) = load_kernels(f"{REMEMBERING}:forgets_tokens_from_the_eighth")
    (verdict,) = judge_batch(kernel, [SHORT], device="cpu", relations=("call_sequence",))
    assert verdict.failure is None


def test_what_is_wrong_by_itself_hides_no_other_leftover(plant: Any, dense: Case) -> None:
    """A kernel with a bug in longer sequences could remember what it likes."""
    calls = len(other_calls_of(plant().declaration, dense))
    kernel = plant(length=lambda n: n - 1 if n > 30 else n, after=at_call(2 + calls, nudge))
    (verdict,) = judge_batch(kernel, [dense], device="cpu", relations=("call_sequence",))
    assert verdict.failure is not None
    assert f"after {calls} other calls, of other lengths and of the same shapes" in verdict.failure.message


def test_large_cases_are_asked_one_by_one(plant: Any, dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large cases would go without relations, or take the memory of several."""
    monkeypatch.setattr(judging, "_SMALL_BYTES", 0)
    kernel = plant(average=lambda weights, v: weights @ v + 1e-6)
    alone = judge(kernel, dense, device="cpu", relations=("value_affinity",)).failure
    assert alone is not None
    assert judge_batch(kernel, [dense], device="cpu", relations=("value_affinity",))[0].failure == alone


@pytest.mark.parametrize("relation", ["value_affinity", "call_sequence"])
def test_time_of_further_runs_is_the_cases_own(relation: OracleName, plant: Any, dense: Case) -> None:
    """Statistics would show the runs of a relation as time that nobody took."""
    seconds, runs = itertools.count(), itertools.count()
    kernel = plant(before=lambda inputs: next(runs))
    judged, other = judge_batch(
        kernel,
        [dense, msgspec.structs.replace(dense, seq_lens=(0, 0))],
        device="cpu",
        relations=(relation,),
        compile_clock=lambda: float(next(seconds)),
    )
    assert judged.timing.compile_s + other.timing.compile_s == next(runs)
    parts = (judged.timing.build_s, judged.timing.kernel_s, judged.timing.reference_s)
    assert sum(parts) + judged.timing.compile_s <= judged.timing.total_s < math.inf
