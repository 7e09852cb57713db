"""Features by their words, for tests that write them down."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import msgspec

from attnfuzz.cases.features import features, general_features, unusual_values
from attnfuzz.identity.features import NEEDS_PRECEDING
from attnfuzz.problems.cases import Case
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.recipes import Needle, Pages, Values
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import Variant

SUPPORTS = Supports()
PAGED = simplest_case("paged_decode", SUPPORTS, {})


def words(found: Iterable[Feature]) -> set[str]:
    """How they are told."""
    return set(map(str, found))


def named(*words: str) -> frozenset[Feature]:
    """What facets make of cases that have it, so that it says the same of a bug."""
    made = _made()
    return frozenset(made.get(one) or Feature.read(one) for one in words)


@functools.cache
def _made() -> Mapping[str, Feature]:
    found: set[Feature] = {NEEDS_PRECEDING, Feature("pages moved", role="place")}
    for case in _specimens():
        found |= features(case) | general_features(case, supports=SUPPORTS) | unusual_values(case, supports=SUPPORTS)
    return {str(one): one for one in found}


def _specimens() -> list[Case]:
    def of(problem: str, **fields: object) -> Case:
        return msgspec.structs.replace(simplest_case(problem, SUPPORTS, {}), **fields)

    paged = functools.partial(of, "paged_decode")
    needles = (Needle(seq=0, position=0, kv_head=0),)
    kinds = ("-inf", "+inf", "high", "low", "equal", "finite")
    return [
        of("dense_decode", extra_rows=1, seq_lens=(0, 3)),
        of("dense_decode", strides={"k": "padded_rows", "v": "every_other"}),
        *(of("dense_decode", strides={"k": kind, "q": kind}) for kind in ("padded_rows", "every_other")),
        paged(seq_lens=(3, 0), block_size=3, num_q_heads=6, num_kv_heads=2, head_size=160),
        paged(seq_lens=(3, 4), block_size=2, num_q_heads=3, pages=Pages(shared_blocks=1, spare_blocks=1)),
        *(paged(pages=Pages(order=order, extra_columns=1, padding="garbage")) for order in ("reversed", "shuffled")),
        *(paged(layout=layout, dtype="bfloat16") for layout in ("HND", "packed", "interleaved")),
        paged(v_head_size=40, dtype="float32", scale=1.0),
        paged(values=Values(keys="normal", values="large", logit_exponent=3, needles=needles)),
        *(paged(values=Values(values=values, logit_exponent=-3)) for values in ("integers", "normal")),
        paged(variant=Variant(window=1, soft_cap=1.0), seq_lens=(2,)),
        paged(kv=QuantisedKv(dtype="float8_e4m3fn", per="head", scales="scattered")),
        of("split_decode", num_splits=4),
        of("paged_attention", seq_lens=(3, 2), query_lens=(2, 0), padding_tokens=1, seq_slack=1, causal=False),
        of("merge_states", num_tokens=2, num_q_heads=2, lse_layout="TH"),
        *(of("merge_states", lse_pairs=((one, other),)) for one in kinds for other in kinds),
    ]
