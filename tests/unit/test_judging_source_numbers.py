"""attnfuzz.judging.source_numbers: limits of lengths and sizes of tiles that a kernel's source names."""

from __future__ import annotations

from pathlib import Path

import msgspec

from attnfuzz.judging.messages import DeclarationsReply
from attnfuzz.judging.service import JudgingService

KERNELS = """
import attnfuzz

TILE = 96
UNUSED = 777
LIMIT = 1 << 11


def elsewhere(n):
    return n >= 333


def split(n):
    for start in range(0, n, 80):
        yield start


@attnfuzz.kernel("paged_decode")
def limited(inputs):
    for n in inputs.seq_lens.tolist():
        if n >= LIMIT or n // TILE > 3:
            return None
        list(split(n))
    return inputs.out


@attnfuzz.kernel("paged_decode")
def another(inputs):
    configuration = dict(block_n=48 if inputs.max_seq_len else 24)
    return configuration


made = attnfuzz.kernel("paged_decode", name="made")(eval("lambda inputs: inputs.seq_lens > 555"))
"""


def lengths(folder: Path) -> dict[str, tuple[int, ...]]:
    """As the search is told of the kernels of a file."""
    file = folder / "kernels_with_limits.py"
    file.write_text(KERNELS)
    payload = msgspec.json.encode({"targets": [str(file)]})
    reply = msgspec.json.decode(JudgingService().handle("declarations", payload), type=DeclarationsReply)
    assert reply.error is None
    return {kernel.name: kernel.lengths for kernel in reply.kernels}


def test_a_search_is_told_the_limits_of_each_kernel_and_of_no_other(tmp_path: Path) -> None:
    """Lengths would not be drawn around what a kernel compares them with, or around limits of its neighbours."""
    found = lengths(tmp_path)
    assert found["limited"] == (80, 96, 2048)
    assert found["another"] == (24, 48)


def test_a_kernel_without_source_has_no_limits(tmp_path: Path) -> None:
    """What is made at run time could not be searched at all."""
    assert lengths(tmp_path)["made"] == ()


def test_what_triton_kernels_are_launched_with_counts() -> None:
    """The tile of a kernel would be met by chance only, where no option names it."""
    payload = msgspec.json.encode({"targets": ["paged_attention_auto"]})
    reply = msgspec.json.decode(JudgingService().handle("declarations", payload), type=DeclarationsReply)
    assert 128 in reply.kernels[0].lengths


def test_sources_of_kernels_that_are_known_are_not_read_again() -> None:
    """Each worker would do so before its first case, which takes longer than importing an engine's kernels."""
    payload = msgspec.json.encode({"targets": ["paged_attention_auto"], "known": True})
    reply = msgspec.json.decode(JudgingService().handle("declarations", payload), type=DeclarationsReply)
    assert reply.kernels[0].lengths == ()
