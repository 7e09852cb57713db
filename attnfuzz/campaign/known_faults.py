"""Cases that fault in the run of a relation: they go on being judged, without that one.

A crash takes the process of every run with it, so that such cases are not worth running (`known_deaths`). An access
outside does so only where memory ends, or where an offset is very large, and all other oracles still have a word on the
case. So that no second fault hides behind a known one, such a case is now and then judged by all of them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from attnfuzz.campaign.signature import Signature, case_features
from attnfuzz.declaration import Declaration
from attnfuzz.oracles.verdict import RELATION_ORACLES, DrawnWithout, OracleName, Relations, is_fault
from attnfuzz.problems.cases import Case

__all__ = ["KnownFaults"]

_PROBE_EVERY_S = 10.0


class KnownFaults:
    """Learns from findings of relations whose run faulted."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._signatures: defaultdict[str, set[Signature]] = defaultdict(set)
        self._last_probe: dict[str, float] = {}

    def learn(self, signature: Signature) -> None:
        """Learn of a finding, here or elsewhere; of others than faults there is nothing to learn."""
        symptom = signature.symptom
        if is_fault(symptom.oracle, symptom.kind):
            self._signatures[symptom.kernel].add(signature)
            self._last_probe[symptom.kernel] = self._clock()

    def covers(self, declaration: Declaration, case: Case) -> bool:
        """Whether a known fault is expected: the case had better be judged alone."""
        return bool(self._faulting(declaration, case))

    def relations_for(self, declaration: Declaration, case: Case) -> Relations:
        """Which relations are to judge a case."""
        faulting = self._faulting(declaration, case)
        if not faulting:
            return None
        if self._clock() - self._last_probe[declaration.target] < _PROBE_EVERY_S:
            return DrawnWithout(faulting)
        self._last_probe[declaration.target] = self._clock()
        return None

    def _faulting(self, declaration: Declaration, case: Case) -> tuple[OracleName, ...]:
        """The relations that would end the process."""
        signatures = self._signatures.get(declaration.target)
        if not signatures:
            return ()
        found = case_features(declaration, case)
        names = {signature.symptom.oracle for signature in signatures if signature.features <= found}
        return tuple(name for name in RELATION_ORACLES if name in names)
