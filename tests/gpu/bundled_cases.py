"""The bundled kernels by name, known before any is imported, and a small case of each problem as they take it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import msgspec

import attnfuzz
from attnfuzz.cases.supported import adapt_options, why_unsupported
from attnfuzz.declaration import Declaration
from attnfuzz.problems.cases import (
    Case,
    DenseDecodeCase,
    LatentDecodeCase,
    MaskedAttentionCase,
    MergeStatesCase,
    PagedAttentionCase,
    PagedDecodeCase,
    Problem,
    SplitDecodeCase,
)
from attnfuzz.problems.masks import Mask
from attnfuzz.problems.recipes import Needle, Pages, Values


def _declared(source: Path) -> dict[str, Problem]:
    """Name and problem of each kernel that a file declares."""
    found: dict[str, Problem] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            match node, decorator:
                case (
                    ast.FunctionDef(name=name),
                    ast.Call(func=ast.Attribute(attr="kernel"), args=[ast.Constant(value=str(problem))]),
                ):
                    found[name] = problem
    return found


BUNDLED = _declared(Path(attnfuzz.__file__).parent / "kernels" / "bundled.py")
"""The problem of each bundled kernel."""

_SHAPE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 16, "scale": 0.25}
_VALUES = Values(keys="normal", values="normal", needles=(Needle(2, 30, 1),))
_PAGED: dict[str, Any] = {
    **_SHAPE,
    "seq_lens": (5, 0, 37),
    "block_size": 8,
    "values": _VALUES,
    "pages": Pages(order="shuffled", spare_blocks=2, extra_columns=1, shared_blocks=1),
}
CASES: dict[Problem, Case] = {
    "dense_decode": DenseDecodeCase(**_SHAPE, seq_lens=(5, 0, 37), extra_rows=2, values=_VALUES),
    "paged_decode": PagedDecodeCase(**_PAGED),
    "latent_decode": LatentDecodeCase(
        **_PAGED | {"num_q_heads": 8, "num_kv_heads": 1, "values": msgspec.structs.replace(_VALUES, needles=())},
        v_head_size=8,
    ),
    "masked_attention": MaskedAttentionCase(
        **_PAGED, query_lens=(3, 0, 20), mask=Mask(kind="tree", seqs=((-1, -1, 0), (), (-1, 0, 0, 1))), padding_tokens=2
    ),
    "split_decode": SplitDecodeCase(**_PAGED, num_splits=4),
    "merge_states": MergeStatesCase(
        num_q_heads=4, head_size=16, num_tokens=9, lse_pairs=(("finite", "-inf"), ("high", "equal"))
    ),
    "paged_attention": PagedAttentionCase(
        **_PAGED, query_lens=(3, 0, 20), query_slack=2, seq_slack=9, padding_tokens=2
    ),
}
"""Small, with an empty sequence or state where there can be one."""


def fitted(declaration: Declaration, case: Case) -> Case:
    """``case`` in a dtype and a layout that the kernel takes, with its options. Raises ValueError if that fails."""
    supports = declaration.supports
    changes: dict[str, Any] = {}
    if case.dtype not in supports.dtypes:
        changes["dtype"] = supports.dtypes[0]
    if isinstance(case, PagedDecodeCase) and case.layout not in supports.layouts:
        changes["layout"] = supports.layouts[0]
    if isinstance(case, MergeStatesCase):
        changes["lse_layout"] = supports.lse_layout
    found = adapt_options(msgspec.structs.replace(case, **changes), declaration.options)
    if (why := why_unsupported(supports, declaration.options, found)) is not None:
        raise ValueError(f"{declaration.name} does not take the case: {why}")
    return found
