"""attnfuzz.campaign.triage.contract_gaps: a finding says which declaration ends it, and a real bug never does."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.triage.contract_gaps import needed_limits, restriction_of, with_remedy
from attnfuzz.cases.facets.contents import FREED_PAGES
from attnfuzz.cases.facets.facet import other_than
from attnfuzz.cases.facets.storage import KV_STRIDES_DIFFER
from attnfuzz.cases.supported import supports_case
from attnfuzz.corpus import load_regression
from attnfuzz.declaration import Declaration
from attnfuzz.mistake import WITHOUT_WEIGHT
from attnfuzz.oracles.registry import OracleName
from attnfuzz.oracles.relations.page_relocation import stretched_axes, stretched_cache_axes
from attnfuzz.problems.cases import Case, DenseDecodeCase, MergeStatesCase, PagedDecodeCase
from attnfuzz.problems.choices import default_scale
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.supports import Supports
from attnfuzz.problems.variants import Variant
from attnfuzz.report.findings import finding_lines, remedy_lines
from attnfuzz.verdict import Cause, Failure
from tests.common.named_features import named
from tests.faults.campaigns import Campaign
from tests.sample_cases import attention_case

KERNELS = Path(__file__).parent / "undeclared_kernels.py"
POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def paged(**fields: Any) -> PagedDecodeCase:
    head_size = fields.get("head_size", 16)
    plain = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "block_size": 1, "seq_lens": (1,)}
    return PagedDecodeCase(**{**plain, "scale": default_scale(head_size), **fields})


def finding(
    case: Case,
    *features: str | Feature,
    oracle: OracleName = "accuracy",
    kind: str = "out:value",
    message: str = "it is wrong",
    cause: str = "",
    remedy: dict[str, str | bool] | None = None,
    supports: Supports | None = None,
    **fields: Any,
) -> Finding:
    """One that has been shrunk to ``case``, which needs ``features``, and fails in each run."""
    declaration = Declaration(name="k", problem=case.problem, supports=supports or Supports(), target="mine.py:k")
    causes = (Cause(mistake=cause),) if cause else ()
    failure = Failure(oracle=oracle, kind=kind, message=message, causes=causes, remedy=remedy or {})
    known = {"first_seen_s": 1.0, "failed": 3, "runs": 3, "shrunk_s": 2.0, "features": named(*map(str, features))}
    return Finding("0-1", declaration, case, failure, **{**known, **fields})


def said_of(found: Finding) -> tuple[str, ...]:
    return finding_lines(found.regression("cpu").finding, found.case)


def refused(case: Case, *features: str | Feature, **fields: Any) -> Finding:
    """The kernel raised an exception."""
    return finding(case, *features, oracle="exception", kind="ValueError in k", **fields)


GAPPED_V = paged(strides={"k_cache": "outer_gap", "v_cache": "outer_gap"}, seq_lens=(2,))
GAPPED_V_ALONE = paged(strides={"v_cache": "outer_gap"}, seq_lens=(2,))
HND = paged(layout="HND", block_size=2, seq_lens=(1, 1))
EMPTY_SUFFIX = MergeStatesCase(num_q_heads=1, head_size=16, num_tokens=1, lse_pairs=(("finite", "-inf"),))
INFINITE_SUFFIX = msgspec.structs.replace(EMPTY_SUFFIX, lse_pairs=(("finite", "+inf"),))
PADDED_BATCH = attention_case(block_size=1, seq_lens=(1,), padding_tokens=2)
WINDOWS = Supports(variants=("window",))
FREED = paged(seq_lens=(2,), variant=Variant(window=1, freed_pages=True))
CONTIGUOUS = 'if the kernel is only meant for contiguous tensors, declare Supports(strides="contiguous")'

ENDED = [
    (finding(GAPPED_V, "seq_len>1", "strides:v_cache=outer_gap"), {"strides": "contiguous"}),
    (
        finding(paged(seq_lens=(2,), strides={"q": "outer_gap"}), "strides:q=outer_gap", kind="out:nan"),
        {"strides": "contiguous"},
    ),
    (finding(HND, "layout=HND", "strides:k_cache", "strides:v_cache"), {"layouts": ("NHD",)}),
    (finding(paged(layout="packed"), "layout=packed"), {"layouts": ("NHD", "HND")}),
    (finding(HND, "block_size>1", "strides:k_cache", "strides:v_cache"), {"layouts": ("NHD",)}),
    (refused(paged(head_size=13), "head_size not pow2"), {"head_sizes": (16, 32, 64, 128, 256)}),
    (refused(paged(head_size=256), "head_size>128"), {"head_sizes": (13, 16, 40, 64, 72, 80, 96, 128, 192)}),
    (refused(paged(block_size=3), "block_size not pow2", "block_size>1"), {"block_sizes": POWERS}),
    (refused(paged(dtype="bfloat16"), "dtype=bfloat16"), {"dtypes": ("float16", "float32")}),
    (refused(paged(num_q_heads=3), "gqa_ratio>1", "gqa_ratio not pow2"), {"gqa_ratios": (1, 2, 4, 8, 16)}),
    (refused(paged(num_q_heads=2), "gqa_ratio>1"), {"gqa_ratios": (1,)}),
    (refused(paged(seq_lens=(0,)), "empty sequence"), {"empty_sequences": False}),
    (refused(EMPTY_SUFFIX, "lse finite/-inf"), {"empty_sequences": False}),
    (finding(INFINITE_SUFFIX, "lse finite/+inf", kind="output:nan"), {"empty_state_lse": ("-inf",)}),
    (refused(PADDED_BATCH, "padding tokens"), {"padding_tokens": False}),
    (finding(GAPPED_V_ALONE, KV_STRIDES_DIFFER, "strides:v_cache=outer_gap"), {"strides": "serving"}),
    (
        finding(FREED, FREED_PAGES, "window", oracle="dead_memory", supports=WINDOWS, cause=WITHOUT_WEIGHT),
        {"freed_pages": False},
    ),
]
"""With the least declaration that excludes the case."""

STAYING = {
    "a window that is too long": finding(FREED, FREED_PAGES, "window", oracle="dead_memory", supports=WINDOWS),
    "a missing mask behind a length": finding(paged(block_size=2), "block_size>1", "partial last page"),
    "a missing mask behind a head": finding(paged(head_size=13), "head_size not pow2", oracle="dead_memory"),
    "the same where a gap shows it": finding(
        paged(head_size=13, strides={"q": "outer_gap"}), "head_size not pow2", "strides:q=outer_gap"
    ),
    "a wrong head map": finding(paged(num_q_heads=6, num_kv_heads=2), "gqa_ratio>1", "gqa_ratio not pow2"),
    "a wrong head map that leads outside": refused(
        paged(num_q_heads=4, num_kv_heads=2), "gqa_ratio>1", "num_kv_heads>1"
    ),
    "0/0 for an empty sequence": finding(paged(seq_lens=(0,)), "empty sequence", kind="out:nan"),
    "an offset in 32 bits": finding(paged(seq_lens=(5, 5)), "seq_len>1", oracle="page_relocation", kind="strides of q"),
    "NaN beside an empty state": finding(EMPTY_SUFFIX, "lse finite/-inf", kind="output:nan"),
    "page offsets in 32 bits": finding(GAPPED_V, "strides:v_cache", oracle="page_relocation", kind="page ids"),
    "strides of K taken for those of V, where each may have its own": finding(
        GAPPED_V_ALONE, KV_STRIDES_DIFFER, supports=Supports(strides="hybrid")
    ),
    "heads of V that are taken for as long as those of K": finding(
        paged(v_head_size=32), KV_STRIDES_DIFFER, supports=Supports(v_head_sizes="any")
    ),
    "memory that is read before it is written": finding(
        GAPPED_V, "seq_len>1", "strides:v_cache=outer_gap", oracle="unwritten", cause="read_before_written"
    ),
    "strides that are not needed": finding(GAPPED_V, "seq_len>1"),
    "a result of the wrong shape": finding(
        paged(head_size=13), "head_size not pow2", oracle="exception", kind="result"
    ),
    "a division by zero": finding(
        paged(num_q_heads=17), "gqa_ratio>1", "gqa_ratio not pow2", oracle="exception", kind="ZeroDivisionError in k"
    ),
    "what comes and goes": finding(GAPPED_V, "strides:v_cache=outer_gap", failed=1),
    "what needs other cases": finding(GAPPED_V, "strides:v_cache=outer_gap", preceding=(GAPPED_V,)),
    "what may not need its strides": finding(GAPPED_V, "strides:v_cache=outer_gap", shrunk_s=None),
    "a broken promise": finding(GAPPED_V, "strides:v_cache=outer_gap", supports=Supports(strides="any")),
    "a size that was declared": refused(
        paged(head_size=80), "head_size not pow2", supports=Supports(head_sizes=(64, 80))
    ),
    "two refusals in one": refused(paged(dtype="float32", block_size=3), "dtype=float32", "block_size not pow2"),
}


@pytest.mark.parametrize(("found", "limits"), ENDED)
def test_the_least_declaration_that_excludes_the_case_can_be_copied(found: Finding, limits: dict[str, Any]) -> None:
    """What a user pastes would be no Python, not end the finding, or give away more of the search than need be."""
    assert needed_limits(found) == limits
    supports = found.declaration.supports
    assert supports_case(supports, {}, found.case)
    assert not supports_case(msgspec.structs.replace(supports, **limits), {}, found.case)
    for _ in range(2):  # as after a merger
        with_remedy(found)
    (line,) = (one for one in said_of(found) if "declare " in one)
    condition, _, told = line.partition(", declare ")
    assert condition.startswith("if the kernel is ")
    call = ast.parse(told, mode="eval").body
    assert isinstance(call, ast.Call)
    assert {one.arg: ast.literal_eval(one.value) for one in call.keywords} == limits


@pytest.mark.parametrize("name", STAYING)
def test_a_bug_is_not_declared_away(name: str) -> None:
    """A real bug would come with the advice not to look there."""
    found = STAYING[name]
    with_remedy(found)
    assert found.remedy is None
    assert restriction_of(found.declaration, [found]) is None


def test_a_finding_that_stands_for_more_says_what_ends_all_of_it() -> None:
    """The user would declare it, and meet the same bug at the next tensor."""
    found = finding(paged(strides={"k_cache": "outer_gap"}), "strides:k_cache=outer_gap")
    assert needed_limits(found) == {"strides": "contiguous"}
    found.also_shows_as(finding(HND, "strides:k_cache", "strides:v_cache", "layout=HND"))
    with_remedy(found)
    condition = "if the kernel is only meant for contiguous tensors and the layout NHD"
    assert said_of(found)[0].startswith(f'{condition}, declare Supports(layouts=("NHD",), strides=')


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"graph_replay": False}, "not meant to be captured into a CUDA graph"),
        ({"empty_sequences": False, "padding_tokens": False}, "not meant to take empty sequences and not meant to"),
        (
            {"dtypes": ("bfloat16",), "head_sizes": (64,)},
            "not meant to take dtype float16 and not meant to take head_size",
        ),
        ({"strides": "serving"}, "only meant for a K and V that lie alike"),
        ({"strides": "contiguous"}, "only meant for contiguous tensors"),
        ({"lse": "base2"}, "meant to return logarithms to base 2"),
        ({"strides": "contiguous", "lse": "none"}, "only meant for contiguous tensors and not meant to return an LSE"),
    ],
)
def test_whatever_ends_a_finding_has_words(limits: dict[str, Any], words: str) -> None:
    """A report over hours of search would end in a traceback of attnfuzz's own."""
    assert remedy_lines(limits, PADDED_BATCH)[0].startswith(f"if the kernel is {words}")


def test_an_ignored_stride_ends_with_strides() -> None:
    """A relation gives the case other strides than it has, so that no look at the case tells what excludes it."""
    case = paged(seq_lens=(5, 5), num_q_heads=3)
    found = finding(case, "seq_len>1", oracle="page_relocation", kind="ignored stride of q", cause="ignored_stride")
    assert needed_limits(found) == {"strides": "contiguous"}
    declared = Declaration(name="k", problem="paged_decode", supports=Supports(strides="contiguous"), target="k")
    for turn in range(2):
        assert not stretched_axes(declared, case, turn)
        assert not stretched_cache_axes(declared, case, turn)
    with_remedy(found)
    assert sum("Supports(" in line for line in said_of(found)) == 1


def test_one_declaration_for_all_findings_of_a_kernel() -> None:
    """The user would try one after the other, each in a search of its own."""
    unwritten = finding(paged(), oracle="unwritten", kind="lse", remedy={"lse": "none"})
    bug = STAYING["a wrong head map"]
    wrong = [one for one, _ in ENDED if one.case.problem == "paged_decode" and one.failure.oracle != "exception"]
    declaration = wrong[0].declaration
    found = [one for one in wrong if one.declaration == declaration]
    told = restriction_of(declaration, [*found, unwritten, bug])
    assert told is not None
    assert told.supports == Supports(layouts=("NHD",), strides="contiguous", lse="none")
    assert str(told).startswith("7 of 8 findings go away if you declare Supports(")
    assert 'Supports(layouts=("NHD",), strides="contiguous", lse="none")' in str(told)
    assert not any(supports_case(told.supports, {}, one.case) for one in found)


def test_what_is_declared_stays_in_the_line_to_copy() -> None:
    """Pasted over the declaration, it would have the search draw what had been excluded."""
    supports = Supports(head_sizes=(16, 32), deterministic=False)
    found = finding(GAPPED_V, "strides:v_cache=outer_gap", supports=supports)
    told = restriction_of(found.declaration, [found])
    assert told is not None
    text = 'Supports(head_sizes=(16, 32), strides="contiguous", deterministic=False)'
    assert str(told) == f"1 of 1 finding goes away if you declare {text}"


def test_the_simplest_size_may_be_the_one_that_is_refused() -> None:
    """A search ended with an internal error where a kernel refuses heads of 16, which matrix units of 8 bits do."""
    size = other_than("head_size", 64)
    for features, text in (
        (("head_size=16",), ""),
        ((str(size), str(other_than("head_size", 128))), "head_sizes=(64, 128)"),
    ):
        found = refused(paged(), *features)
        with_remedy(found)
        assert (found.remedy is None) if not text else text in repr(found.remedy)


def test_no_declaration_that_leaves_no_case() -> None:
    """A search of what is left could not begin."""
    lonely = [refused(paged(dtype=dtype), f"dtype={dtype}") for dtype in ("float16", "bfloat16", "float32")]
    assert restriction_of(lonely[0].declaration, lonely) is None


@pytest.mark.parametrize(("kernel", "is_undeclared"), [("rests_on_contiguous_v", True), ("wrong_head_map", False)])
@pytest.mark.night
def test_a_campaign_tells_what_is_undeclared_from_a_bug(kernel: str, is_undeclared: bool, tmp_path: Path) -> None:
    """A newcomer's kernel would seem to be full of bugs, or its bug seem to be a matter of what it declares."""
    options = ("--budget", "300s", "--device", "cpu", "--seed", "1", "--fail-fast", "--oracle", "accuracy")
    with Campaign(tmp_path, *options, kernels=f"{KERNELS}:{kernel}", workers=1) as campaign:
        assert campaign.wait(timeout_s=330.0) == 1, campaign.output
    (path,) = (tmp_path / "regressions").glob("*.json")
    saved = load_regression(path)
    assert isinstance(saved.case, DenseDecodeCase)
    told = [one for one in finding_lines(saved.finding, saved.case) if "declare Supports(" in one]
    assert told == ([CONTIGUOUS] if is_undeclared else []), campaign.output
    assert (CONTIGUOUS in campaign.output) == is_undeclared
