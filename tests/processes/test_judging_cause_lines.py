"""The line that a rounding comes from, known from a run: of a kernel in Triton's interpreter, and of an eager one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.campaign.triage.explanation import explain_failure
from attnfuzz.declaration import Declaration, load_kernels
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.explaining.operations import Operations, places_of
from attnfuzz.judging import special_runs
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.problems.recipes import Values

KERNELS = Path(__file__).parents[1] / "common" / "rounding_kernels.py"
CASE = DenseDecodeCase(
    num_q_heads=2,
    num_kv_heads=1,
    head_size=64,
    seq_lens=(40, 3),
    scale=0.125,
    dtype="float16",
    values=Values(keys="normal", values="normal", logit_exponent=4),
)
MISTAKES = (
    "products", "products and sums", "scores", "scaled query", "row sum", "accumulator", "short exp2",
    "weights in float8_e4m3fn", "K to float8_e5m2", "V to float8_e5m2", "no maximum", "partial LSE",
)  # fmt: skip

DECODE = next(one for one in load_kernels(str(KERNELS)) if one.declaration.name == "decode")
Lines = dict[str, Any]


@pytest.fixture(scope="module")
def found() -> dict[str, Lines]:
    """What is told of each mistake of a kernel that makes it, and found of any in one that makes none."""
    made = (msgspec.structs.replace(CASE, options={"mistake": name}) for name in ("none", *MISTAKES))
    plain, *cases = made
    seen = Operations(special_runs._recorded(DECODE, plain, "cpu"))
    return {
        "made": {
            name: special_runs.cause_lines(DECODE, case, (name,), device="cpu").sources
            for name, case in zip(MISTAKES, cases, strict=True)
        },
        "not made": {name: places_of((name,), seen) for name in MISTAKES},
    }


def marked(name: str) -> list[int]:
    """Numbers of the lines that a comment marks with a mistake."""
    lines = KERNELS.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {name}")]


@pytest.mark.parametrize("name", MISTAKES)
def test_the_line_of_each_rounding_is_found(name: str, found: dict[str, Lines]) -> None:
    """A reader would look for the mistake in the whole kernel, or at a line that is right."""
    told = found["made"][name]
    assert [one.line for one in told] == marked(name)
    text = KERNELS.read_text(encoding="utf-8").splitlines()[marked(name)[0] - 1].strip()
    assert told[0].text == text
    assert str(told[0].file).endswith("rounding_kernels.py")


def test_a_kernel_without_a_rounding_has_no_line_for_it(found: dict[str, Lines]) -> None:
    """Lines that are right would be blamed for what some other part of a kernel does."""
    assert DECODE.declaration.options["mistake"] == ("none", *MISTAKES)
    assert not any(found["not made"].values())


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(device="cpu", timeout_s=60.0) as runner:
        yield runner


def explained(runner: Runner, name: str, weighing_s: float = 0.0) -> tuple[Declaration, Explanation]:
    declarations = {one.name: one for one in runner.declarations([str(KERNELS)])}
    failure = runner.judge(declarations[name], CASE, relations=()).failure
    assert failure is not None
    found = explain_failure(runner, declarations[name], CASE, failure, weighing_s=weighing_s, total_s=0.0)
    return declarations[name], found


@pytest.mark.parametrize(("name", "mark"), [("rounded_products", "products"), ("eager_products", "eager products")])
def test_an_explanation_names_the_line_of_its_cause(name: str, mark: str, runner: Runner) -> None:
    """The cause would be told without the place, which is what a maintainer looks for next."""
    _, explanation = explained(runner, name)
    assert [one.line for one in explanation.sources] == marked(mark)
    (look, *_) = explanation.all_lines
    assert look.startswith("look at ")
    assert f"rounding_kernels.py:{marked(mark)[0]}: `" in look


def test_a_cause_that_no_rounding_makes_names_no_line(runner: Runner) -> None:
    """Whatever is rounded in a kernel would be taken for the reason of every other mistake."""
    _, explanation = explained(runner, "scaled_by_hand", weighing_s=5.0)
    assert explanation.lines
    assert explanation.sources == ()


def test_a_kernel_that_dies_meanwhile_names_no_line(runner: Runner) -> None:
    """A finding would be lost with the process that was to tell more of it."""
    kernels = KERNELS.with_name("misbehaving_kernels.py")
    (declaration,) = runner.declarations([f"{kernels}:segfaults_at_seven"])
    case = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(7,), scale=0.25, dtype="float32")
    assert runner.cause_lines(declaration, case, ("products",)) == Explanation()
