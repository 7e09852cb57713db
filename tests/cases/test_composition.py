"""attnfuzz.composition: one kernel's states merged by another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import attnfuzz
from attnfuzz.declaration import KernelLoadError, load_kernels, parts_of
from attnfuzz.problems.cases import case_from_builtins
from attnfuzz.testing.kernel_failure import KernelFailure

KERNELS = """
import math
import torch
import attnfuzz

F32 = {"dtypes": ("float32",)}


def attend(i, unit, *, empty):
    group = i.q.shape[1] // i.k.shape[2]
    for s, length in enumerate(i.seq_lens.tolist()):
        if not length and not empty:
            raise ValueError("no keys")
        k, v = (part[s, :length].repeat_interleave(group, 1).double() for part in (i.k, i.v))
        scores = torch.einsum("hd,nhd->hn", i.q[s].double(), k) * i.scale
        i.out[s] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
        i.lse[s] = scores.logsumexp(-1) * unit
    return i.out, i.lse


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**F32, lse="base2"))
def base2(i):
    return attend(i, 1 / math.log(2), empty=True)


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**F32, empty_sequences=False))
def needs_keys(i):
    return attend(i, 1, empty=False)


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(**F32, lse="none"))
def silent(i):
    return attend(i, 1, empty=True)[0]


def merged(i, unit):
    a, b = i.prefix_lse * unit, i.suffix_lse * unit
    lse = torch.logaddexp(a, b)
    shift = lse.nan_to_num(neginf=0)
    i.output.copy_((a - shift).exp()[..., None] * i.prefix_output + (b - shift).exp()[..., None] * i.suffix_output)
    i.output_lse.copy_(lse / unit)


@attnfuzz.kernel("merge_states", supports=attnfuzz.Supports(**F32, lse_layout="TH", empty_state_lse=("-inf",)))
def merge(i):
    merged(i, 1)


@attnfuzz.kernel("merge_states", supports=attnfuzz.Supports(**F32, lse_layout="TH", empty_state_lse=("-inf",)))
def merge_in_base2(i):
    merged(i, math.log(2))
"""
SHAPE = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 16, "scale": 0.25, "dtype": "float32"}


def case(*seq_lens: int) -> Any:
    fields = {**SHAPE, "seq_lens": list(seq_lens), "values": {"keys": "normal", "values": "normal", "seed": 3}}
    return case_from_builtins("dense_decode", fields)


@pytest.fixture
def kernels(tmp_path: Path) -> str:
    (tmp_path / "kernels.py").write_text(KERNELS, encoding="utf-8")
    return f"{tmp_path}/kernels.py"


@pytest.mark.parametrize("name", ["base2", "needs_keys"])
def test_states_are_merged_as_both_declare_them(name: str, kernels: str) -> None:
    """Kernels of two projects would be accused for the base of a logarithm, or an empty part that nobody hands them."""
    for lens in ((9, 4), (1, 12), (7, 7, 3), (2, 0, 5) if name == "base2" else (1, 1)):
        attnfuzz.check(f"{kernels}:{name}+{kernels}:merge", case(*lens))


def test_bundled_kernels_go_together() -> None:
    """On pages, with the LSE on other axes, a part without tokens or the results of the merge would be misplaced."""
    for target in ("paged_eager+merge_states_eager", "dense_eager+merge_states_triton_th"):
        (kernel,) = load_kernels(target)
        fields = {**SHAPE, "dtype": "float16", "seq_lens": [5, 40, 17]}
        problem = kernel.declaration.problem
        made = case_from_builtins(problem, fields | ({"block_size": 8} if problem == "paged_decode" else {}))
        attnfuzz.check(target, made)


@pytest.mark.night
def test_what_is_wrong_between_two_right_kernels_is_found(kernels: str, tmp_path: Path) -> None:
    """A merge that takes logarithms to base 2 for natural ones spoils results that are right on either side."""
    target = f"{kernels}:needs_keys+{kernels}:merge_in_base2"
    with pytest.raises(KernelFailure):
        attnfuzz.check(target, case(9, 4))
    command = [str(Path(sys.executable).with_name("attnfuzz"))]
    names = "kernels.py:needs_keys+kernels.py:merge_in_base2"
    search = ["explore", "--compose", names, "--budget", "60s", "--fail-fast", "--workers", "1", "--device", "cpu"]
    run = subprocess.run([*command, *search], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    saved, *_ = (tmp_path / "regressions").glob("dense_decode-needs_keys_merge_in_base2-*.json")
    again = ["replay", f"regressions/{saved.name}"]
    run = subprocess.run([*command, *again], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    assert f"FAIL  regressions/{saved.name}  {names}" in run.stdout


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ("silent", "merge", "silent returns no log-sum-exp"),
        ("merge", "merge", "computes merge_states"),
        ("base2", "base2", "goes with one of merge_states"),
        ("*", "merge", "names 5 kernels"),
    ],
)
def test_what_does_not_go_together_is_refused(first: str, second: str, why: str, kernels: str) -> None:
    """A campaign would begin with a kernel that nobody meant."""
    with pytest.raises(KernelLoadError, match=why):
        load_kernels(f"{kernels}:{first}+{kernels}:{second}")


def test_a_file_may_have_a_plus_in_its_name(tmp_path: Path) -> None:
    """A kernel that is there would be taken for two that are not."""
    (tmp_path / "a+b.py").write_text(KERNELS, encoding="utf-8")
    assert parts_of(f"{tmp_path}/a+b.py") is None
    assert parts_of(f"{tmp_path}/a+b.py:merge") is None
    assert parts_of("vllm:decode_attention+sglang:merge_state") == ("vllm:decode_attention", "sglang:merge_state")
