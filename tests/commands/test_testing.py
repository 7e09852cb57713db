"""attnfuzz.check and attnfuzz.fuzz in a test, and how kernels are loaded."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example

import attnfuzz
from attnfuzz.corpus import load_regression
from attnfuzz.declaration import Kernel, KernelLoadError, load_kernels
from attnfuzz.problems.cases import Case, DenseDecodeCase
from attnfuzz.problems.limits import CaseTooLarge
from attnfuzz.testing.loading import declaration_of, load_here, shared_runner, target_of
from tests.common import limited_kernels
from tests.scripts import run_script

FIELDS: dict[str, Any] = {
    "num_q_heads": 1,
    "num_kv_heads": 1,
    "head_size": 16,
    "dtype": "float32",
    "seq_lens": [3],
    "scale": 0.25,
}
DECLARED: dict[str, Any] = {
    "problem": "dense_decode",
    "supports": attnfuzz.Supports(dtypes=("float32",), head_sizes=(16, 32), strides="contiguous"),
    "options": {"extra": (1, 2)},
}


def attend(inputs: Any, skipped: Callable[[int], int] = lambda length: 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention over all but the last ``skipped(length)`` tokens."""
    out, lse = torch.zeros_like(inputs.q), torch.full(inputs.q.shape[:2], -torch.inf)
    ratio = inputs.q.shape[1] // inputs.k.shape[2]
    for i, length in enumerate(inputs.seq_lens.tolist()):
        k, v = (x[i, : length - skipped(length)].repeat_interleave(ratio, 1) for x in (inputs.k, inputs.v))
        scores = (inputs.q[i] * k).sum(-1) * inputs.scale
        if len(scores):
            out[i], lse[i] = (scores.softmax(0)[..., None] * v).sum(0), scores.logsumexp(0)
    return out, lse


@attnfuzz.kernel(**DECLARED)
def correct(inputs: Any, *, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(inputs)


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(dtypes=("float32",), head_sizes=(64,)))
def of_larger_heads(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(inputs)


@attnfuzz.kernel(**DECLARED)
def drops_a_token(inputs: Any, *, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(inputs, lambda length: int(length > 8))


@attnfuzz.kernel(**DECLARED, name="another_name")
def exits(inputs: Any, *, extra: int) -> None:
    os._exit(3)


@attnfuzz.kernel(**DECLARED)
def two_bugs(inputs: Any, *, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
    if extra == 1:
        raise RuntimeError("extra")
    return attend(inputs, lambda length: int(length > 8))


def kernel_of_a_function() -> Kernel:
    @attnfuzz.kernel(**DECLARED)
    def inner(inputs: Any, *, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(inputs, lambda length: int(length == 3))

    return inner


def failure(kernel: Kernel | str, **fields: Any) -> attnfuzz.KernelFailure:
    with pytest.raises(attnfuzz.KernelFailure) as caught:
        attnfuzz.check(kernel, {**FIELDS, **fields})
    return caught.value


def test_check_passes_a_correct_kernel() -> None:
    """A correct kernel would fail, or options that a case leaves out not take their first choice."""
    attnfuzz.check(correct, FIELDS)
    attnfuzz.check(correct, DenseDecodeCase(**{**FIELDS, "seq_lens": (3, 0)}))
    attnfuzz.check(f"{__file__}:correct", FIELDS)
    attnfuzz.check("dense_eager", FIELDS)


def test_check_raises_what_the_oracle_says() -> None:
    """A wrong result would pass, or the engineer not be told what and where."""
    caught = failure(drops_a_token, seq_lens=[9])
    assert caught.failure.oracle == "accuracy"
    assert isinstance(caught, AssertionError)
    for words in ("drops_a_token", "out[seq 0", "token 8 of sequence 0", '"seq_lens":[9]'):
        assert words in str(caught)


def test_failure_replays_as_it_says(tmp_path: Path) -> None:
    """The command under a failure would not show it again."""
    command = str(failure(drops_a_token, seq_lens=[9])).splitlines()[-1].strip()
    assert command.startswith("python -c ")
    shell = command.replace("python", sys.executable, 1)
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "token 8 of sequence 0" in done.stderr


def test_crash_is_a_failure() -> None:
    """A kernel that ends its process would end the test run."""
    caught = failure(exits)
    assert (caught.failure.oracle, caught.failure.kind) == ("crash", "exit 3")
    attnfuzz.check(correct, FIELDS)


def test_nothing_is_written_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every red test would leave a file behind, or the file asked for be missing."""
    shared_runner()  # started before the working directory changes
    monkeypatch.chdir(tmp_path)
    fields = {**FIELDS, "seq_lens": [9]}
    failure(drops_a_token, **fields)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(attnfuzz.KernelFailure, match=r"attnfuzz replay saved/dense_decode-drops_a_token-accuracy-"):
        attnfuzz.check(drops_a_token, fields, save_dir="saved")
    (saved,) = (tmp_path / "saved").iterdir()
    assert load_regression(saved).status == "open"
    with pytest.raises(attnfuzz.KernelFailure):
        attnfuzz.check(drops_a_token, saved)
    with pytest.raises(ValueError, match="delete the file, if the kernel is not meant for it, or change the decl"):
        attnfuzz.check(of_larger_heads, saved)  # as once its author has declared what it takes
    attnfuzz.check(correct, str(saved))


def test_kernel_made_in_a_function_needs_this_process() -> None:
    """A kernel that no other process can load would fail obscurely, or not be checkable at all."""
    inner = kernel_of_a_function()
    with pytest.raises(ValueError, match=r"'inner' is not at the top level of a file.*pass isolated=False"):
        attnfuzz.check(inner, FIELDS)
    with pytest.raises(ValueError, match="isolated=False"):
        attnfuzz.fuzz(inner)
    with pytest.raises(attnfuzz.KernelFailure, match="token 2 of sequence 0"):
        attnfuzz.check(inner, FIELDS, isolated=False)


@pytest.mark.parametrize(
    ("kernel", "case", "error", "words"),
    [
        ("dense_eager", {**FIELDS, "seq_lens": [-1]}, ValueError, r"seq_lens\[0\]=-1 must be between 0"),
        ("dense_eager", {**FIELDS, "heads": 1}, ValueError, "`heads`; a case of dense_decode has num_q_heads, "),
        ("dense_eager", {**FIELDS, "seq_lens": [1 << 24], "head_size": 1024}, CaseTooLarge, "but the limit is"),
        (correct, {**FIELDS, "dtype": "float16"}, ValueError, "dtype='float16', but the kernel declares"),
        ("paged_eager", DenseDecodeCase(**{**FIELDS, "seq_lens": (3,)}), ValueError, "computes paged_decode"),
        ("dense_*", FIELDS, ValueError, r"names 2 kernels \('dense_naive', 'dense_eager'\); name one of them"),
        ("dense_eagre", FIELDS, KernelLoadError, "did you mean 'dense_eager'"),
        (attend, FIELDS, ValueError, "must be decorated with @attnfuzz.kernel"),
        ("dense_eager", "no-such-file.json", ValueError, "does not exist"),
    ],
)
def test_wrong_use_is_told(kernel: Any, case: Any, error: type[Exception], words: str) -> None:
    """A mistake of the caller would pass silently, or show as a failure of the kernel."""
    with pytest.raises(error, match=words):
        attnfuzz.check(kernel, case)


def test_fuzz_passes_a_correct_kernel() -> None:
    """A correct kernel would fail, or the body of the test not run."""
    seen: list[Case] = []

    @attnfuzz.fuzz(correct, max_examples=10)
    def body(case: Case) -> None:
        seen.append(case)

    body()
    assert len(seen) == 10
    assert {case.dtype for case in seen} == {"float32"}


def test_fuzz_finds_shrinks_and_saves_the_smallest_case(tmp_path: Path) -> None:
    """A bug would be missed, shown in a case full of what does not matter, or saved with every case on the way."""

    @attnfuzz.fuzz(drops_a_token, save_dir=tmp_path)
    def body() -> None: ...

    with pytest.raises(attnfuzz.KernelFailure) as caught:
        body()
    case = caught.value.case
    assert isinstance(case, DenseDecodeCase)
    assert (case.seq_lens, case.num_q_heads, case.head_size) == ((9,), 1, 16)
    (saved,) = tmp_path.iterdir()
    assert load_regression(saved).case == case


def test_fuzz_keeps_bugs_apart() -> None:
    """Shrinking would slip from one bug to another, and hide the first."""

    @example(case=DenseDecodeCase(**{**FIELDS, "seq_lens": (12, 3), "options": {"extra": 2}}))
    @attnfuzz.fuzz(two_bugs)
    def body() -> None: ...

    with pytest.raises(attnfuzz.KernelFailure) as caught:
        body()
    assert caught.value.failure.oracle == "accuracy"
    assert caught.value.case == DenseDecodeCase(**{**FIELDS, "seq_lens": (9,), "options": {"extra": 2}})


def test_fuzz_shrinks_a_failing_body() -> None:
    """What a test asserts itself would be shown on a large case."""

    @attnfuzz.fuzz(correct)
    def body(case: DenseDecodeCase) -> None:
        assert case.num_seqs < 2

    with pytest.raises(AssertionError) as caught:
        body()
    assert "(0, 0)" in str(caught.value) or "2 < 2" in str(caught.value)


def test_fuzz_accepts_no_other_argument() -> None:
    """A fixture in the signature would be taken for something that Hypothesis draws."""
    with pytest.raises(TypeError, match="'body' takes tmp_path"):

        @attnfuzz.fuzz(correct)
        def body(tmp_path: Path) -> None: ...


@attnfuzz.fuzz(correct, max_examples=5)
def test_fuzz_is_collected_as_a_test() -> None:
    """pytest would look for a fixture named case."""


class TestMethods:
    """Test functions in a class."""

    @attnfuzz.fuzz("dense_eager", max_examples=5)
    def test_method_gets_its_instance_and_the_case(self, case: Case) -> None:
        """A method would be called without self, or a kernel not be found by its name."""
        assert isinstance(self, TestMethods)
        assert case.problem == "dense_decode"


def test_check_asks_every_relation() -> None:
    """A case would pass as long as it happens to draw another relation than the one that objects."""

    @attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(dtypes=("float32",), empty_sequences=False))
    def adds_an_epsilon(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attend(inputs)
        return out + 1e-7, lse

    for length in (3, 4, 5):
        case = {**FIELDS, "seq_lens": [length], "values": {"values": "normal"}}
        with pytest.raises(attnfuzz.KernelFailure) as raised:
            attnfuzz.check(adds_an_epsilon, case, isolated=False)
        assert raised.value.failure.oracle == "value_affinity"


@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="this run compiles kernels for a GPU")
def test_what_triton_cannot_interpret_is_skipped() -> None:
    """A test of a kernel that never ran would pass, or one where a single case cannot run would not be made."""
    case = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 16, "seq_lens": [3], "scale": 0.25, "dtype": "float32"}
    with pytest.raises(unittest.SkipTest, match="inline_asm not supported in interpreter mode; use a GPU"):
        attnfuzz.check(f"{limited_kernels.__file__}:with_assembly", case, device="cpu")
    judged: list[Case] = []

    @attnfuzz.fuzz(f"{limited_kernels.__file__}:sometimes_with_assembly", max_examples=10, device="cpu")
    def on_some(case: Case) -> None:
        judged.append(case)

    on_some()
    assert judged


BLOCKS_AND = """
import torch
import triton
import triton.language as tl

import attnfuzz
from tests.commands.test_testing import FIELDS, attend


@triton.jit
def copy_kernel(p_in, p_out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(p_out + o, tl.where((o < 0) and (o >= 0), 0.0, tl.load(p_in + o)))


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(dtypes=("float32",), strides="contiguous"))
def copies(inputs):
    out, lse = attend(inputs)
    copied = torch.empty_like(out)
    copy_kernel[(1,)](out, copied, SIZE=out.numel())
    return copied, lse


if __name__ == "__main__":
    attnfuzz.check(copies, FIELDS, device="cpu", isolated=False)
"""


@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="this run compiles kernels for a GPU")
def test_a_kernel_checked_in_this_process_is_interpreted_as_in_executors(tmp_path: Path) -> None:
    """Where Triton's interpreter takes `a and b` of blocks for b, a correct kernel would be called wrong."""
    file = tmp_path / "copies.py"
    file.write_text(BLOCKS_AND, encoding="utf-8")
    done = run_script("import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", file)
    assert done.returncode == 0, done.stderr


FILE = """
import attnfuzz
{imports}

@attnfuzz.kernel("dense_decode", name="declared_name")
def original(inputs): ...

alias = original
"""


def imported_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch, *, imports: str) -> Kernel:
    """The kernel of a module in a package, imported as a test would."""
    package = folder / f"package_of_{folder.name}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "shared.py").touch()
    (package / "decode.py").write_text(FILE.format(imports=imports), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    kernel: Kernel = importlib.import_module(f"{package.name}.decode").original
    return kernel


def test_kernel_is_loaded_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose declared name is not its function's would not be found again."""
    kernel = imported_kernel(tmp_path, monkeypatch, imports="import math")
    target = target_of(kernel)
    assert target.endswith("decode.py:original")
    assert load_kernels(target)[0].declaration.name == "declared_name"


def test_relative_imports_need_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that imports its neighbours relative to its package cannot be loaded as a file."""
    kernel = imported_kernel(tmp_path, monkeypatch, imports="from . import shared")
    assert target_of(kernel) == f"package_of_{tmp_path.name}.decode:original"
    assert load_here(target_of(kernel)).declaration.name == "declared_name"


def test_bundled_kernel_goes_by_its_name() -> None:
    """A regression saved for a bundled kernel would hold a path of one machine."""
    from attnfuzz.kernels.bundled import dense_eager

    assert target_of(dense_eager) == "dense_eager"
    assert declaration_of(dense_eager, device="cpu", isolated=True).target == "dense_eager"


def test_a_missing_triton_is_told_with_its_remedy(tmp_path: Path) -> None:
    """A torch for the CPU brings none, and "No module named 'triton'" does not say which of its packages is meant."""
    file = tmp_path / "needs_triton.py"
    file.write_text("raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')", encoding="utf-8")
    with pytest.raises(KernelLoadError, match=r"No module named 'triton' .*; pip install 'attnfuzz\[interpreter\]'"):
        load_kernels(str(file))


def test_a_missing_module_is_told_with_its_remedy(tmp_path: Path) -> None:
    """A CI that has installed attnfuzz, and not the project, would say which import failed and not what is missing."""
    file = tmp_path / "needs_its_project.py"
    file.write_text("import a_project_that_is_not_installed", encoding="utf-8")
    with pytest.raises(KernelLoadError, match=r"'a_project_that_is_not_installed' .*pip install -e \. .*PYTHONPATH"):
        load_kernels(str(file))


@pytest.mark.parametrize("target", ["", ":"])
def test_a_name_of_nothing_is_no_name_of_every_kernel(target: str) -> None:
    """An empty variable of a CI script would have all bundled kernels searched, and the user's own never."""
    with pytest.raises(KernelLoadError, match="names no kernel"):
        load_kernels(target)


def test_a_kernel_in_a_folder_that_is_not_utf8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be told as an error of attnfuzz: nothing that is saved or sent could name the kernel."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    (folder / "mine.py").write_text("")
    monkeypatch.chdir(folder)
    with pytest.raises(
        KernelLoadError, match=r"^kernel file 'mine.py' lies in .*, which is not UTF-8; rename the folder"
    ):
        load_kernels("mine.py")
