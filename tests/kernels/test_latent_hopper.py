"""The kernel for Hopper: what it computes, run in torch, that it compiles, and what is launched."""

from __future__ import annotations

import math
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
SIZES = {"num_seqs": 2, "head_size": 576, "v_head_size": 512, "block_size": 64}
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
        ((300, 0, 0, 5, 129, 64, 200, 1), 16, 64, 64, 2),
        ((500,), 24, 20, 64, 3),
        ((100, 700), 128, 64, 64, 9),
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
    results, _ = _run(q, cache, table, torch.tensor(lens), block_size, heads, num_splits)
    for i, (length, got) in enumerate(zip(lens, results, strict=True)):
        _check(got, q[i], cache[table[i]].flatten(0, 1)[:length])


def test_groups_of_warps_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in would take a kernel for right whose groups of warps do not wait."""
    monkeypatch.setattr(gluon_stand_in._Groups, "wait", lambda *_: None)
    with pytest.raises(AssertionError):
        test_what_it_computes((500,), 64, 64, 64, 1)


@pytest.mark.parametrize(
    ("lens", "num_splits", "expected"),
    [
        ((256, 256, 200), 7, [[0, 2], [3, 2], [6, 2]]),  # two pieces each of seven that there might be
        ((20, 256), 4, [[0, 1], [3, 2]]),
        ((5000, 64, 64), 4, [[0, 4], [4, 1], [5, 1]]),  # else one range would have nearly all
    ],
)
def test_ranges_end_with_sequences_where_that_costs_little(
    lens: tuple[int, ...], num_splits: int, expected: list[list[int]]
) -> None:
    """Ranges would have parts of two equal sequences, and load the queries of both, or one range all of a long one."""
    q, cache = torch.ones(len(lens), 1, 576).half(), torch.ones(1, 64, 576).half()
    table = torch.zeros(len(lens), 80, dtype=torch.int32)
    results, shares = _run(q, cache, table, torch.tensor(lens), 64, 64, num_splits)
    assert shares == expected
    for length, (out, lse) in zip(lens, results, strict=True):
        assert (out == 1).all()
        assert lse.item() == pytest.approx(576**0.5 + math.log(length), rel=1e-6)


@pytest.mark.parametrize(
    ("lens", "num_heads", "heads", "num_splits"),
    [((130, 0, 64), 70, 64, 3), ((200, 1), 16, 16, 2), (None, 20, 32, 5), (None, 5, 16, 1)],
)
@pytest.mark.by_day("lens0*", "None-20*")
def test_lists_of_slots(lens: tuple[int, ...] | None, num_heads: int, heads: int, num_splits: int) -> None:
    """A sentinel would be followed or be a token, or what stands behind a list's end; a list be taken for a page's."""
    topk, slots, num_seqs = 200, 90, len(lens or (1, 1))
    random = torch.Generator("cpu").manual_seed(7)
    q, cache = (torch.randn(n, m, 576, generator=random).half() for n, m in ((num_seqs, num_heads), (slots, 1)))
    cache[-3:] = float("nan")
    indices = torch.randint(slots - 3, (num_seqs, topk), generator=random, dtype=torch.int32)
    for place, sentinel in enumerate((-1, slots, 2**31 - 1, -(2**31))):
        indices[:, place::11] = sentinel
    indices[-1, 64:128] = -1
    counted = None if lens is None else torch.tensor(lens)
    for row, length in zip(indices, lens or (), strict=False):
        row[length:] = slots - 1
    results, _ = _run(q, cache, indices, counted, None, heads, num_splits)
    for i, got in enumerate(results):
        row = indices[i, : topk if lens is None else lens[i]].long()
        _check(got, q[i], cache[row[(row >= 0) & (row < slots)], 0])


def _run(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    lens: Tensor | None,
    block_size: int | None,
    heads: int,
    num_splits: int,
) -> tuple[list[tuple[Tensor, Tensor]], list[list[int]]]:
    """Result and log-sum-exp of each sequence, its first state and how many it has; 64 heads: by groups of warps."""
    num_seqs, num_heads, _ = q.shape
    out = torch.full((num_seqs, num_heads, 512), float("nan")).half()
    lse, states = torch.full((num_seqs, num_heads), float("nan")), num_seqs + num_splits
    acc = torch.full((num_heads, states, 512), float("nan"))
    row_max, exp_sum = (torch.full((num_heads, states), float("nan")) for _ in range(2))
    shares = torch.zeros(num_seqs, 2, dtype=torch.int32)
    module, kernel = (
        ("latent_warps", "latent_warps_kernel") if heads == 64 else ("latent_hopper", "latent_hopper_kernel")
    )
    of_lists = (None, None) if block_size is not None else (len(cache), table.shape[1])
    chosen = {} if heads == 64 else {"HEADS": heads}
    gluon_stand_in.run(
        f"attnfuzz.kernels.latent.{module}", kernel, (-(-num_heads // heads), num_splits),
        q, *q.stride()[:2], cache, *cache.stride()[:2], table, table.stride(0), lens,
        out, *out.stride()[:2], lse, *lse.stride(), acc, row_max, exp_sum, shares,
        SCALE * math.log2(math.e), num_seqs, num_splits, num_heads, block_size, *of_lists,
        WHOLE_TILES=block_size is not None and block_size % 64 == 0, BLOCK_S=64, num_warps=8, **chosen,
    )  # fmt: skip
    found = []
    for i, (first, count) in enumerate(shares.tolist()):
        states_of = (one[:, first : first + count] for one in (acc, row_max, exp_sum))
        found.append(combined(*states_of) if count > 1 else (out[i], lse[i]))
    return found, shares.tolist()


def _check(got: tuple[Tensor, Tensor], q: Tensor, rows: Tensor) -> None:
    scores = q.double() @ rows.double().T * SCALE
    expected = scores.softmax(1) @ rows[:, :512].double(), scores.logsumexp(1)
    torch.testing.assert_close(got[0].double(), expected[0], rtol=2.0**-9, atol=2.0**-10)
    torch.testing.assert_close(got[1].double(), expected[1], rtol=2e-6, atol=2e-6)


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
    eighths = {
        "kv_cache": torch.empty(4, 8, 576, dtype=torch.bfloat16),
        "block_table": torch.zeros(2, 400, dtype=torch.int32),
    }
    for few, sizes in (
        ({"block_table": torch.zeros(2, 32, dtype=torch.int32)}, SIZES),
        (eighths, SIZES | {"block_size": 8}),
    ):
        assert not is_for_hopper(H200, _tensors() | few, sizes)
        assert is_for_hopper(H200, _tensors() | few | many, sizes)
    lists = {name: size for name, size in SIZES.items() if name != "block_size"}
    slots = {"kv_cache": torch.empty(9, 1, 576, dtype=torch.bfloat16)[..., :512]}
    for topk, is_fast in ((32 * 64, False), (33 * 64, True)):
        of_slots = _tensors() | slots | {"block_table": torch.zeros(2, topk, dtype=torch.int32)}
        del of_slots["seq_lens"]
        assert is_for_hopper(H200, of_slots, lists) == is_fast
        assert is_for_hopper(H200, of_slots | many, lists)
    shifted = torch.empty(2 * 16 * 576 + 1, dtype=torch.bfloat16)[1:].view(2, 16, 576)
    assert not is_for_hopper(H200, _tensors() | {"q": shifted}, SIZES)
    monkeypatch.setattr(launch_hopper, "_kernels", lambda: None)
    assert not is_for_hopper(H200, _tensors(), SIZES), "without Gluon"


_COMPILE = """
import attnfuzz.kernels.latent.launch_hopper as launch
import torch
from tests.quality.compiled import Call, Compiler

compiler = Compiler("sm_90")
launch.is_for_hopper.__globals__["on_device_of"] = lambda _: __import__("contextlib").nullcontext()
for heads, pages in ((16, 80), (32, 80), (128, 400)):
    for block_size in (64, 16, None):
        tensors = {
            "q": torch.empty(2, heads, 576, dtype=torch.bfloat16),
            "kv_cache": torch.empty(4, block_size or 1, 576, dtype=torch.bfloat16),
            "block_table": torch.zeros(2, pages if block_size else 8000, dtype=torch.int32),
            "seq_lens": torch.zeros(2, dtype=torch.int32),
            "out": torch.empty(2, heads, 512, dtype=torch.bfloat16),
            "lse": torch.empty(2, heads),
        }
        sizes = {"num_seqs": 2, "num_q_heads": heads} | ({"block_size": block_size} if block_size else {})
        call = Call("latent_grouped_auto", "", 576, lambda: launch.launch_on_hopper(tensors, sizes, 0.1, 132))
        for one in compiler.of(call):
            print(one.kernel, one.shared)
"""


@pytest.mark.night
def test_it_compiles(tmp_path: Path) -> None:
    """On the first Hopper each call would end with a compiler's message, or want more shared memory than there is."""
    launched = gluon_stand_in.compiled(_COMPILE, tmp_path)
    assert sorted({kernel for kernel, _ in launched}) == [
        "combine_partials_kernel",
        "latent_hopper_kernel",
        "latent_warps_kernel",
    ]
    assert max(shared for _, shared in launched) <= 227 << 10
