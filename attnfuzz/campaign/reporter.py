"""What a campaign tells whoever watches it."""

from __future__ import annotations

from typing import Protocol

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import Statistics

__all__ = ["Reporter", "SilentReporter"]


class Reporter(Protocol):
    """Called by the coordinator, always from the same thread."""

    def started(self, statistics: Statistics) -> None:
        """The kernels are known and the workers start."""

    def progress(self, statistics: Statistics) -> None:
        """Several times a second."""

    def found(self, finding: Finding) -> None:
        """A case failed; nothing is confirmed yet."""

    def confirmed(self, finding: Finding) -> None:
        """It failed again and is saved at ``finding.path``."""

    def unconfirmed(self, finding: Finding) -> None:
        """It did not fail again."""

    def known(self, finding: Finding) -> None:
        """It came down to a bug that was found before, and is forgotten."""

    def shrunk(self, finding: Finding) -> None:
        """Shrinking has ended."""

    def finished(self) -> None:
        """The workers have ended; called once, also when the campaign ends by an exception."""

    def note(self, text: str) -> None:
        """Anything else worth a line."""


class SilentReporter:
    """Says nothing; also the base of reporters that do not care for everything."""

    def started(self, statistics: Statistics) -> None: ...
    def progress(self, statistics: Statistics) -> None: ...
    def found(self, finding: Finding) -> None: ...
    def confirmed(self, finding: Finding) -> None: ...
    def unconfirmed(self, finding: Finding) -> None: ...
    def known(self, finding: Finding) -> None: ...
    def shrunk(self, finding: Finding) -> None: ...
    def finished(self) -> None: ...
    def note(self, text: str) -> None: ...
