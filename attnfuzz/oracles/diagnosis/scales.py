"""Mistakes with the scales of an 8-bit cache: left out, applied twice, of the other tensor, of another KV head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float64
from torch import Tensor

from attnfuzz.oracles.diagnosis.row import AttentionRow
from attnfuzz.oracles.diagnosis.suspect import Suspect
from attnfuzz.problems.quantised_kv import KV_DTYPES, KvDtype
from attnfuzz.problems.reference import row_weights

__all__ = ["scale_mistakes", "wrong_scales"]

Outcome = tuple[Float64[Tensor, " head_size"], float, str]


def scale_mistakes(row: AttentionRow) -> Iterator[Suspect]:
    """All mistakes as one family, since there are few; nothing for a plain cache."""
    yield from _family([*_wrong_factors(row), *_another_format(row)])


def wrong_scales(row: AttentionRow) -> Iterator[Suspect]:
    """Those that look at no cached number: of a row whose V is not what its cache holds."""
    yield from _family([*_wrong_factors(row)])


def _family(found: list[Outcome]) -> Iterator[Suspect]:
    if found:
        outs, lses, words = zip(*found, strict=True)
        yield Suspect(
            "kv_scales", torch.stack(outs), torch.tensor(lses, dtype=torch.float64, device="cpu"), lambda i: words[i]
        )


def _wrong_factors(row: AttentionRow) -> Iterator[Outcome]:
    """What K and V are multiplied with beside or instead of their scales."""
    if row.kv_scales is None:
        return
    k_scales, v_scales = row.kv_scales.tolist()
    own = row.kv_head
    k, v = k_scales[own], v_scales[own]
    if (k, v) != (1.0, 1.0):
        yield _outcome(row, 1 / k, 1 / v, "the scales of K and V are left out")
        yield _outcome(row, 1 / k, 1.0, "the scale of K is left out")
        yield _outcome(row, 1.0, 1 / v, "the scale of V is left out")
        yield _outcome(row, k, 1.0, "the scale of K is applied twice")
        yield _outcome(row, 1.0, v, "the scale of V is applied twice")
        yield _outcome(row, k, v, "the scales of K and V are applied twice")
        yield _outcome(row, 1 / k**2, 1.0, "K is divided by its scale")
        yield _outcome(row, 1.0, 1 / v**2, "V is divided by its scale")
    if k != v:
        yield _outcome(row, v / k, k / v, "the scales of K and V are swapped")
        yield _outcome(row, v / k, 1.0, "K is multiplied with the scale of V")
        yield _outcome(row, 1.0, k / v, "V is multiplied with the scale of K")
    for head, (other_k, other_v) in enumerate(zip(k_scales, v_scales, strict=True)):
        if head != own:
            whose = f"KV head {own} is read with {{}} of KV head {head}"
            if row.head == head:
                whose += " (the query head's number)"
            yield _outcome(row, other_k / k, other_v / v, whose.format("the scales"))
            yield _outcome(row, other_k / k, 1.0, whose.format("the scale of K"))
            yield _outcome(row, 1.0, other_v / v, whose.format("the scale of V"))


def _another_format(row: AttentionRow) -> Iterator[Outcome]:
    """The bytes of the cache taken for numbers of another 8-bit format."""
    if row.kv_scales is None or row.case.kv is None:
        return
    k_scale, v_scale = row.kv_scales[:, row.kv_head]
    for dtype in (*KV_DTYPES, "float8_e4m3fnuz"):
        if dtype != row.case.kv.dtype:
            k, v = (
                _reread(part / scale, row.case.kv.dtype, dtype) * scale
                for part, scale in ((row.k, k_scale), (row.v, v_scale))
            )
            dots = row.case.scale * (k @ row.q)
            if bool(dots.isfinite().all()) and bool(v.isfinite().all()):
                weights, lse = row_weights(row.case, row.head, dots)
                yield weights @ v, float(lse), f"the cache is read as {dtype}"


def _reread(cached: Float64[Tensor, "*shape"], held: KvDtype, read: str) -> Float64[Tensor, "*shape"]:
    codes = cached.float().to(getattr(torch, held)).view(torch.uint8)
    return codes.view(getattr(torch, read)).double()


def _outcome(row: AttentionRow, k_factor: float, v_factor: float, words: str) -> Outcome:
    weights, lse = row_weights(row.case, row.head, row.scores * k_factor)
    return (weights @ row.v) * v_factor, float(lse), words
