"""Offsets and ids in too few bits are found with a handful of tokens; right kernels are left alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from attnfuzz.cases.supported import adapt_options
from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.judging.judge import judge
from attnfuzz.judging.runner import Runner
from attnfuzz.memory.address_space import SparseUnavailable
from attnfuzz.oracles.registry import KNOWN
from attnfuzz.problems.cases import (
    Case,
    DenseDecodeCase,
    LatentDecodeCase,
    MaskedAttentionCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    SplitDecodeCase,
)
from attnfuzz.problems.masks import Mask
from attnfuzz.problems.recipes import Pages, Values
from attnfuzz.problems.supports import Layout
from attnfuzz.verdict import Failure
from tests.quality.mutants import Edit, Mutant
from tests.quality.planting import plant

ROWS: dict[str, Any] = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "seq_lens": (5, 1, 0, 2), "scale": 0.25}
PAGED = PagedDecodeCase(**ROWS, block_size=4)
DENSE = DenseDecodeCase(**ROWS)
SPLIT = SplitDecodeCase(**ROWS, block_size=4, num_splits=3)
LATENT = LatentDecodeCase(**ROWS | {"num_q_heads": 2}, v_head_size=8, block_size=4)
MERGE = MergeStatesCase(num_q_heads=1, head_size=16, num_tokens=5)
OTHER_LAYOUTS: list[dict[str, Any]] = [
    {"layout": "HND", "dtype": "float32", "head_size": 80, "block_size": 24, "seq_lens": (33,)},
    {"layout": "packed", "dtype": "bfloat16", "head_size": 40, "block_size": 7, "strides": {"k_cache": "padded_rows"}},
    {"layout": "interleaved", "head_size": 13, "strides": {"k_cache": "transposed"}},
    {"layout": "NHD", "strides": {"k_cache": "offset", "v_cache": "every_other"}},
    {"block_size": 1, "seq_lens": (1,)},
]
QUERIES = PagedAttentionCase(**ROWS, block_size=4, query_lens=tuple(min(1, n) for n in ROWS["seq_lens"]))
MASKED = MaskedAttentionCase(
    **ROWS, block_size=4, query_lens=QUERIES.query_lens, mask=Mask(kind="bits", seqs=((2, 65535),))
)
TWO_ROWS = msgspec.structs.replace(MASKED, query_lens=(1, 1, 0, 2), mask=Mask())
RIGHT: list[tuple[Case, list[str]]] = [
    (PAGED, ["paged_naive", "paged_split_k", "paged_eager", "paged_split_k_eager"]),
    (DENSE, ["dense_naive", "dense_eager"]),
    (SPLIT, ["split_k_partials", "split_k_partials_eager"]),
    (LATENT, ["latent_grouped", "latent_eager"]),
    (MERGE, ["merge_states_triton", "merge_states_eager"]),
    (QUERIES, ["paged_attention_naive", "paged_attention_eager"]),
    (MASKED, ["masked_attention_naive", "masked_attention_eager"]),
]

WALK = "paged/paged_walk.py"
LOAD = ".to(tl.int64)  # [TILE]"
MASK_ROW = "(i_token - query_begin) * seq_len\n    i_row = i_row.to(tl.int32)"
MASK_ENTRY = "p_mask - i_row * stride_mask + (i_row + i_t).to(tl.int32) * stride_mask"
K_OFFSET = "o_kt = i_block * stride_kb + i_off * stride_kt"
PLANTED: dict[str, tuple[str, Case, Edit, str, str]] = {
    "int32_page_offset": (
        "paged_naive", PAGED, Edit(WALK, LOAD, "  # [TILE]"), "page ids", "past 2^31 elements and 2^32 bytes"
    ),
    "int32_page_offset_of_v": (
        "paged_split_k",
        PAGED,
        Edit(WALK, "o_vt = i_block * stride_vb", "o_vt = i_block.to(tl.int32) * stride_vb"),
        "page ids",
        "past 2^31 elements",
    ),
    "uint32_page_offset": (
        "split_k_partials",
        SPLIT,
        Edit(WALK, "o_vt = i_block * stride_vb", "o_vt = i_block.to(tl.uint32) * stride_vb"),
        "page ids",
        "past 2^32 elements",
    ),
    "uint16_page_id": (
        "paged_naive", PAGED, Edit(WALK, LOAD, ".to(tl.int64) & 0xFFFF"), "page ids", "past 2^16 page ids"
    ),
    "int16_page_id": (
        "paged_naive",
        PAGED,
        Edit(WALK, LOAD, ".to(tl.int16).to(tl.int64)"),
        "page ids",
        "past 2^15 page ids",
    ),
    "byte_offset": (
        "paged_naive",
        PAGED,
        Edit(WALK, K_OFFSET, f"o_kt = (({K_OFFSET[7:]}) * 2 & 0xFFFFFFFF) // 2"),
        "page ids",
        "2^32 bytes",
    ),
    "narrow_between_2_31_and_2_32": (
        "paged_naive",
        PAGED,
        Edit(WALK, K_OFFSET, f"{K_OFFSET}\n        o_kt = tl.where(o_kt >> 32, o_kt, o_kt & 0x7FFFFFFF)"),
        "page ids",
        "past 2^31 elements",
    ),
    "offset_within_a_page": (
        "paged_naive",
        PAGED,
        Edit(WALK, "i_off = (i_t % block_size).to(tl.int64)", "i_off = i_t % block_size"),
        "strides of k_cache",
        "k_cache.stride(1) enlarged",
    ),
    "offset_within_a_page_of_v": (
        "paged_split_k",
        msgspec.structs.replace(PAGED, layout="HND"),
        Edit(WALK, "+ i_off * stride_vt", "+ i_off.to(tl.int32) * stride_vt"),
        "strides of v_cache",
        "v_cache.stride(2) enlarged",
    ),
    "page_of_latent_vectors": (
        "latent_grouped",
        LATENT,
        Edit("latent/latent_decode.py", "i_block.to(tl.int64) * stride_cb", "i_block * stride_cb"),
        "page ids",
        "past 2^31 elements",
    ),
    "token_stride": (
        "dense_naive",
        DENSE,
        Edit("dense/dense_decode.py", "o_t = tl.arange(0, TILE).to(tl.int64)", "o_t = tl.arange(0, TILE)"),
        "strides of k",
        "k.stride(1) enlarged",
    ),
    "token_of_a_merge": (
        "merge_states_triton",
        MERGE,
        Edit("merge/merge_states.py", "i_token = tl.program_id(0).to(tl.int64)", "i_token = tl.program_id(0)"),
        "strides of prefix_output",
        "prefix_output.stride(0) enlarged",
    ),
    "split_of_partials": (
        "split_k_partials",
        msgspec.structs.replace(SPLIT, num_splits=4),
        Edit("paged/split_decode.py", "i_split = tl.program_id(2).to(tl.int64)", "i_split = tl.program_id(2)"),
        "strides of partial_out",
        "partial_out.stride(2) enlarged",
    ),
    "row_of_a_mask": (
        "masked_attention_naive",
        TWO_ROWS,
        Edit("masked/masked_attention.py", "(i_token - query_begin) * seq_len", MASK_ROW),
        "offsets into mask",
        "with mask_indptr from 2147483641 on, so that offsets into mask exceed 2^31 elements",
    ),
    "entry_of_a_mask": (
        "masked_attention_naive",
        msgspec.structs.replace(MASKED, mask=Mask()),
        Edit("masked/masked_attention.py", "p_mask + i_t.to(tl.int64) * stride_mask", MASK_ENTRY),
        "offsets into mask",
        "offsets into mask exceed 2^31 elements",
    ),
}  # fmt: skip
"""By name: kernel, case, the edit of its source, kind of failure, and what the message says."""


def judged(runner: Runner, target: str, case: Case, *relations: Any) -> Failure | None:
    (declaration,) = runner.declarations([target])
    return runner.judge(declaration, adapt_options(case, declaration.options), relations=relations).failure


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.by_day("int32_page_offset", "page_of_latent_vectors")
def test_planted_bug_is_found_by_nothing_else(name: str, runner: Runner, tmp_path: Path) -> None:
    """Kernels that break where caches are as large as in production would pass every other oracle."""
    kernel, case, edit, kind, words = PLANTED[name]
    mutant = Mutant(name, kernel, "", "D", "page_relocation", {}, (edit,))
    target = plant(mutant, tmp_path)
    others = [other for other, one in KNOWN.items() if one.is_relation and other != "page_relocation"]
    assert judged(runner, target, case, *others) is None
    before = runner.restarts  # an earlier test's kernel, or its dead zygote, may have cost the process before
    failure = judged(runner, target, case, "page_relocation")
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("page_relocation", kind)
    assert words in failure.message
    assert (failure.cause or name) in {"narrow_offsets", "narrow_page_ids", "narrow_between_2_31_and_2_32"}
    assert runner.restarts == before


def test_message_names_page_offset_and_limit(runner: Runner, tmp_path: Path) -> None:
    """The reader would have to work out which product overflows."""
    _, case, edit, *_ = PLANTED["int32_page_offset"]
    target = plant(Mutant("words", "paged_naive", "", "D", "page_relocation", {}, (edit,)), tmp_path)
    failure = judged(runner, target, case, "page_relocation")
    assert failure is not None
    assert "with page ids from 33554432 on, past 2^31 elements and 2^32 bytes" in failure.message
    assert "page 33554432 begins 2147483648 elements into k_cache, 4294967296 bytes" in failure.details
    assert any("64 bits before it is multiplied with a stride" in line for line in failure.details)


def test_a_narrow_offset_into_a_mask_is_told_where_all_is_contiguous(tmp_path: Path) -> None:
    """A mask has no stride that could be wide: its offsets grow with the sequences before, in any contract."""
    _, case, edit, *_ = PLANTED["row_of_a_mask"]
    target = plant(Mutant("mask", "masked_attention_naive", "", "D", "page_relocation", {}, (edit,)), tmp_path)
    (kernel,) = load_kernels(target)
    supports = msgspec.structs.replace(kernel.declaration.supports, strides="contiguous")
    failure = relocated(Kernel(kernel.function, msgspec.structs.replace(kernel.declaration, supports=supports)), case)
    assert failure is not None
    assert (failure.cause, failure.tensor, failure.remedy) == ("narrow_offsets", "mask", {})
    assert failure.details[-2:] == (
        "the table of sequence 3 begins 2147483647 elements into mask, and ends 2147483651 elements into it",
        "convert what mask_indptr holds, and an index before it is multiplied with a length, to 64 bits "
        "(`.to(tl.int64)`, `int64_t`)",
    )


def tables(inputs: Any) -> Iterator[tuple[int, int]]:
    """Of each sequence, query tokens times length, and where `mask_indptr` says that its table begins."""
    counts = inputs.cu_seqlens_q.diff().tolist()
    sizes = (count * length for count, length in zip(counts, inputs.seq_lens.tolist(), strict=True))
    return zip(sizes, inputs.mask_indptr.tolist()[:-1], strict=True)


def repacked(parts: Callable[[Any], list[torch.Tensor]]) -> Callable[[Any], None]:
    """The mask as the eager kernel wants it, in few bytes."""

    def change(inputs: Any) -> None:
        found = parts(inputs)
        starts = torch.tensor([0, *accumulate(map(len, found))], dtype=torch.int32)
        inputs.mask, inputs.mask_indptr = torch.cat(found), starts

    return change


def test_a_kernel_that_finds_far_tables_is_left_alone() -> None:
    """A false alarm on a kernel that heeds all that the contract says of a mask."""
    begun = []

    def by_starts(inputs: Any) -> list[torch.Tensor]:
        begun.append(max(start for _, start in tables(inputs)))
        return [inputs.mask[start : start + size] for size, start in tables(inputs)]

    assert relocated(wrapped("masked_attention_eager", repacked(by_starts), strides="contiguous"), TWO_ROWS) is None
    assert max(begun) == (1 << 31) - 1


def by_sizes(inputs: Any) -> list[torch.Tensor]:
    starts = accumulate((size for size, _ in tables(inputs)), initial=0)
    return [inputs.mask[start : start + size] for start, (size, _) in zip(starts, tables(inputs), strict=False)]


def by_ends(inputs: Any) -> list[torch.Tensor]:
    found = [inputs.mask[start:end] for start, end in pairwise(inputs.mask_indptr.tolist())]
    for part, (size, _) in zip(found, tables(inputs), strict=True):
        assert len(part) == size
    return found


@pytest.mark.parametrize("parts", [by_sizes, by_ends])
def test_who_knows_otherwise_where_tables_lie_has_no_narrow_offset(parts: Any) -> None:
    """Tables begin at 0 in every batch, and where the last one ends fits into 32 bits: who relies on that is right."""
    assert relocated(wrapped("masked_attention_eager", repacked(parts)), TWO_ROWS) is None


def test_a_dimension_that_callers_keep_contiguous_can_be_declared(runner: Runner, tmp_path: Path) -> None:
    """Whoever knows that no caller spreads the elements of a head would take the report for a false alarm."""
    edit = Edit("dense/dense_decode.py", "o_d = tl.arange(0, BLOCK_D).to(tl.int64)", "o_d = tl.arange(0, BLOCK_D)")
    target = plant(Mutant("dimension", "dense_naive", "", "D", "page_relocation", {}, (edit,)), tmp_path)
    failure = judged(runner, target, msgspec.structs.replace(DENSE, num_q_heads=1, num_kv_heads=1), "page_relocation")
    assert failure is not None
    assert (failure.kind, "q.stride(2) enlarged" in failure.message) == ("strides of q", True)
    assert failure.remedy == {"strides": "last_contiguous"}


def wrapped(name: str, changed: Any, **supports: Any) -> Kernel:
    """A bundled kernel that is given what ``changed`` makes of its inputs."""
    (kernel,) = load_kernels(name)
    declared = msgspec.structs.replace(kernel.declaration.supports, **supports)

    def function(inputs: Any, **options: Any) -> Any:
        changed(inputs)
        return kernel.function(inputs, **options)

    return Kernel(function, msgspec.structs.replace(kernel.declaration, supports=declared))


def narrow(inputs: Any) -> None:
    """Has K read at offsets of 32 bits."""
    k, table = inputs.k_cache, inputs.block_table
    pages, numbers = table.clamp(0, k.shape[0] - 1).unique(return_inverse=True)
    offsets = pages.long()[:, None, None, None] * k.stride(0)
    for axis in (1, 2, 3):
        index = torch.arange(k.shape[axis]).view([-1 if axis == one else 1 for one in range(4)])
        offsets = offsets + index * k.stride(axis)
    short = (offsets + (1 << 31)) % (1 << 32) - (1 << 31)
    breaks = (short.flatten().diff() != 1).nonzero()[:, 0] + 1
    runs = zip([0, *breaks.tolist()], [*breaks.tolist(), short.numel()], strict=True)
    places = short.flatten().tolist()
    read = b"".join(ctypes.string_at(k.data_ptr() + 2 * places[a], 2 * (b - a)) for a, b in runs)
    inputs.k_cache = torch.frombuffer(bytearray(read), dtype=k.dtype).view(short.shape)
    inputs.v_cache, inputs.block_table = inputs.v_cache[pages.long()], numbers.to(table.dtype)


def as_if_contiguous(*names: str) -> Any:
    """Offsets made of the shape alone."""

    def change(inputs: Any) -> None:
        for name in names:
            tensor = getattr(inputs, name)
            plain = torch.empty(tensor.shape, device="meta").stride()
            setattr(inputs, name, tensor.as_strided(tensor.shape, plain))

    return change


def relocated(kernel: Kernel, case: Case) -> Failure | None:
    return judge(
        kernel, adapt_options(case, kernel.declaration.options), device="cpu", relations=("page_relocation",)
    ).failure


def test_an_offset_that_overflows_within_a_page_is_narrow() -> None:
    """Of heads that are no power of two the page below the limit ends past it, and the id itself would be blamed."""
    case = msgspec.structs.replace(PAGED, head_size=72, block_size=2)
    failure = relocated(wrapped("paged_eager", narrow), case)
    assert failure is not None
    assert failure.cause == "narrow_offsets"


def narrow_tokens(inputs: Any) -> None:
    """Has K read at offsets of 64 bits, of which what goes by the token has 32."""
    k = inputs.k
    num_seqs, longest, num_heads, size = k.shape
    read = bytearray()
    for seq, token, head in product(range(num_seqs), range(longest), range(num_heads)):
        of_token = (token * k.stride(1) + (1 << 31)) % (1 << 32) - (1 << 31)
        at = seq * k.stride(0) + of_token + head * k.stride(2)
        read += ctypes.string_at(k.data_ptr() + k.element_size() * at, k.element_size() * size)
    inputs.k = torch.frombuffer(read, dtype=k.dtype).view(k.shape)


def test_a_narrow_part_of_a_wide_offset_is_narrow() -> None:
    """One index without a cast beside one that has it would be two findings, of which one says it is something else."""
    case = msgspec.structs.replace(DENSE, seq_lens=(4, 3), extra_rows=0)
    failure = relocated(wrapped("dense_eager", narrow_tokens, strides="serving"), case)
    assert failure is not None
    assert (failure.cause, failure.kind) == ("narrow_offsets", "strides of k")


def test_where_ids_and_offsets_reach_a_limit_together_either_may_be_narrow() -> None:
    """One narrow offset would be two findings, one of which says that page ids are cut short."""
    case = msgspec.structs.replace(PAGED, num_q_heads=4, num_kv_heads=4, head_size=256, block_size=32, seq_lens=(1,))
    failure = relocated(wrapped("paged_eager", narrow), case)
    assert failure is not None
    assert (failure.cause, failure.maybe) == ("", ("narrow_offsets",))
    assert "2^31 elements and 2^32 bytes and 2^16 page ids" in failure.message


def test_another_wrong_offset_is_not_called_narrow() -> None:
    """Whoever has wide offsets, and something else that is wrong far away, would be told to widen them."""

    def far_astray(inputs: Any) -> None:
        if int(inputs.block_table.max()) * inputs.k_cache.stride(0) >= 1 << 31:
            inputs.q = inputs.q + 1

    failure = relocated(wrapped("paged_eager", far_astray), PAGED)
    assert failure is not None
    assert (failure.cause, failure.maybe) == ("", ())
    assert any("does not explain it" in line for line in failure.details)


def test_a_mask_read_at_a_wrong_place_ends_no_process(runner: Runner, tmp_path: Path) -> None:
    """A wrong table of a mask would be a crash of its own, on a case that is right, since far away nothing lies."""
    start = "stride_indptr, mask=m_found, other=0).to(tl.int64)"
    edit = Edit("masked/masked_attention.py", start, f"{start} * 2")
    target = plant(Mutant("astray", "masked_attention_naive", "", "D", "page_relocation", {}, (edit,)), tmp_path)
    alone = msgspec.structs.replace(MASKED, seq_lens=(5,), query_lens=(1,), mask=Mask())
    assert judged(runner, target, alone, "page_relocation") is None


def test_an_ignored_stride_is_no_narrow_index() -> None:
    """The reader would be sent looking for indices of 32 bits in a kernel that has none."""

    def takes_heads_for_packed(inputs: Any) -> None:
        q = inputs.q
        inputs.q = q.as_strided(q.shape, (q.stride(0), q.shape[2], 1))

    case = msgspec.structs.replace(DENSE, num_q_heads=3, num_kv_heads=1, values=Values(seed=1))
    failure = relocated(wrapped("dense_eager", takes_heads_for_packed), case)
    assert failure is not None
    assert failure.kind == "ignored stride of q"
    assert "with q.stride(1) = 32 instead of 16" in failure.message
    assert not any("64" in line or "declares" in line for line in failure.details)
    assert any("with the strides of the tensor" in line for line in failure.details)


def test_page_ids_that_are_ignored_are_not_called_narrow() -> None:
    """Who takes pages for contiguous would be told to read their ids as 32 bits."""

    def takes_pages_for_contiguous(inputs: Any) -> None:
        ids = torch.arange(inputs.block_table.numel(), dtype=torch.int32).reshape(inputs.block_table.shape)
        inputs.block_table = ids

    case = msgspec.structs.replace(PAGED, seq_lens=(1,), pages=Pages())
    failure = relocated(wrapped("paged_eager", takes_pages_for_contiguous), case)
    assert failure is not None
    assert (failure.kind, failure.cause) == ("ignored page ids", "ignored_page_ids")
    assert "with page ids from 1 on" in failure.message
    assert failure.details[-1] == "read each page where its row of the block table says that it lies"


@pytest.mark.parametrize("name", ["table_by_shape", "sum_not_cleared"])
def test_what_is_kept_of_the_call_before_is_no_ignored_page_id(name: str) -> None:
    """Who keeps a plan, or a buffer that is not cleared, would be told to follow the block table."""
    (kernel,) = load_kernels(f"{Path(__file__).with_name('remembering_kernels.py')}:{name}")
    failure = relocated(kernel, msgspec.structs.replace(PAGED, seq_lens=(1,), pages=Pages()))
    assert failure is not None
    assert (failure.kind, failure.cause) == ("bits", "kept_between_calls")
    assert "with page ids from 1 on after the call on the case as it is" in failure.message


@pytest.mark.parametrize("strides", ["any", "serving"])
def test_what_a_gap_in_the_case_shows_is_left_to_others(strides: str) -> None:
    """One mistake would be two findings."""
    rows = as_if_contiguous("q")
    assert relocated(wrapped("dense_eager", rows, strides=strides), DENSE) is None
    gapped = msgspec.structs.replace(DENSE, strides={"q": "outer_gap"})
    kernel = wrapped("dense_eager", rows, strides=strides)
    verdict = judge(kernel, adapt_options(gapped, kernel.declaration.options), device="cpu")
    assert verdict.failure is not None
    assert verdict.failure.oracle != "page_relocation"


@pytest.mark.parametrize(
    ("name", "case", "tensors"),
    [
        ("merge_states_triton", MERGE, ("prefix_output", "suffix_output")),
        ("merge_states_eager", MERGE, ("prefix_output", "suffix_output")),
        ("dense_eager", DENSE, ("k", "v", "q")),
        ("paged_eager", PAGED, ("block_table", "seq_lens")),
    ],
)
def test_kernels_for_contiguous_tensors_are_not_blamed(name: str, case: Case, tensors: tuple[str, ...]) -> None:
    """Who declares nothing, and takes what engines hand over, would be told to have indices of 32 bits."""
    assert relocated(wrapped(name, as_if_contiguous(*tensors), strides="serving"), case) is None


def test_an_ignored_gap_between_pages_is_no_narrow_page_id() -> None:
    """With a single page in use, nothing but its far id would show it, and the reader be sent looking for 32 bits."""
    gapped = msgspec.structs.replace(PAGED, block_size=16, seq_lens=(5,), strides={"k_cache": "outer_gap"})
    caches = as_if_contiguous("k_cache")
    for strides in ("serving", "any"):
        kernel = wrapped("paged_eager", caches, strides=strides)
        assert relocated(kernel, gapped) is None
        assert relocated(kernel, PAGED) is None


def test_a_narrow_index_is_found_beside_an_ignored_stride(runner: Runner, tmp_path: Path) -> None:
    """A kernel that takes one tensor for contiguous could have any other overflow unseen."""
    edit = Edit("merge/merge_states.py", "i_token = tl.program_id(0).to(tl.int64)", "i_token = tl.program_id(0)")
    target = plant(Mutant("token", "merge_states_triton", "", "D", "page_relocation", {}, (edit,)), tmp_path)
    (kernel,) = load_kernels(target)
    supports = msgspec.structs.replace(kernel.declaration.supports, strides="serving")
    declaration = msgspec.structs.replace(kernel.declaration, supports=supports)

    def contiguous_prefix(inputs: Any, **options: Any) -> Any:
        as_if_contiguous("prefix_output")(inputs)
        return kernel.function(inputs, **options)

    failure = relocated(Kernel(contiguous_prefix, declaration), MERGE)
    assert failure is not None
    assert failure.kind in ("strides of suffix_output", "strides of output")
    assert any("64 bits before it is multiplied with a stride" in line for line in failure.details)


def test_death_below_the_cache_is_told_as_such(runner: Runner, tmp_path: Path) -> None:
    """A negative offset that nobody expected would be a crash that the case by itself does not show."""
    edit = Edit(WALK, K_OFFSET, f"{K_OFFSET}\n        o_kt = tl.where(o_kt >> 31, -(1 << 28), o_kt)")
    target = plant(Mutant("negative", "paged_naive", "", "D", "page_relocation", {}, (edit,)), tmp_path)
    failure = judged(runner, target, PAGED, "page_relocation")
    assert failure is not None
    assert (failure.oracle, failure.kind) == ("page_relocation", "read before k_cache")
    assert "268435456 elements (536870912 bytes) before its start" in failure.message


def test_kernel_that_copies_the_cache_is_not_blamed(runner: Runner, tmp_path: Path) -> None:
    """Sixteen gigabytes would be written, and the process end for want of memory."""
    checks = "    call = prepare_paged("
    edit = Edit("paged/launch.py", checks, f"    k_cache = k_cache.clone()\n{checks}")
    target = plant(Mutant("copies", "paged_naive", "", "D", "page_relocation", {}, (edit,)), tmp_path)
    assert judged(runner, target, PAGED, "page_relocation") is None


def test_of_a_copied_cache_nothing_is_said_of_far_pages() -> None:
    """A narrow offset behind a wrapper that copies would be said to have been looked for."""

    def stack(inputs: Any) -> None:
        torch.stack((inputs.k_cache, inputs.v_cache), 2)

    asked = ("page_relocation",)
    for change, related, untried in ((lambda inputs: None, asked, ()), (stack, (), asked)):
        kernel = wrapped("paged_eager", change)
        case = adapt_options(PAGED, kernel.declaration.options)
        verdict = judge(kernel, case, device="cpu", relations=("page_relocation",))
        assert (verdict.failure, verdict.related, verdict.untried) == (None, related, untried)
        without_pages = msgspec.structs.replace(case, seq_lens=(0,))
        verdict = judge(kernel, without_pages, device="cpu", relations=("page_relocation",))
        assert (verdict.failure, verdict.related, verdict.untried) == (None, (), ())


@pytest.mark.parametrize("layout", ["NHD", "interleaved"])
def test_a_copy_of_a_far_cache_takes_no_gigabytes(layout: Layout) -> None:
    """A kernel that reshapes an interleaved cache would outgrow its memory limit, and be told to leak."""
    copied = []

    def copy(inputs: Any) -> None:
        copied.append(inputs.k_cache.clone().nbytes)

    assert relocated(wrapped("paged_eager", copy), msgspec.structs.replace(PAGED, layout=layout)) is None
    assert max(copied) < 1 << 30


@pytest.mark.parametrize("changes", OTHER_LAYOUTS)
@pytest.mark.by_day("changes0", "changes2", "changes4")
def test_all_layouts_and_strides(changes: dict[str, Any], runner: Runner, tmp_path: Path) -> None:
    """A layout whose pages do not go where they should would hide the bug, or blame the right kernel."""
    case = msgspec.structs.replace(PAGED, **changes)
    target = plant(
        Mutant("layouts", "paged_naive", "", "D", "page_relocation", {}, (PLANTED["int32_page_offset"][2],)), tmp_path
    )
    failure = judged(runner, target, case, "page_relocation")
    assert failure is not None
    assert failure.kind == "page ids"
    for kernel in ("paged_naive", "paged_eager"):
        assert judged(runner, kernel, case, "page_relocation") is None


@pytest.mark.parametrize(("case", "kernels"), RIGHT, ids=lambda value: value.problem if isinstance(value, Case) else "")
def test_right_kernels_are_left_alone(case: Case, kernels: list[str], runner: Runner) -> None:
    """A false alarm on a kernel that can do it."""
    for kernel in kernels:
        assert judged(runner, kernel, case, "page_relocation") is None


def test_memory_stays_small(runner: Runner) -> None:
    """A campaign on a small machine would run out of memory, or take this for a leak."""
    judged(runner, "paged_eager", PAGED, "page_relocation")
    before = runner.resident_bytes
    for seed in range(10):
        pages = msgspec.structs.replace(PAGED.pages, seed=seed)
        judged(runner, "paged_eager", msgspec.structs.replace(PAGED, pages=pages), "page_relocation")
    assert runner.resident_bytes - before < 8 << 20


def test_kernel_that_promises_no_bits_is_held_to_its_bounds(tmp_path: Path) -> None:
    """Atomics would excuse a kernel from right addresses."""
    mutant = Mutant("loose", "paged_naive", "", "D", "page_relocation", {}, (PLANTED["int32_page_offset"][2],))
    for target, kind in ((plant(mutant, tmp_path), "page ids"), ("paged_naive", None)):
        (kernel,) = load_kernels(target)
        supports = msgspec.structs.replace(kernel.declaration.supports, deterministic=False)
        loose = Kernel(kernel.function, msgspec.structs.replace(kernel.declaration, supports=supports))
        case = adapt_options(PAGED, kernel.declaration.options)
        failure = judge(loose, case, device="cpu", relations=("page_relocation",)).failure
        assert (failure and failure.kind) == kind


def test_other_strides_may_round_otherwise() -> None:
    """A right kernel would be blamed for what its compiler fuses where a stride is no constant."""
    (kernel,) = load_kernels("dense_eager")

    def fused_otherwise(inputs: Any, **options: Any) -> Any:
        out, lse = kernel.function(inputs, **options)
        return (out if inputs.q.stride(-1) == 1 else out * (1 + 2**-23)), lse

    case = msgspec.structs.replace(adapt_options(DENSE, kernel.declaration.options), dtype="float32")
    other = Kernel(fused_otherwise, kernel.declaration)
    assert judge(other, case, device="cpu", relations=("page_relocation",)).failure is None


def test_silent_where_addresses_count_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that allows no overcommitment would fail every case."""

    def refuse(nbytes: int) -> None:
        raise SparseUnavailable(f"no {nbytes} bytes")

    monkeypatch.setattr("attnfuzz.memory.sparse.reserve", refuse)
    (kernel,) = load_kernels("paged_eager")
    assert judge(kernel, PAGED, device="cpu", relations=("page_relocation",)).failure is None
