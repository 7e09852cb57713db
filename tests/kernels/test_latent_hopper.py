"""The kernel for Hopper: what it computes, run in torch, that it compiles, and what is launched."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnfuzz.kernels.common.device import GpuLimits
from attnfuzz.kernels.latent import launch_hopper
from attnfuzz.kernels.latent.launch_hopper import is_for_hopper
from tests.kernels import gluon_stand_in
from tests.kernels.gluon_stand_in import combined

SCALE = 576**-0.5
SIZES = {"num_seqs": 2, "head_size": 576, "v_head_size": 512}
H200 = GpuLimits(132, 227 << 10, False, True, "NVIDIA H200", (9, 0))


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    """Where the stand-in runs, on a GPU machine too."""
    with torch.device("cpu"):
        yield


@pytest.mark.parametrize(
    ("lens", "block_size", "num_heads", "heads", "num_splits"),
    [
        ((130, 0, 64), 64, 70, 64, 3),
        ((1, 200), 16, 16, 16, 2),
        ((500,), 24, 20, 32, 3),
        ((63, 65), 128, 5, 16, 1),
        ((100,), 64, 64, 64, 9),
    ],
)
@pytest.mark.by_day("lens0*", "lens1*")
def test_what_it_computes(lens: tuple[int, ...], block_size: int, num_heads: int, heads: int, num_splits: int) -> None:
    """Tiles would be left out or counted twice, heads beyond a block get others' states, dead rows be multiplied."""
    num_seqs, pages = len(lens), -(-max(lens) // block_size)
    random = torch.Generator("cpu").manual_seed(7)
    q = torch.randn(num_seqs, num_heads, 576, generator=random).half()
    cache = torch.randn(num_seqs * pages, block_size, 576, generator=random).half()
    table = torch.randperm(num_seqs * pages, generator=random).view(num_seqs, pages)
    for row, length in zip(table, lens, strict=True):
        tokens = cache[row].flatten(0, 1)
        tokens[length:] = float("nan")
        cache[row] = tokens.view(pages, block_size, 576)
    out = torch.full((num_seqs, num_heads, 512), float("nan")).half()
    lse, states = torch.full((num_seqs, num_heads), float("nan")), num_seqs + num_splits
    acc = torch.full((num_heads, states, 512), float("nan"))
    row_max, exp_sum = (torch.full((num_heads, states), float("nan")) for _ in range(2))
    shares = torch.zeros(num_seqs, 2, dtype=torch.int32)
    gluon_stand_in.run(
        "attnfuzz.kernels.latent.latent_hopper", "latent_hopper_kernel", (-(-num_heads // heads), num_splits),
        q, *q.stride()[:2], cache, *cache.stride()[:2], table, pages, torch.tensor(lens),
        out, *out.stride()[:2], lse, *lse.stride(), acc, row_max, exp_sum, shares,
        SCALE * math.log2(math.e), num_seqs, num_splits, num_heads, block_size,
        HEADS=heads, SWAP=heads < 64, WHOLE_TILES=block_size % 64 == 0, BLOCK_S=64, num_warps=8,
    )  # fmt: skip
    for i, length in enumerate(lens):
        keys = cache[table[i]].flatten(0, 1)[:length].double()
        scores = q[i].double() @ keys.T * SCALE
        first, count = shares[i].tolist()
        got = (out[i], lse[i])
        if count > 1:
            got = combined(*(one[:, first : first + count] for one in (acc, row_max, exp_sum)))
        torch.testing.assert_close(got[0].double(), scores.softmax(1) @ keys[:, :512], rtol=2.0**-9, atol=2.0**-10)
        torch.testing.assert_close(got[1].double(), scores.logsumexp(1), rtol=2e-6, atol=2e-6)


def _tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    q, cache = torch.empty(2, 16, 576, dtype=dtype), torch.empty(4, 64, 576, dtype=dtype)
    table, lens = torch.zeros(2, 40, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    return {"q": q, "kv_cache": cache, "block_table": table, "seq_lens": lens, "out": torch.empty(2, 16, 512)}


def test_what_it_is_launched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without warp groups would refuse it, and rows that are not in pieces of 16 bytes be read astray."""
    assert is_for_hopper(H200, _tensors(), SIZES)
    assert not is_for_hopper(None, _tensors(), SIZES)
    assert not is_for_hopper(H200._replace(capability=(10, 0)), _tensors(), SIZES)
    assert not is_for_hopper(H200, _tensors(), SIZES | {"v_head_size": 448})
    assert not is_for_hopper(H200, _tensors(), SIZES | {"num_seqs": 0})
    for name, other in {
        "q": torch.empty(2, 16, 580, dtype=torch.bfloat16)[..., :576],
        "kv_cache": torch.empty(4, 64, 1152, dtype=torch.bfloat16)[..., ::2],
        "block_table": torch.zeros(2, 80, dtype=torch.int32)[:, ::2],
        "out": torch.empty(2, 512, 16).transpose(1, 2),
    }.items():
        assert not is_for_hopper(H200, _tensors() | {name: other}, SIZES), name
    many = {"q": torch.empty(2, 33, 576, dtype=torch.bfloat16)}
    for few in (
        {"block_table": torch.zeros(2, 32, dtype=torch.int32)},
        {
            "kv_cache": torch.empty(4, 8, 576, dtype=torch.bfloat16),
            "block_table": torch.zeros(2, 400, dtype=torch.int32),
        },
    ):
        assert not is_for_hopper(H200, _tensors() | few, SIZES)
        assert is_for_hopper(H200, _tensors() | few | many, SIZES)
    shifted = torch.empty(2 * 16 * 576 + 1, dtype=torch.bfloat16)[1:].view(2, 16, 576)
    assert not is_for_hopper(H200, _tensors() | {"q": shifted}, SIZES)
    monkeypatch.setattr(launch_hopper, "_kernel", lambda: None)
    assert not is_for_hopper(H200, _tensors(), SIZES), "without Gluon"


_COMPILE = """
import attnfuzz.kernels.latent.launch_hopper as launch
import torch
from tests.quality.compiled import Call, Compiler

compiler = Compiler("sm_90")
launch.is_for_hopper.__globals__["on_device_of"] = lambda _: __import__("contextlib").nullcontext()
for heads, pages in ((16, 80), (32, 80), (128, 400)):
    for block_size in (64, 16):
        tensors = {
            "q": torch.empty(2, heads, 576, dtype=torch.bfloat16),
            "kv_cache": torch.empty(4, block_size, 576, dtype=torch.bfloat16),
            "block_table": torch.zeros(2, pages, dtype=torch.int32),
            "seq_lens": torch.zeros(2, dtype=torch.int32),
            "out": torch.empty(2, heads, 512, dtype=torch.bfloat16),
            "lse": torch.empty(2, heads),
        }
        sizes = {"num_seqs": 2, "num_q_heads": heads, "block_size": block_size}
        call = Call("latent_grouped_auto", "", 576, lambda: launch.launch_on_hopper(tensors, sizes, 0.1, 132))
        for one in compiler.of(call):
            print(one.kernel, one.shared)
"""


@pytest.mark.night
def test_it_compiles(tmp_path: Path) -> None:
    """On the first Hopper each call would end with a compiler's message, or want more shared memory than there is."""
    own = {"TRITON_INTERPRET": "0", "TRITON_DUMP_PTXAS_LOG": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _COMPILE]
    run = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    launched = [line.split() for line in run.stdout.splitlines()]
    assert sorted({kernel for kernel, _ in launched}) == ["combine_partials_kernel", "latent_hopper_kernel"]
    assert max(int(shared) for _, shared in launched) <= 227 << 10
