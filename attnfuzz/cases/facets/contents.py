"""Facets of contents: recipes for numbers, variants of scores, 8-bit caches. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from attnfuzz.cases.facets.facet import (
    Axis,
    Change,
    Changes,
    Domain,
    Facet,
    Levels,
    Options,
    Part,
    SizeRank,
    changed,
)
from attnfuzz.cases.facets.sequences import with_lengths
from attnfuzz.problems.attention import AttentionCase
from attnfuzz.problems.block_table import freed_tokens
from attnfuzz.problems.choices import default_scale, kv_dtypes_of, variants_of
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.fields import Choice, Proposal, Seed, first_of, lower_integer
from attnfuzz.problems.quantised_kv import KV_DTYPES, KV_GRANULARITIES, KV_SCALE_RECIPES, QuantisedKv
from attnfuzz.problems.recipes import KEY_RECIPES, VALUE_RECIPES, Needle
from attnfuzz.problems.variants import ALIBI_RECIPES, SINK_RECIPES

FREED_PAGES = Feature("freed pages")
SCALES = Feature("scales")
_KEYS, _VALUES = Feature("keys", "={}", "numbers"), Feature("values", "={}", "numbers")
_SIMPLE_CAPS = (1.0, 30.0)
_LEFT_OUT = {"window": "no window", "soft_cap": "no soft cap", "alibi": "no ALiBi", "sinks": "no sinks"}


class Numbers(Facet[AttentionCase]):
    """The numbers in q, K and V: recipes, and needles among the keys."""

    fields = ("values",)
    jumps_with = "numbers"
    parts = (
        Part(
            "values.keys", Choice(KEY_RECIPES), SizeRank.CONTENTS, Feature("keys", "={}", "numbers"), "keys {}", "keys"
        ),
        Part(
            "values.values",
            Choice(VALUE_RECIPES),
            SizeRank.CONTENTS,
            Feature("values", "={}", "numbers"),
            "values {}",
            "values",
        ),
        Part("values.seed", Seed(), SizeRank.CONTENTS),
    )

    def features(self, case: AttentionCase) -> Iterator[Feature]:
        yield from super().features(case)
        if exponent := case.values.logit_exponent:
            yield Feature("logit_exponent", ">0" if exponent > 0 else "<0", "scores")
        if case.values.needles:
            yield Feature("needles", role="numbers")

    def traits(self, case: AttentionCase) -> Iterator[Feature]:
        yield from super().traits(case)
        yield Feature("logit_exponent", f" is {case.values.logit_exponent}")
        yield Feature("with needles" if case.values.needles else "without needles")

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield from super().axes(domain)
        yield Axis("logits", ("small", "plain", "large", "huge"), _logit_scale)

    def size(self, case: AttentionCase, options: Options) -> Iterator[tuple[SizeRank, object]]:
        exponent = case.values.logit_exponent
        yield SizeRank.CONTENTS, len(case.values.needles)
        yield SizeRank.CONTENTS, (abs(exponent), exponent < 0)
        yield from super().size(case, options)
        yield (
            SizeRank.EACH_TOKEN,
            tuple((needle.kv_head, needle.seq, needle.position) for needle in case.values.needles),
        )

    def shrink(self, case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
        case = yield from first_of(case, [_with_values(case, needles=())])
        for i in range(len(case.values.needles) - 1, -1, -1):
            needles = list(case.values.needles)
            first = msgspec.structs.replace(needles.pop(i), kv_head=0, position=0)
            others = (tuple(needles), tuple(sorted({*needles, first})))
            case = yield from first_of(case, [_with_values(case, needles=other) for other in others])
        case = yield from super().shrink(case, domain)
        return (yield from lower_integer(case, abs(case.values.logit_exponent), 0, _with_exponent))

    def changes(self, case: AttentionCase, domain: Domain) -> Iterator[Change]:
        for part in self.parts[:2]:
            yield from part.changes(case)
        if exponent := case.values.logit_exponent:
            yield f"logit_exponent 0 instead of {exponent}", _values(case, logit_exponent=0)
        if case.values.needles:
            yield "no needles", _values(case, needles=())

    def follow(self, case: AttentionCase, changes: Changes) -> Changes:
        """A needle stays at its position or, if that is gone, on the last token, and in its KV head or in the last."""
        lengths = changes.get("seq_lens", case.seq_lens)
        heads = changes.get("num_kv_heads", case.num_kv_heads)
        has_moved = lengths != case.seq_lens or heads != case.num_kv_heads
        if "values" in changes or not case.values.needles or not has_moved:
            return {}

        def moved(needle: Needle) -> Needle:
            last = lengths[needle.seq] - 1
            was_last = needle.position == case.seq_lens[needle.seq] - 1
            position = last if was_last else min(needle.position, last)
            return Needle(seq=needle.seq, position=position, kv_head=min(needle.kv_head, heads - 1))

        kept = (needle for needle in case.values.needles if needle.seq < len(lengths) and lengths[needle.seq])
        return _values(case, needles=tuple(sorted(set(map(moved, kept)))))


def _values(case: AttentionCase, **fields: Any) -> Changes:
    return {"values": msgspec.structs.replace(case.values, **fields)}


def _with_values(case: AttentionCase, **fields: Any) -> AttentionCase | None:
    return changed(case, **_values(case, **fields))


def _with_exponent(case: AttentionCase, size: int) -> AttentionCase | None:
    return _with_values(case, logit_exponent=-size if case.values.logit_exponent < 0 else size)


def _logit_scale(case: AttentionCase) -> Levels:
    exponent = case.values.logit_exponent
    return ("small" if exponent < 0 else "plain" if exponent == 0 else "large" if exponent < 5 else "huge",)


class Scale(Facet[AttentionCase]):
    """The factor that scores are multiplied with."""

    fields = ("scale",)
    jumps_with = "numbers"

    def features(self, case: AttentionCase) -> Iterator[Feature]:
        if case.scale != default_scale(case.head_size):
            yield Feature("scale", role="scores")  # goes with the head size

    def axes(self, domain: Domain) -> Iterator[Axis]:
        yield Axis("scale", ("default", "other"), lambda case: ("other" if any(self.features(case)) else "default",))

    def size(self, case: AttentionCase, options: Options) -> Iterator[tuple[SizeRank, object]]:
        yield SizeRank.CONTENTS, (case.scale != default_scale(case.head_size), case.scale != 1.0, case.scale)

    def shrink(self, case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
        return (yield from first_of(case, [changed(case, scale=one) for one in (default_scale(case.head_size), 1.0)]))

    def simplest(self, case: AttentionCase, domain: Domain) -> Changes:
        return {"scale": default_scale(case.head_size)}

    def changes(self, case: AttentionCase, domain: Domain) -> Iterator[Change]:
        scale = default_scale(case.head_size)
        if case.scale != scale:
            yield f"scale {scale:.4g} instead of {case.scale:.4g}", {"scale": scale}

    def follow(self, case: AttentionCase, changes: Changes) -> Changes:
        """``1/sqrt(head_size)`` follows the head size."""
        is_default = changes.get("scale", case.scale) == default_scale(case.head_size)
        return {"scale": default_scale(changes["head_size"])} if is_default and "head_size" in changes else {}


class VariantFacet(Facet[AttentionCase]):
    """Windows, caps, biases and sinks."""

    fields = ("variant",)
    jumps_with = "variant"

    def told(self, case: AttentionCase) -> Iterator[str]:
        for name in case.variant.names:
            value = getattr(case.variant, name)
            yield f"{name} {value if isinstance(value, str) else f'{value:g}'}"

    def features(self, case: AttentionCase) -> Iterator[Feature]:
        yield from map(Feature, case.variant.names)
        window = case.variant.window
        if window is not None and max(case.seq_lens) > window:
            yield Feature("seq_len", ">window", "size")
        if any(freed_tokens(case)):
            yield FREED_PAGES

    def axes(self, domain: Domain) -> Iterator[Axis]:
        if names := variants_of(domain.problem, domain.supports):
            yield Axis("variant", ("none", *names), lambda case: case.variant.names or ("none",))

    def objections(self, case: AttentionCase, domain: Domain) -> Iterator[str]:
        declared = domain.supports.variants
        for name in case.variant.names:
            if name not in declared:
                yield f"variant.{name}={getattr(case.variant, name)!r}, but the kernel declares {declared}"
        if case.variant.freed_pages and not domain.supports.freed_pages:
            yield "variant.freed_pages=True, but the kernel declares freed_pages=False"

    def size(self, case: AttentionCase, options: Options) -> Iterator[tuple[SizeRank, object]]:
        """The fewer the simpler; of windows, the smaller."""
        variant = case.variant
        cap = variant.soft_cap
        alibi = -1 if variant.alibi is None else ALIBI_RECIPES.index(variant.alibi)
        sinks = -1 if variant.sinks is None else SINK_RECIPES.index(variant.sinks)
        numbers = (variant.window or 0, cap is not None, cap != 1.0, cap or 0.0, alibi, sinks)
        yield SizeRank.CONTENTS, (len(variant.names), variant.freed_pages, *numbers)

    def shrink(self, case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
        """One variant after another left out; then a smaller window, for shorter sequences too, and simpler numbers."""
        for name in case.variant.names:
            case = yield from first_of(case, [_with_variant(case, **{name: None})])
        if case.variant.freed_pages:
            case = yield from first_of(case, [_with_variant(case, freed_pages=False)])
        if case.variant.window is not None:
            case = yield from lower_integer(case, case.variant.window, 1, _shift_window)
        if case.variant.window is not None:
            case = yield from lower_integer(case, case.variant.window, 1, lambda case, w: _with_variant(case, window=w))
        for name, simpler in (("soft_cap", _SIMPLE_CAPS), ("alibi", ALIBI_RECIPES), ("sinks", SINK_RECIPES)):
            if getattr(case.variant, name) is not None:
                case = yield from first_of(case, [_with_variant(case, **{name: value}) for value in simpler])
        return case

    def changes(self, case: AttentionCase, domain: Domain) -> Iterator[Change]:
        for name in case.variant.names:
            yield _LEFT_OUT[name], _variant(case, **{name: None})
        if case.variant.freed_pages:
            yield "pages behind the window kept instead of freed", _variant(case, freed_pages=False)


def _variant(case: AttentionCase, **fields: Any) -> Changes:
    return {"variant": msgspec.structs.replace(case.variant, **fields)}


def _with_variant(case: AttentionCase, **fields: Any) -> AttentionCase | None:
    return changed(case, **_variant(case, **fields))


def _shift_window(case: AttentionCase, window: int) -> AttentionCase | None:
    """A smaller window that leaves out as many tokens."""
    fewer = (case.variant.window or window) - window
    lengths = [max(min(length, 1), length - fewer) for length in case.seq_lens]
    shorter = with_lengths(case, lengths, lambda at, old, new: max(0, at + new - old))
    return shorter and _with_variant(shorter, window=window)


class CacheFormat(Facet[AttentionCase]):
    """An 8-bit cache and its scales."""

    fields = ("kv",)
    jumps_with = "kv"

    def features(self, case: AttentionCase) -> Iterator[Feature]:
        if (kv := case.kv) is None:
            return
        yield Feature("fp8 cache")
        if kv.dtype != KV_DTYPES[0]:
            yield Feature("kv", f"={kv.dtype}")
        if kv.per != "tensor":
            yield Feature(f"scale per {kv.per}")
        if kv.scales != "one":
            yield SCALES
        if kv.scales in ("scattered", "wide"):
            yield Feature("scales", " not pow2")
        if kv.scales == "wide":
            yield Feature("scales", " far from 1")
        if kv.scales == "large":
            yield Feature("large scale of K")

    def axes(self, domain: Domain) -> Iterator[Axis]:
        dtypes, per_each = kv_dtypes_of(domain.problem, domain.supports), domain.supports.kv_scales
        kinds = tuple(_cache_level(QuantisedKv(dtype=dtype, per=per)) for dtype in dtypes for per in per_each)
        if kinds:
            yield Axis("cache", ("plain", *kinds), lambda case: (_cache_level(case.kv),))

    def objections(self, case: AttentionCase, domain: Domain) -> Iterator[str]:
        supports = domain.supports
        if case.kv is not None and case.kv.dtype not in supports.kv_dtypes:
            yield f"kv.dtype={case.kv.dtype!r}, but the kernel declares kv_dtypes={supports.kv_dtypes}"
        elif case.kv is not None and case.kv.per not in supports.kv_scales:
            yield f"kv.per={case.kv.per!r}, but the kernel declares kv_scales={supports.kv_scales}"

    def size(self, case: AttentionCase, options: Options) -> Iterator[tuple[SizeRank, object]]:
        kv = case.kv
        ranks = () if kv is None else (
            KV_DTYPES.index(kv.dtype), KV_GRANULARITIES.index(kv.per), KV_SCALE_RECIPES.index(kv.scales)
        )  # fmt: skip
        yield SizeRank.CONTENTS, ranks

    def shrink(self, case: AttentionCase, domain: Domain) -> Proposal[AttentionCase]:
        """A plain cache; or scales that are simpler."""
        if case.kv is None:
            return case
        case = yield from first_of(case, [changed(case, kv=None)])
        for name, simpler in (("dtype", KV_DTYPES), ("per", KV_GRANULARITIES), ("scales", KV_SCALE_RECIPES)):
            if case.kv is not None:
                others = [msgspec.structs.replace(case.kv, **{name: value}) for value in simpler]
                case = yield from first_of(case, [changed(case, kv=other) for other in others])
        return case

    def changes(self, case: AttentionCase, domain: Domain) -> Iterator[Change]:
        if (kv := case.kv) is None:
            return
        yield f"a cache of {case.dtype} instead of {kv.dtype}", {"kv": None}
        if kv.scales != "one":
            yield f"scales one instead of {kv.scales}", {"kv": msgspec.structs.replace(kv, scales="one")}
        if kv.per != "tensor":
            yield f"a scale per tensor instead of {kv.per}", {"kv": msgspec.structs.replace(kv, per="tensor")}


def _cache_level(kv: QuantisedKv | None) -> str:
    """``float8_e5m2 per head``."""
    return "plain" if kv is None else f"{kv.dtype} per {kv.per}"
