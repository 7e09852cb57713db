"""attnfuzz.conformance: a fixed set of cases on many kernels, and what is told of that."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnfuzz import adapters
from attnfuzz.cases.supported import translate
from attnfuzz.conformance import Conformance, ConformanceOutcome, Examined, _by_turns, load_set, set_file
from attnfuzz.conformance.kept import what_is_kept
from attnfuzz.declaration import load_kernels
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import PROBLEMS, DenseDecodeCase, encode_case
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.supports import Supports
from attnfuzz.report.conformance import write_page
from attnfuzz.verdict import Cause, Failure
from tests.common.in_process import attnfuzz

SELF_BUILDING = Path(__file__).parents[1] / "common" / "self_building_kernels.py"
KERNEL = """
import torch
import attnfuzz

SUPPORTS = attnfuzz.Supports(dtypes=("float32",), lse="none", gqa_ratios=(1, 2, 4, 8))


def attend(inputs, dropped):
    out = torch.zeros_like(inputs.q)
    group = inputs.q.shape[1] // inputs.k.shape[2]
    for i, length in enumerate(inputs.seq_lens.tolist()):
        k, v = (part[i, :length].repeat_interleave(group, 1).double() for part in (inputs.k, inputs.v))
        weights = (torch.einsum("hd,nhd->hn", inputs.q[i].double(), k) * inputs.scale).softmax(-1)
        out[i] = torch.einsum("hn,nhd->hd", weights, v) if length and length not in dropped else 0
    return out


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def right(inputs):
    return attend(inputs, ())


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def forgets_length_33(inputs):
    return attend(inputs, (33,))
"""


def conformance(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return attnfuzz("conformance", *arguments, cwd=cwd)


def test_a_set_is_never_changed() -> None:
    """Pages of two days, or of two engines, could not be compared; what is to be added makes a new version."""
    found = load_set()
    digest = hashlib.sha256(set_file(found.version).read_bytes()).hexdigest()
    assert digest == "f4b805da22088c6834bfd42911e6791675f07d0a0496053753537e0dbbb7ef69"
    assert (found.version, len(found.entries)) == (4, 1033)


def test_the_set_has_cases_of_each_problem_that_engines_have() -> None:
    """A column of the page would be empty."""
    entries = load_set().entries
    assert any(not getattr(entry.case, "causal", True) for entry in entries)
    apart = [entry for entry in entries if not entry.about]  # a field at its usual value is the usual case
    assert len({encode_case(entry.case) + str(entry.law).encode() for entry in apart}) > 0.9 * len(apart)
    for problem in PROBLEMS:
        taken = [one for one in entries if translate(one.case, problem, Supports(), {}) is not None]
        assert len(taken) > 50, problem


def test_engines_have_no_kernel_without_a_case() -> None:
    """A column of the page would be empty."""
    files = (
        Path(engine_file).read_text(encoding="utf-8") for engine_file in Path(adapters.__file__).parent.glob("*.py")
    )
    asked = set(re.findall(r"\.kernel\(\s*([A-Z]\w+)\(", "".join(files)))
    assert asked <= {one.case.problem.name for one in load_set().entries if isinstance(one.case, OpenCase)}


KEEPS = """
import torch
import attnfuzz


def attend(inputs):
    out = torch.zeros_like(inputs.q)
    for i, length in enumerate(inputs.seq_lens.tolist()):
        k, v = (part[i, :length].double() for part in (inputs.k, inputs.v))
        weights = (torch.einsum("hd,nhd->hn", inputs.q[i].double(), k) * inputs.scale).softmax(-1)
        out[i] = torch.einsum("hn,nhd->hd", weights, v)
    return torch.nextafter(out, torch.tensor(torch.inf)) if len(out) >= 16 else out


supports = dict(dtypes=("float32",), gqa_ratios=(1,), lse="none")
promises = attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(batch_invariant=True, **supports))(attend)
says_nothing = attnfuzz.kernel(
    "dense_decode", supports=attnfuzz.Supports(**supports, graph_replay=False), name="says_nothing"
)(attend)
"""


def test_what_a_kernel_keeps_to_is_measured_and_held_against_it_where_it_promises(tmp_path: Path) -> None:
    """A server would get other bits in a larger batch and read nothing of it, or an honest kernel be red."""
    (tmp_path / "mine.py").write_text(KEEPS, encoding="utf-8")
    promises, says_nothing = load_kernels(str(tmp_path / "mine.py"))
    shape: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 2, "head_size": 16, "scale": 0.25, "dtype": "float32"}
    passed = [DenseDecodeCase(seq_lens=(5, 3), **shape)]
    with Runner(device="cpu") as runner:
        found = [
            {one.name: one for one in what_is_kept(kernel.declaration, runner, passed, "cpu", lambda: "")}
            for kernel in (promises, says_nothing)
        ]
        (over,) = {one.why for one in what_is_kept(promises.declaration, runner, passed, "cpu", lambda: "over")} - {
            "graphs are captured on a GPU only"
        }
    assert over == "over"
    broken, honest = (kept["batch_invariant"] for kept in found)
    assert (broken.status, broken.up_to, honest.status, honest.up_to) == ("fail", 4, "unsupported", 4)
    assert [(one["deterministic"].status, one["deterministic"].up_to) for one in found] == [("pass", 16)] * 2
    assert [one["graph_replay"].status for one in found] == ["not_run", "unsupported"]

    kernels = (promises.declaration, says_nothing.declaration)
    examined = [Examined(one, (), tuple(kept.values())) for one, kept in zip(kernels, found, strict=True)]
    assert [list(one.failing()) for one in examined] == [["batch_invariance/bits"], []]
    page = Conformance(4, 0, "cpu", {}, tuple(examined))
    assert page.failed
    write_page(page, tmp_path / "c.html")
    text = (tmp_path / "c.html").read_text()
    assert text.count("✓ 4, no") == 2
    assert text.count('<td class="bad"') == 1


def test_kernels_are_compared_feature_by_feature(tmp_path: Path) -> None:
    """The page would accuse a right kernel, say of a wrong one that it is right, or leave out why."""
    (tmp_path / "mine.py").write_text(KERNEL, encoding="utf-8")
    run = conformance("mine.py", "--json", "c.json", "--html", "c.html", "--device", "cpu", cwd=tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    found = {kernel["name"]: kernel for kernel in json.loads((tmp_path / "c.json").read_text())["kernels"]}
    right, wrong = found["mine.py:right"], found["mine.py:forgets_length_33"]
    assert (right["failed"], right["not_run"]) == (0, 0)
    assert right["passed"] + right["unsupported"] == len(right["outcomes"])
    assert wrong["failed"] > 0

    rows = {(one["group"], one["feature"]): one for one in wrong["outcomes"]}
    assert rows["dtype", "float32"]["status"] == "fail"
    assert rows["dtype", "float16"]["status"] == "unsupported"
    assert "dtype='float16'" in rows["dtype", "float16"]["why"]
    assert rows["memory", "every other element of q"]["why"].startswith("dtype=")
    assert {one["changes"][0] for one in wrong["outcomes"] if one["group"] == "layout"} == {"as dense_decode"}

    page = (tmp_path / "c.html").read_text()
    assert "forgets_length_33" in page
    assert 'href="#cause-1"' in page
    assert "attnfuzz.regression/1" in page
    assert "1. mine.py:forgets_length_33" in run.stdout


WRITER = """
import torch
import attnfuzz
from attnfuzz import Choice
from attnfuzz.families import CacheWrite

PLAIN = CacheWrite(cache=Choice(("same",)), layout=Choice(("NHD",)))


def write(i, heads):
    for row, slot in enumerate(i.slot_mapping.tolist()):
        if slot >= 0:
            for new, cache in ((i.key, i.k_cache), (i.value, i.v_cache)):
                cache[slot // cache.shape[1], slot % cache.shape[1], :heads] = new[row, :heads]


@attnfuzz.kernel(PLAIN)
def right(i):
    write(i, None)


@attnfuzz.kernel(PLAIN)
def forgets_heads(i):
    write(i, 3)
"""


def test_kernels_that_write_a_cache_have_cases_too(tmp_path: Path) -> None:
    """A problem of the families would be a column without a word, or refused for what the row is not about."""
    (tmp_path / "mine.py").write_text(WRITER, encoding="utf-8")
    run = conformance("mine.py", "--json", "c.json", "--html", "c.html", "--device", "cpu", cwd=tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    right, wrong = json.loads((tmp_path / "c.json").read_text())["kernels"]
    assert (right["problem"], right["failed"], right["not_run"]) == ("CacheWrite", 0, 0)
    rows = {(one["group"], one["feature"]): one for one in wrong["outcomes"]}
    assert rows["cache writes", "cache=fp8"]["status"] == "unsupported"
    assert "cache='fp8' must be one of" in rows["cache writes", "cache=fp8"]["why"]
    assert rows["cache writes", "num_kv_heads=8"]["status"] == "fail"
    assert rows["cache writes", "head_size=80"]["status"] == "pass"
    adapted = [one.get("changes") for one in right["outcomes"] if one["group"] == "drawn cases"]
    assert any("layout=NHD" in (changes or ()) for changes in adapted)
    assert "<h2>CacheWrite</h2>" in (tmp_path / "c.html").read_text()


def test_what_a_budget_leaves_no_time_for_is_not_run(tmp_path: Path) -> None:
    """Kernels of an engine with little time would be told not to support what nobody has tried."""
    (tmp_path / "mine.py").write_text(KERNEL, encoding="utf-8")
    run = conformance("mine.py:right", "--budget", "0.001s", "--json", "c.json", "--html", "c.html", cwd=tmp_path)
    assert run.returncode == 2, run.stdout + run.stderr
    (right,) = json.loads((tmp_path / "c.json").read_text())["kernels"]
    assert (right["passed"], right["failed"]) == (0, 0)
    assert right["not_run"] > 0
    why = {one["why"] for one in right["outcomes"] if one["status"] == "not_run"}
    assert why == {"the time that --budget leaves for the kernel was over"}
    page = (tmp_path / "c.html").read_text()
    rows = {(one["group"], one["feature"]) for one in right["outcomes"] if one["status"] == "not_run"}
    assert page.count(">○</td>") == len(rows) + sum(one["status"] == "not_run" for one in right["kept"])


def test_a_kernel_with_little_time_has_a_word_on_each_group() -> None:
    """A page of ten minutes would tell of dtypes and head sizes, and of nothing that comes after them."""
    entries = load_set().entries
    groups = {one.group for one in entries}
    assert {one.group for one in _by_turns(entries)[: len(groups)]} == groups
    assert len(_by_turns(entries)) == len(entries)


@pytest.mark.night
def test_kernels_that_compile_themselves_come_after_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would be heard of any engine for minutes, because of one whose compiler is at work."""
    monkeypatch.setenv("ATTNFUZZ_TEST_BUILDS", str(tmp_path))
    kernels = [f"{SELF_BUILDING}:{name}" for name in ("builds_itself", "is_ready")]
    run = conformance(*kernels, "--json", "c.json", "--device", "cpu", cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    places = [run.stdout.index(text) for text in ("is_ready", "builds_itself compiles itself", "builds_itself: ")]
    assert places == sorted(places)
    (built, ready) = json.loads((tmp_path / "c.json").read_text())["kernels"]
    assert built["passed"] == ready["passed"] > 0
    assert built["not_run"] == ready["not_run"] == 0


@pytest.mark.night
def test_a_page_that_was_stopped_says_what_was_not_run(tmp_path: Path) -> None:
    """Twenty minutes of a GPU would be lost with the engine whose builds took too long."""
    slow = KERNEL.replace("def attend(inputs, dropped):", "def attend(inputs, dropped):\n    time.sleep(1)")
    (tmp_path / "mine.py").write_text(f"import time\n{KERNEL}", encoding="utf-8")
    (tmp_path / "slow.py").write_text(f"import time\n{slow}", encoding="utf-8")
    command = [str(Path(sys.executable).with_name("attnfuzz")), "conformance", "mine.py:right", "slow.py:right"]
    process = subprocess.Popen(
        [*command, "--json", "c.json", "--html", "c.html", "--device", "cpu"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "mine.py:right" in process.stdout.readline()
    process.terminate()
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    quick, slow_one = json.loads((tmp_path / "c.json").read_text())["kernels"]
    assert (quick["not_run"], slow_one["failed"]) == (0, 0)
    assert slow_one["not_run"] > 0
    assert quick["passed"] == slow_one["passed"] + slow_one["not_run"]
    assert {one["why"] for one in slow_one["outcomes"] if one["status"] == "not_run"} == {
        "the command was stopped before"
    }
    assert "slow.py:right" in (tmp_path / "c.html").read_text()


@pytest.mark.night
def test_a_failing_case_of_the_page_can_be_replayed(tmp_path: Path) -> None:
    """A maintainer would see a red cell and have nothing to run."""
    (tmp_path / "mine.py").write_text(KERNEL, encoding="utf-8")
    conformance("mine.py:forgets_length_33", "--html", "c.html", "--device", "cpu", cwd=tmp_path)
    page = (tmp_path / "c.html").read_text()
    text = page.partition("<pre>")[2].partition("</pre>")[0].replace("&#34;", '"').replace("&#39;", "'")
    (tmp_path / "saved.json").write_bytes(msgspec.json.format(text.encode()))
    run = attnfuzz("replay", "saved.json", cwd=tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "FAIL" in run.stdout


@pytest.mark.parametrize(("arguments", "said"), [(("nothing:*",), "no module named 'nothing'"), (("gone",), "gone")])
@pytest.mark.by_day("arguments1*")
def test_what_nobody_has_is_refused(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """An empty page would look like one without objections."""
    run = conformance(*arguments, cwd=tmp_path)
    assert run.returncode == 2
    assert said in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_an_unsure_cause_is_that_of_the_other_cases() -> None:
    """One bug would be two on the page, where rounding gives a number by chance that a wrong formula gives, too."""
    sure = Failure(oracle="accuracy", kind="out:value", message="", causes=(Cause(mistake="scores_rounded"),))
    unsure = Failure(oracle="accuracy", kind="lse:value", message="", maybe=("lse_formula", "scores_rounded"))
    other = Failure(oracle="accuracy", kind="lse:value", message="", maybe=("lse_formula",))
    entry = load_set().entries[0]
    outcomes = [ConformanceOutcome(entry, entry.case, "fail", failure=one) for one in (sure, unsure, other)]
    kernel = load_kernels("dense_eager")[0]
    found = Examined(kernel.declaration, tuple(outcomes)).failing()
    assert {cause: len(cases) for cause, cases in found.items()} == {"scores_rounded": 2, "accuracy/lse:value": 1}
