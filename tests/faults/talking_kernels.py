"""Kernels whose own words could end a campaign: exceptions that cannot be printed, floods, escape sequences."""

from __future__ import annotations

import os
import socket
import struct
import sys
from types import FrameType
from typing import Any, NoReturn

import attnfuzz
from attnfuzz.isolation.messages import Request
from attnfuzz.kernels import eager

SUPPORTS = attnfuzz.Supports(dtypes=("float32",), head_sizes=(16,), strides="contiguous")
HARMFUL = "\x1b[31mred\x1b[0m \x9b2J \x07 \x00 \u202eright-to-left\u2066 \r over"


def _refuse(*_: object) -> NoReturn:
    raise RuntimeError("no comment")


MuteError: type[Exception] = type(
    "MuteError",
    (Exception,),
    {"__str__": _refuse, "__repr__": _refuse} | dict.fromkeys(("__class__", "__notes__", "args"), property(_refuse)),
)
"""Raises whatever it is asked."""

Words: type[str] = type("Words", (str,), dict.fromkeys(("strip", "splitlines", "encode", "__getitem__"), _refuse))
"""Text whose methods raise."""


class StrangeError(Exception):
    def __str__(self) -> str:
        return Words("words of a kind")


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def mute(inputs: Any) -> None:
    raise MuteError


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def strange(inputs: Any) -> None:
    raise StrangeError


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def halved(inputs: Any) -> None:
    raise ValueError("half of a pair: \ud800 and \udfff")


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def long_winded(inputs: Any) -> None:
    raise ValueError("first line\n" + "words " * 8_000_000)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def colourful(inputs: Any) -> None:
    def shout() -> None:
        raise ValueError(f"{HARMFUL}\nand {HARMFUL}")

    shout.__code__ = shout.__code__.replace(co_name="\x1b[2Jshout\x00", co_filename="/nowhere/\x1b[7m\x00.py")
    shout()


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def prints_and_exits(inputs: Any) -> None:
    print(f'{HARMFUL}\n  File "/dev/zero", line {"9" * 5000} in read\n  File "/dev/zero", line 1 in read', flush=True)
    os._exit(3)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def returns_mutely(inputs: Any) -> Any:
    return MuteError()


def _answer(body: bytes) -> None:
    """Send ``body`` to the driver as the answer to its present call."""
    found: dict[type, Any] = {}
    frame: FrameType | None = sys._getframe()
    while frame is not None:  # outwards to the loop that serves
        for value in list(frame.f_locals.values()):
            if isinstance(value, Request | socket.socket):
                found.setdefault(type(value), value)
        frame = frame.f_back
    message = b'{"type":"answer","number":%d,"body":%s}' % (found[Request].number, body)
    found[socket.socket].sendall(struct.pack("!I", len(message)) + message)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def garbles(inputs: Any) -> Any:
    """Answers in place of the service: with what is no verdict, or is nested too deeply."""
    _answer(b'{"verdict":7}' if inputs.seq_lens.max() > 8 else b"[" * 100_000 + b"]" * 100_000)
    return eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def floods(inputs: Any) -> Any:
    """Answers with more than any service has to say."""
    _answer(b'"' + b"x" * (60 << 20) + b'"')
    return eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)
