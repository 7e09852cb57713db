"""Hostile entries of a shared server: a campaign keeps its budget, runs nothing and loses nothing of its own."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import msgspec

from attnfuzz.campaign.shared import open_database
from attnfuzz.campaign.shared_key import shared_key
from attnfuzz.declaration import Declaration
from tests.audit.auditing import Part
from tests.audit.mutating import mutated_bytes, mutated_document
from tests.audit.specimens import TINY
from tests.audit.yard import Fault, Seen, Yard, faults_of
from tests.faults.campaigns import KERNELS, saved
from tests.unit.redis_server import RedisServer

__all__ = ["Server"]

_TARGET = "mine.py:wrong"
_BUDGET_S = 15.0
_FEW = 100
"""So many entries leave a campaign the time to find its bug, which then ends it, whatever the machine."""
_FEW_BUDGET_S = 90.0
_TOO_LATE_S = 20.0
"""More than the budget, on a busy machine: 3,000 entries took 39 s."""


class Server(Part):
    inputs: ClassVar[int] = 23_000
    batch: ClassVar[int] = 3000
    patience_s: ClassVar[float] = 400.0

    def __init__(self, yard: Yard, seed: int, resources: ExitStack) -> None:
        super().__init__(yard, seed, resources)
        self._server = resources.enter_context(RedisServer(yard.folder))

    def run(self, numbers: range, dice: random.Random) -> Seen:
        (self.yard.project / "mine.py").write_bytes(KERNELS.read_bytes())
        is_short = len(numbers) <= _FEW
        budget_s = _FEW_BUDGET_S if is_short else _BUDGET_S
        (declaration,) = self._declarations()
        with self._server.client() as client:
            client.flushall()
        database = open_database(self._server.url)
        key = shared_key(declaration)
        for _, entry in zip(numbers, self._entries(declaration, dice), strict=False):
            database.save(key, entry)
        database.redis.close()
        started = time.monotonic()
        done = self.yard.command(
            "explore", _TARGET, "--workers", "1", "--budget", f"{budget_s}s", "--shared", self._server.url,
            "--json", "summary.json", "--seed", "1", *(("--fail-fast",) if is_short else ()), limit_s=300.0,
        )  # fmt: skip
        seconds = time.monotonic() - started
        seen = faults_of(done, cpu_s=200.0)
        if seconds > budget_s + _TOO_LATE_S:
            seen.faults.append(Fault("hang", f"a budget of {budget_s:.0f} s became {seconds:.0f} s"))
        seen.faults += [*self.yard.faults_in_files(), *self._losses(done.output)]
        return Seen(refused=len(numbers), faults=seen.faults)

    def _declarations(self) -> list[Declaration]:
        from attnfuzz.judging.runner import Runner

        with Runner(device="cpu") as runner:
            return runner.declarations([_TARGET])

    def _losses(self, said: bytes) -> list[Fault]:
        """The bug of the kernel is found, here or elsewhere as an honest entry may have it, and cases are judged."""
        try:
            summary: dict[str, Any] = json.loads((self.yard.project / "summary.json").read_bytes())
        except (OSError, ValueError):
            return [Fault("other", "no summary was written")]
        (kernel,) = summary["kernels"]
        if not kernel["cases"]:
            return [Fault("other", f"no case was judged: {said[-300:]!r}")]
        told = [finding["path"] for finding in kernel["findings"]]
        if len(saved(self.yard.project)) < len(told):
            return [Fault("other", f"of {len(told)} findings {len(saved(self.yard.project))} were saved")]
        return []

    def _entries(self, declaration: Declaration, dice: random.Random) -> Iterator[bytes]:
        """Half of them well-formed and about bugs that nobody has, half of them mutated, a few large."""
        number = 0
        while True:
            number += 1
            known = {
                "type": "known", "kernel": _TARGET, "oracle": dice.choice(("accuracy", "crash", "hang", "dead_memory")),
                "kind": f"out:{number}", "features": [f"seq_len>{number}"], "flaky": False,
            }  # fmt: skip
            regression = {**TINY, "kernel": dice.choice((_TARGET, f"{self.yard.foreign}/planted.py:k")), "case": {
                **TINY["case"], "seq_lens": [dice.randrange(1, 200) for _ in range(dice.choice((1, 4, 40)))],
            }}  # fmt: skip
            entry: dict[str, Any] = {
                "format": "attnfuzz.shared/1", "host": f"evil-{number}" + ("" if number % 50 else "\x1b[2J"),
                "known": [known] * dice.choice((1, 1, 50)), "regression": dice.choice((regression, None)),
            }  # fmt: skip
            data = msgspec.json.encode(entry)
            if dice.random() < 0.5:
                data = mutated_document(entry, dice, changes=1)
            yield mutated_bytes(data, dice) if dice.random() < 0.2 else data
