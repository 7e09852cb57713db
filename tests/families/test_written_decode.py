"""A writer of caches and a reader of another project, searched as one kernel."""

from __future__ import annotations

from typing import Any

import pytest

import attnfuzz
from attnfuzz.composition import compose
from attnfuzz.declaration import Kernel, KernelLoadError, load_kernels
from attnfuzz.families import cache_write_kernels as writers
from attnfuzz.families import packed_decode_kernels as readers
from tests.families import cache_write_kernels, packed_decode_kernels
from tests.families.searched import smallest_cases

WRITERS: Any = cache_write_kernels
READERS: Any = packed_decode_kernels
EAGER = writers.cache_write_eager, readers.packed_decode_eager


def swizzled() -> tuple[Any, Any]:
    """A writer and a reader that exchange scales of V in the same way."""
    return WRITERS.swizzled, READERS.swizzled


def silent(kernel: Kernel, asked: int) -> None:
    attnfuzz.fuzz(kernel, max_examples=asked, device="cpu")(lambda: None)()


def test_what_a_right_writer_wrote_is_read_by_a_right_reader() -> None:
    """A pair would be blamed for what the format rounds."""
    silent(compose(*EAGER), 60)


@pytest.mark.night
def test_bundled_kernels_in_triton_go_together() -> None:
    """As above, and a writer that is interpreted would be handed tensors that it cannot read."""
    silent(compose(writers.cache_write, readers.packed_decode), 10)


def test_plain_caches_hold_the_same_bits_once_they_are_written_again() -> None:
    """Kernels of paged_decode would be left out, or lose their bounds."""
    (kernel,) = load_kernels("attnfuzz.families.cache_write_kernels:cache_write_eager+paged_eager")
    assert kernel.declaration.supports.layouts == ("NHD", "HND")
    silent(kernel, 30)


@pytest.mark.parametrize("is_writer", [True, False])
def test_a_writer_and_a_reader_that_disagree_are_found(is_writer: bool) -> None:
    """Scales that one leaves where the other does not look would spoil answers in silence."""
    writer, reader = swizzled()
    pair = compose(writer, EAGER[1]) if is_writer else compose(EAGER[0], reader)
    cases = smallest_cases(pair)
    assert all((case.cache_format, case.head_size, case.num_kv_heads) == ("nvfp4", 64, 1) for case in cases)
    assert all(case.block_size % 4 == 0 and sum(case.lengths) <= 4 for case in cases)


def test_a_writer_and_a_reader_that_agree_are_silent() -> None:
    """A pair would be held to a format that neither of its readers nor its writers ever see."""
    silent(compose(*swizzled()), 60)


def test_what_does_not_go_together_is_refused() -> None:
    """A search would begin that has no cases, or compares rotated keys with others."""
    with pytest.raises(KernelLoadError, match="rotates all K"):
        compose(WRITERS.by_slot, EAGER[1])
    with pytest.raises(KernelLoadError, match="no format, dtype or size in common"):
        compose(swizzled()[0], load_kernels("paged_eager")[0])
    with pytest.raises(KernelLoadError, match="goes with one of paged_decode or PackedDecode"):
        compose(EAGER[0], load_kernels("merge_states_eager")[0])
