"""What a script holds of a case of a user's problem: its tensors, the call, and what is to come of it."""

from __future__ import annotations

import torch
from torch import Tensor

from attnfuzz.declaration import Kernel
from attnfuzz.problems.allocation import PlainAllocator
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.open_module import build, changed_names, returned_names, values
from attnfuzz.problems.supports import Supports
from attnfuzz.trials.as_code import compared, definitions
from attnfuzz.trials.observation import call_options
from attnfuzz.trials.script_part import ScriptPart

__all__ = ["open_script_part"]


def open_script_part(kernel: Kernel, case: OpenCase) -> ScriptPart:
    """All of it. Raises ProblemError where the problem itself fails."""
    worked_out = values(case, "cpu", Supports())
    given = vars(build(case, PlainAllocator("cpu"), worked_out))
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    outputs, changed = returned_names(case), changed_names(case)
    options = "".join(f", {name}={value!r}" for name, value in call_options(kernel, case).items())
    arguments = ", ".join(f"{name}={name if name in tensors else repr(value)}" for name, value in given.items())
    calls = [f"result = kernel(SimpleNamespace({arguments}){options})"]
    if outputs:
        shown = ", ".join(outputs)
        calls += [
            "result = result if isinstance(result, (tuple, list)) else (result,)",
            f"{shown}, *_ = (b if a is None else a for a, b in zip((*result, *[None] * 8), ({shown}, None)))",
        ]
    checks: list[str] = []
    for target in worked_out.targets("bound"):
        should_be, within = target.value, target.bound
        if (where := worked_out.where[target.name]) is not None:
            is_changed = target.name in changed  # elsewhere every bit is kept; of an output nobody looks there
            should_be = torch.where(where, should_be, tensors[target.name].double() if is_changed else 0.0)
            within = within if is_changed else torch.where(where, within, torch.inf)
        checks += compared(target.name, target.name, should_be, within)
    return ScriptPart(
        tensors=tuple(definitions(tensors)),
        names=tuple(tensors),
        calls=tuple(calls),
        results=(*outputs, *changed),
        checks=tuple(checks),
    )
