"""Decode of a recurrent layer: the gated delta rule of Qwen3-Next and Kimi Linear, with a state for all past tokens.

A head has a state ``S [v_head_size, head_size]``. Each token t of a sequence decays it, corrects what it says of the
token's key, and asks it for an answer to the token's query:

    S <- exp(g_t) S        S <- S + beta_t (v_t - S k_t) k_t^T        out_t = scale S q_t

States lie in the slots of a pool. A sequence reads the one that it is given, and its tokens write those that they are
given; every other slot keeps every bit. A sequence whose slot is a sentinel is a padded row of a captured graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import attnfuzz
from attnfuzz import Choice, Expected, Integer, Integers, Seed, TensorSpec
from attnfuzz.numerics.rounded import Rounded, exactly

_EPSILON = 1e-6
"""Below the root of what q and k are divided by."""
_LINEAR_FROM = 20.0
"""Where kernels begin to take log(1 + exp(x)) for x."""


class RecurrentDecode(attnfuzz.Problem):
    """``tokens``: of each sequence. ``padded``: sequences behind these, of one token each, whose slot is a sentinel.

    ``keeps``: what becomes of states. "last": the state after the last token, in the slot from which it came.
    "each": of speculative decoding, that after each token, in slots of a row of ``slots``, of which the sequence begins
    with that of the last token accepted before, ``accepted[i] - 1``. "aside": that after each token, in a second pool,
    ``steps [slots, tokens, ...]``, and none in the first. "tree": likewise, and a token goes on from the state after
    the token that ``parents`` names, 0 for those that follow the first; the first goes on from the slot.

    ``gates``: "given" as ``g`` and ``beta``, or "raw": g = -exp(A_log) log(1 + exp(a + dt_bias)), beta = 1 / (1 +
    exp(-b)). ``per_channel``: g is a vector, one for each number of a key, as in KDA. ``normalised``: q and k are to
    be divided by their length. ``sentinel``: 0 is one where slot 0 belongs to nobody. ``beta_dtype``: what 1 / (1 +
    exp(-b)) may be rounded to, "float32" or, as of a kernel that says so, "input".
    """

    tokens = Integers(0, 6, likely=(1, 2, 3, 5), least=1, most=4)
    padded = Integer(0, 2)
    num_heads = Choice((1, 2))
    values_per_key = Choice((1, 2, 3))
    head_size = Choice((16, 80, 128))
    v_head_size = Choice((16, 48, 128))
    keeps = Choice(("last", "each", "aside", "tree"))
    accepts = Choice(("one", "some"))
    gates = Choice(("given", "raw"))
    per_channel = Choice((False, True))
    normalised = Choice((False, True))
    sentinel = Choice((-1, 0))
    spare_slots = Integer(0, 3)
    strides = Choice(("contiguous", "outer_gap"))
    state_strides = Choice(("contiguous", "outer_gap"))
    state_dtype = Choice(("float32", "bfloat16"))
    beta_dtype = Choice(("float32", "input"))
    dtype = Choice(("float16", "bfloat16"))
    seed = Seed()

    def tensors(self, case: Any) -> dict[str, TensorSpec]:
        """``state [slots, heads, v_head_size, head_size]``: keys last, as both engines have it."""
        rows, heads = max(1, sum(case.tokens) + case.padded), case.num_heads * case.values_per_key
        gate = (rows, heads, case.head_size) if case.per_channel else (rows, heads)
        axes, gate_axes = ("token", "head", "dim"), ("token", "head", "channel")[: len(gate)]
        of_keys = TensorSpec((rows, case.num_heads, case.head_size), case.dtype, "input", case.strides, axes)
        of_values = TensorSpec((rows, heads, case.v_head_size), case.dtype, "input", case.strides, axes)
        found = {"q": of_keys, "k": of_keys, "v": of_values}
        if case.gates == "given":
            found["g"] = TensorSpec(gate, "float32", axes=gate_axes)
            found["beta"] = TensorSpec((rows, heads), "float32", axes=axes[:2])
        else:
            found["a"] = TensorSpec(gate, case.dtype, axes=gate_axes)
            found["b"] = TensorSpec((rows, heads), case.dtype, axes=axes[:2])
            found["A_log"] = TensorSpec((heads,), "float32")
            found["dt_bias"] = TensorSpec(gate[1:], "float32")
        sequences, width = len(case.tokens) + case.padded, self._width(case)
        found["cu_seqlens"] = TensorSpec((sequences + 1,), "int32")
        found["slots"] = TensorSpec((sequences, width) if case.keeps == "each" else (sequences,), "int32")
        shape, state_axes = (heads, case.v_head_size, case.head_size), ("head", "value", "key")
        pool = (self._num_slots(case), *shape)
        found["state"] = TensorSpec(pool, case.state_dtype, "in_place", case.state_strides, ("slot", *state_axes))
        if case.keeps == "each":
            found["accepted"] = TensorSpec((sequences,), "int32")
        elif case.keeps != "last":
            found["steps_slots"] = TensorSpec((sequences,), "int32")
            steps = (len(case.tokens) + case.spare_slots, width, *shape)
            found["steps"] = TensorSpec(steps, case.state_dtype, "in_place", axes=("slot", "step", *state_axes))
            found |= {"parents": TensorSpec((sequences, width), "int32")} if case.keeps == "tree" else {}
        out = TensorSpec((rows, heads, case.v_head_size), case.dtype, "output", axes=axes)
        return found | {"out": out}

    def write(self, case: Any, tensors: Mapping[str, Tensor]) -> None:
        """Tokens and slots of padded sequences hold nothing, nor do slots from which no sequence begins."""
        generator = torch.Generator("cpu").manual_seed(case.seed)
        live = sum(case.tokens)
        for name in tensors.keys() & {"q", "k", "v", "g", "beta", "a", "b"}:
            tensors[name][:live] = self._numbers(case, name, tensors[name][:live]).to(tensors[name].dtype)
        for name in tensors.keys() & {"A_log", "dt_bias"}:
            tensors[name].copy_(self._numbers(case, name, tensors[name]) / 4)
        lengths = torch.tensor([0, *case.tokens, *[1] * case.padded], dtype=torch.int64, device="cpu")
        tensors["cu_seqlens"].copy_(lengths.cumsum(0))
        tensors["slots"].fill_(case.sentinel)
        slots = self._drawn(tensors["slots"][: len(case.tokens)].numel(), self._num_slots(case), case, generator)
        tensors["slots"][: len(case.tokens)] = slots.view_as(tensors["slots"][: len(case.tokens)])
        if case.keeps == "each":
            tensors["accepted"].fill_(1)
            if case.accepts == "some":
                most = self._width(case) + 1
                drawn = torch.randint(1, most, (len(case.tokens),), generator=generator, device="cpu")
                tensors["accepted"][: len(case.tokens)] = drawn.int()
        elif case.keeps != "last":
            tensors["steps_slots"].fill_(-1)
            order = torch.randperm(len(tensors["steps"]), generator=generator, device="cpu")
            tensors["steps_slots"][: len(case.tokens)] = order[: len(case.tokens)].int()
        if case.keeps == "tree":
            for step in range(self._width(case)):
                drawn = (
                    torch.rand(len(tensors["parents"]), generator=generator, dtype=torch.float64, device="cpu") * step
                )
                tensors["parents"][:, step] = drawn.int()
        for begins in _first_slots(tensors, len(case.tokens)):
            tensors["state"][begins] = self._numbers(case, f"state{begins}", tensors["state"][begins]).to(
                tensors["state"].dtype
            )

    def reference(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, Expected]:
        """Each result with the bound of what float32 makes of its formula."""
        live = sum(case.tokens)
        q, k, v = (exactly(tensors[name][:live]) for name in ("q", "k", "v"))
        if case.normalised:
            as_given = getattr(case, "as_given", "")
            q, k = (rows if name in as_given else _normalised(rows) for name, rows in (("q", q), ("k", k)))
        q = q * exactly(getattr(case, "scale", case.head_size**-0.5))
        q, k = (rows.map(lambda part: _of_value_heads(case, part)) for rows in (q, k))
        decay, beta = _gates(case, tensors, live)
        found = {name: _Results(tensors[name]) for name in ("state", "steps", "out") if name in tensors}
        starts = tensors["cu_seqlens"].tolist()
        begins = _first_slots(tensors, len(case.tokens))
        for i, (first, count, begin) in enumerate(zip(starts, case.tokens, begins, strict=False)):
            state = exactly(tensors["state"][begin])
            for step in range(count):
                if case.keeps == "tree" and step > 0:
                    at = int(tensors["steps_slots"][i]), int(tensors["parents"][i, step])
                    state = found["steps"].at(*at)  # what was stored of it, and has been rounded
                t = first + step
                parts = [part.map(lambda all_, t=t: all_[t]) for part in (k, v, decay, beta)]  # type: ignore[misc]  # mypy sees no default
                one = _after(state, *parts, step=getattr(case, "step", ""))
                answers = state if getattr(case, "step", "") == "answered before" else one
                asked = answers.dot(q.map(lambda rows, t=t: rows[t][:, None]))  # type: ignore[misc]  # likewise
                found["out"].put(asked.stored(case.dtype), t)
                state = one
                if case.keeps == "each":
                    found["state"].put(state.stored(case.state_dtype), int(tensors["slots"][i, step]))
                elif case.keeps != "last":
                    found["steps"].put(state.stored(case.state_dtype), int(tensors["steps_slots"][i]), step)
            if case.keeps == "last" and count:
                found["state"].put(state.stored(case.state_dtype), begin)
        return {name: results.expected() for name, results in found.items()}

    def mistakes(self, case: Any, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Mistakes about the formula, the keys of a head, gates, and the slot from which a sequence begins."""
        found: dict[str, dict[str, Any]] = {
            "the state decays after it was corrected, not before": {"step": "decays last"},
            "what the state says of a key is taken before it decays": {"step": "asked before it decays"},
            "beta is multiplied with v, and not with what the state says of the key": {"step": "beta of v"},
            "beta is left out": {"step": "no beta"},
            "the state does not decay": {"step": "no decay"},
            "what the state says of a key is not subtracted from v": {"step": "no correction"},
            "the state answers a token's query before that token corrects it": {"step": "answered before"},
            "q is not multiplied by the scale": {"scale": 1.0},
            "q is multiplied by the scale twice": {"scale": 1 / case.head_size},
        }
        if case.num_heads > 1 and case.values_per_key > 1:
            found["heads share keys in turn, not side by side"] = {"in_turn": True}
        if case.normalised:
            found |= {
                "q and k are not divided by their length": {"as_given": "qk"},
                "q is not divided by its length": {"as_given": "q"},
                "k is not divided by its length": {"as_given": "k"},
            }
        if case.gates == "raw":
            found["dt_bias is left out"] = {"dt_bias": torch.zeros_like(tensors["dt_bias"])}
            found["exp(A_log) is left out"] = {"A_log": torch.zeros_like(tensors["A_log"])}
        if case.keeps == "each":
            accepted = tensors["accepted"]
            found |= {
                "a sequence begins from its first slot, however many tokens were accepted": {
                    "accepted": torch.ones_like(accepted)
                },
                "a sequence begins from its last slot, however many tokens were accepted": {
                    "accepted": torch.full_like(accepted, self._width(case))
                },
                "a sequence begins from the slot that the number of the sequence before says": {
                    "accepted": accepted.roll(1)
                },
                "a sequence begins one slot too late": {"accepted": accepted.add(1).clamp(max=self._width(case))},
                "a sequence begins one slot too early": {"accepted": accepted.sub(1).clamp(min=1)},
            }
        if case.keeps == "tree":
            chain = torch.arange(-1, self._width(case) - 1, device="cpu").clamp(min=0)
            found["a token goes on from the one before it, not from its parent"] = {
                "parents": chain.to(tensors["parents"].dtype).expand_as(tensors["parents"])
            }
        return found

    def where_is(self, case: Any, name: str, index: tuple[int, ...]) -> str:
        """Which token of which sequence it is, of a result by tokens."""
        if name != "out":
            return ""
        for i, (first, end) in enumerate(itertools.pairwise(itertools.accumulate(case.tokens, initial=0))):
            if first <= index[0] < end:
                return f"token {index[0] - first} of sequence {i}"
        return "of a padded sequence"

    @staticmethod
    def _width(case: Any) -> int:
        return max(1, *map(int, case.tokens))

    def _num_slots(self, case: Any) -> int:
        named = len(case.tokens) * (self._width(case) if case.keeps == "each" else 1)
        return named + int(case.spare_slots) + int(case.sentinel == 0)

    @staticmethod
    def _drawn(count: int, slots: int, case: Any, generator: torch.Generator) -> Tensor:
        first = int(case.sentinel == 0)
        return (torch.randperm(slots - first, generator=generator, device="cpu")[:count] + first).int()

    @staticmethod
    def _numbers(case: Any, name: str, like: Tensor) -> Tensor:
        """g is 0 and below, mostly near 0; beta lies between 0 and 1; keys have length 1 where nobody divides them."""
        found = attnfuzz.numbers(tuple(like.shape), seed=case.seed, name=name)
        if name == "g":
            return -(found**2) / 4
        if name == "beta":
            return found.sigmoid()
        if name in ("q", "k") and not case.normalised:
            found = found / found.square().sum(-1, keepdim=True).sqrt()
        return found


class _Results:
    """A tensor of results while it is filled."""

    def __init__(self, like: Tensor) -> None:
        self._value, self._bound = (torch.zeros(like.shape, dtype=torch.float64, device="cpu") for _ in range(2))
        self._where = torch.zeros(like.shape, dtype=torch.bool, device="cpu")

    def put(self, number: Rounded, *place: int) -> None:
        self._value[place], self._bound[place], self._where[place] = number.value, number.error, True

    def at(self, *place: int) -> Rounded:
        return Rounded(self._value[place], self._bound[place])

    def expected(self) -> Expected:
        return Expected(self._value, self._where, self._bound)


def _first_slots(tensors: Mapping[str, Tensor], num_sequences: int) -> list[int]:
    """Where each sequence begins."""
    slots = tensors["slots"][:num_sequences].long()
    if slots.dim() > 1:
        slots = slots.gather(1, tensors["accepted"][:num_sequences, None].long() - 1)[:, 0]
    return [int(slot) for slot in slots]


def _normalised(rows: Rounded) -> Rounded:
    squares = rows.dot(rows) + exactly(_EPSILON)
    return rows * squares.rsqrt().map(lambda part: part[..., None])


def _gates(case: Any, tensors: Mapping[str, Tensor], live: int) -> tuple[Rounded, Rounded]:
    """exp(g), as wide as a key or one number, and beta."""
    if case.gates == "given":
        g, beta = (exactly(tensors[name][:live]) for name in ("g", "beta"))
    else:
        a, b = (exactly(tensors[name][:live]) for name in ("a", "b"))
        x = a + exactly(tensors["dt_bias"])
        softplus = (exactly(1.0) + x.exp()).log()
        left_out = torch.where(x.value + x.error > _LINEAR_FROM, torch.exp(-x.value), 0.0)
        softplus = softplus._replace(error=softplus.error + left_out)
        rate = exactly(tensors["A_log"]).exp()
        rate = rate.map(lambda part: part[:, None]) if case.per_channel else rate
        g = (rate * softplus).map(torch.neg, torch.clone)
        beta = exactly(1.0) / (exactly(1.0) + b.map(torch.neg).exp())
        beta = beta.stored(case.dtype) if case.beta_dtype == "input" else beta
    return g.exp() if case.per_channel else g.exp().map(lambda part: part[..., None]), beta


def _of_value_heads(case: Any, part: Tensor) -> Tensor:
    """``part`` of the key that each head has, ``[tokens, heads, ...]``."""
    if getattr(case, "in_turn", False):
        return part.repeat(1, case.values_per_key, *[1] * (part.dim() - 2))
    return part.repeat_interleave(case.values_per_key, dim=1)


def _after(state: Rounded, k: Rounded, v: Rounded, decay: Rounded, beta: Rounded, *, step: str) -> Rounded:
    """The state ``[heads, v_head_size, head_size]`` after one more token; ``step`` names a mistake that is made."""
    key, factor = k.map(lambda part: part[:, None]), beta.map(lambda part: part[:, None])
    decayed = state if step in ("no decay", "decays last") else state * decay.map(lambda part: part[:, None])
    said = (state if step == "asked before it decays" else decayed).dot(key)
    if step == "beta of v":
        corrects = v * factor - said
    else:
        corrects = v if step == "no correction" else v - said
        corrects = corrects if step == "no beta" else corrects * factor
    after = decayed + corrects.map(lambda part: part[..., None]) * key
    return after * decay.map(lambda part: part[:, None]) if step == "decays last" else after
