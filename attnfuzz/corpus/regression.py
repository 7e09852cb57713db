"""The regression file format: a case (and those it needs before it), the kernel it failed on, what the oracle said."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal

import msgspec

from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.cases import Case, Problem
from attnfuzz.problems.declared_numerics import Numerics
from attnfuzz.problems.open_cases import OpenCase, OpenProblem
from attnfuzz.problems.supports import Supports
from attnfuzz.untrusted_text import NAME_BYTES, printable
from attnfuzz.verdict import Blame, Failure, Sight, SourceLine, finding_name, make_printable

FORMAT_NAME = "attnfuzz.regression"
FORMAT_VERSION = 1
FORMAT = f"{FORMAT_NAME}/{FORMAT_VERSION}"
MAX_PRECEDING = 64
"""Cases that a failing one may need before it."""

Status = Literal["open", "fixed"]
Issue = Annotated[str, msgspec.Meta(pattern=r"^(https?://[a-zA-Z0-9_.~:/?#@!$&*+,;=%-]{1,400})?\Z")]
"""Where a bug is discussed: a web address, or empty."""

_SINCE = ("tensor", "cause", "maybe", "blame", "also", "remedy", "sources")
"""Fields that older files lack: left out where there is nothing to say."""
_RATE = ("failed", "runs")
_RECORDED_PACKAGES = ("attnfuzz", "torch", "triton", "hypothesis", "msgspec")
_THE_DRIVERS = ("attnfuzz", "hypothesis")
"""Packages of which the driver's versions count, wherever kernels run: they draw the case."""


class FindingRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The oracle's verdict on the case when it was saved.

    ``kind`` and ``features`` (what the case still needs away from its simplest value) tell one bug from another.
    ``cause``, ``maybe``, ``tensor``, ``blame`` and ``sources`` are those of `Failure`. ``also``: other ways in which
    the bug showed. ``remedy``: what a kernel declares that is not meant to do better.
    A flaky case failed in ``failed`` of ``runs`` runs; both are 0, and left out of the file, for one that always does.
    What a stranger's file says is made fit to be shown, as what a kernel says is in a `Failure`.
    """

    oracle: OracleName
    message: str
    kind: str = ""
    details: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    failed: int = 0
    runs: int = 0
    tensor: str = ""
    cause: str = ""
    maybe: tuple[str, ...] = ()
    blame: Blame = Blame()
    also: tuple[Sight, ...] = ()
    remedy: Supports | None = None
    sources: tuple[SourceLine, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.failed <= self.runs:
            raise ValueError(f"failed={self.failed} must be between 0 and runs={self.runs}")
        make_printable(self)
        msgspec.structs.force_setattr(self, "cause", printable(self.cause, NAME_BYTES))

    @property
    def name(self) -> str:
        """Name of the finding."""
        return finding_name(self.oracle, self.kind, self.cause)

    @property
    def is_flaky(self) -> bool:
        """Whether some of the runs passed."""
        return self.failed < self.runs

    @classmethod
    def of(
        cls,
        failure: Failure,
        features: Iterable[str] = (),
        *,
        failed: int = 0,
        runs: int = 0,
        also: tuple[Sight, ...] = (),
        remedy: Supports | None = None,
    ) -> FindingRecord:
        """The record of an oracle's failure, with its rate if it is flaky."""
        return cls(
            oracle=failure.oracle,
            message=failure.message,
            kind=failure.kind,
            details=failure.details,
            features=tuple(sorted(features)),
            failed=failed,
            runs=runs,
            tensor=failure.tensor,
            cause=failure.cause,
            maybe=failure.maybe,
            blame=failure.blame,
            also=also,
            remedy=remedy,
            sources=failure.sources,
        )


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the finding was made: package versions, the device's name, the date (ISO 8601, UTC)."""

    versions: dict[str, str] = {}
    device: str = ""
    date: str = ""


class Regression(msgspec.Struct, frozen=True, kw_only=True):
    """One regression file.

    ``problem`` is a bundled one, or says where a user's lives and what the fields of its cases are: in the file, these
    are ``fields``, so that a case is checked without loading anything.
    ``kernel`` is the target that loads the kernel: a bundled name, ``module:name`` or ``path/to/file.py:name``.
    ``case`` fails once the cases of ``preceding``, if there are any, have run before it in the same process.
    ``assumed`` is what the kernel was found not to take where its declaration leaves that open, ``assumed_numerics``
    what it was found to round on purpose; the case is judged by these, unless the kernel declares them by now.
    ``status`` is ``"open"`` while the case still fails and ``"fixed"`` once it must pass. ``issue`` is the address
    of the issue about it, ``note`` is for people.
    """

    problem: Problem
    kernel: str
    case: Case
    preceding: tuple[Case, ...] = ()
    assumed: Supports | None = None
    assumed_numerics: Numerics | None = None
    finding: FindingRecord
    status: Status = "open"
    issue: str = ""
    note: str = ""
    environment: Environment = Environment()


def as_of(regression: Regression, problem: Problem) -> Regression:
    """``regression`` with cases of ``problem``, if that is its own and the fields have changed since it was saved.

    Of another problem as it is. Raises ValueError for a case that the problem no longer has.
    """
    own = regression.problem
    if not isinstance(own, OpenProblem) or not isinstance(problem, OpenProblem) or own == problem:
        return regression
    if not problem.is_same(own):
        return regression
    case, *preceding = (
        problem.refitted(one) if isinstance(one, OpenCase) else one for one in (regression.case, *regression.preceding)
    )
    return msgspec.structs.replace(regression, problem=problem, case=case, preceding=tuple(preceding))


def current_environment(device: str, executors: Mapping[str, str] | None = None) -> Environment:
    """Versions of what is installed, without importing any of it.

    ``executors``: what is installed where kernels run, ``python`` included, if that is another environment.
    """
    versions = {"python": platform.python_version()}
    if executors is not None:
        versions = {name: executors[name] for name in ("python", *_RECORDED_PACKAGES) if name in executors}
    for package in _RECORDED_PACKAGES if executors is None else _THE_DRIVERS:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # attnfuzz run from a clone; a machine without triton
            continue
    return Environment(versions=versions, device=device, date=datetime.now(UTC).date().isoformat())


def encode_regression(regression: Regression) -> bytes:
    """Indented JSON for review; equal regressions give equal bytes."""
    own = regression.problem
    described = {"problem": own.place, "fields": own.fields} if isinstance(own, OpenProblem) else {"problem": own}
    fields: dict[str, Any] = {"format": FORMAT, **described, **msgspec.structs.asdict(regression), **described}
    if not regression.preceding:
        del fields["preceding"]
    if not regression.issue:
        del fields["issue"]
    if regression.assumed is None:
        del fields["assumed"]
    else:
        fields["assumed"] = regression.assumed.declared()
    if regression.assumed_numerics is None:
        del fields["assumed_numerics"]
    else:
        fields["assumed_numerics"] = regression.assumed_numerics.declared()
    finding = msgspec.structs.asdict(regression.finding)
    left_out = {name for name in _SINCE if not finding[name] or finding[name] == Blame()}
    left_out.update(_RATE if not regression.finding.runs else ())
    if regression.finding.remedy is not None:
        finding["remedy"] = regression.finding.remedy.declared()
    fields["finding"] = {name: value for name, value in finding.items() if name not in left_out}
    document = msgspec.to_builtins(fields, order="deterministic", str_keys=True)
    if isinstance(own, OpenProblem):  # whose order says which counts most
        document["fields"] = {name: document["fields"][name] for name in own.fields}
    ordered = {name: document[name] for name in fields}  # the order of the fields, not of the alphabet
    return msgspec.json.format(msgspec.json.encode(ordered), indent=2) + b"\n"
