"""FlashInfer-Bench's solution files: a kernel with its sources in one JSON document. Reading one executes nothing.

The schema is that of ``flashinfer_bench.data.Solution``; what it has beside the fields below is not looked at. Of its
definitions those of paged decode and causal paged prefill with grouped queries are known:
``gqa_paged_decode_h32_kv8_d128_ps1``. `unpack` writes the sources into a folder and beside them a file that makes a
kernel of them (`attnfuzz.adapters.solution`), to be loaded as any kernel file. Torch-free.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec

from attnfuzz.data_files import read_data_file
from attnfuzz.own_files import OwnFolder

_MOST_BYTES = 4 << 20
_MOST_PATH = 200
_MOST_PARTS = 16
_LANGUAGES = ("python", "triton")
_DEFINITION = re.compile(
    r"gqa_paged_(?P<kind>decode|prefill_causal)_h(?P<heads>[1-9]\d{0,3})_kv(?P<kv_heads>[1-9]\d{0,3})"
    r"_d(?P<head_size>[1-9]\d{0,3})_ps(?P<page_size>[1-9]\d{0,4})"
)
_PART = re.compile(r"[\w.+-]+", re.ASCII)
_FUNCTION = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PACKAGE = "solution_sources"
_KERNEL_FILE = "solution.py"
_NAME = "solution"

_Text = Annotated[str, msgspec.Meta(min_length=1)]


class SolutionError(ValueError):
    """A solution file cannot be taken for a kernel; the message is one sentence with value and remedy."""


class _Source(msgspec.Struct, frozen=True):
    path: _Text
    content: str


class _Spec(msgspec.Struct, frozen=True):
    language: _Text
    entry_point: _Text
    destination_passing_style: bool = True


class Solution(msgspec.Struct, frozen=True):
    """The fields that are read of one; checked by `load_solution`."""

    name: _Text
    definition: _Text
    spec: _Spec
    sources: Annotated[tuple[_Source, ...], msgspec.Meta(min_length=1, max_length=256)]


def load_solution(path: Path) -> Solution:
    """Read and check one. Raises SolutionError."""
    try:
        solution = msgspec.json.decode(read_data_file(path, _MOST_BYTES), type=Solution)
        _check(solution)
    except OSError as error:
        raise SolutionError(
            f"solution {str(path)!r} cannot be read ({error.strerror}); give the path to one"
        ) from error
    except RecursionError as error:
        raise SolutionError(f"solution {str(path)!r} is nested too deeply; correct the file") from error
    except (msgspec.DecodeError, UnicodeError, ValueError) as error:
        raise SolutionError(f"solution {str(path)!r}: {str(error)[:500]}") from error
    return solution


def unpack(solution: Solution, folder: Path) -> str:
    """Write its sources into ``folder``, which is there and empty; the target that loads the kernel. Raises OSError."""
    for source in solution.sources:
        path = PurePosixPath(_PACKAGE, source.path)
        place = OwnFolder(folder).inner(*path.parent.parts)
        place.make()
        place.write(path.name, source.content.encode())
    kernel_file = OwnFolder(folder).write(_KERNEL_FILE, _kernel_file(solution).encode())
    return f"{kernel_file}:{_NAME}"


def _kernel_file(solution: Solution) -> str:
    """All that stands in it of the solution are numbers and names that have been checked to be names."""
    shape = _shape(solution.definition)
    entry, _, function = solution.spec.entry_point.partition("::")
    module = ".".join((_PACKAGE, *PurePosixPath(entry).with_suffix("").parts))
    name = re.sub(r"\W+", "_", solution.name, flags=re.ASCII)[:80]
    return f'''"""A FlashInfer-Bench solution as a kernel of attnfuzz, written by ``attnfuzz verify``."""

from attnfuzz.adapters.solution import kernel_of

{_NAME} = kernel_of(
    __name__,
    module={module!r},
    function={function!r},
    name={name!r},
    prefill={shape["kind"] != "decode"!r},
    num_q_heads={int(shape["heads"])},
    num_kv_heads={int(shape["kv_heads"])},
    head_size={int(shape["head_size"])},
    page_size={int(shape["page_size"])},
    writes_outputs={solution.spec.destination_passing_style!r},
)
'''


def _check(solution: Solution) -> None:
    """Raise ValueError for what is not known, or would be written elsewhere."""
    spec = solution.spec
    if spec.language not in _LANGUAGES:
        raise ValueError(f"spec.language={spec.language!r:.80} must be one of {', '.join(_LANGUAGES)}")
    shape = _shape(solution.definition)
    if int(shape["heads"]) % int(shape["kv_heads"]):
        raise ValueError(
            f"definition={solution.definition!r:.120} has query heads that are no multiple of its KV heads"
        )
    paths = [_checked_path(source.path) for source in solution.sources]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"sources have the path {str(path)!r} twice; give each file a path of its own")
        if inside := next((other for other in paths if path in other.parents), None):
            raise ValueError(f"sources have {str(path)!r} as a file and, for {str(inside)!r}, as a folder; rename one")
    entry, _, function = spec.entry_point.partition("::")
    if not entry.endswith(".py") or not _FUNCTION.fullmatch(function):
        raise ValueError(f"spec.entry_point={spec.entry_point!r:.120} must read file.py::function")
    if PurePosixPath(entry) not in paths:
        raise ValueError(f"spec.entry_point={spec.entry_point!r:.120} names a file that is not among the sources")


def _shape(definition: str) -> dict[str, str]:
    match = _DEFINITION.fullmatch(definition)
    if match is None:
        raise ValueError(
            f"definition={definition!r:.120} is none that attnfuzz knows; it must be gqa_paged_decode_h<query heads>_"
            "kv<KV heads>_d<head size>_ps<page size>, or the same of gqa_paged_prefill_causal"
        )
    return match.groupdict()


def _checked_path(text: str) -> PurePosixPath:
    """A path that stays in the folder, and that every file system can have."""
    path = PurePosixPath(text)
    parts = text.split("/")
    are_plain = all(_PART.fullmatch(part) and part not in (".", "..") for part in parts)
    if len(text) > _MOST_PATH or len(parts) > _MOST_PARTS or not are_plain:
        raise ValueError(
            f"sources have the path {text!r:.120}, which must be a relative path of ASCII letters, digits and ._+- "
            f"without '..', of at most {_MOST_PATH} characters"
        )
    return path
