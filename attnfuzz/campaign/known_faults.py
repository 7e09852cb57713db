"""Cases on which a kernel is known to reach outside: they go on being judged, without guarded memory.

A crash takes the process of every run with it, so that such cases are not worth running (`known_deaths`). An access
outside only does where memory ends, and all other oracles still have a word on the case. So that no second access
hides behind a known one, such a case is now and then judged with guarded memory all the same.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from attnfuzz.campaign.signature import Signature, case_features
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import Relations
from attnfuzz.problems.cases import Case

__all__ = ["KnownFaults"]

_PROBE_EVERY_S = 10.0


class KnownFaults:
    """Learns from findings of the oracle guard_page."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._signatures: defaultdict[str, set[Signature]] = defaultdict(set)
        self._last_probe: dict[str, float] = {}

    def learn(self, signature: Signature) -> None:
        """Learn of a finding, here or elsewhere."""
        if signature.symptom.oracle == "guard_page":
            self._signatures[signature.symptom.kernel].add(signature)
            self._last_probe[signature.symptom.kernel] = self._clock()

    def covers(self, declaration: Declaration, case: Case) -> bool:
        """Whether a known access outside is expected: the case had better be judged alone."""
        signatures = self._signatures.get(declaration.target)
        if not signatures:
            return False
        found = case_features(declaration, case)
        return any(signature.features <= found for signature in signatures)

    def relations_for(self, declaration: Declaration, case: Case) -> Relations:
        """Which relations are to judge a case."""
        if not self.covers(declaration, case):
            return None
        if self._clock() - self._last_probe[declaration.target] < _PROBE_EVERY_S:
            return "survivable"
        self._last_probe[declaration.target] = self._clock()
        return None
