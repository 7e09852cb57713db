"""The part of a script about a case of a user's problem: its tensors, the call, and the right results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from attnfuzz.declaration import Kernel
from attnfuzz.inputs.allocation import PlainAllocator
from attnfuzz.inputs.open_module import OpenValues, build, changed_names, returned_names, values
from attnfuzz.problems.open_cases import OpenCase
from attnfuzz.problems.supports import Supports
from attnfuzz.trials.as_code import compared, definitions, packed_together
from attnfuzz.trials.engine_calls import engine_calls
from attnfuzz.trials.observation import call_options
from attnfuzz.trials.script_part import ScriptPart


def open_script_part(kernel: Kernel, case: OpenCase, *, device: str) -> ScriptPart:
    """All of it; of an engine's kernel the engine's calls. Raises ProblemError where the problem itself fails, and
    NotFollowed."""
    worked_out = values(case, "cpu", Supports())
    given = vars(build(case, PlainAllocator("cpu"), worked_out))
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    outputs, changed = returned_names(case), changed_names(case)
    if kernel.engine_plan is not None:
        part = engine_calls(kernel, case, device=device, launches=True)
        handed = {name: name for name in changed if name in part.names}  # an adapter may take others to pieces itself
        results = dict(zip(outputs, part.results, strict=False)) | handed
        return msgspec.structs.replace(
            part, results=tuple(results.values()), checks=tuple(_checks(worked_out, tensors, changed, results))
        )
    options = "".join(f", {name}={value!r}" for name, value in call_options(kernel, case).items())
    arguments = ", ".join(f"{name}={name if name in tensors else repr(value)}" for name, value in given.items())
    calls = [f"result = kernel(SimpleNamespace({arguments}){options})"]
    if outputs:
        shown = ", ".join(outputs)
        calls += [
            "result = result if isinstance(result, (tuple, list)) else (result,)",
            f"{shown}, *_ = (b if a is None else a for a, b in zip((*result, *[None] * 8), ({shown}, None)))",
        ]
    return ScriptPart(
        tensors=tuple(definitions(tensors)),
        together=packed_together(tensors),
        names=tuple(tensors),
        calls=tuple(calls),
        results=(*outputs, *changed),
        checks=tuple(_checks(worked_out, tensors, changed, {name: name for name in (*outputs, *changed)})),
    )


def _checks(
    worked_out: OpenValues, tensors: Mapping[str, Tensor], changed: Sequence[str], results: Mapping[str, str]
) -> Iterator[str]:
    """Lines that compare the expressions for ``results`` with what is to come of the case."""
    for target in worked_out.targets("bound"):
        should_be, within = target.value, target.bound
        if (where := worked_out.where[target.name]) is not None:
            is_changed = target.name in changed  # elsewhere every bit is kept; of an output nobody looks there
            should_be = torch.where(where, should_be, tensors[target.name].double() if is_changed else 0.0)
            within = within if is_changed else torch.where(where, within, torch.inf)
        if target.name in results:
            yield from compared(target.name, results[target.name], should_be, within)
