"""What `attnfuzz list` and `attnfuzz declare` print."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from attnfuzz.declaration import Declaration
from attnfuzz.problems.supports import Supports
from attnfuzz.report.declarations import print_declared, print_kernels
from attnfuzz.report.terminal import make_console
from tests.unit.report_results import DENSE, PAGED, a_finding, a_result


def test_only_what_no_declaration_ends_is_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel for contiguous tensors would be told to have a bug that its declaration ends."""
    result = a_result(a_finding(remedy=Supports(strides="contiguous")), a_finding(DENSE))
    print_declared(make_console(), result)
    paged, dense, _ = capsys.readouterr().out.split("\n\n")
    assert paged.startswith(f"{PAGED.target}:")
    assert "no bug was found in" in paged
    assert "1 question, which a further declaration answers:" in paged
    assert 'declare Supports(strides="contiguous")' in paged
    assert "within it, 1 bug, which no declaration ends:" in dense
    assert "out of contract" not in dense
    assert result.fails
    assert not a_result(a_finding(remedy=Supports(strides="contiguous"))).fails


LONG = Declaration(
    name="k",
    problem="paged_attention",
    target="a_folder/with_a_name/" + "and_another" * 6 + ".py:kernel",
    options={"num_splits": tuple(range(60))},
)
SHORT = Declaration(name="short", problem="dense_decode", target="short")


@pytest.mark.parametrize("width", [20, 80, 140])
def test_no_name_is_cut(width: int) -> None:
    """A name in a list would have to be guessed before it can be searched."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_kernels(console, [SHORT, LONG], [], verbose=False)
    assert isinstance(console.file, io.StringIO)
    _, short, long = console.file.getvalue().splitlines()
    assert short.split() == ["short", "dense_decode"]
    assert long.split() == [LONG.target, "paged_attention", "num_splits=" + "|".join(map(str, range(60)))]
    assert short.index("dense_decode") == long.index("paged_attention")
