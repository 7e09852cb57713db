"""The state with which an interrupted campaign continues: ``.attnfuzz/state.json``, in the format ``attnfuzz.state/1``.

Findings are in their own files as well; without this one only the continuation is lost. It is read as strictly as a
regression file: whoever hands on a folder hands on what lies in it, and this file names others that are replaced.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.judge.journal import FOLDER, remove_if_empty
from attnfuzz.campaign.messages import Unfinished, WrittenFailure, written
from attnfuzz.campaign.result import Statistics
from attnfuzz.campaign.statistics import MAX_INTERVALS, Count, KernelStatistics
from attnfuzz.config import MAX_ASKED_LENGTH, MAX_ASKED_SEQS, MAX_SEED, MAX_WORKERS
from attnfuzz.corpus import MAX_PRECEDING
from attnfuzz.corpus.reading import what_is_wrong
from attnfuzz.data_files import read_data_file
from attnfuzz.declaration import Declaration
from attnfuzz.environment import installed
from attnfuzz.identity.bug import Bug
from attnfuzz.oracles.registry import OracleName
from attnfuzz.own_files import LinkError, OwnFolder
from attnfuzz.problems.cases import Problem, decode_case
from attnfuzz.problems.declared_numerics import Tolerance
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.limits import CaseTooLarge, check_size
from attnfuzz.problems.supports import Supports
from attnfuzz.untrusted_text import SENTENCE_BYTES, check_text, printable
from attnfuzz.verdict import MOST_PLACES, Sight

FALLBACK = FOLDER / "findings"
"""Where findings go, relative to the working directory, if the folder for them cannot be written."""
LAST_RESORT = "attnfuzz-findings-"
"""How the name of a folder for temporary files begins, where they go if that cannot be written either."""
_STATE = "state.json"
_LOCK = "state.lock"
_FORMAT_NAME = "attnfuzz.state"
_FORMAT = f"{_FORMAT_NAME}/1"
_MAX_BYTES = 32 << 20
_SHOWN_BYTES = 1 << 20
"""Largest file of which a wrong value is shown: that takes the whole of it as objects."""
_REMEDY = "remove it and start without --resume"
_YEARS_S = 1e9
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_LONGEST_PATH = 4096


class StateError(ValueError):
    """There is no campaign to continue, or not like this; the message is one sentence with a remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, SENTENCE_BYTES))


_Span = Annotated[float, msgspec.Meta(ge=0, le=_YEARS_S)]


class AskedOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The request of the campaign, as `CampaignRequest` has it.

    ``python`` is only told: no file has a say in which program runs.
    """

    kernels: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    budget_s: _Span
    save_folder: Annotated[str, msgspec.Meta(min_length=1)]
    workers: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    oracles: tuple[OracleName, ...] = ()
    fail_fast: bool = False
    tolerance: Tolerance = "bound"
    pedantic: bool = False
    max_seq_len: Annotated[int, msgspec.Meta(ge=1, le=MAX_ASKED_LENGTH)] | None = None
    max_seqs: Annotated[int, msgspec.Meta(ge=1, le=MAX_ASKED_SEQS)] | None = None
    python: str = ""

    def __post_init__(self) -> None:
        check_text("python", self.python, _LONGEST_PATH)
        check_text("save_folder", self.save_folder, _LONGEST_PATH)
        for kernel in self.kernels:
            check_text("a kernel", kernel, 2 * _LONGEST_PATH)


_AS_THEY_ARE = (
    "first_seen_s", "failed", "runs", "shrunk_s", "steps", "tag", "also", "remedy", "cases_seen",
)  # fmt: skip
_PATHS = ("path", "known_as", "replaces")


class SavedFinding(WrittenFailure, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A finding as it was; see `Finding` for the fields."""

    kernel: str
    first_seen_s: _Span
    failed: Count
    runs: Count
    shrunk_s: _Span | None
    steps: Count
    features: tuple[Feature, ...]
    preceding: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_PRECEDING)] = ()
    path: str | None = None
    known_as: str | None = None
    replaces: str | None = None
    tag: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{6})?$")] = ""
    also: Annotated[tuple[Sight, ...], msgspec.Meta(max_length=MOST_PLACES)] = ()
    remedy: Supports | None = None
    cases_seen: Count = 1

    def __post_init__(self) -> None:
        if self.failed > self.runs:
            raise ValueError(f"failed={self.failed} must be between 0 and runs={self.runs}")

    @classmethod
    def of(cls, finding: Finding) -> SavedFinding:
        """The part of ``finding`` that is kept."""
        paths: dict[str, Any] = {
            name: None if (path := getattr(finding, name)) is None else str(path) for name in _PATHS
        }
        return cls(
            kernel=finding.declaration.target,
            features=tuple(sorted(finding.features)),
            **written(finding.case, finding.failure, finding.preceding),
            **{name: getattr(finding, name) for name in _AS_THEY_ARE},
            **paths,
        )

    def restore(self, declaration: Declaration, name: str) -> Finding:
        """The finding, under the name ``name``."""
        case, preceding = self.cases(declaration.problem)
        paths: dict[str, Any] = {name: None if (text := getattr(self, name)) is None else Path(text) for name in _PATHS}
        return Finding(
            name=name,
            declaration=declaration,
            case=case,
            failure=self.failure,
            preceding=preceding,
            minimised=True,
            features=frozenset(self.features),
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            **paths,
        )


class CampaignState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A campaign between two of its parts. ``parts`` is how many there have been.

    ``known`` are the bugs that are done with, ``pending`` failures that are not.
    """

    format: str = _FORMAT
    version: str = installed("attnfuzz") or ""
    asked: AskedOf
    seed: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)]
    elapsed_s: _Span
    parts: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
    kernels: tuple[KernelStatistics, ...]
    interval_s: Annotated[float, msgspec.Meta(ge=1, le=_YEARS_S)]
    throughput: dict[str, Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_INTERVALS)]]
    findings: tuple[SavedFinding, ...] = ()
    known: tuple[Bug, ...] = ()
    pending: tuple[Unfinished, ...] = ()

    @property
    def remaining_s(self) -> float:
        """Seconds that are left of the budget."""
        return max(0.0, self.asked.budget_s - self.elapsed_s)

    def check_kernels(self, declarations: Iterable[Declaration]) -> None:
        """Raise StateError unless exactly these kernels were searched, for what they compute now."""
        problems = {declaration.target: declaration.problem for declaration in declarations}
        mine, targets = self.problems, set(problems)
        for target in targets & set(mine):
            if problems[target] != mine[target]:
                raise StateError(
                    f"{target} computes {problems[target]}, and {mine[target]} when the campaign was interrupted; "
                    "start a new one without --resume"
                )
        if targets != set(mine):
            raise StateError(
                f"the interrupted campaign searched {', '.join(sorted(mine))}, not {', '.join(sorted(targets))}; "
                "name the same kernels or none, or start a new campaign without --resume"
            )

    @property
    def problems(self) -> dict[str, Problem]:
        """Problems of the kernels that were searched, by target."""
        return {kernel.declaration.target: kernel.declaration.problem for kernel in self.kernels}

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

    ``is_usable`` is false where nothing can be written, or another campaign runs here: then nothing is. Raises
    LinkError for a link in place of the folder, or of a file or folder in it that a campaign writes to.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = OwnFolder(folder, below=folder.parent)
        self._lock: int | None = None
        try:
            self._folder.make()
            for name in (_STATE, FALLBACK.name):
                self._folder.refuse_link(name)
            self._lock = self._folder.open_file(_LOCK)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except LinkError:
            raise
        except OSError:  # then it is not usable
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    @property
    def is_usable(self) -> bool:
        """Whether a state can be written."""
        return self._lock is not None

    @property
    def has_state(self) -> bool:
        """Whether there is a campaign to go on with."""
        return (self._folder.path / _STATE).exists()

    def write(self, state: CampaignState) -> None:
        """Replace the file. A full disk costs only the chance to resume, and is not spoken of."""
        if self._lock is not None:
            with suppress(OSError):  # as the docstring says
                self._folder.write(_STATE, msgspec.json.encode(state), private=True)

    def remove(self) -> None:
        """There is nothing to continue."""
        if self._lock is not None:
            with suppress(OSError):  # a folder that cannot be written any more: the old state stays
                self._folder.remove(_STATE)

    def close(self) -> None:
        """Let other campaigns run here."""
        if self._lock is not None:
            with suppress(OSError):  # an unlocked file that stays behind keeps nobody out
                self._folder.remove(_LOCK)
            os.close(self._lock)
            self._lock = None
        remove_if_empty(self._folder.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def load_state(folder: Path = FOLDER) -> CampaignState:
    """The state that an interrupted campaign left. Raises StateError."""
    path = folder / _STATE
    try:
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


def _decode(path: Path, data: bytes) -> CampaignState:
    try:
        header = msgspec.json.decode(data, type=_Header)
        _check_header(path, header)
        state = msgspec.json.decode(data, type=CampaignState)
    except msgspec.ValidationError as error:
        document: Any = {}
        with suppress(*_UNREADABLE):  # what comes first is wrong already, and that is told
            document = msgspec.json.decode(data) if len(data) <= _SHOWN_BYTES else {}
        raise StateError(what_is_wrong(error, document, "$", f"{path} is no state of a campaign", _REMEDY)) from error
    except _UNREADABLE as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise StateError(f"{path} is no state of a campaign, but no complete JSON ({reason}); {_REMEDY}") from error
    for place, rule in _contradictions(state):
        raise StateError(f"{path} is no state of a campaign: {rule} - at `{place}`; {_REMEDY}")
    return state


def _contradictions(state: CampaignState) -> Iterator[tuple[str, str]]:
    """Where, and how, parts of a state do not go together; what is said of cases too."""
    problems = state.problems
    if len(problems) != len(state.kernels):
        yield "$.kernels", "a kernel is there twice"
    folders = {Path(state.asked.save_folder).resolve(), FALLBACK.resolve()}
    known: tuple[tuple[str, Iterable[Any]], ...] = (
        ("findings", state.findings), ("known", state.known), ("pending", state.pending)
    )  # fmt: skip
    for name, entries in known:
        for i, entry in enumerate(entries):
            place = f"$.{name}[{i}]"
            if entry.kernel not in problems:
                yield f"{place}.kernel", f"{entry.kernel!r:.80} must be one of the kernels"
            elif name != "known":
                yield from _wrong_cases(entry, problems[entry.kernel], place)
            if isinstance(entry, SavedFinding):
                yield from _wrong_paths(entry, folders, place)


def _wrong_cases(entry: SavedFinding | Unfinished, problem: Problem, place: str) -> Iterator[tuple[str, str]]:
    places = ((f"{place}.preceding[{i}]", case) for i, case in enumerate(entry.preceding))
    for where, case in ((f"{place}.case", entry.case), *places):
        try:
            check_size(decode_case(problem, bytes(case)))
        except (*_UNREADABLE, CaseTooLarge) as error:
            yield where, str(error).replace(" - at `$", ", at `$")


def _wrong_paths(finding: SavedFinding, folders: set[Path], place: str) -> Iterator[tuple[str, str]]:
    """A file of a finding is replaced and removed as it shrinks, so it is one of those that a campaign writes."""
    for name in ("path", "known_as", "replaces"):
        text = getattr(finding, name)
        if text is None:
            continue
        try:
            check_text(name, text, _LONGEST_PATH)
            path = Path(text)
            folder = path.parent.resolve()
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
            yield f"{place}.{name}", str(error)
            continue
        is_last_resort = folder.parent == Path(tempfile.gettempdir()).resolve() and folder.name.startswith(LAST_RESORT)
        if path.suffix != ".json" or not (folder in folders or is_last_resort):
            yield f"{place}.{name}", f"{text!r:.200} must be a regression file in the folder that findings go to"


def _check_header(path: Path, header: _Header) -> None:
    mine = installed("attnfuzz") or ""
    if header.format != _FORMAT or header.version != mine:
        raise StateError(
            f"{path} is of attnfuzz {header.version or 'of unknown version'} in the format {header.format!r}, and this "
            f"is attnfuzz {mine or 'of unknown version'}, which reads {_FORMAT!r} of its own; resume with the version "
            "that began, or start without --resume"
        )


_EVERY_S = 5.0
_AT_MOST_EVERY_S = 0.5


class StateWriter:
    """Writes to ``file`` every few seconds, and soon after ``news``."""

    def __init__(self, file: StateFile, asked: AskedOf, *, parts: int = 0) -> None:
        self._file = file
        self._asked = asked
        self._parts = parts
        self._last = time.monotonic()
        self._news = False

    def news(self) -> None:
        """Something was found that should not wait."""
        self._news = True

    @property
    def is_due(self) -> bool:
        """Whether it is time to write."""
        interval_s = _AT_MOST_EVERY_S if self._news else _EVERY_S
        return time.monotonic() - self._last >= interval_s

    def write(
        self, statistics: Statistics, findings: Sequence[Finding], known: Sequence[Bug], pending: Sequence[Unfinished]
    ) -> None:
        """Write how things stand. ``known`` are the bugs of ``findings`` that are done with."""
        self._last, self._news = time.monotonic(), False
        elapsed_s = statistics.elapsed_s()
        cut_off = [finding.unfinished() for finding in findings if finding.shrunk_s is None]
        state = CampaignState(
            asked=msgspec.structs.replace(self._asked, budget_s=elapsed_s + statistics.remaining_s()),
            seed=statistics.seed,
            elapsed_s=elapsed_s,
            parts=self._parts + 1,
            kernels=tuple(statistics.kernels.values()),
            interval_s=statistics.throughput.interval_s,
            throughput={device: tuple(counts) for device, counts in statistics.throughput.counts.items()},
            findings=tuple(map(SavedFinding.of, findings)),
            known=tuple(known),
            pending=tuple({one.key: one for one in (*pending, *cut_off)}.values()),
        )
        self._file.write(state)

    def remove(self) -> None:
        """The campaign has run to its end."""
        self._file.remove()
