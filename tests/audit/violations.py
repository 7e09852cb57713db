"""Inputs that do what no input may do, one of each kind: what the audit has to notice."""

from __future__ import annotations

import importlib.util
import os
import random
import time
from typing import ClassVar

from tests.audit.auditing import Part
from tests.audit.yard import Seen


class Planted(Part):
    inputs: ClassVar[int] = 8
    patience_s: ClassVar[float] = 10.0

    def run(self, numbers: range, dice: random.Random) -> Seen:
        (number,) = numbers
        (
            self._nothing, self._raises, self._hangs, self._writes, self._deletes, self._imports, self._dies,
            self._hoards,
        )[number]()  # fmt: skip
        return Seen(accepted=1)

    def _nothing(self) -> None:
        (self.yard.project / "mine.txt").write_text("of no interest")

    def _raises(self) -> None:
        raise KeyError("planted")

    def _hangs(self) -> None:
        time.sleep(600)

    def _writes(self) -> None:
        about = (self.yard.foreign / "notes.txt").stat()
        (self.yard.foreign / "notes.txt").write_text("PRECIOUS\n")
        os.utime(self.yard.foreign / "notes.txt", ns=(about.st_atime_ns, about.st_mtime_ns))

    def _deletes(self) -> None:
        (self.yard.foreign / "precious.json").unlink()

    def _imports(self) -> None:
        spec = importlib.util.spec_from_file_location("planted", self.yard.foreign / "planted.py")
        if spec is None or spec.loader is None:
            raise ImportError("there is no code to be run")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))

    def _dies(self) -> None:
        os._exit(3)

    def _hoards(self) -> None:
        bytearray(os.urandom(1)) * (1200 << 20)
