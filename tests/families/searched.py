"""What a search of a planted kernel comes to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

import attnfuzz


def found_of(kernel: Any, *, max_examples: int = 150) -> list[attnfuzz.KernelFailure]:
    """What a search of ``kernel`` finds, the same in each run: once in thirty a smaller case is missed."""
    before = settings.get_current_profile_name()
    settings.load_profile("ci")

    @attnfuzz.fuzz(kernel, max_examples=max_examples, device="cpu")
    def search() -> None:
        pass

    settings.load_profile(before)
    with pytest.raises((attnfuzz.KernelFailure, ExceptionGroup)) as caught:  # a group of those that show it twice
        search()
    raised = caught.value
    found = raised.exceptions if isinstance(raised, ExceptionGroup) else (raised,)
    assert all(isinstance(one, attnfuzz.KernelFailure) for one in found)
    return [one for one in found if isinstance(one, attnfuzz.KernelFailure)]


def smallest_cases(kernel: Any, *, max_examples: int = 150) -> list[Any]:
    """The cases to which what is found of ``kernel`` is shrunk; of a bug that shows in two ways, both. One at least."""
    return [one.case for one in found_of(kernel, max_examples=max_examples)]
