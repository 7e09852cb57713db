"""The declarations of the bundled kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from attnfuzz.cases.supported import why_unsupported
from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.judging.judge import judge
from attnfuzz.kernels.grouped import launch as launch_grouped
from attnfuzz.kernels.latent import launch as launch_latent
from attnfuzz.kernels.paged import launch as launch_paged
from attnfuzz.problems.cases import (
    CASE_TYPES,
    Case,
    Problem,
    case_from_builtins,
)
from attnfuzz.problems.supports import Supports

NAMES = {
    "dense_naive": "dense_decode",
    "dense_eager": "dense_decode",
    "paged_simple": "paged_decode",
    "paged_naive": "paged_decode",
    "paged_split_k": "paged_decode",
    "paged_split_k_auto": "paged_decode",
    "paged_grouped": "paged_decode",
    "paged_grouped_auto": "paged_decode",
    "paged_attention_v1": "paged_decode",
    "paged_attention_v2": "paged_decode",
    "paged_eager": "paged_decode",
    "paged_split_k_eager": "paged_decode",
    "split_k_partials": "split_decode",
    "split_k_partials_eager": "split_decode",
    "paged_attention_naive": "paged_attention",
    "paged_attention_auto": "paged_attention",
    "paged_attention_mixed": "paged_attention",
    "paged_attention_eager": "paged_attention",
    "paged_attention_q_block": "paged_attention",
    "paged_attention_segments": "paged_attention",
    "paged_attention_simple": "paged_attention",
    "paged_attention_static": "paged_attention",
    "masked_attention_eager": "masked_attention",
    "masked_attention_naive": "masked_attention",
    "latent_eager": "latent_decode",
    "latent_grouped": "latent_decode",
    "latent_grouped_auto": "latent_decode",
    "merge_states_triton": "merge_states",
    "merge_states_triton_th": "merge_states",
    "merge_states_wide": "merge_states",
    "merge_states_wide_th": "merge_states",
    "merge_states_in_place": "merge_states",
    "merge_many_th": "merge_states",
    "merge_states_eager": "merge_states",
}
ATTENTION = {"num_q_heads": 3, "num_kv_heads": 1, "head_size": 16, "seq_lens": [0, 5], "scale": 0.25}
PAGED = {**ATTENTION, "block_size": 3, "pages": {"extra_columns": 1, "padding": "garbage"}}
CASES: dict[Problem, dict[str, object]] = {
    "dense_decode": ATTENTION,
    "paged_decode": PAGED,
    "split_decode": {**PAGED, "num_splits": 4},
    "paged_attention": {**PAGED, "seq_lens": [0, 5, 4, 3], "query_lens": [0, 2, 0, 3]},
    "masked_attention": {
        **PAGED,
        "seq_lens": [0, 5, 4, 3],
        "query_lens": [0, 2, 0, 3],
        "mask": {"kind": "bits", "seqs": [[5, 65535]]},
    },
    "latent_decode": {
        "num_q_heads": 3,
        "head_size": 24,
        "v_head_size": 16,
        "seq_lens": [0, 5],
        "scale": 0.25,
        "block_size": 3,
        "pages": {"extra_columns": 1, "padding": "garbage"},
    },
    "merge_states": {
        "num_q_heads": 2,
        "head_size": 13,
        "num_tokens": 3,
        "lse_pairs": [["finite", "finite"], ["+inf", "-inf"], ["low", "+inf"]],
    },
}
KERNELS = load_kernels("*")
SIMPLE = {"paged_attention_simple", "paged_simple"}
"""Kernels that are about the algorithm, and take contiguous tensors only."""
ONE_LAYOUT = {*SIMPLE, "paged_attention_v1", "paged_attention_v2"}
"""Kernels that are about one layout of the cache."""
BY_SHAPE = {
    "latent_grouped_auto",
    "paged_attention_auto",
    "paged_attention_mixed",
    "paged_grouped_auto",
    "paged_split_k_auto",
}
"""Kernels that cut a sequence by the shapes of its batch, on which the order of additions then depends."""


def small_case(kernel: Kernel, choice: int) -> Case:
    """A tiny case with an empty part, under one choice of each option."""
    declared = kernel.declaration
    fields = {
        **CASES[declared.problem],
        "options": {name: choices[choice] for name, choices in declared.options.items()},
    }
    if declared.problem == "merge_states":
        fields["lse_layout"] = declared.supports.lse_layout
    if declared.name in ONE_LAYOUT:
        fields["layout"] = declared.supports.layouts[0]
    return case_from_builtins(declared.problem, fields)


def test_names_and_problems() -> None:
    """A bundled kernel would be missing, or known by another name than the documentation and saved cases use."""
    assert {kernel.declaration.name: kernel.declaration.problem for kernel in KERNELS} == NAMES


@pytest.mark.parametrize("choice", [0, -1])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.declaration.name)
@pytest.mark.by_day("*--1")
def test_runs_on_its_inputs(kernel: Kernel, choice: int) -> None:
    """A declaration would pass inputs in the wrong order, or promise what its kernel does not keep."""
    verdict = judge(kernel, small_case(kernel, choice), device=torch.get_default_device().type)
    assert verdict.failure is None
    assert 0.0 < verdict.error_ratio <= 1.0


CHANGES: dict[str, Callable[[Case], dict[str, object]]] = {
    "strides": lambda case: {"strides": dict.fromkeys(CASE_TYPES[case.problem].tensor_names, "every_other")},
    "a head that is no power of two": lambda case: {"head_size": 40},
    "groups of five heads": lambda case: {
        "num_q_heads": 10,
        "num_kv_heads": 1 if case.problem == "latent_decode" else 2,
    },
    "bfloat16": lambda case: {"dtype": "bfloat16"},
    "float32": lambda case: {"dtype": "float32"},
}


@pytest.mark.by_day
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.declaration.name)
def test_what_it_takes_makes_no_difference(kernel: Kernel, change: str) -> None:
    """Views would be read or written as if they were contiguous, padding columns, or another group's KV head."""
    declared, case = kernel.declaration, small_case(kernel, -1)
    fields = {name: value for name, value in CHANGES[change](case).items() if name in case.__struct_fields__}
    other = msgspec.structs.replace(case, **fields)
    if why_unsupported(declared.supports, declared.options, other) is None:
        verdict = judge(kernel, other, device=torch.get_default_device().type, run_twice=False, relations=())
        assert verdict.failure is None


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.declaration.name)
def test_everything_is_supported(kernel: Kernel) -> None:
    """Part of a problem would silently never be drawn for a kernel that handles it."""
    supports, unlimited = kernel.declaration.supports, Supports(strides="any", empty_state_outputs="anything")
    limits = (
        "dtypes",
        "head_sizes",
        "block_sizes",
        "layouts",
        "gqa_ratios",
        "max_seq_len",
        "strides",
        "empty_sequences",
        "empty_state_lse",
        *(["empty_state_outputs"] if kernel.declaration.problem == "merge_states" else []),
    )
    limited = ["layouts"] if kernel.declaration.name in ONE_LAYOUT else []
    limited += ["strides"] if kernel.declaration.name in SIMPLE else []
    if kernel.declaration.name.startswith("paged_grouped"):
        limited = ["dtypes"]  # matrix units multiply float32 in TF32 only
    if kernel.declaration.problem == "latent_decode":  # which has one layout, and as many query heads as models have
        limited = [
            *(["dtypes"] if kernel.declaration.name.startswith("latent_grouped") else []),
            "layouts",
            "gqa_ratios",
        ]
    assert [name for name in limits if getattr(supports, name) != getattr(unlimited, name)] == limited


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.declaration.name)
def test_rows_are_computed_alone_and_without_the_host_unless_they_are_padded_together(kernel: Kernel) -> None:
    """A promise would be tested that padded rows cannot keep, or not tested where it is kept."""
    is_padded = kernel.declaration.name.endswith("eager") and kernel.declaration.problem != "merge_states"
    depends_on_its_batch = is_padded or kernel.declaration.name in BY_SHAPE
    assert kernel.declaration.supports.batch_invariant is not depends_on_its_batch
    is_masked = kernel.declaration.problem == "masked_attention"  # where no relation replays a graph
    asks_the_device = kernel.declaration.name == "paged_attention_mixed"  # for what a server knows on its host
    assert kernel.declaration.supports.graph_replay is not (is_padded or is_masked or asks_the_device)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.declaration.name)
def test_launch_settings_begin_with_those_of_a_plain_call(kernel: Kernel) -> None:
    """Saved cases that name none would run with others than when they were found, and shrinking end in odd ones."""
    is_latent = kernel.declaration.problem == "latent_decode"
    wrapper = inspect.signature(launch_latent.latent_decode if is_latent else launch_paged.paged_decode).parameters
    for name in ("num_warps", "num_stages"):
        choices = kernel.declaration.options.get(name)
        assert choices is None or wrapper[name].default is None or choices[0] in ("auto", wrapper[name].default)


def test_counters_that_are_left_behind_spoil_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not reset its counters would pass: each call of it has new ones."""
    right = launch_grouped.grouped_decode

    def forgets(*args: Any, counters: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        results = right(*args, counters=counters, **options)
        counters[0, 0] += 1
        return results

    kernel = load_kernels("paged_grouped")[0]
    case = small_case(kernel, -1)
    assert judge(kernel, case, device=torch.get_default_device().type, relations=()).failure is None
    monkeypatch.setattr(launch_grouped, "grouped_decode", forgets)
    failure = judge(kernel, case, device=torch.get_default_device().type, relations=()).failure
    assert failure is not None
    assert failure.oracle == "accuracy"
