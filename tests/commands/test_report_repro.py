"""Repro scripts: they must show a failure on a machine that knows nothing of attnfuzz."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

import attnfuzz
from attnfuzz.cases.supported import adapt_options, why_unsupported
from attnfuzz.corpus import FindingRecord, Regression, load_regression, regression_files
from attnfuzz.declaration import Declaration, Kernel, KernelLoadError, load_kernels
from attnfuzz.families import CacheWrite
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.cases import PROBLEMS, Case, Problem, case_from_builtins
from attnfuzz.problems.limits import CaseTooLarge, tensor_nbytes
from attnfuzz.problems.open_cases import OpenCase, implementation_of
from attnfuzz.problems.simplest import simplest_case
from attnfuzz.report import repro
from attnfuzz.report.repro import repro_script
from attnfuzz.report.sources import kernel_sources
from attnfuzz.trials.engine_calls import NotFollowed, engine_calls
from attnfuzz.trials.open_script import open_script_part
from attnfuzz.trials.script_part import MAX_TENSOR_BYTES, ScriptPart

ROOT = Path(attnfuzz.__file__).parents[1]
WITHOUT_ATTNFUZZ = f"""
import importlib.util, os, runpy, sys, traceback
sys.path[:] = [folder for folder in sys.path if folder != {str(ROOT)!r}]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
assert importlib.util.find_spec("attnfuzz") is None
import torch
torch.use_deterministic_algorithms(False)  # the first call, with whatever it says, imports 900 modules
for line in sys.stdin:
    said, script, *folders = line.rstrip("\\n").split("\\t")
    if not (child := os.fork()):
        output = os.open(said, os.O_WRONLY)
        os.dup2(output, 1), os.dup2(output, 2), os.close(output)
        sys.path[:0] = folders
        status = 1
        try:
            runpy.run_path(script, run_name="__main__")
            status = 0
        except SystemExit as end:
            status = int(end.code)
        except Exception:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)  # else all that was imported is taken apart, which takes a second
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs scripts one after the other, each in a process of its own that has imported torch."""
HEADS: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 1, "head_size": 16, "scale": 0.25}
PAGED: dict[str, Any] = {**HEADS, "block_size": 4, "seq_lens": [5, 0, 9]}
DENSE: dict[str, Any] = {**HEADS, "seq_lens": [3, 0, 9], "dtype": "float32"}
USER_KERNEL = """
import attnfuzz
import torch
from helpers.attend import attend

@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(dtypes=("float32",)), options={{"extra": (0, 1)}})
def user_kernel(inputs, *, extra):
    '''Quotes of both kinds, and a backslash: \"\"\" \\\\ '''
    out, lse = inputs.out, torch.empty(inputs.q.shape[:2], device=inputs.q.device)
    for i, length in enumerate(inputs.seq_lens.tolist()):
        out[i], lse[i] = attend(inputs.q[i], inputs.k[i, :length], inputs.v[i, :length], inputs.scale)
    {change}
    return out, lse
"""
HELPER = """
def attend(q, k, v, scale):
    scores = (q * k).sum(-1) * scale
    return (scores.softmax(0)[..., None] * v).sum(0), scores.logsumexp(0)
"""


def regression(problem: Problem, kernel: str, fields: dict[str, Any], oracle: OracleName = "accuracy") -> Regression:
    finding = FindingRecord(oracle=oracle, message='out is wrong, by \\ and """')
    return Regression(problem=problem, kernel=kernel, case=case_from_builtins(problem, fields), finding=finding)


def declaration_of(target: str) -> Declaration:
    return load_kernels(target)[0].declaration


class Pythons:
    """Runs scripts where attnfuzz cannot be imported. None may leave a temporary folder behind; torch makes one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", WITHOUT_ATTNFUZZ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, "TMPDIR": str(folder)},
        )  # fmt: skip
        self._number = 0

    def __call__(self, script: str, *folders: Path) -> tuple[int, str]:
        """What a script ends with, and all that it and what it starts print. ``folders`` hold modules that it imports:
        attnfuzz as well if it takes the repairs of Triton's interpreter."""
        self._number += 1
        path, said = (self.folder / f"script{self._number}{end}" for end in (".py", ".txt"))
        path.write_text(script, encoding="utf-8")
        os.mkfifo(said)
        repairs = [ROOT] if "from attnfuzz" in script else []
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\t".join(map(str, (said, path, *folders, *repairs))) + "\n")
        printed = said.read_text(encoding="utf-8")
        status = int(self._process.stdout.readline())
        assert list(self.folder.glob("repro-*")) == []
        return status, printed

    def with_engines(self, script: str, engine: str, sources: list[str]) -> list[int]:
        """What the script ends with where the module ``engine`` is each of these in turn."""
        found = []
        for source in sources:
            folder = self.folder / f"{engine}{self._number}"
            folder.mkdir()
            (folder / f"{engine}.py").write_text(source)
            found.append(self(script, folder)[0])
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pythons]:
    with closing(Pythons(tmp_path_factory.mktemp("scripts"))) as pythons:
        yield pythons


def user_script(folder: Path, change: str, oracle: OracleName = "accuracy") -> str:
    """The script for a kernel file with a helper in a package beside it; ``change`` is its last statement."""
    (folder / "helpers").mkdir(parents=True)
    (folder / "helpers" / "__init__.py").write_text("", encoding="utf-8")
    (folder / "helpers" / "attend.py").write_text(HELPER, encoding="utf-8")
    kernel_file = folder / "my-kernels.py"
    kernel_file.write_text(USER_KERNEL.format(change=change), encoding="utf-8")
    declaration = Declaration(name="user_kernel", problem="dense_decode", options={"extra": (0, 1)})
    script = repro_script(regression("dense_decode", f"{kernel_file}:user_kernel", DENSE, oracle), declaration)
    for file in (kernel_file, folder / "helpers" / "attend.py"):
        file.unlink()  # the script must not need them
    return script


BUNDLED: list[tuple[Problem, str, dict[str, Any]]] = [
    ("dense_decode", "dense_naive", {**HEADS, "seq_lens": [3, 0, 9], "strides": {"k": "every_other"}}),
    ("paged_decode", "paged_split_k", {**PAGED, "layout": "packed", "options": {"num_splits": 3}}),
    ("split_decode", "split_k_partials", {**PAGED, "layout": "interleaved", "num_splits": 3}),
    (
        "paged_attention",
        "paged_attention_naive",
        {**PAGED, "seq_lens": [5, 2, 9], "query_lens": [3, 0, 1], "padding_tokens": 2},
    ),
    (
        "paged_decode",
        "paged_eager",
        {**PAGED, "kv": {"dtype": "float8_e4m3fn", "per": "head", "scales": "scattered"}},
    ),
    (
        "merge_states",
        "merge_states_triton",
        {
            "num_q_heads": 3,
            "head_size": 16,
            "num_tokens": 2,
            "dtype": "bfloat16",
            "lse_pairs": [["-inf", "-inf"], ["+inf", "finite"], ["finite", "low"]],
        },
    ),
]
CHANGES: dict[str, tuple[OracleName, str]] = {
    "out[2, 1, 3] += 0.5": ("accuracy", "out[2, 1, 3] is "),
    "lse[0, 0] = float('nan')": ("accuracy", "lse[0, 0] is nan"),
    "lse = torch.empty_like(lse)": ("unwritten", " is nan"),
    "inputs.k[0, 0, 0, 0] = 7": ("red_zone", "FAIL"),
    "inputs.q.as_strided((1,), (1,), 0)[0] = 1": ("red_zone", "FAIL"),
    "wide = torch.zeros(8); wide.as_strided((1,), (1,), wide.storage_offset() + 8)[0] = 1": ("red_zone", "FAIL"),
    "out[0].copy_(torch.randn(2, 16))": ("determinism", "FAIL"),
    "raise RuntimeError('device lost')": ("exception", "RuntimeError: device lost"),
}


@pytest.mark.night
def test_bundled_kernels_pass(python: Pythons) -> None:
    """The script would lack a kernel's file, or rebuild other inputs or expect other results than the case."""
    for case in BUNDLED:
        status, said = python(repro_script(regression(*case), declaration_of(case[1])))
        assert status == 0, said


@pytest.mark.night
@pytest.mark.parametrize("problem", PROBLEMS)
def test_scripts_agree_with_replay_on_saved_cases(
    problem: Problem, python: Pythons, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A correct kernel would pass `attnfuzz replay` and be accused by the script that is pasted into an issue."""
    monkeypatch.setattr(repro, "kernel_sources", functools.cache(kernel_sources))
    kernels = [kernel.declaration for kernel in load_kernels("*")]
    scripts = {}
    for file in regression_files([ROOT / "regressions"]):
        saved = load_regression(file)
        for kernel in kernels if saved.problem == problem else ():
            case = adapt_options(saved.case, kernel.options)
            if kernel.problem == problem and why_unsupported(kernel.supports, kernel.options, case) is None:
                on_kernel = msgspec.structs.replace(saved, kernel=kernel.target, case=case)
                scripts[kernel.target, file.name] = repro_script(on_kernel, kernel)
    # all of these are marked fixed, which their replay by the pytest plugin holds
    outcomes = {name: python(script) for name, script in scripts.items()}
    assert outcomes
    assert {name: one for name, one in outcomes.items() if one[0] or not one[1].endswith("PASS\n")} == {}


def test_failures_of_user_kernels_are_shown(tmp_path: Path, python: Pythons) -> None:
    """A finding pasted into an issue would not reproduce there, or a correct kernel be called wrong."""
    for oracle in sorted({oracle for oracle, _ in CHANGES.values()}):
        status, said = python(user_script(tmp_path / oracle, "pass", oracle))
        assert status == 0, said
    for number, (change, (oracle, says)) in enumerate(CHANGES.items()):
        status, said = python(user_script(tmp_path / str(number), change, oracle))
        assert (status, says in said) == (1, True), said


ALONE = """
import attnfuzz
import torch
from attnfuzz import Supports

SUPPORTS = attnfuzz.Supports(dtypes=("float32",))

def attend(q, k, v, scale):
    scores = (q * k).sum(-1) * scale
    return (scores.softmax(0)[..., None] * v).sum(0)

def of_another_kernel():
    return 0

@attnfuzz.kernel(
    "dense_decode",
    supports=SUPPORTS,
)
def alone(inputs):
    out = torch.empty_like(inputs.q)
    for i, length in enumerate(inputs.seq_lens.tolist()):
        out[i] = attend(inputs.q[i], inputs.k[i, : {length}], inputs.v[i, : {length}], inputs.scale)
    return out
"""
PAST_Q = "ctypes.string_at(inputs.q.data_ptr() + inputs.q.nbytes, 1)"


def alone_script(folder: Path, length: str, oracle: OracleName = "accuracy", also: str = "") -> str:
    """The script of a kernel that is one file, and reads so many tokens of a sequence."""
    folder.mkdir()
    file = folder / "alone.py"
    text = ALONE.replace("{length}", length).replace(
        "    return out\n", f"    {also}\n    return out\n" if also else "    return out\n"
    )
    file.write_text(f"import ctypes\n{text}")
    (kernel,) = load_kernels(f"{file}:alone")
    saved = regression(
        "dense_decode", f"{file}:alone", {**HEADS, "num_q_heads": 1, "seq_lens": [5], "dtype": "float32"}, oracle
    )
    return repro_script(saved, msgspec.structs.replace(kernel.declaration, supports=ALONE_SUPPORTS))


ALONE_SUPPORTS = attnfuzz.Supports(dtypes=("float32",), lse="none")


def test_a_kernel_of_one_file_stands_in_the_script_as_it_is(tmp_path: Path, python: Pythons) -> None:
    """Readers would have to find the few lines that matter in files written as strings, and a loader of these."""
    scripts = [alone_script(tmp_path / "wrong", "max(length - 1, 1)"), alone_script(tmp_path / "right", "length")]
    assert [python(script)[0] for script in scripts] == [1, 0]
    for script in scripts:
        assert "attnfuzz" not in script
        assert "of_another_kernel" not in script
        assert "def attend(q, k, v, scale):\n    scores = (q * k).sum(-1) * scale\n" in script
        assert len(script.splitlines()) <= 40
        assert max(len(line) for line in script.splitlines() if "unpack(" not in line) <= 120


def test_a_kernel_with_a_function_of_the_scripts_own_names_is_called_as_it_is(tmp_path: Path, python: Pythons) -> None:
    """The kernel would unpack its bits with the script's function, or the script read its tensors with the kernel's."""
    kernel = """
import attnfuzz
import torch

def unpack(bits, count):
    return bits[:count]

@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(dtypes=("float32",), lse="none"))
def unpacking(inputs):
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        k, v = (unpack(part[seq, :, 0], length) for part in (inputs.k, inputs.v))
        inputs.out[seq] = ({factor} * inputs.q[seq] @ k.T * inputs.scale).softmax(-1) @ v
"""
    values = {"keys": "normal", "values": "normal"}
    for factor, status in ((2, 1), (1, 0)):
        file = tmp_path / f"unpacking_{factor}.py"
        file.write_text(kernel.replace("{factor}", str(factor)))
        (loaded,) = load_kernels(f"{file}:unpacking")
        case = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 64, "seq_lens": [90], "scale": 0.25, "values": values}
        saved = regression("dense_decode", f"{file}:unpacking", {**case, "dtype": "float32"}, "accuracy")
        script = repro_script(saved, loaded.declaration)
        assert python(script)[0] == status, python(script)[1]


def test_an_access_outside_ends_the_script(tmp_path: Path, python: Pythons) -> None:
    """What one run shows would be refused, or the script read memory that happens to be there and pass."""
    for name, also, status in (
        ("past", PAST_Q, -signal.SIGSEGV),
        ("within", PAST_Q.replace("nbytes", "nbytes - 1"), 0),
    ):
        ended, said = python(alone_script(tmp_path / name, "length", "guard_page", also))
        assert ended == status, said
        assert ("in alone" in said) is (status != 0)  # the line of the kernel


ENGINE = """
import torch
FACTOR = {factor}

def decode(query, cache, values, lengths, out, workspace, scale=1.0, causal=True):
    for i, length in enumerate(lengths.tolist()):
        part = cache[i, :length].repeat_interleave(query.shape[1] // cache.shape[2], 1).float()
        weights = torch.einsum("hd,nhd->hn", query[i].float(), part).mul(scale).softmax(-1)
        heads = values[i, :length].repeat_interleave(query.shape[1] // cache.shape[2], 1).float()
        out[i] = FACTOR * torch.einsum("hn,nhd->hd", weights, heads)
"""


def test_of_an_engine_its_own_function_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Pythons
) -> None:
    """Seven hundred lines of an adapter, and of what it needs of attnfuzz, would be pasted by nobody."""
    engine_file = tmp_path / "engine_of_a_test.py"
    engine_file.write_text(ENGINE.format(factor=1.25))
    monkeypatch.syspath_prepend(tmp_path)
    needs = {"decode": ("engine_of_a_test.moved:decode", "engine_of_a_test:decode")}
    supports = attnfuzz.Supports(lse="none", dtypes=("float32",))

    def adapter(i: Any, *, decode: Any) -> Any:
        longest = int(i.seq_lens.max())
        k, workspace = i.k[:, :longest], i.q.new_empty(2, 3)
        return lambda: decode(i.q, k, i.v, i.seq_lens, i.out, workspace, scale=i.scale)

    kernel = attnfuzz.Engine("torch", tried=("1",)).kernel("dense_decode", supports=supports, needs=needs)(adapter)
    assert isinstance(kernel, Kernel)
    assert kernel.declaration.calls == ("engine_of_a_test:decode",)
    saved = regression("dense_decode", "other:adapter", {**HEADS, "seq_lens": [3, 7], "dtype": "float32"})
    follow = functools.partial(_followed, kernel)
    script = repro_script(saved, kernel.declaration, follow=follow)
    assert "from engine_of_a_test import decode\n" in script
    assert "workspace = torch.full((2, 3), nan, dtype=torch.float32)\n" in script
    assert len(script.splitlines()) <= 40
    assert max(len(line) for line in script.splitlines() if "unpack(" not in line) <= 120
    engines = [ENGINE.format(factor=factor) for factor in (1.25, 1.0)]
    assert python.with_engines(script, "engine_of_a_test", engines) == [1, 0]


def _followed(kernel: Kernel, case: Case, launches: bool) -> ScriptPart:
    return engine_calls(kernel, case, device="cpu", launches=launches)


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param(lambda i, f: f(i.out, object()), id="an object of its own"),
        pytest.param(lambda i, f: (f(i.out), i.out.fill_(1))[1], id="changes a result"),
        pytest.param(lambda i, f: f(i.q) + 1, id="makes a result"),
    ],
)
def test_an_adapter_that_does_more_than_call_is_not_followed(
    adapter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script would leave out what the adapter does, and accuse the engine of another result."""
    (tmp_path / "another_engine_of_a_test.py").write_text("def f(out, *others):\n    return out\n")
    monkeypatch.syspath_prepend(tmp_path)
    engine = attnfuzz.Engine("torch", tried=("1",))
    needs = {"f": ("another_engine_of_a_test:f",)}

    def call(i: Any, *, f: Any) -> Any:
        return adapter(i, f)

    kernel = engine.kernel("dense_decode", supports=attnfuzz.Supports(lse="none"), needs=needs)(call)
    assert isinstance(kernel, Kernel)
    with pytest.raises(NotFollowed):
        _followed(kernel, case_from_builtins("dense_decode", DENSE), True)


def test_results_that_an_adapter_takes_apart_itself_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script would end with a NameError, since the engine's call has no such tensor."""
    (tmp_path / "third_engine_of_a_test.py").write_text("def write(key, cache):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)

    def adapter(i: Any, *, write: Any) -> None:
        write(i.key, i.k_cache)

    engine = attnfuzz.Engine("torch", tried=("1",))
    needs = {"write": ("third_engine_of_a_test:write",)}
    kernel = engine.kernel(CacheWrite(), supports=attnfuzz.Supports(), needs=needs)(adapter)
    assert isinstance(kernel, Kernel)
    case = simplest_case(kernel.declaration.problem, kernel.declaration.supports, {})
    assert isinstance(case, OpenCase)
    part = open_script_part(kernel, case, device="cpu")
    assert part.results == ("k_cache",)
    assert all("k_cache" in line for line in part.checks if "differs" in line)


def test_large_case_is_refused() -> None:
    """A script of hundreds of megabytes would be written."""
    large = regression("dense_decode", "dense_eager", {**HEADS, "seq_lens": [MAX_TENSOR_BYTES]})
    with pytest.raises(CaseTooLarge, match=r"use attnfuzz replay, or a smaller case"):
        repro_script(large, declaration_of("dense_eager"))


def test_missing_source_is_refused() -> None:
    """A kernel whose file is gone would end in a traceback."""
    declaration = Declaration(name="gone", problem="dense_decode")
    with pytest.raises(KernelLoadError, match=r"kernel source gone\.py cannot be read"):
        repro_script(regression("dense_decode", "gone.py:gone", DENSE), declaration)
    with pytest.raises(KernelLoadError, match=r"source file of module 'no\.such' was not found"):
        repro_script(regression("dense_decode", "no.such:gone", DENSE), declaration)


STATEFUL_KERNEL = """
import attnfuzz
import torch

seen = []

@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(dtypes=("float32",)))
def stateful_kernel(inputs):
    {condition}
    out, lse = inputs.out.zero_(), torch.full_like(inputs.lse, -torch.inf)
    group = inputs.q.shape[1] // inputs.k.shape[2]
    for i, length in enumerate(inputs.seq_lens.tolist()):
        for head in range(inputs.q.shape[1] if length else 0):
            scores = inputs.scale * (inputs.k[i, :length, head // group] @ inputs.q[i, head])
            out[i, head] = scores.softmax(0) @ inputs.v[i, :length, head // group]
            lse[i, head] = scores.logsumexp(0)
    return (out + 1 if fails else out), lse
"""


def stateful_script(
    folder: Path, condition: str, *preceding: dict[str, Any], finding: FindingRecord | None = None
) -> str:
    folder.mkdir()
    kernel = folder / "kernel.py"
    kernel.write_text(STATEFUL_KERNEL.format(condition=condition))
    target = f"{kernel}:stateful_kernel"
    cases = tuple(case_from_builtins("dense_decode", fields) for fields in preceding)
    saved = msgspec.structs.replace(regression("dense_decode", target, DENSE), preceding=cases)
    if finding is not None:
        saved = msgspec.structs.replace(saved, finding=finding)
    return repro_script(saved, declaration_of(target))


@pytest.mark.night
def test_preceding_cases_run_first(tmp_path: Path, python: Pythons) -> None:
    """The script would pass, and its reader take the report for a mistake."""
    after_wide = "fails = seen and inputs.q.shape[2] == 16; seen.extend([1] * (inputs.q.shape[2] == 32))"
    wide = {**DENSE, "head_size": 32}
    scripts = [
        stateful_script(tmp_path / "needed", after_wide, DENSE, wide),
        stateful_script(tmp_path / "other", after_wide, DENSE),
    ]
    assert "# case 2 of 2 that run before" in scripts[0]
    assert [python(script)[0] for script in scripts] == [1, 0]


@pytest.mark.night
def test_a_flaky_case_runs_several_times(tmp_path: Path, python: Pythons) -> None:
    """One run of a kernel that fails now and then shows nothing."""
    now_and_then = "import sys; sys.calls = getattr(sys, 'calls', 0) + 1; fails = sys.calls == 6"
    flaky = FindingRecord(oracle="accuracy", message="out is wrong", failed=5, runs=20)
    assert python(stateful_script(tmp_path / "flaky", now_and_then, finding=flaky))[0] == 1


def test_a_kernel_that_crashes_leaves_no_files_behind(tmp_path: Path, python: Pythons) -> None:
    """Every run of the script of a crash, which ends it before it can clear up, would leave a folder behind."""
    crash = "import os; print(__file__, flush=True); os.kill(os.getpid(), 9)"
    status, said = python(stateful_script(tmp_path / "crashing", crash))
    assert status == -signal.SIGKILL
    assert said.splitlines()[-1].startswith(str(python.folder / "repro-"))


@pytest.mark.night
def test_a_leak_shows_in_a_script(tmp_path: Path, python: Pythons) -> None:
    """Whoever gets the script would see right results, and a server of theirs die."""
    leak = FindingRecord(oracle="crash", kind="leak", message="every call keeps another 8.0 MiB of memory")
    scripts = [
        stateful_script(tmp_path / "leaks", "seen.append(bytearray(8 << 20)); fails = 0", finding=leak),
        stateful_script(tmp_path / "mended", "seen[:] = [bytearray(8 << 20)]; fails = 0", finding=leak),
    ]
    (leaks, said), (mended, _) = map(python, scripts)
    assert "every call keeps another 8.0" in said
    assert (leaks, mended) == (1, 0)


def test_the_size_of_all_cases_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence of cases that are small by themselves would make a script of hundreds of megabytes."""
    saved = regression("dense_decode", "dense_eager", DENSE)
    monkeypatch.setattr(repro, "MAX_TENSOR_BYTES", 2 * tensor_nbytes(saved.case))
    assert repro_script(saved, declaration_of("dense_eager"))
    with pytest.raises(CaseTooLarge, match=r"the 9 cases have \d+ bytes"):
        repro_script(msgspec.structs.replace(saved, preceding=(saved.case,) * 8), declaration_of("dense_eager"))


OWN = """
import attnfuzz
import torch

class Scatter(attnfuzz.Problem):
    count = attnfuzz.Integer(1, 8)
    scale = attnfuzz.Choice((1.0, 0.5))
    seed = attnfuzz.Seed()

    def tensors(self, case):
        return {
            "rows": attnfuzz.TensorSpec((case.count, 4), "float16", strides="padded_rows"),
            "cache": attnfuzz.TensorSpec((case.count + 1, 4), "float16", "in_place"),
            "total": attnfuzz.TensorSpec((4,), "float32", "output"),
        }

    def write(self, case, tensors):
        tensors["rows"].copy_(attnfuzz.numbers((case.count, 4), seed=case.seed, name="rows"))

    def reference(self, case, tensors):
        value, where = torch.zeros(case.count + 1, 4), torch.zeros(case.count + 1, 4, dtype=torch.bool)
        value[1:], where[1:] = tensors["rows"] * case.scale, True
        return {"cache": attnfuzz.Expected(value, where), "total": tensors["rows"].double().sum(0)}

@attnfuzz.kernel(Scatter())
def scatter(inputs):
    inputs.cache[1:] = inputs.rows * inputs.scale
    {change}
    return inputs.rows.float().sum(0)
"""


def own_script(folder: Path, change: str) -> str:
    folder.mkdir()
    file = folder / "own.py"
    file.write_text(OWN.replace("{change}", change))
    (kernel,) = load_kernels(f"{file}:scatter")
    problem = kernel.declaration.problem
    case = case_from_builtins(problem, {"count": 2, "scale": 0.5, "seed": 3})
    assert isinstance(case, OpenCase)
    saved = Regression(
        problem=problem,
        kernel=f"{file}:scatter",
        case=case,
        finding=FindingRecord(oracle="accuracy", message="cache is wrong"),
    )
    return repro_script(
        saved, kernel.declaration, follow=lambda _, launches: open_script_part(kernel, case, device="cpu")
    )


def test_a_problem_of_a_users_own_is_compared_with_what_it_says(tmp_path: Path, python: Pythons) -> None:
    """Whoever has a problem of their own would have nothing to paste, or a script that calls a right kernel wrong."""
    changes = ("", "inputs.cache[2, 1] += 1", "inputs.cache[0] = 0", "return inputs.rows.float().sum(0) + 1")
    words = ("PASS\n", "cache[2, 1] is ", "cache[0, 0] is 0, expected nan", "total[0] is ")
    for i, (change, says) in enumerate(zip(changes, words, strict=True)):
        status, said = python(own_script(tmp_path / str(i), change))
        assert (status, says in said) == (bool(change), True), said


def test_a_problem_that_nobody_can_ask_is_refused(tmp_path: Path) -> None:
    """The driver, which imports no kernel, would write a script without tensors."""
    file = tmp_path / "own.py"
    file.write_text(OWN.replace("{change}", ""))
    (kernel,) = load_kernels(f"{file}:scatter")
    case = case_from_builtins(kernel.declaration.problem, {"count": 1, "scale": 1.0, "seed": 0})
    finding = FindingRecord(oracle="accuracy", message="wrong")
    saved = Regression(problem=kernel.declaration.problem, kernel=f"{file}:scatter", case=case, finding=finding)
    with pytest.raises(KernelLoadError, match=r"Scatter could not be asked what its case holds: use attnfuzz replay"):
        repro_script(saved, kernel.declaration, follow=lambda case, launches: None)


HALVING = """
import torch

def halve(rows, cache):
    cache[1:] = rows * {factor}
    return rows.float().sum(0)
"""


@pytest.mark.night
def test_of_a_users_problem_an_engines_own_function_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Pythons
) -> None:
    """The adapter would stand in the script without what it needs, and raise there."""
    engine_file, file = tmp_path / "halving_engine.py", tmp_path / "own.py"
    engine_file.write_text(HALVING.format(factor=0.25))
    file.write_text(OWN.replace("{change}", ""))
    monkeypatch.syspath_prepend(tmp_path)
    (own,) = load_kernels(f"{file}:scatter")
    problem = own.declaration.problem
    case = case_from_builtins(problem, {"count": 2, "scale": 0.5, "seed": 3})
    assert isinstance(case, OpenCase)

    def adapter(i: Any, *, halve: Any) -> Any:
        return lambda: halve(i.rows, i.cache)

    made: Any = attnfuzz.Engine("torch", tried=("1",)).kernel(
        implementation_of(case.problem), supports=attnfuzz.Supports(), needs={"halve": ("halving_engine:halve",)}
    )(adapter)
    finding = FindingRecord(oracle="accuracy", message="cache is wrong")
    saved = Regression(problem=problem, kernel="other:adapter", case=case, finding=finding)
    part = open_script_part(made, case, device="cpu")
    script = repro_script(saved, made.declaration, follow=lambda _, launches: part)
    assert "from halving_engine import halve\n" in script
    assert len(script.splitlines()) <= 40
    engines = [HALVING.format(factor=factor) for factor in (0.25, 0.5)]
    assert python.with_engines(script, "halving_engine", engines) == [1, 0]


TRITON_ENGINE = """
import triton
import triton.language as tl

@triton.jit
def attend(Q, K, V, O, D: tl.constexpr):
    d = tl.arange(0, D)
    score = tl.sum(tl.load(Q + d).to(tl.float32) * tl.load(K + d).to(tl.float32))
    tl.store(O + d, ({factor} * tl.load(V + d).to(tl.float32) * (score / score)).to(O.dtype.element_ty))

def decode(query, cache, values, out, *workspaces):
    attend[(1,)](query, cache, values, out, query.shape[-1])
"""


@pytest.mark.parametrize("workspaces", [1, 12])
@pytest.mark.by_day("12")
def test_with_narrow_formats_a_script_takes_the_repairs_of_the_interpreter_from_attnfuzz(
    workspaces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Pythons
) -> None:
    """A thousand lines of repairs would be pasted by nobody; without repairs a right kernel would be called wrong."""
    engine_file = tmp_path / "triton_engine_of_a_test.py"
    engine_file.write_text(TRITON_ENGINE.format(factor="1.25"))
    monkeypatch.syspath_prepend(tmp_path)
    supports = attnfuzz.Supports(lse="none", dtypes=("bfloat16",))

    def adapter(i: Any, *, decode: Any) -> Any:
        return lambda: decode(i.q, i.k, i.v, i.out, *(i.q.new_empty(n) for n in range(1, workspaces + 1)))

    needs = {"decode": ("triton_engine_of_a_test:decode",)}
    kernel = attnfuzz.Engine("torch", tried=("1",)).kernel("dense_decode", supports=supports, needs=needs)(adapter)
    assert isinstance(kernel, Kernel)
    case = {**HEADS, "num_q_heads": 1, "seq_lens": [1], "dtype": "bfloat16", "values": {"values": "normal"}}
    saved = regression("dense_decode", "other:adapter", case)
    script = repro_script(saved, kernel.declaration, follow=functools.partial(_followed, kernel))
    assert len(script.splitlines()) <= 40
    assert script.count("attnfuzz") == 2  # why, and the import
    # 0.9999 x V is V, unless what is beyond is cut off
    engines = [TRITON_ENGINE.format(factor=factor) for factor in ("1.25", "1.0", "0.9999")]
    assert python.with_engines(script, "triton_engine_of_a_test", engines) == [1, 0, 0]
