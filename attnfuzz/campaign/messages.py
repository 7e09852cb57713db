"""Messages between the coordinator and its workers: one JSON line each, over a socket."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterable
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from attnfuzz.campaign.draw.compiled_fields import CompiledValues
from attnfuzz.campaign.statistics import WorkerProgress
from attnfuzz.declaration import Declaration
from attnfuzz.explaining.explanation import WeightedRow
from attnfuzz.identity.bug import Bug
from attnfuzz.judging.loaded_kernels import LOAD_TIMEOUT_S
from attnfuzz.oracles.registry import OracleName
from attnfuzz.problems.cases import Case, Problem, decode_case, encode_case
from attnfuzz.problems.declared_numerics import Tolerance
from attnfuzz.problems.feature import Feature
from attnfuzz.problems.formats import Format
from attnfuzz.problems.supports import Combination
from attnfuzz.verdict import Blame, Failure

_READ_BYTES = 1 << 16
In = TypeVar("In")


class ChannelClosed(ConnectionError):  # noqa: N818 - a condition, named for what the caller sees
    """The other side is gone."""


class Channel(Generic[In]):
    """Sends any message and receives those that ``decoder`` knows. Raises ChannelClosed once the other side is gone.

    A side that is not ``patient`` never waits for the other to read: what does not fit into the socket is kept, and
    sent with what follows or by ``flush``. If both sides waited for each other to read, neither would.
    """

    def __init__(self, connection: socket.socket, decoder: msgspec.json.Decoder[In], *, patient: bool = True) -> None:
        self._connection = connection
        self._decoder = decoder
        self._buffer = bytearray()
        self._unsent = bytearray()
        self._patient = patient
        self._ended = False
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)

    def fileno(self) -> int:
        """The socket's file descriptor, for select."""
        return self._connection.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Send one message."""
        self._unsent += msgspec.json.encode(message) + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what could not be sent before, all of it on a side that is patient."""
        flags = 0 if self._patient else socket.MSG_DONTWAIT
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent, flags)]
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed(f"cannot send: {error}") from error

    def receive(self, timeout_s: float = 0.0) -> list[In]:
        """The messages that have arrived, after waiting up to ``timeout_s`` for the first."""
        while not self._ended and self._poller.poll(1000 * timeout_s):
            try:
                data = self._connection.recv(_READ_BYTES)
            except OSError as error:
                raise ChannelClosed(f"cannot receive: {error}") from error
            self._ended = not data
            self._buffer += data
            timeout_s = 0.0
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        if self._ended and not lines:
            raise ChannelClosed("the other side closed the connection")
        return [self._decoder.decode(line) for line in lines]

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


class Warm(msgspec.Struct, tag="warm", frozen=True, kw_only=True):
    """Have an executor start CUDA on the GPU that ``device_id`` names, as in `Setup`, which is not known yet, and
    import the kernels that ``targets`` name."""

    device_id: str = ""
    targets: tuple[str, ...] = ()


class Setup(msgspec.Struct, tag="setup", frozen=True, kw_only=True):
    """The task of a worker: the first message to it but for `Warm`.

    ``kernels`` are those that can be searched everywhere; see `Join` for others.

    ``deadline`` is on the monotonic clock, which the processes of one machine share; `Begin` brings it nearer.
    ``journal`` is the file that names the case being judged.
    ``memory_limit_bytes`` bounds the resident memory of an executor. ``device_id`` is the GPU that the worker's
    executors have to themselves, as CUDA_VISIBLE_DEVICES names it; empty for all there are. ``adopting``: whether what
    kernels of the user round on purpose is found out, too. ``sharing`` is how many
    workers share it. ``watching`` and ``import_patience_s`` are those of `Runner`, and ``python``, if there is one.
    ``max_seq_len`` and ``max_seqs``: how long a sequence of a case may be, and how many there may be, if the user says.
    """

    worker: int
    num_workers: int
    seed: int
    kernels: tuple[Declaration, ...]
    deadline: float
    device: str
    oracles: tuple[OracleName, ...]
    journal: str = ""
    memory_limit_bytes: int | None = None
    device_id: str = ""
    device_label: str = ""
    sharing: int = 1
    adopting: bool = False
    tolerance: Tolerance = "bound"
    watching: bool = False
    import_patience_s: float = LOAD_TIMEOUT_S
    python: str = ""
    max_seq_len: int | None = None
    max_seqs: int | None = None


class Begin(msgspec.Struct, tag="begin", frozen=True, kw_only=True):
    """The answer to `Ready`: search until ``deadline``. What is said before it is for the search."""

    deadline: float


class WrittenFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A case that fails once those of ``preceding`` have run before it in its process, as it is sent and kept."""

    case: msgspec.Raw
    failure: Failure
    preceding: tuple[msgspec.Raw, ...] = ()

    def cases(self, problem: Problem) -> tuple[Case, tuple[Case, ...]]:
        """The case, and those before it."""
        case, *preceding = (decode_case(problem, bytes(one)) for one in (self.case, *self.preceding))
        return case, tuple(preceding)


def written(case: Case, failure: Failure, preceding: Iterable[Case]) -> dict[str, Any]:
    """The fields of a `WrittenFailure`."""
    raw = [msgspec.Raw(encode_case(one)) for one in (case, *preceding)]
    return {"case": raw[0], "failure": failure, "preceding": tuple(raw[1:])}


class Unfinished(WrittenFailure, tag="pursue", frozen=True, kw_only=True):
    """A failure to look into, which a worker that was lost (or a campaign that was cut off) had not done with."""

    kernel: str

    @property
    def key(self) -> tuple[str, bytes]:
        """Tells it from others."""
        return self.kernel, bytes(self.case)


class Busy(msgspec.Struct, tag="busy", frozen=True, kw_only=True):
    """Another worker starts (or stops) looking into a symptom."""

    kernel: str
    oracle: str
    kind: str
    busy: bool


class FormatCompiled(msgspec.Struct, tag="format_compiled", frozen=True, kw_only=True):
    """A worker has had a case judged in a format that was new to it, in ``seconds``: the others may draw from it.

    Of an open problem, which has no formats, the values of the case's fields stand for one.
    """

    kernel: str
    format: Format | CompiledValues
    seconds: float = 0.0


class Join(msgspec.Struct, tag="join", frozen=True, kw_only=True):
    """A kernel can be searched from now on: where it is ``built``, or everywhere if that is empty.

    Unless ``is_settled``, it is still being found out what the kernel takes: ``kernel`` declares no more than is known
    to be right, and cases that fail are judged again once all is known.
    """

    kernel: Declaration
    built: tuple[Combination, ...] = ()
    is_settled: bool = True

    @property
    def is_in_part(self) -> bool:
        """Whether more of the kernel is to come."""
        return bool(self.built) or not self.is_settled


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """The campaign is over."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The worker could judge a case now: all of its start-up is done."""


class Found(WrittenFailure, tag="found", frozen=True, kw_only=True):
    """A case failed; sent before anything else is done with it. Those of ``preceding`` ran before it in its process."""

    finding: str
    kernel: str


class Confirmed(msgspec.Struct, tag="confirmed", frozen=True, kw_only=True):
    """It failed ``failed`` times when run ``runs`` times more."""

    finding: str
    failed: int
    runs: int


class Unconfirmed(msgspec.Struct, tag="unconfirmed", frozen=True, kw_only=True):
    """It never failed again in ``runs`` runs.

    ``lost_together``: a process was lost while it and those before it ran there, and none of them alone loses one.
    """

    finding: str
    runs: int
    lost_together: bool = False


class Smaller(WrittenFailure, tag="smaller", frozen=True, kw_only=True):
    """A smaller case fails in the same way."""

    finding: str


class Minimised(msgspec.Struct, tag="minimised", frozen=True, kw_only=True):
    """Shrinking has ended; ``complete`` unless time ran out first.

    ``features`` are what the bug needs. ``bugs`` is what is known of it, in each way in which it showed; failures that
    one of them predicts pass silently from now on, and are counted as the finding's. ``same_as``: the tag of a finding
    that turned out to be the same bug, if there is one. ``explanation``: what is wrong, in further lines, and ``blame``
    where; ``weights`` are those that the kernel gave, to be drawn. ``declarable`` unless the kernel still fails within
    the declaration that would end the finding.
    """

    finding: str
    features: frozenset[Feature]
    bugs: tuple[Bug, ...]
    complete: bool
    same_as: str = ""
    explanation: tuple[str, ...] = ()
    blame: Blame = Blame()
    weights: tuple[WeightedRow, ...] = ()
    declarable: bool = True


class Duplicate(msgspec.Struct, tag="duplicate", frozen=True, kw_only=True):
    """It turned out to be a bug that is known, and shows in these ways too; they have the tag of the finding it is."""

    finding: str
    bugs: tuple[Bug, ...]


class Adopted(msgspec.Struct, tag="adopted", frozen=True, kw_only=True):
    """The kernel rounds on purpose as fields of `Numerics` say that it leaves open: it is searched so from now on.

    A replay of a ``failure`` named them, and its case passes with them, as others do. ``finding``: what it was so far.
    """

    kernel: str
    numerics: dict[str, str]
    failure: Failure
    finding: str = ""


class Trouble(msgspec.Struct, tag="trouble", frozen=True, kw_only=True):
    """Something went wrong, but not in a kernel.

    ``environment`` if no kernel can be run here any more: the message is one sentence with a remedy. ``device_lost`` if
    that is so only on the worker's own GPU, which does not answer. ``of_problem`` if it is a user's problem that fails.
    """

    message: str
    of_problem: bool = False
    environment: bool = False
    device_lost: bool = False


ToWorker: TypeAlias = Warm | Setup | Begin | Join | Bug | Busy | Unfinished | FormatCompiled | Stop
FromWorker: TypeAlias = (
    Ready
    | WorkerProgress
    | FormatCompiled
    | Found
    | Confirmed
    | Unconfirmed
    | Smaller
    | Minimised
    | Duplicate
    | Adopted
    | Trouble
)
