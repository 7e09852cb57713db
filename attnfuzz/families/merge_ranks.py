"""Merging what the ranks of context parallelism have of the same queries, each from the keys that it owns.

Rank r attended to its own part of each sequence, and has an output and a log-sum-exp. Both engines exchange these and
weigh outputs by log-sum-exps. A rank that owns no key of a sequence has an empty state, whose output means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz import Choice, Expected, Integer, Integers, Seed, TensorSpec
from attnfuzz.numerics.arithmetic import EXP_ERROR, FLOAT32_ROUNDOFF, LOG_ERROR
from attnfuzz.numerics.rounded import Rounded, exactly

_FAR = 192.0
"""exp and exp2 of it leave float32 on either side."""
_QUOTIENT = 4 * FLOAT32_ROUNDOFF
_FOLD = 2 * (EXP_ERROR + LOG_ERROR)
"""Of the natural logarithm of two exponentials, of which one is 1."""
_BLOCK = 16
"""Keys that a rank owns in a row, of "blocked"."""


_FACTORS = {"as base e": 1.0, "as base 2": math.log(2.0), "alike": 0.0}
"""What log-sum-exps are multiplied with before they are exponents, by mistake."""
_NATURAL = "exponentials of log-sum-exps to base 2"
_DIVISORS: dict[str, Callable[[Tensor], Tensor]] = {
    "not divided": lambda weights: torch.ones_like(weights[0]),
    "by ranks": lambda weights: torch.full_like(weights[0], len(weights)),
}
"""What weights are divided by, by mistake."""


class MergeRanks(attnfuzz.Problem):
    """``seq_lens``: keys of each sequence, on all ranks together; ``query_len``: its query tokens.

    ``ownership``: key t belongs to rank t mod ``num_ranks`` ("interleaved"), or 16 keys in a row to one ("blocked").
    ``num_heads``: of each rank, once results are scattered: an exchange has ``num_ranks`` times as many.
    ``empty``: the log-sum-exp of an empty state: -inf, +inf, or, for kernels that look at ``local_lens``, anything
    ("unknown"). ``empty_outputs``: what its output holds: anything, or zeros. ``padded``: rows behind the last query,
    as of a captured graph, which hold anything and have no result. ``lses``: where log-sum-exps lie; "far" ones differ
    by more than float32 has exponents. ``base``: of logarithms, "e" or "2". ``parts``: of an exchange adding outputs of
    ranks, what these were stored in. ``lse``: of a kernel that gives none ``Choice((False,))``.
    """

    seq_lens = Integers(0, 64, likely=(0, 1, 2, 3, 4, 7, 8, 16, 17, 33, 64), least=1, most=3)
    query_len = Choice((1, 2, 4))
    num_ranks = Choice((2, 1, 3, 4, 8))
    padded = Integer(0, 2)
    num_heads = Choice((1, 2, 3))
    head_size = Choice((16, 64, 96, 128, 512))
    ownership = Choice(("interleaved", "blocked"))
    empty = Choice(("-inf", "+inf", "unknown"))
    empty_outputs = Choice(("anything", "zeros"))
    lses = Choice(("usual", "high", "low", "far"))
    base = Choice(("e", "2"))
    parts = Choice(("float32", "input"))
    strides = Choice(("contiguous", "outer_gap"))
    lse = Choice((True,))
    dtype = Choice(("float16", "bfloat16"))
    seed = Seed()

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """``outs`` and ``lses`` have an axis of ranks; heads are those of all ranks."""
        live, heads = case.query_len * len(case.seq_lens), case.num_heads * case.num_ranks
        shape, axes = (live + case.padded, heads, case.head_size), ("token", "head", "dim")
        found = {
            "outs": TensorSpec((case.num_ranks, *shape), case.dtype, "input", case.strides, ("rank", *axes)),
            "lses": TensorSpec((case.num_ranks, *shape[:2]), "float32", "input", case.strides, ("rank", *axes[:2])),
            "local_lens": TensorSpec((case.num_ranks, len(case.seq_lens)), "int32", axes=("rank", "sequence")),
            "query_start_loc": TensorSpec((len(case.seq_lens) + 1,), "int32"),
            "out": TensorSpec(shape, case.dtype, "output", axes=axes),
        }
        return found | ({"lse": TensorSpec(shape[:2], "float32", "output", axes=axes[:2])} if case.lse else {})

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """Write the states; an empty one holds nothing but what ``empty`` and ``empty_outputs`` say."""
        lens = self._local_lens(case)
        tensors["local_lens"].copy_(lens)
        tensors["query_start_loc"].copy_(torch.arange(len(case.seq_lens) + 1, device="cpu") * case.query_len)
        owns = (lens > 0).repeat_interleave(case.query_len, dim=1)  # [ranks, tokens]
        live = owns.shape[1]
        outs, lses = tensors["outs"][:, :live], tensors["lses"][:, :live]
        drawn = attnfuzz.numbers(tuple(lses.shape), seed=case.seed, name="lses")
        if case.lses == "far":
            drawn = drawn + _FAR * attnfuzz.numbers(tuple(lses.shape), seed=case.seed, name="far").sign()
        drawn += {"high": _FAR, "low": -_FAR}.get(case.lses, 0.0)
        lses[owns] = drawn[owns].float()
        outs[owns] = attnfuzz.numbers(tuple(outs.shape), seed=case.seed, name="outs")[owns].to(outs.dtype)
        if case.empty != "unknown":
            lses[~owns] = math.inf if case.empty == "+inf" else -math.inf
        if case.empty_outputs == "zeros":
            outs[~owns] = 0

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
        """A token that no rank has keys of gives 0 and -inf."""
        mistake = getattr(case, "mistake", "")
        owns = (self._local_lens(case) > 0).repeat_interleave(case.query_len, dim=1)
        if mistake == "first sequence":
            owns = owns[:, :1].expand_as(owns)
        if mistake == "two ranks":
            owns = owns & (torch.arange(len(owns), device="cpu") < 2)[:, None]
        live = owns.shape[1]
        of_base = 1.0 if case.base == "e" else math.log(2.0)
        of_weights = _FACTORS.get(mistake, of_base)
        lses = torch.where(owns[..., None], tensors["lses"][:, :live].double(), -math.inf)
        outs = torch.where(owns[..., None, None], tensors["outs"][:, :live].double(), 0.0)
        given = exactly(lses.nan_to_num(neginf=0.0))
        if case.base == "2":  # a kernel may make natural logarithms of them first: a product, with a rounded constant
            given = given._replace(error=2 * FLOAT32_ROUNDOFF * given.value.abs())
        largest = given.map(lambda part: part.gather(0, lses.argmax(0, keepdim=True))[0])
        distance = (given - largest) * exactly(of_weights if getattr(case, "in_lse", False) else of_base)
        weights = _where(owns[..., None], distance.exp())
        total = weights.sum(0)
        has_any = owns.any(0)[:, None].expand_as(largest.value)
        logs = total._replace(value=torch.where(has_any, total.value, 1.0)).log()
        lse = largest + logs * exactly(1 / of_base)
        if case.base == "2":
            lse = lse._replace(error=lse.error + 2 * FLOAT32_ROUNDOFF * lse.value.abs())
        folds = (owns.sum(0) - 2).clamp(min=0)[:, None]  # a ring merges one state after another, and rounds each time
        lse = lse._replace(error=lse.error + folds * (FLOAT32_ROUNDOFF * lse.value.abs() + _FOLD / of_base))
        shares = _where(owns[..., None], ((given - lse) * exactly(of_base)).exp())
        if mistake in _DIVISORS or mistake in _FACTORS:
            shares = _where(owns[..., None], ((given - largest) * exactly(of_weights)).exp())
            divisor = _DIVISORS.get(mistake, _summed)(shares.value)
            shares = shares.map(lambda part: part / torch.where(divisor > 0, divisor, 1.0))
        if mistake == "first rank":
            lse = lse._replace(value=lses[0])
        if mistake == "largest":
            lse = lse._replace(value=largest.value)
        quotients = _QUOTIENT * (1 + folds) * shares.value  # or weights divided by their sum
        shares = shares._replace(error=shares.error + quotients)
        parts = shares.map(lambda part: part[..., None]) * exactly(outs)
        out = (parts.stored(case.dtype) if case.parts == "input" else parts).sum(0).stored(case.dtype)
        out = _where(has_any[..., None], out)
        lse = Rounded(torch.where(has_any, lse.value, -math.inf), _where(has_any, lse).error)
        found = {"out": self._all_rows(case, out), "lse": self._all_rows(case, lse)}
        return found if case.lse else {"out": found["out"]}

    def mistakes(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Mistakes about weights, the ranks that have any, and the log-sum-exp."""
        other = ("as base 2", "powers of 2 of natural log-sum-exps") if case.base == "e" else ("as base e", _NATURAL)
        weights = {"alike": "ranks weigh alike", other[0]: f"weights are {other[1]}"}
        found: dict[str, dict[str, Any]] = {
            "weights are not divided by their sum": {"mistake": "not divided"},
            "weights are divided by the number of ranks, not by their sum": {"mistake": "by ranks"},
            "whether a rank owns keys is asked of the first sequence": {"mistake": "first sequence"},
            "ranks past the second are left out": {"mistake": "two ranks"},
            **{words: {"mistake": mistake} for mistake, words in weights.items()},
        }
        if case.lse:
            found |= {
                f"{words}, in the log-sum-exp, too": {"mistake": mistake, "in_lse": True}
                for mistake, words in weights.items()
            }
            found |= {
                "the log-sum-exp is that of the first rank": {"mistake": "first rank"},
                "the log-sum-exp is the largest of the ranks', not that of their sum": {"mistake": "largest"},
            }
        bases = {"e": ("2", "natural logarithms are taken for those to base 2")}
        base, words = bases.get(case.base, ("e", "logarithms to base 2 are taken for natural ones"))
        found[words] = {"base": base}
        return found

    def where_is(self, case: Any, name: str, index: tuple[int, ...]) -> str:
        """How many of its keys each rank owns, of a result."""
        sequence = index[0] // case.query_len
        if name not in ("out", "lse") or sequence >= len(case.seq_lens):
            return ""
        return f"ranks own {', '.join(str(int(count)) for count in self._local_lens(case)[:, sequence])} of its keys"

    @staticmethod
    def _all_rows(case: Any, live: Rounded) -> Expected:
        """With the padded rows, which nobody looks at."""
        shape = (len(live.value) + case.padded, *live.value.shape[1:])
        value, bound = (torch.zeros(shape, dtype=torch.float64, device="cpu") for _ in range(2))
        where = torch.zeros(shape, dtype=torch.bool, device="cpu")
        for part, given in ((value, live.value), (bound, live.error), (where, torch.ones_like(live.value).bool())):
            part[: len(given)] = given
        return Expected(value, where, bound)

    @staticmethod
    def _local_lens(case: Any) -> Tensor:
        """``[ranks, sequences]``."""
        block = 1 if case.ownership == "interleaved" else _BLOCK
        owners = torch.arange(max(case.seq_lens), device="cpu") // block % case.num_ranks
        return torch.stack(
            [torch.bincount(owners[:length], minlength=case.num_ranks) for length in case.seq_lens], dim=1
        )


def _summed(weights: Tensor) -> Tensor:
    return weights.sum(0)


def _where(condition: Tensor, number: Rounded) -> Rounded:
    """0, exactly, elsewhere."""
    return number.map(lambda part: torch.where(condition, part, 0.0))
