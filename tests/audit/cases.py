"""Mutated cases judged on the bundled kernels, which are correct: they pass or are refused."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from typing import Any, ClassVar

import msgspec

from attnfuzz.cases.supported import adapt_options, why_unsupported
from attnfuzz.judging.runner import Runner
from attnfuzz.problems.cases import MergeStatesCase, case_from_builtins, encode_case
from attnfuzz.problems.limits import CaseTooLarge, case_nbytes
from attnfuzz.problems.recipes import KEY_RECIPES, LSE_KINDS, STRIDE_KINDS, VALUE_RECIPES
from attnfuzz.problems.supports import DTYPES, LAYOUTS
from tests.audit.auditing import Part
from tests.audit.mutating import mutated_document, nudged
from tests.audit.specimens import drawn
from tests.audit.yard import Fault, Seen, Yard

_WORDS = (*DTYPES, *LAYOUTS, *KEY_RECIPES, *VALUE_RECIPES, *LSE_KINDS, *STRIDE_KINDS, "reversed", "shuffled", "garbage")
_LARGEST_BYTES = 4 << 20
_LARGEST_WORK = 10_000
"""Query heads times rows and the pages or tokens they walk over: what Triton's interpreter takes seconds for."""
_TIMEOUT_S = 60.0


class Cases(Part):
    inputs: ClassVar[int] = 20_866
    patience_s: ClassVar[float] = 400.0

    def __init__(self, yard: Yard, seed: int, resources: ExitStack) -> None:
        super().__init__(yard, seed, resources)
        self._runner = resources.enter_context(Runner(device="cpu"))
        self._kernels = self._runner.declarations(["*"])
        self._drawn: dict[str, list[Any]] = {}

    def run(self, numbers: range, dice: random.Random) -> Seen:
        (number,) = numbers
        kernel = self._kernels[number % len(self._kernels)]
        if kernel.name not in self._drawn:
            self._drawn[kernel.name] = [json.loads(encode_case(case)) for case in drawn(kernel, seed=self.seed)]
        document = dice.choice(self._drawn[kernel.name])
        if dice.random() < 0.1:
            document = msgspec_json(mutated_document(document, dice, changes=1))
        for _ in range(dice.choice((1, 1, 2, 3))):
            document = nudged(document, dice, choices=_WORDS)
        try:
            case = adapt_options(case_from_builtins(kernel.problem, document), kernel.options)
            if why_unsupported(kernel.supports, kernel.options, case) or not _is_quick(case):
                return Seen(refused=1)
            verdict = self._runner.judge(kernel, case, timeout_s=_TIMEOUT_S)
        except (msgspec.ValidationError, CaseTooLarge):
            return Seen(refused=1)
        failure = verdict.failure
        if failure is None:
            return Seen(accepted=1)
        text = f"{kernel.name}: {failure.oracle}/{failure.kind}: {failure.message[:150]}; {encode_case(case).decode()}"
        return Seen(accepted=1, faults=[Fault("hang" if failure.oracle == "hang" else "other", text)])


def msgspec_json(data: bytes) -> Any:
    """Parsed as regression files are; None for what is no JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None


def _is_quick(case: Any) -> bool:
    if isinstance(case, MergeStatesCase):
        return case_nbytes(case) <= _LARGEST_BYTES and case.num_tokens * case.num_q_heads <= _LARGEST_WORK
    work = case.num_q_heads * sum(1 + length // 16 for length in case.row_lens) * getattr(case, "num_splits", 1)
    return work <= _LARGEST_WORK and case_nbytes(case) <= _LARGEST_BYTES
