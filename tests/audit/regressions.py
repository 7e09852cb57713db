"""Mutated regression files, loaded and shown in this process."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any, ClassVar

from click.testing import CliRunner

from attnfuzz.cli.show import show_command as show
from tests.audit.auditing import Part
from tests.audit.mutating import mutated_bytes, mutated_document, spliced
from tests.audit.specimens import TINY, regression_documents
from tests.audit.yard import Done, Seen, Yard, faults_of


def _case(**changes: Any) -> dict[str, Any]:
    return {**TINY, "case": {**TINY["case"], **changes}}


def _paged(**changes: Any) -> dict[str, Any]:
    return {**TINY, "problem": "paged_decode", "kernel": "paged_naive", "case": {
        **TINY["case"], "block_size": 16, **changes}}  # fmt: skip


KNOWN: tuple[dict[str, Any], ...] = (
    _case(options={f"o{i}": i for i in range(150_000)}),
    _paged(seq_lens=[1] * 32_000, pages={"extra_columns": 4000}),
    _paged(seq_lens=[1] * 2000, pages={"extra_columns": 1 << 16}),
    _case(seq_lens=[0] * 65_535 + [1]),
    {**TINY, "finding": {**TINY["finding"], "message": "\0 \x1b[2J \x1b]0;title\a \r\b \u009b31m"}},
    {**TINY, "finding": {**TINY["finding"], "details": ["[bold]x[/nothing]", "\x1b[31mred"]}},
    {**TINY, "finding": {**TINY["finding"], "message": "x" * 3_000_000}},
    {**TINY, "finding": {**TINY["finding"], "message": "@raw@1"}},
    {**TINY, "kernel": "@raw@" + "[" * 300_000},
)
"""Many options and columns took half a minute, control characters reached the terminal."""


class Regressions(Part):
    inputs: ClassVar[int] = 19_000
    patience_s: ClassVar[float] = 120.0

    def __init__(self, yard: Yard, seed: int, resources: ExitStack) -> None:
        super().__init__(yard, seed, resources)
        self._documents = regression_documents(seed=seed)
        self._runner = CliRunner()

    def run(self, numbers: range, dice: random.Random) -> Seen:
        (number,) = numbers
        (self.yard.project / "a.json").write_bytes(self._data(number, dice))
        result = self._runner.invoke(show, ["a.json"])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return faults_of(ended(result.exit_code, result.output_bytes))

    def _data(self, number: int, dice: random.Random) -> bytes:
        if number < len(KNOWN):
            return spliced(KNOWN[number])
        document = dice.choice(self._documents)
        data = mutated_document(document, dice, changes=dice.choice((0, 1, 1, 1, 2, 3)))
        return mutated_bytes(data, dice) if dice.random() < 0.3 else data


def ended(status: int, output: bytes) -> Done:
    """A command that ran in this process, whose time and memory the loop looks at."""
    return Done(status, output, len(output), seconds=0.0, cpu_s=0.0, peak_bytes=0, left=0)
