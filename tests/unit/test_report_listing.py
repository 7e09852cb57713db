"""attnfuzz.report.declarations: names that can be copied."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from attnfuzz.declaration import Declaration
from attnfuzz.report.declarations import print_kernels

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
    print_kernels(console, [SHORT, LONG], verbose=False)
    assert isinstance(console.file, io.StringIO)
    _, short, long = console.file.getvalue().splitlines()
    assert short.split() == ["short", "dense_decode"]
    assert long.split() == [LONG.target, "paged_attention", "num_splits=" + "|".join(map(str, range(60)))]
    assert short.index("dense_decode") == long.index("paged_attention")
