"""attnfuzz.campaign.shared, against a real Redis server: findings reach others, and its absence stops nobody."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from attnfuzz.campaign.elsewhere import FoundElsewhere, encode_found
from attnfuzz.campaign.messages import Known
from attnfuzz.campaign.shared import SharedFindings
from attnfuzz.campaign.shared_key import shared_key
from attnfuzz.declaration import Declaration
from tests.unit.redis_server import RedisServer, free_port
from tests.unit.saved_findings import TARGET, a_finding

Result = TypeVar("Result")

KERNEL = Declaration(name="mine", problem="dense_decode", target=TARGET)
OTHER = Declaration(name="other", problem="dense_decode", target="mine.py:other")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


def found(length: int, *features: str, kernel: str = TARGET) -> FoundElsewhere:
    known = Known(kernel=kernel, oracle="accuracy", kind="out:value", features=frozenset(features))
    regression = a_finding(length, *features, kernel=kernel)
    return FoundElsewhere(host="node1", known=(known,), regression=regression)


def shared(url: str, *kernels: Declaration) -> SharedFindings:
    return SharedFindings(url, kernels or (KERNEL,), every_s=0.05)


def eventually(question: Callable[[], Result]) -> Result:
    """The first answer that says anything."""
    deadline = time.monotonic() + 20.0
    while not (answer := question()):
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.01)
    return answer


def test_what_one_tells_the_other_hears_once(server: RedisServer) -> None:
    """Eight machines would look into one bug eight times."""
    with shared(server.url) as one, shared(server.url) as other:
        one.tell(found(2, "seq_len>1"))
        assert eventually(other.heard) == [found(2, "seq_len>1")]
        other.tell(found(3, "strides:q"))
        assert eventually(one.heard) == [found(3, "strides:q")]
        time.sleep(0.3)
        assert (one.heard(), other.heard()) == ([], [])
        assert (one.notes(), other.notes()) == ([], [])


def test_a_machine_that_comes_late_hears_everything(server: RedisServer) -> None:
    """Jobs of an array start when there is room for them."""
    with shared(server.url) as one:
        for length in (2, 3):
            one.tell(found(length, "seq_len>1"))
    with shared(server.url) as late:
        heard = late.heard()  # at once: before the first worker starts
    assert sorted(heard, key=str) == [found(2, "seq_len>1"), found(3, "seq_len>1")]


def test_only_what_is_known_of_the_same_kernels_is_heard(server: RedisServer) -> None:
    """Campaigns on different kernels, or different versions of one, share a server."""
    repaired = Declaration(name="mine", problem="dense_decode", target=TARGET, options={"tile": (16,)})
    with (
        shared(server.url, KERNEL, OTHER) as one,
        shared(server.url, OTHER) as two,
        shared(server.url, repaired) as new,
    ):
        one.tell(found(2, "seq_len>1"))
        one.tell(found(3, kernel=OTHER.target))
        assert eventually(two.heard) == [found(3, kernel=OTHER.target)]
        assert new.heard() == []


def test_a_server_that_is_not_there_is_one_note_until_it_comes(tmp_path: Path) -> None:
    """The server is a job of the cluster like any other, and may start last."""
    port = free_port()
    with shared(f"redis://127.0.0.1:{port}/0") as one:
        one.tell(found(2, "seq_len>1"))
        (note,) = eventually(one.notes)
        assert f"127.0.0.1:{port}" in note
        assert "goes on alone" in note
        time.sleep(0.3)
        assert one.notes() == []
        with RedisServer(tmp_path, port=port) as server, shared(server.url) as other:
            assert eventually(other.heard) == [found(2, "seq_len>1")]
            (note,) = eventually(one.notes)
            assert "answers" in note


def test_a_server_that_was_lost_and_forgot_everything_is_told_again(server: RedisServer) -> None:
    """A restarted server would leave machines that start later to find every bug themselves."""
    with shared(server.url) as one:
        one.tell(found(2, "seq_len>1"))
        eventually(lambda: server.client().keys())
        server.kill()
        assert "goes on alone" in eventually(one.notes)[0]
        one.tell(found(3, "strides:q"))
        server.start()
        assert "answers" in eventually(one.notes)[0]
        with shared(server.url) as other:
            heard = eventually(other.heard)
    assert sorted(heard, key=str) == [found(2, "seq_len>1"), found(3, "strides:q")]


def test_the_last_words_are_told(server: RedisServer) -> None:
    """What is found in the last second of a campaign counts as much."""
    with SharedFindings(server.url, [KERNEL], every_s=60.0) as one:
        eventually(lambda: one._database)
        one.tell(found(2, "seq_len>1"))
    with shared(server.url) as other:
        assert eventually(other.heard) == [found(2, "seq_len>1")]


def test_a_server_that_accepts_and_says_nothing_holds_nobody_up() -> None:
    """A campaign would stop with its server, in the middle of the night."""
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        with shared(f"redis://127.0.0.1:{silent.getsockname()[1]}/0") as one:
            started = time.monotonic()
            one.tell(found(2, "seq_len>1"))
            assert one.heard() == []
            assert time.monotonic() - started < 0.5
            (note,) = eventually(one.notes)
            closes = time.monotonic()
        assert "does not answer" in note
        assert time.monotonic() - closes < 4.0


def test_other_entries_are_passed_over_with_one_note(server: RedisServer) -> None:
    """The database may be somebody else's too, and what it holds is not to be trusted."""
    client = server.client()
    for rubbish in (b"x" * (2 << 20), b"{", b'{"format": "attnfuzz.shared/9", "host": "", "known": []}', b"\xff"):
        client.sadd(b"attnfuzz:" + shared_key(KERNEL), rubbish)
    with shared(server.url) as one, shared(server.url) as other:
        one.tell(found(2, "seq_len>1"))
        assert eventually(other.heard) == [found(2, "seq_len>1")]
        (note,) = eventually(other.notes)
        assert "it is ignored" in note


def test_of_thousands_of_entries_some_are_read_and_one_sentence_told(server: RedisServer) -> None:
    """Each is compared with all others, and printed: 3,000 held a campaign of 25 s up for 64 s."""
    key = b"attnfuzz:" + shared_key(KERNEL)
    server.client().sadd(key, *(encode_found(found(2, f"strides:{i}")) for i in range(3000)))
    with shared(server.url) as one:
        heard, notes = list[FoundElsewhere](), list[str]()
        while not notes:
            heard += one.heard()
            notes += eventually(one.notes)
        time.sleep(0.3)
        heard += one.heard()
        assert len(heard) == 128
        assert one.notes() == []
        assert "holds more than the 128 entries that were read: the others are left out" in notes[0]
        own = found(3, "seq_len>1")
        one.tell(own)
        eventually(lambda: encode_found(own) in server.client().smembers(key))


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """The address of a server that sends whatever ``answer`` does to everybody who connects."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:  # closed
                    return
                with connection, suppress(OSError):  # the campaign has hung up
                    connection.recv(1 << 16)
                    answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}/0"
        listening.shutdown(socket.SHUT_RDWR)


def endless(connection: socket.socket) -> None:
    connection.sendall(b"$4000000000\r\n")
    while True:
        connection.sendall(bytes(1 << 20))


def dripping(connection: socket.socket) -> None:
    connection.sendall(b"$4000\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (endless, "it sends more than 32 MiB at once"),
        (dripping, "Timeout reading"),
        (lambda connection: connection.sendall(b"$x\r\n" * 1000), "does not answer"),
        (lambda connection: connection.sendall(b"\x00\xff\x1b[2J\r\n" * 1000), "does not answer"),
        (lambda connection: connection.sendall(b"*1\r\n" * 100_000), "does not answer"),
        (lambda connection: connection.sendall(b"-" + b"e" * 10_000 + b"\r\n"), "does not answer"),
    ],
    ids=["endless", "dripping", "no number", "no text", "nested", "long error"],
)
def test_a_server_that_answers_nonsense_is_away(answer: Callable[[socket.socket], object], words: str) -> None:
    """It would fill the memory, hold its thread for ever, or end it with a traceback."""
    with answering(answer) as url, shared(url) as one:
        (note,) = eventually(one.notes)
        assert words in note
        assert "goes on alone" in note
        assert note.isprintable()
        assert len(note) < 600
        assert one._thread.is_alive()


def test_the_password_is_in_no_note() -> None:
    """Notes end up in logs."""
    with shared(f"redis://user:secret@127.0.0.1:{free_port()}/0") as one:
        (note,) = eventually(one.notes)
    assert "***" in note
    assert "secret" not in note
