"""Failures as data: which are the end of a process, and what of them is sent."""

from __future__ import annotations

import msgspec
import pytest

from attnfuzz.oracles.registry import OracleName
from attnfuzz.verdict import PAST_THE_END, Cause, Failure, ends_process, is_fault


@pytest.mark.parametrize(
    ("oracle", "kind", "ends", "fault"),
    [
        ("crash", "SIGSEGV", True, False),
        ("hang", "timeout", True, False),
        ("guard_page", "read past k_cache", True, True),
        ("page_relocation", "write before out", True, True),
        ("page_relocation", "raised cuda:an illegal memory access", True, True),
        ("page_relocation", "page ids", False, False),
        ("graph_replay", "raised AcceleratorError in decode", True, True),
        ("graph_replay", "bits", False, False),
        ("red_zone", "write after out", False, False),
        ("accuracy", "out:value", False, False),
    ],
)
def test_deaths_and_faults_are_told_by_oracle_and_kind(oracle: OracleName, kind: str, ends: bool, fault: bool) -> None:
    """A campaign would go on in a process that is gone, or leave out a relation that only compares bits."""
    assert ends_process(Failure(oracle=oracle, kind=kind, message="")) == ends
    assert is_fault(oracle, kind) == fault
    assert not ends_process(None)


@pytest.mark.parametrize(("oracle", "name"), [("accuracy", "accuracy/out:value"), ("red_zone", "red_zone/tf32")])
def test_a_cause_that_nobody_has_asked_about_is_no_headline(oracle: OracleName, name: str) -> None:
    """What fits a large case by chance would be told as the bug of a finding that time has cut off."""
    seen = Failure(oracle=oracle, kind="out:value", message="", causes=(Cause(mistake="tf32", way="TF32"),))
    assert seen.undecided.name == name
    assert "tf32" in (*seen.undecided.maybe, seen.undecided.cause)


def test_a_failure_of_more_causes_than_are_sent_is_sent() -> None:
    """The driver would take the answer for garbled, and the kernel for one that overwrites file descriptors."""
    many = tuple(Cause(mistake=PAST_THE_END, way=f"{number} of dead memory") for number in range(512))
    failure = Failure(oracle="dead_memory", kind="out", message="out changes", causes=many)
    assert msgspec.json.decode(msgspec.json.encode(failure), type=Failure) == failure
