"""Every oracle, declared once, with all that is known of it where none of its code is loaded. Torch-free.

The code of an oracle is a module of its own beside this one; what others know of oracles, from the names that
``--oracle`` takes to the order of findings in reports, follows from what stands here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Annotated, Any, Literal

import msgspec

NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,63}\Z"
OracleName = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
"""The name of one of `KNOWN`, or of an oracle that a kernel's file defines: what a file may hold."""


class Severity(IntEnum):
    """The harm that a finding does, the worst for whoever maintains a kernel first."""

    WRONG = 0
    OUT_OF_BOUNDS = 1
    DEAD_MEMORY = 2
    LARGE_ADDRESSES = 3
    CONTRACT = 4
    NEAR = 5
    FLAKY = 6

    def __str__(self) -> str:
        return _WORDS[self]


_WORDS = {
    Severity.WRONG: "wrong or no result",
    Severity.OUT_OF_BOUNDS: "crash, hang or out of bounds",
    Severity.DEAD_MEMORY: "dead or unwritten memory",
    Severity.LARGE_ADDRESSES: "large addresses",
    Severity.CONTRACT: "contract question",
    Severity.NEAR: "just above its bound",
    Severity.FLAKY: "flaky",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """The facts about an oracle for all who have not loaded its code.

    - ``description``: what it objects to, in one line.
    - ``severity``: of its findings, unless a finding's own circumstances say more.
    - ``code``: where it is, "module:object" below `attnfuzz.oracles`: a function from a `Trial`, or a `Relation`.
      Empty for one that sees what is left when a process has raised, died or hung.
    - ``is_relation``: it makes further runs, of changed inputs.
    - ``compares_runs``: it sees nothing in one run by itself.
    - ``asked``: "by name" for one that sees nothing that others do not see; "elsewhere" for one that judges in
      processes of its own, and cannot be asked for together with others.
    - ``devices``: where it can judge.
    - ``costly_on``: devices on which it takes as long as hundreds of cases, and so is seldom drawn: a campaign gives
      such oracles a share of each kernel's time. ``compilations``: formats that it compiles there, about, which a case
      has not compiled; those with fewer have their turn first.
    - ``confirming_runs``: how many runs in all make sure of what it has seen in one.
    - ``ends_process``: what it sees is the end of the process; ``faults``: how those kinds of its failures begin that
      are, too.
    - ``may_be_meant``: a kernel that fails so may be right, if it says so in its declaration.
    """

    name: str
    description: str
    severity: Severity = Severity.WRONG
    code: str = ""
    is_relation: bool = False
    compares_runs: bool = False
    asked: Literal["always", "by default", "by name", "elsewhere"] = "by default"
    devices: tuple[str, ...] = ("cpu", "cuda")
    costly_on: tuple[str, ...] = ()
    compilations: int = 1
    confirming_runs: int = 3
    ends_process: bool = False
    faults: tuple[str, ...] = ()
    may_be_meant: bool = True

    @property
    def is_own(self) -> bool:
        """Whether the file of a kernel defines it."""
        return self.name not in KNOWN

    @property
    def shows_in_a_script(self) -> bool:
        """Whether a script that runs the kernel once, and compares what it returns, shows what it objects to."""
        one_run = not self.is_relation or self is GUARD_PAGE
        return one_run and not self.is_own and self.asked != "elsewhere"

    @property
    def relations(self) -> tuple[OracleName, ...]:
        """Relations to ask for, beside the usual oracles, to see its objection again: itself, if it is a relation."""
        return (self.name,) if self.is_relation else ()

    @property
    def judges_everywhere(self) -> bool:
        """Whether it has judged whatever passed, on any device."""
        return self.asked != "elsewhere" and {"cpu", "cuda"} <= set(self.devices)

    def is_fault(self, kind: str) -> bool:
        """Whether a failure of this ``kind`` says that a relation's run ended the process."""
        return kind.startswith(self.faults)

    def load(self) -> Any:
        """Its code, which needs torch."""
        module, _, name = self.code.partition(":")
        return getattr(importlib.import_module(f"attnfuzz.oracles.{module}"), name)


# In the order in which they are asked about one case, those whose word says most first. Those that need nothing but the
# two runs of a case:
RED_ZONE = Oracle(
    name="red_zone",
    description="memory that a kernel must leave alone has changed: inputs, and what lies beside any tensor",
    severity=Severity.OUT_OF_BOUNDS,
    code="red_zone:check",
    compares_runs=True,
    may_be_meant=False,
)
UNWRITTEN = Oracle(
    name="unwritten",
    description="an element of a result was never written, or memory was read before anything was written there",
    severity=Severity.DEAD_MEMORY,
    code="unwritten:check",
    compares_runs=True,
)
DEAD_MEMORY = Oracle(
    name="dead_memory",
    description="the result depends on memory that holds no token of its sequence",
    severity=Severity.DEAD_MEMORY,
    code="dead_memory:check",
    compares_runs=True,
    may_be_meant=False,
)
DETERMINISM = Oracle(
    name="determinism",
    description="two runs on the same memory give other bits, though the kernel declares itself deterministic",
    code="determinism:check",
    compares_runs=True,
    may_be_meant=False,
)
ACCURACY = Oracle(
    name="accuracy",
    description="an element is further from the float64 reference than rounding explains",
    code="accuracy:check",
)
EXCEPTION = Oracle(name="exception", description="the kernel raises, or returns what is no result")
CRASH = Oracle(
    name="crash",
    description="the process dies, or its GPU's context is lost",
    severity=Severity.OUT_OF_BOUNDS,
    asked="always",
    confirming_runs=2,
    ends_process=True,
    may_be_meant=False,
)
HANG = Oracle(
    name="hang",
    description="the kernel does not come back in time",
    severity=Severity.OUT_OF_BOUNDS,
    asked="always",
    confirming_runs=1,
    ends_process=True,
    may_be_meant=False,
)
OWN = Oracle(
    name="own",
    description="an oracle that the kernel's own file defines objects: see `attnfuzz.oracle`",
    may_be_meant=False,
)
# Those that make further runs. What may end the process comes last: where all relations judge a case, the others have
# had their say then.
PAGE_PERMUTATION = Oracle(
    name="page_permutation",
    description="other bits where the same pages lie in another order",
    code="relations.page_permutation:PAGE_PERMUTATION",
    is_relation=True,
)
PAGE_RELOCATION = Oracle(
    name="page_relocation",
    description="a wrong address where tensors are large: offsets beyond 32 bits, strides or pages that are ignored",
    severity=Severity.LARGE_ADDRESSES,
    code="relations.page_relocation:PAGE_RELOCATION",
    is_relation=True,
    costly_on=("cuda",),
    compilations=4,
    faults=("read ", "write ", "raised cuda:"),
)
BLOCK_TABLE_SLACK = Oracle(
    name="block_table_slack",
    description="other bits where the block table has other entries behind a sequence's last page",
    severity=Severity.DEAD_MEMORY,
    code="relations.block_table_slack:BLOCK_TABLE_SLACK",
    is_relation=True,
)
BATCH_INVARIANCE = Oracle(
    name="batch_invariance",
    description="other bits for a sequence alone than in its batch, though the kernel declares that there are none",
    code="relations.batch_invariance:BATCH_INVARIANCE",
    is_relation=True,
)
VALUE_AFFINITY = Oracle(
    name="value_affinity",
    description="the result does not follow values that are scaled or shifted",
    code="relations.value_affinity:VALUE_AFFINITY",
    is_relation=True,
)
RESIDUALS = Oracle(
    name="residuals",
    description="errors within their bounds that together are larger or more biased than declared roundings explain",
    code="relations.residuals:RESIDUALS",
    is_relation=True,
    costly_on=("cuda",),
    compilations=0,
)
CONTAINMENT = Oracle(
    name="containment",
    description="numbers of one sequence or head change the result of another",
    code="relations.containment:CONTAINMENT",
    is_relation=True,
)
MERGE_LAWS = Oracle(
    name="merge_laws",
    description="merging depends on the order of states, or on one that is empty",
    code="relations.merge_laws:MERGE_LAWS",
    is_relation=True,
)
LAYOUT = Oracle(
    name="layout",
    description="the same numbers in another layout give a result further away than rounding explains",
    code="relations.by_bounds:LAYOUT",
    is_relation=True,
    asked="by name",
)
REPAGING = Oracle(
    name="repaging",
    description="pages of another size give a result further away than rounding explains",
    code="relations.by_bounds:REPAGING",
    is_relation=True,
    asked="by name",
)
GQA_EXPANSION = Oracle(
    name="gqa_expansion",
    description="KV heads written out for each query head give a result further away than rounding explains",
    code="relations.by_bounds:GQA_EXPANSION",
    is_relation=True,
    asked="by name",
)
SPLIT_COUNT = Oracle(
    name="split_count",
    description="another number of splits gives a result further away than rounding explains",
    code="relations.by_bounds:SPLIT_COUNT",
    is_relation=True,
    asked="by name",
)
COMPOSE = Oracle(
    name="compose",
    description="parts of the tokens, as ranks have them, merged, give a result further away than rounding explains",
    code="relations.by_bounds:COMPOSE",
    is_relation=True,
    asked="by name",
)
PROGRAM_ORDER = Oracle(
    name="program_order",
    description="other bits where the programs of a Triton kernel run in another order, or side by side",
    code="relations.schedules:PROGRAM_ORDER",
    is_relation=True,
    devices=("cpu",),
)
CONFIGURATIONS = Oracle(
    name="configurations",
    description="a kernel with triton.autotune is wrong with another of its configurations",
    code="relations.configurations:CONFIGURATIONS",
    is_relation=True,
    costly_on=("cuda",),
    compilations=4,
    faults=("raised cuda:",),
)
CALL_SEQUENCE = Oracle(
    name="call_sequence",
    description="a call depends on the calls before it",
    code="relations.call_sequence:CALL_SEQUENCE",
    is_relation=True,
)
DELAYS = Oracle(
    name="delays",
    description="another result where programs and warps are delayed at random, or the GPU is busy",
    code="relations.schedules:DELAYS",
    is_relation=True,
    devices=("cuda",),
    costly_on=("cuda",),
    faults=("raised cuda:",),
)
GRAPH_REPLAY = Oracle(
    name="graph_replay",
    description="a captured CUDA graph, replayed, gives something else than a call",
    code="relations.graph_replay:GRAPH_REPLAY",
    is_relation=True,
    devices=("cuda",),
    costly_on=("cuda",),
    faults=("raised ",),
)
GUARD_PAGE = Oracle(
    name="guard_page",
    description="memory before or behind a tensor is read or written",
    severity=Severity.OUT_OF_BOUNDS,
    code="relations.guard_page:GUARD_PAGE",
    is_relation=True,
    costly_on=("cuda",),
    confirming_runs=2,
    faults=("read ", "write ", "raised cuda:"),
    may_be_meant=False,
)
SANITIZER = Oracle(
    name="sanitizer",
    description="NVIDIA's compute-sanitizer objects to an access, in a process of its own (`attnfuzz.sanitizer`)",
    severity=Severity.OUT_OF_BOUNDS,
    asked="elsewhere",
    devices=("cuda",),
)


KNOWN: dict[str, Oracle] = {one.name: one for one in tuple(globals().values()) if isinstance(one, Oracle)}
"""All that are declared above, by name, in the order in which they are asked."""

ORACLES: tuple[OracleName, ...] = tuple(name for name, one in KNOWN.items() if one.asked != "elsewhere")
"""Those that can be asked for."""

DEFAULT_ORACLES: tuple[OracleName, ...] = tuple(name for name in ORACLES if KNOWN[name].asked != "by name")


def oracle_of(name: str) -> Oracle:
    """The oracle called ``name``: one of `KNOWN`, or else a user's."""
    return KNOWN.get(name) or replace(OWN, name=name)
