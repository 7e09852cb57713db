"""Windows, soft caps, ALiBi and sinks of the paged kernels: the definition, empty rows, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnfuzz.kernels import eager
from attnfuzz.kernels.paged import launch as launch_paged
from tests.kernels.arguments import absent_sinks, made, sinks, slopes

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 16, 4
LENGTHS = (0, 1, 7, 33)
SPLIT = {"num_splits": 3}


def inputs() -> dict[str, Any]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    pages = [-(-length // PAGE) for length in LENGTHS]
    table = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
    for seq, count in enumerate(pages):
        table[seq, :count] = torch.arange(sum(pages[:seq]), sum(pages[: seq + 1]))
    cache = (sum(pages), PAGE, KV_HEADS, SIZE)
    return {
        "q": 2 * torch.randn(len(LENGTHS), HEADS, SIZE, generator=generator),
        "k_cache": torch.randn(cache, generator=generator),
        "v_cache": torch.randn(cache, generator=generator),
        "block_table": table,
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
        "scale": 0.5,
        "block_size": PAGE,
        "layout": "NHD",
    }


def by_definition(given: dict[str, Any], seq: int, head: int, **variant: Any) -> tuple[Tensor, Tensor]:
    length = LENGTHS[seq]
    tokens = given["block_table"][seq].long()
    k, v = (given[name][tokens].flatten(0, 1)[:length, head // 2].double() for name in ("k_cache", "v_cache"))
    scores = given["scale"] * (k @ given["q"][seq, head].double())
    distance = torch.arange(length) - (length - 1)
    if "soft_cap" in variant:
        scores = variant["soft_cap"] * torch.tanh(scores / variant["soft_cap"])
    if "alibi_slopes" in variant:
        scores = scores + variant["alibi_slopes"][head].double() * distance
    seen = distance > -variant.get("window", 1 << 30)
    scores, v = scores[seen], v[seen]
    if "sinks" in variant and variant["sinks"][head].isfinite():
        scores = torch.cat([scores, variant["sinks"][head : head + 1].double()])
        v = torch.cat([v, v.new_zeros(1, SIZE)])
    if not len(scores):
        return torch.zeros(SIZE, dtype=torch.float64), torch.tensor(-torch.inf, dtype=torch.float64)
    return scores.softmax(0) @ v, scores.logsumexp(0)


VARIANTS: list[dict[str, Any]] = [
    {"window": 1},
    {"window": 8, "soft_cap": 1.5},
    {"window": 100, "alibi_slopes": slopes},
    {"soft_cap": 0.25, "sinks": sinks},
    {"window": 5, "alibi_slopes": slopes, "sinks": sinks},
    {"sinks": lambda: sinks().repeat_interleave(2)[::2]},
    {"sinks": absent_sinks},
    {"alibi_slopes": lambda: slopes().repeat_interleave(3)[1::3]},
]


@pytest.mark.by_day
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "+".join(variant))
@pytest.mark.parametrize(
    ("kernel", "more"),
    [
        (launch_paged.paged_decode, {"tile": 16}),
        (launch_paged.split_paged_decode, {**SPLIT, "tile": 16}),
        (eager.paged_decode, {}),
        (eager.split_paged_decode, SPLIT),
    ],
    ids=["triton", "triton split", "eager", "eager split"],
)
def test_variants_are_their_definition(kernel: Any, more: dict[str, Any], variant: dict[str, Any]) -> None:
    """The kernels that variants are demonstrated on would be wrong themselves, empty rows and strides included."""
    given, asked = inputs(), made(variant)
    out, lse = kernel(**given, **more, **asked)
    for seq in range(len(LENGTHS)):
        for head in range(HEADS):
            expected_out, expected_lse = by_definition(given, seq, head, **asked)
            torch.testing.assert_close(out[seq, head].double(), expected_out, rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(lse[seq, head].double(), expected_lse, rtol=2e-5, atol=2e-5)


def test_keys_outside_the_window_are_not_even_read() -> None:
    """A cache that frees pages behind the window would have its NaN read back."""
    given = inputs()
    right = launch_paged.paged_decode(**given, window=5)
    for name in ("k_cache", "v_cache"):
        given[name][given["block_table"][3, :7].long()] = torch.nan  # tokens 0 to 27 of 33
    runs: list[tuple[Any, dict[str, Any]]] = [(launch_paged.paged_decode, {}), (launch_paged.split_paged_decode, SPLIT)]
    for kernel, more in runs:
        out, lse = kernel(**given, window=5, **more)
        torch.testing.assert_close(out, right[0])
        torch.testing.assert_close(lse, right[1])


@pytest.mark.parametrize("module", [launch_paged, eager], ids=["triton", "eager"])
@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ({"window": 0}, "window=0 must be an integer of at least 1"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be a finite number above 0"),
        ({"soft_cap": 1.0, "alibi_slopes": slopes}, "exclude each other"),
        ({"alibi_slopes": lambda: slopes()[:3]}, r"alibi_slopes.shape=\[3\] must be \[num_q_heads\]"),
        ({"sinks": lambda: sinks().half()}, "sinks.dtype=torch.float16 must be torch.float32"),
    ],
    ids=["window", "cap", "cap with slopes", "too few slopes", "half sinks"],
)
def test_variants_that_make_no_sense_are_refused(module: Any, variant: dict[str, Any], words: str) -> None:
    """A short tensor of slopes would be read past its end on the device."""
    with pytest.raises(ValueError, match=words):
        module.paged_decode(**inputs(), **made(variant))
