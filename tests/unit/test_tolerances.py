"""What fixed tolerances let through: attnfuzz tolerances."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnfuzz.testing.tolerances import DESIGNS, Design, Setting, Suite, weigh
from tests.unit.in_process import attnfuzz

PAGE = (Path(__file__).parents[2] / "docs" / "tolerances.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("design", DESIGNS)
def test_the_derived_bound_takes_right_kernels_and_no_zeros(design: Design, dtype: str) -> None:
    """The page would accuse kernels that round as their design does, or call a bound good that takes anything."""
    told = weigh(Setting(seq_len=70, head_size=64, dtype=dtype, design=design, draws=8), ())
    (bound,) = told.weighed
    assert (bound.name, bound.right_fails, bound.passes["zeros"]) == ("derived bound", 0, 0)
    assert told.error < told.bound * 10


def test_a_tolerance_is_told_for_what_it_takes_and_what_it_fails() -> None:
    """A tolerance that takes everything, or nothing, would look like any other."""
    _, loose, tight = weigh(Setting(seq_len=70, draws=4), (Suite("loose", 10.0), Suite("tight", 0.0, 1e-9))).weighed
    assert (loose.right_fails, set(loose.passes.values())) == (0, {4})
    assert (tight.right_fails, set(tight.passes.values())) == (4, {0})


def test_the_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    """The tables of the page would be those of another program."""
    printed = attnfuzz("tolerances", "--seq-len", "512", cwd=tmp_path)
    assert printed.returncode == 0
    told, _, table = printed.stdout.strip().partition("\n\n")
    assert f"`attnfuzz tolerances --seq-len 512`: {told}.\n\n{table}\n" in PAGE


@pytest.mark.parametrize("given", [("--tolerance", "1e-3"), ("--heads", "3")])
def test_what_cannot_be_weighed_is_refused_in_a_sentence(given: tuple[str, str], tmp_path: Path) -> None:
    """A typing error would end in a traceback."""
    refused = attnfuzz("tolerances", *given, cwd=tmp_path)
    assert refused.returncode == 2
    assert "must be" in refused.stderr
