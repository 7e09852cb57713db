"""The prompts' kernel for Hopper: what it computes, run in torch, that it compiles, and what is launched."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.kernels.common.device import GpuLimits
from attnfuzz.kernels.common.prepare import prepare_paged
from attnfuzz.kernels.q_block import launch, launch_hopper
from attnfuzz.kernels.q_block.launch_hopper import is_for_hopper
from tests.kernels import gluon_stand_in

H200 = GpuLimits(132, 227 << 10, False, True, "NVIDIA H200", (9, 0))


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    """Where the stand-in runs, on a GPU machine too."""
    with torch.device("cpu"):
        yield


def _attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Of a sequence and KV head: ``q [tokens, heads, head_size]``, ``keys`` and ``values`` ``[tokens, head_size]``."""
    n, length = len(q), len(keys)
    scores = q.double() @ keys.double().T * scale
    limits = length - n + torch.arange(n) + 1
    scores = scores.masked_fill(torch.arange(length) >= limits[:, None, None], -torch.inf)
    return scores.softmax(2).nan_to_num(0) @ values.double(), scores.logsumexp(2)


@pytest.mark.parametrize(
    ("lens", "queries", "block_size", "group", "head_size", "tile", "stages", "programs", "by_tma"),
    [
        ((70, 40, 0, 300), (70, 1, 0, 60), 16, 4, 64, 64, 2, 3, True),
        ((70, 40, 0, 300), (70, 1, 0, 60), 16, 4, 64, 64, 2, 3, False),
        ((130, 5), (100, 9), 24, 3, 128, 128, 2, 1, False),
        ((64, 129), (64, 129), 16, 1, 64, 64, 3, 5, True),
        ((20, 90), (20, 40), 128, 7, 64, 64, 2, 2, True),
        ((20, 90), (20, 40), 128, 7, 64, 64, 2, 2, False),
        ((290, 9), (40, 9), 32, 4, 128, 128, 2, 2, True),
    ],
)
def test_what_it_computes(
    lens: tuple[int, ...], queries: tuple[int, ...], block_size: int, group: int, head_size: int, tile: int,
    stages: int, programs: int, by_tma: bool,
) -> None:  # fmt: skip
    """Tiles would be left out or counted twice, rows get others' tokens, dead tokens be multiplied, groups wait."""
    num_seqs, pages, kv_heads = len(lens), max(1, -(-max(lens) // block_size)), 2
    random = torch.Generator("cpu").manual_seed(7)
    num_tokens = sum(queries) + 2
    q = torch.randn(num_tokens, kv_heads * group, head_size, generator=random).half()
    k, v = (torch.randn(num_seqs * pages, block_size, kv_heads, head_size, generator=random).half() for _ in range(2))
    table = torch.randperm(num_seqs * pages, generator=random).view(num_seqs, pages)
    for row, length in zip(table, lens, strict=True):
        for cache in (k, v):
            tokens = cache[row].flatten(0, 1)
            tokens[length:] = float("nan")
            cache[row] = tokens.view(pages, block_size, kv_heads, head_size)
    starts = torch.tensor([0, *queries]).cumsum(0)
    out = torch.full((num_tokens, kv_heads * group, head_size), 7.0).half()
    lse = torch.full((num_tokens, kv_heads * group), 7.0)
    scale = head_size**-0.5
    d_k, d_v = (gluon_stand_in.Descriptor(one.flatten(0, 1).flatten(1)) for one in (k, v))
    gluon_stand_in.run(
        "attnfuzz.kernels.q_block.q_block_hopper", "q_block_hopper_kernel", (programs,),
        q, *q.stride()[:2], k, *k.stride()[:3], v, *v.stride()[:3], table, pages, torch.tensor(lens), starts,
        out, *out.stride()[:2], lse, *lse.stride(), scale * math.log2(math.e), num_seqs, kv_heads, block_size,
        1,
        GROUP=group, HEAD_SIZE=head_size, TILE=tile, STAGES=stages, CONSUMERS=2,
        PAGE=0 if block_size & (block_size - 1) or block_size < 16 else min(block_size, tile),
        BLOCK_SIZE=0 if block_size & (block_size - 1) else block_size,
        BLOCK_S=32, SAME_STRIDES=True, PINGPONG=1, REGISTERS=0, REGISTERS_P=0, BY_TMA=by_tma,
        d_k=d_k, d_v=d_v, rows_b=block_size, rows_h=0, columns_h=head_size,
    )  # fmt: skip
    for i, length in enumerate(lens):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        keys, values = (cache[table[i]].flatten(0, 1)[:length] for cache in (k, v))
        for head in range(kv_heads):
            heads = slice(head * group, (head + 1) * group)
            wanted = _attention(q[rows, heads], keys[:, head], values[:, head], scale)
            torch.testing.assert_close(out[rows, heads].double(), wanted[0], rtol=2.0**-9, atol=2.0**-10)
            torch.testing.assert_close(lse[rows, heads].double(), wanted[1], rtol=2e-6, atol=2e-6)
    assert (out[sum(queries) :] == 7).all()
    assert (lse[sum(queries) :] == 7).all()


def _batch(**other: Any) -> dict[str, Any]:
    """Arguments of ``q_block_attention``: a prompt of 600 tokens, and a decode."""
    tensors = {
        "q": torch.empty(601, 8, 128, dtype=torch.bfloat16),
        "k_cache": torch.empty(60, 16, 2, 128, dtype=torch.bfloat16),
        "v_cache": torch.empty(60, 16, 2, 128, dtype=torch.bfloat16),
        "block_table": torch.zeros(2, 50, dtype=torch.int32),
        "seq_lens": torch.tensor([600, 70], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 600, 601], dtype=torch.int32),
    }
    return {
        **tensors,
        "scale": 0.1,
        "block_size": 16,
        "layout": "NHD",
        "max_query_len": 600,
        "max_seq_len": 600,
    } | other


def _is_taken(gpu: GpuLimits, *, window: int | None = None, **other: Any) -> bool:
    batch = _batch(**other)
    scale, longest = batch.pop("scale"), (batch.pop("max_query_len"), batch.pop("max_seq_len"))
    call = prepare_paged(**batch, out=None, lse=None, variants={"window": window})
    return is_for_hopper(gpu, call, tuple(list(batch.values())[:6]), scale, *longest)


def test_what_it_is_launched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without warp groups would refuse it, rows not of 16 bytes be read astray, a window be ignored."""
    assert _is_taken(H200)
    assert not _is_taken(H200._replace(capability=(10, 0)))
    assert not _is_taken(H200, window=7)
    for scale in (0.0, -0.1, math.inf, math.nan):
        assert not _is_taken(H200, scale=scale)
    narrow, wide = (torch.empty(60, 16, 2, size, dtype=torch.bfloat16) for size in (80, 136))
    for other in (
        {"q": torch.empty(601, 8, 136, dtype=torch.bfloat16)[..., :128]},
        {"k_cache": wide[..., :128]},
        {"v_cache": narrow},
        {"v_cache": torch.empty(60, 16, 2, 256, dtype=torch.bfloat16)[..., ::2]},
        {"q": torch.empty(601 * 8 * 128 + 1, dtype=torch.bfloat16)[1:].view(601, 8, 128)},
        {"block_table": torch.zeros(2, 100, dtype=torch.int32)[:, ::2]},
        {"q": torch.empty(0, 8, 128, dtype=torch.bfloat16)},
        {"max_query_len": 15},
    ):
        assert not _is_taken(H200, **other), other
    assert _is_taken(H200, max_query_len=64, max_seq_len=200)
    assert not _is_taken(H200, max_query_len=64, max_seq_len=9000), "segments run in parallel"
    monkeypatch.setattr(launch_hopper, "_kernel", lambda: None)
    assert not _is_taken(H200), "without Gluon"


@pytest.fixture(name="launched")
def _launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What a wrapper launches where it takes a CPU for an H200."""
    launched: list[tuple[str, dict[str, Any]]] = []

    class Kernel:
        def __getitem__(self, _: object) -> Any:
            return lambda *args, **named: launched.append(("prompts", named | {"fewest": args[-1]}))

    monkeypatch.setattr(launch_hopper, "_kernel", Kernel)
    monkeypatch.setattr(launch, "gpu_at", lambda _: H200)
    monkeypatch.setattr(launch_hopper, "grouped_decode", lambda *_, **named: launched.append(("decodes", named)))
    monkeypatch.setattr(launch, "_attend", lambda *_: launched.append(("q_block", {})))
    monkeypatch.setattr(launch, "_reduce", lambda *_: None)
    return launched


@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
def test_where_boxes_are(layout: str, num_kv_heads: int) -> None:
    """The copy engine would bring other pages, heads or tokens than the block table says."""
    shape = (5, 16, num_kv_heads, 64)
    if layout == "interleaved":
        k, v = torch.arange(2 * math.prod(shape), dtype=torch.float16).view(5, 2, *shape[1:]).unbind(1)
    else:
        k, v = (torch.arange(math.prod(shape), dtype=torch.float16).view(shape) for _ in range(2))
    if layout == "HND":
        k, v = (one.transpose(1, 2).contiguous() for one in (k, v))
    q, table, lens = torch.empty(4, num_kv_heads, 64).half(), torch.zeros(1, 5).int(), torch.zeros(1).int()
    call = prepare_paged(q, k, v, table, lens, 16, layout, None, None, {}, torch.tensor([0, 4]))
    boxes = launch_hopper._boxes(call, k, v, 16)
    assert boxes is not None
    for cache, described in ((k, boxes.d_k), (v, boxes.d_v)):
        rows = cache.as_strided(described.shape, described.strides)
        for page, head in ((0, 0), (4, num_kv_heads - 1)):
            first, column = page * boxes.rows_b + head * boxes.rows_h, head * boxes.columns_h
            wanted = cache[page, head] if layout == "HND" else cache[page, :, head]
            assert torch.equal(rows[first : first + 16, column : column + 64], wanted)
        assert described.block_shape == [16, 64]


def test_pages_without_boxes() -> None:
    """Rows between those of pages would be copied in place of pages."""
    call = prepare_paged(**{name: _batch()[name] for name in (
        "q", "k_cache", "v_cache", "block_table", "seq_lens", "block_size", "layout", "cu_seqlens_q"
    )}, out=None, lse=None, variants={})  # fmt: skip
    strides, caches = call.strides, (_batch()["k_cache"], _batch()["v_cache"])
    assert launch_hopper._boxes(call, *caches, 16) is not None
    for k, v in (((4112, 256, 128), (4112, 256, 128)), ((4096, 256, 128), (8192, 256, 128)), ((4096, 128, 2064),) * 2):
        others = strides._replace(k=(*k, 1, 0), v=(*v, 1))
        assert launch_hopper._boxes(call._replace(strides=others), *caches, 16) is None


def test_decodes_among_prompts_go_to_another_kernel(launched: list[tuple[str, dict[str, Any]]]) -> None:
    """A long decode would have one program walk all of its tokens, or be computed twice, or by nobody."""
    batch = _batch()
    for num_decodes in (0, 1):
        launch.q_block_attention(**batch, num_decodes=num_decodes)
    assert [(name, named.get("fewest")) for name, named in launched] == [("decodes", None), ("prompts", 2)] * 2
    assert launched[0][1]["cu_seqlens_q"] is batch["cu_seqlens_q"]
    launched.clear()
    launch.q_block_attention(**_batch(q=torch.empty(1200, 8, 128, dtype=torch.bfloat16)))
    assert [(name, named["fewest"]) for name, named in launched] == [("prompts", 1)]


def test_who_chooses_gets_the_kernel_that_knows_the_options(launched: list[tuple[str, dict[str, Any]]]) -> None:
    """A choice would be ignored."""
    options: dict[str, Any] = {
        "block_m": 64, "tile": 64, "num_warps": 4, "num_stages": 2, "num_segments": 1, "num_programs": 9, "fill": 1,
        "num_combined": 4, "tuned": False, "static_grid": True,
    }  # fmt: skip
    for name, value in options.items():
        launch.q_block_attention(**_batch(), **{name: value})
    assert [name for name, _ in launched] == ["q_block"] * len(options)


_COMPILE = """
import contextlib

import attnfuzz.kernels.q_block.launch_hopper as launch
import torch
from attnfuzz.kernels.common.prepare import prepare_paged
from tests.quality.compiled import Call, Compiler

compiler = Compiler("sm_90")
launch.on_device_of = lambda _: contextlib.nullcontext()
launch.grouped_decode = lambda *_, **__: None
for group, head_size, block_size, layout in ((4, 128, 16, "NHD"), (7, 128, 24, "HND"), (1, 64, 256, "NHD")):
    shape = (8, block_size, 2, head_size) if layout == "NHD" else (8, 2, block_size, head_size)
    inputs = (
        torch.empty(600, 2 * group, head_size, dtype=torch.bfloat16),
        *(torch.empty(shape, dtype=torch.bfloat16) for _ in range(2)),
        torch.zeros(2, 50, dtype=torch.int32), *(torch.zeros(n, dtype=torch.int32) for n in (2, 3)),
    )
    made = prepare_paged(*inputs[:5], block_size, layout, None, None, {}, inputs[5])
    run = lambda: launch.launch_on_hopper(made, inputs, 0.1, layout, 600, 600, 132)
    for one in compiler.of(Call("paged_attention_auto", "", head_size, run)):
        print(one.kernel, one.shared)
"""


@pytest.mark.night
def test_it_compiles(tmp_path: Path) -> None:
    """On the first Hopper each call would end with a compiler's message, or want more shared memory than there is."""
    launched = gluon_stand_in.compiled(_COMPILE, tmp_path)
    assert [kernel for kernel, _ in launched] == ["q_block_hopper_kernel"] * 3
    assert max(shared for _, shared in launched) <= 227 << 10
