"""What differs from batch to batch compiles no bundled kernel again."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"
OF_A_BATCH = {"num_seqs", "num_tokens", "stride_table_s", "stride_len", "max_blocks_per_seq"}
"""The stride of a table's rows is their number of pages, and that of lengths may be anything."""


def launched() -> Iterator[tuple[str, set[str], set[str]]]:
    """Each kernel that a host launches: its name, its parameters, and those that Triton leaves alone."""
    for path in KERNELS.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and function.name.endswith("_kernel"):
                names = {argument.arg for argument in function.args.args}
                decorators = [one for one in function.decorator_list if isinstance(one, ast.Call)]
                spared = [keyword.value for one in decorators for keyword in one.keywords]
                yield function.name, names, {name for one in spared for name in ast.literal_eval(one)}


def test_kernels_are_not_compiled_again_for_another_batch() -> None:
    """Triton compiles for seconds where a number is 1 or 16 divides it: a server would stall at its next batch."""
    found = {name: (names & OF_A_BATCH) - spared for name, names, spared in launched()}
    assert len(found) > 12
    assert {name: missing for name, missing in found.items() if missing} == {}
