"""The bundled kernels compile for GPUs that are not there, fit them, spill nothing and load 16 bytes at once."""

from __future__ import annotations

import pytest

from tests.quality.compiled import TARGETS, Compiled, compile_apart, complaints

TOO_LARGE = {
    "sm_89": [
        "q_block_kernel of paged_attention_auto (prompt, float32), head size 1024, sm_89: takes 131,072 bytes of "
        "shared memory, of 101,376"
    ]
}
"""The smallest blocks that tl.dot takes are larger than the GPU's shared memory."""


@pytest.mark.night
@pytest.mark.parametrize(
    ("target", "kernel", "head_size"),
    [
        ("sm_89", "paged_attention_v1", 128),  # V side by side
        ("sm_90", "paged_grouped_auto", 128),  # with dependent launch
        ("gfx942", "paged_grouped_auto", 128),  # without, and the least shared memory
    ],
)
def test_one_kernel(target: str, kernel: str, head_size: int) -> None:
    """A GPU that nobody here has would refuse a launch, or be read two bytes at a time."""
    compiled = compile_apart(target, "--kernels", kernel, "--head-sizes", str(head_size))
    assert compiled
    assert complaints(compiled) == []


@pytest.mark.night
@pytest.mark.parametrize("target", TARGETS)
def test_all_fit(target: str) -> None:
    """The same of all kernels and head sizes; what spills is in the table of docs/kernels.md."""
    compiled = compile_apart(target)
    assert len({one.kernel for one in compiled}) >= 18
    assert [told for told in complaints(compiled) if "spills" not in told] == TOO_LARGE.get(target, [])


def test_what_is_complained_of() -> None:
    """A table of nothing but praise would come of a check that sees nothing."""
    fine = Compiled(
        target="sm_89", declared="a", launch="", kernel="a_kernel", head_size=256,
        shared=99 << 10, registers=255, spilled=0, widths={"K": 16, "V": 16},
    )  # fmt: skip
    assert complaints([fine]) == []
    bad = Compiled(
        target="gfx942", declared="a", launch="prompt", kernel="a_kernel", head_size=256,
        shared=81920, registers=255, spilled=4016, widths={"V": 2},
    )  # fmt: skip
    where = "a_kernel of a (prompt), head size 256, gfx942"
    assert complaints([bad]) == [
        f"{where}: takes 81,920 bytes of shared memory, of 65,536",
        f"{where}: spills 4,016 bytes",
        f"{where}: loads V by 2 bytes",
    ]
