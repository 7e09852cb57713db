"""Runs on fresh copies of the inputs, and on those that came through the host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.declaration import load_kernels
from attnfuzz.inputs.registry import problem_of
from attnfuzz.memory.arena import Arena
from attnfuzz.oracles.relations.fresh_copy import fresh_copy
from attnfuzz.problems.cases import Case, DenseDecodeCase, MergeStatesCase, PagedDecodeCase, SplitDecodeCase
from attnfuzz.problems.recipes import Pages, Values
from attnfuzz.problems.supports import Supports
from attnfuzz.trials.observation import build_through_host

KERNEL = """
import attnfuzz
import attnfuzz.kernels.eager as eager
import fresh_copy_helper
import fresh_copy_installed


@attnfuzz.kernel("dense_decode")
def k(inputs):
    return fresh_copy_helper, fresh_copy_installed, attnfuzz, eager
"""


@pytest.fixture(autouse=True)
def _imported_by_this_test_alone() -> Iterator[None]:
    yield
    for name in ("fresh_copy_helper", "fresh_copy_installed"):
        sys.modules.pop(name, None)


def test_an_environment_beside_the_kernel_is_not_imported_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would be loaded once more, and the process die: in a repository with .venv in it, as after `make`."""
    site = tmp_path / ".venv" / "lib" / "python3" / "site-packages"
    site.mkdir(parents=True)
    (site / "fresh_copy_installed.py").write_text("")
    (tmp_path / "fresh_copy_helper.py").write_text("")
    (tmp_path / "mine.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(site))
    (kernel,) = load_kernels(f"{tmp_path / 'mine.py'}:k")
    copy = fresh_copy(kernel)
    assert copy is not None
    helper, installed, framework, _ = kernel.function(None)
    helper_of_copy, installed_of_copy, framework_of_copy, _ = copy.function(None)
    assert helper_of_copy is not helper
    assert sys.modules["fresh_copy_helper"] is helper
    assert installed_of_copy is installed
    assert framework_of_copy is framework is attnfuzz


def test_attnfuzz_is_not_imported_twice_from_its_own_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of somebody who tries it in the repository's folder would be judged by another attnfuzz."""
    root = Path(attnfuzz.__file__).resolve().parents[1]
    module = sys.modules["attnfuzz.oracles.relations.fresh_copy"]
    (tmp_path / "fresh_copy_helper.py").write_text("")
    (tmp_path / "fresh_copy_installed.py").write_text("")
    (tmp_path / "mine.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    (kernel,) = load_kernels(f"{tmp_path / 'mine.py'}:k")
    monkeypatch.setattr(sys.modules[kernel.function.__module__], "__file__", str(root / "mine.py"))
    copy = fresh_copy(kernel)
    assert copy is not None
    *_, framework, eager = copy.function(None)
    assert framework is attnfuzz
    assert eager is not kernel.function(None)[-1]
    assert sys.modules["attnfuzz.oracles.relations.fresh_copy"] is module


def test_a_fresh_copy_needs_no_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with a relative path, as torch.ops, would be looked for in a folder that may have been removed."""
    (tmp_path / "fresh_copy_helper.py").write_text("")
    (tmp_path / "fresh_copy_installed.py").write_text("")
    (tmp_path / "mine.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    (kernel,) = load_kernels(f"{tmp_path / 'mine.py'}:k")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert fresh_copy(kernel) is not None


def test_a_copy_is_had_of_a_relative_target_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel remembers could not be told once it has changed the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import attnfuzz\n\n@attnfuzz.kernel('dense_decode')\ndef k(i): ...\n")
    (kernel,) = load_kernels("mine.py:k")
    monkeypatch.chdir("/")
    copy = fresh_copy(kernel)
    assert copy is not None
    assert copy.function is not kernel.function


SHAPE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 16, "scale": 0.25, "seq_lens": (5, 0, 37)}
PAGES = Pages(order="shuffled", spare_blocks=2, extra_columns=1, shared_blocks=1)
PAGED: dict[str, Any] = {**SHAPE, "block_size": 8, "pages": PAGES, "values": Values(keys="normal", values="normal")}
CASES: list[Case] = [
    DenseDecodeCase(**SHAPE, extra_rows=2, strides={"k": "every_other", "q": "offset"}),
    PagedDecodeCase(**PAGED),
    PagedDecodeCase(**PAGED, layout="interleaved", dtype="bfloat16"),
    PagedDecodeCase(**PAGED, layout="packed", strides={"v_cache": "transposed", "block_table": "padded_rows"}),
    SplitDecodeCase(**PAGED, num_splits=4, dtype="float32"),
    MergeStatesCase(num_q_heads=4, head_size=16, num_tokens=9, lse_pairs=(("finite", "-inf"), ("high", "equal"))),
]


def arena() -> Arena:
    return Arena("cpu", poison="nan", prefill="finite")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.problem)
@pytest.mark.parametrize("lse", ["natural", "base2"])
def test_numbers_places_and_strides_are_the_same(case: Case, lse: Any) -> None:
    """A relation would run another case than the one that passed, and blame the kernel."""
    supports = Supports(lse=lse)
    usual = problem_of(case).build(case, arena(), supports)
    sent = build_through_host(case, arena(), supports)
    assert type(sent) is type(usual)
    for field in fields(usual):
        one, other = getattr(usual, field.name), getattr(sent, field.name)
        if not isinstance(one, Tensor):
            assert one == other
            continue
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert torch.equal(one.nan_to_num(nan=12345.0), other.nan_to_num(nan=12345.0)), field.name


def test_tensors_are_changed_before_they_are_sent() -> None:
    """Page ids would be those of pages that lie elsewhere."""
    case = PagedDecodeCase(**PAGED)
    edit = {"block_table": lambda table: table.add_(1000), "no tensor of this case": lambda table: table.zero_()}
    inputs = build_through_host(case, arena(), Supports(), edit=edit)
    usual = problem_of(case).build(case, arena(), Supports())
    assert torch.equal(inputs.block_table, usual.block_table + 1000)
