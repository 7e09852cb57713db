"""Loads changed copies of source files in place of the originals, which nobody touches. Torch-free.

While the environment variable ``ATTNFUZZ_OVERLAY`` names a JSON file

    {"format": "attnfuzz.overlay/1", "files": {"/abs/original.py": "/abs/copy.py"}, "loaded": "/abs/log"}

a module whose source file is a key of ``files`` runs the copy's code. The module keeps its name and its ``__file__``,
so that it finds its neighbours; its functions say that their source is the copy, which is where Triton reads it. Each
original whose copy is loaded is noted in ``loaded``, if that is given, and so is a file that is imported in its stead,
from another installation of the same package. The file is data: reading it executes nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import CodeType, ModuleType
from typing import Literal

import msgspec

from attnfuzz.own_files import append_to, write_file

VARIABLE = "ATTNFUZZ_OVERLAY"


class OverlayError(ValueError):
    """The file that ``ATTNFUZZ_OVERLAY`` names is not an overlay; the message is one sentence."""


class Overlay(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The copies to load, by the absolute paths of the originals."""

    format: Literal["attnfuzz.overlay/1"] = "attnfuzz.overlay/1"
    files: dict[str, str]
    loaded: str | None = None

    @cached_property
    def copies(self) -> Mapping[str, str]:
        """``files`` with symbolic links in the originals' paths resolved."""
        return {os.path.realpath(original): copy for original, copy in self.files.items()}

    def note_loaded(self, path: str) -> None:
        """Append ``path`` to the log, if there is one."""
        if self.loaded is not None:
            append_to(Path(self.loaded), f"{os.path.realpath(path)}\n")


def write_overlay(path: Path, files: Mapping[Path, Path], *, loaded: Path | None = None) -> None:
    """Write an overlay that loads the values of ``files`` in place of the keys."""
    absolute = {os.path.realpath(original): str(copy.absolute()) for original, copy in files.items()}
    overlay = Overlay(files=absolute, loaded=None if loaded is None else str(loaded.absolute()))
    write_file(path, msgspec.json.encode(overlay))


def install_overlay() -> None:
    """Load copies from now on, if the environment says so. Raises OverlayError for a file that is no overlay."""
    path = os.environ.get(VARIABLE)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    if path:
        sys.meta_path.insert(0, _Finder(_read(Path(path))))


def original_of(path: str) -> str:
    """The file that is replaced by the copy ``path``; ``path`` itself if it is none."""
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            originals = {copy: original for original, copy in finder.overlay.files.items()}
            return originals.get(path, path)
    return path


def namesake(path: str, originals: Iterable[str]) -> str | None:
    """The one of ``originals`` that ``path`` seems to be another copy of, by the names of the file and its folder."""
    return next((one for one in originals if one != path and Path(one).parts[-2:] == Path(path).parts[-2:]), None)


def _read(path: Path) -> Overlay:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Overlay)
    except (OSError, msgspec.DecodeError) as error:
        raise OverlayError(
            f"{VARIABLE}={str(path)!r} is not an overlay ({error}); unset it, or name a file that "
            "attnfuzz.overlay.write_overlay wrote"
        ) from error


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do, and gives those that have a copy a loader that compiles the copy."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        return self.with_copy(next(filter(None, specs), None))

    def with_copy(self, spec: importlib.machinery.ModuleSpec | None) -> importlib.machinery.ModuleSpec | None:
        """``spec`` with another loader; None if there is no copy, so that it is left to others."""
        if spec is None or spec.origin is None or not spec.has_location:
            return None
        path = os.path.realpath(spec.origin)
        copy = self.overlay.copies.get(path)
        if copy is None:
            if namesake(path, self.overlay.copies):
                self.overlay.note_loaded(path)
            return None
        spec.loader = _CopyLoader(spec.name, spec.origin, copy, self.overlay)
        return spec


class _CopyLoader(importlib.machinery.SourceFileLoader):
    """Compiles the copy for a module that lies at ``path``, without the byte code that is cached for the original."""

    def __init__(self, fullname: str, path: str, copy: str, overlay: Overlay) -> None:
        super().__init__(fullname, path)
        self._copy = copy
        self._overlay = overlay

    def get_code(self, fullname: str) -> CodeType:
        self._overlay.note_loaded(self.path)
        return self.source_to_code(Path(self._copy).read_bytes(), self._copy)

    def get_data(self, path: str) -> bytes:
        """The source that ``linecache`` and ``inspect`` read through the loader."""
        return super().get_data(self._copy if path == self.path else path)


def spec_from_file(name: str, path: Path) -> importlib.machinery.ModuleSpec | None:
    """As ``importlib.util.spec_from_file_location``, of the copy if ``path`` has one."""
    spec = importlib.util.spec_from_file_location(name, path)
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder.with_copy(spec) or spec
    return spec
