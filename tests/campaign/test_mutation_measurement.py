"""Mutants of a user's kernel are killed, listed as equivalent or reported, by attnfuzz's search or the user's tests."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from attnfuzz.declaration import KernelLoadError
from attnfuzz.judging.runner import Runner
from attnfuzz.mutation.measurement import MeasuredMutants, MutantsRequest, choose_mutants, measure
from attnfuzz.mutation.mutants import Status
from attnfuzz.report.mutants import Checkpoints, MutantsFile, known_outcomes, read_mutants_json
from tests.campaign.mutable_kernels import write_project
from tests.common.in_process import attnfuzz

PYTEST = f"{sys.executable} -m pytest -q -p no:cacheprovider test_mine.py"
EQUIVALENT = """
[[equivalent]]
file = "combining.py"
function = "combine"
operator = "other"
line = "a = tl.load(p_a + i_token * stride_at + i_head * stride_ah + o_d, mask=m_d, other=0.0).to(tl.float32)"
becomes = 'a = tl.load(p_a + i_token * stride_at + i_head * stride_ah + o_d, mask=m_d, other=NAN).to(tl.float32)'
reason = "What is beyond the head size is masked when it is stored, and no element depends on another."

[[equivalent]]
file = "combining.py"
function = "combine"
operator = "store"
line = "this line is gone"
becomes = "pass"
reason = "This entry is stale: the line that it was about is not there any more."
""".replace("NAN", 'float("nan")')


def statuses(measured: MeasuredMutants) -> dict[str, Status]:
    return {" ".join(mutant.after).strip(): outcome.status for mutant, outcome in measured.outcomes}


def request(kernel: Path | str, *operators: str, command: str | None = None) -> MutantsRequest:
    return MutantsRequest(
        kernels=(str(kernel),), device="cpu", jobs=2, operators=operators, budget_s=60.0, first_s=1.0, command=command
    )


@pytest.mark.night
def test_kills_and_stillborn(tmp_path: Path) -> None:
    """A bug that is found would be missing from the score, or code that never runs would count as found."""
    measured = measure(request(write_project(tmp_path), "normalisation", "axis", "min_max"))
    assert statuses(measured) == {
        "row_max = tl.minimum(lse_a, lse_b)": "killed",
        "total = tl.sum(w_a + tl.zeros([1], tl.float32), axis=1) + w_b": "stillborn",
        "out = w_a * a + w_b * b": "killed",
    }
    kills = [outcome.kill for _, outcome in measured.outcomes if outcome.kill is not None]
    assert all(kill.failure is not None and kill.by == kill.failure.oracle and kill.seconds > 0 for kill in kills)
    assert "tl.minimum" not in (tmp_path / "combining.py").read_text()


@pytest.mark.night
def test_survivors_and_equivalents_on_the_command_line(tmp_path: Path) -> None:
    """A survivor would pass for killed, an argument would not be read, or a stale one go unnoticed."""
    write_project(tmp_path)
    command = ["mutants", "declaring.py", "--device", "cpu", "--operator", "other", "--budget", "2s"]
    first = attnfuzz(*command, "--json", "m.json", cwd=tmp_path)
    assert first.returncode == 1, first.stderr
    assert (
        "+    b = tl.load(p_b + i_token * stride_bt + i_head * stride_bh + o_d, mask=m_d, other=float" in first.stdout
    )
    assert "0 of 2 mutants killed (0.0%), 2 survived" in first.stdout
    written = msgspec.json.decode((tmp_path / "m.json").read_bytes(), type=MutantsFile)
    assert [one.status for one in written.mutants] == ["survived", "survived"]
    assert written.mutants[0].file == "combining.py"
    (tmp_path / "equivalent_mutants.toml").write_text(EQUIVALENT)
    second = attnfuzz(*command, cwd=tmp_path)
    assert second.returncode == 1
    assert "0 of 1 mutant killed (0.0%), 1 survived; 1 equivalent" in second.stdout


@pytest.mark.night
def test_an_interrupted_measurement_goes_on_from_its_file(tmp_path: Path) -> None:
    """An hour's work would be lost with the terminal, or numbers measured in different ways be added up."""
    write_project(tmp_path)
    command = ["mutants", "declaring.py", "--device", "cpu", "--operator", "other", "--budget", "2s"]
    command += ["--json", "m.json"]
    attnfuzz(*command, cwd=tmp_path)
    whole = msgspec.json.decode((tmp_path / "m.json").read_bytes(), type=MutantsFile)
    marked = msgspec.structs.replace(whole.mutants[0], cases=7_654_321)
    part = msgspec.structs.replace(whole, mutants=(marked,), left=1)
    (tmp_path / "m.json").write_bytes(msgspec.json.encode(part))
    resumed = [*command, "--resume", "m.json"]
    done = attnfuzz(*resumed, cwd=tmp_path)
    assert "0 of 2 mutants killed (0.0%), 2 survived" in done.stdout, done.stderr
    again = msgspec.json.decode((tmp_path / "m.json").read_bytes(), type=MutantsFile)
    assert (again.left, len(again.mutants), again.mutants[0]) == (0, 2, marked)
    other = attnfuzz(*resumed, "--seed", "5", cwd=tmp_path)
    assert other.returncode == 2
    assert "--resume 'm.json' was measured with --seed 0, not 5; use the same" in other.stderr
    (tmp_path / "m.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(part, device="another GPU")))
    elsewhere = attnfuzz(*resumed, cwd=tmp_path)
    assert elsewhere.returncode == 2
    assert "what is to be resumed was measured on another GPU, not " in elsewhere.stderr


@pytest.mark.night
def test_the_list_is_that_of_the_shard(tmp_path: Path) -> None:
    """Whoever looks up what a shard is about would be shown all mutants."""
    write_project(tmp_path)
    command = ["mutants", "declaring.py", "--device", "cpu", "--operator", "other", "--list"]
    shards = [[], ["--shard", "1/2"], ["--shard", "2/2"]]
    printed = [attnfuzz(*command, *shard, cwd=tmp_path).stdout.count("@@ ") for shard in shards]
    assert printed == [2, 1, 1]


@pytest.mark.night
def test_shards_add_up_to_the_whole(tmp_path: Path) -> None:
    """A set that is measured in parts would come out with mutants missing, or be hunted twice."""
    write_project(tmp_path)
    command = ["mutants", "declaring.py", "--device", "cpu", "--operator", "other", "--budget", "2s"]
    for shard, files in (("1/2", []), ("2/2", ["--resume", "m.json"])):
        done = attnfuzz(*command, "--shard", shard, "--json", "m.json", *files, cwd=tmp_path)
        found = msgspec.json.decode((tmp_path / "m.json").read_bytes(), type=MutantsFile)
        number = int(shard[0])
        assert (len(found.mutants), found.left) == (number, 2 - number), done.stderr
        assert len([line for line in done.stdout.splitlines() if ": survived" in line]) == number
    (tmp_path / "equivalent_mutants.toml").write_text(EQUIVALENT)
    listed = attnfuzz(*command, "--shard", "2/2", "--resume", "m.json", cwd=tmp_path)
    assert "0 of 1 mutant killed (0.0%), 1 survived; 1 equivalent, 0 stillborn; time" in listed.stdout


@pytest.mark.night
def test_what_is_known_is_there_while_the_rest_is_measured(tmp_path: Path) -> None:
    """Whoever loses the machine would lose everything that was measured on it."""
    told: list[MeasuredMutants] = []
    whole = measure(request(write_project(tmp_path), "normalisation", "axis"), so_far=told.append)
    assert [(len(one.outcomes), one.left) for one in told] == [(1, 1), (2, 0)]
    file = tmp_path / "m.json"
    Checkpoints(file)(told[0])
    known = known_outcomes(read_mutants_json(file))
    assert list(known) == [mutant.id for mutant, _ in told[0].outcomes]
    assert [known.get(mutant.id, outcome).status for mutant, outcome in whole.outcomes] == [
        outcome.status for _, outcome in whole.outcomes
    ]


@pytest.mark.night
def test_what_was_known_before_is_there_from_the_first(tmp_path: Path) -> None:
    """A measurement that resumes, and is interrupted again, would leave less in its file than it had found there."""
    asked = request(write_project(tmp_path), "normalisation", "axis")
    whole, told = measure(asked), list[MeasuredMutants]()
    known = {mutant.id: outcome for mutant, outcome in whole.outcomes}
    measure(replace(asked, known=known), so_far=told.append)
    assert [(len(one.outcomes), one.left) for one in told] == [(2, 0), (2, 0)]


@pytest.mark.night
def test_a_test_suite_as_the_killer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two suites could not be compared: a user's tests would run on the kernel as it is."""
    (tmp_path / "test_mine.py").write_text(
        "import os, torch\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "from attnfuzz.kernels.merge.launch import merge_states\n"
        "def test_output():\n"
        "    out, lse = torch.ones(1, 1, 16), torch.zeros(1, 1)\n"
        "    merged, _ = merge_states(out, lse, out, lse, output=torch.zeros(1, 1, 16))\n"
        "    assert torch.equal(merged, out)\n"
    )
    monkeypatch.chdir(tmp_path)
    measured = measure(request("merge_states_triton", "normalisation", command=PYTEST))
    assert statuses(measured) == {"b_out = acc  # [BLOCK_D]": "killed"}


@pytest.mark.night
@pytest.mark.parametrize(
    ("test", "problem"),
    [("assert False", "does not pass without a mutant"), ("assert True", "does not load combining.py with attnfuzz's")],
)
def test_a_suite_that_cannot_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str, problem: str) -> None:
    """Every mutant would be killed by a test that fails anyway, or survive tests that never run it."""
    kernel = write_project(tmp_path)
    (tmp_path / "test_mine.py").write_text(f"def test(): {test}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KernelLoadError, match=problem):
        measure(request(kernel, "store", command=PYTEST))


@pytest.mark.night
def test_a_suite_that_loads_another_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever changes a checkout while the tests import what is installed would be told to look at the plugin."""
    for name in ("checkout", "installed"):
        (tmp_path / name / "ops").mkdir(parents=True)
        write_project(tmp_path / name / "ops")
    (tmp_path / "test_mine.py").write_text("import ops.combining\ndef test(): assert ops.combining.combine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'installed'}{os.pathsep}{os.environ['PYTHONPATH']}")
    kernel = tmp_path / "checkout" / "ops" / "declaring.py"
    with pytest.raises(KernelLoadError, match=r"loads \S+installed/ops/combining\.py in place of \S+checkout/ops/comb"):
        measure(request(kernel, "store", command=PYTEST))


@pytest.mark.night
def test_a_kernel_that_fails_as_it_is(tmp_path: Path) -> None:
    """Every mutant of a broken kernel would count as found."""
    kernel = write_project(tmp_path)
    code = tmp_path / "combining.py"
    code.write_text(code.read_text().replace("row_max + tl.log(total)", "row_max"))
    with pytest.raises(KernelLoadError, match=r"fails without a mutant .* repair that first"):
        measure(request(kernel, "store"))


def test_nothing_to_change(tmp_path: Path) -> None:
    """A kernel without Triton code would get a perfect score."""
    with pytest.raises(KernelLoadError, match="nothing to change in merge_states_eager: only Triton kernels"):
        measure(request("merge_states_eager"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["k.py", "--operator", "swap"], "'swap' must be one of mask_term, mask_dropped,"),
        (["k.py", "--equivalent", "missing.toml"], "does not exist"),
        (["k.py", "--shard", "3/2"], "'3/2' must be I/N, the machine's number from 1 to N and how many"),
        ([], "Missing argument"),
    ],
)
@pytest.mark.by_day("arguments0-*")
def test_wrong_usage(tmp_path: Path, arguments: list[str], problem: str) -> None:
    """A mistyped option would measure something else, or end in a traceback."""
    done = attnfuzz("mutants", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.night
def test_one_mutant_again(tmp_path: Path) -> None:
    """A survivor could only be looked into by hunting all mutants again."""
    kernel = write_project(tmp_path)
    with Runner(device="cpu") as runner:
        _, mutants = choose_mutants(runner, request(kernel, "store"))
        one = replace(request(kernel), ids=(mutants[1].id,))
        assert [mutant.id for mutant in choose_mutants(runner, one)[1]] == [mutants[1].id]
        with pytest.raises(KernelLoadError, match="no mutant is called 'gone'; attnfuzz mutants --list"):
            choose_mutants(runner, replace(one, ids=("gone",)))


@pytest.mark.night
def test_what_is_to_be_resumed_is_a_file(tmp_path: Path) -> None:
    """A named pipe would be waited for, past any budget."""
    os.mkfifo(tmp_path / "m.json")
    run = attnfuzz("mutants", "dense_naive", "--resume", "m.json", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (2, "Error: --resume 'm.json' cannot be read: it is a named pipe, no file\n")
