"""What a failing case comes down to while it is confirmed and shrunk, and what the coordinator is told of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from attnfuzz.campaign.aspects import aspects
from attnfuzz.campaign.confirmation import Confirmation
from attnfuzz.campaign.known_deaths import KnownDeaths
from attnfuzz.campaign.messages import Confirmed, Duplicate, Found, Minimised, Smaller, Unconfirmed
from attnfuzz.campaign.signature import NEEDS_PRECEDING, KnownFindings, Signature
from attnfuzz.campaign.suspect import Suspect
from attnfuzz.explaining.explanation import Explanation
from attnfuzz.problems.cases import Case, encode_case

__all__ = ["Trail"]


class Trail:
    """Begins at ``suspect`` and is told by ``send``, under the name ``finding``.

    ``now``: the latest step. ``needed``: features that all failing cases have had. ``is_flaky``: it comes and goes.
    """

    def __init__(self, finding: str, suspect: Suspect, send: Callable[[msgspec.Struct], None]) -> None:
        self.now = suspect
        self.needed = suspect.features
        self.is_flaky = False
        self._finding = finding
        self._send = send
        self._symptoms = [suspect.symptom]

    def tell_found(self) -> None:
        """That there is something to be confirmed."""
        now = self.now
        self._send(
            Found(
                finding=self._finding,
                kernel=now.declaration.target,
                case=_raw(now.case),
                failure=now.failure,
                preceding=tuple(map(_raw, now.preceding)),
            )
        )

    def tell_unconfirmed(self, confirmation: Confirmation) -> None:
        """That it did not fail again."""
        self._send(Unconfirmed(finding=self._finding, runs=confirmation.runs))

    def tell_rate(self, confirmation: Confirmation) -> None:
        """How often it failed again."""
        self._send(Confirmed(finding=self._finding, failed=len(confirmation.failures), runs=confirmation.runs))

    def confirmed_as(self, suspect: Suspect) -> None:
        """Go on with what failed again; nothing that failed before says what it needs."""
        self.now, self.needed = suspect, suspect.features

    def step_to(self, suspect: Suspect) -> None:
        """Go on with ``suspect``, and tell of it."""
        self.now = suspect
        self.needed &= suspect.features
        if suspect.symptom not in self._symptoms:
            self._symptoms.append(suspect.symptom)
        self._send(
            Smaller(
                finding=self._finding,
                case=_raw(suspect.case),
                failure=suspect.told,
                preceding=tuple(map(_raw, suspect.preceding)),
            )
        )

    def step_back(self, before: Suspect) -> None:
        """Return to an earlier step: later ones say nothing."""
        self.step_to(before)
        self.needed = before.features

    def start_again(self, suspect: Suspect) -> None:
        """Take up ``suspect``, another bug, instead."""
        self.needed = suspect.features
        self._symptoms = []
        self.step_to(suspect)

    def close_as_known(self, known: KnownFindings, deaths: KnownDeaths) -> None:
        """It is a bug that is known."""
        shown_as = self._learn(known, deaths)
        self._send(Duplicate(finding=self._finding, features=self.needed, shown_as=shown_as, flaky=self.is_flaky))

    def close_as_new(
        self,
        known: KnownFindings,
        deaths: KnownDeaths,
        *,
        explain: Callable[[Suspect], Explanation],
        is_complete: bool,
        is_declarable: bool = True,
    ) -> None:
        """It is a bug of its own, as small as it gets if ``is_complete``; see `Minimised` for ``is_declarable``."""
        if not aspects(self.needed) and aspects(self.now.features):
            self.needed = self.now.features  # it slipped from one bug to another, which must not explain both
        if self.now.preceding:
            self.needed |= {NEEDS_PRECEDING}
        explanation = Explanation() if self.is_flaky else explain(self.now)
        self._send(
            Minimised(
                finding=self._finding,
                features=self.needed,
                shown_as=self._learn(known, deaths),
                complete=is_complete,
                flaky=self.is_flaky,
                explanation=explanation.lines,
                blame=explanation.blame,
                sources=explanation.sources,
                weights=explanation.rows,
                declarable=is_declarable,
            )
        )

    def _learn(self, known: KnownFindings, deaths: KnownDeaths) -> tuple[tuple[str, str], ...]:
        """Take later failures with any symptom of this bug for it; the symptoms."""
        for symptom in self._symptoms:
            signature = Signature(symptom, self.needed)
            known.add(signature, flaky=self.is_flaky)
            if not self.is_flaky:
                deaths.learn(signature)
        return tuple((symptom.oracle, symptom.kind) for symptom in self._symptoms)


def _raw(case: Case) -> msgspec.Raw:
    return msgspec.Raw(encode_case(case))
