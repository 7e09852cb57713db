"""Calls of a running program as saved cases: attnfuzz.capture."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import attnfuzz
from attnfuzz.corpus import load_regression
from attnfuzz.problems.block_table import block_table_rows, num_blocks
from attnfuzz.problems.shapes import strides_of, tensor_specs

PAGE = (Path(__file__).parents[2] / "docs" / "capture.md").read_text(encoding="utf-8")
(SERVER,) = re.findall(r"```python\n(# server.py\n.*?)```", PAGE, re.DOTALL)
((WRONG, RIGHT),) = re.findall(r"```diff\n((?:-.*\n)+)((?:\+.*\n)+)```", PAGE)


def server(folder: Path, name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The server of the page, imported."""
    file = folder / f"{name}.py"
    file.write_text(source, encoding="utf-8")
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def recorded(module: ModuleType, folder: Path) -> list[Path]:
    with attnfuzz.capture(module, "attend", problem="paged_decode", kernel="server.py:decode", folder=folder) as files:
        module.serve([(5, 2), (6, 4), (5, 3)])
    return files


def test_a_scheduler_that_is_wrong_in_a_server_is_wrong_in_its_saved_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails under load could not be had outside of the server, or would stay red once it is repaired."""
    wrong = server(tmp_path, "wrong_server", SERVER, monkeypatch)
    files = recorded(wrong, tmp_path)
    assert len(files) == 5
    third = load_regression(files[2])
    assert (len(third.preceding), third.status) == (2, "fixed")
    with pytest.raises(attnfuzz.KernelFailure):
        attnfuzz.check(wrong.decode, files[2], device="cpu", isolated=False)
    removed, added = (re.sub(r"^[-+]", "", part, flags=re.MULTILINE) for part in (WRONG, RIGHT))
    assert removed in SERVER
    repaired = server(tmp_path, "right_server", SERVER.replace(removed, added), monkeypatch)
    for file in files:
        attnfuzz.check(repaired.decode, file, device="cpu", isolated=False)


def call(**changes: Any) -> dict[str, Any]:
    """A call of two sequences on a cache of 9 pages."""
    fused = torch.randn(3, 6, 16)
    return {
        "q": fused[:, :2],
        "k_cache": torch.randn(9, 4, 2, 16) * 8,
        "v_cache": torch.randn(9, 4, 2, 16),
        "block_table": torch.tensor([[7, 2, 0], [7, 3, 5]], dtype=torch.int32),
        "seq_lens": torch.tensor([6, 11], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 2, 3], dtype=torch.int32),
        "scale": 0.5,
        "window": 4,
    } | changes


def case_of(folder: Path, **changes: Any) -> tuple[Any, str]:
    engine = SimpleNamespace(run=lambda **given: None)
    problem: Any = "paged_attention"
    with attnfuzz.capture(engine, "run", problem=problem, kernel="some.module:kernel", folder=folder,
                          inputs=lambda **given: given) as files:  # fmt: skip
        engine.run(**call(**changes))
    regression = load_regression(files[0])
    return regression.case, regression.note


def test_what_is_recorded_is_what_was_called(tmp_path: Path) -> None:
    """A case would have other pages, lengths or strides than the call that failed."""
    case, note = case_of(tmp_path)
    assert block_table_rows(case) == ((7, 2, 0), (7, 3, 5))
    assert num_blocks(case) == 9
    assert (case.seq_lens, case.query_lens, case.scale, case.variant.window) == ((6, 11), (2, 1), 0.5, 4)
    assert strides_of(case, "q") == "outer_gap"
    assert tensor_specs(case)["k_cache"].shape == (9, 4, 2, 16)
    assert case.values.logit_exponent in (2, 3)  # keys are eight times as large as drawn ones
    assert note == "recorded from a running program, call 1"


def test_pages_that_two_sequences_have_are_told(tmp_path: Path) -> None:
    """A table that no case can have would be replaced by another one without a word."""
    case, note = case_of(tmp_path, block_table=torch.tensor([[7, 2, 0], [1, 2, 5]], dtype=torch.int32))
    assert note.endswith("1 pages were in several places of the table, and are not here")
    assert len({page for row in block_table_rows(case) for page in row[: 2 + (row[0] == 1)]}) == 5


def test_pages_of_a_large_cache_are_numbered_as_they_are_met(tmp_path: Path) -> None:
    """A case of a server's cache would need all of its memory."""
    case, _ = case_of(
        tmp_path,
        k_cache=torch.zeros(1, 1, 1, 1).expand(9000, 4, 2, 16),
        v_cache=torch.zeros(1, 1, 1, 1).expand(9000, 4, 2, 16),
        block_table=torch.tensor([[8000, 70, 0], [8000, 8001, 3]], dtype=torch.int32),
    )
    assert block_table_rows(case) == ((0, 1, 0), (0, 2, 3))


def test_a_call_that_no_case_describes_is_made_all_the_same(tmp_path: Path) -> None:
    """A server would end because its calls are recorded."""
    called = []
    engine = SimpleNamespace(run=lambda **given: called.append(given))
    with (
        attnfuzz.capture(engine, "run", problem="paged_attention", kernel="some.module:kernel", folder=tmp_path,
                         inputs=lambda **given: given) as files,
        pytest.warns(UserWarning, match="a call of run was not recorded: .*scale=99.0 must be"),
    ):  # fmt: skip
        engine.run(**call(scale=99.0))
    assert (len(called), files) == (1, [])
    engine.run()
    assert len(called) == 2
