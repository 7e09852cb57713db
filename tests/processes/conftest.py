"""Executors that several files need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attnfuzz.isolation.executor import Executor
from attnfuzz.isolation.zygote_client import Zygote
from tests.common.execution_clients import SERVICES


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """Forks executors of a service that misbehaves in every way a kernel can."""
    with Zygote.start(service=f"{SERVICES}:Rogue", preload=()) as started:
        yield started


@pytest.fixture
def executor(zygote: Zygote) -> Iterator[Executor]:
    with Executor(zygote) as started:
        yield started
