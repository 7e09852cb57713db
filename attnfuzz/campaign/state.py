"""What an interrupted campaign needs to be continued: ``.attnfuzz/state.json``, in the format ``attnfuzz.state/1``.

Findings are in their own files as well; without this one only the continuation is lost.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.journal import remove_if_empty
from attnfuzz.campaign.messages import Known, Pursue
from attnfuzz.campaign.result import KernelStatistics, Statistics
from attnfuzz.corpus.writing import write_atomically
from attnfuzz.data_files import read_data_file
from attnfuzz.declaration import Declaration
from attnfuzz.environment import installed
from attnfuzz.oracles.verdict import Failure
from attnfuzz.problems.cases import decode_case, encode_case
from attnfuzz.problems.tolerance import Tolerance

__all__ = ["FOLDER", "Asked", "SavedFinding", "State", "StateError", "StateFile", "load_state"]

FOLDER = Path(".attnfuzz")
"""In the working directory; ignored by git."""

_FORMAT_NAME = "attnfuzz.state"
_FORMAT = f"{_FORMAT_NAME}/1"
_MAX_BYTES = 256 << 20


class StateError(ValueError):
    """There is no campaign to continue, or not like this; the message is one sentence with a remedy."""


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the campaign was asked to do, as ``startup.Request`` has it."""

    kernels: tuple[str, ...]
    budget_s: float
    save_folder: str
    workers: int | None = None
    device: str = "auto"
    oracles: tuple[str, ...] = ()
    fail_fast: bool = False
    tolerance: Tolerance = "bound"
    shared: str | None = None


class SavedFinding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A finding as it was; see `Finding` for the fields."""

    kernel: str
    case: msgspec.Raw
    failure: Failure
    first_seen_s: float
    failed: int
    runs: int
    shrunk_s: float | None
    steps: int
    features: tuple[str, ...]
    preceding: tuple[msgspec.Raw, ...] = ()
    path: str | None = None
    known_as: str | None = None
    replaces: str | None = None

    @classmethod
    def of(cls, finding: Finding) -> SavedFinding:
        """What is kept of ``finding``."""
        return cls(
            kernel=finding.declaration.target,
            case=msgspec.Raw(encode_case(finding.case)),
            failure=finding.failure,
            first_seen_s=finding.first_seen_s,
            failed=finding.failed,
            runs=finding.runs,
            shrunk_s=finding.shrunk_s,
            steps=finding.steps,
            features=tuple(sorted(finding.features)),
            preceding=tuple(msgspec.Raw(encode_case(case)) for case in finding.preceding),
            **{name: _text(getattr(finding, name)) for name in ("path", "known_as", "replaces")},
        )

    def restore(self, declaration: Declaration, name: str) -> Finding:
        """The finding, under the name ``name``."""
        problem = declaration.problem
        return Finding(
            name=name,
            declaration=declaration,
            case=decode_case(problem, bytes(self.case)),
            failure=self.failure,
            first_seen_s=self.first_seen_s,
            failed=self.failed,
            runs=self.runs,
            shrunk_s=self.shrunk_s,
            minimised=True,
            steps=self.steps,
            features=frozenset(self.features),
            preceding=tuple(decode_case(problem, bytes(case)) for case in self.preceding),
            path=_path(self.path),
            known_as=_path(self.known_as),
            replaces=_path(self.replaces),
        )


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A campaign between two of its parts. ``parts`` is how many there have been.

    ``known`` are signatures of the bugs that are done with, ``pending`` failures that are not.
    """

    format: str = _FORMAT
    version: str = installed("attnfuzz") or ""
    asked: Asked
    seed: int
    elapsed_s: float
    parts: int
    kernels: tuple[KernelStatistics, ...]
    interval_s: float
    throughput: dict[str, tuple[int, ...]]
    findings: tuple[SavedFinding, ...] = ()
    known: tuple[Known, ...] = ()
    pending: tuple[Pursue, ...] = ()

    @property
    def remaining_s(self) -> float:
        """What is left of the budget."""
        return max(0.0, self.asked.budget_s - self.elapsed_s)

    def check_kernels(self, targets: set[str]) -> None:
        """Raise StateError unless exactly these kernels were searched."""
        mine = {kernel.declaration.target for kernel in self.kernels}
        if targets != mine:
            raise StateError(
                f"the interrupted campaign searched {', '.join(sorted(mine))}, not {', '.join(sorted(targets))}; "
                "name the same kernels or none, or start a new campaign without --resume"
            )

    def fill(self, statistics: Statistics) -> None:
        """Have ``statistics``, which are new, go on from here. Kernels declare what they do now."""
        for kernel in self.kernels:
            new = statistics.kernels[kernel.declaration.target]
            kernel.declaration = new.declaration
            statistics.kernels[kernel.declaration.target] = kernel
        statistics.throughput.interval_s = self.interval_s
        statistics.throughput.counts = {device: list(counts) for device, counts in self.throughput.items()}


class StateFile:
    """The file of the campaign that runs in this working directory, which is locked for it.

    ``is_usable`` is false where nothing can be written, or another campaign runs here: then nothing is.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._path = folder / "state.json"
        self._lock: int | None = None
        with suppress(OSError):  # then it is not usable
            folder.mkdir(exist_ok=True)
            self._lock = os.open(folder / "state.lock", os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._lock)
                self._lock = None

    @property
    def is_usable(self) -> bool:
        """Whether a state can be written."""
        return self._lock is not None

    @property
    def has_state(self) -> bool:
        """Whether there is a campaign to go on with."""
        return self._path.exists()

    def write(self, state: State) -> None:
        """Replace the file. A full disk costs only the chance to resume, and is not spoken of."""
        if self._lock is not None:
            with suppress(OSError):  # as the docstring says
                # what was asked may hold the password of a --shared server
                write_atomically(self._path, msgspec.json.encode(state), private=True)

    def remove(self) -> None:
        """There is nothing to continue."""
        if self._lock is not None:
            with suppress(OSError):  # a folder that cannot be written any more: the old state stays
                self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let other campaigns run here."""
        if self._lock is not None:
            with suppress(OSError):  # an unlocked file that stays behind keeps nobody out
                self._path.with_suffix(".lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None
        remove_if_empty(self._path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load_state(folder: Path = FOLDER) -> State:
    """The state that an interrupted campaign left. Raises StateError."""
    path = folder / "state.json"
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise StateError(f"{path} is larger than {_MAX_BYTES} bytes; remove it and start without --resume")
        data = read_data_file(path, _MAX_BYTES)
    except FileNotFoundError:
        raise StateError(
            f"there is no interrupted campaign to resume: {path.resolve()} does not exist; run from the folder in "
            "which it was started, or start one without --resume"
        ) from None
    except OSError as error:
        raise StateError(f"{path} cannot be read ({error.strerror}); start without --resume") from error
    return _decode(path, data)


class _Header(msgspec.Struct):
    format: str
    version: str


def _decode(path: Path, data: bytes) -> State:
    try:
        header = msgspec.json.decode(data, type=_Header)
        _check_header(path, header)
        return msgspec.json.decode(data, type=State)
    except msgspec.DecodeError as error:
        raise StateError(f"{path} is no state of a campaign ({error}); remove it and start without --resume") from error


def _check_header(path: Path, header: _Header) -> None:
    mine = installed("attnfuzz") or ""
    if header.format != _FORMAT or header.version != mine:
        raise StateError(
            f"{path} is of attnfuzz {header.version or 'of unknown version'} in the format {header.format!r}, and this "
            f"is attnfuzz {mine or 'of unknown version'}, which reads {_FORMAT!r} of its own; resume with the version "
            "that began, or start without --resume"
        )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
