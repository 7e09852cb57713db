"""Mutants are made of the code that a kernel reaches, each once, and are told apart and recognised again."""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.mutation.equivalents import load_equivalents
from attnfuzz.mutation.mutants import Mutant, Reach, mutants_of
from tests.unit.mutable_kernels import write_project

BUNDLED = ("dense_naive", "paged_naive", "paged_split_k", "merge_states_triton", "merge_states_triton_th")


def declared(target: str) -> Declaration:
    return Declaration(name=target.rpartition(":")[2], problem="paged_decode", target=target)


@pytest.fixture(scope="module")
def bundled() -> list[Mutant]:
    return mutants_of(map(declared, BUNDLED))


def test_code_is_followed_through_imports(tmp_path: Path) -> None:
    """A kernel that calls another file's function would keep half of its code unchanged."""
    kernel = write_project(tmp_path)
    found = {(one.source.path.name, one.name) for one in Reach().functions(declared(f"{kernel}:mine"))}
    assert found == {("declaring.py", "mine"), ("combining.py", "combine")}
    names = {one.name for one in Reach().functions(declared("paged_split_k"))}
    assert names >= {"paged_split_k", "split_decode_kernel", "attend_pages", "reduce_splits_kernel", "cache_strides"}
    assert not {"dense_decode_kernel", "paged_decode_kernel", "merge_states_kernel"} & names


@pytest.mark.parametrize(
    ("form", "call"),
    [("from .sub.code import f", "f"), ("from package.sub.code import f", "f"), ("from . import sub", "sub.f")],
)
def test_code_is_followed_inside_a_package(tmp_path: Path, form: str, call: str) -> None:
    """A kernel of an installed package could not be mutated."""
    folder = tmp_path / "package" / "sub"
    folder.mkdir(parents=True)
    (folder / "code.py").write_text("def f():\n    return 1\n")
    (folder / "__init__.py").write_text("from package.sub.code import f\n")
    entry = folder.parent / "entry.py"
    entry.write_text(f"{form}\n\ndef kernel(inputs):\n    return {call}()\n")
    assert [one.name for one in Reach().functions(declared(f"{entry}:kernel"))] == ["kernel", "f"]


def test_every_mutant_is_another_program(bundled: Sequence[Mutant]) -> None:
    """A mutant would be counted twice, or be the kernel itself, or not be Python."""
    assert len(bundled) > 400
    assert len({mutant.id for mutant in bundled}) == len(bundled)
    for mutant in bundled[::7]:
        assert ast.dump(ast.parse(mutant.data)) != ast.dump(ast.parse(mutant.path.read_bytes()))
        assert mutant.before != mutant.after


def test_shared_code_is_mutated_once_for_all_kernels(bundled: Sequence[Mutant]) -> None:
    """Mutants of common code would count as often as kernels use it, or be hunted on one of them only."""
    kernels = {mutant.function: {kernel.name for kernel in mutant.kernels} for mutant in bundled}
    assert kernels["attend_pages"] == {"paged_naive", "paged_split_k"}
    assert kernels["store_state"] == set(BUNDLED)
    assert kernels["merge_states_kernel"] == {"merge_states_triton", "merge_states_triton_th"}


def test_the_same_names_every_time(bundled: Sequence[Mutant]) -> None:
    """A mutant could not be found again in another run, or after a line was added above it."""
    assert [mutant.id for mutant in mutants_of(map(declared, BUNDLED))] == [mutant.id for mutant in bundled]
    store = next(mutant for mutant in bundled if mutant.operator == "store")
    assert store.id.startswith("softmax_state.store_state.store.")
    assert store.diff[0].startswith("@@ ")
    assert [line[0] for line in store.diff[1:]] == ["-", "+"]


def test_gluon_is_changed_where_it_runs() -> None:
    """159 mutants would survive each run on a CPU, whose interpreter runs no Gluon."""
    on_gpu = mutants_of([declared("latent_grouped_auto")], device="cuda")
    on_cpu = mutants_of([declared("latent_grouped_auto")])
    assert {"latent_hopper_kernel", "latent_warps_kernel", "latent_decode_kernel"} <= {
        mutant.function for mutant in on_gpu
    }
    assert "latent_decode_kernel" in {mutant.function for mutant in on_cpu}
    assert not [mutant for mutant in on_cpu if mutant.path.name in ("latent_hopper.py", "latent_warps.py")]


def test_source_that_cannot_be_read(tmp_path: Path) -> None:
    """A file that is not Python would end in a traceback."""
    (tmp_path / "broken.py").write_text("def mine(:\n")
    with pytest.raises(KernelLoadError, match=r"broken\.py cannot be read .* repair the file"):
        Reach().functions(declared(f"{tmp_path / 'broken.py'}:mine"))


def listed(mutant: Mutant, *, becomes: str | None = None, reason: str = "Nothing that is stored depends on it.") -> str:
    line, after = "\n".join(mutant.before), "\n".join(mutant.after) if becomes is None else becomes
    return (
        f"[[equivalent]]\nfile = '{mutant.path.name}'\nfunction = '{mutant.function}'\n"
        f"operator = '{mutant.operator}'\nline = '''{line}'''\nbecomes = '''{after}'''\nreason = '{reason}'\n"
    )


def test_equivalents_are_matched_exactly(tmp_path: Path) -> None:
    """An argument would excuse another mutant than the one that it is about, or outlive the code."""
    mutants = mutants_of([declared(f"{write_project(tmp_path)}:mine")])
    first, second = [mutant for mutant in mutants if mutant.operator == "store"]
    path = tmp_path / "equivalent_mutants.toml"
    path.write_text(listed(first) + listed(second, becomes="return"))
    equivalents = load_equivalents(mutants)
    assert [mutant.id for mutant in mutants if equivalents.reason(mutant)] == [first.id]
    assert [entry.becomes for entry in equivalents.stale(mutants)] == ["return"]


def test_a_list_that_is_a_named_pipe(tmp_path: Path) -> None:
    """It would be waited for until somebody wrote to it; beside the source it is none."""
    mutants = mutants_of([declared(f"{write_project(tmp_path)}:mine")])
    os.mkfifo(tmp_path / "equivalent_mutants.toml")
    assert not load_equivalents(mutants).entries
    with pytest.raises(KernelLoadError, match="it is a named pipe, no file; repair it"):
        load_equivalents(mutants, tmp_path / "equivalent_mutants.toml")


@pytest.mark.parametrize("text", ["[[equivalent]]\nfile = 'x'\n", "[[equivalent]\n", None])
def test_a_list_that_is_not_valid(tmp_path: Path, text: str | None) -> None:
    """A survivor would be excused by an entry that says nothing, or a broken list end in a traceback."""
    mutants = mutants_of([declared(f"{write_project(tmp_path)}:mine")])
    (tmp_path / "list.toml").write_text(listed(mutants[0], reason="equivalent") if text is None else text)
    with pytest.raises(KernelLoadError, match=r"repair it|is no argument; write why"):
        load_equivalents(mutants, tmp_path / "list.toml")
