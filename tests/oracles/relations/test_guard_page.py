"""Accesses one element outside of any tensor are found, named and told apart; those inside are left alone."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from attnfuzz.campaign.saved.replay import run_saved
from attnfuzz.corpus import load_regression
from attnfuzz.declaration import Declaration, load_kernels
from attnfuzz.isolation import memory_faults as fault_map
from attnfuzz.isolation.memory_faults import FaultMap
from attnfuzz.judging.judge import judge
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.registry import DEFAULT_ORACLES, ORACLES, OracleName, oracle_of
from attnfuzz.oracles.relations import guard_page
from attnfuzz.oracles.relations.catalogue import chosen, drawn
from attnfuzz.oracles.relations.guard_page import Guarding, guard_of
from attnfuzz.problems.cases import Case
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.trials.observation import KernelRaised
from attnfuzz.verdict import Drawn, Failure, Relations, Verdict
from tests.judged_batches import judge_each

KERNELS = Path(__file__).with_name("reaching_kernels.py")
DENSE = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 24, "seq_lens": (3, 0, 5)}
PAGED = {**DENSE, "block_size": 4}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """Only asks for what can be found here, so that a case is run as rarely as possible."""
    with Runner(device="cpu", oracles=("guard_page", "crash", "exception")) as started:
        yield started


def judged(runner: Runner, kernel: str, **changes: Any) -> Verdict:
    (declaration,) = runner.declarations([f"{KERNELS}:{kernel}"])
    simplest = simplest_case(declaration.problem, declaration.supports, declaration.options)
    case: Case = msgspec.structs.replace(simplest, **changes)
    return runner.judge(declaration, case, relations=("guard_page",))


def found(runner: Runner, kernel: str, **changes: Any) -> Failure:
    failure = judged(runner, kernel, **changes).failure
    assert failure is not None
    return failure


ATTENTION = ("q", "k_cache", "v_cache", "block_table", "seq_lens")
STRIDED = {"q": "every_other", "k_cache": "transposed", "v_cache": "padded_rows", "block_table": "offset"}
PLANTED: list[tuple[str, str, dict[str, Any]]] = [
    *(("paged", name, PAGED | {"layout": "NHD"}) for name in (*ATTENTION, "out", "lse", "workspace")),
    *(("paged", name, PAGED | {"layout": "HND"}) for name in ("k_cache", "v_cache")),
    *(("paged", name, PAGED | {"layout": "packed"}) for name in ("k_cache", "v_cache")),
    *(("paged", name, PAGED | {"layout": "interleaved"}) for name in ("k_cache", "v_cache")),
    *(("paged", name, PAGED | {"layout": "NHD", "strides": STRIDED}) for name in STRIDED),
    *(("dense", name, DENSE) for name in ("k", "v")),
    *(("split", name, PAGED | {"num_splits": 3}) for name in ("partial_out", "partial_lse")),
    *(
        ("merge", name, {"num_q_heads": 3, "head_size": 24, "num_tokens": 5})
        for name in ("prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output", "output_lse")
    ),
]
ORACLES_OF_A_GPU: tuple[OracleName, ...] = ("guard_page", "page_relocation", "graph_replay")
"""Some that are as costly there as guard_page, which few cases draw."""
INNER_EDGES = {("k_cache", "past"), ("v_cache", "before")}
"""Of the interleaved layout, where K and V are views of one tensor."""


@pytest.mark.parametrize(
    ("kernel", "tensor", "shape"),
    PLANTED,
    ids=[f"{kernel}-{tensor}-{shape.get('layout')}" for kernel, tensor, shape in PLANTED],
)
@pytest.mark.by_day("paged-k_cache-interleaved", "dense-v-None", "merge-output-None")
def test_one_element_outside_is_caught_and_named(
    runner: Runner, kernel: str, tensor: str, shape: dict[str, Any]
) -> None:
    """A kernel that reaches outside would pass, or another tensor, edge or access be blamed."""
    interleaved = shape.get("layout") == "interleaved"
    for access, side in itertools.product(("read", "write"), ("past", "before")):
        if interleaved and (tensor, side) in INNER_EDGES:
            continue
        failure = found(runner, kernel, options={"tensor": tensor, "access": access, "side": side}, **shape)
        assert failure.oracle == "guard_page"
        assert failure.kind == f"{access} {side} {'kv_cache' if interleaved else tensor}"
        assert ": 1 element (" in failure.message
        assert f" {side} its {'end' if side == 'past' else 'start'} at {KERNELS}:" in failure.message
        (line,) = failure.sources
        assert line.text.endswith("0)" if access == "write" else "volatile=True)")


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed", "interleaved"])
def test_edges_may_be_touched(runner: Runner, layout: str) -> None:
    """A correct kernel would be blamed for using the first or the last element of a tensor."""
    assert judged(runner, "edges_only", **PAGED, layout=layout).failure is None


@pytest.mark.parametrize("kernel", ["wants_aligned_pointers", "keeps_its_workspace", "masked"])
def test_other_habits_are_no_access_outside(runner: Runner, kernel: str) -> None:
    """Kernels that refuse unaligned tensors, or use memory of an earlier call, would be blamed."""
    for _ in range(3):
        assert judged(runner, kernel, **DENSE, block_size=4).failure is None


@pytest.mark.parametrize(
    ("kernel", "kind", "words", "changes"),
    [
        (
            "reads_table_past_the_last_tile",
            "read past block_table",
            "block_table (int32 [1, 1]): 1 element (4 bytes)",
            {},
        ),
        ("reads_padded_columns", "read past k_cache", "k_cache (float16 [1, 1, 1, 24])", {"head_size": 24}),
        ("reads_next_length", "read past seq_lens", "seq_lens (int32 [1]): 1 element (4 bytes)", {}),
    ],
)
def test_bugs_of_the_past_are_found(
    runner: Runner, kernel: str, kind: str, words: str, changes: dict[str, Any]
) -> None:
    """These change no result: no other oracle can see them."""
    failure = found(runner, kernel, **changes)
    assert failure.kind == kind
    assert words in failure.message


@pytest.mark.night
def test_a_campaign_finds_and_shrinks_what_reads_outside(tmp_path: Path) -> None:
    """The death of an executor would be reported as a crash, or with the case that happened to be drawn."""
    summary = tmp_path / "summary.json"
    command = [sys.executable, "-m", "attnfuzz", "explore", f"{KERNELS}:reads_padded_columns", "--budget", "60s"]
    command += ["--device", "cpu", "--workers", "1", "--seed", "1", "--fail-fast", "--oracle", "guard_page"]
    subprocess.run([*command, "--json", str(summary)], cwd=tmp_path, capture_output=True, check=False, timeout=200)
    (finding,) = json.loads(summary.read_text())["kernels"][0]["findings"]
    assert finding["signature"].startswith("guard_page/read past k_cache [head_size not pow2")
    assert "k_cache (float16 [1, 1, 1, 24]): 1 element (2 bytes) past its end" in finding["message"]
    saved = load_regression(tmp_path / finding["path"])
    with Runner(device="cpu") as runner:
        (declaration,) = runner.declarations([saved.kernel])
        assert run_saved(saved, declaration, runner).failed == 1


def test_cases_with_a_known_access_draw_among_the_other_relations() -> None:
    """They would die again and again, or be judged by no relation at all."""
    (kernel,) = load_kernels(f"{KERNELS}:masked")
    declaration = kernel.declaration
    simplest = simplest_case(declaration.problem, declaration.supports, declaration.options)
    others = set()
    for n in range(1, 200):
        case = msgspec.structs.replace(simplest, seq_lens=(n,))
        ways: tuple[Relations, Relations] = (None, Drawn(without=("guard_page",)))
        drawn, without = (
            [one.name for one in chosen(declaration, case, ORACLES_OF_A_GPU, way, device="cuda")] for way in ways
        )
        assert len(drawn) == len(without)
        if drawn == ["guard_page"]:
            others.update(without)
    assert others
    assert "guard_page" not in others


def cases_of(declaration: Declaration, *guards: str) -> list[Case]:
    """One for each of ``guards``, which is the edge that its second run guards."""
    simplest = simplest_case(declaration.problem, declaration.supports, declaration.options)
    cases = [msgspec.structs.replace(simplest, seq_lens=(n,)) for n in range(1, 60)]
    of_guard = {guard_of(declaration, case, DEFAULT_ORACLES, None, device="cpu"): case for case in reversed(cases)}
    return [of_guard[guard] for guard in guards]  # type: ignore[index]  # "end" and "start" are guards


@pytest.fixture
def explaining(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an executor, for code that only decides."""
    monkeypatch.setattr(fault_map, "_installed", FaultMap(memoryview(bytearray(1 << 16))))


def test_each_case_has_one_edge_guarded(explaining: None) -> None:
    """Accesses outside that change no number would be seen by few cases, or those before a tensor by none."""
    (kernel,) = load_kernels(f"{KERNELS}:masked")
    declaration = kernel.declaration
    simplest = simplest_case(declaration.problem, declaration.supports, declaration.options)
    cases = [msgspec.structs.replace(simplest, seq_lens=(n,)) for n in range(1, 300)]
    guards = [guard_of(declaration, case, DEFAULT_ORACLES, None, device="cpu") for case in cases]
    assert None not in guards
    assert 40 < guards.count("start") < 120
    assert guards == [guard_of(declaration, case, DEFAULT_ORACLES, None, device="cpu") for case in cases]
    assert not [one for case in cases if (one := drawn(declaration, case, DEFAULT_ORACLES)) if one.name == "guard_page"]


@pytest.mark.parametrize(
    ("oracles", "relations", "is_guarded"),
    [
        (DEFAULT_ORACLES, None, True),
        (("guard_page",), None, True),
        (("accuracy", "guard_page"), ("guard_page",), True),
        (DEFAULT_ORACLES, Drawn(without=("page_relocation",)), True),
        ([name for name in ORACLES if not oracle_of(name).is_relation], None, False),
        (DEFAULT_ORACLES, (), False),
        (DEFAULT_ORACLES, ("layout",), False),
        (DEFAULT_ORACLES, "all", False),
        (DEFAULT_ORACLES, Drawn(without=("guard_page",)), False),
    ],
)
def test_whoever_leaves_it_out_has_ordinary_runs(
    explaining: None, oracles: tuple[OracleName, ...], relations: Relations, is_guarded: bool
) -> None:
    """An oracle that was switched off would end processes, or one that was asked for see nothing."""
    (kernel,) = load_kernels(f"{KERNELS}:masked")
    declaration = kernel.declaration
    (case,) = cases_of(declaration, "end")
    assert (guard_of(declaration, case, oracles, relations, device="cpu") is not None) == is_guarded
    assert guard_of(declaration, case, oracles, relations, device="cuda") is None


def test_cases_too_large_for_guarded_memory_have_ordinary_runs(explaining: None) -> None:
    """Each tensor of a huge case would be mapped and unmapped with every run."""
    (kernel,) = load_kernels(f"{KERNELS}:masked")
    declaration = kernel.declaration
    simplest = simplest_case(declaration.problem, declaration.supports, declaration.options)
    huge = msgspec.structs.replace(simplest, seq_lens=(1 << 20,))
    assert guard_of(declaration, huge, DEFAULT_ORACLES, None, device="cpu") is None


def test_the_usual_runs_of_a_case_find_it(explaining: None) -> None:
    """A case would have to draw guard_page by chance; or the one that reads past would be told at another edge."""
    with Runner(device="cpu") as everything:
        (declaration,) = everything.declarations([f"{KERNELS}:reads_next_length"])
        at_end, at_start = cases_of(declaration, "end", "start")
        failure = everything.judge(declaration, at_end).failure
        assert failure is not None
        assert (failure.oracle, failure.kind) == ("guard_page", "read past seq_lens")
        assert "seq_lens (int32 [1]): 1 element (4 bytes) past its end at " in failure.message
        assert everything.judge(declaration, at_start).failure is None
        for relations in ((), Drawn(without=("guard_page",))):
            assert everything.judge(declaration, at_end, relations=relations).failure is None
        assert everything.judge(declaration, at_end, run_twice=False, relations=()).failure is None
        together = judge_each(everything, declaration, [at_start, at_end, at_start], timeout_s=60.0)
        assert [verdict.failure for verdict in together] == [None, failure, None]


@pytest.mark.night
def test_what_shows_without_is_told_first(explaining: None) -> None:
    """A wrong number would be reported as an access outside; or the access be lost with the oracle of the number."""
    with Runner(device="cpu") as everything, Runner(device="cpu", oracles=("guard_page",)) as nothing_else:
        (declaration,) = everything.declarations([f"{KERNELS}:wrong_and_reaching"])
        (case,) = cases_of(declaration, "end")
        for verdict in (
            everything.judge(declaration, case),
            *judge_each(everything, declaration, [case, case], timeout_s=60.0),
        ):
            assert verdict.failure is not None
            assert verdict.failure.oracle == "accuracy"
        assert everything.restarts == 0
        failure = nothing_else.judge(declaration, case).failure
        assert failure is not None
        assert failure.kind == "read past seq_lens"


def test_runs_that_differ_by_what_lies_outside_are_an_access_outside(explaining: None) -> None:
    """Each number that happens to lie there would be told as a kernel that is not deterministic, once for each case."""
    with Runner(device="cpu") as everything:
        for kernel, oracle in (("restless_and_reaching", "guard_page"), ("restless", "determinism")):
            (declaration,) = everything.declarations([f"{KERNELS}:{kernel}"])
            failure = everything.judge(declaration, *cases_of(declaration, "end"), relations=()).failure
            assert failure is not None
            assert failure.oracle == oracle, failure.message


@pytest.mark.parametrize("kernel", ["masked", "aligned_only"])
@pytest.mark.by_day("masked")
def test_right_kernels_pass_in_guarded_memory(kernel: str, explaining: None) -> None:
    """Each case of a right kernel, or of one that refuses how tensors are aligned there, would be reported."""
    with Runner(device="cpu") as everything:
        (declaration,) = everything.declarations([f"{KERNELS}:{kernel}"])
        cases = cases_of(declaration, "end", "start")
        verdicts = [everything.judge(declaration, case) for case in cases]
        verdicts += judge_each(everything, declaration, cases, timeout_s=60.0)
        assert [verdict.failure for verdict in verdicts] == [None] * 4
        assert everything.restarts == 0


def test_nothing_is_run_where_its_death_could_not_be_told(runner: Runner) -> None:
    """`attnfuzz.check(..., isolated=False)` would take the user's own process down."""
    (kernel,) = load_kernels(f"{KERNELS}:reads_next_length")
    declaration = kernel.declaration
    case = simplest_case(declaration.problem, declaration.supports, declaration.options)
    assert judge(kernel, case, device="cpu", relations=("guard_page",)).failure is None


ILLEGAL = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(("reached", "edge"), [("block_table", "end"), ("q", "start"), ("workspace", "end")])
def test_a_fault_that_tells_no_address_names_its_tensor(
    reached: str, edge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a read past a block table was told as one past something."""
    runs: list[Guarding] = []

    def run_guarded(trial: Any, guarding: Guarding, fault_map: Any) -> list[Any]:
        runs.append(guarding)
        if guarding.guard == edge and guarding.covers(reached):
            raise KernelRaised(RuntimeError(ILLEGAL), "nan")
        return []

    def synchronize() -> None:
        if any(guarding.covers(reached) for guarding in runs[-1:]):
            raise RuntimeError(ILLEGAL)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(guard_page, "run_guarded", run_guarded)
    monkeypatch.setattr(guard_page, "_FAULTS_TELL_WHERE", ())
    monkeypatch.setattr(guard_page, "installed", lambda: FaultMap(memoryview(bytearray(1 << 16))))
    (kernel,) = load_kernels(f"{KERNELS}:edges_only")
    declaration = kernel.declaration
    case: Case = msgspec.structs.replace(simplest_case(declaration.problem, declaration.supports, {}), **PAGED)
    failure = judge(kernel, case, device="cpu", oracles=("guard_page",), relations=("guard_page",)).failure
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("guard_page", "raised cuda:illegal memory access")
    assert failure.tensor == reached
    assert f"with {reached} alone {'ending' if edge == 'end' else 'beginning'} at unmapped memory" in failure.message
    assert all(guarding.names is not None for guarding in runs)
