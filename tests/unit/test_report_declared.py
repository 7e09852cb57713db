"""attnfuzz.report.declarations: a bug within the declaration is told apart from what a further declaration ends."""

from __future__ import annotations

import pytest

from attnfuzz.problems.supports import Supports
from attnfuzz.report.declarations import print_declared
from attnfuzz.report.terminal import make_console
from tests.unit.report_results import DENSE, PAGED, a_finding, a_result


def test_only_what_no_declaration_ends_is_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel for contiguous tensors would be told to have a bug that its declaration ends."""
    result = a_result(a_finding(remedy=Supports(strides="contiguous")), a_finding(DENSE))
    print_declared(make_console(), result)
    paged, dense, _ = capsys.readouterr().out.split("\n\n")
    assert paged.startswith(f"{PAGED.target}:")
    assert "no bug was found in" in paged
    assert "and 1 possibly out of contract, which a further declaration ends:" in paged
    assert 'declare Supports(strides="contiguous")' in paged
    assert "within it, 1 bug, which no declaration ends:" in dense
    assert "out of contract" not in dense
    assert result.fails
    assert not a_result(a_finding(remedy=Supports(strides="contiguous"))).fails
