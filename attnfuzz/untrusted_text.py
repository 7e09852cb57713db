"""Text of code under test and of strangers' files: cleaned and cut before anybody else sees it. Torch-free.

A kernel chooses its exceptions' texts, the names of its functions and files, and what it prints. Any of these may hold
escape sequences that a terminal obeys, characters that JSON, XML or Python refuse, or fifty megabytes; and asking an
exception for its text runs the kernel's code, which may raise.
"""

from __future__ import annotations

import functools
import linecache
import os
import re
import stat
import traceback
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

TEXT_BYTES = 4096
"""Limit of one text, in UTF-8."""
DETAILS_BYTES = 4 * TEXT_BYTES
"""Limit of all further lines together: stacks and explanations are among them."""
NAME_BYTES = 200
"""Limit of the name of a type, a function, an option."""

SENTENCE_BYTES = 1024
"""Limit of a refusal, whatever the file holds that it quotes."""

_HARMFUL = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of control characters, invisible ones that change how others are read or ordered, halves of
surrogate pairs and separators of lines."""
_TAB = "    "
_REMARK_BYTES = 64
_LINE_BYTES = 300
_MAX_SOURCE_BYTES = 4 << 20


def printable(text: str, limit: int = TEXT_BYTES, *, lines: bool = False) -> str:
    """``text`` on one line, harmful characters written as escapes; ``lines`` keeps the ends of lines.

    Of what would take more than ``limit`` bytes the middle is left out, and how much that is stands in its place. What
    has been cleaned once is not changed again.
    """
    text = _exact(text)
    if len(text) <= limit:
        whole = only_printable(text) if lines else only_printable(text).replace("\n", "\\n")
        if len(whole) * 4 <= limit or len(whole.encode()) <= limit:
            return whole
    room = limit - _REMARK_BYTES
    head = _as_much_as_fits(text[:limit], room * 3 // 4, lines=lines)
    tail = _as_much_as_fits(text[: -limit - 1 : -1], room - room * 3 // 4, lines=lines)[::-1]
    left_out = len(text) - len(head) - len(tail)
    return f"{''.join(head)} ... ({left_out} characters left out) ... {''.join(tail)}"


def only_printable(text: str) -> str:
    """``text`` with its lines as they are, whatever its length, and harmful characters written as escapes."""
    if text.isprintable():
        return text
    return "".join(_visible(one) for one in text.replace("\r\n", "\n"))


def printable_lines(lines: Iterable[str], limit: int = DETAILS_BYTES) -> tuple[str, ...]:
    """Each of ``lines`` as `printable` has it; of more than ``limit`` bytes in all those in the middle are left out.

    One that holds ends of lines becomes several.
    """
    cleaned = [printable(line) for one in map(_exact, lines) for line in (one.splitlines() if "\n" in one else [one])]
    if sum(map(_bytes_of, cleaned)) <= limit:
        return tuple(cleaned)
    room = limit - _REMARK_BYTES
    head = list(_lines_that_fit(cleaned, room * 3 // 4))
    tail = list(_lines_that_fit(cleaned[: len(head) - 1 if head else None : -1], room - room * 3 // 4))[::-1]
    return (*head, f"... ({len(cleaned) - len(head) - len(tail)} lines left out)", *tail)


def check_text(name: str, text: object, limit: int = NAME_BYTES) -> None:
    """Raise ValueError unless ``text``, which tells one thing from others, can be shown unchanged."""
    if not isinstance(text, str) or printable(text, limit) != text:
        shown = printable(ascii(text), NAME_BYTES)
        raise ValueError(f"{name}={shown} must be text of at most {limit} bytes without control characters; shorten it")


def text_of(error: BaseException) -> str:
    """The message of ``error``, in lines; if ``error`` raises when asked, that it does."""
    try:
        text = str(error)
    except BaseException as failed:  # noqa: BLE001 - it is the kernel's code that runs here, and its words that are lost
        return f"(asked for its text, it raised {type_name(failed)})"
    return printable(text, lines=True)


_GPU_ERROR = re.compile(r"(?:CUDA error|Triton Error \[CUDA\]|CUDA driver error): *(?:an? )?(?P<what>[^\n.]*)")


def gpu_error_in(text: str) -> str:
    """The CUDA error in ``text``, in a few words: "illegal memory access"; empty if there is none."""
    found = _GPU_ERROR.search(text)
    return found["what"].removesuffix(" was encountered").strip() if found else ""


def type_name(thing: object) -> str:
    """The name of its type, which no metaclass is asked for."""
    name: str = vars(type)["__name__"].__get__(type(thing))
    return printable(name, NAME_BYTES)


def cause_of(error: BaseException) -> BaseException | None:
    """The exception that ``error`` was raised from, past whatever its class calls ``__cause__``."""
    cause: BaseException | None = vars(BaseException)["__cause__"].__get__(error)
    return cause


@dataclass(frozen=True, slots=True)
class Frame:
    """File, line and function of one frame of a stack, as the code says: there need be no such file."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.position}, in {self.function}"

    @property
    def position(self) -> str:
        """File and line."""
        return f"{self.path}:{self.line}"

    def with_source(self) -> str:
        """With the text of the line, if that can be read."""
        source = code_line(self.path, self.line)
        return f"{self}: {source}" if source else str(self)


def places(error: BaseException) -> Iterator[Frame]:
    """Where ``error`` came from, outermost first; no file is looked at for it."""
    trace: TracebackType | None = vars(BaseException)["__traceback__"].__get__(error)
    for frame, line in traceback.walk_tb(trace):
        code = frame.f_code
        yield Frame(printable(code.co_filename), line, printable(code.co_name, NAME_BYTES))


Author = Literal["attnfuzz", "project", "installed", "library"]
"""Who wrote some code: ``project`` is a team's own, attnfuzz's bundled kernels among it; ``installed`` may be an
engine's, and ``library`` holds nobody's kernels: Python, torch, Triton, NumPy."""

_PACKAGE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - compared with what code calls its file
_BUNDLED = tuple(
    f"{folder}{os.sep}" for folder in (f"{_PACKAGE}{os.sep}kernels", os.path.realpath(f"{_PACKAGE}{os.sep}kernels"))
)
_INSTALLED = re.compile(r"[/\\](?:site-packages|dist-packages)[/\\](?P<package>[^/\\]*)")
_PYTHON = re.compile(r"[/\\]lib[/\\]python3[^/\\]*[/\\]|^<frozen ")
_LIBRARIES = ("torch", "triton", "numpy")


@functools.lru_cache(maxsize=1024)
def author_of(path: str) -> Author:
    """Whose the code is that calls its file ``path``, by the folders alone: nothing is looked at.

    Only the folder that this very package lies in is attnfuzz's: a clone, or a team's project, may be called so too.
    """
    if path.startswith(_BUNDLED):
        return "project"
    if path.startswith(f"{_PACKAGE}{os.sep}"):
        return "attnfuzz"
    if installed := _INSTALLED.search(path):
        return "library" if installed["package"] in _LIBRARIES else "installed"
    return "library" if _PYTHON.search(path) else "project"


def kernel_frames(frames: Iterable[Frame]) -> list[Frame]:
    """The frames of the code under test, in their order: of the team's own code, or else of what is installed."""
    frames = list(frames)
    own = [frame for frame in frames if author_of(frame.path) == "project"]
    return own or [frame for frame in frames if author_of(frame.path) == "installed"]


def code_line(path: str, line: int) -> str:
    """Line ``line`` of a file that code under test has named; empty unless that is an ordinary file of source."""
    try:
        status = os.stat(path)  # noqa: PTH116 - what code calls its file need not be a path
    except (OSError, ValueError):  # ValueError: a null byte
        return ""
    if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= _MAX_SOURCE_BYTES:
        return ""
    return printable(linecache.getline(path, line).strip(), _LINE_BYTES)


def _exact(text: str) -> str:
    """A plain string: the methods of a subclass are the kernel's code."""
    return text if type(text) is str else str.__getitem__(text, slice(None))


def _visible(character: str) -> str:
    if character == "\t":
        return _TAB
    if character != "\n" and unicodedata.category(character) in _HARMFUL:
        return character.encode("unicode_escape").decode()
    return character


def _as_much_as_fits(characters: str, room: int, *, lines: bool) -> list[str]:
    """The first of ``characters`` as they are shown, in at most ``room`` bytes."""
    shown: list[str] = []
    for character in characters:
        one = "\\n" if character == "\n" and not lines else _visible(character)
        room -= len(one.encode())
        if room < 0:
            break
        shown.append(one)
    return shown


def _bytes_of(line: str) -> int:
    return len(line.encode()) + 1


def _lines_that_fit(lines: Iterable[str], room: int) -> Iterator[str]:
    for line in lines:
        room -= _bytes_of(line)
        if room < 0:
            return
        yield line
