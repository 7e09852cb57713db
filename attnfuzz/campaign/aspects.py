"""Which of a bug's features say what it is about, and which only how large a case must be to show it."""

from __future__ import annotations

from attnfuzz.problems.features import CACHE_STRIDES, CACHE_TENSORS, KV_STRIDES_DIFFER

__all__ = ["SILENT_ORACLES", "aspects", "telling"]

SILENT_ORACLES = frozenset({"accuracy", "dead_memory", "unwritten", "determinism"})
"""One wrong address gives a number that is merely wrong, or dead memory's, or nobody's, as the case has it."""

_SIZES = frozenset(
    {
        "block_size>1",
        "extra columns",
        "extra rows",
        "needles",
        "num_kv_heads>1",
        "num_q_heads>1",
        "num_seqs>1",
        "num_splits>1",
        "num_tokens>1",
        "pages=reversed",
        "pages=shuffled",
        "partial last page",
        "ragged",
        "scale",  # goes with the head size
        "seq_len>1",
        "seq_len>block_size",
        "spare blocks",
    }
)
_VALUES = ("keys=", "values=", "logit_exponent")
"""Recipes for numbers make an error visible more often than they cause it."""
_CACHES = frozenset(f"strides:{name}" for names in CACHE_TENSORS for name in names)


def aspects(features: frozenset[str]) -> frozenset[str]:
    """The features that name a part of a kernel: strides, layout, head mapping, type, option, empty rows.

    Strides count by tensor, not by how they came about; those of the caches not at all if what matters is that K and V
    differ. Cases with no aspect in common are hardly the same bug, while every bug may need several tokens.
    """
    found = {one for one in features if one not in _SIZES and not one.startswith(_VALUES)}
    found -= {one for one in found if one.startswith("strides:") and "=" in one}
    if "gqa_ratio not pow2" in found:
        found.discard("gqa_ratio>1")
    if KV_STRIDES_DIFFER in found:
        found -= {CACHE_STRIDES, *_CACHES}
        found = {one for one in found if not one.startswith("layout=")}
    return frozenset(found)


def telling(features: frozenset[str]) -> frozenset[str]:
    """``features`` for people: without general ones that a particular one implies."""
    particular = {one.partition("=")[0] for one in features if "=" in one}
    moved = _CACHES if "layout" in particular else frozenset[str]()
    shown = {one for one in features if one not in particular and one not in moved}
    if shown & {KV_STRIDES_DIFFER, *_CACHES} or particular & {"layout", *_CACHES}:
        shown.discard(CACHE_STRIDES)
    return frozenset(shown)
