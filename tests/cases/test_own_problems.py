"""Problems that a user's file defines: found, shrunk, saved, replayed and told as those of attnfuzz are."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch

import attnfuzz
from attnfuzz.cases.features import InputSpace, features
from attnfuzz.corpus import RegressionError, load_regression
from attnfuzz.declaration import Kernel
from attnfuzz.explaining.explain import explain_case
from attnfuzz.isolation.outcomes import ExecutorUnavailable
from attnfuzz.judging.runner import Runner
from attnfuzz.minimise import minimise, size_key
from attnfuzz.problems.cases import decode_case, encode_case
from attnfuzz.problems.open_cases import OpenProblem
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.strategies.decisions import Decisions
from attnfuzz.testing.loading import shared_runner
from tests.cases import rope_append_kernels as rope_append
from tests.common.in_process import attnfuzz as run_command
from tests.common.in_process import ending_after
from tests.common.named_features import words

KERNELS = Path(rope_append.__file__)
PAGE = Path(__file__).parents[2] / "docs" / "own_problems.md"

PLANTED: dict[str, tuple[str, str, str]] = {
    "wrong_pairs": ("accuracy", "k_cache[block 0, offset 0, head 0, dim 0] = ", "slot 0 is that of token 0"),
    "last_token_left_out": (
        "unwritten",
        "k_cache[block 0, offset 0, head 0, dim 0] was never written",
        "slot 0 is that of token 0",
    ),
    "writes_padding": (
        "red_zone",
        "k_cache (float16 [2, 1, 1, 16]) was modified where nothing is to be written: 16 elements",
        "no token has slot 1",
    ),
    "touches_the_next_slot": (
        "red_zone",
        "v_cache (float16 [1, 3, 1, 16]) was modified where nothing is to be written: 16 elements",
        "no token has slot 1",
    ),
    "reads_beyond_the_end": ("dead_memory", "out[token 0, head 0, dim 0] changes with memory", "it changes 16 of 16"),
    "peeks_at_the_next_slot": ("guard_page", "slot_mapping", ""),
}


def declared(problem: attnfuzz.Problem, **more: Any) -> OpenProblem:
    """The description of ``problem``, as a kernel's declaration holds it."""
    kernel = attnfuzz.kernel(problem, **more)(lambda inputs: None)
    assert isinstance(kernel.declaration.problem, OpenProblem)
    return kernel.declaration.problem


def case_of(problem: OpenProblem, **fields: Any) -> Any:
    """A case with these fields, whose names no type checker knows."""
    make: Any = problem.case_type
    return make(**fields)


ROPE = declared(rope_append.RopeAppend())


def explore(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_command("explore", *arguments, "--workers", "1", "--device", "cpu", cwd=cwd)


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.by_day("touches_the_next_slot", "last_token_left_out")
def test_planted_bugs_are_found_shrunk_and_told(name: str) -> None:
    """A bug in a user's problem would pass, or be shown on a case that nobody can read."""
    kernel: Kernel = getattr(rope_append, name)

    @attnfuzz.fuzz(kernel, max_examples=40, device="cpu")
    def search() -> None:
        pass

    with pytest.raises(attnfuzz.KernelFailure) as caught:
        search()
    oracle, message, detail = PLANTED[name]
    failure = caught.value.failure
    case: Any = caught.value.case
    assert failure.oracle == oracle
    assert message in failure.message
    assert any(detail in line for line in failure.details) or not detail
    assert (case.num_tokens, case.num_kv_heads, case.gqa_ratio, case.head_size) == (1, 1, 1, 16)
    assert f"case (RopeAppend):\n  {encode_case(case).decode()}" in str(caught.value)


@pytest.mark.parametrize("name", ["right", "in_triton"])
@pytest.mark.by_day("right")
def test_right_kernels_are_silent(name: str) -> None:
    """Poison, guards or the tolerance would blame a kernel that does what its problem says."""
    search = attnfuzz.fuzz(getattr(rope_append, name), max_examples=40, device="cpu")(lambda: None)
    search()


def test_a_campaign_finds_saves_and_replays(tmp_path: Path) -> None:
    """The way of a case would break off somewhere between a user's file and a saved one, or a report leave it out."""
    (tmp_path / "kernels.py").write_text(KERNELS.read_text())
    run = explore(
        "kernels.py:writes_padding", "--fail-fast", "--budget", "60s", "--seed", "3",
        "--json", "all.json", "--html", "all.html", "--junit", "all.xml", cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 1, run.stdout + run.stderr
    (kernel,) = json.loads((tmp_path / "all.json").read_text())["kernels"]
    (finding,) = kernel["findings"]
    assert (kernel["problem"], finding["oracle"], finding["in_contract"]) == ("RopeAppend", "red_zone", True)
    assert "padding_tokens" in finding["signature"]
    for report in ("all.html", "all.xml"):
        assert "RopeAppend" in (tmp_path / report).read_text()

    saved = tmp_path / finding["path"]
    document = json.loads(saved.read_text())
    assert document["problem"] == "kernels.py:RopeAppend"
    assert document["fields"]["padding_tokens"] == {"type": "integer", "low": 0, "high": 4}
    replay = run_command("replay", saved, cwd=tmp_path)
    assert replay.returncode == 1
    assert "was modified where nothing is to be written" in replay.stdout

    (tmp_path / "pyproject.toml").write_text('[tool.attnfuzz]\nregressions = "regressions"\n')
    pytest_run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(saved)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "1 xfailed" in pytest_run.stdout, pytest_run.stdout


def test_a_saved_case_loads_without_its_problem(tmp_path: Path) -> None:
    """A file from somebody else would run code as it is read, or could not be read where the code is missing."""
    with pytest.raises(attnfuzz.KernelFailure):
        attnfuzz.check(rope_append.last_token_left_out, {"num_tokens": 3}, device="cpu", save_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    document["problem"] = document["problem"].replace("rope_append_kernels.py", "nowhere.py")
    path.write_text(json.dumps(document))
    before = set(sys.modules)
    case: Any = load_regression(path).case
    assert (case.num_tokens, case.head_size, case.problem.place.rpartition("/")[2]) == (3, 16, "nowhere.py:RopeAppend")
    assert not {name for name in set(sys.modules) - before if "nowhere" in name}


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("num_tokens", 65, "num_tokens=65 must be between 1 and 64"),
        ("num_tokens", True, "$.case.num_tokens"),
        ("dtype", "int4", 'dtype=\'int4\' must be one of ("float16", "bfloat16", "float32")'),
        ("colour", 1, "unknown field `colour`"),
    ],
)
def test_saved_cases_are_read_strictly(tmp_path: Path, field: str, value: object, told: str) -> None:
    """A mistyped field would be another case, which perhaps passes."""
    with pytest.raises(attnfuzz.KernelFailure):
        attnfuzz.check(rope_append.last_token_left_out, {"num_tokens": 3}, device="cpu", save_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    document["case"][field] = value
    path.write_text(json.dumps(document))
    with pytest.raises(RegressionError) as caught:
        load_regression(path)
    assert told in str(caught.value)


def test_a_problem_that_has_changed_takes_its_saved_cases_along(tmp_path: Path, monkeypatch: Any) -> None:
    """Each change of a problem's file would make all that was saved useless, or be taken for another problem."""
    monkeypatch.chdir(tmp_path)
    kernels = tmp_path / "kernels.py"
    source = KERNELS.read_text()
    kernels.write_text(source)
    with pytest.raises(attnfuzz.KernelFailure):
        attnfuzz.check(f"{kernels}:last_token_left_out", {"num_tokens": 40}, device="cpu", save_dir=tmp_path / "saved")
    (saved,) = (tmp_path / "saved").iterdir()

    def replayed(changed: str) -> subprocess.CompletedProcess[str]:
        kernels.write_text(changed)
        return run_command("replay", saved, cwd=tmp_path)

    wider = replayed(
        source.replace("padding_tokens = attnfuzz.Integer(0, 4)", "padding_tokens = attnfuzz.Integer(0, 5)")
    )
    assert "was never written" in wider.stdout, wider.stdout + wider.stderr
    narrower = replayed(source.replace("num_tokens = attnfuzz.Integer(1, 64)", "num_tokens = attnfuzz.Integer(1, 32)"))
    assert narrower.returncode == 2
    assert "num_tokens=40 must be between 1 and 32" in narrower.stderr


class Doubled(attnfuzz.Problem):
    """Everything about it is right but what the tests change."""

    size = attnfuzz.Integer(1, 8)
    parts = attnfuzz.Integers(1, 4, least=0, most=3, total=6)
    dtype = attnfuzz.Choice(("float16", "float32"))
    head_size = attnfuzz.Choice((8, 16, 32))

    def tensors(self, case: Any) -> dict[str, attnfuzz.TensorSpec]:
        return {
            "x": attnfuzz.TensorSpec((case.size,), case.dtype),
            "y": attnfuzz.TensorSpec((case.size,), case.dtype, "output"),
        }

    def write(self, case: Any, tensors: Any) -> None:
        tensors["x"].copy_(attnfuzz.numbers((case.size,), seed=1, name="x"))

    def reference(self, case: Any, tensors: Any) -> dict[str, Any]:
        return {"y": 2 * tensors["x"].double()}


class Fails(Doubled):
    def reference(self, case: Any, tensors: Any) -> dict[str, Any]:
        return {"y": [2.0][case.size]}


class ReadsTooMuch(Doubled):
    def write(self, case: Any, tensors: Any) -> None:
        tensors["x"][1:].zero_()


class NoTensor(Doubled):
    def reference(self, case: Any, tensors: Any) -> dict[str, Any]:
        return {"y": 2.0}


class Misnames(Doubled):
    def reference(self, case: Any, tensors: Any) -> dict[str, Any]:
        return {"z": tensors["x"]}


class Unseeded(Doubled):
    def write(self, case: Any, tensors: Any) -> None:
        tensors["x"].copy_(torch.randn(case.size))


class Empty(Doubled):
    size = attnfuzz.Integer(0, 3)


@attnfuzz.kernel(Empty())
def doubles_nothing(inputs: Any) -> Any:
    return inputs.x * 2


@attnfuzz.kernel(Unseeded())
def changes_each_time(inputs: Any) -> None:
    pass


@attnfuzz.kernel(Doubled(), options={"way": (1, 2)})
def doubles(inputs: Any, *, way: int) -> Any:
    return inputs.x * 2 if way == 1 else inputs.y.copy_(inputs.x + inputs.x)


@attnfuzz.kernel(Doubled())
def triples(inputs: Any) -> Any:
    return inputs.x * 3


@attnfuzz.kernel(Doubled())
def returns_too_much(inputs: Any) -> Any:
    return inputs.x, inputs.x


@attnfuzz.kernel(Fails())
def fails(inputs: Any) -> None:
    pass


@attnfuzz.kernel(ReadsTooMuch())
def reads_too_much(inputs: Any) -> None:
    pass


@attnfuzz.kernel(NoTensor())
def no_tensor(inputs: Any) -> None:
    pass


@attnfuzz.kernel(Misnames())
def misnames(inputs: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        (fails, "Fails.reference raised IndexError: list index out of range in line "),
        (reads_too_much, "ReadsTooMuch.reference: y holds NaN, which is what dead memory holds"),
        (changes_each_time, "Unseeded.write gives x other numbers at each call"),
        (no_tensor, "NoTensor.reference: y is 2.0; it must be a tensor, or an attnfuzz.Expected of two"),
        (misnames, "Misnames.reference: gives ['z']; the results are ['y']"),
    ],
)
def test_a_problem_that_is_wrong_itself_is_told_and_blames_no_kernel(kernel: Kernel, told: str) -> None:
    """A mistake in a reference would be a finding about every kernel, or a traceback out of attnfuzz."""
    with pytest.raises(ExecutorUnavailable) as caught:
        attnfuzz.check(kernel, {}, device="cpu")
    assert told in str(caught.value)


class Added(Doubled):
    def tensors(self, case: Any) -> dict[str, attnfuzz.TensorSpec]:
        return {"z": attnfuzz.TensorSpec((case.size,), case.dtype), **super().tensors(case)}

    def write(self, case: Any, tensors: Any) -> None:
        super().write(case, tensors)
        tensors["z"].copy_(attnfuzz.numbers((case.size,), seed=1, name="z"))

    def reference(self, case: Any, tensors: Any) -> dict[str, Any]:
        return {"y": 2 * tensors["x"].double() + tensors["z"]}

    def mistakes(self, case: Any, tensors: Any) -> dict[str, Any]:
        return {"x is not there": {"x": tensors["nothing"]}}


@attnfuzz.kernel(Added())
def adds_x(inputs: Any) -> Any:
    return inputs.x * 3


def test_mistakes_that_cannot_be_asked_for_are_told_and_others_looked_for() -> None:
    """A finding would have no cause for an error in the problem's own file, of which nobody would learn."""
    problem = adds_x.declaration.problem
    assert isinstance(problem, OpenProblem)
    found = explain_case(adds_x, problem.case_type(), device="cpu", seconds=60.0)
    (line,) = found.lines
    assert line.startswith("the problem's own mistakes were not looked for: Added.mistakes raised KeyError: 'nothing' ")
    assert [cause.words for cause in found.causes or ()] == ["x is read in place of z"]


def test_results_are_returned_or_written() -> None:
    """One of the ways in which kernels hand over a result would not be seen, or a wrong number of them be taken."""
    for way in (1, 2):
        attnfuzz.check(doubles, {"size": 3, "options": {"way": way}}, device="cpu")
    attnfuzz.check(doubles_nothing, {}, device="cpu")
    with pytest.raises(attnfuzz.KernelFailure, match=r"y\[axis 0 = 0\] = .*, expected"):
        attnfuzz.check(triples, {}, device="cpu")
    with pytest.raises(attnfuzz.KernelFailure, match=r"it must return y, or None after writing into inputs\.y"):
        attnfuzz.check(returns_too_much, {}, device="cpu")


def test_a_case_of_unknown_fields_is_told_by_its_problem() -> None:
    """Who mistypes a field would be sent to a file that knows nothing of it."""
    with pytest.raises(ValueError, match=r"unknown field `colour`.* a case of Doubled has options, size, parts, dtype"):
        attnfuzz.check(doubles, {"colour": 1}, device="cpu")


def test_words_of_supports_narrow_fields_and_others_are_refused() -> None:
    """A limit that a kernel declares in the usual words would be lost, and its cases be findings."""
    narrow = declared(Doubled(), supports=attnfuzz.Supports(dtypes=("float32",), head_sizes=(16, 64)))
    assert (narrow.fields["dtype"], narrow.fields["head_size"]) == (
        attnfuzz.Choice(("float32",)),
        attnfuzz.Choice((16,)),
    )
    with pytest.raises(ValueError, match=r"Supports\(block_sizes=\(1,\)\) says nothing about Doubled"):
        declared(Doubled(), supports=attnfuzz.Supports(block_sizes=(1,)))
    with pytest.raises(ValueError, match=r"Doubled\(colour=.*must be a field of the problem \(size, parts, dtype"):
        Doubled(colour=attnfuzz.Integer(1, 2))


def test_numerics_of_a_problem_of_ones_own_are_told_where_to_go() -> None:
    """Who declares a rounding as for a bundled kernel would not learn that the reference has to know it."""
    with pytest.raises(ValueError, match=r"Doubled has a bound of its own.*attnfuzz\.attention\(numerics=\.\.\.\)"):
        attnfuzz.kernel(Doubled(), numerics=attnfuzz.Numerics(row_sum="float32"))


def test_a_problem_inside_a_function_is_refused() -> None:
    """No other process could find it, and every case would fail there."""

    class Local(Doubled):
        pass

    with pytest.raises(ValueError, match="is in no file at its top level"):
        attnfuzz.kernel(Local())


def drawn(problem: OpenProblem, data: bytes) -> Any:
    """The case that ``data`` decides, without Hypothesis."""
    part = Decisions(data)
    fields = {name: field.decide(part.part(field.decisions)) for name, field in problem.fields.items()}
    return case_of(problem, **fields)


def test_cases_are_drawn_within_their_fields_simplest_first() -> None:
    """A case would be drawn that its own type refuses, or shrinking end at another case than the simplest."""
    problem = declared(Doubled())
    random = Random(5)
    everything = [drawn(problem, random.randbytes(problem.decisions)) for _ in range(400)]
    assert drawn(problem, b"") == simplest_case(problem, attnfuzz.Supports(), {})
    assert {len(case.parts) for case in everything} == {0, 1, 2, 3}
    assert max(sum(case.parts) for case in everything) == 6
    space = InputSpace(problem, attnfuzz.Supports(), {})
    met = {level for case in everything for level in space.place(case).case}
    assert met == set(range(space.num_levels))


def test_cases_survive_json_and_have_one_order() -> None:
    """A case would be another one in the executor than in the search, or two cases each be simpler than the other."""
    case = case_of(ROPE, num_tokens=9, head_size=64, slots="shuffled", seed=4)
    assert decode_case(ROPE, encode_case(case)) == case
    assert words(features(case)) == {"num_tokens>1", "head_size>16", "slots=shuffled"}
    again = msgspec.json.decode(msgspec.json.encode(ROPE), type=OpenProblem)
    assert again == ROPE
    assert again.case_type is ROPE.case_type
    simpler = msgspec.structs.replace(case, num_tokens=3, seed=63)
    assert size_key(simpler) < size_key(case)


def test_shrinking_keeps_what_a_failure_needs() -> None:
    """What is shown would not fail, or hold more than it takes to fail."""
    problem = declared(Doubled())
    start = case_of(problem, size=8, parts=(1, 4, 1), dtype="float32", head_size=32)

    def still_fails(case: Any) -> bool:
        return case.size >= 3 and max(case.parts, default=0) >= 2

    smallest = minimise(start, still_fails, supports=attnfuzz.Supports(), options={})
    assert smallest == case_of(problem, size=3, parts=(2,))


def test_other_processes_learn_of_a_problem_as_data(tmp_path: Path) -> None:
    """Whoever draws cases would have to import the user's file, with all that this may do to a process."""
    source = "import attnfuzz\n\nclass P(attnfuzz.Problem):\n    n = attnfuzz.Integer(1, 2)\n\n"
    (tmp_path / "p.py").write_text(source + "@attnfuzz.kernel(P())\ndef k(inputs):\n    pass\n")
    runner: Runner = shared_runner("cpu")
    (declaration,) = runner.declarations([str(tmp_path / "p.py")])
    assert declaration.problem == OpenProblem(place=f"{tmp_path}/p.py:P", fields={"n": attnfuzz.Integer(1, 2)})
    assert not [name for name in sys.modules if name.startswith("attnfuzz_user_p_")]
    with pytest.raises(ExecutorUnavailable, match=r"P.tensors raised NotImplementedError: P must define tensors"):
        runner.judge(declaration, simplest_case(declaration.problem, declaration.supports, {}))


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.by_day("1")
def test_the_examples_of_the_page_find_their_bugs(number: int, tmp_path: Path) -> None:
    """Who copies the page's example would meet an error, or be told something else than the page shows."""
    text = PAGE.read_text(encoding="utf-8")
    example, shown = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)[number] for kind in ("python", "text"))
    (tmp_path / "kernels.py").write_text(example)
    run = explore("kernels.py", "--budget", "60s", "--seed", "1", "--workers", "1", "--fail-fast", cwd=tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    assert shown
    for line in shown.splitlines():
        assert line.strip() in run.stdout


def test_the_table_of_the_page_has_all_parameters() -> None:
    """Who writes a problem from the page alone would guess a parameter's name, and be refused."""
    (table,) = re.findall(r"^\| \| parameters.*?\n\n", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
    told = {name: re.findall(r"(\[?)`(\w+)`\]?", parameters) for name, parameters in rows}
    assert {"Integer", "TensorSpec", "Expected", "attention"} <= told.keys()
    for name, parameters in told.items():
        known = inspect.signature(getattr(attnfuzz, name)).parameters.values()
        assert parameters == [("[" if one.default is not one.empty else "", one.name) for one in known], name


UNUSABLE = """
import attnfuzz
import torch


class Doubled(attnfuzz.Problem):
    n = attnfuzz.Integer(1, 8)
    seed = attnfuzz.Seed()

    def tensors(self, case):
        shape = (case.n,)
        return {"x": attnfuzz.TensorSpec(shape, "float32"), "y": attnfuzz.TensorSpec(shape, "float32", "output")}

    def write(self, case, tensors):
        numbers = attnfuzz.numbers((case.n,), seed=case.seed, name="x")
        tensors["x"].copy_(torch.where(tensors["x"].isnan(), numbers, numbers))  # both on the host

    def reference(self, case, tensors):
        return {"y": 2 * tensors["x"].double()}


class Raises(Doubled):
    def write(self, case, tensors):
        tensors["x"].copy_(torch.ones(case.n + 1))


class Sometimes(Doubled):
    def write(self, case, tensors):
        if case.n == 3:
            raise KeyError("no three")
        super().write(case, tensors)


@attnfuzz.kernel(Doubled())
def right(inputs):
    return inputs.x * 2


@attnfuzz.kernel(Raises())
def of_a_problem_that_raises(inputs):
    return inputs.x * 2


@attnfuzz.kernel(Sometimes())
def wrong(inputs):
    return inputs.x * 3
"""


def check_others_are_searched(folder: Path, device: str, budget: str) -> None:
    """Search ``UNUSABLE``: the right kernel is silent, the wrong one found, and the third told to be of no use."""
    (folder / "kernels.py").write_text(UNUSABLE)
    command = ["explore", "kernels.py", "--budget", budget, "--workers", "1", "--device", device, "--json", "s.json"]
    run = run_command(*command, "--save-dir", "found", cwd=folder)
    assert "kernels.py:of_a_problem_that_raises is not searched: Raises.write raised RuntimeError: " in run.stdout
    told = {one["target"].partition(":")[2]: one for one in json.loads((folder / "s.json").read_text())["kernels"]}
    assert [one["cases"] > 0 for one in told.values()] == [name != "of_a_problem_that_raises" for name in told]
    assert [one["oracle"] for one in told["wrong"]["findings"]] == ["accuracy"]
    assert not told["right"]["findings"]
    assert run.returncode == 1, run.stderr


def test_a_problem_that_raises_costs_its_kernels_alone(tmp_path: Path) -> None:
    """One mistake in a user's `write` would end the search of all kernels, or one case of it that of the rest."""
    with ending_after(cases=3, kernels=2):
        check_others_are_searched(tmp_path, "cpu", "60s")
