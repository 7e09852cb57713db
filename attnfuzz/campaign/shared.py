"""Findings exchanged with other machines through a Redis server, in a thread that no campaign waits for.

The server is Hypothesis's own `RedisExampleDatabase`: a set of findings for each kernel. It may go away and come back
at any time; a campaign that it leaves alone goes on, and catches up later. It is not trusted: bytes and seconds of an
exchange are limited, and so are the entries that are read in all.
"""

from __future__ import annotations

import hashlib
import math
import queue
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar

from attnfuzz.campaign.elsewhere import MAX_BYTES, FoundElsewhere, decode_found, encode_found
from attnfuzz.campaign.shared_key import shared_key
from attnfuzz.declaration import Declaration
from attnfuzz.redis_url import without_password

if TYPE_CHECKING:
    from hypothesis.extra.redis import RedisExampleDatabase

__all__ = ["Allowance", "SharedFindings", "open_database"]

Item = TypeVar("Item")

_PREFIX = b"attnfuzz:"
_EVERY_S = 1.0
_LONGEST_PAUSE_S = 10.0
_ANSWER_WITHIN_S = 2.0
_FIRST_WORDS_S = 1.0
_LAST_WORDS_S = 1.5
_LOOK_S = 1.0
_PAGE = 32
_ENOUGH_BYTES = 8 << 20
"""After which the rest waits for the next look."""
_MOST_BYTES = 32 << 20
"""Received in one exchange, whatever was asked for."""
_MOST_S = 5.0
"""That answers of one exchange may take together: a byte now and then would do for `_ANSWER_WITHIN_S`."""
_MOST_ENTRIES = 128
"""Read in all, be they findings or not: each is compared with all others."""
_MOST_CHARACTERS = 300
_KEPT = timedelta(days=8)
"""After its last use; what Hypothesis chooses too: a bug that a weekly run finds is still known to the next."""


@dataclass(slots=True)
class Allowance:
    """What a server may still send in this exchange."""

    nbytes: int = _MOST_BYTES
    until: float = math.inf

    def renew(self) -> None:
        """Begin another exchange."""
        self.nbytes, self.until = _MOST_BYTES, time.monotonic() + _MOST_S

    def take(self, nbytes: int) -> None:
        """Raises OSError once there was too much, or it took too long."""
        self.nbytes -= nbytes
        if self.nbytes < 0:
            raise OSError(f"it sends more than {_MOST_BYTES >> 20} MiB at once")
        if time.monotonic() > self.until:
            raise TimeoutError(f"it takes more than {_MOST_S:.0f} s")


class _BoundedSocket:
    """A socket that receives no more than it is allowed to."""

    def __init__(self, connected: socket.socket, allowance: Allowance) -> None:
        self._connected = connected
        self._allowance = allowance

    def recv(self, size: int) -> bytes:
        """As a socket's. Raises OSError too once the allowance is spent."""
        data = self._connected.recv(size)
        self._allowance.take(len(data))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connected, name)


def open_database(url: str, allowance: Allowance | None = None) -> RedisExampleDatabase:
    """The database at ``url``, which may send what ``allowance`` says; nothing is sent to the server yet."""
    from hypothesis.extra.redis import RedisExampleDatabase
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    client = Redis.from_url(
        url, socket_timeout=_ANSWER_WITHIN_S, socket_connect_timeout=_ANSWER_WITHIN_S, retry=Retry(NoBackoff(), 0)
    )
    pool = client.connection_pool
    connection_class: Any = pool.connection_class  # with or without TLS, as the address says
    bound = allowance or Allowance()

    class Bounded(connection_class):  # type: ignore[misc]  # the class is known when the address is
        def _connect(self) -> Any:
            return _BoundedSocket(super()._connect(), bound)

    pool.connection_class = Bounded
    return RedisExampleDatabase(client, expire_after=_KEPT, key_prefix=_PREFIX, listener_channel="attnfuzz-changes")


class SharedFindings:
    """What is found here, told to other campaigns on the same kernels, and what they found. A context manager.

    It is made once the server has said what it knows, or has not answered for a second. After that every method returns
    at once; only `close` waits a little for what is still to be told.
    """

    def __init__(
        self,
        url: str,
        kernels: Iterable[Declaration],
        *,
        every_s: float = _EVERY_S,
    ) -> None:
        self._url = url
        self._server = without_password(url)
        self._every_s = every_s
        self._keys = {declaration.target: shared_key(declaration) for declaration in kernels}
        self._database: RedisExampleDatabase | None = None
        self._to_tell: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[FoundElsewhere] = queue.SimpleQueue()
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._told: list[tuple[bytes, bytes]] = []
        self._seen: set[bytes] = set()
        self._allowance = Allowance()
        self._cursors = dict.fromkeys(self._keys.values(), 0)
        self._read = 0
        self._hears = True
        self._is_away = False
        self._has_noted_rubbish = False
        self._has_tried = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attnfuzz-shared", daemon=True)
        self._thread.start()
        self._has_tried.wait(_FIRST_WORDS_S)

    def tell(self, found: FoundElsewhere) -> None:
        """Have other campaigns know of a bug, unless its case is larger than they would read."""
        entry = encode_found(found)
        if len(entry) <= MAX_BYTES:
            self._to_tell.put((self._keys[found.known[0].kernel], entry))

    def heard(self) -> list[FoundElsewhere]:
        """What other campaigns have found since this was last asked."""
        return _drain(self._heard)

    def notes(self) -> list[str]:
        """Sentences for the user, each once."""
        return _drain(self._notes)

    def close(self) -> None:
        """Tell what is still to be told, unless the server does not answer, and end."""
        self._closing.set()
        self._thread.join(_LAST_WORDS_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        from redis.exceptions import RedisError

        pause_s = self._every_s
        while True:
            is_last = self._closing.is_set()
            try:
                self._exchange(last=is_last)
                pause_s = self._every_s
            except (RedisError, OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                self._note_away(error)  # all but the first two: the client cannot make sense of the answer
                if self._database is not None:
                    self._database.redis.close()
                    self._database = None
                pause_s = min(2 * pause_s, max(_LONGEST_PAUSE_S, self._every_s))
            self._has_tried.set()
            if is_last:
                break
            self._closing.wait(pause_s)
        if self._database is not None:
            self._database.redis.close()

    def _exchange(self, *, last: bool) -> None:
        """Tell first, so that nothing is lost if this is the last time. Raises RedisError and OSError."""
        if self._database is None:
            self._database = open_database(self._url, self._allowance)
        database = self._database
        self._allowance.renew()
        self._told += _drain(self._to_tell)
        for key, value in self._untold():
            database.save(key, value)
            self._seen.add(_digest(value))
        if self._hears and not last:
            for target, key in self._keys.items():
                self._look(database, target, key)
        self._note_back()

    def _look(self, database: RedisExampleDatabase, target: str, key: bytes) -> None:
        """Take what is new of one kernel, page by page; what there is no time for has its turn at the next look."""
        started = time.monotonic()
        database.redis.expire(_PREFIX + key, _KEPT)
        while self._hears:
            reply: Any = database.redis.sscan(_PREFIX + key, cursor=self._cursors[key], count=_PAGE)
            cursor, values = reply
            for value in values:
                self._take(target, value)
            self._cursors[key] = int(cursor)
            is_late = time.monotonic() - started > _LOOK_S / len(self._keys)
            if not self._cursors[key] or is_late or self._allowance.nbytes < _MOST_BYTES - _ENOUGH_BYTES:
                break

    def _untold(self) -> Sequence[tuple[bytes, bytes]]:
        """After an outage everything: the server may have lost it."""
        return [(key, value) for key, value in self._told if self._is_away or _digest(value) not in self._seen]

    def _take(self, target: str, value: bytes) -> None:
        digest = _digest(value)
        if digest in self._seen or not self._hears:
            return
        if self._read == _MOST_ENTRIES:
            self._hears = False
            self._notes.put(
                f"{self._server} holds more than the {_MOST_ENTRIES} entries that were read: the others are left out, "
                "and what is found here is still told; give attnfuzz a database of its own, such as .../1"
            )
            return
        self._read += 1
        self._seen.add(digest)
        try:
            self._heard.put(decode_found(value, kernel=target, source=self._server))
        except ValueError as error:
            if not self._has_noted_rubbish:
                self._has_noted_rubbish = True
                self._notes.put(f"{_plain(error)}; it is ignored: give attnfuzz a database of its own, such as .../1")

    def _note_away(self, error: Exception) -> None:
        if not self._is_away:
            self._is_away = True
            self._notes.put(
                f"{self._server} does not answer ({_plain(error)}): the campaign goes on alone and tries again; "
                "nothing that is found is lost"
            )

    def _note_back(self) -> None:
        if self._is_away:
            self._is_away = False
            self._notes.put(f"{self._server} answers: findings are exchanged with other machines")


def _digest(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=16).digest()


def _plain(error: Exception) -> str:
    """Its words, which may be the server's, fit for a terminal."""
    text = "".join(character if character.isprintable() else "?" for character in str(error))
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _drain(items: queue.SimpleQueue[Item]) -> list[Item]:
    found = []
    while True:
        try:
            found.append(items.get_nowait())
        except queue.Empty:
            return found
