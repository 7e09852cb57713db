"""A query that is rounded to a cache's 8 bits is accused and named, unless it is declared."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

import attnfuzz
from attnfuzz.judging.judge import judge
from attnfuzz.problems.cases import PagedDecodeCase
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.recipes import Values
from tests.oracles.conftest import paged_tokens

FLOAT8: Any = "float8_e4m3fn"
DECLARED = attnfuzz.Numerics(query=FLOAT8)


def kernel_with(bug: str, numerics: attnfuzz.Numerics) -> Any:
    def rounds_queries(inputs: Any) -> Any:
        q = inputs.q.to(torch.float8_e4m3fn).float()
        group = q.shape[1] // (inputs.k_cache.shape[2])
        inputs.out.zero_()
        inputs.lse.fill_(-torch.inf)
        for seq, length in enumerate(inputs.seq_lens.tolist()):
            for head in range(q.shape[1] if length else 0):
                k, v = (part.float() for part in paged_tokens(inputs, seq, length, head // group))
                k, v = k * inputs.k_scale, v * inputs.v_scale
                if bug == "drops the last token" and length > 1:
                    k, v = k[:-1], v[:-1]
                scores = k @ q[seq, head] * inputs.scale * (inputs.k_scale if bug == "scales twice" else 1)
                inputs.out[seq, head] = scores.softmax(0) @ v
                inputs.lse[seq, head] = scores.logsumexp(0)
        return inputs.out, inputs.lse

    supports = attnfuzz.Supports(kv_dtypes=(FLOAT8,), kv_scales=("tensor",), dtypes=("float16", "bfloat16"))
    return attnfuzz.kernel("paged_decode", supports=supports, numerics=numerics)(rounds_queries)


def cases(**others: Any) -> list[PagedDecodeCase]:
    """As a search draws them, with few and many keys, of small and of large scores."""
    recipes: Any = ("integers", "normal", "fine")
    return [
        PagedDecodeCase(
            num_q_heads=2, num_kv_heads=1, head_size=(16, 64)[seed % 2], seq_lens=(3 + 9 * (seed % 5),), scale=0.25,
            block_size=4, dtype=("bfloat16", "float16")[seed // 2 % 2],
            values=Values(keys=recipes[seed % 3], values="normal", logit_exponent=seed % 4 - 2, seed=seed),
            kv=QuantisedKv(dtype=FLOAT8, per="tensor", scales="scattered"), **others,
        )
        for seed in range(16)
    ]  # fmt: skip


def failures(bug: str, numerics: attnfuzz.Numerics, *, most: int, inquire: bool = False) -> list[Any]:
    """The first ones."""
    how: Any = {"device": "cpu", "oracles": ("accuracy",), "relations": (), "inquire": inquire}
    judged = (judge(kernel_with(bug, numerics), case, **how) for case in cases())
    return [*islice((one.failure for one in judged if one.failure is not None), most)]


def test_a_query_in_8_bits_is_accused_and_named_without_its_declaration() -> None:
    """A kernel that loses all but 4 bits of q would pass, or nobody would be told what declares it."""
    found = failures("", attnfuzz.Numerics(), most=3, inquire=True)
    causes = [cause for one in found for cause in one.causes if cause.numerics.get("query") == FLOAT8]
    assert len(found) == 3
    assert {cause.words for cause in causes} == {"q is rounded to float8_e4m3fn before it is multiplied with k"}


def test_a_query_in_8_bits_passes_where_it_is_declared() -> None:
    """SGLang's readers of 8 bits would be accused, whatever they declare."""
    assert failures("", DECLARED, most=1) == []


@pytest.mark.parametrize("bug", ["drops the last token", "scales twice"])
def test_what_is_wrong_beside_it_is_found(bug: str) -> None:
    """The declaration would excuse what it has nothing to do with."""
    assert len(failures(bug, DECLARED, most=6)) == 6
