"""The workers of a campaign: listened to, written to, and started again when something ends them."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from attnfuzz.campaign.channel import ChannelClosed
from attnfuzz.campaign.messages import FromWorker, Setup
from attnfuzz.campaign.worker_process import LastWords, Launch, WorkerHandle

__all__ = ["Crew"]

_MAX_FUTILE_STARTS = 4
"""Starts in a row of one worker, none of which led to a single case, before it is given up."""
_MAX_FUTILE_STARTS_WHEN_KILLED = 25
"""The same, where it is killed each time: whoever does that may stop."""
_GRACE_S = 1.0
_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 8.0


@dataclass(slots=True)
class _Place:
    """One worker's place, whoever fills it. ``futile`` counts starts since it last judged a case."""

    handle: WorkerHandle | None = None
    starts: int = 0
    futile: int = 0
    start_at: float | None = None


class Crew:
    """``size`` workers, started by ``launch`` with what ``setup_for(number, starts)`` says."""

    def __init__(
        self,
        size: int,
        *,
        launch: Launch,
        setup_for: Callable[[int, int], Setup],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launch = launch
        self._setup_for = setup_for
        self._clock = clock
        self._places = {number: _Place(start_at=clock()) for number in range(size)}
        self._selector = selectors.DefaultSelector()

    @property
    def working(self) -> list[int]:
        """Workers that run."""
        return [number for number, place in self._places.items() if place.handle is not None]

    @property
    def is_lost(self) -> bool:
        """Whether no worker runs and none will be started again."""
        return all(place.handle is None and place.start_at is None for place in self._places.values())

    def start_due(self) -> list[int]:
        """Start the workers whose time it is. Raises OSError if the system cannot, unless one runs or will later."""
        return [
            number
            for number, place in self._places.items()
            if place.start_at is not None and self._clock() >= place.start_at and self._start(number, place)
        ]

    def receive(self, timeout_s: float) -> Iterable[tuple[int, list[FromWorker] | None]]:
        """What workers say within ``timeout_s``; None from one that has hung up."""
        for key, _ in self._selector.select(timeout_s):
            number: int = key.data
            handle = self._places[number].handle
            if handle is None:  # lost earlier in this very loop
                continue
            try:
                yield number, handle.channel.receive()
            except (ChannelClosed, msgspec.DecodeError):  # the latter: its memory or its channel is broken
                yield number, None

    def send(self, number: int, message: msgspec.Struct) -> None:
        """Tell one worker; that it is gone is noticed when it is listened to."""
        handle = self._places[number].handle
        if handle is not None:
            with contextlib.suppress(ChannelClosed):  # noticed when it is listened to
                handle.channel.send(message)

    def broadcast(self, message: msgspec.Struct, *, but: int | None = None) -> None:
        """Tell all workers, except ``but``."""
        for number in self.working:
            if number != but:
                self.send(number, message)

    def flush(self) -> None:
        """Pass on what busy workers could not take so far."""
        for place in self._places.values():
            if place.handle is not None:
                with contextlib.suppress(ChannelClosed):  # noticed when it is listened to, as in `send`
                    place.handle.channel.flush()

    def stop(self) -> None:
        """Ask all to end, and start none again."""
        for place in self._places.values():
            place.start_at = None
            if place.handle is not None:
                place.handle.stop()

    def has_judged(self, number: int) -> None:
        """Note that a worker gets somewhere."""
        self._places[number].futile = 0

    def lose(self, number: int, *, hung_up: bool = False) -> LastWords:
        """Make sure that a worker has ended; one that has hung up is doing so."""
        place = self._places[number]
        if place.handle is None:
            raise RuntimeError(f"worker {number} does not run")
        handle, place.handle = place.handle, None
        self._selector.unregister(handle.channel)
        return handle.kill(grace_s=_GRACE_S if hung_up else 0.0)

    def start_again(self, number: int, *, killed: bool = False) -> bool:
        """Have a lost worker started again, after a pause if that is in vain; whether it will be."""
        place = self._places[number]
        if place.futile >= (_MAX_FUTILE_STARTS_WHEN_KILLED if killed else _MAX_FUTILE_STARTS):
            return False
        pause_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2**place.futile) if place.futile > 1 else 0.0
        place.start_at = self._clock() + pause_s
        return True

    def give_up(self, number: int) -> bool:
        """Never start a worker again; whether it still runs."""
        self._places[number].start_at = None
        self._places[number].futile = _MAX_FUTILE_STARTS_WHEN_KILLED
        return self._places[number].handle is not None

    def close(self) -> None:
        """End all workers."""
        for number in self.working:
            self.lose(number)
        self._selector.close()

    def _start(self, number: int, place: _Place) -> bool:
        place.start_at = None
        place.starts += 1
        place.futile += 1
        try:
            place.handle = self._launch(self._setup_for(number, place.starts - 1))
        except OSError:
            if not self.start_again(number) and self.is_lost:
                raise
            return False
        self._selector.register(place.handle.channel, selectors.EVENT_READ, number)
        return True
