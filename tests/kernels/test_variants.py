"""Windows, soft caps, ALiBi and sinks in all kernels of paged caches: the definition, empty rows, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.kernels import eager
from attnfuzz.kernels.grouped.launch import grouped_decode, plan_grouped
from attnfuzz.kernels.paged.launch import paged_decode, split_paged_decode
from attnfuzz.kernels.paged.launch_partitioned import paged_attention_v1, paged_attention_v2
from attnfuzz.kernels.q_block.launch import q_block_attention
from tests.kernels.arguments import absent_sinks, made, sinks, slopes

HEADS, KV_HEADS, SIZE, PAGE, SCALE = 4, 2, 16, 4, 0.5
DECODE = ((1, 0), (1, 7), (1, 70))
MIXED = ((1, 0), (0, 5), (5, 7), (18, 18), (3, 70))
"""Query tokens and length of each sequence."""


def counters() -> Tensor:
    return torch.zeros(len(DECODE), HEADS, dtype=torch.int32)


VARIANTS: dict[str, dict[str, Any]] = {
    "window of one": {"window": 1, "sinks": sinks},
    "window of a tile": {"window": 16, "soft_cap": 1.5},
    "window of several tiles": {"window": 37, "alibi_slopes": lambda: slopes().repeat_interleave(3)[1::3]},
    "cap": {"soft_cap": 0.25, "sinks": lambda: sinks().repeat_interleave(2)[::2]},
    "absent sink": {"sinks": absent_sinks},
}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "q_block": (q_block_attention, {"block_m": 16, "tile": 16, "num_segments": 1}),
    "segments": (q_block_attention, {"block_m": 32, "tile": 16, "num_segments": 2, "static_grid": True}),
    "grouped": (grouped_decode, {}),
    "grouped splits": (grouped_decode, {"tile": 16, "num_splits": 3}),
    "grouped by the last": (grouped_decode, {"tile": 16, "num_splits": 3, "counters": counters}),
    "v1": (paged_attention_v1, {}),
    "v2": (paged_attention_v2, {"partition_size": 12}),
    "paged": (paged_decode, {"tile": 16}),
    "split": (split_paged_decode, {"num_splits": 3, "tile": 16}),
    "eager": (eager.paged_decode, {}),
    "eager split": (eager.split_paged_decode, {"num_splits": 3}),
}
IN_FLOAT32 = (paged_decode, split_paged_decode, eager.paged_decode, eager.split_paged_decode)


def inputs(kernel: Any) -> tuple[dict[str, Any], list[Tensor], list[Tensor]]:
    """What ``kernel`` takes, and the keys and values ``[seq_len, KV_HEADS, SIZE]`` of each sequence."""
    seqs = MIXED if kernel is q_block_attention else DECODE
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    pages = [-(-length // PAGE) for _, length in seqs]
    table = torch.full((len(seqs), max(pages) + 1), 2**31 - 1, dtype=torch.int32)
    for seq, count in enumerate(pages):
        table[seq, :count] = torch.arange(sum(pages[:seq]), sum(pages[: seq + 1])).flip(0)
    cache = (2, sum(pages), PAGE, KV_HEADS, SIZE)
    dtype = torch.float32 if kernel in IN_FLOAT32 else torch.float16
    k, v = torch.randn(cache, generator=generator).to(dtype)
    args: dict[str, Any] = {
        "q": 2 * torch.randn(sum(n for n, _ in seqs), HEADS, SIZE, generator=generator).to(dtype),
        "block_table": table,
        "seq_lens": torch.tensor([length for _, length in seqs], dtype=torch.int32),
        "scale": SCALE,
        "block_size": PAGE,
    }
    tokens = [(table[seq, : pages[seq]].long(), length) for seq, (_, length) in enumerate(seqs)]
    if kernel in (paged_attention_v1, paged_attention_v2):
        args["k_cache"] = k.view(-1, PAGE, KV_HEADS, 2, 8).permute(0, 2, 3, 1, 4).contiguous()
        args["v_cache"] = v.permute(0, 2, 3, 1).contiguous()
    else:
        args |= {"k_cache": k, "v_cache": v, "layout": "NHD"}
    if kernel is q_block_attention:
        starts = torch.tensor([0, *(n for n, _ in seqs)]).cumsum(0)
        args |= {"cu_seqlens_q": starts.int(), "max_query_len": 18, "max_seq_len": 70}
    gathered = [[cache[ids].flatten(0, 1)[:length].double() for ids, length in tokens] for cache in (k, v)]
    return args, gathered[0], gathered[1]


def by_definition(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], seqs: Sequence[tuple[int, int]], **variant: Any
) -> tuple[Tensor, Tensor]:
    """In float64, one query token and head at a time."""
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for (num_queries, length), k, v in zip(seqs, keys, values, strict=True):
        for query in range(num_queries):
            distance = torch.arange(length) - (length - num_queries + query)
            seen = (distance <= 0) & (distance > -variant.get("window", 1 << 30))
            for head in range(HEADS):
                scores = SCALE * (k[seen, head // 2] @ q[len(outs) // HEADS, head].double())
                if "soft_cap" in variant:
                    scores = variant["soft_cap"] * torch.tanh(scores / variant["soft_cap"])
                if "alibi_slopes" in variant:
                    scores = scores + variant["alibi_slopes"][head].double() * distance[seen]
                sink = variant["sinks"][head : head + 1].double() if "sinks" in variant else scores[:0]
                weights = torch.cat([scores, sink])
                lses.append(weights.logsumexp(0) if len(weights) else torch.tensor(-torch.inf, dtype=torch.float64))
                outs.append((scores - lses[-1]).exp() @ v[seen, head // 2])
    return torch.stack(outs).view(-1, HEADS, SIZE), torch.stack(lses).view(-1, HEADS)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.by_day("*-window of a tile", "q_block-*")
def test_variants_are_their_definition(name: str, variant: str) -> None:
    """A token at the edge of a window, tile, split or block would be lost, or a sink counted for each of them."""
    kernel, options = KERNELS[name]
    args, keys, values = inputs(kernel)
    asked = made(VARIANTS[variant])
    out, lse = kernel(**args, **made(options), **asked)
    seqs = MIXED if kernel is q_block_attention else DECODE
    expected_out, expected_lse = by_definition(args["q"], keys, values, seqs, **asked)
    out_off, lse_off = (2e-5, 2e-5) if kernel in IN_FLOAT32 else (2.0**-9, 5e-6)
    torch.testing.assert_close(out.double(), expected_out, rtol=out_off, atol=out_off)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=lse_off, atol=lse_off)


@pytest.mark.night
@pytest.mark.parametrize("num_segments", [1, 2])
def test_each_head_has_its_own_numbers_in_a_group_of_several_programs(num_segments: int) -> None:
    """The last program of a group, which is not full, would take slopes and sinks of other heads, or spoil a row."""
    args, _, _ = inputs(q_block_attention)
    args |= {"q": args["q"][:, :1].repeat(1, 2 * 17, 1)}
    numbers: dict[str, Any] = {"alibi_slopes": torch.arange(34.0) / 64, "sinks": torch.arange(34.0).flip(0) - 17}
    spread = q_block_attention(**args, **numbers, block_m=16, tile=16, num_segments=num_segments)
    whole = q_block_attention(**args, **numbers, block_m=32, tile=16, num_segments=num_segments)
    torch.testing.assert_close(spread, whole, rtol=2.0**-9, atol=2.0**-9)
    assert len({round(number, 4) for number in whole[1][-1].tolist()}) == 34


@pytest.mark.parametrize("name", [name for name in KERNELS if not name.startswith("eager")])
def test_what_lies_before_all_windows_is_not_even_read(name: str) -> None:
    """A cache that frees pages behind the window would have its NaN read back, and their ids followed."""
    kernel, options = KERNELS[name]
    args, _, _ = inputs(kernel)
    right = kernel(**args, window=5, **made(options))
    for seq, (num_queries, length) in enumerate(MIXED if kernel is q_block_attention else DECODE):
        free = max(0, length - num_queries + 1 - 5) // PAGE
        ids = args["block_table"][seq, :free].long()
        args["k_cache"][ids] = torch.nan
        args["v_cache"][ids] = torch.nan
        args["block_table"][seq, :free] = 2**31 - 1
    out, lse = kernel(**args, window=5, **made(options))
    assert torch.equal(out, right[0])
    assert torch.equal(lse, right[1])


@pytest.mark.parametrize("name", ["q_block", "grouped", "v1", "v2", "paged", "eager"])
@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ({"window": 0}, "window=0 must be an integer of at least 1"),
        ({"soft_cap": -1.0}, "soft_cap=-1.0 must be a finite number above 0"),
        ({"soft_cap": 1.0, "alibi_slopes": slopes}, "exclude each other"),
        ({"sinks": lambda: sinks()[:3]}, r"sinks.shape=\[3\] must be \[num_q_heads\]"),
        ({"alibi_slopes": lambda: slopes().half()}, "alibi_slopes.dtype=torch.float16 must be torch.float32"),
    ],
    ids=["window", "cap", "cap with slopes", "sinks", "slopes"],
)
def test_variants_that_make_no_sense_are_refused(name: str, variant: dict[str, Any], words: str) -> None:
    """A short tensor of sinks would be read past its end on the device."""
    kernel, options = KERNELS[name]
    with pytest.raises(ValueError, match=words):
        kernel(**inputs(kernel)[0], **made(options), **made(variant))


def test_a_window_is_planned_for_and_not_the_length() -> None:
    """Programs would be launched for tokens that no query sees, and their states combined."""
    assert plan_grouped(1, 8, 512, 132, 128).num_splits < plan_grouped(1, 8, 32768, 132, 128).num_splits
