"""Decode over lists of slots: splits of a list, what a list may hold, caches of 8 bits, and what the wrapper plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.families.formats import latent_row_size, latent_rows, parts_of_latents
from attnfuzz.kernels.common.device import GpuLimits
from attnfuzz.kernels.latent import launch
from attnfuzz.kernels.latent.launch import sparse_decode

HOPPER = GpuLimits(132, 227 << 10, False, True, "NVIDIA H200", (9, 0))
INT_MAX = 2**31 - 1
ROPE, SLOTS = 24, 90
RANK = 40


def lists(lengths: Sequence[int], topk: int) -> Tensor:
    """Slots but the last three, in any order; a slot twice; sentinels of all kinds between them and at the end."""
    random = torch.Generator("cpu").manual_seed(3)
    found = torch.full((len(lengths), topk), -1, dtype=torch.int32, device="cpu")
    for row, length in zip(found, lengths, strict=True):
        row[:length] = torch.randint(SLOTS - 3, (length,), generator=random, device="cpu").int()
        row[2:length:7], row[4:length:7] = SLOTS, INT_MAX
        row[length:] = SLOTS - 1  # not to be read where there are lengths
    return found.to(torch.get_default_device())


def check(
    lengths: Sequence[int],
    *,
    heads: int = 3,
    topk: int = 70,
    rank: int = RANK,
    packed: bool = False,
    lse: bool = True,
    **options: Any,
) -> None:
    """Compare with the definition in float64. Weights are rounded to float16 before they multiply the rows."""
    random = torch.Generator("cpu").manual_seed(7)
    q, keys = (
        torch.randn(size, generator=random, device="cpu").to(torch.get_default_device()).half()
        for size in ((len(lengths), heads, rank + ROPE), (SLOTS, 1, rank + ROPE))
    )
    keys[-3:] = math.nan
    latents, ropes, scales, rows = keys[..., :rank], keys[..., rank:], None, keys.double()
    if packed:
        bytes_of_rows = torch.full((SLOTS, 1, latent_row_size(rank, ROPE)), 255, dtype=torch.uint8)
        latents, scales, ropes = parts_of_latents(bytes_of_rows, rank, q.dtype)
        places = torch.arange(SLOTS)[:, None, None] + 3 * torch.arange(scales.shape[-1])
        scales.copy_(torch.exp2(places % 5 - 2.0))
        for part, numbers in ((latents, keys[..., :rank]), (ropes, keys[..., rank:])):
            part[:-3] = numbers[:-3].to(part.dtype)
        rows = latent_rows(latents, scales, ropes)
    indices = lists(lengths, topk)
    counted = torch.tensor(lengths, dtype=torch.int32)
    out, found = torch.full((len(lengths), heads, rank), math.nan).half(), torch.full((len(lengths), heads), math.nan)
    sparse_decode(
        q, latents, ropes, indices, 0.1, out, found if lse else None, scales=scales, topk_length=counted, **options
    )
    for i, length in enumerate(lengths):
        row = indices[i, :length].long()
        of_row = rows[row[(row >= 0) & (row < SLOTS)], 0].double()
        scores = q[i].double() @ of_row.T * 0.1
        expected = scores.softmax(1) @ of_row[:, :rank], scores.logsumexp(1)
        torch.testing.assert_close(out[i].double(), expected[0], rtol=2.0**-9, atol=2.0**-10)
        if lse:
            torch.testing.assert_close(found[i].double(), expected[1], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 40])
@pytest.mark.by_day("2", "40")
def test_splits_take_tiles_by_turns(num_splits: int) -> None:
    """A tile would be left out or counted twice; splits without one would be combined; a sentinel be read."""
    check([0, 70, 16, 17, 1], num_splits=num_splits, tile=16)


@pytest.mark.parametrize(("rank", "num_splits"), [(RANK, 1), (384, 3)])
def test_rows_of_8_bits_have_scales_of_their_own(rank: int, num_splits: int) -> None:
    """Numbers would be multiplied with another row's scale or part's, or scales of dead rows make NaN of a sum."""
    check([70, 5, 0], rank=rank, packed=True, num_splits=num_splits, tile=16)


def test_heads_of_several_programs() -> None:
    """Heads beyond the first block would be left out, or get the states of another one's."""
    check([33, 70], heads=35, num_splits=2, tile=16, block_m=16)


def test_without_lengths_all_places_count() -> None:
    """Splits would be counted by lengths that are not there, or their states not be combined."""
    topk = 50
    q, rows = torch.ones(2, 1, RANK + ROPE).half(), torch.ones(SLOTS, 1, RANK + ROPE).half()
    rows[:topk, 0, 0] = torch.arange(topk).half()
    rows[:, 0, 1:RANK] = 1
    indices, out, lse = torch.arange(topk).expand(2, topk).contiguous(), torch.empty(2, 1, RANK).half(), None
    sparse_decode(q, rows[..., :RANK], rows[..., RANK:], indices, 0.0, out, lse, num_splits=3, tile=16)
    assert (out[..., 0] == (topk - 1) / 2).all()
    assert (out[..., 1:] == 1).all()


def test_as_the_wrapper_plans_it() -> None:
    """What is chosen for a batch could be what cannot be launched; no log-sum-exp need be asked for."""
    check([300], topk=300, lse=False)
    check([0, 3, 500], topk=500)
    check([], topk=16)


@pytest.mark.parametrize("given", [{}, {"num_splits": 3}, {"scales": True}, {"apart": True}, {"rank": 64}])
def test_what_goes_to_the_kernel_for_hopper(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Options would be passed over, or 8 bits, other ranks and rotary parts of other tensors be read as if they lay
    behind latent vectors of 512 numbers."""
    launched: list[str] = []
    monkeypatch.setattr(launch, "gpu_at", lambda _: HOPPER)
    monkeypatch.setattr(launch, "launch_on_hopper", lambda *_: launched.append("gluon"))
    for name in ("sparse_decode_kernel", "combine_partials_kernel"):
        monkeypatch.setattr(launch, name, _Launches(launched))
    rank = given.get("rank", 512)
    cache = torch.empty(8, 1, rank + 64, dtype=torch.bfloat16)
    latents, ropes = cache[..., :rank], cache[..., rank:]
    options: dict[str, Any] = {"num_splits": given["num_splits"]} if "num_splits" in given else {}
    if "scales" in given:
        latents, options = latents.to(torch.float8_e4m3fn), {"scales": torch.empty(8, 1, 4)}
    ropes = ropes.clone() if "apart" in given else ropes
    out = torch.empty(64, 128, rank, dtype=torch.bfloat16)
    indices = torch.zeros(64, 2048, dtype=torch.int32)
    sparse_decode(torch.empty(64, 128, rank + 64, dtype=torch.bfloat16), latents, ropes, indices, 0.1, out, **options)
    assert ("gluon" in launched) == (not given)


class _Launches:
    def __init__(self, launched: list[str]) -> None:
        self.launched = launched

    def __getitem__(self, grid: object) -> Any:
        return lambda *_, **__: self.launched.append("triton")
