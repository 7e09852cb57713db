"""Calls captured into CUDA graphs: broken promises are found, kept ones are not, and nothing is left behind."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnfuzz.campaign.draw.sampling import run_round
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import (
    PROBLEMS,
    Case,
    DenseDecodeCase,
    LatentDecodeCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    Problem,
    SplitDecodeCase,
)
from attnfuzz.problems.recipes import Pages, Values
from attnfuzz.strategies.cases import case_lists
from attnfuzz.strategies.sizes import CPU_SIZES
from attnfuzz.verdict import Verdict
from tests.gpu.bundled_cases import BUNDLED, fitted

KERNELS = Path(__file__).with_name("graph_kernels.py")
SIZES: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 16, "scale": 0.25}
VALUES = Values(keys="normal", values="normal")
PAGES = Pages(order="shuffled", spare_blocks=2, extra_columns=1, padding="wrong_page")
LENGTHS = (5, 0, 37)
CASES: dict[str, Case] = {
    "dense_decode": DenseDecodeCase(**SIZES, seq_lens=LENGTHS, extra_rows=2, values=VALUES),
    "paged_decode": PagedDecodeCase(**SIZES, seq_lens=LENGTHS, block_size=8, values=VALUES, pages=PAGES),
    "latent_decode": LatentDecodeCase(
        **SIZES | {"num_q_heads": 8, "num_kv_heads": 1},
        v_head_size=8,
        seq_lens=LENGTHS,
        block_size=8,
        values=VALUES,
        pages=PAGES,
    ),
    "split_decode": SplitDecodeCase(**SIZES, seq_lens=LENGTHS, block_size=8, values=VALUES, pages=PAGES, num_splits=3),
    "merge_states": MergeStatesCase(
        num_q_heads=4, head_size=16, num_tokens=3, lse_pairs=(("finite", "-inf"), ("high", "low"))
    ),
    "paged_attention": PagedAttentionCase(
        **SIZES, seq_lens=LENGTHS, query_lens=(1, 0, 20), block_size=8, values=VALUES, pages=PAGES, padding_tokens=3
    ),
}
DRAWN = 12
CHECKS = 150
GROWTH = f"""
import gc, json, torch
from attnfuzz.declaration import load_kernels
from attnfuzz.judging.judge import judge
from attnfuzz.problems.cases import DenseDecodeCase
(kernel,) = load_kernels("{KERNELS}:keeps_its_promise")
case = DenseDecodeCase(num_q_heads=4, num_kv_heads=2, head_size=16, seq_lens=(5, 0, 37), scale=0.25)
held = []
for i in range({CHECKS}):
    verdict = judge(kernel, case, device="cuda", relations=("graph_replay",))
    assert verdict.failure is None, verdict
    gc.collect()
    held.append([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])
print(json.dumps([held[9], held[-1]]))
"""


@pytest.fixture
def fresh() -> Iterator[Runner]:
    """An executor of its own: what kernels keep between calls is nobody else's."""
    with Runner(device="cuda") as started:
        yield started


def judged(runner: Runner, target: str) -> Verdict:
    (declaration,) = runner.declarations([target])
    case = fitted(declaration, CASES[str(declaration.problem)])
    return runner.judge(declaration, case, relations=("graph_replay",))


@pytest.mark.parametrize(
    ("kernel", "kind", "message"),
    [
        (
            "grid_of_the_last_plan",
            "bits",
            r" in an eager call, but .* when the graph is replayed with seq_lens grown from \[5, 0, 37\] to \[74, 64, ",
        ),
        (
            "grid_by_shape",
            "out",
            r" before any other call, but .* when the graph is replayed with seq_lens grown from ",
        ),
        (
            "splits_of_the_last_plan",
            "out",
            r" in an eager call, but .* with seq_lens grown from .* times the error bound",
        ),
        (
            "counter_cleared_by_the_host",
            "bits",
            r" when the graph is replayed with what it was captured with: the bits",
        ),
        ("table_copied_outside", "bits", r" in an eager call, but .* when the graph is replayed with "),
    ],
)
def test_what_a_graph_freezes_is_found(kernel: str, kind: str, message: str, fresh: Runner) -> None:
    """A kernel that is right in every eager call would give wrong answers in a server, which replays graphs."""
    failure = judged(fresh, f"{KERNELS}:{kernel}").failure
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("graph_replay", kind), failure
    assert re.search(message, failure.message), failure.message
    assert "frozen when the graph is captured" in failure.details[-1]


def test_a_call_that_cannot_be_captured_is_told_and_spoils_nothing(fresh: Runner) -> None:
    """A capture that failed leaves torch's allocator in a state in which the next one ends the process."""
    for _ in range(2):
        failure = judged(fresh, f"{KERNELS}:waits_for_the_lengths").failure
        assert failure is not None
        assert failure.oracle == "graph_replay"
        assert failure.kind.startswith("raised ")
        assert failure.message.startswith("cannot be captured: the kernel raised ")
        assert "captur" in failure.message.partition("the kernel raised")[2]
        assert judged(fresh, f"{KERNELS}:keeps_its_promise").failure is None


def test_a_kernel_that_says_nothing_is_asked_where_it_can_be_captured(fresh: Runner) -> None:
    """Most kernels promise nothing: what a graph freezes of theirs would not be seen, or be told as broken."""
    failure = judged(fresh, f"{KERNELS}:says_nothing_and_freezes_its_grid").failure
    assert failure is not None
    assert (failure.oracle, failure.remedy) == ("graph_replay", {"graph_replay": False})
    assert judged(fresh, f"{KERNELS}:says_nothing_and_waits").failure is None
    assert judged(fresh, f"{KERNELS}:says_nothing_and_is_right").failure is None


@pytest.mark.parametrize("kernel", ["keeps_its_promise", "keeps_it_within_bounds", "scratch_made_while_capturing"])
def test_kept_promises_are_left_alone(kernel: str, runner: Runner) -> None:
    """A right kernel would be accused."""
    assert judged(runner, f"{KERNELS}:{kernel}").failure is None


@pytest.mark.parametrize("target", BUNDLED)
def test_bundled_kernels_keep_theirs(target: str, runner: Runner) -> None:
    """The kernels that show how it is done would not be usable in a server."""
    (declaration,) = runner.declarations([target])
    if declaration.supports.graph_replay:
        assert judged(runner, target).failure is None


def test_every_problem_has_a_kernel_that_promises_it(runner: Runner) -> None:
    """Nobody would see how a kernel of that problem is made fit for graphs, and the test above would skip it."""
    promising = {one.problem for one in runner.declarations(["*"]) if one.supports.graph_replay}
    assert promising == set(PROBLEMS) - {"masked_attention"} == set(CASES)  # other lengths want another mask


@pytest.mark.parametrize("problem", PROBLEMS)
def test_drawn_cases_raise_no_false_alarm(problem: Problem, runner: Runner) -> None:
    """A campaign would report what is right in odd strides, layouts, dtypes or lengths."""
    for declaration in runner.declarations(["*"]):
        if declaration.problem != problem or not declaration.supports.graph_replay:
            continue
        drawn: list[Case] = []
        domain = {"supports": declaration.supports, "options": declaration.options, "sizes": CPU_SIZES}
        run_round(
            case_lists(problem, length=DRAWN, **domain),  # type: ignore[arg-type]  # of several kinds
            lambda cases, drawn=drawn: bool(drawn.extend(cases) or True),  # type: ignore[misc]  # bound at once
            seed_value=7,
            until=math.inf,
            max_draws=2,
        )
        for case in drawn[-DRAWN:]:
            failure = runner.judge(declaration, case, relations=("graph_replay",)).failure
            assert failure is None, (declaration.target, case, failure)


def test_hundreds_of_captures_leave_no_memory_behind() -> None:
    """Each graph has a pool of memory of its own, and a campaign makes thousands. CUDA in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join(filter(None, (str(KERNELS.parents[2]), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", GROWTH],
        env={**environment, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (allocated, reserved), (allocated_later, reserved_later) = json.loads(done.stdout.splitlines()[-1])
    assert allocated_later <= allocated
    assert reserved_later <= reserved + (4 << 20)
