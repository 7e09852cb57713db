"""Whether a relation, and nothing else, objects to a kernel."""

from __future__ import annotations

from attnfuzz.declaration import Kernel
from attnfuzz.judging.judge import judge
from attnfuzz.oracles.registry import DEFAULT_ORACLES, OracleName
from attnfuzz.problems.cases import Case
from attnfuzz.verdict import Failure

MEMORY_FAULTS: frozenset[OracleName] = frozenset({"guard_page", "page_relocation"})
"""Take processes of their own."""


def objection(name: OracleName, kernel: Kernel, case: Case, *, inquire: bool = False) -> Failure | None:
    """What the relation `name` says of a case to which nothing else objects; with its cause if told to `inquire`."""
    others = tuple(oracle for oracle in DEFAULT_ORACLES if oracle != name and oracle not in MEMORY_FAULTS)
    assert judge(kernel, case, device="cpu", oracles=others, relations="all").failure is None
    return judge(kernel, case, device="cpu", relations=(name,), inquire=inquire).failure
