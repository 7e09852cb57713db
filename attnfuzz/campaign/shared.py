"""Findings exchanged with other machines through a Redis server, in a thread that no campaign waits for.

The server is Hypothesis's own `RedisExampleDatabase`: a set of findings for each kernel. It may go away and come back
at any time; a campaign that it leaves alone goes on, and catches up later.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Self, TypeVar

from attnfuzz.campaign.elsewhere import FoundElsewhere, decode_found, encode_found
from attnfuzz.campaign.shared_key import shared_key
from attnfuzz.declaration import Declaration
from attnfuzz.redis_url import without_password

if TYPE_CHECKING:
    from hypothesis.extra.redis import RedisExampleDatabase

__all__ = ["SharedFindings", "open_database"]

Item = TypeVar("Item")

_EVERY_S = 1.0
_LONGEST_PAUSE_S = 10.0
_ANSWER_WITHIN_S = 2.0
_FIRST_WORDS_S = 1.0
_LAST_WORDS_S = 1.5
_KEPT = timedelta(days=8)
"""After its last use; what Hypothesis chooses too: a bug that a weekly run finds is still known to the next."""


def open_database(url: str) -> RedisExampleDatabase:
    """The database at ``url``; nothing is sent to the server yet."""
    from hypothesis.extra.redis import RedisExampleDatabase
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    client = Redis.from_url(
        url, socket_timeout=_ANSWER_WITHIN_S, socket_connect_timeout=_ANSWER_WITHIN_S, retry=Retry(NoBackoff(), 0)
    )
    return RedisExampleDatabase(
        client, expire_after=_KEPT, key_prefix=b"attnfuzz:", listener_channel="attnfuzz-changes"
    )


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
        self._is_away = False
        self._has_noted_rubbish = False
        self._has_tried = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attnfuzz-shared", daemon=True)
        self._thread.start()
        self._has_tried.wait(_FIRST_WORDS_S)

    def tell(self, found: FoundElsewhere) -> None:
        """Have other campaigns know of a bug."""
        self._to_tell.put((self._keys[found.known[0].kernel], encode_found(found)))

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
            except (RedisError, OSError) as error:
                self._note_away(error)
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
            self._database = open_database(self._url)
        database = self._database
        self._told += _drain(self._to_tell)
        for key, value in self._untold():
            database.save(key, value)
            self._seen.add(value)
        for target, key in self._keys.items() if not last else ():
            for value in database.fetch(key):
                self._take(target, value)
        self._note_back()

    def _untold(self) -> Sequence[tuple[bytes, bytes]]:
        """After an outage everything: the server may have lost it."""
        return [(key, value) for key, value in self._told if self._is_away or value not in self._seen]

    def _take(self, target: str, value: bytes) -> None:
        if value in self._seen:
            return
        self._seen.add(value)
        try:
            self._heard.put(decode_found(value, kernel=target, source=self._server))
        except ValueError as error:
            if not self._has_noted_rubbish:
                self._has_noted_rubbish = True
                self._notes.put(f"{error}; it is ignored: give attnfuzz a database of its own, such as .../1")

    def _note_away(self, error: Exception) -> None:
        if not self._is_away:
            self._is_away = True
            self._notes.put(
                f"{self._server} does not answer ({error}): the campaign goes on alone and tries again; "
                "nothing that is found is lost"
            )

    def _note_back(self) -> None:
        if self._is_away:
            self._is_away = False
            self._notes.put(f"{self._server} answers: findings are exchanged with other machines")


def _drain(items: queue.SimpleQueue[Item]) -> list[Item]:
    found = []
    while True:
        try:
            found.append(items.get_nowait())
        except queue.Empty:
            return found
