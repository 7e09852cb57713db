"""Accesses one element outside of a tensor cost a process its CUDA context; which tensor it was is found out later."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from attnfuzz.declaration import Declaration
from attnfuzz.judging.guard_naming import with_name
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import Case
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.strategies import cases
from attnfuzz.verdict import Verdict
from tests.gpu.bundled_cases import BUNDLED

KERNELS = Path(__file__).parents[1] / "oracles" / "relations" / "reaching_kernels.py"
RUNS = 25
"""Of each correct kernel, two guarded ones a case."""

# Tensors of a multiple of 16 bytes: of others, the end is up to 15 bytes away from unmapped memory.
DENSE = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 24, "seq_lens": (3, 0, 5, 2)}
PAGED = {**DENSE, "block_size": 4}
ATTENTION = ("q", "k_cache", "v_cache", "block_table", "seq_lens")
QUERIES = {**PAGED, "seq_lens": (3, 0, 5), "query_lens": (2, 0, 2), "layout": "NHD"}
MERGE = {"num_q_heads": 3, "head_size": 24, "num_tokens": 4}
PLANTED: list[tuple[str, str, dict[str, Any]]] = [
    *(("paged", name, PAGED | {"layout": "NHD"}) for name in (*ATTENTION, "out", "lse", "workspace")),
    *(("paged", name, PAGED | {"layout": layout}) for layout in ("HND", "packed") for name in ("k_cache", "v_cache")),
    *(("queries", name, QUERIES) for name in ("q", "cu_seqlens_q", "out", "lse")),
    *(("dense", name, DENSE) for name in ("k", "v")),
    *(("split", name, PAGED | {"num_splits": 3}) for name in ("partial_out", "partial_lse")),
    *(
        ("merge", name, MERGE)
        for name in ("prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output", "output_lse")
    ),
]
NAMED = [
    (
        "k_cache",
        "read",
        "past",
        "the kernel read past k_cache (float16 [4, 4, 1, 24]): 1 element (2 bytes) past its end",
    ),
    ("out", "write", "past", "the kernel wrote past out (float16 [4, 2, 24]): 1 element (2 bytes) past its end"),
    ("q", "read", "before", "the kernel read before q (float16 [4, 2, 24]): 1 element (2 bytes) before its start"),
    ("seq_lens", "read", "past", "the kernel read past seq_lens (int32 [4]): 1 element (4 bytes) past its end"),
    (
        "workspace",
        "write",
        "before",
        "the kernel wrote before workspace (float32 [4, 5]): 1 element (4 bytes) before its start",
    ),
]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Runner]:
    """Only asks for what can be found here, so that a case is run as rarely as possible."""
    with Runner(device="cuda", oracles=("guard_page", "crash", "exception")) as started:
        yield started


def planted(runner: Runner, kernel: str, **changes: Any) -> tuple[Declaration, Case]:
    (declaration,) = runner.declarations([f"{KERNELS}:{kernel}"])
    simplest = simplest_case(declaration.problem, declaration.supports, declaration.options)
    return declaration, msgspec.structs.replace(simplest, **changes)


@pytest.mark.parametrize(
    ("kernel", "tensor", "shape"),
    PLANTED,
    ids=[f"{kernel}-{tensor}-{shape.get('layout')}" for kernel, tensor, shape in PLANTED],
)
def test_one_element_outside_is_caught(guarded: Runner, kernel: str, tensor: str, shape: dict[str, Any]) -> None:
    """A kernel that reaches outside would pass on a GPU, where memory goes on beside every tensor."""
    missed = []
    for access, side in itertools.product(("read", "write"), ("past", "before")):
        options = {"tensor": tensor, "access": access, "side": side}
        declaration, case = planted(guarded, kernel, options=options, **shape)
        failure = guarded.judge(declaration, case, relations=("guard_page",)).failure
        told = None if failure is None else (failure.oracle, failure.kind, failure.tensor)
        if told != ("guard_page", "raised cuda:illegal memory access", tensor):
            missed.append((access, side, failure))
    assert not missed


@pytest.mark.parametrize(("tensor", "access", "side", "words"), NAMED)
def test_tensor_access_and_distance_are_named(
    guarded: Runner,
    tensor: str,
    access: str,
    side: str,
    words: str,
    record_property: Callable[[str, object], None],
) -> None:
    """An engineer would be told that something was touched somewhere."""
    options = {"tensor": tensor, "access": access, "side": side}
    declaration, case = planted(guarded, "paged", options=options, **PAGED)
    verdict = guarded.judge(declaration, case, relations=("guard_page",))
    restarts, started = guarded.restarts, time.monotonic()
    failure = with_name(guarded, declaration, case, verdict).failure
    record_property("naming_s", round(time.monotonic() - started, 1))
    record_property("naming_restarts", guarded.restarts - restarts)
    print(f"{tensor}: {time.monotonic() - started:.1f} s, {guarded.restarts - restarts} processes")
    assert failure is not None
    assert failure.message == words
    assert failure.kind == "raised cuda:illegal memory access"


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed", "interleaved"])
def test_edges_may_be_touched(guarded: Runner, layout: str) -> None:
    """A correct kernel would be blamed for using the first or the last element of a tensor."""
    declaration, case = planted(guarded, "edges_only", **PAGED, layout=layout)
    assert guarded.judge(declaration, case, relations=("guard_page",)).failure is None


@pytest.mark.parametrize(
    ("kernel", "changes"),
    [
        ("reads_table_past_the_last_tile", {"seq_lens": (4, 4, 4, 4), "block_size": 1}),
        ("reads_padded_columns", {"head_size": 24}),
    ],
)
def test_bugs_of_the_past_are_found(guarded: Runner, kernel: str, changes: dict[str, Any]) -> None:
    """These change no result: no other oracle can see them."""
    declaration, case = planted(guarded, kernel, **changes)
    failure = guarded.judge(declaration, case, relations=("guard_page",)).failure
    assert failure is not None
    assert failure.oracle == "guard_page"


@pytest.mark.parametrize("target", BUNDLED)
def test_correct_kernels_are_left_alone(
    target: str, guarded: Runner, record_property: Callable[[str, object], None]
) -> None:
    """A false alarm, or a kernel that cannot run where a tensor ends with its memory."""
    (declaration,) = guarded.declarations([target])
    restarts = guarded.restarts
    spent = {"ordinary": 0.0, "guarded": 0.0}

    def took(case: Case, relations: tuple[Any, ...]) -> float:
        verdict: Verdict = guarded.judge(declaration, case, relations=relations)
        assert verdict.failure is None, verdict.failure
        return verdict.timing.total_s - verdict.timing.compile_s

    @seed(3)
    @settings(
        max_examples=RUNS,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(declaration.problem, supports=declaration.supports, options=declaration.options))
    def check(case: Case) -> None:
        took(case, ("guard_page",))  # compiles
        spent["ordinary"] += took(case, ())
        spent["guarded"] += took(case, ("guard_page",))

    check()
    assert guarded.restarts == restarts
    milliseconds = {name: round(1000 * seconds / RUNS, 2) for name, seconds in spent.items()}
    record_property("ms_per_case", str(milliseconds))
    print(target, milliseconds)
