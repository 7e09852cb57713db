"""attnfuzz.campaign.floor: "nothing found" in two cases says nothing."""

from __future__ import annotations

import pytest

from attnfuzz.campaign.floor import TooFew, floor_of, sentences_of
from attnfuzz.cli.outcome import outcome_of, why_not_judged
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import BundledProblem
from attnfuzz.problems.supports import Supports
from attnfuzz.report.summary import summarise
from attnfuzz.report.terminal import make_console, print_result
from tests.unit.report_results import MERGE, a_finding, a_result


@pytest.mark.parametrize(
    ("problem", "supports", "options", "floor"),
    [
        ("dense_decode", Supports(), {}, 10),
        ("dense_decode", Supports(head_sizes=(16,)), {}, 4),
        ("dense_decode", Supports(head_sizes=(16,)), {"tile": tuple(range(16, 400, 16))}, 16),
        ("dense_decode", Supports(head_sizes=tuple(range(16, 1024, 16))), {}, 16),
        ("paged_decode", Supports(head_sizes=(16, 64), layouts=("NHD",)), {"tile": (16, 32, 64, 128, 256)}, 5),
    ],
)
def test_the_floor_goes_by_what_the_contract_has(
    problem: BundledProblem, supports: Supports, options: dict[str, tuple[int, ...]], floor: int
) -> None:
    """A kernel for one format would be held to what one for ten needs, or the other way round."""
    declaration = Declaration(name="k", problem=problem, target="k", supports=supports, options=options)  # type: ignore[arg-type]
    assert floor_of(declaration) == floor


def test_too_few_cases_are_no_success_and_told_with_the_budget_that_would_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A kernel that takes seconds for a case would pass a job after two of them."""
    result = a_result()
    del result.statistics.kernels[MERGE.target]  # which has no case
    assert outcome_of(result).status == 0
    (*_, slow) = result.statistics.kernels.values()
    slow.cases, slow.seconds, result.statistics.budget_s = 2, 4.0, 60.0
    assert outcome_of(result).status == 2
    sentence = (
        "only 2 cases were judged of dense, and a round of its formats takes 10; a case takes 2.0s here: "
        "--budget 450s would do"
    )
    print_result(make_console(), result)
    assert f"\n{sentence}\n" in capsys.readouterr().out
    assert why_not_judged(result) == sentence
    assert summarise(result).too_few == (sentence,)


def test_many_kernels_are_told_in_one_sentence() -> None:
    """The first run of a newcomer would end in a page of the same sentence."""
    few = [TooFew(f"kernel_{number}", number, 13, 0.1, 20.0 + number) for number in range(1, 6)]
    assert len(sentences_of(few[:3])) == 3
    (sentence,) = sentences_of(few)
    assert sentence.startswith(
        "5 kernels were judged on fewer cases than a round of their formats takes (kernel_1 1 of"
    )
    assert sentence.endswith(": --budget 25s would do")


def test_a_kernel_of_which_something_is_known_needs_no_more_cases() -> None:
    """A search that ends at its first finding would be told to go on."""
    result = a_result(a_finding())
    for kernel in result.statistics.kernels.values():
        kernel.cases = 1
    assert a_finding().declaration.target not in {one.target for one in result.too_few}
