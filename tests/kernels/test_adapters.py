"""Engines' kernels: found, declared, refused with a reason, and handed the tokens that they take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnfuzz
from attnfuzz.adapters import engines, module_of
from attnfuzz.adapters.tokens import whole_prompts
from attnfuzz.corpus import FindingRecord, Regression, write_regression
from attnfuzz.declaration import Absent, Kernel, KernelLoadError, load_kernels
from attnfuzz.environment import installed
from attnfuzz.problems.cases import DenseDecodeCase
from attnfuzz.report.sources import kernel_sources
from tests.common.in_process import attnfuzz as attnfuzz_in
from tests.sample_cases import attention_case

ENGINE = """
import torch

def decode(q, k, v, seq_lens, scale, out):
    for i, length in enumerate(seq_lens.tolist()):
        part = k[i, :length].repeat_interleave(q.shape[1] // k.shape[2], 1).float()
        weights = torch.einsum("hd,nhd->hn", q[i].float(), part).mul(scale * FACTOR).softmax(-1)
        values = v[i, :length].repeat_interleave(q.shape[1] // k.shape[2], 1).float()
        out[i] = torch.einsum("hn,nhd->hd", weights, values)
"""
ADAPTERS = """
import attnfuzz

ENGINE = attnfuzz.Engine("other-engine", tried=("1.2",))
DECODE = {"decode": ("other_engine.moved:decode", "other_engine:decode")}

@ENGINE.kernel("dense_decode", needs=DECODE, supports=attnfuzz.Supports(lse="none", dtypes=("float32",)))
def decode(i, *, decode):
    def call():
        decode(i.q, i.k, i.v, i.seq_lens, i.scale, i.out)
        return i.out

    return call

@ENGINE.kernel("dense_decode", needs={"paged": ("other_engine:paged",)}, supports=attnfuzz.Supports())
def paged(i, *, paged):
    return paged(i)
"""
POINTS = "[attnfuzz.kernels]\nother = other_adapters\n"


def install(folder: Path, *, factor: float) -> None:
    """An engine and, in another file, its adapters, as pip would install them."""
    (folder / "other_engine.py").write_text(f"FACTOR = {factor}\n{ENGINE}", encoding="utf-8")
    (folder / "other_adapters.py").write_text(ADAPTERS, encoding="utf-8")
    for name, version, points in (("other_engine", "1.3", ""), ("other_adapters", "0.1", POINTS)):
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(points, encoding="utf-8")


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(installed), str(Path(attnfuzz.__file__).parents[1]))),
    }
    return subprocess.run(
        [sys.executable, "-m", "attnfuzz", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.night
def test_an_adapter_that_is_installed_is_searched_replayed_and_reproduced(tmp_path: Path) -> None:
    """Whoever has an engine would have to change attnfuzz to bring its kernels in, and could not save what is found."""
    installed, here = tmp_path / "site", tmp_path / "here"
    installed.mkdir()
    install(installed, factor=1.01)
    found = run(installed, here, "explore", "other:*", "--device", "cpu", "--budget", "3s", "--save-dir", "saved")
    assert found.returncode == 1, found.stderr
    assert "other:decode  accuracy" in found.stdout
    saved, *_ = sorted((here / "saved").glob("*.json"))  # under load, shrinking may be cut off
    assert saved.name.startswith("dense_decode-other_decode-accuracy-")
    assert json.loads(saved.read_text())["environment"]["versions"]["other-engine"] == "1.3"
    assert run(installed, here, "replay", str(saved)).returncode == 1
    script = tmp_path / "repro.py"
    assert run(installed, here, "repro", str(saved), "-o", str(script)).returncode == 0
    assert "from other_engine import decode\n" in script.read_text()
    assert "attnfuzz" not in script.read_text()
    alone = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (alone.returncode, "FAIL" in alone.stdout) == (1, True), alone.stderr
    install(installed, factor=1.0)
    assert run(installed, here, "replay", str(saved)).returncode == 0
    listed = run(installed, here, "list", "other:*").stdout
    assert "other:decode" in listed
    why = "other-engine 1.3 has no other_engine:paged; this adapter was tried with other-engine 1.2"
    assert f"other:paged   dense_decode  {why}; it needs other_engine:paged" in listed
    absent = run(installed, here, "explore", "other:paged")
    assert absent.returncode == 2
    assert why in absent.stderr


@pytest.mark.parametrize(
    ("package", "place", "why"),
    [
        ("no-such-engine", "no_such_engine.ops:f", "no-such-engine is not installed"),
        ("torch", "torch.no_such_module:f", f"torch {__import__('torch').__version__} has no torch.no_such_module:f"),
        ("torch", "torch.nn:NoSuchThing.f", "has no torch.nn:NoSuchThing.f"),
        ("broken-engine", "broken_engine:f", "broken_engine does not import: RuntimeError: no driver"),
        ("broken-engine", "needy_engine:f", "needy_engine does not import: No module named 'what_it_needs'"),
    ],
)
def test_what_cannot_be_had_says_why(
    package: str, place: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has no engine, an older one, or one that does not import, would see a traceback, or a finding."""
    (tmp_path / "broken_engine.py").write_text("raise RuntimeError('no driver')", encoding="utf-8")
    (tmp_path / "needy_engine.py").write_text("import what_it_needs", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    engine = attnfuzz.Engine(package, tried=("1.0", "2.0"))

    def decode(inputs: Any, *, f: Any) -> Any: ...

    made = engine.kernel("dense_decode", supports=attnfuzz.Supports(), needs={"f": (place,)})(decode)
    assert isinstance(made, Absent)
    assert why in made.why
    assert made.why.endswith(f"this adapter was tried with {package} 1.0 and 2.0")


def test_what_a_kernel_supports_may_be_what_its_engine_states() -> None:
    """An adapter would have to be changed with each release that supports more, or accuse one that supports less."""

    def stated(softmax: Any) -> attnfuzz.Supports:
        return attnfuzz.Supports(head_sizes=(len(softmax.__name__),))

    engine = attnfuzz.Engine("torch", tried=("2.13.0",))
    made = engine.kernel("dense_decode", supports=stated, needs={"softmax": ("torch:softmax",)})(
        lambda i, *, softmax: i
    )
    assert isinstance(made, Kernel)
    assert made.declaration.supports.head_sizes == (len("softmax"),)


def test_what_has_been_found_out_of_a_version_is_not_asked_again() -> None:
    """Each search would spend its first seconds on what an adapter says; or believe it of a version that is new."""
    version = installed("torch")
    assert version is not None
    for settled, gpu_only, is_settled in (((version,), False, True), (("1.0",), False, False)):
        engine = attnfuzz.Engine("torch", tried=("1.0",), settled=settled)
        made = engine.kernel(
            "dense_decode", supports=attnfuzz.Supports(), needs={"softmax": ("torch:softmax",)}, gpu_only=gpu_only
        )(lambda i, *, softmax: i)
        assert isinstance(made, Kernel)
        assert made.declaration.is_settled == is_settled


@pytest.mark.parametrize("interpreted", ["0", "1"])
def test_a_kernel_for_other_gpus_runs_in_the_interpreter_alone(
    interpreted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launch options that only AMD's compilers know would be told as a bug of whoever searches on another GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    engine = attnfuzz.Engine("torch", tried=("1.0",))
    made = engine.kernel(
        "dense_decode", supports=attnfuzz.Supports(), needs={"softmax": ("torch:softmax",)}, amd_only=True
    )(lambda i, *, softmax: i)
    assert isinstance(made, Kernel if interpreted == "1" else Absent)


def test_an_engine_that_states_it_in_another_way_is_told_of() -> None:
    """With another release, all adapters of the engine would be lost to an AttributeError."""

    def stated(softmax: Any) -> attnfuzz.Supports:
        return attnfuzz.Supports(head_sizes=softmax.head_sizes)

    engine = attnfuzz.Engine("torch", tried=("1.0",))
    made = engine.kernel("dense_decode", supports=stated, needs={"softmax": ("torch:softmax",)})(
        lambda i, *, softmax: i
    )
    assert isinstance(made, Absent)
    assert "does not state what it supports as expected" in made.why
    assert made.why.endswith("has no attribute 'head_sizes'; this adapter was tried with torch 1.0")


def test_torch_is_an_engine_too() -> None:
    """The adapters that every installation can run would be broken, and nobody would know."""
    case: Any = DenseDecodeCase(num_q_heads=4, num_kv_heads=2, head_size=16, scale=0.25, seq_lens=(5, 17))
    attnfuzz.check("torch:sdpa", case)
    attnfuzz.check("torch:sdpa_math", case)
    (kernel,) = load_kernels("torch:sdpa")
    assert isinstance(kernel, Kernel)
    assert kernel.declaration.target == "torch:sdpa"
    with pytest.raises(KernelLoadError, match="did you mean 'sdpa'"):
        load_kernels("torch:sdpaa")


@pytest.mark.night
def test_a_script_is_made_of_an_adapter_wherever_attnfuzz_lies(tmp_path: Path) -> None:
    """What is found in an engine could not be filed with it, from any folder but that of a clone."""
    case: Any = DenseDecodeCase(num_q_heads=4, num_kv_heads=2, head_size=16, scale=0.25, seq_lens=(5, 17))
    record = FindingRecord(oracle="accuracy", message="made up")
    saved = write_regression(
        Regression(problem="dense_decode", kernel="torch:sdpa", case=case, finding=record), tmp_path
    )
    command = [str(Path(sys.executable).with_name("attnfuzz")), "repro", saved.name, "-o", "script.py"]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    made = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    script = [sys.executable, "-P", "script.py"]
    run = subprocess.run(script, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
    assert (run.returncode, "PASS" in run.stdout) == (0, True), run.stdout + run.stderr


def test_engines_that_come_with_attnfuzz_cannot_be_replaced() -> None:
    """A distribution that calls itself vllm would be run where a saved case names vLLM."""
    assert {"vllm", "sglang", "flashinfer", "torch"} <= engines().keys()
    assert engines()["vllm"] == "attnfuzz.adapters.vllm"
    assert module_of("my.package") == "my.package"


def test_list_names_what_cannot_be_had_here_and_what_it_needs(tmp_path: Path) -> None:
    """Who has no GPU at hand would not learn which kernels of an engine there are, nor what to install for them."""
    shown = attnfuzz_in("list", "flashinfer:*", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    lines = {line.split()[0]: line for line in shown.stdout.splitlines()}
    assert "flashinfer:merge_states" in lines
    why = "paged_decode      flashinfer-python runs it on a GPU only; it needs flashinfer:BatchDecode"
    assert why in lines["flashinfer:batch_decode"]
    one = attnfuzz_in("list", "-v", "flashinfer:batch_prefill", "paged_naive", cwd=tmp_path)
    assert "flashinfer:batch_prefill  paged_attention  flashinfer-python" in one.stdout
    assert "supports.dtypes" in one.stdout
    assert attnfuzz_in("list", "flashinfer:no_such_kernel", cwd=tmp_path).returncode == 2


PLAIN = attnfuzz.Supports(lse="none", padding_tokens=False, freed_pages=False, layouts=("NHD",))


@attnfuzz.kernel("paged_attention", supports=PLAIN)
def prompts(i: Any) -> Tensor:
    """Causal attention of each sequence to itself, whole, as kernels without a cache do it."""
    q, k, v, starts, own = whole_prompts(i)
    out = torch.empty_like(q)
    for first, end in zip(starts.tolist(), starts[1:].tolist(), strict=False):
        keys, values = (x[first:end].float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:end].float(), keys) * i.scale
        hidden = torch.ones(end - first, end - first, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    result: Tensor = out[own]
    return result


@pytest.mark.parametrize("query_lens", [(5, 0, 9), (2, 0, 1), (5, 3, 9)], ids=["mixed", "chunks", "whole"])
def test_query_tokens_are_found_in_whole_prompts(query_lens: tuple[int, ...]) -> None:
    """A kernel without a cache would be given another token's query, and called wrong."""
    case = attention_case(num_q_heads=4, num_kv_heads=2, seq_lens=(5, 3, 9), query_lens=query_lens)
    attnfuzz.check(prompts, case, device="cpu", isolated=False)


def test_a_script_of_an_adapter_has_the_functions_that_adapters_share() -> None:
    """A script of a kernel whose calls cannot be followed would not import."""
    files = kernel_sources("sglang:prefill_attention").files
    assert "def whole_prompts" in files["attnfuzz/adapters/tokens.py"]
    assert "attnfuzz/adapters/engine.py" not in files
