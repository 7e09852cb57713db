"""Failures whose worker was lost before it was done with them: another one looks into them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.messages import Found, Pursue
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import encode_case

__all__ = ["Handover"]

_Key: TypeAlias = tuple[str, bytes]

_MAX_TIMES = 2
"""How often a failure is handed on: one that takes every worker with it would otherwise never be left alone."""


class Handover:
    """What waits to be taken up. Nothing is in it twice."""

    def __init__(self) -> None:
        self._waiting: dict[_Key, Pursue] = {}
        self._sent: set[_Key] = set()
        self._times: Counter[_Key] = Counter()

    def add(self, finding: Finding) -> None:
        """Take over a finding at its smallest case."""
        preceding = [msgspec.Raw(encode_case(case)) for case in finding.ran_before]
        self.add_case(finding.declaration.target, encode_case(finding.case), finding.failure, preceding)

    def add_case(self, kernel: str, case: bytes, failure: Failure, preceding: Sequence[msgspec.Raw] = ()) -> None:
        """Take over a case that failed after those of ``preceding``."""
        key = kernel, case
        self._times[key] += 1
        self._sent.discard(key)
        self._waiting[key] = Pursue(kernel=kernel, case=msgspec.Raw(case), failure=failure, preceding=tuple(preceding))

    def take(self) -> list[Pursue]:
        """What is to be sent to a worker now."""
        keys = [key for key in self._waiting if key not in self._sent and self._times[key] <= _MAX_TIMES]
        self._sent.update(keys)
        return [self._waiting[key] for key in keys]

    def taken_up(self, found: Found) -> None:
        """A worker looks into this one: from now on it is a finding like any other."""
        self._waiting.pop((found.kernel, bytes(found.case)), None)

    def left(self) -> list[Pursue]:
        """What nobody has taken up."""
        return list(self._waiting.values())
