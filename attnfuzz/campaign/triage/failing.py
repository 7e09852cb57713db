"""A case that failed once: where every finding begins."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from attnfuzz.campaign.identity.signature import Symptom, failure_features
from attnfuzz.declaration import Declaration
from attnfuzz.judging.leaks import LEAK
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import Case

__all__ = ["FailingCase", "may_be_leak", "may_be_the_machine"]


@dataclass(frozen=True, slots=True)
class FailingCase:
    """A case that failed, and the cases that ran before it in the same process."""

    declaration: Declaration
    case: Case
    failure: Failure
    preceding: tuple[Case, ...] = ()

    @property
    def symptom(self) -> Symptom:
        """Kernel, oracle and kind."""
        return Symptom.of(self.declaration.target, self.failure)

    @property
    def features(self) -> frozenset[str]:
        """What makes the case more than the simplest one, as far as the failure may need it."""
        return failure_features(self.declaration, self.case, self.failure)

    def as_(self, case: Case, failure: Failure) -> FailingCase:
        """Another case of the same kernel, with the same ones before it."""
        return FailingCase(self.declaration, case, failure, self.preceding)

    @property
    def told(self) -> Failure:
        """The failure, with what it needs besides the case."""
        if not self.preceding:
            return self.failure
        others = "another case has" if len(self.preceding) == 1 else f"{len(self.preceding)} other cases have"
        message = f"{self.failure.message}; only after {others} run in the same process"
        return msgspec.structs.replace(self.failure, message=message)


_OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError")


def may_be_leak(failure: Failure) -> bool:
    """Whether the process, or what the kernel may have of the GPU, ran out of memory."""
    if failure.oracle == "crash":
        return failure.kind == "memory"
    return failure.oracle == "exception" and failure.kind.split(" ")[0] in _OUT_OF_MEMORY


_OF_THE_MACHINE = ("SIGKILL", "zygote", LEAK)


def may_be_the_machine(failure: Failure) -> bool:
    """Whether no kernel need be at fault: it took too long, memory ran out or grew, or somebody killed the process.

    Anything else, a wrong number above all, comes of no load: a kernel that shows it once fails now and then.
    """
    if failure.oracle == "hang" or may_be_leak(failure):
        return True
    return failure.oracle == "crash" and failure.kind in _OF_THE_MACHINE
