"""Kernels of `attnfuzz.families.TurboDecode` and `TurboWrite` with a bug each, of the kinds that such caches invite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import attnfuzz
from attnfuzz.families import TurboDecode, TurboWrite
from attnfuzz.families import turbo_kernels as bundled
from attnfuzz.families.turbo import codes_of, packed_codes, row_parts, split_row


def _decode(inputs: Any, bug: str) -> None:
    """The bundled kernel, on what it is handed wrongly."""
    changed = SimpleNamespace(**vars(inputs))
    keys, length, values, others, rest = split_row(inputs.cache_rows, inputs)
    if bug == "high_first":
        values = values >> 4 | values << 4 if inputs.value_bits == 4 else values
    if bug == "bits_of_one_byte" and inputs.value_bits == 3:  # codes 2 and 5 of eight lie in two bytes each
        values = values.clone()
        values[..., 1::3] &= ~1
        values[..., 2::3] &= ~3
    if bug == "step_is_least":
        others = others.roll(2, -1)
    if bug == "length_of_head_0":
        length = length[:, :, :1].expand_as(length)
    if bug == "unpadded":  # rows are taken to lie side by side
        heads, size = inputs.cache_rows.shape[2], sum(row_parts(inputs)[:4])
        flat = inputs.cache_rows.flatten(2)[..., : size * heads].unflatten(-1, (heads, size))
        keys, length, values, others, _ = split_row(flat, inputs)
    changed.cache_rows = torch.cat((keys, length, values, others, rest), -1)
    if inputs.key_bits < 8 and bug in ("turned_back", "not_turned"):
        changed.turn = inputs.turn.mT if bug == "turned_back" else torch.eye(inputs.head_size)
    if bug == "never_corrected":
        changed.corrected = False
    if bug == "mirrored" and inputs.key_bits < 8:
        changed.centroids = inputs.centroids.flip(0)
    bundled.turbo_decode_eager.function(changed)


def _write(inputs: Any, bug: str) -> None:
    changed = SimpleNamespace(**vars(inputs))
    before = inputs.cache_rows.clone()
    parts = row_parts(inputs)
    if bug == "minus_one":
        last = len(before) * inputs.block_size - 1
        changed.slot_mapping = torch.where(inputs.slot_mapping < 0, last, inputs.slot_mapping)
    if bug == "values_are_keys":
        changed.value = inputs.key
    if bug == "midpoints_are_shifted" and inputs.key_bits < 8:
        changed.midpoints = inputs.midpoints + 0.02
    if bug == "not_turned" and inputs.key_bits < 8:
        changed.turn = torch.eye(inputs.head_size)
    bundled.turbo_write_eager.function(changed)
    written = (inputs.cache_rows != before).any(-1, keepdim=True)
    if bug == "whole_rows" and parts[-1]:
        inputs.cache_rows[..., -1:] = torch.where(written, 0, inputs.cache_rows[..., -1:])
    if bug == "length_in_bfloat16" and inputs.key_bits < 8:
        place = slice(parts[0], parts[0] + 2)
        length = inputs.cache_rows[..., place].contiguous().view(torch.float16).bfloat16().half().view(torch.uint8)
        inputs.cache_rows[..., place] = torch.where(written, length, inputs.cache_rows[..., place])
    if bug == "codes_up_to_six" and inputs.value_bits == 3:
        codes = split_row(inputs.cache_rows, inputs)[2]  # a view
        lower = packed_codes(codes_of(codes, 3, inputs.head_size).clamp(max=6), 3)
        codes.copy_(torch.where(written, lower, codes))


def _planted(name: str) -> Any:
    kind, _, bug = name.partition("_")
    run, problem = (_decode, TurboDecode()) if kind == "decode" else (_write, TurboWrite())

    def planted(inputs: Any) -> None:
        run(inputs, bug)

    planted.__name__ = planted.__qualname__ = name
    return attnfuzz.kernel(problem)(planted)


PLANTED = (
    "decode_high_first", "decode_bits_of_one_byte", "decode_step_is_least", "decode_length_of_head_0",
    "decode_unpadded", "decode_turned_back", "decode_not_turned", "decode_never_corrected", "decode_mirrored",
    "write_minus_one", "write_values_are_keys", "write_midpoints_are_shifted", "write_not_turned", "write_whole_rows",
    "write_length_in_bfloat16", "write_codes_up_to_six",
)  # fmt: skip
for _name in PLANTED:
    globals()[_name] = _planted(_name)
