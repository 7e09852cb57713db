"""Mutants of a kernel, and the operators that make them."""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from attnfuzz.declaration import Declaration, KernelLoadError
from attnfuzz.mutation.equivalents import load_equivalents
from attnfuzz.mutation.mutants import Mutant, Reach, mutants_of
from attnfuzz.mutation.operators import OPERATOR_NAMES, changes
from attnfuzz.mutation.source import Function, Source
from tests.campaign.mutable_kernels import write_project

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


KERNEL = '''
import triton
import triton.language as tl


@triton.jit
def kernel(p_q, p_k, p_table, p_out, scale, group, n, stride_ks, stride_kt, stride_vt, stride_o, TILE: tl.constexpr):
    """Says ``a & b``, which is no code."""
    {body}  # a comment with Σ in it
'''
LAUNCH = """
def launch(q, k, v, out, layout):
    token, head = (2, 1) if layout == "HND" else (1, 2)
    kernel[(q.shape[0], out.shape[1])](q, k, 1.0, *q.stride(), *k.stride(), out.stride(0))
    return Strides((k_strides[0], k_strides[token]), (v_strides[0], 0))
"""


def lines_of(tmp_path: Path, text: str, operator: str) -> list[str]:
    """The lines that a mutant has and the source has not, of each mutant of an operator."""
    path = tmp_path / "file.py"
    path.write_text(text)
    source = Source(path)
    (function,) = [Function(source, node) for node in source.tree.body if isinstance(node, ast.FunctionDef)]
    mutated = [change.applied_to(source.data).decode() for name, change in changes(function) if name == operator]
    for one in mutated:
        ast.parse(one)
    before = text.splitlines()
    return [line.partition("#")[0].strip() for one in mutated for line in one.splitlines() if line not in before]


@pytest.mark.parametrize(
    ("operator", "body", "expected"),
    [
        ("mask_term", "m = (i < n) & (j < 2)[:, None]", ["m = i < n", "m = (j < 2)[:, None]"]),
        ("mask_term", "m = ~a & (b < 2)[:, None]", ["m = ~a", "m = (b < 2)[:, None]"]),
        ("mask_term", "m = c * (a & (b < 2))", ["m = c * (a)", "m = c * ((b < 2))"]),
        ("mask_dropped", "x = tl.load(p_q, mask=m, other=0.0)", ["x = tl.load(p_q)"]),
        ("mask_dropped", "x = tl.load(p_q, m, 0.0, eviction_policy='')", ["x = tl.load(p_q, eviction_policy='')"]),
        ("mask_dropped", "tl.store(p_out, x, m)", ["tl.store(p_out, x)"]),
        ("comparison", "m = i < n", ["m = i <= n"]),
        ("comparison", "m = (i >= n) | (i == 0)", ["m = (i > n) | (i == 0)", "m = (i >= n) | (i != 0)"]),
        ("bound", "m = i < n", ["m = i < (n - 1)"]),
        ("other", "x = tl.load(p_q, mask=m, other=0.0)", ['x = tl.load(p_q, mask=m, other=float("nan"))']),
        ("other", 'x = tl.load(p_q, mask=m, other=-float("inf"))', ["x = tl.load(p_q, mask=m, other=0.0)"]),
        ("other", "x = tl.load(p_q, mask=m, other=0)", ["x = tl.load(p_q, mask=m, other=1)"]),
        ("masked_value", 's = tl.where(m, s, float("-inf"))', ["s = tl.where(m, s, 0.0)", "s = tl.where(m, s, -5e4)"]),
        ("swap_strides", "p = i * stride_ks + j * stride_kt", ["p = i * stride_kt + j * stride_ks"]),
        ("other_stride", "p = i * stride_ks + j * stride_kt", ["p = i * stride_ks + j * stride_vt"]),
        ("div_mod", "i = h // group", ["i = h % group"]),
        ("div_mod", "i = (h % group).to(tl.int64)", ["i = (h // group).to(tl.int64)"]),
        ("rounding", "i = (h // group) * 2", ["i = (tl.cdiv(h, group)) * 2"]),
        ("rounding", "i = tl.cdiv(n + 1, group)", ["i = ((n + 1) // (group))"]),
        ("int64", "i = (h // group).to(tl.int64) * 2", ["i = (h // group) * 2"]),
        ("int64", "i = tl.load(p_table).to(tl.int64)", ["i = tl.load(p_table)", "i = tl.load(p_table).to(tl.int32)"]),
        ("initial_value", 'm = tl.full([], float("-inf"), tl.float32)',
         ["m = tl.full([], 0.0, tl.float32)", "m = tl.full([], -5e4, tl.float32)"]),
        ("initial_value", "s = tl.full([], 0.0, tl.float32)", ["s = tl.full([], 1.0, tl.float32)"]),
        ("initial_value", 'm = tl.zeros([TILE], tl.float32) - float("inf")', ["m = tl.zeros([TILE], tl.float32)"]),
        ("rescale", "acc = acc * alpha[:, None] + x", ["acc = acc + x"]),
        ("rescale", "acc *= alpha", ["pass"]),
        ("update", "for i in range(n): m = new", ["for i in range(n): pass"]),
        ("update", "for i in range(n): acc = acc * a + x", ["for i in range(n): acc = x"]),
        ("update", "for i in range(n): acc += x", ["for i in range(n): pass", "for i in range(n): acc = x"]),
        ("exp_base", "p = tl.exp(s) + tl.math.log2(s)", ["p = tl.exp2(s) + tl.math.log2(s)",
                                                         "p = tl.exp(s) + tl.math.log(s)"]),
        ("min_max", "m = tl.maximum(m, tl.max(s, 0))", ["m = tl.minimum(m, tl.max(s, 0))",
                                                        "m = tl.maximum(m, tl.min(s, 0))"]),
        ("sign", "p = tl.exp(s - m)", ["p = tl.exp(s + m)"]),
        ("sign", "p = tl.load(p_q + i + j * stride_kt)", []),
        ("sign", 'm = x == float("inf")', ['m = x == float("-inf")']),
        ("scale", "s = tl.sum(x) * scale", ["s = tl.sum(x)", "s = tl.sum(x) * (scale * scale)"]),
        ("precision", "acc = tl.zeros([TILE], dtype=tl.float32)", ["acc = tl.zeros([TILE], dtype=tl.float16)"]),
        ("axis", "s = tl.sum(x[:, None], axis=1)",
         ["s = tl.sum(x[:, None], axis=0)", "s = tl.sum(x[None, :], axis=1)"]),
        ("normalisation", "o = acc / (s + 1)", ["o = acc"]),
        ("range_bound", "for i in range(0, n, TILE): pass",
         ["for i in range(1, n, TILE): pass", "for i in range(0, n - 1, TILE): pass",
          "for i in range(0, n + 1, TILE): pass", "for i in range(0, n, TILE - 1): pass",
          "for i in range(0, n, TILE + 1): pass"]),
        ("guard", "o = tl.where(s == 0, 0.0, o / s)", ["o = 0.0", "o = o / s"]),
        ("guard", "o = 1 - tl.where(s == 0, 0.0, a + s)", ["o = 1 - 0.0", "o = 1 - (a + s)"]),
        ("guard", "if n == 0: return", ["if False: return"]),
        ("store", "tl.store(p_out, acc)", ["pass"]),
    ],
)  # fmt: skip
def test_kernel_operator(tmp_path: Path, operator: str, body: str, expected: list[str]) -> None:
    """A kind of bug would not be planted, or be planted as another one."""
    assert lines_of(tmp_path, KERNEL.format(body=body), operator) == expected


def test_the_wrong_index(tmp_path: Path) -> None:
    """A query head used for its KV head, or a logical page for the physical one, would not be planted."""
    body = [
        "i_seq = tl.program_id(0)",
        "i_head = tl.program_id(1)",
        "i_kv = i_head // group",
        "i_block = tl.load(p_table + i_page * stride_o)",
        "p_k += i_seq * stride_ks + i_kv * stride_kt + i_block * stride_vt",
    ]
    assert lines_of(tmp_path, KERNEL.format(body="\n    ".join(body)), "index") == [
        "p_k += i_head * stride_ks + i_kv * stride_kt + i_block * stride_vt",
        "p_k += i_seq * stride_ks + i_head * stride_kt + i_block * stride_vt",
        "p_k += i_seq * stride_ks + i_kv * stride_kt + i_page * stride_vt",
        "i_seq = tl.program_id(1)",
        "i_head = tl.program_id(0)",
    ]


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("grid_order", ["kernel[(out.shape[1], q.shape[0])](q, k, 1.0, *q.stride(), *k.stride(), out.stride(0))"]),
        ("launch_arguments",
         ["kernel[(q.shape[0], out.shape[1])](k, q, 1.0, *q.stride(), *k.stride(), out.stride(0))"]),
        ("launch_condition", ['token, head = (2, 1) if layout != "HND" else (1, 2)']),
        ("launch_strides",
         ["kernel[(q.shape[0], out.shape[1])](q, k, 1.0, *k.stride(), *q.stride(), out.stride(0))",
          "kernel[(q.shape[0], out.shape[1])](q, k, 1.0, *q.stride(), out.stride(0), *k.stride())",
          "kernel[(q.shape[0], out.shape[1])](q, k, 1.0, *q.contiguous().stride(), *k.stride(), out.stride(0))",
          "kernel[(q.shape[0], out.shape[1])](q, k, 1.0, *q.stride(), *k.contiguous().stride(), out.stride(0))",
          "kernel[(q.shape[0], out.shape[1])](q, k, 1.0, *q.stride(), *k.stride(), out.contiguous().stride(0))",
          'token, head = (1, 2) if layout == "HND" else (1, 2)',
          'token, head = (2, 1) if layout == "HND" else (2, 1)',
          "return Strides((k_strides[token], k_strides[0]), (v_strides[0], 0))",
          "return Strides((v_strides[0], k_strides[token]), (v_strides[0], 0))",
          "return Strides((k_strides[0], v_strides[token]), (v_strides[0], 0))",
          "return Strides((k_strides[0], k_strides[token]), (k_strides[0], 0))"]),
    ],
)  # fmt: skip
def test_launch_operator(tmp_path: Path, operator: str, expected: list[str]) -> None:
    """A launch with the wrong grid, tensor or stride would not be planted."""
    assert sorted(lines_of(tmp_path, LAUNCH, operator)) == sorted(expected)


def test_other_functions_are_left_alone(tmp_path: Path) -> None:
    """Checks of arguments and helpers would be mutated, which says nothing about a kernel."""
    text = "def check(n, m):\n    if n < 1 and m - n:\n        raise ValueError(n // m)\n"
    assert [line for name in OPERATOR_NAMES for line in lines_of(tmp_path, text, name)] == []
