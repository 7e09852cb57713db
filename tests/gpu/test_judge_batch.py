"""Batches of cases on a GPU: the verdicts of single cases, whatever one case of the batch does to the others."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from attnfuzz.declaration import Declaration, load_kernels
from attnfuzz.judging import judge as judging
from attnfuzz.judging.judge import judge_batch
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.registry import DEFAULT_ORACLES, OracleName
from attnfuzz.oracles.relations.catalogue import drawn
from attnfuzz.problems.cases import Case, Problem
from attnfuzz.problems.recipes import Values
from attnfuzz.problems.supports import DTYPES
from attnfuzz.verdict import Relations, Verdict
from tests.gpu.bundled_cases import BUNDLED, CASES, fitted
from tests.judged_batches import judge_each

Broken = dict[str, Declaration]

HACKS = Path(__file__).parents[1] / "hacks"
DENSE = CASES["dense_decode"]
LARGE = msgspec.structs.replace(
    CASES["paged_decode"], seq_lens=(4097, 8192, 50), num_q_heads=16, head_size=64, values=Values(seed=3)
)


def mixed(declaration: Declaration) -> list[Case]:
    """Several dtypes, a small case and a large one beside it where there is one."""
    dtypes = [dtype for dtype in DTYPES if dtype in declaration.supports.dtypes]
    cases = [msgspec.structs.replace(CASES[declaration.problem], dtype=dtype) for dtype in dtypes]
    if declaration.problem == "paged_decode":
        cases.insert(1, LARGE)
    return [fitted(declaration, case) for case in cases]


def without_timing(verdict: Verdict) -> Verdict:
    return msgspec.structs.replace(verdict, timing=Verdict().timing)


def test_all_bundled_kernels_are_meant(runner: Runner) -> None:
    """A kernel that was added later would not be run on a GPU in any of these tests."""
    assert {one.name: one.problem for one in runner.declarations(["*"])} == BUNDLED


@pytest.mark.parametrize("target", BUNDLED)
def test_bundled_kernels_pass_as_they_do_alone(target: str, runner: Runner) -> None:
    """Batches would raise false alarms, or compare with other numbers than single cases do."""
    (declaration,) = runner.declarations([target])
    cases = mixed(declaration)
    alone = [runner.judge(declaration, case) for case in cases]
    for one, many in zip(alone, judge_each(runner, declaration, cases, timeout_s=120.0), strict=True):
        assert many.failure is None
        assert many.error_ratio == pytest.approx(one.error_ratio, rel=1e-6)
        assert many.timing.total_s > 0


@pytest.mark.parametrize(
    "name",
    [
        "writes_after_out", "writes_before_lse", "writes_after_workspace", "modifies_query", "reads_past_the_length",
        "reads_page_tail", "leaves_last_row", "reads_workspace_early", "returns_on_the_host", "correct",
        "correct_on_pages", "launches_too_large_a_grid",
    ],
)  # fmt: skip
def test_broken_kernels_fail_as_they_do_alone(name: str, runner: Runner, broken: Broken) -> None:
    """A failure would be missed in a batch, or told with other words."""
    case = CASES[broken[name].problem]
    shorter = msgspec.structs.replace(case, seq_lens=(9, 0), values=Values(keys="normal"))
    cases = [case, shorter, case]
    alone = [without_timing(runner.judge(broken[name], case)) for case in cases]
    together = [without_timing(verdict) for verdict in judge_each(runner, broken[name], cases, timeout_s=120.0)]
    assert [verdict.failure for verdict in together] == [verdict.failure for verdict in alone]


def test_nondeterminism_is_seen(runner: Runner, broken: Broken) -> None:
    """Two runs of a batch would share their memory, and a kernel that counts its calls would pass."""
    verdicts = judge_each(runner, broken["counts_its_calls"], [DENSE, DENSE], timeout_s=120.0)
    assert [verdict.failure.oracle if verdict.failure else None for verdict in verdicts] == ["determinism"] * 2


@pytest.mark.parametrize("name", ["writes_far_away", "reads_misaligned", "asserts", "raises_too_early", "segfaults"])
def test_lost_gpu_costs_no_verdicts(name: str, runner: Runner, broken: Broken) -> None:
    """A sticky CUDA error would be blamed on the wrong case of the batch, or end the campaign."""
    alone = runner.judge(broken[name], DENSE).failure
    assert alone is not None
    found = [verdict.failure for verdict in judge_each(runner, broken[name], [DENSE, DENSE], timeout_s=120.0)]
    assert [(failure.oracle, failure.kind) if failure else None for failure in found] == [
        (alone.oracle, alone.kind)
    ] * 2
    assert runner.judge(broken["correct"], DENSE).failure is None


def test_compilation_is_told_apart(runner: Runner) -> None:
    """Statistics would show compilation as running time of a kernel."""
    (declaration,) = runner.declarations(["dense_naive"])
    cases = [msgspec.structs.replace(DENSE, options={"tile": 16}), msgspec.structs.replace(DENSE, options={"tile": 32})]
    for verdict in judge_each(runner, declaration, cases, timeout_s=120.0):
        assert 0 <= verdict.timing.compile_s <= verdict.timing.total_s


RELATED_KERNELS = Path(__file__).with_name("related_kernels.py")


@pytest.fixture(scope="module")
def related(runner: Runner) -> Broken:
    """The kernels of ``related_kernels.py`` by name."""
    return {declaration.name: declaration for declaration in runner.declarations([str(RELATED_KERNELS)])}


def variations(declaration: Declaration) -> Iterator[Case]:
    """The same case with other numbers, in float32 where the kernel takes that."""
    problem: Problem = declaration.problem
    case = fitted(declaration, msgspec.structs.replace(CASES[problem], dtype="float32"))
    for seed in range(2000):
        changed = (
            {"seed": seed}
            if problem == "merge_states"
            else {"values": Values(keys="normal", values="normal", seed=seed)}
        )
        yield msgspec.structs.replace(case, **changed)


@pytest.mark.parametrize(
    ("kernel", "relation"),
    [
        ("looks_at_page_ids", "page_permutation"),
        ("looks_at_unused_entries", "block_table_slack"),
        ("counts_its_rows", "batch_invariance"),
        ("adds_an_epsilon", "value_affinity"),
        ("counts_empty_states", "merge_laws"),
        ("remembers_the_longest", "call_sequence"),
    ],
)
def test_relations_find_in_a_batch_what_they_find_alone(
    kernel: str, relation: str, runner: Runner, related: Broken
) -> None:
    """Campaigns on a GPU would draw relations that see nothing, or tell it in other words than replay."""
    declaration = related[kernel]
    draws = (
        case
        for case in variations(declaration)
        if (one := drawn(declaration, case, DEFAULT_ORACLES, device="cuda")) and one.name == relation
    )
    case = next(draws)
    runner.restart()
    alone = runner.judge(declaration, case).failure
    assert alone is not None
    assert alone.oracle == relation
    runner.restart()
    together = runner.judge_together(declaration, [case, next(draws)], timeout_s=120.0)
    assert together is not None
    assert together[0].failure == alone


@pytest.mark.parametrize("target", BUNDLED)
def test_relations_leave_right_kernels_alone_in_a_batch(target: str, runner: Runner) -> None:
    """A campaign on a GPU would report a correct kernel, once in so many cases."""
    (declaration,) = runner.declarations([target])
    draws = [
        case
        for case in variations(declaration)
        if (one := drawn(declaration, case, DEFAULT_ORACLES, device="cuda")) and one.further is not None
    ][:40]
    assert draws
    verdicts = runner.judge_together(declaration, draws, timeout_s=120.0)
    assert verdicts is not None
    assert [verdict.failure for verdict in verdicts] == [None] * len(draws)


def test_a_batch_bounds_what_a_relation_runs_by_itself(runner: Runner, related: Broken) -> None:
    """Results on the GPU would meet a reference on the host, and the whole batch would be judged case by case."""
    declaration = related["rounds_by_strides"]
    draws = [
        case
        for case in variations(declaration)
        if (one := drawn(declaration, case, DEFAULT_ORACLES, device="cuda")) and one.name == "page_relocation"
    ][:4]
    assert draws
    verdicts = runner.judge_together(declaration, draws, timeout_s=120.0)
    assert verdicts is not None
    assert [verdict.failure for verdict in verdicts] == [None] * len(draws)


def test_relations_cost_a_batch_no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many cases get through a GPU as there are waits. Uses CUDA in this process."""
    (kernel,) = load_kernels(f"{RELATED_KERNELS}:without_triton")
    cases = list(variations(kernel.declaration))[:24]

    def waits(relations: Relations) -> int:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                verdicts = judge_batch(kernel, cases, device="cuda", relations=relations)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert [verdict.failure for verdict in verdicts] == [None] * len(cases)
        return sum("called a synchronizing" in str(warning.message) for warning in seen)

    asked: tuple[OracleName, ...] = ("value_affinity", "call_sequence")
    for relations in ((), asked):
        waits(relations)  # CUDA's libraries are loaded, memory is taken
    along = waits(asked)
    assert along == waits(())
    relations_of = judging._Judge._along_with
    monkeypatch.setattr(
        judging._Judge,
        "_along_with",
        lambda self, case: [replace(one, further=None) for one in relations_of(self, case)],
    )
    assert waits(asked) >= along + len(cases)


def test_work_in_a_stream_that_nobody_waits_for(runner: Runner) -> None:
    """A kernel that returns before its work is done would pass a search on a GPU, where the copies are made late."""
    (declaration,) = runner.declarations([f"{HACKS / 'not_joined.py'}:stream_not_joined"])
    case = fitted(declaration, CASES["paged_decode"])
    runner.judge(declaration, case)  # what a first call loads takes longer than the current stream is late
    for _ in range(10):  # on a GPU that others use the work may be done before the copies are made
        failures = [verdict.failure for verdict in judge_each(runner, declaration, [case, case], timeout_s=120.0)]
        if failures[0] is not None:
            break
    assert failures[0] is not None
    assert "a stream that the current one does not wait for" in failures[0].message
