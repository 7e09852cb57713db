"""Blocks of query tokens, and the sizes that are chosen for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.kernels.common.device import GpuLimits
from attnfuzz.kernels.q_block import launch as q_block_launch
from attnfuzz.kernels.q_block.heuristics import MAX_SEGMENTS, Launch, choose, fitting, programs_per_sm
from attnfuzz.kernels.q_block.launch import q_block_attention
from attnfuzz.kernels.q_block.q_block_simple import q_block_simple

Make = Callable[..., Any]
Lengths = Sequence[tuple[int, int]]
MIXED = [(1, 21), (0, 3), (5, 5), (0, 0), (1, 1), (9, 35)]
"""Query tokens and length of each sequence: decode, nothing to do, prefill, empty, first token, chunked prefill."""
KERNELS = {
    "q_block": partial(q_block_attention, tile=16),
    "segments": partial(q_block_attention, tile=16, num_segments=2),
    "static": partial(q_block_attention, tile=16, static_grid=True, num_programs=3),
}

every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
as_a_gpu_does = pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN slice) encountered:RuntimeWarning")
"""Rows of a block without a query are 0, and -inf times 0 is NaN, there: NumPy says so, a GPU does not."""


def causal(
    q: Tensor, lengths: Lengths, keys: list[Tensor], values: list[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` in float64, one query token and head at a time."""
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    token = 0
    for (query_len, seq_len), k, v in zip(lengths, keys, values, strict=True):
        for j in range(query_len):
            seen = max(0, seq_len - query_len + j + 1)
            for head in range(q.shape[1]) if seen else ():
                kv_head = head * k.shape[1] // q.shape[1]
                scores = k[:seen, kv_head].double() @ q[token, head].double() * scale
                out[token, head] = torch.softmax(scores, 0) @ v[:seen, kv_head].double()
                lse[token, head] = torch.logsumexp(scores, 0)
            token += 1
    return out, lse


@pytest.fixture(name="make")
def _make(paged_problem: Make) -> Make:
    def make(lengths: Lengths, *, heads: tuple[int, int] = (2, 1), **kinds: Any) -> Any:
        """Arguments, keywords and the float64 answer; dead memory as in ``paged_problem``."""
        paged = paged_problem([seq_len for _, seq_len in lengths], heads=heads, **kinds)
        _, *cache, scale, block_size, layout = paged.args
        total = sum(query_len for query_len, _ in lengths)
        generator = torch.Generator(torch.get_default_device()).manual_seed(5)
        q = torch.randn(total, heads[0], paged.q.shape[2], generator=generator).to(paged.q.dtype)
        ends = torch.tensor([0, *(query_len for query_len, _ in lengths)]).cumsum(0).to(torch.int32)
        longest = {"max_query_len": max(n for n, _ in lengths), "max_seq_len": max(n for _, n in lengths)}
        args = (q, *cache, ends, scale, block_size, layout)
        return args, longest, causal(q, lengths, paged.keys, paged.values, scale)

    return make


@pytest.fixture(name="check")
def _check() -> Make:
    def check(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
        # P is rounded to the input dtype, and each V in the sum is as large as the largest
        loose = {torch.float16: 2e-3, torch.float32: 2e-6}[got[0].dtype]
        torch.testing.assert_close(got[0].double(), expected[0], rtol=loose, atol=loose)
        of_sums = 2e-6 * max(1.0, got[0].shape[2] / 256)  # products that are summed; tensor cores cut bits off
        torch.testing.assert_close(got[1].double(), expected[1], rtol=of_sums, atol=of_sums)

    return check


@pytest.mark.by_day
@every_kernel
@pytest.mark.parametrize(("layout", "block_size"), [("NHD", 3), ("HND", 16), ("packed", 16), ("interleaved", 3)])
def test_a_mixed_batch(kernel: Make, layout: str, block_size: int, make: Make, check: Make) -> None:
    """Prefill, decode and sequences without queries in one launch would get each other's tokens or masks."""
    args, longest, expected = make(MIXED, block_size=block_size, layout=layout, heads=(4, 2))
    check(kernel(*args, **longest), expected)


@pytest.mark.by_day
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (17, 1)])
def test_the_simple_kernel(heads: tuple[int, int], make: Make, check: Make) -> None:
    """The kernel that is read first would compute something else than the one that it explains."""
    args, _, expected = make(MIXED, block_size=3, heads=heads)
    check(q_block_simple(*args[:7]), expected)
    with pytest.raises(ValueError, match=r"k_cache of strides .* must be contiguous; use q_block_attention"):
        q_block_simple(args[0], args[1].transpose(0, 1).contiguous().transpose(0, 1), *args[2:7])


@pytest.mark.by_day
@pytest.mark.parametrize("static_grid", [False, True])
@pytest.mark.parametrize("query_lens", [(0, 0, 8), (8, 0, 0), (7, 9, 1, 16), (0, 17, 0, 1, 0), (1,) * 5, (24,)])
def test_the_sequence_of_a_block(query_lens: tuple[int, ...], static_grid: bool, make: Make, check: Make) -> None:
    """A block of 8 query tokens would be taken for one of the sequence before or behind it."""
    args, longest, expected = make([(n, n + i) for i, n in enumerate(query_lens)])
    check(q_block_attention(*args, **longest, block_m=16, tile=16, static_grid=static_grid), expected)


@pytest.mark.by_day
@pytest.mark.parametrize(
    ("heads", "block_m"), [((3, 1), 16), ((10, 2), 16), ((17, 1), 16), ((24, 1), 64), ((3, 3), 32)]
)
@pytest.mark.parametrize("num_segments", [1, 2])
def test_groups_that_do_not_divide_a_block(
    heads: tuple[int, int], block_m: int, num_segments: int, make: Make, check: Make
) -> None:
    """Rows without a head would be written to a neighbour's, or heads beyond the first block be left out."""
    args, longest, expected = make([(3, 9), (1, 4)], heads=heads)
    check(q_block_attention(*args, **longest, block_m=block_m, tile=16, num_segments=num_segments), expected)


@pytest.mark.parametrize("block_size", [1, 16, 24, 32, 48, 128, 272])
@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.by_day("16-24", "16-272", "32-16")
def test_tiles_and_pages_are_independent(block_size: int, tile: int, make: Make, check: Make) -> None:
    """A tile that is smaller or larger than a page, or lies across two, would read the wrong one."""
    args, longest, expected = make([(2, 70), (3, 300)], block_size=block_size, heads=(1, 1))
    check(q_block_attention(*args, **longest, tile=tile), expected)
    check(q_block_attention(*args, **longest, tile=tile, num_segments=4), expected)


@every_kernel
def test_queries_that_see_nothing(kernel: Make, make: Make, check: Make) -> None:
    """Queries before the first token, as a stale length makes them, would become NaN and not 0 and -inf."""
    args, longest, expected = make([(5, 2), (1, 0), (3, 3)])
    assert int(expected[1].isneginf().all(1).sum()) == 4
    check(kernel(*args, **longest), expected)


@every_kernel
def test_room_for_more_tokens_and_longer_ones(kernel: Make, make: Make, check: Make) -> None:
    """A captured graph, with room for a larger batch, would write rows that belong to nobody or lose some that do."""
    (q, *rest), _, expected = make(MIXED)
    roomy = torch.full((100, *q.shape[1:]), math.nan, dtype=q.dtype)
    roomy[: len(q)] = q
    out, lse = torch.full_like(roomy, 7.0), torch.full(roomy.shape[:2], 7.0)
    kernel(roomy, *rest, max_query_len=100, max_seq_len=5000, out=out, lse=lse)
    check((out[: len(q)], lse[: len(q)]), expected)
    assert bool((out[len(q) :] == 7).all())
    assert bool((lse[len(q) :] == 7).all())


@every_kernel
def test_integer_dtypes(kernel: Make, make: Make, check: Make) -> None:
    """int64 lengths and tables, which some engines keep, would be read as pairs of int32."""
    args, longest, expected = make(MIXED)
    args = tuple(arg.long() if isinstance(arg, Tensor) and arg.dtype == torch.int32 else arg for arg in args)
    check(kernel(*args, **longest), expected)


@every_kernel
def test_pages_beyond_two_to_the_31_elements(kernel: Make, make: Make, check: Make) -> None:
    """An address would wrap at 32 bits and read from outside the cache."""
    (q, k_cache, v_cache, table, *rest), longest, expected = make([(2, 5)], layout="interleaved")
    num_blocks = 2**31 // (2 * 4 * 8) + 4
    far = torch.empty(num_blocks, 2, 4, 1, 8, dtype=torch.float16)  # only touched where pages are in use
    shift = num_blocks - len(k_cache)
    far[shift:, 0], far[shift:, 1] = k_cache, v_cache
    table[0, :2] += shift
    check(kernel(q, far[:, 0], far[:, 1], table, *rest, **longest), expected)


@pytest.mark.by_day
@pytest.mark.parametrize("num_programs", [1, 2, 1000])
@pytest.mark.parametrize("num_segments", [1, 2])
def test_any_number_of_programs(num_programs: int, num_segments: int, make: Make, check: Make) -> None:
    """Programs that share out the work would leave some of it undone."""
    args, longest, expected = make(MIXED, heads=(4, 2))
    got = q_block_attention(
        *args, **longest, static_grid=True, num_programs=num_programs, num_segments=num_segments, tile=16
    )
    check(got, expected)


@pytest.mark.parametrize("num_segments", [2, 17])
def test_any_number_of_segments(num_segments: int, make: Make, check: Make) -> None:
    """The reduction would lose a segment, or weigh one without tokens."""
    args, longest, expected = make([(1, 1), (1, 80), (0, 7)], heads=(1, 1))
    check(q_block_attention(*args, **longest, tile=16, num_segments=num_segments), expected)


def test_scores_of_any_size_and_sign(make: Make) -> None:
    """A row whose real scores lie below a finite stand-in for -inf would come out empty."""
    (q, k_cache, v_cache, table, lens, ends, scale, *rest), longest, _ = make([(2, 40)], dtype=torch.float32)
    for kernel in KERNELS.values():
        _, small = kernel(q, k_cache, v_cache, table, lens, ends, scale, *rest, **longest)
        q_far = torch.full_like(q, 1e5)
        k_far = torch.where(k_cache.isnan(), k_cache, -1e5)
        out, lse = kernel(q_far, k_far, v_cache, table, lens, ends, scale, *rest, **longest)
        assert bool(out.isfinite().all())
        assert bool((lse < -1e10).all())
        assert bool(lse.isfinite().all())
        assert bool(small.isfinite().all())


def test_more_segments_than_are_combined_at_a_time(make: Make, check: Make) -> None:
    """Large heads are combined a few segments at a time: all steps but one would be lost, or not be rescaled."""
    args, longest, expected = make([(1, 300), (2, 3)], heads=(1, 1), head_size=1024)
    check(q_block_attention(*args, **longest, tile=16, num_segments=17), expected)
    args, longest, expected = make([(1, 90), (2, 3)], heads=(2, 1), head_size=24)
    for num_combined in (1, 2, 4):
        check(q_block_attention(*args, **longest, tile=16, num_segments=5, num_combined=num_combined), expected)


@as_a_gpu_does
@every_kernel
@pytest.mark.parametrize("hidden", [slice(16), slice(16, 32), slice(40)], ids=["first tile", "second tile", "all"])
def test_scores_of_minus_infinity_have_no_weight(kernel: Make, hidden: slice, make: Make) -> None:
    """A tile, a segment or a row without a finite score would turn valid rows into NaN."""
    (q, k_cache, *rest), longest, _ = make([(3, 40)], block_size=8)
    table, block_size = rest[1], rest[5]
    q = q.abs() + 1
    for token in range(40)[hidden]:
        k_cache[table[0, token // block_size], token % block_size] = -math.inf
    out, lse = kernel(q, k_cache, *rest, **longest)
    seen = torch.ones(40, dtype=torch.bool)
    seen[hidden] = False
    pages = table[0, :5].long()
    k, v = (cache[pages].flatten(0, 1)[:, 0].double() for cache in (k_cache, rest[0]))
    for row in range(3):
        kept = seen & (torch.arange(40) < 38 + row)
        scores = q[row].double() @ k[kept].T * rest[4]
        torch.testing.assert_close(lse[row].double(), torch.logsumexp(scores, 1), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(out[row].double(), torch.softmax(scores, 1) @ v[kept], rtol=2e-3, atol=2e-3)


@as_a_gpu_does
@every_kernel
def test_scores_that_overflow_below_have_no_weight(kernel: Make, make: Make) -> None:
    """Scores of -inf in float32, of keys that are finite, would turn the rows that have them into NaN."""
    (q, k_cache, *rest), longest, _ = make([(2, 40)], dtype=torch.float32, block_size=8)
    q, table = torch.full_like(q, 1e30), rest[1]
    k_cache[table[0, :5].long()] = -1e30
    k_cache[table[0, 4].long(), 5:] = 0.0  # tokens 37 to 39
    out, lse = kernel(q, k_cache, *rest, **longest)
    v = rest[0][table[0, 4].long(), :, 0]
    torch.testing.assert_close(out, torch.stack([v[5:7].mean(0), v[5:8].mean(0)])[:, None].expand_as(out))
    torch.testing.assert_close(lse, torch.tensor([[2.0], [3.0]]).log().expand_as(lse))


@pytest.mark.parametrize("num_decodes", [1, 2, 3])
@pytest.mark.parametrize("static_grid", [False, True])
def test_decodes_that_come_first_are_launched_apart(
    num_decodes: int, static_grid: bool, make: Make, check: Make
) -> None:
    """A long decode beside a prompt would run in one program, or rows of the two launches be mixed up."""
    args, longest, expected = make([(1, 70), (1, 1), (1, 33), (5, 20), (1, 6), (0, 2)], heads=(4, 2))
    check(q_block_attention(*args, **longest, tile=16, num_decodes=num_decodes, static_grid=static_grid), expected)


def test_all_are_decodes(make: Make, check: Make) -> None:
    """A launch for the rest, of which there is none, would fail."""
    args, longest, expected = make([(1, 70), (1, 3)])
    check(q_block_attention(*args, **longest, num_decodes=2), expected)
    with pytest.raises(ValueError, match="num_decodes=3 must be at most 2, since the batch has num_seqs=2"):
        q_block_attention(*args, **longest, num_decodes=3)


def test_long_decodes_beside_a_prompt_get_segments(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take as long as one program takes for all of their tokens, while the rest of the GPU is idle."""
    launches: list[Launch] = []
    attend = q_block_launch._attend

    def watched(*args: Any) -> None:
        launches.append(args[5])
        attend(*args)

    monkeypatch.setattr(q_block_launch, "_attend", watched)
    monkeypatch.setattr(q_block_launch, "gpu_at", lambda device: None)  # a GPU would have programs to spare
    monkeypatch.setattr(q_block_launch, "_SMS_OF_A_CPU", 8)
    args, _, _ = make([(1, 5), (3, 3)])
    q_block_attention(*args, max_query_len=600, max_seq_len=32768, num_decodes=1)
    assert [(launch.block_m, launch.num_segments > 1) for launch in launches] == [(16, True), (128, False)]


def test_nothing_to_do(make: Make) -> None:
    """A launch without programs would be an error."""
    args, _, _ = make([(0, 4), (0, 0)])
    out, lse = q_block_attention(*args, max_query_len=0, max_seq_len=4)
    assert out.shape == (0, 2, 8)
    assert lse.shape == (0, 2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"block_m": 24}, "block_m=24 must be a power of two of at least 16"),
        ({"tile": 8}, "tile=8 must be a power of two of at least 16"),
        ({"num_segments": 65}, "num_segments=65 must be at most 64"),
        ({"num_segments": 0}, "num_segments=0 must be an integer of at least 1"),
        ({"num_warps": 3}, "num_warps=3 must be one of"),
        ({"num_combined": 3}, "num_combined=3 must be a power of two"),
        ({"num_programs": 0}, "num_programs=0 must be an integer of at least 1"),
    ],
)
def test_what_cannot_be_launched(options: dict[str, Any], told: str, make: Make) -> None:
    """A wrong option would fail in the compiler, far from where it was given."""
    args, longest, _ = make([(1, 4)])
    with pytest.raises(ValueError, match=told):
        q_block_attention(*args, **(longest | options))


def test_starts_of_another_batch(make: Make) -> None:
    """Starts without the end of the last sequence would be read past their end."""
    args, longest, _ = make([(1, 4), (2, 2)])
    others: Any = (*args[:5], args[5][:-1], *args[6:])
    with pytest.raises(ValueError, match=r"cu_seqlens_q.shape=\[2\] must be \[num_seqs \+ 1\] with num_seqs=2"):
        q_block_attention(*others, **longest)


_H100: dict[str, Any] = {"num_sms": 132}
_LLAMA: dict[str, Any] = {"num_q_heads": 32, "num_kv_heads": 8, "head_size": 128, "itemsize": 2, **_H100}


@pytest.mark.parametrize("head_size", [1, 64, 80, 128, 256, 576, 1024])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_all_choices_can_be_launched(head_size: int, itemsize: int) -> None:
    """A rare shape would ask for more shared memory or more segments than there are."""
    for num_seqs, group, max_query_len in product((1, 16, 1000), (1, 3, 8, 128), (1, 5, 500, 8192)):
        launch = choose(
            num_seqs=num_seqs,
            num_q_heads=2 * group,
            num_kv_heads=2,
            head_size=head_size,
            itemsize=itemsize,
            max_query_len=max_query_len,
            max_seq_len=8192,
            **_H100,
        )
        padded = max(16, 1 << (head_size - 1).bit_length())
        tiles = 2 * launch.num_stages * launch.tile
        assert (launch.block_m + tiles) * padded * itemsize <= 227 * 1024
        assert launch.block_m >= 16 <= launch.tile
        assert 1 <= launch.num_segments <= MAX_SEGMENTS


def test_what_fits_is_left_alone_and_the_rest_shrinks() -> None:
    """Options of a user would be changed without need, or be launched though they cannot be."""
    fits = Launch(block_m=128, tile=64, num_warps=8, num_stages=3, num_segments=5)
    assert fitting(fits, head_size=128, itemsize=2) == fits
    assert fitting(fits._replace(num_warps=2), head_size=128, itemsize=2).block_m == 32
    assert fitting(fits, head_size=1024, itemsize=4) == Launch(16, 16, 8, 1, 5)


def test_launches_shrink_on_a_gpu_with_less_shared_memory() -> None:
    """Prompts with large heads would not start on an RTX 4090, and those of any size not on an MI300X."""
    hopper, ada, cdna = (
        GpuLimits(132, 227 << 10, False, True),
        GpuLimits(128, 99 << 10, False, False),
        GpuLimits(304, 64 << 10, True, False),
    )
    small = Launch(block_m=128, tile=64, num_warps=8, num_stages=3)
    large = small._replace(block_m=64, tile=32)
    for launch, head_size in ((small, 128), (large, 256)):
        assert fitting(launch, head_size=head_size, itemsize=2, gpu=hopper) == launch
    assert fitting(small, head_size=128, itemsize=2, gpu=ada) == small  # 98,304 of 101,376 bytes
    assert fitting(large, head_size=256, itemsize=2, gpu=ada).num_stages == 2  # it took 102,400
    assert fitting(small, head_size=128, itemsize=2, gpu=cdna).num_stages == 2  # it took 81,920 of 65,536
    assert fitting(large, head_size=256, itemsize=2, gpu=cdna).num_stages == 2
    decode = Launch(block_m=16, tile=64, num_warps=4, num_stages=3)
    assert all(fitting(decode, head_size=128, itemsize=2, gpu=gpu) == decode for gpu in (hopper, ada, cdna))


def test_programs_that_run_at_once() -> None:
    """A static grid would leave multiprocessors idle, or have no program at all for large blocks."""
    large = Launch(block_m=128, tile=64, num_warps=8, num_stages=3)
    assert programs_per_sm(large, head_size=128, itemsize=2) == 1
    assert programs_per_sm(large, head_size=1024, itemsize=4) == 1
    assert programs_per_sm(Launch(64, 64, 4, 2), head_size=128, itemsize=2) == 2
    assert programs_per_sm(Launch(16, 64, 4, 3), head_size=128, itemsize=2) == 3


def test_few_long_sequences_are_cut_into_segments() -> None:
    """A long sequence of a small batch would be left to a few of the multiprocessors, or a full batch be cut."""
    long = choose(num_seqs=1, max_query_len=1, max_seq_len=32768, **_LLAMA)
    assert long.num_segments * 8 >= 2 * 132
    assert choose(num_seqs=1, max_query_len=1, max_seq_len=200, **_LLAMA).num_segments == 1
    assert choose(num_seqs=64, max_query_len=1, max_seq_len=32768, **_LLAMA).num_segments == 1
    assert choose(num_seqs=16, max_query_len=2048, max_seq_len=4096, **_LLAMA).num_segments == 1


def test_prefill_takes_more_rows_than_decode() -> None:
    """Programs with many rows would wait for memory, or ones with few leave the matrix units idle."""
    decode = choose(num_seqs=8, max_query_len=1, max_seq_len=4096, **_LLAMA)
    prefill = choose(num_seqs=8, max_query_len=2048, max_seq_len=4096, **_LLAMA)
    assert decode.block_m == 16
    assert prefill.block_m == 128
