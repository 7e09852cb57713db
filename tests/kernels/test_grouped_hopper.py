"""Grouped decode of 8-bit caches for Hopper: what it computes, run in torch, that it compiles, when it is launched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.kernels.common.device import GpuLimits
from attnfuzz.kernels.common.prepare import prepare_paged
from attnfuzz.kernels.grouped import launch, launch_hopper
from attnfuzz.kernels.grouped.launch import grouped_decode
from attnfuzz.kernels.grouped.launch_hopper import is_for_hopper
from tests.kernels import gluon_stand_in
from tests.kernels.gluon_stand_in import combined

H200 = GpuLimits(132, 227 << 10, False, True, "NVIDIA H200", (9, 0))
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    """Where the stand-in runs, on a GPU machine too."""
    with torch.device("cpu"):
        yield


def _batch(
    lens: tuple[int, ...], page: int, heads: tuple[int, int], size: int, dtype: torch.dtype, kind: torch.dtype
) -> dict[str, Any]:
    """NaN wherever no token is."""
    random = torch.Generator("cpu").manual_seed(7)
    pages = max(1, -(-max(lens) // page))
    caches = torch.full((2, len(lens) * pages, heads[1], page, size), float("nan"))
    table = torch.randperm(len(lens) * pages, generator=random).view(len(lens), pages).int()
    for row, length in zip(table, lens, strict=True):
        tokens = torch.full((2, heads[1], pages * page, size), float("nan"))
        tokens[:, :, :length] = torch.randn(2, heads[1], length, size, generator=random)
        caches[:, row.long()] = tokens.view(2, heads[1], pages, page, size).transpose(1, 2)
    k, v = caches.to(kind)
    return {
        "q": torch.randn(len(lens), heads[0], size, generator=random).to(dtype), "k_cache": k, "v_cache": v,
        "block_table": table, "seq_lens": torch.tensor(lens, dtype=torch.int32), "scale": 0.3, "block_size": page,
        **{name: torch.rand(heads[1], generator=random) + 0.5 for name in ("k_scale", "v_scale")},
    }  # fmt: skip


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper that the stand-in plays, with as many processors as there are splits in these tests."""

    def launched(kernel: Any, grid: tuple[int, int, int], args: Any, *_: Any) -> None:
        if kernel is launch_hopper._kernel():
            module = "attnfuzz.kernels.grouped.grouped_hopper"
            gluon_stand_in.run(module, "grouped_hopper_kernel", grid[:2], *args, num_warps=2)
            return
        *_, acc, row_max, exp_sum, shares, out, _, _, _, lse, _, _ = args
        for i, (first, count) in enumerate(shares.tolist()):
            if count > 1:
                states = (one[:, first : first + count] for one in (acc, row_max, exp_sum))
                out[i], lse[i] = combined(*states)

    monkeypatch.setattr(launch, "gpu_at", lambda _: H200)
    monkeypatch.setattr(launch_hopper, "launch_again", launched)
    monkeypatch.setattr(launch_hopper, "count_sms", lambda _: 2)


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize(
    ("lens", "page", "heads", "size", "dtype", "kind", "options"),
    [
        ((130, 0, 64), 16, (8, 2), 128, torch.float16, E4M3, {}),
        ((3, 200, 65), 1, (5, 1), 128, torch.bfloat16, E5M2, {"balanced": True}),
        ((500,), 64, (32, 2), 64, torch.float16, E4M3, {"num_splits": 3}),
        ((63, 65), 32, (2, 2), 256, torch.bfloat16, E4M3, {"num_splits": 1}),
        ((300, 1, 1, 0, 70), 4, (16, 1), 128, torch.float16, E4M3, {"balanced": True, "fill": 2}),
    ],
)
@pytest.mark.by_day("lens0*", "lens1*")
def test_what_it_computes(
    lens: tuple[int, ...], page: int, heads: tuple[int, int], size: int, dtype: torch.dtype, kind: torch.dtype,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Tokens would be left out or counted twice, numbers of V exchanged, heads beyond a group get others' states."""
    batch = _batch(lens, page, heads, size, dtype, kind)
    scales = [batch[name].double() for name in ("k_scale", "v_scale")]
    out, lse = grouped_decode(**batch, layout="HND", **options)
    for i, length in enumerate(lens):
        k, v = (
            batch[name][batch["block_table"][i].long()].transpose(0, 1).flatten(1, 2)[:, :length].double()
            * factor[:, None, None]
            for name, factor in zip(("k_cache", "v_cache"), scales, strict=True)
        )
        q = batch["q"][i].double().view(heads[1], -1, size)
        scores = q @ k.mT * batch["scale"]
        expected = (scores.softmax(2) @ v).flatten(0, 1)
        tolerance = 2.0**-9 if dtype == torch.float16 else 2.0**-6
        torch.testing.assert_close(out[i].double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse[i].double(), scores.logsumexp(2).flatten(), rtol=1e-5, atol=1e-5)


def test_what_it_is_launched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without these instructions would refuse it, rows that are not in pieces of 16 bytes be read astray."""

    def taken(gpu: GpuLimits | None = H200, layout: str = "HND", **other: Any) -> bool:
        batch = _batch((20, 3), 16, (8, 2), 128, torch.float16, E4M3) | other
        variants: Any = {name: batch.pop(name) for name in (*_VARIANTS, "k_scale", "v_scale") if name in batch}
        q, k, v, table, lens = (batch[name] for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens"))
        call = prepare_paged(q, k, v, table, lens, batch["block_size"], layout, None, None, variants)
        return is_for_hopper(gpu, q, k, v, table, lens, call, batch.get("num_splits"), None)

    plain = _batch((20, 3), 16, (8, 2), 128, torch.float16, E4M3)
    assert taken()
    assert not taken(None)
    assert not taken(H200._replace(capability=(10, 0)))
    for other in (
        {"window": 7},
        {"soft_cap": 3.0},
        {"sinks": torch.zeros(8)},
        {"num_splits": 1 << 30},
        {"q": plain["q"].float()},
        {"block_table": plain["block_table"].long()},
        {"block_table": plain["block_table"].repeat(1, 2)[:, ::2]},
        {name: _apart(plain[name]) for name in ("k_cache", "v_cache")},
        _batch((20, 3), 12, (8, 2), 128, torch.float16, E4M3),
        _batch((20, 3), 16, (8, 2), 96, torch.float16, E4M3),
        _batch((20, 3), 16, (34, 2), 128, torch.float16, E4M3),
    ):
        assert not taken(**other), other.keys()
    monkeypatch.setattr(launch_hopper, "_kernel", lambda: None)
    assert not taken(), "without Gluon"


_VARIANTS = ("window", "soft_cap", "sinks")


def _apart(cache: Tensor) -> Tensor:
    """The same with 8 bytes after each row."""
    return torch.cat((cache.view(torch.uint8), cache.view(torch.uint8)[..., :8]), -1).view(cache.dtype)[..., :-8]


_COMPILE = """
import attnfuzz.kernels.grouped.launch as launch
import attnfuzz.kernels.grouped.launch_hopper as hopper
import torch
from tests.kernels.test_grouped_hopper import H200, _batch
from tests.quality.compiled import Call, Compiler

compiler = Compiler("sm_90")
launch.gpu_at, hopper.count_sms = lambda _: H200, lambda _: 132
hopper.on_device_of = lambda _: __import__("contextlib").nullcontext()
hopper.launch_again = lambda kernel, grid, args, named, options: kernel[grid](*args, **named, **options)
for dtype in (torch.float16, torch.bfloat16):
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        for size, heads in ((64, (8, 1)), (128, (8, 1)), (128, (16, 1)), (256, (4, 4))):
            for balanced in (False, True):
                batch = _batch((20, 3), 16, heads, size, dtype, kind)
                ready = lambda: launch.grouped_decode(**batch, layout="HND", balanced=balanced, num_splits=4)
                for one in compiler.of(Call("paged_grouped_auto", "", size, ready)):
                    print(one.kernel, one.shared)
"""


@pytest.mark.night
def test_it_compiles(tmp_path: Path) -> None:
    """On the first Hopper each call would end with a compiler's message, or want more shared memory than there is."""
    launched = gluon_stand_in.compiled(_COMPILE, tmp_path)
    shared = [shared for kernel, shared in launched if kernel == "grouped_hopper_kernel"]
    assert len(shared) == 32
    assert max(shared) < H200.shared_bytes / 3, "fewer programs run at a time"
