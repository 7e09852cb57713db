"""Oracles that object with an assert, and such as cannot judge, beside a kernel that is right."""

from __future__ import annotations

from typing import Any

import torch

import attnfuzz
from attnfuzz.oracles.own import Run
from tests.oracles import own_oracle_kernels


@attnfuzz.oracle
def asserts_with_words(run: Run) -> None:
    """Nothing is as it is."""
    assert run.case is None, "not so"


@attnfuzz.oracle
def asserts_without(run: Run) -> None:
    """Nothing is as it is.

    And never was.
    """
    if run.case is not None:
        raise AssertionError


@attnfuzz.oracle
def raises(run: Run) -> str | None:
    return str(run.results["lse of another kernel"])


@attnfuzz.oracle
def returns_a_tensor(run: Run) -> Any:
    return torch.tensor(True, device="cpu")


@attnfuzz.kernel("dense_decode")
def right(inputs: Any) -> Any:
    return own_oracle_kernels.attention(inputs, 0.0)
