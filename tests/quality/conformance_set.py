"""``python -m tests.quality.conformance_set VERSION``: makes a new set of cases for ``attnfuzz conformance``.

One case differs from an ordinary one in one thing; saved cases of `regressions/` and drawn ones follow. What has been
made stays as it is: pages of different days are compared by the version of their set.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from attnfuzz.campaign.draw.sampling import run_round
from attnfuzz.conformance import TWO_RUNS, ConformanceEntry, set_file
from attnfuzz.corpus import load_regression, regression_files
from attnfuzz.families import (
    BlockSparse,
    CacheWrite,
    History,
    IndexerTopk,
    LatentVerify,
    MergeRanks,
    PackedDecode,
    RecurrentDecode,
    SparseDecode,
    TurboDecode,
    TurboWrite,
)
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.cases import (
    Case,
    LatentDecodeCase,
    MaskedAttentionCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    Problem,
    encode_case,
)
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.fields import Choice, Field, Integer, Integers
from attnfuzz.problems.masks import ALL_HIDDEN, Mask
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.own import describe
from attnfuzz.problems.quantised_kv import QuantisedKv
from attnfuzz.problems.recipes import Needle, Pages, Values
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import Variant
from attnfuzz.strategies import cases

SEED = 20261124
DRAWN, DRAWN_OPEN = 40, 12
USUAL = 3
"""What a number of an open problem is, if nothing else is said."""
SERVED = Supports(
    dtypes=("float16", "bfloat16"), head_sizes=(64, 128), block_sizes=(16, 32), layouts=("NHD",), gqa_ratios=(1, 4, 8)
)
"""What every engine takes: drawn cases differ in lengths, pages and numbers."""
TELLING = Values(keys="normal", values="normal", seed=1)
NAMING = Values(keys="equal", values="positions", seed=1)


def paged(**changes: Any) -> PagedDecodeCase:
    """An ordinary case, but for what is given."""
    fields: dict[str, Any] = {
        "num_q_heads": 8, "num_kv_heads": 2, "head_size": 64, "block_size": 16, "seq_lens": (5, 16, 33),
        "values": TELLING, **changes,
    }  # fmt: skip
    return PagedDecodeCase(**{"scale": default_scale(fields["head_size"]), **fields})


def attention(**changes: Any) -> PagedAttentionCase:
    """Likewise, of queries that the batch has one of for each sequence."""
    fields: dict[str, Any] = {
        "num_q_heads": 8, "num_kv_heads": 2, "head_size": 64, "block_size": 16, "seq_lens": (5, 16, 33),
        "query_lens": (1, 1, 1), "values": TELLING, "scale": default_scale(64), **changes,
    }  # fmt: skip
    return PagedAttentionCase(**fields)


def latent(**changes: Any) -> LatentDecodeCase:
    """Likewise, of latent vectors as DeepSeek has them, in pages as FlashMLA's."""
    fields: dict[str, Any] = {
        "num_q_heads": 16, "head_size": 576, "v_head_size": 512, "block_size": 64, "seq_lens": (5, 64, 130),
        "values": TELLING, "scale": default_scale(192), **changes,
    }  # fmt: skip
    return LatentDecodeCase(**fields)


def masked(mask: Mask, **changes: Any) -> MaskedAttentionCase:
    """Likewise, of several queries of each sequence under a mask."""
    fields: dict[str, Any] = {
        "num_q_heads": 8, "num_kv_heads": 2, "head_size": 64, "block_size": 16, "seq_lens": (20, 16, 40),
        "query_lens": (6, 4, 1), "values": TELLING, "scale": default_scale(64), "mask": mask, **changes,
    }  # fmt: skip
    return MaskedAttentionCase(**fields)


def states(**changes: Any) -> MergeStatesCase:
    """Likewise, of states to merge."""
    return MergeStatesCase(**{"num_q_heads": 8, "head_size": 64, "num_tokens": 3, **changes})


def features() -> Iterator[tuple[str, str, list[Case], bool]]:
    """Group, feature, cases, and whether they are put to kernels just as they are."""
    for dtype in ("float16", "bfloat16", "float32"):
        both: list[Case] = [paged(dtype=dtype), states(dtype=dtype)]
        yield "dtype", dtype, both, False
    for size in (16, 32, 64, 72, 80, 96, 128, 192, 256):
        yield "head size", str(size), [paged(head_size=size), states(head_size=size)], False
    mla = paged(head_size=192, v_head_size=128, num_q_heads=4, num_kv_heads=4)
    yield "head size", "192, of V 128", [mla], False
    for ratio in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 24, 32):
        one = paged(num_q_heads=2 * ratio, values=NAMING)
        yield "query heads on a KV head", str(ratio), [one, paged(num_q_heads=ratio, num_kv_heads=1)], False
    for size in (1, 2, 4, 8, 16, 24, 32, 64, 128, 256):
        yield "page size", str(size), [paged(block_size=size), paged(block_size=size, values=NAMING)], False
    for layout in ("NHD", "HND", "interleaved", "packed"):
        yield "layout", layout, [paged(layout=layout)], True
    yield from lengths()
    yield from places()
    yield from numbers()
    yield from variants()
    yield from queries()
    yield from latents()
    yield from masks()
    yield from merges()


def lengths() -> Iterator[tuple[str, str, list[Case], bool]]:
    """What kernels cut into pages, tiles and splits."""
    group = "lengths"
    for name, seq_lens in (
        ("one token", (1,)),
        ("a page less one token", (15, 31)),
        ("full pages", (16, 32, 64)),
        ("a page and one token", (17, 33)),
        ("one beside 700", (1, 700)),
        ("1,500", (1500,)),
        ("65 sequences", tuple(1 + i % 20 for i in range(65))),
    ):
        yield group, name, [paged(seq_lens=seq_lens), paged(seq_lens=seq_lens, values=NAMING)], False
    yield group, "an empty sequence beside others", [paged(seq_lens=(5, 0, 33)), paged(seq_lens=(0, 9))], False
    yield group, "empty sequences only", [paged(seq_lens=(0,)), paged(seq_lens=(0, 0))], False


def places() -> Iterator[tuple[str, str, list[Case], bool]]:
    """Where pages and tensors lie."""
    group = "memory"
    for name, pages in (
        ("shuffled pages", Pages(order="shuffled", spare_blocks=5, seed=1)),
        ("pages that sequences share", Pages(shared_blocks=1)),
        ("a table wider than needed", Pages(extra_columns=3)),
    ):
        yield group, name, [paged(pages=pages, seq_lens=(40, 20, 33), values=NAMING)], False
    wide: dict[str, Any] = {"seq_lens": (40, 20, 33), "values": NAMING}
    for name, unused in (
        ("a wrong page", Pages(extra_columns=3, spare_blocks=1, padding="wrong_page")),
        ("ids that do not exist", Pages(extra_columns=3, spare_blocks=1, padding="garbage")),
    ):
        yield group, f"unused table entries: {name}", [paged(pages=unused, **wide)], True
    gap = {"k_cache": "outer_gap", "v_cache": "outer_gap"}
    yield group, "q is a slice of a fused projection", [paged(strides={"q": "outer_gap"})], True
    yield group, "gaps between pages", [paged(strides=gap)], True
    yield group, "every other element of q", [paged(strides={"q": "every_other"})], True
    yield group, "a transposed cache", [paged(strides={"k_cache": "transposed", "v_cache": "transposed"})], True


def numbers() -> Iterator[tuple[str, str, list[Case], bool]]:
    """What q, K and V hold."""
    group = "numbers"
    for name, values in (
        ("equal scores", Values(keys="equal", values="normal", seed=1)),
        ("rising scores", Values(keys="rising", values="normal", seed=1)),
        ("falling scores", Values(keys="falling", values="normal", seed=1)),
        ("very negative scores", Values(keys="negative", values="normal", logit_exponent=4, seed=1)),
        ("large scores", Values(keys="normal", values="normal", logit_exponent=4, seed=1)),
        ("large values", Values(keys="normal", values="large", seed=1)),
        ("small differences", Values(keys="fine", values="fine", seed=1)),
        ("one key outweighs all: the first", Values(keys="normal", seed=1, needles=(Needle(2, 0, 1),))),
        ("one key outweighs all: the last", Values(keys="normal", seed=1, needles=(Needle(2, 32, 1),))),
    ):
        yield group, name, [paged(values=values), paged(values=values, dtype="bfloat16")], False
    yield group, "a scale of its own", [paged(scale=0.5), paged(scale=1.0, head_size=128)], False


def variants() -> Iterator[tuple[str, str, list[Case], bool]]:
    """What models ask for beyond plain attention, and caches of 8 bits."""
    group = "variants"
    for name, variant in (
        ("sliding window", Variant(window=7)),
        ("soft cap", Variant(soft_cap=20.0)),
        ("ALiBi", Variant(alibi="geometric")),
        ("sinks", Variant(sinks="level")),
    ):
        yield group, name, [paged(variant=variant), attention(variant=variant, query_lens=(5, 1, 8))], False
    for name, kv in (
        ("cache in e4m3", QuantisedKv(dtype="float8_e4m3fn")),
        ("cache in e5m2", QuantisedKv(dtype="float8_e5m2")),
        ("cache in e4m3, a scale for each head", QuantisedKv(dtype="float8_e4m3fn", per="head", scales="powers")),
    ):
        yield group, name, [paged(kv=kv)], False


def queries() -> Iterator[tuple[str, str, list[Case], bool]]:
    """What prefill adds to decode."""
    group = "queries"
    for name, changes in (
        ("prefill", {"query_lens": (5, 16, 33)}),
        ("chunked prefill", {"query_lens": (3, 7, 17)}),
        ("prefill beside decode", {"query_lens": (5, 1, 1)}),
        ("a sequence without queries", {"query_lens": (0, 4, 1)}),
        ("bounds larger than any length", {"query_lens": (2, 1, 9), "query_slack": 7, "seq_slack": 40}),
        ("rows of padding", {"query_lens": (2, 1, 9), "padding_tokens": 4}),
    ):
        yield group, name, [attention(**changes), attention(**changes, values=NAMING)], False


def latents() -> Iterator[tuple[str, str, list[Case], bool]]:
    """Multi-head latent attention."""
    group = "latent attention"
    for dtype in ("float16", "bfloat16"):
        yield group, dtype, [latent(dtype=dtype)], False
    for heads in (1, 8, 16, 17, 64, 128):
        yield (
            group,
            f"{heads} query heads",
            [latent(num_q_heads=heads), latent(num_q_heads=heads, values=NAMING)],
            False,
        )
    for size in (1, 16, 32, 64, 128):
        yield group, f"pages of {size}", [latent(block_size=size, values=NAMING)], False
    yield group, "576, of V 512, less common sizes", [latent(head_size=288, v_head_size=256)], False
    for name, seq_lens in (
        ("one token", (1,)), ("700 tokens", (700,)), ("65 sequences", tuple(1 + i % 20 for i in range(65))),
        ("an empty sequence beside others", (5, 0, 33)),
    ):  # fmt: skip
        yield group, name, [latent(seq_lens=seq_lens)], False
    for name, values in (
        ("very negative scores", Values(keys="negative", values="normal", logit_exponent=4, seed=1)),
        ("large scores", Values(keys="normal", values="normal", logit_exponent=4, seed=1)),
    ):
        yield group, name, [latent(values=values)], False
    for name, variant in (("sliding window", Variant(window=7)), ("soft cap", Variant(soft_cap=20.0))):
        yield group, name, [latent(variant=variant)], False
    yield group, "pages that sequences share", [latent(pages=Pages(shared_blocks=1), seq_lens=(70, 80))], False


def masks() -> Iterator[tuple[str, str, list[Case], bool]]:
    """What a query sees beside, or in place of, the keys up to itself."""
    group = "masks"
    whole = {"query_lens": (5, 4, 8)}
    yield (
        group,
        "not causal",
        [attention(causal=False, **whole), attention(causal=False, **whole, values=NAMING)],
        False,
    )
    for name, mask, changes in (
        ("causal", Mask(), {}),
        ("full, as in an encoder", Mask(kind="full"), {"query_lens": (20, 16, 40)}),
        ("full, as in cross attention", Mask(kind="full"), {"query_lens": (6, 1, 3)}),
        ("a tree for all sequences", Mask(kind="tree", seqs=((-1, 0, 0, 1, 1, 2),)), {}),
        ("a tree for each sequence", Mask(kind="tree", seqs=((-1, 0, 0, 1, 1, 2), (-1, -1, 1, 0), ())), {}),
        ("siblings only", Mask(kind="tree", seqs=((-1, -1, -1, -1, -1, -1),)), {}),
        ("a tree without context", Mask(kind="tree", seqs=((-1, 0, 0, 1, 1, 2),)), {"seq_lens": (6, 4, 1)}),
        ("40 drafts, of two branches", Mask(kind="tree", seqs=((-1, -1, *range(38)),)), {"query_lens": (40,),
                                                                                         "seq_lens": (100,)}),
        ("a skipped page", Mask(kind="pages", seqs=((1,),)), {"seq_lens": (40, 50, 70)}),
        ("the first page skipped", Mask(kind="pages", seqs=((0,),)), {"seq_lens": (40, 50, 70)}),
        ("every other key", Mask(kind="bits", seqs=((0x5555,),)), {}),
        ("another pattern for each query", Mask(kind="bits", seqs=((2, 0x00FF, 0x7FFF),)), {}),
        ("a query that sees no key", Mask(kind="bits", seqs=((0, ALL_HIDDEN),)), {}),
    ):  # fmt: skip
        yield group, name, [masked(mask, **changes), masked(mask, **changes, values=NAMING)], False
    tree = Mask(kind="tree", seqs=((-1, 0, 0, 1, 1, 2),))
    for name, variant in (("soft cap", Variant(soft_cap=20.0)), ("sinks", Variant(sinks="level"))):
        yield group, f"a tree and {name}", [masked(tree, variant=variant)], False
    yield group, "a tree and bfloat16", [masked(tree, dtype="bfloat16")], False


def merges() -> Iterator[tuple[str, str, list[Case], bool]]:
    """States that are merged."""
    group = "merging"
    for name, pairs in (
        ("finite LSEs", (("finite", "finite"),)),
        ("equal LSEs", (("equal", "equal"),)),
        ("LSEs far apart", (("high", "low"), ("low", "high"))),
        ("an empty state", (("-inf", "finite"), ("finite", "-inf"))),
        ("two empty states", (("-inf", "-inf"),)),
    ):
        yield group, name, [states(lse_pairs=pairs), states(lse_pairs=pairs, dtype="bfloat16")], False
    plus = states(lse_pairs=(("+inf", "finite"), ("finite", "+inf")))
    yield group, "empty states marked +inf", [plus], True
    yield group, "300 tokens", [states(num_tokens=300)], False


def open_problems() -> Iterator[tuple[OpenProblem, str]]:
    """The problems of `attnfuzz.families` that engines have kernels of, and what their rows are called."""
    for family, group in (
        (CacheWrite, "cache writes"),
        (SparseDecode, "sparse attention"),
        (LatentVerify, "verified drafts"),
        (MergeRanks, "merged ranks"),
        (RecurrentDecode, "recurrent decode"),
        (PackedDecode, "packed caches"),
        (BlockSparse, "lists of blocks"),
        (IndexerTopk, "blocks chosen by scores"),
        (History, "histories of batches"),
        (TurboDecode, "TurboQuant caches"),
        (TurboWrite, "writes of TurboQuant"),
    ):
        described = describe(family())
        place = f"attnfuzz/families/{described.place.rpartition('/')[2]}"
        yield msgspec.structs.replace(described, place=place), group


def of_open_problems() -> Iterator[ConformanceEntry]:
    """Each choice and each number's ends, in an ordinary case; then drawn ones."""
    for problem, group in open_problems():
        usual = {name: _usual(field) for name, field in problem.fields.items()}
        for name, field in problem.fields.items():
            ends = (field.low, field.high) if isinstance(field, Integer) else ()
            values = field.values if isinstance(field, Choice) else ends
            for value in values if len(values) > 1 else ():
                case = problem.case_type(**{**usual, name: value})
                yield ConformanceEntry(group, f"{name}={value}", case, about=name)
        found: list[Case] = []

        def visit(case: Case, found: list[Case] = found) -> bool:
            found.append(case)
            return len(found) < DRAWN_OPEN

        run_round(
            cases(problem, supports=Supports()), visit, seed_value=SEED, until=math.inf, max_draws=10 * DRAWN_OPEN
        )
        yield from (ConformanceEntry("drawn cases", f"of {problem.name}", case) for case in found)


def _usual(field: Field) -> Any:
    if isinstance(field, Integer):
        return min(field.high, max(field.low, USUAL))
    if isinstance(field, Integers):
        return tuple(min(field.high, max(field.low, one)) for one in (5, 33, 16)[: max(1, min(3, field.most))])
    return field.simplest


def laws() -> Iterator[ConformanceEntry]:
    """What is asked of two runs or more."""
    asked: tuple[tuple[OracleName, str], ...] = (
        (TWO_RUNS, "no result of unused memory, none unwritten"),
        ("guard_page", "no access outside of tensors"),
        ("page_relocation", "offsets past 2^31"),
        ("page_permutation", "pages elsewhere"),
        ("block_table_slack", "other unused table entries"),
        ("call_sequence", "calls before this one"),
        ("value_affinity", "V times a power of two"),
        ("containment", "NaN and infinity stay in their rows"),
    )
    tree = Mask(kind="tree", seqs=((-1, 0, 0, 1, 1, 2),))
    for law, name in asked:
        if law in (TWO_RUNS, "guard_page", "page_permutation", "call_sequence"):
            yield ConformanceEntry("laws", name, latent(), law=law)
            yield ConformanceEntry("laws", name, masked(tree), law=law)
        yield ConformanceEntry("laws", name, paged(seq_lens=(40, 20, 33), num_q_heads=8), law=law)
        if law in (TWO_RUNS, "guard_page", "page_relocation", "call_sequence"):
            yield ConformanceEntry("laws", name, states(), law=law)
    yield ConformanceEntry(
        "laws", "an empty state changes nothing", states(lse_pairs=(("finite", "-inf"),)), law="merge_laws"
    )


def saved() -> Iterator[ConformanceEntry]:
    """The cases in which bundled kernels once failed, by problem."""
    for file in regression_files((Path("regressions"),)):
        regression = load_regression(file)
        if regression.preceding:
            continue
        case = msgspec.structs.replace(regression.case, options={})
        yield ConformanceEntry("saved cases", f"of {case.problem}", case, note=file.stem.rpartition("-")[2])


def drawn() -> Iterator[ConformanceEntry]:
    """Of a seed."""
    problems: dict[Problem, Supports] = {
        "paged_decode": SERVED,
        "paged_attention": SERVED,
        "masked_attention": SERVED,
        "latent_decode": Supports(
            dtypes=("float16", "bfloat16"), head_sizes=(576,), v_head_sizes=(512,), block_sizes=(32, 64),
            gqa_ratios=(16, 64),
        ),
        "merge_states": SERVED,
    }  # fmt: skip
    for problem, supports in problems.items():
        found: list[Case] = []

        def visit(case: Case, found: list[Case] = found) -> bool:
            found.append(case)
            return len(found) < DRAWN

        run_round(cases(problem, supports=supports), visit, seed_value=SEED, until=math.inf, max_draws=10 * DRAWN)
        yield from (ConformanceEntry("drawn cases", f"of {problem}", case) for case in found)


def main() -> None:
    """Write the set."""
    version = int(sys.argv[1])
    entries = [
        ConformanceEntry(group, feature, case, strict=strict)
        for group, feature, made, strict in features()
        for case in made
    ]
    entries += [*laws(), *saved(), *drawn(), *of_open_problems()]
    problems = {problem.place: msgspec.to_builtins(problem.fields) for problem, _ in open_problems()}
    document = [
        {"group": one.group, "feature": one.feature, "problem": getattr(one.case.problem, "place", one.case.problem),
         "strict": one.strict, "law": one.law, "note": one.note, "about": one.about,
         "case": json.loads(encode_case(one.case))}
        for one in entries
    ]  # fmt: skip
    lines = ",\n".join(json.dumps(one) for one in document)
    head = '"format": "attnfuzz.conformance-set/1", '
    head += f'"version": {version}, "seed": {SEED}, "problems": {json.dumps(problems)}'
    path = set_file(version)
    path.write_text(f'{{{head}, "entries": [\n{lines}\n]}}\n')
    print(f"{path}: {len(entries)} cases")


if __name__ == "__main__":
    main()
