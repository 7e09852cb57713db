"""Names of exit statuses."""

import signal

import pytest

from attnfuzz.execution.outcomes import signal_name


@pytest.mark.parametrize(
    ("status", "name"),
    [(0, None), (255, None), (-signal.SIGSEGV, "SIGSEGV"), (-signal.SIGKILL, "SIGKILL"), (-40, "SIG40")],
)
def test_signals_are_named(status: int, name: str | None) -> None:
    """Reports would show numbers, or an exit code for a signal."""
    assert signal_name(status) == name
