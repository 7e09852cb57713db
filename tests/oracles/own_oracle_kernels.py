"""Kernels with oracles beside them, for tests of `attnfuzz.oracle`."""

from __future__ import annotations

from typing import Any

import torch

import attnfuzz
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.own import Run
from attnfuzz.problems.cases import Case

SEEN: list[Run] = []


@attnfuzz.oracle
def empty_rows_are_plus_zero(run: Run) -> str | None:
    """Rows without keys hold +0.0."""
    if run.case.problem != "dense_decode":
        return None
    negative = run.results["out"][run.inputs.seq_lens == 0].signbit()
    return f"{int(negative.sum())} elements are -0.0\nin rows without keys" if negative.any() else None


@attnfuzz.oracle
def doubled_is_even(run: Run) -> str | None:
    """What has been doubled is even."""
    return "it is odd" if "doubled" in run.results and bool((run.results["doubled"] % 2 != 0).any()) else None


@attnfuzz.oracle
def remembers(run: Run) -> None:
    """Nothing; it notes what it gets, and spoils it."""
    inputs, results, expected = run.inputs, dict(run.results), dict(run.expected)
    for tensors in (results, expected):
        for name, tensor in tensors.items():
            tensors[name] = tensor.clone()
            tensor.zero_()
    SEEN.append(Run(run.case, results, expected, lambda: inputs))


def seen_of(case: Case) -> list[Run]:
    """What an oracle gets of ``case``."""
    SEEN.clear()
    assert judge(right, case, device="cpu", relations="all").failure is None
    return list(SEEN)


def attention(inputs: Any, empty: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of a case, with ``empty`` in the rows of sequences without keys."""
    group = inputs.q.shape[1] // inputs.k.shape[2]
    k, v = (x.float().repeat_interleave(group, dim=2) for x in (inputs.k, inputs.v))
    is_token = torch.arange(k.shape[1], device=k.device) < inputs.seq_lens[:, None]
    k, v = (x.masked_fill(~is_token[:, :, None, None], 0.0) for x in (k, v))
    scores = torch.einsum("shd,sthd->sht", inputs.q.float(), k) * inputs.scale
    lse = scores.masked_fill(~is_token[:, None], float("-inf")).logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(~is_token[:, None], 0.0)
    out = torch.einsum("sht,sthd->shd", weights, v)
    is_empty = (inputs.seq_lens == 0)[:, None, None]
    return torch.where(is_empty, empty, out).to(inputs.q.dtype), lse


@attnfuzz.kernel("dense_decode")
def right(inputs: Any) -> Any:
    return attention(inputs, 0.0)


@attnfuzz.kernel("dense_decode")
def negative_zero(inputs: Any) -> Any:
    return attention(inputs, -0.0)


@attnfuzz.kernel("dense_decode")
def wrong(inputs: Any) -> Any:
    out, lse = attention(inputs, -0.0)
    return out + 1.0, lse


class Doubling(attnfuzz.Problem):
    """Twice a number."""

    number = attnfuzz.Integer(0, 8)
    width = attnfuzz.Choice((8, 16))

    def tensors(self, case: Any) -> Any:
        shape = (case.width,)
        return {"x": attnfuzz.TensorSpec(shape, "float32"), "doubled": attnfuzz.TensorSpec(shape, "float32", "output")}

    def write(self, case: Any, tensors: Any) -> None:
        tensors["x"].fill_(case.number)

    def reference(self, case: Any, tensors: Any) -> Any:
        return {"doubled": 2.0 * tensors["x"].double()}

    def bound(self, case: Any, tensors: Any) -> Any:
        return {"doubled": 1.5}


@attnfuzz.kernel(Doubling())
def doubled(inputs: Any) -> None:
    inputs.doubled[:] = 2 * inputs.x + (inputs.number == 3)
