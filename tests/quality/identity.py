"""`python -m tests.quality.identity`: what each rule that tells bugs apart is worth, as a table in Markdown.

Kernels are pretended: a function says how a case fails, so thousands of cases take seconds and every bug that a finding
is about is known. Campaigns of one bug show what is told twice, those of several what is missed. Each rule is switched
off in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from attnfuzz.campaign.triage import investigation, known_deaths
from attnfuzz.cases.facets.storage import KV_STRIDES_DIFFER
from attnfuzz.cases.features import features, general_features
from attnfuzz.declaration import Declaration
from attnfuzz.identity import asking, bug
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.cases import DenseDecodeCase, MergeStatesCase, PagedDecodeCase, encode_case
from attnfuzz.problems.supports import Supports
from attnfuzz.verdict import Cause, Failure
from tests.common.search_bench import Bug, findings

TRIPLES = 24
"""Campaigns of three bugs, drawn once and for all."""


def _fails(oracle: OracleName, kind: str, **said: Any) -> Failure:
    return Failure(oracle=oracle, kind=kind, message=f"{oracle} objects", **said)


def _luck(case: Any, parts: int) -> int:
    return zlib.crc32(encode_case(case)) % parts


def _as_address(case: Any) -> Failure:
    """How a wrong address shows depends on what lies there."""
    if max(case.seq_lens) > 8:
        return _fails("dead_memory", "out")
    if case.num_seqs > 1:
        return _fails("unwritten", "out")
    return _fails("page_permutation", "bits") if _luck(case, 8) == 0 else _fails("accuracy", "out:value")


def _as_number(case: Any) -> Failure:
    """A wrong number shows in the output, in the LSE alone where V is constant, or becomes infinite."""
    if case.values.values == "ones":
        return _fails("accuracy", "lse:value")
    return _fails("accuracy", ("out:value", "out:value", "out:inf", "out:nan")[_luck(case, 4)])


def _is_strided(case: Any, name: str) -> bool:
    return case.strides.get(name, "contiguous") not in ("contiguous", "offset")


def strides_of_k_for_v(case: Any) -> Failure | None:
    return _as_address(case) if KV_STRIDES_DIFFER in general_features(case) else None


def stride_of_k_ignored(case: Any) -> Failure | None:
    name = "k" if isinstance(case, DenseDecodeCase) else "k_cache"
    return _as_address(case) if _is_strided(case, name) else None


def stride_of_q_ignored(case: Any) -> Failure | None:
    return _as_number(case) if _is_strided(case, "q") else None


def stride_of_v_faults(case: Any) -> Failure | None:
    name = "v" if isinstance(case, DenseDecodeCase) else "v_cache"
    if not _is_strided(case, name):
        return None
    luck = _luck(case, 3)
    if luck == 0:
        return _fails("crash", "SIGSEGV")
    if luck == 1:
        return _fails(
            "page_relocation", f"ignored stride of {name}", causes=(Cause(mistake="ignored_stride"),), tensor=name
        )
    return _as_address(case)


def odd_group(case: Any) -> Failure | None:
    return _as_number(case) if case.gqa_ratio in (3, 5, 6, 7) else None


def head_map(case: Any) -> Failure | None:
    return _as_number(case) if case.gqa_ratio > 1 and case.num_kv_heads > 1 else None


def large_group(case: Any) -> Failure | None:
    return _fails("exception", "ZeroDivisionError in f") if case.gqa_ratio >= 8 else None


def empty_sequence(case: Any) -> Failure | None:
    return _fails("accuracy", "out:nan") if 0 in case.seq_lens else None


def long_sequence(case: Any) -> Failure | None:
    return _as_number(case) if max(case.seq_lens) > 16 else None


def odd_head_size(case: Any) -> Failure | None:
    if case.head_size & (case.head_size - 1) == 0:
        return None
    luck = _luck(case, 3)
    return (_fails("guard_page", "read beyond k"), _fails("dead_memory", "out"), _fails("accuracy", "out:value"))[luck]


def only_bfloat16(case: Any) -> Failure | None:
    return _as_number(case) if case.dtype == "bfloat16" else None


def rounded_scores(case: Any) -> Failure | None:
    """Luck decides where a rounding shows; a replay names it where it can."""
    if case.values.keys == "equal" or _luck(case, 3):
        return None
    named = {"causes": (Cause(mistake="scores_rounded"),)} if _luck(case, 9) else {"maybe": ("scores_rounded",)}
    return _fails("accuracy", "out:value", **named)


def unmasked_tail(case: Any) -> Failure | None:
    if all(length % case.block_size == 0 for length in case.seq_lens):
        return None
    return _fails("dead_memory", "out") if case.pages.padding == "zero" else _as_address(case)


def next_page(case: Any) -> Failure | None:
    """One page of the table too far: another sequence's, nobody's, or the same again."""
    if max(case.seq_lens) <= case.block_size:
        return None
    return _as_address(case) if case.pages.order != "identity" or _luck(case, 2) else None


def layout_ignored(case: Any) -> Failure | None:
    return _as_address(case) if case.layout == "HND" else None


def crash_at_large_heads(case: Any) -> Failure | None:
    return _fails("crash", "SIGSEGV") if case.head_size > 16 and case.gqa_ratio > 1 else None


def crash_at_full_pages(case: Any) -> Failure | None:
    """What tells these cases is no feature: features say what makes a case more than the simplest one."""
    return _fails("crash", "SIGSEGV") if all(length % 4 == 0 for length in case.seq_lens) else None


def races(case: Any) -> Failure | None:
    """Fails as chance has it: no, since a pretended kernel answers a case in one way; the bits of one in six differ."""
    return _fails("batch_invariance", "bits") if case.num_seqs > 2 and _luck(case, 6) == 0 else None


def both_empty(case: MergeStatesCase) -> Failure | None:
    empty = ("-inf", "+inf")
    both = any(prefix in empty and suffix in empty for prefix, suffix in case.lse_pairs)
    return _fails("accuracy", "output:nan" if _luck(case, 2) else "output_lse:nan") if both else None


def plus_inf(case: MergeStatesCase) -> Failure | None:
    return _fails("accuracy", "output:nan") if any("+inf" in pair for pair in case.lse_pairs) else None


def low_states(case: MergeStatesCase) -> Failure | None:
    if not any("low" in pair or "high" in pair for pair in case.lse_pairs):
        return None
    return _fails("accuracy", ("output:value", "output_lse:value", "output:inf")[_luck(case, 3)])


def suffix_dead(case: MergeStatesCase) -> Failure | None:
    if not any(suffix in ("-inf", "+inf") for _, suffix in case.lse_pairs):
        return None
    return _fails("dead_memory", "output") if _luck(case, 2) else _fails("accuracy", "output:nan")


def stride_of_output_ignored(case: MergeStatesCase) -> Failure | None:
    return _fails("accuracy", "output:value") if _is_strided(case, "prefix_output") else None


def bfloat16_states(case: MergeStatesCase) -> Failure | None:
    return _fails("accuracy", "output:value") if case.dtype == "bfloat16" else None


OF_ATTENTION: tuple[Bug, ...] = (
    strides_of_k_for_v, stride_of_k_ignored, stride_of_q_ignored, stride_of_v_faults, odd_group, head_map, large_group,
    empty_sequence, long_sequence, odd_head_size, only_bfloat16, rounded_scores,
)  # fmt: skip
OF_PAGES: tuple[Bug, ...] = (*OF_ATTENTION, unmasked_tail, next_page, layout_ignored, races)
OF_STATES: tuple[Bug, ...] = (
    both_empty, plus_inf, low_states, suffix_dead, stride_of_output_ignored, bfloat16_states,
)  # fmt: skip


def _declaration(problem: Any, **supports: Any) -> Declaration:
    return Declaration(
        name="pretended",
        problem=problem,
        supports=Supports(strides="any", dtypes=("float16", "bfloat16"), **supports),
        target="kernels.py:pretended",
    )


KERNELS: dict[type, tuple[Declaration, tuple[Bug, ...]]] = {
    DenseDecodeCase: (_declaration("dense_decode", head_sizes=(16, 24, 32)), OF_ATTENTION),
    PagedDecodeCase: (_declaration("paged_decode", head_sizes=(16, 24, 32), layouts=("NHD", "HND")), OF_PAGES),
    MergeStatesCase: (_declaration("merge_states", head_sizes=(16, 24, 32)), OF_STATES),
}


@dataclass(frozen=True)
class Rule:
    """``name`` of a rule, and how it is switched off: the attribute of an object that is replaced, and by what."""

    name: str
    owner: object
    attribute: str
    instead: Any

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        with mock.patch.object(self.owner, self.attribute, self.instead):
            yield


def rules() -> list[Rule]:
    """All that decide which failures are one bug."""
    return [
        Rule("ask relatives which bug it is (`bug_behind`)", investigation, "bug_behind", lambda *about: None),
        Rule("ask whether it fails without what the bug needs", asking, "_is_foretold", lambda *about: False),
        Rule("ask whether what the bug needs cures it", asking, "_is_cured_by", lambda *about: False),
        Rule("ask neighbours what it needs", investigation, "needs_of", lambda found, needed, *rest: needed),
        Rule("results and causes tell bugs apart", bug.Bug, "is_told_apart_from", lambda one, other: False),
        Rule("merge what needs more with what needs less", bug, "_includes", lambda less, more: False),
    ]


@dataclass(frozen=True)
class Outcome:
    """Of one campaign: how many ``bugs`` its kernel has that failed a case, findings ``told``, bugs that none hits."""

    bugs: int
    told: int
    missed: int


def campaign(declaration: Declaration, bugs: tuple[Bug, ...], cases: int) -> Outcome:
    """Run one on a kernel with ``bugs``. A bug is hit if a finding's case shows it and no earlier one."""
    seen: set[Bug] = set()

    def noting(bug: Bug) -> Bug:
        def ask(case: Any) -> Failure | None:
            failure = bug(case)
            if failure is not None:
                seen.add(bug)
            return failure

        return ask

    with tempfile.TemporaryDirectory() as folder:
        found = findings(declaration, Path(folder), *map(noting, bugs), cases=cases)
    hit = {next((bug for bug in bugs if bug(finding.case) is not None), None) for finding in found}
    return Outcome(len(seen), len(found), len(seen - hit))


def study(rule: Rule | None, cases: int) -> list[list[Outcome]]:
    """Campaigns of one bug, and of three, without ``rule``."""
    drawn = random.Random(7)
    singles = [(declaration, (bug,)) for declaration, bugs in KERNELS.values() for bug in bugs]
    kernels = itertools.islice(itertools.cycle(KERNELS.values()), TRIPLES)
    triples = [(declaration, tuple(drawn.sample(bugs, 3))) for declaration, bugs in kernels]
    with rule.off() if rule is not None else contextlib.nullcontext():
        return [[campaign(*one, cases) for one in some] for some in (singles, triples)]


def deaths(bug: Bug, cases: int) -> int:
    """How many of the ``cases`` of a campaign die of ``bug``: each costs a process."""
    died = 0

    def count(case: Any) -> Failure | None:
        nonlocal died
        failure = bug(case)
        died += failure is not None
        return failure

    with tempfile.TemporaryDirectory() as folder:
        findings(KERNELS[PagedDecodeCase][0], Path(folder), count, cases=cases)
    return died


def study_deaths(cases: int) -> Iterator[str]:
    """Rows of a table: what it is worth to learn which cases die."""
    variants: dict[str, contextlib.AbstractContextManager[object]] = {
        "as it is": contextlib.nullcontext(),
        "features in place of traits": mock.patch.object(known_deaths, "traits", features),
        "no case is left out (`KnownDeaths.should_skip`)": mock.patch.object(
            known_deaths.KnownDeaths, "should_skip", return_value=False
        ),
    }
    for name, variant in variants.items():
        with variant:
            counts = [deaths(bug, cases) for bug in (crash_at_large_heads, crash_at_full_pages)]
        yield f"| {name} | {' | '.join(map(str, counts))} |"


def _row(name: str, outcomes: list[list[Outcome]]) -> str:
    cells = [
        f"{sum(one.told for one in some)} of {sum(one.bugs for one in some)} | {sum(one.missed for one in some)}"
        for some in outcomes
    ]
    return f"| {name} | {' | '.join(cells)} |"


def _study_numbered(number: int, cases: int) -> tuple[str, list[list[Outcome]]]:
    rule = rules()[number] if number >= 0 else None
    return ("all as it is" if rule is None else rule.name), study(rule, cases)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.quality.identity", description=__doc__)
    parser.add_argument("--cases", type=int, default=2500, help="of each campaign")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    print("| switched off | findings of bugs, one at a time | missed | findings of bugs, three at a time | missed |")
    print("|---|---:|---:|---:|---:|")
    with ProcessPoolExecutor(arguments.jobs) as pool:
        numbers = range(-1, len(rules()))
        for name, outcomes in pool.map(_study_numbered, numbers, itertools.repeat(arguments.cases)):
            print(_row(name, outcomes), flush=True)
    print(f"\n| of {arguments.cases} cases died | of large heads | where every length ends with a page |")
    print("|---|---:|---:|")
    for row in study_deaths(arguments.cases):
        print(row, flush=True)


if __name__ == "__main__":
    main()
