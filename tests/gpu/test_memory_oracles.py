"""The oracles on memory see on a GPU what they see on a CPU, leaks among it, and nothing in a correct kernel."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from attnfuzz.declaration import Declaration
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import Case, DenseDecodeCase, PagedDecodeCase
from attnfuzz.problems.recipes import Pages, Values
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import DTYPES, Dtype
from tests.faults.campaigns import Campaign, saved

Broken = dict[str, Declaration]

VALUES = Values(keys="normal", values="normal")
DENSE = DenseDecodeCase(
    num_q_heads=4, num_kv_heads=2, head_size=16, seq_lens=(5, 0, 37), scale=0.25, extra_rows=2, values=VALUES
)
PAGED = PagedDecodeCase(
    num_q_heads=4, num_kv_heads=2, head_size=16, seq_lens=(5, 0, 37), scale=0.25, block_size=8, values=VALUES,
    pages=Pages(order="shuffled", spare_blocks=2, extra_columns=1),
)  # fmt: skip
CASES: dict[str, Case] = {"dense_decode": DENSE, "paged_decode": PAGED}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["correct", "correct_on_pages"])
def test_correct_kernel_is_left_alone(name: str, dtype: Dtype, runner: Runner, broken: Broken) -> None:
    """A right kernel would be accused, with different memory on a GPU as the reason."""
    case = msgspec.structs.replace(CASES[str(broken[name].problem)], dtype=dtype)
    verdict = runner.judge(broken[name], case)
    assert verdict.failure is None
    assert 0 < verdict.error_ratio < 1


@pytest.mark.parametrize(
    ("name", "oracle", "kind"),
    [
        ("writes_after_out", "red_zone", "write after out"),
        ("writes_before_lse", "red_zone", "write before lse"),
        ("writes_after_workspace", "red_zone", "write after workspace"),
        ("modifies_query", "red_zone", "q modified"),
        ("reads_past_the_length", "dead_memory", "out"),
        ("reads_page_tail", "dead_memory", "out"),
        ("leaves_last_row", "unwritten", "out"),
        ("reads_workspace_early", "unwritten", "read before written"),
        ("counts_its_calls", "determinism", "out"),
    ],
)
def test_broken_kernel(name: str, oracle: str, kind: str, runner: Runner, broken: Broken) -> None:
    """A kernel that touches what is not its own would pass on a GPU, or be blamed for something else."""
    failure = runner.judge(broken[name], CASES[str(broken[name].problem)]).failure
    assert failure is not None
    assert (failure.oracle, failure.kind) == (oracle, kind)


def test_stray_write_is_measured(runner: Runner, broken: Broken) -> None:
    """An engineer would be told the wrong distance, with elements of two bytes in the place of bytes."""
    failure = runner.judge(broken["writes_after_out"], DENSE).failure
    assert failure is not None
    assert failure.message == (
        "the kernel wrote 1 element after out (float16 [3, 4, 16]): the nearest is 1 element past its end"
    )


KERNELS = Path(__file__).parents[1] / "common" / "leaking_kernels.py"
CASE = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=16, seq_lens=(3,), scale=0.25, dtype="float32")


@pytest.mark.parametrize(
    ("kernel", "each"),
    [("keeps_16_mebibytes", "16.0 MiB"), ("keeps_a_little", "32.0 KiB"), ("keeps_much", "100.0 MiB")],
)
def test_a_leak_of_gpu_memory_is_told_as_such(runner: Runner, kernel: str, each: str) -> None:
    """Whoever looks for it in the host's memory looks in vain."""
    (declaration,) = runner.declarations([f"{KERNELS}:{kernel}"])
    found = runner.find_leak(declaration, CASE)
    assert found is not None
    assert f"every call keeps another {each} of GPU memory" in found.message


@pytest.mark.parametrize("kernel", ["keeps_the_latest", "keeps_once", "makes_cycles"])
def test_kernels_that_keep_memory_within_bounds(runner: Runner, kernel: str) -> None:
    """Caches are what makes kernels fast."""
    (declaration,) = runner.declarations([f"{KERNELS}:{kernel}"])
    assert runner.find_leak(declaration, CASE) is None


def test_bundled_kernels_do_not_leak(runner: Runner) -> None:
    """Triton keeps what it has compiled, and CUDA a context."""
    for declaration in runner.declarations(["*"]):
        case = simplest_case(declaration.problem, declaration.supports, declaration.options)
        assert runner.find_leak(declaration, case) is None, declaration.target


def test_a_campaign_finds_a_leak_of_gpu_memory(tmp_path: Path) -> None:
    """On a GPU no process outgrows a limit: the kernel, or the framework, is told that there is no memory left."""
    kernels = f"{KERNELS}:keeps_with_groups {KERNELS}:keeps_once"
    with Campaign(tmp_path, "--budget", "120s", kernels=kernels, workers=2) as campaign:
        assert campaign.wait(timeout_s=240.0) == 1, campaign.output
    assert "internal error" not in campaign.output, campaign.output
    (regression,) = saved(tmp_path)
    assert (regression.finding.oracle, regression.finding.kind) == ("crash", "leak"), campaign.output
    assert "every call keeps another 16.0 MiB of GPU memory" in regression.finding.message
    assert regression.finding.features == ("gqa_ratio>1",), campaign.output
