"""Crafted files, each through five commands: what they name must not run, what they are must not hang or confuse."""

from __future__ import annotations

import ast
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tests.audit.auditing import Part
from tests.audit.mutating import mutated_bytes, mutated_document, nested, spliced
from tests.audit.specimens import TINY, regression_documents
from tests.audit.yard import Done, Fault, Must, Seen, Yard, faults_of

COMMANDS = ("show", "replay", "explain", "repro", "merge")
_RUNNING = ("replay", "explain", "merge")
"""Those that run a kernel."""


@dataclass(frozen=True, slots=True)
class Crafted:
    """A file: ``make`` writes it, and returns its path where that is not ``inbox/a.json`` in the project.

    ``running`` and ``reading``: what must become of it in commands that run a kernel, and in the others.
    """

    name: str
    make: Callable[[Yard], Path | bytes | None]
    running: Must = "either"
    reading: Must = "either"


def _inbox(yard: Yard) -> Path:
    folder = yard.project / "inbox"
    folder.mkdir(exist_ok=True)
    return folder / "a.json"


def _written(document: Any) -> Callable[[Yard], None]:
    def make(yard: Yard) -> None:
        _inbox(yard).write_bytes(document if isinstance(document, bytes) else spliced(document))

    return make


def _kernel(kernel: str, *modules: str) -> Callable[[Yard], None]:
    """A file that names ``kernel``; ``modules`` lie ready, relative to the project."""

    def make(yard: Yard) -> None:
        for module in modules:
            yard.plant(yard.project / module)
        _written({**TINY, "kernel": kernel.replace("FOREIGN", os.fspath(yard.foreign))})(yard)

    return make


def _finding(**changes: Any) -> dict[str, Any]:
    return {**TINY, "finding": {**TINY["finding"], **changes}}


def _paged(**changes: Any) -> dict[str, Any]:
    case = {**TINY["case"], "block_size": 16, **changes}
    return {**TINY, "problem": "paged_decode", "kernel": "paged_naive", "case": case}


_ELSEWHERE = (
    "FOREIGN/planted.py", "FOREIGN/planted.py:k", "FOREIGN/planted.py:*", "FOREIGN/planted.py:nothing",
    "FOREIGN/package/__init__.py:k", "FOREIGN/../foreign/planted.py:k", "/FOREIGN/planted.py:k",
    "../../foreign/planted.py:k", "./../../foreign/planted.py:k", "inbox/../../../foreign/planted.py:k",
    "../project/../../foreign/planted.py:k", "inbox/../../../foreign/./planted.py",
    "~/planted.py:k", "$HOME/planted.py:k", "file://FOREIGN/planted.py:k", "FOREIGN/planted.py:k:k",
    "antigravity:k", "antigravity", "this.that:k", "os:system", "builtins:exec", "__main__:k", "idlelib.idle:k",
    "attnfuzz.cli:main", "attnfuzz.kernels.eager:dense_decode", "pytest:main", "lib2to3.__main__:k", "turtledemo:k",
)  # fmt: skip
"""Kernels that are neither bundled nor installed as such nor in the project; code at all of these places is planted."""

_GLOBS = ("*", "dense_*", "paged_*", "?ense_naive", "dense_naiv[e]", "[d]ense_naive", "**", "dense_*:*", ":*")

_SHADOWED = (
    "torch", "numpy", "triton", "msgspec", "click", "rich", "json", "hypothesis", "jinja2", "socket", "signal",
    "kernels", "strategies", "redis", "sitecustomize", "usercustomize", "_pytest", "encodings", "typing_extensions",
)  # fmt: skip

_TEXTS = (
    "\0", "a\0b", "\x1b[2J\x1b[31mred", "\x1b]0;title\a", "\r\b\b\bgone", "\u009b31m", "\u202eright to left", "\ud800",
    "\ud83d\ude00", "[bold]x[/nothing]", "[/]", "{{ 7 * 7 }}", '"""\nraise SystemExit(3)\n"""', "'''\\", "\\",
    "\n" * 999, "# -*- coding: utf-7 -*-", "x" * 100_000, "%s%n{0}", "",
)  # fmt: skip


def _contents() -> Iterator[Crafted]:
    yield Crafted("many options", _written(
        {**TINY, "case": {**TINY["case"], "options": {f"o{i}": i for i in range(150_000)}}}))  # fmt: skip
    yield Crafted("many columns", _written(_paged(seq_lens=[1] * 32_000, pages={"extra_columns": 4000})))
    yield Crafted("wide table", _written(_paged(seq_lens=[1] * 2000, pages={"extra_columns": 1 << 16})))
    yield Crafted("many empty sequences", _written(
        {**TINY, "case": {**TINY["case"], "seq_lens": [0] * 65_535 + [1]}}))  # fmt: skip
    yield Crafted("a billion runs", _written(_finding(failed=1, runs=10**9)))
    yield Crafted("runs past 64 bits", _written(_finding(failed=1, runs=2**63)))
    yield Crafted("an option that is no keyword", _written({**TINY, "case": {**TINY["case"], "options": {"a b": 1}}}))
    yield Crafted("preceded by many", _written({**TINY, "preceding": [TINY["case"]] * 64}))
    yield Crafted("preceded by too many", _written({**TINY, "preceding": [TINY["case"]] * 65}), "refuse", "refuse")
    yield Crafted("large and preceded by large ones", _written(
        {**TINY, "case": {**TINY["case"], "seq_lens": [1 << 24]}, "preceding": [TINY["case"]]}))  # fmt: skip
    for text in _TEXTS:
        yield Crafted(f"message {text[:9]!r}", _written(_finding(message=text, details=[text])))
        yield Crafted(f"kernel {text[:9]!r}", _written({**TINY, "kernel": text}), "refuse")
    for text in _TEXTS[:10]:
        yield Crafted(f"kind {text[:9]!r}", _written(_finding(kind=text, features=[text])))
        environment = {"versions": {text: text}, "device": text, "date": text}
        yield Crafted(f"note {text[:9]!r}", _written({**TINY, "note": text, "environment": environment}))
    for raw in (
        b"", b"\0", b"null", b"[]", b"{}", b"\xff\xfe{\0}\0", b"\xef\xbb\xbf{}", b"\x1f\x8b\x08", b"{" * 100_000,
        nested(500_000).encode(), nested(100_000, '{"a":', "}").encode(), b"\x7fELF" + bytes(1000), b"NaN",
        b'{"format": "attnfuzz.regression/2"}', b'{"format": "attnfuzz.regression/999999999999"}', b" " * (5 << 20),
        spliced(TINY)[:-1], spliced(TINY) * 2, spliced(TINY).replace(b"16", b"1e400"),
        spliced(TINY).replace(b"0.25", b"NaN"), b"cos\nsystem\n(S'id'\ntR.", b"\x80\x04\x95",
    ):  # fmt: skip
        yield Crafted(f"contents {raw[:12]!r}", _written(raw), "refuse", "refuse")


def _fifo(yard: Yard) -> None:
    os.mkfifo(_inbox(yard))


def _socket(yard: Yard) -> None:
    _inbox(yard)
    os.chdir(yard.project)  # a socket's whole path may be too long
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("inbox/a.json")


def _sparse(size: int) -> Callable[[Yard], None]:
    def make(yard: Yard) -> None:
        with _inbox(yard).open("wb") as file:
            file.truncate(size)

    return make


def _link(target: str) -> Callable[[Yard], None]:
    def make(yard: Yard) -> None:
        _inbox(yard).symlink_to(target.replace("FOREIGN", os.fspath(yard.foreign)))

    return make


def _folder_with(make_inside: Callable[[Yard], None], also: str = "b.json") -> Callable[[Yard], Path]:
    """The folder is what a command is given; an honest file lies beside the other one."""

    def make(yard: Yard) -> Path:
        make_inside(yard)
        (yard.project / "inbox" / also).write_bytes(spliced(TINY))
        return yard.project / "inbox"

    return make


def _folder(yard: Yard) -> None:
    _inbox(yard).mkdir()


def _named(name: bytes, *, exists: bool = True) -> Callable[[Yard], bytes]:
    def make(yard: Yard) -> bytes:
        if exists:
            (yard.project / os.fsdecode(name)).write_bytes(spliced(TINY))
        return name

    return make


def _linked_kernel(yard: Yard) -> None:
    (yard.project / "mine.py").symlink_to(yard.foreign / "planted.py")
    _kernel("mine.py:k")(yard)


def _linked_folder(yard: Yard) -> None:
    (yard.project / "mine").symlink_to(yard.foreign)
    _kernel("mine/planted.py:k")(yard)


def _above(yard: Yard) -> None:
    """In a folder that anyone may write to, above the project."""
    yard.room.chmod(0o1777)
    _kernel("above.py:k", "../above.py")(yard)


def _outside(yard: Yard) -> Path:
    """The file lies outside of the project, and so does what it names."""
    _kernel("beside.py:k")(yard)
    yard.plant(yard.room / "mail" / "beside.py")
    return _inbox(yard).rename(yard.room / "mail" / "a.json")


def _kernel_is_fifo(yard: Yard) -> None:
    os.mkfifo(yard.project / "fifo.py")
    _kernel("fifo.py:k")(yard)


def _in_project(yard: Yard) -> None:
    (yard.project / "mine.py").write_text(_HONEST)
    _kernel("mine.py:k")(yard)


_HONEST = """\
import attnfuzz
from attnfuzz.kernels import eager


@attnfuzz.kernel("dense_decode")
def k(inputs):
    return eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)
"""


def crafted() -> Iterator[Crafted]:
    """All of them but those that are drawn; the first are known to have done harm."""
    for kernel in _ELSEWHERE:
        yield Crafted(f"kernel {kernel}", _kernel(kernel, "../home/planted.py"), "refuse")
    yield Crafted("kernel planted above the project", _above, "refuse")
    yield Crafted("kernel planted beside a file elsewhere", _outside, "refuse")
    yield Crafted("kernel that is a link to a file elsewhere", _linked_kernel, "refuse")
    yield Crafted("kernel in a folder that is a link elsewhere", _linked_folder, "refuse")
    yield Crafted("kernel that is a FIFO", _kernel_is_fifo, "refuse")
    yield Crafted("kernel in the project", _in_project, "work", "work")
    yield Crafted("bundled kernel", _written(TINY), "work", "work")
    for module in _SHADOWED:
        yield Crafted(
            f"{module}.py beside", _kernel("dense_naive", f"{module}.py", f"inbox/{module}.py"), "work", "work"
        )
    for glob in _GLOBS:
        yield Crafted(f"glob {glob}", _kernel(glob), "refuse")
    for name, make in {
        "FIFO": _fifo, "socket": _socket, "folder": _folder, "sparse 1 GB": _sparse(1 << 30),
        "sparse 1 TB": _sparse(1 << 40), "link to a FIFO's place": _link("a.json"), "dangling link": _link("nowhere"),
        "link to /dev/zero": _link("/dev/zero"), "link to /dev/null": _link("/dev/null"),
        "link to /dev/tty": _link("/dev/tty"), "link to /proc/self/environ": _link("/proc/self/environ"),
        "link to a folder": _link("FOREIGN"), "link to a foreign file": _link("FOREIGN/precious.json"),
    }.items():  # fmt: skip
        yield Crafted(name, make, "refuse", "refuse")
        yield Crafted(f"folder with {name}", _folder_with(make), reading="refuse")  # show and repro take files only
    for path in (
        b"a" * 300 + b".json", b"a/" * 3000 + b"b.json", b"", b"\xff\xfe", b"nothing\x1b[31m.json", b"nothing\n.json",
        b"..", b"/", b"/dev/zero", b"/dev/stdin", b"/proc/self/mem", b"/dev/full", b"[bold]nothing[/x].json", b"~root",
        b"*.json", b"https://example.org/a.json",
    ):  # fmt: skip
        yield Crafted(f"path {path[:20]!r}", _named(path, exists=False), reading="refuse")
    for path in (
        b"\xff\xfe.json",
        b"[bold]x[/nothing].json",
        b"a\nb.json",
        b"\x1b[31m.json",
        b"%s{0}.json",
        b"\xe2\x80\xae.json",
    ):
        yield Crafted(f"honest file called {path[:20]!r}", _named(path))
    yield from _contents()


class Files(Part):
    inputs: ClassVar[int] = 242
    patience_s: ClassVar[float] = 1200.0

    def __init__(self, yard: Yard, seed: int, resources: ExitStack) -> None:
        super().__init__(yard, seed, resources)
        self._crafted = list(crafted())
        self._documents = regression_documents(seed=seed)

    def run(self, numbers: range, dice: random.Random) -> Seen:
        (number,) = numbers
        one = self._crafted[number] if number < len(self._crafted) else self._drawn(dice)
        seen = Seen()
        path = one.make(self.yard) or Path("inbox/a.json")
        for command in COMMANDS:
            output = ("-o", os.fspath(self.yard.room / "merged")) if command == "merge" else ()
            must = one.running if command in _RUNNING else one.reading
            done = self.yard.command(command, *output, "--", path, limit_s=60.0 if must == "refuse" else 240.0)
            found = faults_of(done, must="either" if command == "merge" else must)
            is_folder = (self.yard.project / os.fsdecode(path)).is_dir()  # which merge takes, and an empty one too
            if command == "merge" and must == "refuse" and done.status == 0 and not is_folder:
                found.faults.append(Fault("other", "a case was verified that must not be run"))
            found.faults += [*_script_faults(command, done), *self.yard.faults_in_files(), *self.yard.look()]
            seen.faults += [Fault(fault.kind, f"{command}, {one.name}: {fault.text}") for fault in found.faults]
            seen.refused, seen.accepted = max(seen.refused, found.refused), max(seen.accepted, found.accepted)
        seen.accepted = 1 - seen.refused  # refused by any counts as refused
        return seen

    def _drawn(self, dice: random.Random) -> Crafted:
        data = mutated_document(dice.choice(self._documents), dice, changes=dice.choice((1, 2)))
        return Crafted("mutated", _written(mutated_bytes(data, dice) if dice.random() < 0.3 else data))


def _script_faults(command: str, done: Done) -> list[Fault]:
    """A script that a command prints can be run."""
    if command != "repro" or done.status != 0:
        return []
    try:
        ast.parse(done.output)
    except (SyntaxError, ValueError) as error:
        return [Fault("other", f"the script does not parse: {error}")]
    return []
