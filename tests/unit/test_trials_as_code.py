"""attnfuzz.trials.as_code: lines that make tensors again, lying in memory as they did."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.trials.as_code import UNPACK, definitions


def made_again(folder: Path, tensors: dict[str, Tensor]) -> tuple[dict[str, Any], list[str]]:
    """What the lines make, and the lines."""
    lines = definitions(tensors)
    script = folder / "script.py"
    script.write_text("\n".join(("import base64, zlib, torch", 'DEVICE = "cpu"', *UNPACK, *lines)))
    found = runpy.run_path(str(script))
    for name, tensor in tensors.items():
        assert found[name].stride() == tensor.stride()
        assert torch.equal(found[name], tensor)
    return found, lines


@pytest.mark.parametrize("pages", [1, 3])
@pytest.mark.parametrize("names", [("k_cache", "v_cache"), ("v_cache", "k_cache")])
def test_views_of_one_tensor_are_views_of_one_again(pages: int, names: tuple[str, str], tmp_path: Path) -> None:
    """A kernel that finds V by its distance from K would pass in the script, or read nobody's memory."""
    cache = torch.arange(pages * 2 * 4 * 16, dtype=torch.float32).view(pages, 2, 4, 1, 16) % 251
    parts = {"k_cache": cache[:, 0], "v_cache": cache[:, 1]}
    found, _ = made_again(tmp_path, {name: parts[name] for name in names})
    k, v = found["k_cache"], found["v_cache"]
    assert v.data_ptr() - k.data_ptr() == cache[0, 0].nbytes
    assert k.untyped_storage().nbytes() == cache.nbytes


def test_what_lies_within_another_tensor_is_a_part_of_it_and_others_stand_alone(tmp_path: Path) -> None:
    """A script would have a tensor of all memory that a case was given, or a name that says nothing."""
    memory = torch.arange(512, dtype=torch.float32) % 31
    rows, other = memory[:256].view(16, 16), memory[384:].view(8, 16)
    found, lines = made_again(tmp_path, {"rows": rows, "values": rows[:, :8], "other": other})
    assert found["values"].data_ptr() == found["rows"].data_ptr()
    assert found["other"].untyped_storage().nbytes() == other.nbytes
    assert [line.split(" = ")[0] for line in lines if " = " in line] == ["rows", "values", "other"]
