"""How the Q-Block kernels are launched: by what was measured on a GPU, or else by what its properties say.

Tuning at run time costs more than it gains and cannot happen while a CUDA graph is replayed, so what micro-benchmarks
of realistic, ragged batches say is written down as a few branches (arXiv 2511.11581, §5): `kernels/tuned` has a tree
for each GPU that was measured. Everywhere else ``_by_shape`` decides, whose reasons hold for any GPU with matrix units,
and all that counts of the GPU is how many multiprocessors and how much shared memory it has. Only what the host knows
decides, never lengths: those are on the device. Blocks shrink until they fit (``fitting``).
"""

from __future__ import annotations

from typing import NamedTuple

from attnfuzz.kernels.common.device import GpuLimits
from attnfuzz.kernels.common.matrix_units import num_tiles, tiles_in_shared_memory
from attnfuzz.kernels.tuned import measured_choice

MAX_SEGMENTS = 64
_SHARED_BYTES = 220 * 1024
"""Most shared memory of a program: a little less than an H100 has. GPUs may have less."""
_ROW_REGISTERS = 64
"""Registers for the output, of 255 that a thread has; with twice as many it spills."""
_FEWEST_TILES = 4
_MEASURED_ITEMSIZE = 2


class Launch(NamedTuple):
    """How to launch a Q-Block kernel.

    ``block_m``: rows (query tokens times heads) of a block; ``tile``: keys per step; both powers of two of at least 16.
    ``num_warps``, ``num_stages`` as in ``triton.Config``. ``num_segments``: parts of a sequence that run in parallel; 0
    for as many as make ``fill`` programs for each multiprocessor, if they are long enough for the reduction to pay.
    """

    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    num_segments: int = 0
    fill: int = 2


def choose(
    *,
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    itemsize: int,
    max_query_len: int,
    max_seq_len: int,
    num_sms: int,
    gpu: GpuLimits | None = None,
    tuned: bool = True,
    **given: int,
) -> Launch:
    """The launch for a batch; ``itemsize``: bytes of an element of K and V. ``gpu``: as for ``fitting``.

    ``tuned``: as it was measured on this GPU, if it was. ``given``: fields of the launch that are chosen already.
    """
    group = num_q_heads // num_kv_heads
    rows = max_query_len * group
    launch = _by_shape(rows, head_size, itemsize)
    if tuned and itemsize <= _MEASURED_ITEMSIZE:
        measured = measured_choice(
            "paged_attention_auto",
            gpu,
            batch=num_seqs,
            max_seq_len=max_seq_len,
            heads_per_group=group,
            head_size=head_size,
            max_query_len=max_query_len,
            rows=rows,
            pairs=num_seqs * num_kv_heads,
        )
        launch = launch._replace(**measured)
    launch = fitting(launch._replace(**given), head_size=head_size, itemsize=itemsize, gpu=gpu)
    if launch.num_segments:
        return launch
    segments = _segments(launch, num_seqs, num_kv_heads, group, max_query_len, max_seq_len, num_sms)
    return launch._replace(num_segments=segments)


def _by_shape(rows: int, head_size: int, itemsize: int) -> Launch:
    if rows <= 64:
        # Decode: all rows of a block wait for the same tiles, and bandwidth decides. Few rows take little room, which
        # leaves it to more programs with tiles of their own on the way.
        launch = Launch(block_m=_power_of_two(rows), tile=64, num_warps=4, num_stages=3)
    elif rows < 512:
        # Two programs of this size share a multiprocessor: while one takes exponentials, the other multiplies.
        launch = Launch(block_m=64, tile=64, num_warps=4, num_stages=2)
    else:
        # Prefill: arithmetic decides. Two warp groups of 64 rows each use every tile.
        launch = Launch(block_m=128, tile=64, num_warps=8, num_stages=3)
    if head_size > 128 and itemsize < 4:
        launch = launch._replace(tile=32, num_warps=8 if rows > 64 else 4)
    return launch


def fitting(launch: Launch, *, head_size: int, itemsize: int, gpu: GpuLimits | None = None) -> Launch:
    """``launch`` with fewer rows, stages and keys per step, until it fits into registers and shared memory.

    Into those of ``gpu``, too, which may have less than an H100.
    """
    columns = _power_of_two(head_size)
    block_m, tile, num_stages = launch.block_m, launch.tile, launch.num_stages
    if itemsize == 4:
        # Without matrix units every product is an instruction of its own: more of them take a minute to compile.
        block_m, tile = 16, max(16, min(tile, 2048 // columns))
    while block_m > 16 and block_m * columns > _ROW_REGISTERS * 32 * launch.num_warps:
        block_m //= 2
    # The queries, and a tile of K and one of V for each stage.
    while (block_m + 2 * num_stages * tile) * columns * itemsize > _SHARED_BYTES or not _fits(
        gpu, block_m, tile, num_stages, columns, itemsize
    ):
        if num_stages > 2:
            num_stages -= 1
        elif tile > 16:
            tile //= 2
        else:
            block_m, num_stages = 16, 1
            break
    return launch._replace(block_m=block_m, tile=tile, num_stages=num_stages)


def _fits(gpu: GpuLimits | None, block_m: int, tile: int, num_stages: int, columns: int, itemsize: int) -> bool:
    row_bytes = 2 * columns * itemsize
    return gpu is None or num_tiles(gpu, rows=block_m, num_stages=num_stages) <= tiles_in_shared_memory(
        gpu, rows=block_m, columns=columns, tile=tile, row_bytes=row_bytes, itemsize=itemsize
    )


def programs_per_sm(launch: Launch, *, head_size: int, itemsize: int, gpu: GpuLimits | None = None) -> int:
    """About as many as a multiprocessor runs at once: with fewer a static grid leaves room, with more some wait."""
    # Below 64 rows there are no products of whole warp groups: one tile less lies in shared memory, seen in cubins.
    stages, registers = (launch.num_stages, 255) if launch.block_m >= 64 else (max(1, launch.num_stages - 1), 160)
    room = _SHARED_BYTES if gpu is None else min(_SHARED_BYTES, gpu.shared_bytes)
    shared = (launch.block_m + 2 * stages * launch.tile) * _power_of_two(head_size) * itemsize
    return max(1, min(room // shared, 65536 // (registers * 32 * launch.num_warps)))


def _segments(
    launch: Launch, num_seqs: int, num_kv_heads: int, group: int, max_query_len: int, max_seq_len: int, num_sms: int
) -> int:
    heads_at_once = min(group, launch.block_m)
    blocks = -(-max_query_len // (launch.block_m // heads_at_once)) * -(-group // heads_at_once)
    programs = max(1, num_seqs * blocks * num_kv_heads)
    most = max_seq_len // (_FEWEST_TILES * launch.tile)
    return max(1, min(launch.fill * num_sms // programs, most, MAX_SEGMENTS))


def _power_of_two(least: int) -> int:
    """The power of two of at least ``least``, and of at least 16, as tl.dot wants it."""
    return max(16, 1 << (least - 1).bit_length())
