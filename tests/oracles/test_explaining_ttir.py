"""Reading TTIR: what a compiled kernel computes and where, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnfuzz.explaining.operations import Operations, places_of
from attnfuzz.explaining.ttir import operations_of_ttir
from tests.common.compiled_ttir import ttir_of_mistakes

KERNELS = Path(__file__).parents[1] / "common" / "rounding_kernels.py"
MISTAKES = (
    "none", "products", "products and sums", "scores", "scaled query", "row sum", "accumulator", "short exp2",
    "weights in float8_e4m3fn", "K to float8_e5m2", "V to float8_e5m2", "no maximum", "partial LSE",
)  # fmt: skip

TYPES = dict.fromkeys(("p_q", "p_k", "p_v", "p_out", "p_halves"), "*fp16")
TYPES |= {"p_lse": "*fp32", "p_lens": "*i32", "scale": "fp32"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return ttir_of_mistakes(KERNELS, TYPES, tmp_path_factory.mktemp("cache"))


def marked(name: str) -> list[tuple[str, int]]:
    lines = KERNELS.read_text(encoding="utf-8").splitlines()
    return [(str(KERNELS), number) for number, line in enumerate(lines, 1) if line.endswith(f"  # {name}")]


@pytest.mark.parametrize("name", MISTAKES[1:])
def test_the_line_of_each_rounding_is_found(name: str, compiled: dict[str, str]) -> None:
    """On a GPU a cause would be told without its line, or with another one."""
    assert list(places_of((name,), Operations(operations_of_ttir(compiled[name])))) == marked(name)


@pytest.mark.parametrize("name", MISTAKES[1:])
def test_a_kernel_without_a_rounding_has_no_line_for_it(name: str, compiled: dict[str, str]) -> None:
    """A line of a kernel that is right would be blamed."""
    assert places_of((name,), Operations(operations_of_ttir(compiled["none"]))) == ()


def test_matrix_products_in_tf32_are_told_from_exact_ones() -> None:
    """The lines of exact products would be told as those that take TF32."""
    text = """
#loc = loc("k.py":1:0)
#loc1 = loc("k.py":7:3)
#loc2 = loc("s"(#loc1))
module {
  tt.func public @f(%p: tensor<4x4x!tt.ptr<f32>> loc(unknown)) {
    %a = tt.load %p : tensor<4x4x!tt.ptr<f32>> loc(#loc)
    %x = tt.dot %a, %a, %a, inputPrecision = MODE : tensor<4x4xf32> * tensor<4x4xf32> -> tensor<4x4xf32> loc(#loc2)
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
"""
    told = {
        mode: places_of(("tf32",), Operations(operations_of_ttir(text.replace("MODE", mode))))
        for mode in ("tf32", "ieee")
    }
    assert told == {"tf32": (("k.py", 7),), "ieee": ()}


@pytest.mark.parametrize("text", ["", "}", "%0 = \n} loc(", "module {\n  %0:2 = scf.for\n scf.yield %1", "\x00" * 9])
def test_text_of_another_kind_holds_no_operations(text: str) -> None:
    """A Triton that writes TTIR in another way would cost the explanation, not only its line."""
    assert operations_of_ttir(text) == []
