"""Each command with nothing to judge: none may end with 0, which says that all is well."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, ClassVar

from tests.audit.auditing import Part
from tests.audit.specimens import TINY
from tests.audit.yard import Fault, Seen

_SHORT = ("--budget", "3s", "--device", "cpu")
_SEARCH = (*_SHORT, "--workers", "1")
_ORACLES = ("split_count", "merge_laws", "graph_replay")
_CANNOT_RUN = "assembly.py"
_NEVER = "misspelt.py"
_SLOW = "slow.py"

IDLE: tuple[tuple[str, ...], ...] = (
    *(("explore", "right.py", "--oracle", oracle, *_SEARCH) for oracle in _ORACLES),
    *(
        one
        for file in (_CANNOT_RUN, _NEVER)
        for one in (
            ("explore", file, *_SEARCH),
            ("verify", file, *_SEARCH),
            ("verify", file, "--json", *_SEARCH),
            ("declare", file, *_SHORT),
        )
    ),
    ("explore", _SLOW, *_SEARCH),
    ("verify", _SLOW, *_SEARCH),
    ("ci", _CANNOT_RUN, *_SEARCH),
    ("conformance", _CANNOT_RUN, "--device", "cpu"),
    ("replay", "case.json", "--device", "cpu"),
    ("replay", "case.json", "--known", "--device", "cpu"),
    ("explain", "case.json", "--device", "cpu"),
    ("replay", "empty"),
    ("triage", "empty"),
)
"""Oracles that say nothing of the kernel, kernels that cannot run here, never return or take too long, no cases."""

_HEAD = """
import time

import torch
import triton
import triton.language as tl

import attnfuzz
from attnfuzz.kernels import eager
"""
_KERNEL = """

@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(dtypes=("float32",), head_sizes=(16,)))
def mine(inputs):
    {before}
    return eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.{lengths}, inputs.scale)
"""
_ASSEMBLY = """

@triton.jit
def assembly(p, TILE: tl.constexpr):
    o = tl.arange(0, TILE)
    tl.store(p + o, tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(p + o)], tl.float32, True, 1))

"""


class Idle(Part):
    """Each of ``IDLE`` has to end with 2."""

    inputs: ClassVar[int] = len(IDLE)
    patience_s: ClassVar[float] = 400.0

    def run(self, numbers: range, dice: random.Random) -> Seen:
        (number,) = numbers
        self.furnish(self.yard.project)
        done = self.yard.command(*IDLE[number], limit_s=300.0)
        seen = Seen(refused=int(done.status == 2), faults=self.yard.faults_in_files())
        if done.status != 2:
            words = " ".join(IDLE[number])
            last = done.output.decode(errors="replace").strip().splitlines()[-1:]
            seen.faults.append(Fault("other", f"{words}: exit status {done.status}: {' '.join(last)[:200]}"))
        return seen

    @staticmethod
    def furnish(project: Path) -> None:
        """Write the kernels and cases that the commands name."""
        kernels = {
            "right.py": _KERNEL.format(before="pass", lengths="seq_lens"),
            _CANNOT_RUN: _ASSEMBLY
            + _KERNEL.format(before="assembly[(1,)](torch.empty(16), TILE=16)", lengths="seq_lens"),
            _NEVER: _KERNEL.format(before="pass", lengths="context_lens"),
            _SLOW: _KERNEL.format(before="time.sleep(1.0)", lengths="seq_lens"),
        }
        for name, source in kernels.items():
            (project / name).write_text(_HEAD + source)
        case: dict[str, Any] = {**TINY, "kernel": f"{_CANNOT_RUN}:mine"}
        (project / "case.json").write_text(json.dumps(case))
        (project / "empty").mkdir()
