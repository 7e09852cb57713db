"""Formats of caches, decode on them, recurrences and histories: kernels of the families that are right and wrong."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import attnfuzz
from attnfuzz.composition import compose
from attnfuzz.declaration import Kernel, KernelLoadError, load_kernels
from attnfuzz.families import cache_write_kernels as writers
from attnfuzz.families import packed_decode_kernels as readers
from attnfuzz.families.formats import FORMATS, rotation
from attnfuzz.families.history import History, _batches
from attnfuzz.kernels.recurrent import launch
from attnfuzz.strategies import cases
from tests.common.drawing import drawn_from
from tests.families import cache_write_kernels, packed_decode_kernels
from tests.families.searched import smallest_cases


def test_numbers_are_those_of_the_formats() -> None:
    """Kernels would be held to another format than the one that engines have."""
    packed = torch.tensor([[0x21, 0xF7, 0x9A, 0x50, 0x11, 0x11, 0x11, 0x11]], dtype=torch.uint8)  # 16 codes
    scales = torch.tensor([[1.5]], dtype=torch.float8_e4m3fn)
    read = FORMATS["nvfp4"].read(packed, scales, of_all=torch.tensor([0.5]))
    of_codes = (0.5, 1.0, 6.0, -6.0, -1.0, -0.5, 0.0, 3.0)
    assert read[0, :8].tolist() == [0.75 * number for number in of_codes]
    wide = packed.repeat(1, 2)
    read = FORMATS["mxfp4"].read(wide, torch.tensor([[125]], dtype=torch.uint8))
    assert read[0, :8].tolist() == [number / 4 for number in of_codes]
    read = FORMATS["int4"].read(packed, torch.tensor([[0.25]]), torch.tensor([3], dtype=torch.uint8))
    assert read[0, :8].tolist() == [(code - 3) / 4 for code in (1, 2, 7, 15, 10, 9, 0, 5)]


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.numbers_in_one == 2])
def test_codes_come_back_as_they_were_packed(name: str) -> None:
    """A writer and a reader would disagree about which half of a byte is first."""
    codes = torch.arange(32, dtype=torch.uint8).remainder(16)[None]
    form = FORMATS[name]
    assert torch.equal(form.codes(form.packed(codes)), codes)


def test_each_block_has_its_own_scale() -> None:
    """The scale of one block would be that of all."""
    packed = torch.full((1, 16), 0x22, dtype=torch.uint8)
    scales = torch.tensor([[1.0, 2.0]]).to(torch.float8_e4m3fn)
    read = FORMATS["nvfp4"].read(packed, scales, of_all=torch.tensor([1.0]))
    assert read[0].tolist() == [1.0] * 16 + [2.0] * 16


def test_zero_points_lie_in_the_scales_of_a_rotated_cache() -> None:
    """They would count in the scale, or be looked for elsewhere."""
    bits = torch.tensor([[0.25]]).view(torch.int32) | 3
    read = FORMATS["int4_rotated"].read(torch.tensor([[0x21]], dtype=torch.uint8), bits.view(torch.float32))
    assert read.tolist() == [[-0.5, -0.25]]


def test_numbers_of_8_bits_are_their_own_codes() -> None:
    """int8 would be read without its sign."""
    read = FORMATS["int8"].read(torch.tensor([[-3, 127]], dtype=torch.int8), torch.tensor([[0.5]]))
    assert read.tolist() == [[-1.5, 63.5]]


@pytest.mark.parametrize("head_size", [16, 48])
def test_the_rotation_is_taken_back_by_its_transpose(head_size: int) -> None:
    """Sizes that are no power of two would be rotated as a whole, and lengths would not be kept."""
    turn, block = rotation(head_size), 16
    assert torch.equal(turn @ turn.mT, block * torch.eye(head_size, dtype=torch.float64))
    assert not turn[:block, block:].any()


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


def test_tokens_one_by_one_are_tokens_at_once() -> None:
    """A state that is kept in float32 would differ from one that never left its registers."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, g, beta, state = (
        torch.randn(shape, generator=generator)
        for shape in ((5, 2, 16), (5, 2, 16), (5, 4, 48), (5, 4), (5, 4), (2, 4, 48, 16))
    )
    g, beta, slots = -g.abs(), beta.sigmoid(), torch.tensor([1], dtype=torch.int32)
    at_once, by_one = state.clone(), state.clone()
    out, outs = torch.empty_like(v), torch.empty_like(v)
    launch.recurrent_decode(q, k, v, g, beta, torch.tensor([0, 5]), at_once, slots, out, normalised=True)
    for t in range(5):
        q_t, k_t, v_t, g_t, beta_t, out_t = (part[t : t + 1] for part in (q, k, v, g, beta, outs))
        launch.recurrent_decode(q_t, k_t, v_t, g_t, beta_t, torch.tensor([0, 1]), by_one, slots, out_t, normalised=True)
    assert torch.equal(out, outs)
    assert torch.equal(at_once, by_one)
    assert torch.equal(at_once[0], state[0])


@attnfuzz.kernel(History())
def nothing(inputs: Any) -> None:
    pass


def test_what_a_scheduler_does_is_drawn() -> None:
    """Backends would be asked about plain batches only, whatever the fields are called."""
    met: set[str] = set()
    for case in drawn_from(cases(nothing.declaration.problem), draws=300):
        batches = _batches(case)
        for before, after in pairwise(batches):
            of = {one.request: one for one in before}
            for one in after:
                old = of.get(one.request)
                if old is None:
                    met |= {"arrives"}
                    continue
                met |= {"decodes"} if one.start == old.start + old.new else set()
                met |= {"rejects"} if old.start < one.start < old.start + old.new else set()
                met |= {"is computed anew"} if one.start < old.start else set()
                met |= {"loses pages"} if one.pages[: len(old.pages)] != old.pages else set()
                met |= {"reads in chunks"} if old.start == 0 and 1 < one.new == old.new else set()
        for batch in batches:
            first = batch[0]
            met |= {"shares"} if any(one.start and one.pages[:1] == first.pages[:1] for one in batch[1:]) else set()
            slots = [page for one in batch for page in one.pages[one.start // case.block_size :]]
            assert len(slots) == len(set(slots))  # no two requests write one page
    assert met == {
        "arrives", "decodes", "rejects", "is computed anew", "loses pages", "reads in chunks", "shares"
    }  # fmt: skip


def test_a_token_of_an_output_is_told() -> None:
    """Nobody would know which request a wrong row is of."""
    problem: Any = nothing.declaration.problem
    case = problem.case_type(prompts=(3, 5), num_steps=2, block_size=4)
    assert History().where_is(case, "out1", (1, 0, 0)) == "step 1: new token 0 of request 1, which has 5 in the cache"
