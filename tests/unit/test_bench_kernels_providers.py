"""How providers are called: each with a stand-in that does what the package's documentation says."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from attnfuzz.bench.kernels.accuracy import largest_error_ratio
from attnfuzz.bench.kernels.calls import Unsupported
from attnfuzz.bench.kernels.providers import servers
from attnfuzz.bench.kernels.providers.catalogue import PROVIDERS, described
from attnfuzz.bench.kernels.providers.provider import Provider
from attnfuzz.bench.kernels.shapes import Shape
from attnfuzz.bench.kernels.tensors import draw_tensors
from attnfuzz.problems.declared_numerics import Numerics
from tests.unit import provider_stand_ins as stand_ins

COMMON = {"label": "", "num_q_heads": 4, "head_size": 16, "block_size": 8}
EVEN = Shape(**COMMON, num_kv_heads=2, seq_lens=(40, 40))  # type: ignore[arg-type]  # mypy sees one type for all
RAGGED = Shape(**COMMON, num_kv_heads=2, seq_lens=(33, 8, 1))  # type: ignore[arg-type]  # as above
MIXED = Shape(**COMMON, num_kv_heads=2, seq_lens=(33, 20, 7), query_lens=(1, 5, 7))  # type: ignore[arg-type]
MERGE = Shape(label="", num_q_heads=3, head_size=16, num_tokens=7)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, triton_ops = "vllm.attention.ops", "sglang.srt.layers.attention.triton_ops"
    for name, module in {
        "flash_attn": stand_ins.flash_attn,
        "flashinfer": stand_ins.flashinfer,
        f"{ops}.triton_unified_attention": stand_ins.module("unified", unified_attention=stand_ins.vllm_unified),
        f"{ops}.triton_merge_attn_states": stand_ins.module("merge", merge_attn_states=stand_ins.vllm_merge),
        f"{triton_ops}.decode_attention": stand_ins.module("decode", decode_attention_fwd=stand_ins.sglang_decode),
        f"{triton_ops}.merge_state": stand_ins.module("merge_state", merge_state_triton=stand_ins.sglang_merge),
    }.items():
        parts = name.split(".")
        for i in range(1, len(parts)):
            package = stand_ins.module(".".join(parts[:i]), __path__=[])
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), package)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_ins.varlen_attn)


def provider(name: str) -> Provider:
    return next(one for one in PROVIDERS if one.name == name)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("torch_varlen", RAGGED),
        ("torch_varlen", MIXED),
        ("flash_attn", EVEN),
        ("flash_attn", RAGGED),
        ("flash_attn", MIXED),
        ("flashinfer", RAGGED),
        ("flashinfer", MIXED),
        ("flashinfer_merge", MERGE),
        ("vllm_triton", RAGGED),
        ("vllm_triton", MIXED),
        ("vllm_merge", MERGE),
        ("sglang_triton", RAGGED),
        ("sglang_merge", MERGE),
    ],
)
def test_a_provider_gets_what_it_asks_for(name: str, shape: Shape) -> None:
    """A provider would be called wrong for tables, lengths or LSEs that it was given in another form."""
    one = provider(name)
    tensors = draw_tensors(shape, "cpu", 1)
    prepared = one.prepare(tensors, {key: choices[0] for key, choices in one.options.items()})
    out, lse = prepared.read(prepared.call())
    ratio = largest_error_ratio(tensors, out, lse, numerics=Numerics(), num_partials=2, interpreted=False)
    assert ratio <= 1
    assert (lse is not None) == (shape is MERGE)


@pytest.mark.parametrize(("name", "shape"), [("flash_attn", MERGE), ("sglang_merge", EVEN), ("torch_sdpa", RAGGED)])
def test_a_provider_says_what_it_does_not_take(name: str, shape: Shape) -> None:
    """It would fail in its own words, in the middle of a table."""
    one = provider(name)
    with pytest.raises(Unsupported):
        one.prepare(draw_tensors(shape, "cpu", 1), {key: choices[0] for key, choices in one.options.items()})


def test_names_are_told_apart() -> None:
    """--provider would choose two, and a row of the table say nothing about which."""
    names = [described(one).name for one in PROVIDERS]
    assert len(set(names)) == len(names)


def test_a_package_without_the_function_counts_as_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that has moved it would end the benchmark with an AttributeError."""
    monkeypatch.setitem(sys.modules, "moved_package.ops", ModuleType("moved_package.ops"))
    with pytest.raises(ImportError, match=r"no ops\.attend in moved_package or gone_package"):
        servers._found(("moved_package", "gone_package"), "ops", "attend")
