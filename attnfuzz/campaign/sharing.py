"""A campaign's part in the exchange with other machines."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from attnfuzz.campaign.elsewhere import Elsewhere, FoundElsewhere
from attnfuzz.campaign.identity.finding import Finding
from attnfuzz.campaign.messages import Duplicate, Known, Minimised

__all__ = ["Exchange", "Sharing"]


class Exchange(Protocol):
    """The way to other machines (`attnfuzz.campaign.shared`); no method waits."""

    def tell(self, found: FoundElsewhere) -> None:
        """Have other campaigns know of a bug."""

    def heard(self) -> list[FoundElsewhere]:
        """What other campaigns have found since this was last asked."""

    def notes(self) -> list[str]:
        """Sentences for the user, each once."""


class Sharing:
    """Passes findings on in both directions; does nothing without an ``exchange``.

    ``learn`` is called with what others found, ``note`` with what the user should read.
    """

    def __init__(
        self, exchange: Exchange | None, *, device: str, learn: Callable[[Known], None], note: Callable[[str], None]
    ) -> None:
        self._exchange = exchange
        self._device = device
        self._host = socket.gethostname()
        self._learn = learn
        self._note = note
        self._elsewhere = Elsewhere()

    def tell(self, finding: Finding, closed: Minimised | Duplicate, known: Sequence[Known]) -> None:
        """Have others know of ``finding``, which this campaign has just ``closed``."""
        if self._exchange is None or not known:
            return
        regression = finding.regression(self._device) if isinstance(closed, Minimised) else None
        self._exchange.tell(FoundElsewhere(host=self._host, known=tuple(known), regression=regression))

    def listen(self) -> None:
        """Learn what others have found since the last time."""
        if self._exchange is None:
            return
        for text in self._exchange.notes():
            self._note(text)
        for found in self._exchange.heard():
            for known in found.known:
                self._learn(known)
            if self._elsewhere.add(found):
                self._note(f"known elsewhere: {found}")

    def elsewhere(self, findings: Iterable[Finding]) -> tuple[FoundElsewhere, ...]:
        """The bugs that others have found, and this campaign has not."""
        return self._elsewhere.besides(findings)
