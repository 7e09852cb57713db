"""The line that touches memory as it must not, known from a run in Triton's interpreter, or from compiled TTIR."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.campaign.triage.explanation import explain_failure
from attnfuzz.explaining.accesses import Access, Question, lines_of
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.explaining.ttir import accesses_of_ttir
from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.registry import OracleName, oracle_of
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.verdict import Cause, Failure
from tests.common.compiled_ttir import ttir_of_mistakes

KERNELS = Path(__file__).with_name("accessing_kernels.py")
CASE = DenseDecodeCase(num_q_heads=2, num_kv_heads=1, head_size=16, seq_lens=(5, 3), scale=0.25, dtype="float16")


def marked(name: str) -> list[int]:
    lines = KERNELS.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {name}")]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(device="cpu", timeout_s=120.0) as runner:
        yield runner


def told(runner: Runner, mistake: str, *relations: Any) -> tuple[Failure, Explanation]:
    (declaration,) = runner.declarations([str(KERNELS)])
    case = msgspec.structs.replace(CASE, options={"mistake": mistake})
    failure = runner.judge(declaration, case, relations=relations).failure
    assert failure is not None
    return failure, explain_failure(runner, declaration, case, failure, weighing_s=0.0, total_s=0.0)


@pytest.mark.parametrize(
    ("mistake", "oracle"),
    [
        ("narrow offsets", "page_relocation"),
        ("cut to 32 bits", "page_relocation"),
        ("row left out", "unwritten"),
        ("read before written", "unwritten"),
        ("row too long", "red_zone"),
        ("query written", "red_zone"),
    ],
)
def test_the_line_of_an_access_is_told(mistake: str, oracle: OracleName, runner: Runner) -> None:
    """A reader would be told to convert some index, or to write some buffer, of all that a kernel has."""
    failure, explanation = told(runner, mistake, *oracle_of(oracle).relations)
    assert failure.oracle == oracle
    assert [one.line for one in explanation.sources] == marked(mistake)
    assert str(explanation.sources[0].file).endswith("accessing_kernels.py")
    assert explanation.sources[0].text


def test_a_fault_says_its_own_line(runner: Runner) -> None:
    """All lines that touch a tensor would be told of an access past its end, or a further process be spent on it."""
    failure, explanation = told(runner, "past the end", "guard_page")
    assert failure.oracle == "guard_page"
    assert [one.line for one in failure.sources] == marked("past the end")
    assert explanation.sources == failure.sources


def test_a_kernel_without_the_mistake_has_no_line_for_it(runner: Runner) -> None:
    """A line that is right would be blamed."""
    (declaration,) = runner.declarations([str(KERNELS)])
    failures = (
        Failure(oracle="page_relocation", kind="strides of k", message="", causes=(Cause(mistake="narrow_offsets"),)),
        Failure(oracle="unwritten", kind="", message="", causes=(Cause(mistake="read_before_written"),)),
        Failure(oracle="accuracy", kind="out:value", message="", tensor="out"),
    )
    for failure in failures:
        assert runner.access_lines(declaration, CASE, failure) == Explanation()


TYPES = dict.fromkeys(("p_q", "p_k", "p_v", "p_out"), "*fp16")
TYPES |= {"p_lse": "*fp32", "p_lens": "*i32", "p_scratch": "*fp32", "scale": "fp32"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return ttir_of_mistakes(KERNELS, TYPES, tmp_path_factory.mktemp("cache"))


TENSORS = {"p_q": "q", "p_k": "k", "p_v": "v", "p_out": "out", "p_lse": "lse", "p_lens": "seq_lens"}


@pytest.mark.parametrize(
    ("mistake", "question", "tensor"),
    [
        ("narrow offsets", "narrow", "k"),
        ("cut to 32 bits", "narrow", "k"),
        ("row left out", "stored", "out"),
        ("past the end", "touched", "seq_lens"),
    ],
)
def test_what_was_compiled_tells_the_line(
    mistake: str, question: Question, tensor: str, compiled: dict[str, str]
) -> None:
    """On a GPU a tensor would be named, and none of the lines that touch it."""
    found = [line for file, line in lines_of(question, (tensor,), accesses_of_ttir(compiled[mistake], TENSORS))]
    assert set(found) >= set(marked(mistake))
    (length,) = (i for i, line in enumerate(KERNELS.read_text().splitlines(), 1) if line.startswith("    length ="))
    assert set(found) - set(marked(mistake)) == ({length} if question == "touched" else set())


@pytest.mark.parametrize("tensor", ["q", "k", "v", "out", "lse"])
def test_wide_offsets_are_not_taken_for_narrow_ones(tensor: str, compiled: dict[str, str]) -> None:
    """A line would be told to compute in 32 bits that computes in 64."""
    assert lines_of("narrow", (tensor,), accesses_of_ttir(compiled["none"], TENSORS)) == ()


def test_each_tensor_has_its_own_lines(compiled: dict[str, str]) -> None:
    """The loads of one tensor would be told as those of another."""
    accesses = accesses_of_ttir(compiled["none"], TENSORS)
    lines = KERNELS.read_text(encoding="utf-8").splitlines()
    for tensor, begin in (("q", "q = tl.load"), ("k", "k = tl.load"), ("v", "v = tl.load"), ("out", "tl.store(p_row")):
        ((_, line),) = lines_of("touched", (tensor,), accesses)
        assert lines[line - 1].strip().startswith(begin)


def test_of_many_lines_none_is_told() -> None:
    """A list of all loads of a kernel tells nobody where to look."""
    accesses = [Access("load", "k", ("k.py", line)) for line in range(1, 5)]
    assert lines_of("touched", ("k",), accesses) == ()
    assert lines_of("touched", ("k",), accesses[:3]) == tuple(one.place for one in accesses[:3])
