"""What oracles say of kernels of users' problems: rows that were left as they were, or that lie elsewhere."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
import torch

import attnfuzz
from attnfuzz.cases.facets import Domain, changed, facets_of
from attnfuzz.cases.features import features
from attnfuzz.declaration import Kernel
from attnfuzz.families import CacheWrite
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.relations.graph_replay import GRAPH_REPLAY
from attnfuzz.problems.open_cases import implementation_of
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import Failure, Relations
from tests.common.named_features import words


class Halve(attnfuzz.Problem):
    """Each row of x but the last ones is halved in place."""

    rows = attnfuzz.Integer(1, 8)
    kept = attnfuzz.Integer(0, 2)
    seed = attnfuzz.Seed()

    written_on: ClassVar[list[str]] = []

    def tensors(self, case: Any) -> dict[str, attnfuzz.TensorSpec]:
        shape = case.rows + case.kept, 4
        return {"x": attnfuzz.TensorSpec(shape, "float32", "in_place", axes=("row", "dim"))}

    def write(self, case: Any, tensors: Any) -> None:
        self.written_on.append(tensors["x"].device.type)
        tensors["x"].copy_(1 + attnfuzz.numbers(tuple(tensors["x"].shape), seed=case.seed, name="x").abs())

    def reference(self, case: Any, tensors: Any) -> dict[str, attnfuzz.Expected]:
        where = torch.zeros(tensors["x"].shape, dtype=torch.bool)
        where[: case.rows] = True
        return {"x": attnfuzz.Expected(tensors["x"].double() / 2, where)}


class Multiply(attnfuzz.Problem):
    """Rows times a number."""

    rows = attnfuzz.Integer(1, 8)
    factor = attnfuzz.Choice((1.0, 2.0, 0.5))
    seed = attnfuzz.Seed()

    def tensors(self, case: Any) -> dict[str, attnfuzz.TensorSpec]:
        return {
            "x": attnfuzz.TensorSpec((case.rows, 4), "float32"),
            "out": attnfuzz.TensorSpec((case.rows, 4), "float32", "output"),
        }

    def write(self, case: Any, tensors: Any) -> None:
        tensors["x"].copy_(attnfuzz.numbers((case.rows, 4), seed=case.seed, name="x"))

    def reference(self, case: Any, tensors: Any) -> dict[str, torch.Tensor]:
        return {"out": tensors["x"].double() * case.factor}


class Scatter(attnfuzz.Problem):
    """Rows go into slots of a cache, in order; all others stay as they are."""

    num_rows = attnfuzz.Integer(1, 8)
    spare = attnfuzz.Integer(0, 4)
    skipped = attnfuzz.Integer(0, 3)
    width = attnfuzz.Choice((4, 16, 64))
    order = attnfuzz.Choice(("up", "down", "any"))
    seed = attnfuzz.Seed()

    def tensors(self, case: Any) -> dict[str, attnfuzz.TensorSpec]:
        slots = case.num_rows + case.spare
        return {
            "rows": attnfuzz.TensorSpec((case.num_rows, case.width), "float32"),
            "cache": attnfuzz.TensorSpec((slots, case.width), "float32", "in_place", axes=("slot", "dim")),
        }

    def write(self, case: Any, tensors: Any) -> None:
        tensors["rows"].copy_(attnfuzz.numbers(tuple(tensors["rows"].shape), seed=case.seed, name="rows"))

    def reference(self, case: Any, tensors: Any) -> dict[str, attnfuzz.Expected]:
        value = torch.zeros(tensors["cache"].shape, dtype=torch.float64)
        where = torch.zeros(tensors["cache"].shape, dtype=torch.bool)
        value[: case.num_rows], where[: case.num_rows] = tensors["rows"].double(), True
        return {"cache": attnfuzz.Expected(value, where)}

    def bound(self, case: Any, tensors: Any) -> dict[str, float]:
        return {"cache": 0.0}


@attnfuzz.kernel(Halve())
def halves(inputs: Any) -> None:
    inputs.x[: inputs.rows] /= 2


@attnfuzz.kernel(Halve())
def does_nothing(inputs: Any) -> None:
    """Gives back what it was given."""


@attnfuzz.kernel(Halve())
def forgets_the_last_row(inputs: Any) -> None:
    inputs.x[: inputs.rows - 1] /= 2


@attnfuzz.kernel(Halve())
def halves_twice(inputs: Any) -> None:
    inputs.x[: inputs.rows] /= 4


@attnfuzz.kernel(Scatter())
def scatters(inputs: Any) -> None:
    inputs.cache[: len(inputs.rows)] = inputs.rows


@attnfuzz.kernel(Scatter())
def scatters_too_far(inputs: Any) -> None:
    for i, row in enumerate(inputs.rows):
        inputs.cache[min(2 * i, len(inputs.cache) - 1)] = row


@attnfuzz.kernel(Scatter())
def writes_one_more(inputs: Any) -> None:
    inputs.cache[: len(inputs.rows)] = inputs.rows
    inputs.cache[len(inputs.rows) :] = 0


PLANS: dict[Any, Any] = {}


@attnfuzz.kernel(Multiply())
def multiplies(inputs: Any) -> torch.Tensor:
    plan = PLANS.setdefault((inputs.rows, inputs.factor), inputs.factor)
    return inputs.x * plan  # type: ignore[no-any-return]


@attnfuzz.kernel(Multiply())
def plans_by_shape(inputs: Any) -> torch.Tensor:
    plan = PLANS.setdefault(inputs.rows, inputs.factor)
    return inputs.x * plan  # type: ignore[no-any-return]


@attnfuzz.kernel(Multiply())
def keeps_the_largest(inputs: Any) -> torch.Tensor:
    PLANS["rows"] = most = max(inputs.rows, PLANS.get("rows", 0))
    return inputs.x * inputs.factor + (most > inputs.rows)  # type: ignore[no-any-return]


def case_of(kernel: Kernel, **fields: Any) -> Any:
    problem: Any = kernel.declaration.problem
    return problem.case_type(**fields)


def failure_of(kernel: Kernel, relations: Relations = None, **fields: Any) -> Failure:
    failure = judge(kernel, case_of(kernel, **fields), device="cpu", relations=relations).failure
    assert failure is not None
    return failure


@pytest.mark.parametrize(
    ("kernel", "row", "extent"),
    [
        (does_nothing, 0, "left as it was: 12 of 20 elements of x (row 0-2, dim 0-3)"),
        (forgets_the_last_row, 2, "left as it was: 4 of 20 elements of x (row 2, dim 0-3)"),
    ],
)
def test_what_a_kernel_has_not_changed_is_told(kernel: Kernel, row: int, extent: str) -> None:
    """A row that was never written would be told as a wrong number."""
    failure = failure_of(kernel, rows=3, kept=2)
    assert (failure.oracle, failure.kind, failure.tensor) == ("unwritten", "x", "x")
    assert failure.message.startswith(f"x[row {row}, dim 0] still holds what it held before the call: ")
    assert extent in failure.details


def test_other_numbers_are_not_said_to_be_those_of_before() -> None:
    """A kernel that writes a wrong number would be told not to write."""
    assert failure_of(halves_twice, rows=2).oracle == "accuracy"


def test_a_row_that_lies_elsewhere_is_one_mistake() -> None:
    """That it is missing here, and lies there, would be two bugs."""
    failure = failure_of(scatters_too_far, num_rows=2, spare=1)
    assert (failure.oracle, failure.tensor, failure.cause) == ("red_zone", "cache", "displaced")
    assert failure.causes[0].words == (
        "what belongs at cache[slot 1] lies at cache[slot 2], and is missing at its own place"
    )
    assert failure.causes[0].words in failure.details


def test_a_stray_write_is_no_displaced_row() -> None:
    """A row that is where it belongs would be said to be missing."""
    failure = failure_of(writes_one_more, num_rows=2, spare=1)
    assert (failure.oracle, failure.causes) == ("red_zone", ())


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        pytest.param(
            plans_by_shape, r"the same call with factor=(2.0|0.5) after this case gives out\[", id="same shapes"
        ),
        pytest.param(keeps_the_largest, r"a call with rows=2 after this case", id="a larger call"),
    ],
)
def test_a_call_that_follows_from_an_earlier_one_is_told(kernel: Kernel, message: str) -> None:
    """A plan that leaves something out of its key would pass wherever each call is the first."""
    PLANS.clear()
    failure = failure_of(kernel, relations=("call_sequence",), rows=3)
    assert failure.oracle == "call_sequence"
    assert re.search(message, failure.message), failure.message


@pytest.mark.parametrize("kernel", [halves, scatters, multiplies])
def test_right_kernels_are_silent(kernel: Kernel) -> None:
    """What is written on the host would be other numbers in the memory of a run."""
    assert judge(kernel, case_of(kernel), device="cpu", relations="all").failure is None


def test_a_problem_is_written_on_the_host_and_not_for_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's `write` would meet a GPU's tensors, and mix them with the host's; or run for each of a dozen runs."""
    devices: list[str] = []
    problem: Any = halves.declaration.problem
    monkeypatch.setattr(type(implementation_of(problem)), "written_on", devices)  # a copy of the file may be in use
    judge(halves, case_of(halves, rows=5, seed=7), device="cpu", relations=("guard_page",))
    assert devices == ["cpu"] * 2  # the second time where other numbers were before


def test_numbers_of_a_choice_have_in_common_what_they_exceed() -> None:
    """A bug in all widths but the smallest would be a bug of each."""
    small, large = (words(features(case_of(scatters, width=width))) for width in (16, 64))
    assert small == {"width>4"}
    assert large == {"width>4", "width>16"}
    assert words(features(case_of(scatters, order="any"))) == {"order=any"}


def test_numbers_that_add_up_take_each_others_place() -> None:
    """Of two numbers that both make a length longer, each would make a bug of its own."""
    case = case_of(scatters, num_rows=3, spare=2)
    declaration: Any = scatters.declaration
    domain = Domain(declaration.problem, declaration.supports, {})
    others = [changed(case, **one) for facet in facets_of(type(case)) for one in facet.alternatives(case, domain)]
    assert case_of(scatters, num_rows=3, skipped=2) in others
    assert case_of(scatters, num_rows=3, skipped=2, seed=2) in others  # other numbers may be what shows the mistake
    assert case_of(scatters, num_rows=1, spare=2, skipped=2) in others
    assert case_of(scatters, num_rows=3) not in others  # shrinking has tried that


@pytest.mark.parametrize(
    "said", [{}, {"graph_replay": True}, {"deterministic": True}, {"deterministic": False, "graph_replay": False}]
)
def test_of_a_kernel_nothing_counts_as_declared_but_what_it_says(said: dict[str, Any]) -> None:
    """A verified kernel was told to promise what nobody had declared of it."""
    kernel = attnfuzz.kernel(CacheWrite(), supports=Supports(**said))(lambda _: None)
    assert kernel.declaration.supports.declared() == said
    is_replayed = GRAPH_REPLAY.applies(kernel.declaration, case_of(kernel))
    assert is_replayed is said.get("graph_replay", False)
