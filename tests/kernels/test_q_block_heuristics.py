"""What the decision tree chooses can be launched, and says the same of a batch whatever is in it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from attnfuzz.kernels.common.device import GpuLimits
from attnfuzz.kernels.q_block.heuristics import MAX_SEGMENTS, Launch, choose, fitting, programs_per_sm

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
