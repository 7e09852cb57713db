"""What a command refuses to do: one sentence on stderr, exit status 2, no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

__all__ = ["Refusal", "refusing"]


class Refusal(click.ClickException):
    """Wrong usage or environment."""

    exit_code = 2


@contextmanager
def refusing() -> Iterator[None]:
    """Turn what the user or the machine got wrong into a Refusal; bugs of the framework are `main`'s to tell."""
    from attnfuzz.campaign.saved.state import StateError
    from attnfuzz.config import ConfigurationError
    from attnfuzz.corpus import RegressionError
    from attnfuzz.declaration import KernelLoadError
    from attnfuzz.isolation.outcomes import ExecutorUnavailable
    from attnfuzz.isolation.pythons import PythonError
    from attnfuzz.own_errors import in_one_sentence
    from attnfuzz.problems.limits import CaseTooLarge

    try:
        yield
    except (ConfigurationError, RegressionError, KernelLoadError, CaseTooLarge, StateError, PythonError) as error:
        raise Refusal(str(error)) from error
    except ExecutorUnavailable as error:  # with the last output of a process that could not be started
        raise Refusal(in_one_sentence(str(error))) from error
