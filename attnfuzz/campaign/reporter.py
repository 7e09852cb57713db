"""What a campaign tells whoever watches it."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.result import Statistics

__all__ = ["ForgivingReporter", "Reporter", "SilentReporter"]


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
        """It did not fail again: a flaky finding, saved at ``finding.path``, or nothing."""

    def known(self, finding: Finding) -> None:
        """It came down to a bug that was found before, and is forgotten."""

    def smaller(self, finding: Finding) -> None:
        """A smaller case fails in the same way; called for every step of shrinking."""

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
    def smaller(self, finding: Finding) -> None: ...
    def shrunk(self, finding: Finding) -> None: ...
    def finished(self) -> None: ...
    def note(self, text: str) -> None: ...


class ForgivingReporter:
    """Passes everything on, and lives with an output that is gone: a closed terminal, a pipe without a reader, a full
    disk. What was found is saved whether anybody reads of it or not."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def started(self, statistics: Statistics) -> None:
        with suppress(OSError):
            self._reporter.started(statistics)

    def progress(self, statistics: Statistics) -> None:
        with suppress(OSError):
            self._reporter.progress(statistics)

    def found(self, finding: Finding) -> None:
        with suppress(OSError):
            self._reporter.found(finding)

    def confirmed(self, finding: Finding) -> None:
        with suppress(OSError):
            self._reporter.confirmed(finding)

    def unconfirmed(self, finding: Finding) -> None:
        with suppress(OSError):
            self._reporter.unconfirmed(finding)

    def known(self, finding: Finding) -> None:
        with suppress(OSError):
            self._reporter.known(finding)

    def smaller(self, finding: Finding) -> None:
        with suppress(OSError):
            self._reporter.smaller(finding)

    def shrunk(self, finding: Finding) -> None:
        with suppress(OSError):
            self._reporter.shrunk(finding)

    def finished(self) -> None:
        with suppress(OSError):
            self._reporter.finished()

    def note(self, text: str) -> None:
        with suppress(OSError):
            self._reporter.note(text)
