"""Shapes that kernels claim and a search rarely or never draws: wide groups, large heads, pages of hybrid models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from attnfuzz.cases.supported import adapt_options, why_unsupported
from attnfuzz.declaration import Kernel, load_kernels
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import Case, case_from_builtins

_SHAPE: dict[str, Any] = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "seq_lens": [37], "scale": 0.25}
_WIDE: dict[str, dict[str, Any]] = {
    **{f"{ratio} heads on one": {"num_q_heads": ratio} for ratio in (32, 64, 71, 128)},
    **{f"heads of {size}": {"head_size": size, "scale": 0.03125} for size in (512, 576, 1024)},
    **{f"pages of {size}": {"block_size": size, "seq_lens": [size + 9]} for size in (272, 528)},
}
_DAY = ("heads of 576",)
KERNELS = [kernel for kernel in load_kernels("*") if kernel.declaration.problem != "merge_states"]


def _case(kernel: Kernel, wide: str) -> Case | None:
    """None where the kernel does not take it."""
    declared = kernel.declaration
    fields: dict[str, Any] = {**_SHAPE, "block_size": 16, **_WIDE[wide]}
    if declared.problem == "dense_decode":
        del fields["block_size"]
    if declared.problem == "split_decode":
        fields["num_splits"] = 3
    if declared.problem in ("paged_attention", "masked_attention"):
        fields["query_lens"] = [3]
    if declared.problem == "latent_decode":
        head_size = fields["head_size"]
        fields["v_head_size"] = head_size - 64 if head_size > 64 else head_size // 2
    if len(declared.supports.layouts) == 1:
        fields["layout"] = declared.supports.layouts[0]
    case = adapt_options(case_from_builtins(declared.problem, fields), declared.options)
    return case if why_unsupported(declared.supports, declared.options, case) is None else None


_CLAIMED = [
    pytest.param(kernel, case, id=f"{kernel.declaration.name}, {wide}", marks=() if wide in _DAY else pytest.mark.night)
    for kernel in KERNELS
    for wide in _WIDE
    if (case := _case(kernel, wide)) is not None
]


@pytest.fixture(scope="module", name="runner")
def _runner() -> Iterator[Runner]:
    with Runner(device="cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda") as runner:
        yield runner


@pytest.mark.parametrize(("kernel", "case"), _CLAIMED)
def test_claimed_shapes(kernel: Kernel, case: Case, runner: Runner) -> None:
    """A kernel that says it takes any shape would be wrong on one that no search draws."""
    failure = runner.judge(kernel.declaration, case).failure
    assert failure is None, failure.message


def test_nearly_all_is_claimed() -> None:
    """Kernels that declare less than they take would be left out here unnoticed."""
    refused = {(kernel.declaration.name, wide) for kernel in KERNELS for wide in _WIDE if _case(kernel, wide) is None}
    of_models = ("71 heads on one", "heads of 512", "heads of 1024")  # no latent cache has these
    latent = ("latent_eager", "latent_grouped", "latent_grouped_auto")
    assert refused == {(name, wide) for name in latent for wide in of_models}
