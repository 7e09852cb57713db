"""The vendor-style suites stay runnable: one small configuration of each, and the command that compares them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from attnfuzz.mutation.killers import Command
from tests.quality.mutants import mutant_named
from tests.quality.planting import lay_over
from tests.vendor import flash_attention_style, flashinfer_style, sglang_style, vllm_style

HERE = Path(__file__).parent


def test_vllm_style() -> None:
    """The suite would no longer fit the kernels' wrappers."""
    vllm_style.test_unified_attention([5, 18], (2, 1), 16, 8, segments=3)
    vllm_style.test_flash_attn_with_paged_kv(True, [5, 18], (2, 1), 40, 8)
    vllm_style.test_paged_attention("v2", (2, 1), 16, 16, torch.float16, 20)
    vllm_style.test_decode_attention(1, 17, (2, 1), 16, 16)
    vllm_style.test_merge_attn_states(2, 2, 16, torch.float32)


def test_flashinfer_style() -> None:
    """The suite would no longer fit the kernels' wrappers."""
    flashinfer_style.test_batch_decode_with_paged_kv_cache("splits", 2, 17, 16, 2, 1, 16)
    flashinfer_style.test_decode_lse_with_an_empty_request(1, 16)
    flashinfer_style.test_shared_prefix(1, 3, 16, 1, 16)
    flashinfer_style.test_merge_state(2, 2, 16)
    flashinfer_style.test_merge_states(1, 1, 3)
    flashinfer_style.test_merge_state_against_torch((2, 1, 16))
    flashinfer_style.test_batch_invariance(5, 3, 8, 2)
    flashinfer_style.test_ragged_shuffled_pages("whole", 2, 16, (1, 2), 17, True)
    flashinfer_style.test_nan_in_unused_slots("splits", 3, 4)


def test_sglang_style() -> None:
    """The suite would no longer fit the kernels' wrappers."""
    sglang_style.test_decode_attention(1, (2, 1), 13, 5, 4)
    sglang_style.test_grouped_decode_attention(5, 1, (2, 1), 13)
    sglang_style.test_merge_state_v2(2, 2, 16, torch.float16)


@pytest.mark.parametrize("page_size", [None, 4])
def test_flash_attention_style(page_size: int | None) -> None:
    """The suite would no longer fit the kernels' wrappers."""
    flash_attention_style.test_flash_attn_kvcache(0, "mqa", page_size, 32, 9)
    flash_attention_style.test_flash_attn3_kvcache(torch.float16, "mqa", page_size, 32, 9)
    flash_attention_style.test_flash_attn_combine(3, 1, 16, torch.float32)
    flash_attention_style.test_flash_attn_race_condition(16, 9, 1)


@pytest.mark.night
def test_a_suite_runs_on_mutants(tmp_path: Path) -> None:
    """Every suite would be said to find nothing, because it ran on the correct kernels."""
    mutant = mutant_named("split_length_rounded_down")
    test = f"{HERE / 'sglang_style.py'}::test_decode_attention"
    command = Command(f"{sys.executable} -m pytest -x -q -p no:cacheprovider {test}")
    assert command.run(lay_over(mutant, tmp_path)).ended == "failed"
