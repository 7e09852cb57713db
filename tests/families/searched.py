"""What a search of a planted kernel comes to."""

from __future__ import annotations

from typing import Any

import pytest

import attnfuzz


def smallest_cases(kernel: Any, *, max_examples: int = 150) -> list[Any]:
    """The cases to which what is found of ``kernel`` is shrunk; of a bug that shows in two ways, both. One at least."""

    @attnfuzz.fuzz(kernel, max_examples=max_examples, device="cpu")
    def search() -> None:
        pass

    with pytest.raises((attnfuzz.KernelFailure, ExceptionGroup)) as caught:
        search()
    raised = caught.value
    found: list[Any] = []
    for one in raised.exceptions if isinstance(raised, ExceptionGroup) else (raised,):
        assert isinstance(one, attnfuzz.KernelFailure)
        found.append(one.case)
    return found
