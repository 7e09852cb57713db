"""attnfuzz.campaign.compared_environments: campaigns in several environments, told as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from attnfuzz.campaign.compared_environments import naming, search_across
from attnfuzz.campaign.request import CampaignRequest
from attnfuzz.campaign.result import CampaignResult, Reporter
from attnfuzz.declaration import KernelLoadError
from attnfuzz.isolation.outcomes import ExecutorUnavailable
from attnfuzz.isolation.pythons import Python
from tests.common.report_results import DENSE, MERGE, a_finding, a_result

OLD, NEW = (Python(Path(f"/{name}/bin/python"), {"triton": name}) for name in ("3.6.0", "3.9.0"))
REQUEST = CampaignRequest(kernels=("*",), started=0.0, budget_s=60.0, save_folder=Path("found"))

Campaign = Callable[[CampaignRequest], CampaignResult]


class Unstartable:
    """In place of a runner."""

    def __init__(self, **settings: object) -> None:
        raise ExecutorUnavailable("no memory for it")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Campaign], CampaignResult]:
    """A search in two environments whose campaigns are made up, and where no case runs afterwards."""

    def search(campaign: Campaign) -> CampaignResult:
        def run_campaign(request: CampaignRequest, reporter: Reporter) -> CampaignResult:
            return campaign(request)

        monkeypatch.setattr("attnfuzz.campaign.compared_environments.run_campaign", run_campaign)
        monkeypatch.setattr("attnfuzz.campaign.compared_environments.Runner", Unstartable)
        return search_across(REQUEST, [OLD, NEW], lambda python: Reporter())

    return search


def test_each_environment_has_an_equal_part_and_the_same_seed(run: Callable[[Campaign], CampaignResult]) -> None:
    """One of them would be searched less than the other, for other cases, and called the better one."""
    asked: list[CampaignRequest] = []

    def campaign(request: CampaignRequest) -> CampaignResult:
        asked.append(request)
        return a_result()

    result = run(campaign)
    assert [(one.python, one.budget_s) for one in asked] == [(OLD, 30.0), (NEW, 30.0)]
    assert asked[0].seed is not None
    assert asked[0].seed == asked[1].seed
    assert result.statistics.cases == 2 * a_result().statistics.cases
    assert result.pythons == (OLD, NEW)


def test_what_both_find_is_one_finding_and_a_smaller_case_counts(run: Callable[[Campaign], CampaignResult]) -> None:
    """One bug would be told twice, or a file be named that the second campaign has replaced."""
    same, larger, smaller = Path("same.json"), Path("larger.json"), Path("smaller.json")
    early = a_finding(python=OLD, path=same, cases_seen=2), a_finding(python=OLD, path=larger, cases_seen=3)
    late = (
        a_finding(python=NEW, path=same, known_as=same, cases_seen=5),
        a_finding(python=NEW, path=smaller, replaces=larger, cases_seen=7),
        a_finding(python=NEW, path=Path("new.json")),
    )
    result = run(lambda request: a_result(*(early if request.python is OLD else late)))
    told = [(finding.path, finding.python, finding.cases_seen) for finding in result.findings]
    assert told == [(same, OLD, 7), (smaller, NEW, 10), (Path("new.json"), NEW, 1)]
    assert result.statistics.findings == list(result.findings)


def test_a_kernel_that_one_environment_never_reached_is_told(run: Callable[[Campaign], CampaignResult]) -> None:
    """It would count as found to be right in both, for the cases of the other."""

    def campaign(request: CampaignRequest) -> CampaignResult:
        result = a_result()
        if request.python is NEW:
            result.statistics.kernels[DENSE.target].cases = 0
        return result

    assert run(campaign).unreached == (DENSE.target, MERGE.target)


def test_a_finding_that_cannot_be_run_elsewhere_says_so(run: Callable[[Campaign], CampaignResult]) -> None:
    """It would look as if it had passed there, or the campaign's result be lost."""
    result = run(lambda request: a_result(*([a_finding(python=NEW)] if request.python is NEW else [])))
    (finding,) = result.findings
    assert [(one.python, one.ending) for one in finding.outcomes] == [(OLD, "is not judged"), (NEW, "fails")]
    assert finding.outcomes[0].message == "no memory for it"
    assert finding.comparison() == "is not judged with Triton 3.6.0, fails with Triton 3.9.0"


def test_a_campaign_that_cannot_begin_keeps_what_the_first_has_found(
    run: Callable[[Campaign], CampaignResult],
) -> None:
    """The findings of half an hour would go unreported, since the second environment lacks the kernel."""

    def campaign(request: CampaignRequest) -> CampaignResult:
        if request.python is NEW:
            raise KernelLoadError("no kernel 'k'")
        return a_result(a_finding(python=OLD))

    result = run(campaign)
    assert len(result.findings) == 1
    assert result.troubles == (f"--python {NEW.path}: no kernel 'k'",)
    with pytest.raises(KernelLoadError, match="no kernel"):
        run(lambda request: campaign(replace(request, python=NEW)))


def test_no_campaign_follows_one_that_was_interrupted(run: Callable[[Campaign], CampaignResult]) -> None:
    """Ctrl-C would have to be pressed once for each environment."""
    asked: list[Python | None] = []

    def campaign(request: CampaignRequest) -> CampaignResult:
        asked.append(request.python)
        return a_result(a_finding(python=OLD), stop_reason="interrupted", signal=2)

    result = run(campaign)
    assert asked == [OLD]
    assert (result.stop_reason, result.signal) == ("interrupted", 2)


def test_trouble_names_its_environment() -> None:
    """Of five environments, the user would have to find out which has no memory, or not the kernel."""
    with pytest.raises(ExecutorUnavailable, match=r"--python /3\.6\.0/bin/python: no memory"), naming(OLD):
        raise ExecutorUnavailable("no memory")
    with pytest.raises(ExecutorUnavailable, match=r"^no memory"), naming(None):
        raise ExecutorUnavailable("no memory")
