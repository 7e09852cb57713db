"""attnfuzz.campaign.declaration_inference: what a kernel takes is found out, and no bug is declared away."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from attnfuzz.campaign.declaration_inference import Failing, Inferred, infer, with_declared
from attnfuzz.campaign.saved.replay import SavedCase, replay
from attnfuzz.cases.supported import supports_case
from attnfuzz.corpus import FindingRecord, Regression, decode_regression, encode_regression
from attnfuzz.declaration import Declaration
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import Case
from attnfuzz.problems.choices import GQA_RATIOS
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.recipes import Values
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.problems.supports import Supports, as_call
from attnfuzz.verdict import Failure, Verdict
from tests.common.in_process import attnfuzz as run_command
from tests.sample_cases import dense_case, paged_case

ROOT = Path(__file__).parents[2]
KERNELS = Path(__file__).parents[1] / "common" / "plain_kernels.py"
CONTRACTS = Path(__file__).with_name("contract_kernels.py")
DESIGNS = ROOT / "tests" / "quality" / "design_kernels.py"
SPLITS = Supports(layouts=("NHD", "interleaved"), lse="none", empty_sequences=False)
TRITON = Supports(
    head_sizes=(16, 32, 64, 128, 256),
    block_sizes=(16,),
    layouts=("NHD",),
    strides="contiguous",
    empty_sequences=False,
    lse="none",
)
CASE = paged_case(
    num_q_heads=2, num_kv_heads=2, head_size=64, block_size=16, seq_lens=(17, 3), scale=0.125, dtype="float16"
)


_INFERRED: dict[str, Inferred] = {}
_KNOWN_FIRST: dict[str, list[Supports]] = {}
_RESTARTS: dict[str, int] = {}


def inferred(runner: Runner, kernel: str, file: Path = KERNELS) -> Inferred:
    """What is found out of ``kernel``, once for all tests; with what a search may begin, and what it cost."""
    target = f"{file}:{kernel}"
    if target not in _INFERRED:
        (declaration,) = runner.declarations([target])
        before, first = runner.restarts, list[Supports]()
        _INFERRED[target] = infer(runner, declaration, begin=lambda supports, failing: first.append(supports))
        _KNOWN_FIRST[kernel], _RESTARTS[kernel] = first, runner.restarts - before
    return _INFERRED[target]


@pytest.mark.parametrize(
    ("kernel", "supports"),
    [
        ("eager_split_decode", SPLITS),
        ("textbook_merge", Supports(empty_state_lse=("-inf",))),
        ("takes_everything", Supports()),
        ("returns_base_2", Supports(lse="base2")),
        ("leaves_states", Supports(layouts=("NHD",))),
        pytest.param("leaves_states_in_base_2", Supports(layouts=("NHD",), lse="base2"), marks=pytest.mark.night),
        ("refuses_groups", Supports(gqa_ratios=(1,))),
        ("refuses_odd_heads", Supports(head_sizes=(16, 32, 64, 128, 256))),
    ],
)
@pytest.mark.by_day("textbook*", "takes_everything*", "leaves_states*", "refuses_groups*", "refuses_odd*")
def test_what_a_kernel_takes_is_found_out(runner: Runner, kernel: str, supports: Supports) -> None:
    """A correct kernel that declares nothing would have a finding for each thing that it was never meant for."""
    found = inferred(runner, kernel)
    assert found.works
    assert found.supports == supports, found
    assert found.probes <= 80


@pytest.mark.parametrize(
    ("kernel", "supports"),
    [
        ("eager_split_decode_drops_last_page", SPLITS),
        ("textbook_merge_without_rescaling", Supports()),
        ("triton_decode_wrong_head", TRITON),
        ("wrong_for_groups", Supports()),
        ("forgets_a_mask", Supports()),
        ("takes_strides_of_k_for_v", Supports()),
        ("takes_strides_of_k_for_v_and_a_plain_lse", Supports()),
        ("refuses_one_length", Supports()),
        ("wrong_lse_of_empty", Supports()),
    ],
)
@pytest.mark.by_day("textbook_merge_*", "forgets_a_mask-*", "refuses_one_length-*")
def test_a_bug_is_not_taken_for_a_limit(runner: Runner, kernel: str, supports: Supports) -> None:
    """The contract would leave out just what is wrong, and nobody would ever hear of the bug."""
    assert inferred(runner, kernel).supports == supports


@pytest.mark.parametrize(
    ("design", "numerics"),
    [
        ("exact_products", Numerics()),
        ("sum_of_rounded_weights", Numerics()),
        ("scaled_query", Numerics(query="scaled")),
        ("scaled_query_in_base_2", Numerics(query="scaled")),
        ("scaled_both", Numerics(query="scaled_both")),
        ("stored_scores", Numerics(scores="input")),
        ("sums_of_eight", Numerics(tile_sums="input")),
    ],
)
@pytest.mark.by_day("exact*", "sum_of*", "scaled_both*", "stored*")
def test_what_a_design_rounds_on_purpose_is_found_out(runner: Runner, design: str, numerics: Numerics) -> None:
    """A design that engines ship would have a finding of wrong numbers, or one that rounds nothing would be let off."""
    found = inferred(runner, design, DESIGNS)
    assert (found.numerics, found.works) == (numerics, True)
    assert len(found.left_out) == len(numerics.declared())


@pytest.mark.parametrize("kernel", ["scaled_query_of_short", "scaled_query_of_long", "scaled_query_of_single_heads"])
@pytest.mark.by_day("scaled_query_of_long*")
def test_what_one_path_rounds_is_no_design(runner: Runner, kernel: str) -> None:
    """A change that narrows one path of a kernel would be taken for what the kernel does on purpose."""
    assert inferred(runner, kernel, DESIGNS).numerics == Numerics()


def test_weights_in_8_bits_are_no_design_beside_a_cache_of_16(runner: Runner) -> None:
    """The error of a cast that was meant for another cache would be taken for what the kernel does on purpose."""
    assert inferred(runner, "short_weights", DESIGNS).numerics == Numerics()


class OnGpu:
    """A runner of this machine's CPU that says it is a GPU's."""

    device = "cuda"

    def __init__(self, runner: Runner) -> None:
        self.judge, self.restart = runner.judge, runner.restart


@pytest.mark.parametrize(
    ("kernel", "numerics"),
    [("tf32_in_tiles", Numerics(matmul="tf32")), ("scaled_tf32", Numerics(query="scaled", matmul="tf32"))],
)
@pytest.mark.by_day("tf32_in_tiles*")
def test_tf32_is_a_design_on_a_gpu(runner: Runner, kernel: str, numerics: Numerics) -> None:
    """`tl.dot` of float32 inputs takes it by default, and right kernels would have two findings each."""
    (declaration,) = runner.declarations([f"{DESIGNS}:{kernel}"])
    assert infer(OnGpu(runner), declaration).numerics == numerics  # type: ignore[arg-type]  # judges alike


@pytest.mark.parametrize("kernel", ["short_outputs", "short_constant"])
@pytest.mark.by_day("short_outputs")
def test_what_is_wrong_in_float32_alone_is_no_tf32(runner: Runner, kernel: str) -> None:
    """Whatever loses fewer bits than TF32 does would be let off on a GPU, as if matrix units had lost them."""
    (declaration,) = runner.declarations([f"{DESIGNS}:{kernel}"])
    assert infer(OnGpu(runner), declaration).numerics == Numerics()  # type: ignore[arg-type]  # judges alike


@pytest.mark.parametrize(
    ("problem", "supports", "left_out"),
    [
        ("paged_attention", Supports(), {"padding_tokens": "limit"}),
        ("paged_decode", Supports(variants=("window",)), {"freed_pages": "question"}),
        ("merge_states", Supports(), {"empty_state_lse": "question"}),
    ],
)
def test_what_there_may_be_none_of_is_asked_for(problem: Any, supports: Supports, left_out: dict[str, str]) -> None:
    """Padding that is refused, freed pages that are read and an LSE of +inf would be findings of a right kernel."""

    def judge(declaration: Declaration, case: Any, **how: Any) -> Verdict:
        if getattr(case, "padding_tokens", 0):
            return Verdict(failure=Failure(oracle="exception", kind="ValueError in k", message="no padding"))
        is_freed = problem == "paged_decode" and case.variant.freed_pages
        if is_freed or any("+inf" in pair for pair in getattr(case, "lse_pairs", ())):
            return Verdict(failure=Failure(oracle="dead_memory", kind="out", message="changes"))
        return Verdict()

    runner = SimpleNamespace(device="cpu", judge=judge, restart=lambda: None)
    kernel = Declaration(name="k", problem=problem, target="k.py:k", supports=supports)
    found = infer(cast(Runner, runner), kernel)
    assert {one.name: one.disposition for one in found.left_out} == left_out


SUM = {"row_sum": "float32"}
WEIGHTS = {"probabilities": "float32", "partials": "float32"}


@pytest.mark.parametrize(
    ("kernel", "held", "exceeded"),
    [
        ("exact_products", [SUM], [WEIGHTS]),
        ("sum_of_rounded_weights", [], [WEIGHTS, SUM]),
        ("exact_weights", [WEIGHTS], []),
        ("rounded_partials", [SUM], [WEIGHTS]),
        ("splits_by_option", [SUM], [WEIGHTS]),
        ("scaled_query", [], []),
        ("rounded_products", [], []),
    ],
)
@pytest.mark.by_day("exact_products-*", "rounded_partials-*")
def test_what_a_kernel_does_not_round_is_told(
    runner: Runner, kernel: str, held: list[dict[str, str]], exceeded: list[dict[str, str]]
) -> None:
    """Its author could not hold it to what it does today, or would paste what is not true of it."""
    (declaration,) = runner.declarations([f"{DESIGNS}:{kernel}"])
    found = inferred(runner, kernel, DESIGNS)
    assert [one.fields for one in found.stricter if one.holds] == held
    assert [one.fields for one in found.stricter if not one.holds] == exceeded
    declared = {name: value for fields in held for name, value in fields.items()}
    assert found.kept == msgspec.structs.replace(found.numerics, **declared)
    searched = with_declared(declaration, found.supports, found.numerics)
    assert all(searched.numerics.leaves_open(name) for name in declared)  # probes prove it of no other size


def test_a_sum_of_rounded_weights_is_not_let_off_where_that_is_declared_away(runner: Runner) -> None:
    """A 16-bit exp2 explains such an LSE as well, and would be taken for the kernel's design."""
    (declaration,) = runner.declarations([f"{DESIGNS}:sum_of_rounded_weights"])
    declared = msgspec.structs.replace(declaration, numerics=Numerics(row_sum="float32"))
    assert infer(runner, declared).numerics == declared.numerics


def test_weights_that_are_rounded_although_that_is_declared_away_are_no_rounded_scores(runner: Runner) -> None:
    """Those of some short sequence explain such errors as well, and a change would be let off by a wider bound."""
    (declaration,) = runner.declarations([f"{DESIGNS}:exact_products"])
    declared = Numerics(probabilities="float32", partials="float32")
    found = infer(runner, msgspec.structs.replace(declaration, numerics=declared))
    assert found.numerics == declared


@pytest.mark.night
def test_a_change_that_sums_rounded_weights_is_found_and_named(tmp_path: Path) -> None:
    """What `declare` prints of a kernel would not be what it is held to from then on."""
    source = (
        "import attnfuzz\nfrom tests.quality.design_kernels import DESIGN, halves, run\n"
        '@attnfuzz.kernel("dense_decode", supports=halves, {pasted})\ndef mine(inputs):\n'
        '    return run(inputs, DESIGN["{design}"])\n'
    )
    mine = tmp_path / "mine.py"
    mine.write_text(source.format(pasted="", design="weights rounded, summed before"))
    done = attnfuzz(tmp_path, "declare", "mine.py", "--budget", "2s", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    (pasted,) = [line.strip() for line in done.stdout.splitlines() if line.startswith("    numerics=")]
    assert pasted == 'numerics=attnfuzz.Numerics(row_sum="float32"),'
    mine.write_text(source.format(pasted=pasted, design="weights rounded, summed before"))
    again = attnfuzz(tmp_path, "declare", "mine.py", "--budget", "2s", "--device", "cpu")
    assert again.returncode == 0, again.stdout + again.stderr
    mine.write_text(source.format(pasted=pasted, design="sum of rounded weights"))
    options = ("--budget", "60s", "--workers", "1", "--device", "cpu", "--seed", "1", "--fail-fast")
    changed = attnfuzz(tmp_path, "explore", "mine.py", *options)
    assert changed.returncode == 1, changed.stdout + changed.stderr
    assert "16 before they are summed" in changed.stdout


def test_rounded_products_are_no_design(runner: Runner) -> None:
    """Scores that overflow at 65,504 would be declared away."""
    assert inferred(runner, "rounded_products", DESIGNS).numerics == Numerics()


def test_a_kernel_is_held_to_the_roundings_that_it_declares(runner: Runner) -> None:
    """One that sums its weights in float32 today, and in 16 bits after a change, would get the wider bound."""
    (declaration,) = runner.declarations([f"{DESIGNS}:scaled_query"])
    changed = with_declared(declaration, Supports(), Numerics(query="scaled_both", matmul="tf32"))
    assert changed.numerics == Numerics(query="scaled_both", matmul="tf32")
    assert changed.assumed == ("query", "matmul")
    declared = msgspec.structs.replace(declaration, numerics=Numerics(query="scaled"))
    assert with_declared(declared, Supports(), Numerics(query="scaled_both")).numerics.query == "scaled"


def test_the_sentence_tells_what_is_rounded(runner: Runner) -> None:
    """A wider bound would be taken without a word of it."""
    told = str(inferred(runner, "scaled_query", DESIGNS))
    assert "it rounds q times the scale to q's dtype" in told, told
    assert told.endswith(', Numerics(query="scaled")')


def test_a_page_size_that_is_written_into_a_kernel(runner: Runner) -> None:
    """It raises nothing, so each other size would be a finding of wrong numbers."""
    found = inferred(runner, "pages_of_16")
    assert found.supports.block_sizes == (16,), found
    assert [str(one) for one in found.questions] == [
        "it gives wrong numbers for layout HND",  # it raises for most shapes, and not for as many heads as slots
        "it gives wrong numbers for page sizes 1, 8, 32, 128 and 24",
    ]


@pytest.mark.night
def test_what_a_triton_kernel_takes_is_found_out(runner: Runner) -> None:
    """A right kernel would have findings: what it refuses, Triton raises in its own words."""
    found = inferred(runner, "triton_decode")
    assert (found.works, found.supports) == (True, TRITON)
    assert found.probes <= 100  # of which it refuses some: 80 that it answers are the most


def test_only_what_was_tried_is_said_to_fail(runner: Runner) -> None:
    """A kernel for powers of two would be told to raise for sizes that nobody has tried."""
    told = str(inferred(runner, "refuses_odd_heads"))
    assert "it raises for head sizes 13, 40, 80 and 192" in told, told
    assert "other than" not in told


def test_what_is_declared_stays(runner: Runner) -> None:
    """The user's word would not count."""
    found = inferred(runner, "declares_some")
    assert (found.supports.dtypes, found.supports.lse) == (("float16",), "none")
    assert not found.works


def test_partial_states_are_asked_of_with_their_log_sum_exp(runner: Runner) -> None:
    """Probes of the output alone would be errors of attnfuzz, each of which costs a process: on a GPU, seconds."""
    assert inferred(runner, "leaves_states").works
    assert _RESTARTS["leaves_states"] == 0


def test_the_same_kernel_gets_the_same_probes(runner: Runner) -> None:
    """Two campaigns with one seed would search different contracts."""
    (declaration,) = runner.declarations([f"{KERNELS}:textbook_merge"])
    assert infer(runner, declaration) == inferred(runner, "textbook_merge")


def test_the_sentence_ends_with_what_to_paste(runner: Runner) -> None:
    """What lies outside the contract would be told without the way to say so."""
    told = str(inferred(runner, "eager_split_decode"))
    assert told == (
        f"Not searched, as {KERNELS}:eager_split_decode refuses it: it raises for layout packed, it raises where there "
        f"are no keys. Taken for the design of {KERNELS}:eager_split_decode, as every case shows it: it returns "
        'no LSE. To declare this: Supports(layouts=("NHD", "HND", "interleaved"), empty_sequences=False, lse="none")'
    )


def test_a_kernel_is_judged_by_the_declaration_that_comes_with_the_call(runner: Runner) -> None:
    """What was found out would not reach the process that judges, and nor would what replay was told."""
    (declaration,) = runner.declarations([f"{KERNELS}:eager_split_decode"])
    without = msgspec.structs.replace(declaration, supports=SPLITS)
    failures = [runner.judge(one, CASE, relations=()).failure for one in (declaration, without, declaration)]
    assert [failure and failure.oracle for failure in failures] == ["unwritten", None, "unwritten"]
    runner.restart()
    assert runner.judge(without, CASE, relations=()).failure is None


@pytest.mark.parametrize(
    ("kernel", "standings"),
    [
        ("ignores_strides_of_q", {"strides": "question"}),
        ("divides_by_nothing", {"empty_sequences": "question"}),
        ("takes_any_cache_for_nhd_and_divides_by_nothing", {"layouts": "question", "empty_sequences": "question"}),
        ("divides_by_nothing_and_promises", {}),
        ("keeps_a_plan_without_strides", {}),
        ("stores_with_strides_of_q", {}),
        ("no_lse_of_short_sequences", {}),
        ("base_2_of_long_sequences", {}),
        ("base_2_of_full_rows", {}),
        ("no_lse_of_empty_sequences", {}),
        ("returns_float32", {}),
        ("weighs_what_nobody_wrote", {}),
    ],
)
@pytest.mark.by_day(
    "takes_any_cache*",
    "divides_by_nothing_and*",
    "keeps_a_plan*",
    "base_2_of_long*",
    "no_lse_of_empty*",
    "returns_float32*",
    "weighs*",
)
def test_what_is_silently_wrong_is_a_question_or_a_bug(runner: Runner, kernel: str, standings: dict[str, str]) -> None:
    """A broken kernel would end green, with a declaration to paste that hides what is wrong with it."""
    (declaration,) = runner.declarations([f"{CONTRACTS}:{kernel}"])
    found = inferred(runner, kernel, CONTRACTS)
    assert {one.name: one.disposition for one in found.left_out} == standings, found
    for question in found.questions:
        assert not supports_case(found.supports, declaration.options, question.case)
        within = msgspec.structs.replace(declaration, supports=found.declarable)
        assert runner.judge(within, question.case, relations=()).failure is not None
        assert len(question.case.seq_lens) <= 2, "a case that a reader takes in"
        if question.name in ("strides", "layouts"):
            changes: dict[str, Any] = {"strides": {}} if question.name == "strides" else {"layout": "NHD"}
            ordinary = msgspec.structs.replace(question.case, **changes)
            assert runner.judge(within, ordinary, relations=()).failure is None, "it would fail for something else"


def test_what_depends_on_earlier_calls_is_handed_on_with_them(runner: Runner) -> None:
    """The probes that show it would be over, and a search of seconds may not meet it again."""
    (declaration,) = runner.declarations([f"{CONTRACTS}:keeps_a_plan_without_strides"])
    one, *_ = inferred(runner, "keeps_a_plan_without_strides", CONTRACTS).failing
    runner.restart()
    assert runner.judge(declaration, one.case, relations=()).failure is None
    runner.restart()
    runner.judge(declaration, one.before, relations=())
    assert runner.judge(declaration, one.case, relations=()).failure is not None


def counted(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The cases that ``runner`` judges from now on."""
    judged, judge = list[Case](), runner.judge

    def counting(declaration: Declaration, case: Case, **how: Any) -> Verdict:
        judged.append(case)
        return judge(declaration, case, **how)

    monkeypatch.setattr(runner, "judge", counting)
    return judged


def test_memory_read_too_early_is_handed_on_before_anything_else_is_asked(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No declaration ends it, and all others would be tried first: the budget was over before it was told."""
    (declaration,) = runner.declarations([f"{CONTRACTS}:weighs_an_idle_split_of_two_sequences"])
    told = list[tuple[Supports, list[Failing], int]]()
    judged = counted(runner, monkeypatch)

    def begin(supports: Supports, failing: Sequence[Failing]) -> None:
        told.append((supports, [*failing], len(judged)))

    infer(runner, declaration, begin=begin)
    ((supports, failing, before),) = told
    assert [one.failure.cause for one in failing] == ["read_before_written"]
    assert supports_case(supports, {}, failing[0].case)
    assert before <= 3 < len(judged)


def test_a_kernel_that_is_right_about_nothing_is_not_asked_for_long(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was probed for minutes before its search began, with a budget of seconds."""
    (declaration,) = runner.declarations([f"{CONTRACTS}:takes_the_sum_for_the_mean"])
    judged = counted(runner, monkeypatch)
    found = infer(runner, declaration, patience_s=0.0)
    assert not found.works
    few = len(judged)
    found = infer(runner, declaration)
    assert [one.failure.oracle for one in found.failing] == ["accuracy"], "the search would have to meet it again"
    assert 0 < 2 * few < len(judged) - few, (few, len(judged))


def test_verify_takes_no_question_for_a_limit(runner: Runner) -> None:
    """Wrong numbers would pass because nobody declared that they are wanted right."""
    (declaration,) = runner.declarations([f"{CONTRACTS}:ignores_strides_of_q"])
    found = infer(runner, declaration, verifying=True)
    assert (found.left_out, found.supports) == ((), declaration.supports)


@pytest.mark.parametrize(
    ("kernel", "counts"),
    [
        ("ignores_strides_of_q", False),
        ("stores_with_strides_of_q", True),
        ("no_lse_of_short_sequences", True),
        ("base_2_of_long_sequences", True),
        ("base_2_of_full_rows", True),
        ("no_lse_of_empty_sequences", True),
        ("keeps_a_plan_without_strides", True),
        ("weighs_what_nobody_wrote", True),
    ],
)
@pytest.mark.night
def test_a_campaign_counts_bugs_and_asks_questions(tmp_path: Path, kernel: str, counts: bool) -> None:
    """The exit status of a CI would be green for a bug, or red for what only its author can say."""
    options = ("--budget", "40s", "--workers", "1", "--device", "cpu", "--seed", "1", "--json", "summary.json")
    done = attnfuzz(tmp_path, "explore", f"{CONTRACTS}:{kernel}", *options)
    assert done.returncode == counts, done.stdout + done.stderr
    (told,) = json.loads((tmp_path / "summary.json").read_text())["kernels"]
    assert any(one["in_contract"] for one in told["findings"]) == counts
    if not counts:
        (question,) = told["questions"]
        assert (question["field"], question["declaration"]) == ("strides", 'Supports(strides="contiguous")')
        assert Path(tmp_path, question["path"]).is_file()
        assert "nothing found within what it was found to take; 1 question" in done.stdout
        replayed = attnfuzz(tmp_path, "replay", question["path"], "--kernel", f"{CONTRACTS}:{kernel}")
        assert replayed.returncode == 1, replayed.stdout


def saved(assumed: Supports | None, numerics: Numerics | None = None) -> SavedCase:
    record = FindingRecord.of(Failure(oracle="accuracy", kind="out:value", message="it was wrong"))
    regression = Regression(
        problem="paged_decode",
        kernel=f"{KERNELS}:eager_split_decode",
        case=CASE,
        assumed=assumed,
        assumed_numerics=numerics,
        finding=record,
    )
    return SavedCase(Path("found.json"), decode_regression(encode_regression(regression), "found.json"))


def test_a_saved_finding_is_judged_by_the_contract_that_it_was_found_in(runner: Runner) -> None:
    """A repaired kernel would go on failing, for what it was never meant to return."""
    targets = [f"{KERNELS}:eager_split_decode"]
    assert saved(SPLITS).regression.assumed == SPLITS
    (known,) = replay([saved(SPLITS)], runner, kernels=targets)
    (strict,) = replay([saved(None)], runner, kernels=targets)
    assert (known.failed, strict.failed) == (False, True)
    (own, *_) = replay([saved(SPLITS)], runner, trust=True)
    assert own.kernel.target == targets[0]
    assert not own.failed


def test_a_file_holds_what_was_assumed_and_no_more() -> None:
    """A file of a few hundred bytes, made for review, would list all defaults."""
    regression = msgspec.structs.replace(saved(SPLITS).regression)
    assert json.loads(encode_regression(regression))["assumed"] == {
        "empty_sequences": False,
        "layouts": ["NHD", "interleaved"],
        "lse": "none",
    }
    assert not {"assumed", "assumed_numerics"} & set(json.loads(encode_regression(saved(None).regression)))
    rounded = saved(None, Numerics(query="scaled")).regression
    assert json.loads(encode_regression(rounded))["assumed_numerics"] == {"query": "scaled"}
    assert decode_regression(encode_regression(rounded), "found.json") == rounded


def test_a_saved_finding_is_judged_by_the_roundings_that_were_found_out(runner: Runner) -> None:
    """A repaired kernel would go on failing, for what its design rounds on purpose."""
    values = Values(keys="fine", values="normal", logit_exponent=3, seed=1)
    case = dense_case(num_q_heads=2, head_size=64, seq_lens=(40, 3), scale=0.0875, dtype="float16", values=values)
    regression = Regression(
        problem="dense_decode",
        kernel=f"{DESIGNS}:scaled_query",
        case=case,
        assumed_numerics=Numerics(query="scaled"),
        finding=FindingRecord.of(Failure(oracle="accuracy", kind="lse:value", message="it was wrong")),
    )
    known = SavedCase(Path("found.json"), regression)
    strict = SavedCase(Path("found.json"), msgspec.structs.replace(regression, assumed_numerics=None))
    targets = [regression.kernel]
    outcomes = [next(iter(replay([one], runner, kernels=targets))).failed for one in (known, strict)]
    assert outcomes == [False, True]


def test_what_was_declared_since_counts_more_than_what_was_assumed(runner: Runner) -> None:
    """A file from before would take back what its author has declared meanwhile."""
    (declaration,) = runner.declarations([f"{KERNELS}:declares_some"])
    changed = with_declared(declaration, Supports(lse="base2", dtypes=("float32",), gqa_ratios=GQA_RATIOS[:1]))
    assert changed.supports == Supports(lse="none", dtypes=("float16",), gqa_ratios=(1,))
    assert changed.assumed == ("gqa_ratios",)


def attnfuzz(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, cwd=folder)


@pytest.mark.night
def test_pedantic_searches_all_that_is_not_declared_away(tmp_path: Path) -> None:
    """Who means the defaults could not have them searched."""
    target = f"{KERNELS}:eager_split_decode"
    options = ("--budget", "60s", "--workers", "1", "--device", "cpu", "--fail-fast", "--pedantic")
    done = attnfuzz(tmp_path, "explore", target, *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Not searched, as" not in done.stdout


@pytest.mark.night
def test_declare_prints_what_is_true(tmp_path: Path) -> None:
    """A declaration that is pasted would not be the end of it."""
    done = attnfuzz(tmp_path, "declare", f"{KERNELS}:eager_split_decode", "--budget", "3s", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    (pasted,) = [line.strip() for line in done.stdout.splitlines() if "supports=" in line]
    assert pasted == f"supports=attnfuzz.{as_call('Supports', SPLITS.declared())},"
    source = KERNELS.read_text()
    before = '@attnfuzz.kernel("paged_decode")\ndef eager_split_decode('
    assert before in source
    mine = tmp_path / "mine.py"
    mine.write_text(source.replace(before, f'@attnfuzz.kernel("paged_decode", {pasted})\ndef eager_split_decode('))
    again = attnfuzz(tmp_path, "declare", "mine.py:eager_split_decode", "--budget", "3s", "--device", "cpu")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "nothing else had to be left out" in again.stdout
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["mine.py"]


def test_declare_refuses_what_is_no_kernel(tmp_path: Path) -> None:
    """A wrong name would end in a traceback."""
    done = attnfuzz(tmp_path, "declare", "gone.py:k", "--device", "cpu")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "Error: kernel file 'gone.py' does not exist; give the path to a Python file\n"


@pytest.mark.night
def test_declare_tells_of_bugs_and_declares_none_away(tmp_path: Path) -> None:
    """A wrong kernel would be given a declaration that makes it look right."""
    kernel = f"{KERNELS}:eager_split_decode_drops_last_page"
    done = attnfuzz(tmp_path, "declare", kernel, "--budget", "15s", "--device", "cpu")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"supports=attnfuzz.{as_call('Supports', SPLITS.declared())}," in done.stdout
    assert "which no declaration ends" in done.stdout


@pytest.mark.parametrize("kernel", ["eager_split_decode", "textbook_merge", "takes_everything"])
def test_a_search_may_begin_with_what_is_known_first(runner: Runner, kernel: str) -> None:
    """It would wait for all that a kernel takes, or begin with what it does not take."""
    (declaration,) = runner.declarations([f"{KERNELS}:{kernel}"])
    found = inferred(runner, kernel)
    (least,) = _KNOWN_FIRST[kernel]
    cases = [simplest_case(declaration.problem, least, declaration.options)]
    assert all(supports_case(found.supports, declaration.options, case) for case in cases)
    assert all(
        runner.judge(msgspec.structs.replace(declaration, supports=least), case).failure is None for case in cases
    )
    assert (least.strides, least.empty_sequences) == ("contiguous", False)
    assert least.dtypes is not None
    assert len(least.dtypes) == 1
