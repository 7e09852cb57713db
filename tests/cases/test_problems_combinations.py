"""Supports(where=...): values that go together, from the declaration to the regression file."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, assume, find, given, settings
from hypothesis import strategies as st

import attnfuzz
from attnfuzz.bench.kernels import contender
from attnfuzz.bench.kernels.shapes import Shape
from attnfuzz.campaign.declaration_inference import infer
from attnfuzz.cases.supported import supports_case, why_unsupported
from attnfuzz.corpus import (
    FindingRecord,
    Regression,
    RegressionError,
    decode_regression,
    encode_regression,
    load_regression,
)
from attnfuzz.declaration import Declaration
from attnfuzz.judging.runner import Runner
from attnfuzz.minimise import minimise, size_key
from attnfuzz.oracles.relations.by_bounds import REPAGING, SPLIT_COUNT
from attnfuzz.problems.cases import Case, PagedDecodeCase, Problem
from attnfuzz.problems.choices import BLOCK_SIZES, HEAD_SIZES
from attnfuzz.problems.combinations import fits, settled
from attnfuzz.problems.quantised_kv import KV_DTYPES
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import DTYPES, LAYOUTS, OptionValue, Supports, as_call
from attnfuzz.problems.variants import VARIANTS
from attnfuzz.strategies import CPU_SIZES, GPU_SIZES, cases
from attnfuzz.strategies.formats import first_formats
from attnfuzz.verdict import Verdict
from tests.cases import combined_kernels
from tests.cases.combined_kernels import PRODUCTS, TABLE, is_compiled
from tests.common.drawing import drawn_from
from tests.common.in_process import attnfuzz as run_command

KERNELS = Path(combined_kernels.__file__)
OPTIONS: dict[str, tuple[OptionValue, ...]] = {"tile": (16, 32), "fast": (True, False)}
ANY = {"v_head_sizes": "any", "kv_dtypes": KV_DTYPES, "variants": VARIANTS}


def values(*choices: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(choices) | st.lists(st.sampled_from(choices), min_size=1, unique=True).map(tuple)


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "dtype": values(*DTYPES),
    "head_size": values(16, 64, 100, 256, 576),
    "num_q_heads": values(1, 4, 12, 64),
    "tile": values(16, 32),
    "fast": st.booleans(),
}
OF_ATTENTION = FIELDS | {
    "num_kv_heads": values(1, 4, 6, 32),
    "gqa_ratio": values(1, 3, 30),
    "v_head_size": values(16, 64, 512),
}
PAGED = OF_ATTENTION | {
    "block_size": values(1, 16, 1000),
    "layout": values(*LAYOUTS),
    "kv_dtype": values(*DTYPES, *KV_DTYPES),
    "window": values(False, True),
    "alibi": values(False, True),
    "soft_cap": values(False, True),
}
BY_PROBLEM: dict[Problem, dict[str, st.SearchStrategy[Any]]] = {
    "merge_states": FIELDS,
    "dense_decode": OF_ATTENTION,
    "paged_decode": PAGED,
    "paged_attention": PAGED,
    "split_decode": PAGED | {"num_splits": values(1, 8, 9, 100)},
}


def tables(problem: Problem) -> st.SearchStrategy[tuple[dict[str, Any], ...]]:
    some = st.fixed_dictionaries({}, optional=BY_PROBLEM[problem]).filter(bool)
    return st.lists(some, min_size=1, max_size=4).map(tuple)


@pytest.mark.parametrize("problem", BY_PROBLEM)
@settings(
    max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, phases=[Phase.generate]
)
@given(data=st.data())
@pytest.mark.by_day("split_decode")
def test_every_possible_combination_is_drawn_and_nothing_else(problem: Problem, data: st.DataObject) -> None:
    """A kernel would be handed what it is not made for, or one of its combinations would never be tested."""
    supports = Supports(where=data.draw(tables(problem)), **cast(Any, ANY))
    possible = [one for one in supports.combinations if has_cases(problem, one)]
    assume(possible)
    met: Counter[int] = Counter()

    @settings(max_examples=100, phases=[Phase.generate], database=None, deadline=None, derandomize=True)
    @given(cases(problem, supports=supports, options=OPTIONS, sizes=data.draw(st.sampled_from((CPU_SIZES, GPU_SIZES)))))
    def collect(case: Case) -> None:
        assert why_unsupported(supports, OPTIONS, case) is None
        met.update(i for i, one in enumerate(possible) if fits(case, one))

    collect()
    assert met.keys() == set(range(len(possible)))
    for one in first_formats(problem, supports=supports, options=OPTIONS, count=4):
        fields = {name: getattr(one, name) for name in one.__struct_fields__ if getattr(one, name) is not None}
        case = msgspec.structs.replace(simplest_case(problem, Supports(), {}), **fields)
        assert any(fits(case, combination) for combination in possible)


def has_cases(problem: Problem, combination: Any) -> bool:
    try:
        simplest_case(problem, Supports(where=(combination,), **cast(Any, ANY)), OPTIONS)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("problem", BY_PROBLEM)
@settings(
    max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, phases=[Phase.generate]
)
@given(data=st.data())
@pytest.mark.by_day("merge_states")
def test_cases_shrink_to_the_simplest_that_is_supported(problem: Problem, data: st.DataObject) -> None:
    """Where nothing stops it, a reduction would end in another combination each time, and a bug have two features."""
    supports = Supports(where=data.draw(tables(problem)), **cast(Any, ANY))
    assume(any(has_cases(problem, one) for one in supports.combinations))
    simplest = simplest_case(problem, supports, OPTIONS)
    assert supports_case(supports, OPTIONS, simplest)
    drawn = cases(problem, supports=supports, options=OPTIONS)
    found = find(drawn, lambda case: True, settings=settings(database=None, deadline=None))
    assert features_alike(found, simplest)
    large = find(drawn, lambda case: True, settings=settings(database=None, deadline=None, phases=[Phase.generate]))
    smallest = minimise(large, lambda case: True, supports=supports, options=OPTIONS)
    assert supports_case(supports, OPTIONS, smallest)
    assert size_key(smallest, options=OPTIONS) <= size_key(simplest, options=OPTIONS)


def features_alike(one: Case, other: Case) -> bool:
    names = ("dtype", "head_size", "num_q_heads", "num_kv_heads", "block_size", "layout", "options", "value_size")
    return all(getattr(one, name, None) == getattr(other, name, None) for name in names)


def case_of(**fields: Any) -> PagedDecodeCase:
    plain = {"num_q_heads": 1, "num_kv_heads": 1, "seq_lens": (3,), "scale": 0.25, "dtype": "bfloat16"}
    return PagedDecodeCase(**cast(Any, plain | fields))


def small_or_large_pages(case: Any) -> bool:
    return bool(case.head_size <= 128 or case.block_size >= 32)


def one_of_many(case: Any) -> bool:
    return (case.dtype, case.head_size, case.block_size) in {("float16", 64, 16), ("bfloat16", 64, 1)}


@pytest.mark.parametrize("function", [small_or_large_pages, one_of_many, is_compiled])
def test_a_function_says_what_its_table_says(function: Callable[[Any], bool]) -> None:
    """The kernel would be tested on what its author left out, or not on what the author meant."""
    supports = settled("paged_decode", Supports(where=function), {})
    for dtype, head_size, block_size in product(DTYPES, HEAD_SIZES, BLOCK_SIZES):
        case = case_of(dtype=dtype, head_size=head_size, block_size=block_size)
        assert supports_case(supports, {}, case) == function(case)


def test_a_function_becomes_the_table_that_one_would_write() -> None:
    """Combinations by the hundred would be drawn one by one, and nobody could read what is declared."""
    assert combined_kernels.by_a_function.declaration.supports == combined_kernels.by_a_table.declaration.supports
    assert settled("paged_decode", Supports(where=lambda case: case.head_size > 0), {}) == Supports()


def test_a_function_sees_what_follows_from_other_fields_and_options() -> None:
    """A rule about groups of heads, or about a tile, could not be told."""

    def rule(case: Any) -> bool:
        return bool(case.num_q_heads <= 4 and case.v_head_size == case.head_size and case.tile == 32)

    supports = settled("paged_decode", Supports(where=rule, **cast(Any, ANY)), OPTIONS)
    options = {"tile": 32, "fast": True}
    case = case_of(head_size=64, block_size=16, options=options)
    assert supports_case(supports, OPTIONS, case)
    for other in ({"num_q_heads": 8}, {"v_head_size": 16}, {"options": {**options, "tile": 16}}):
        assert not supports_case(supports, OPTIONS, msgspec.structs.replace(case, **other))


def raises(case: Any) -> bool:
    raise KeyError(case.dtype)


def changes(case: Any) -> bool:
    case.dtype = "float16"
    return True


def forgetful() -> Callable[[Any], bool]:
    turns = iter(range(1000))
    return lambda case: bool(case.dtype if next(turns) % 2 else case.layout)


BAD_FUNCTIONS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda case: len(case.seq_lens) == 1, "looks at case.seq_lens, but may look at dtype, head_size, .*block_size"),
    (lambda case: getattr(case, "num_splits", 1) == 1, "looks at case.num_splits, but may look at"),
    (lambda case: case.head_size & 1, "asked about head_size=16, it returned 0; it must return True or False"),
    (lambda case: case.head_size > 999, "permits none of 10 combinations of head_size; nothing would be supported"),
    (raises, "asked about dtype='float16', it raised KeyError: 'float16'"),
    (changes, "a case cannot be changed: dtype"),
    (forgetful(), "it looks at different fields; it must depend on the case alone"),
    (lambda case: hash((case.head_size, case.block_size, case.num_q_heads)) % 2 == 1, "at most 256 are told apart"),
    (
        lambda case: bool((case.dtype, case.layout, case.head_size, case.block_size, case.num_q_heads)),
        "looks at more than 32768 combinations of dtype, layout, head_size, block_size, gqa_ratio, num_kv_heads",
    ),
]


@pytest.mark.parametrize(("function", "said"), BAD_FUNCTIONS)
def test_what_a_function_may_not_do_is_told(function: Callable[[Any], bool], said: str) -> None:
    """It would be asked about something that it cannot know, for ever, or each time with another answer."""
    with pytest.raises(ValueError, match=f"Supports.where=a function.: .*{said}") as told:
        attnfuzz.kernel("paged_decode", supports=Supports(where=function))
    assert "\n" not in str(told.value)


BAD_TABLES: list[tuple[Any, str]] = [
    ((), "must be a function of a case, or a non-empty tuple of combinations"),
    ("head_size", "must be a function of a case, or a non-empty tuple"),
    ({"head_size": 64}, "must be a function of a case, or a non-empty tuple"),
    (({},), r"where\[0\]=\{\}\): must be a dict with 1 to 64 entries"),
    (({"head_size": 64}, {"head_size": ()}), r"where\[1\]\['head_size'\]=\(\)\): must hold 1 to 1024 values"),
    (({"head_size": None},), "holds None: choices are bool, int, float or str"),
    (({"head_size": 64},) * 257, "has 257 combinations, but at most 256 are told apart"),
    (({"head_sizes": 64},), "where.0..'head_sizes'.*no such field, and the kernel no such option; it may name dtype, "),
    (({"seq_lens": 64},), "where.0..'seq_lens'.*it may name dtype, head_size, .*, tile, fast"),
    (({"head_size": 64.0},), "holds 64.0: must be an integer between 1 and 1024"),
    (({"dtype": "fp16"},), "holds 'fp16': must be one of .'float16'"),
    (({"tile": 64},), r"\['tile'\]\) holds 64: must be one of \(16, 32\)"),
    (({"fast": 1},), r"\['fast'\]\) holds 1: must be one of \(True, False\)"),
    (({"block_size": 16}, {"head_size": (64, 512)}), r"where\[1\]=.*no case has head_size=512 there beside the other"),
    (({"head_size": 13, "layout": "packed"},), "no case has head_size=13 there"),
    (({"v_head_size": 64, "head_size": 16},), "no case has v_head_size=64 there"),
    (({"kv_dtype": "float8_e5m2"},), "no case has kv_dtype='float8_e5m2' there"),
    (({"num_q_heads": 7, "num_kv_heads": 2},), "no case has num_q_heads=7 there"),
    (({"window": True},), "no case has window=True there"),
    (({"window": 128},), "holds 128: must be one of .False, True."),
]


@pytest.mark.parametrize(("table", "said"), BAD_TABLES)
def test_what_a_table_may_not_hold_is_told(table: Any, said: str) -> None:
    """A misspelt name would leave everything permitted, or nothing, without a word."""
    with pytest.raises(ValueError, match=said) as told:
        attnfuzz.kernel("paged_decode", supports=Supports(head_sizes=(13, 16, 64), where=table), options=OPTIONS)
    assert "\n" not in str(told.value)


def test_variants_and_the_causal_limit_go_together_as_declared() -> None:
    """A kernel would be blamed for ALiBi in a window, or for one in a call that is not causal."""
    fields: Any = {"variants": VARIANTS, "non_causal": True}
    supports = Supports(where=lambda case: not case.window or (case.causal and not case.alibi), **fields)
    supports = settled("paged_attention", supports, {})
    found: Counter[tuple[bool, bool, bool]] = Counter()
    for case in drawn_from(cases("paged_attention", supports=supports), draws=400):
        assert why_unsupported(supports, {}, case) is None
        found[case.causal, "window" in case.variant.names, "alibi" in case.variant.names] += 1
    assert {(True, True, False), (False, False, True), (False, False, False), (True, False, True)} == {
        kind for kind in found if kind != (True, False, False)
    }
    assert found[True, False, False] > 60
    windowed = simplest_case("paged_attention", Supports(where=({"window": True},), **fields), {})
    assert why_unsupported(supports, {}, msgspec.structs.replace(windowed, causal=False)) is not None


def test_what_excludes_itself_is_told() -> None:
    """A combination that no case has would be searched for ever."""
    with pytest.raises(ValueError, match=r"no case has alibi=True there"):
        attnfuzz.kernel(
            "paged_decode", supports=Supports(variants=VARIANTS, where=({"alibi": True, "soft_cap": True},))
        )


@pytest.mark.parametrize("kernel", [combined_kernels.by_a_table, combined_kernels.by_a_function])
def test_a_declaration_travels_as_data(kernel: Any) -> None:
    """Workers and executors would judge by another contract than the one that was declared."""
    sent = msgspec.json.encode(kernel.declaration)
    assert msgspec.json.decode(sent, type=Declaration) == kernel.declaration
    printed = as_call("Supports", kernel.declaration.supports.declared()).partition(", where=")[2].removesuffix(")")
    assert Supports(where=ast.literal_eval(printed)).combinations == kernel.declaration.supports.combinations


def test_a_saved_table_is_checked_when_it_is_read() -> None:
    """A state that somebody has written could fill the memory, or fail deep inside a campaign."""
    told = msgspec.to_builtins(combined_kernels.by_a_table.declaration)
    for table, said in ([{"head_size": 64}] * 300, "at most 256"), ([{"no_such": 1}], "no such field"):
        told["supports"]["where"] = table
        with pytest.raises(msgspec.ValidationError, match=said):
            msgspec.convert(told, Declaration)


def test_a_case_that_fits_no_combination_is_told_why() -> None:
    """Whoever replays or checks a case by hand would not know which of its values is wrong."""
    declaration = combined_kernels.by_a_table.declaration
    assert why_unsupported(declaration.supports, {}, case_of(head_size=256, block_size=16)) == (
        "head_size=256, block_size=16, dtype='bfloat16' do not go together: the kernel declares "
        'where=({"head_size": (64, 128), "block_size": 16}, '
        '{"head_size": 256, "block_size": (32, 64), "dtype": "bfloat16"})'
    )


def test_shrinking_goes_to_another_combination() -> None:
    """A bug that has nothing to do with pages of 64 tokens would keep them, since no single change leads out."""
    supports = Supports(where=TABLE, **PRODUCTS)
    case = case_of(head_size=256, block_size=64, seq_lens=(70, 3), num_q_heads=4, num_kv_heads=2)
    run: list[Case] = []

    def fails(candidate: Case) -> bool:
        run.append(candidate)
        return candidate.dtype == "bfloat16"

    smallest = minimise(case, fails, supports=supports, options={})
    assert smallest == msgspec.structs.replace(simplest_case("paged_decode", supports, {}), dtype="bfloat16")
    assert all(supports_case(supports, {}, candidate) for candidate in run)


def test_probes_stay_among_what_goes_together() -> None:
    """What a kernel refuses outside of its table would be taken for a limit, and its own combinations be left out."""
    judged: list[Case] = []

    def judge(declaration: Declaration, case: Case, **how: Any) -> Verdict:
        judged.append(case)
        return Verdict()

    runner = cast(Runner, SimpleNamespace(device="cpu", judge=judge))
    heads = ({"num_q_heads": 8, "num_kv_heads": 8, "block_size": 64},)
    unusual = (
        {"head_size": 576, "block_size": 7, "gqa_ratio": 5},
        {"dtype": "float32", "block_size": 7, "gqa_ratio": 5},
    )
    for table in (TABLE, heads, unusual):
        supports = Supports(where=table)
        found = infer(runner, Declaration(name="k", problem="paged_decode", supports=supports))
        assert found.supports == supports
        assert found.works
        assert judged
        outside = [case for case in judged if not any(fits(case, one) for one in supports.combinations)]
        assert outside == []
        judged.clear()


def test_relations_stay_among_what_goes_together() -> None:
    """A case that passes would be run on pages, or in splits, that its head size does not have, and be a finding."""
    table = ({"head_size": 64, "num_splits": (1, 4)}, {"head_size": 128, "block_size": 16, "num_splits": 2})
    declaration = Declaration(name="k", problem="split_decode", supports=Supports(where=table))
    case = simplest_case("split_decode", Supports(head_sizes=(128,), block_sizes=(16,)), {})
    large = msgspec.structs.replace(case, num_splits=2)
    small = msgspec.structs.replace(case, head_size=64, scale=0.125)
    for relation in (SPLIT_COUNT, REPAGING):
        assert relation.applies(declaration, small)
        assert not relation.applies(declaration, large)


def test_benchmarks_time_what_goes_together() -> None:
    """A kernel would be timed on what it does not take, and be called wrong."""
    shape = Shape(label="small", num_q_heads=8, num_kv_heads=1, head_size=128, seq_lens=(64,))
    own = {"head_size": shape.head_size, "block_size": shape.block_size, "layout": "HND"}
    other = {**own, "head_size": 13}
    for table in ((own, {"head_size": 13}), (other, {"block_size": 7}), ({**own, "tile": 32}, {"block_size": 7})):
        declared = Declaration(name="k", problem="paged_decode", supports=Supports(where=table), options=OPTIONS)
        is_timed = table[0] == own
        with nullcontext() if is_timed else pytest.raises(contender.Unsupported, match="do not go together"):
            assert contender.case_of(shape, declared, {"tile": 16, "fast": True}).layout == "HND"


def attnfuzz_at(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, cwd=folder)


@pytest.mark.night
def test_a_bug_in_one_combination_is_found_shrunk_and_replayed(tmp_path: Path) -> None:
    """The bug would be missed, or its case be shrunk to one that the kernel never claimed to take."""
    (tmp_path / "mine.py").write_text(KERNELS.read_text())
    run = attnfuzz_at(tmp_path, "explore", "mine.py:drops_a_token", "--budget", "12s", "--workers", "1")
    assert run.returncode == 1, run.stdout + run.stderr
    files = list((tmp_path / "regressions").glob("*.json"))
    saved = [load_regression(file) for file in files]
    assert saved
    declared = combined_kernels.drops_a_token.declaration.supports
    for one in saved:
        assert supports_case(declared, {}, one.case), one.case
        assert (one.case.head_size, one.case.dtype) == (256, "bfloat16")
    replayed = attnfuzz_at(tmp_path, "replay", "regressions")
    assert replayed.returncode == 1, replayed.stdout
    told = json.loads(files[0].read_text())
    told["case"]["block_size"] = 16
    files[0].write_text(json.dumps(told))
    outside = attnfuzz_at(tmp_path, "replay", files[0], "--kernel", "mine.py:drops_a_token")
    assert "do not go together: the kernel declares where=(" in re.sub(r"\s+", " ", outside.stdout + outside.stderr)
    shown = attnfuzz_at(tmp_path, "list", "--verbose", "mine.py:by_a_function")
    assert 'supports.where: ({"head_size": (64, 128), "block_size": 16}, {' in shown.stdout


@pytest.mark.parametrize("where", ["({'head_size': 13, 'layout': 'packed'},)", "lambda case: case.seq_lens == 1", "()"])
@pytest.mark.by_day("lambda*")
def test_a_declaration_without_cases_ends_in_one_sentence(tmp_path: Path, where: str) -> None:
    """A traceback, or a search of nothing that ends in success."""
    lines = ("import attnfuzz", f"@attnfuzz.kernel('paged_decode', supports=attnfuzz.Supports(where={where}))")
    (tmp_path / "mine.py").write_text("\n".join((*lines, "def mine(inputs): ...", "")))
    run = attnfuzz_at(tmp_path, "explore", "mine.py", "--budget", "5s", "--workers", "1")
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1, run.stderr
    assert "mine.py does not import: ValueError: Supports(where" in run.stderr


def test_a_regression_file_does_not_say_what_goes_together(tmp_path: Path) -> None:
    """A file from elsewhere could have a kernel pass by leaving out what it fails for."""
    saved = Regression(
        problem="paged_decode",
        kernel="mine.py:mine",
        case=case_of(head_size=64, block_size=16),
        finding=FindingRecord(oracle="accuracy", message="wrong", kind="out:value"),
        assumed=Supports(where=TABLE),
    )
    with pytest.raises(RegressionError, match=r"is for the kernel to declare - at `\$.assumed.where`; leave it out"):
        decode_regression(encode_regression(saved), "saved.json")


QUERY_TABLES: list[tuple[Any, Callable[[Any], bool]]] = [
    (({"equal_queries": True, "context": True},), lambda case: case.equal_queries and case.context),
    (lambda case: not case.context, lambda case: not case.context),
    (lambda case: case.equal_queries or case.head_size <= 64, lambda case: case.equal_queries or case.head_size <= 64),
]


@pytest.mark.parametrize("problem", ["paged_attention", "masked_attention"])
@pytest.mark.parametrize(("where", "permits"), QUERY_TABLES)
def test_numbers_of_query_tokens_are_as_declared(problem: Any, where: Any, permits: Callable[[Any], bool]) -> None:
    """A kernel that verifies drafts of one length would be blamed for ragged ones, or meet one sequence only."""
    supports = settled(problem, Supports(where=where), {})
    met = drawn_from(cases(problem, supports=supports), draws=150)
    assert all(permits(case) and why_unsupported(supports, {}, case) is None for case in met)
    assert sum(cast(Any, case).num_seqs > 1 for case in met) > 20
    large = max(met, key=size_key)
    smallest = minimise(large, lambda case: cast(Any, case).num_seqs > 1, supports=supports, options={})
    assert cast(Any, smallest).num_seqs == 2
    assert supports_case(supports, {}, simplest_case(problem, supports, {}))


def test_a_context_that_no_case_has_room_for_is_told() -> None:
    """Nothing would be drawn, without a word."""
    with pytest.raises(ValueError, match="no case has context=True there"):
        attnfuzz.kernel("paged_attention", supports=Supports(max_seq_len=1, where=({"context": True},)))


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (({"parts": 1},), "no such field, and the kernel no such option; it may name size, dtype, head_size, way"),
        (({"head_size": 64},), r"where\[0\]\['head_size'\]\)=64 must be one of \(8, 16, 32\)"),
        (lambda case: case.parts == (), "looks at case.parts, but may look at way, size, dtype, head_size only"),
    ],
)
def test_what_may_not_be_said_of_an_own_problem_is_told(where: Any, said: str) -> None:
    """A misspelt name would permit everything."""
    with pytest.raises(ValueError, match=said):
        attnfuzz.kernel(combined_kernels.Doubled(), supports=Supports(where=where), options={"way": (1, 2)})


def test_fields_of_own_problems_go_together_as_declared() -> None:
    """A kernel would be blamed for what its author says that it does not take, or shrinking end at such a case."""
    kernel = combined_kernels.small_or_single
    declaration = kernel.declaration
    for case in drawn_from(
        cases(declaration.problem, supports=declaration.supports, options=declaration.options), draws=300
    ):
        assert why_unsupported(declaration.supports, declaration.options, case) is None
    simplest = simplest_case(declaration.problem, declaration.supports, declaration.options)
    assert why_unsupported(declaration.supports, declaration.options, simplest) is None
    attnfuzz.fuzz(kernel, max_examples=60, device="cpu")(lambda: None)()
    with pytest.raises(attnfuzz.KernelFailure) as caught:
        attnfuzz.fuzz(combined_kernels.small_or_single_wrong, max_examples=60, device="cpu")(lambda: None)()
    found: Any = caught.value.case
    assert (found.size, found.dtype, found.parts) == (4, "float32", ())
