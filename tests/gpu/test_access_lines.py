"""The lines that touch memory as they must not, of kernels that Triton compiled: from their TTIR, by what they got."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from attnfuzz.judging.runner import Runner
from attnfuzz.oracles.registry import OracleName
from attnfuzz.verdict import Cause, Failure
from tests.processes.test_judging_access_lines import CASE, KERNELS, marked


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(device="cuda") as started:
        yield started


@pytest.mark.parametrize(
    ("mistake", "oracle", "kind", "tensor"),
    [
        ("narrow offsets", "page_relocation", "strides of k", "k"),
        ("row left out", "unwritten", "out", "out"),
        ("past the end", "guard_page", "raised cuda:illegal memory access", "seq_lens"),
    ],
)
def test_the_line_of_an_access_is_told(
    mistake: str, oracle: OracleName, kind: str, tensor: str, runner: Runner
) -> None:
    """A tensor would be named, and none of the lines that touch it."""
    (declaration,) = runner.declarations([str(KERNELS)])
    case = msgspec.structs.replace(CASE, options={"mistake": mistake})
    causes = (Cause(mistake="narrow_offsets"),) if oracle == "page_relocation" else ()
    failure = Failure(oracle=oracle, kind=kind, message="", tensor=tensor, causes=causes)
    found = [one.line for one in runner.access_lines(declaration, case, failure).sources]
    assert set(found) >= set(marked(mistake))
    assert len(found) <= 2


@pytest.mark.parametrize(
    ("mistake", "relations", "tensor"),
    [("row left out", (), "out"), ("past the end", ("guard_page",), "seq_lens")],
)
def test_failures_carry_what_their_lines_are_found_by(
    mistake: str, relations: tuple[OracleName, ...], tensor: str, runner: Runner
) -> None:
    """The lines of another tensor would be told, or none."""
    (declaration,) = runner.declarations([str(KERNELS)])
    case = msgspec.structs.replace(CASE, seq_lens=(5, 3, 2, 4), options={"mistake": mistake})  # four: 16 bytes
    failure = runner.judge(declaration, case, relations=relations).failure
    assert failure is not None
    assert failure.tensor == tensor
    found = [one.line for one in runner.access_lines(declaration, case, failure).sources]
    assert set(found) >= set(marked(mistake))
