"""What may stand in ``.attnfuzz/state.json`` when a campaign is resumed."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from attnfuzz.campaign.finding import Finding
from attnfuzz.campaign.messages import Unfinished
from attnfuzz.campaign.saved.state import AskedOf, CampaignState, SavedFinding
from attnfuzz.campaign.statistics import KernelStatistics
from attnfuzz.declaration import Declaration
from attnfuzz.identity.bug import Bug
from attnfuzz.problems.cases import DenseDecodeCase, encode_case
from attnfuzz.verdict import Failure
from tests.audit.auditing import Part
from tests.audit.mutating import mutated_bytes, mutated_document, nested, spliced
from tests.audit.specimens import TINY
from tests.audit.yard import Seen, faults_of
from tests.common.named_features import named
from tests.faults.campaigns import KERNELS

Change = Callable[[dict[str, Any]], None]

_MINE = "mine.py"
_CASE = DenseDecodeCase(num_q_heads=1, head_size=16, num_kv_heads=1, seq_lens=(2,), scale=0.25, dtype="float32")


def state_document() -> dict[str, Any]:
    """The state of a campaign on ``mine.py:right`` and ``mine.py:wrong`` that has found the bug of the second."""
    right, wrong = (
        Declaration(name=name, problem="dense_decode", target=f"{_MINE}:{name}") for name in ("right", "wrong")
    )
    failure = Failure(oracle="accuracy", kind="out:value", message="out is wrong")
    finding = Finding(
        name="0-1", declaration=wrong, case=_CASE, failure=failure, first_seen_s=1.5, failed=2, runs=2, shrunk_s=2.5,
        minimised=True, steps=7, path=Path("regressions/a.json"), features=named("seq_len>1"),
    )  # fmt: skip
    state = CampaignState(
        asked=AskedOf(
            kernels=(f"{_MINE}:right", f"{_MINE}:wrong"), budget_s=60.0, save_folder="regressions", workers=1
        ),
        seed=7, elapsed_s=20.0, parts=1,
        kernels=tuple(KernelStatistics(declaration=one, cases=12) for one in (right, wrong)),
        interval_s=2.0, throughput={"": (5, 7)}, findings=(SavedFinding.of(finding),),
        known=(Bug(kernel=wrong.target, oracle="accuracy", kind="out:value", features=named("seq_len>1")),),
        pending=(Unfinished(kernel=wrong.target, case=msgspec.Raw(encode_case(_CASE)), failure=failure),),
    )  # fmt: skip
    document: dict[str, Any] = json.loads(msgspec.json.encode(state))
    return document


def _set(*path: str | int, to: Any) -> Change:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to

    return change


_CHANGES: tuple[Change, ...] = (
    lambda document: None,
    *(_set("findings", 0, name, to=path) for name in ("replaces", "path", "known_as") for path in (
        "FOREIGN/precious.json", "../../foreign/precious.json", "regressions/../../../foreign/notes.txt",
        "regressions/link.json", "linked/precious.json")),
    _set("asked", "kernels", to=["FOREIGN/planted.py:k"]),
    _set("kernels", 0, "declaration", "target", to="FOREIGN/planted.py:k"),
    _set("findings", 0, "case", to={"num_q_heads": 1}),
    _set("findings", 0, "case", to=7),
    _set("findings", 0, "kernel", to="other"),
    _set("findings", 0, "preceding", to=[{}]),
    _set("pending", 0, "case", to={}),
    _set("pending", 0, "kernel", to="other"),
    _set("known", 0, "kernel", to="other"),
    _set("known", 0, "oracle", to="omen"),
    _set("known", 0, "features", to=["?"]),
    _set("asked", "device", to="abacus"),
    _set("asked", "workers", to=0),
    _set("asked", "workers", to=-3),
    _set("asked", "workers", to=10**9),
    _set("asked", "oracles", to=["omen"]),
    _set("asked", "kernels", to=[]),
    _set("asked", "kernels", to=[""]),
    _set("asked", "budget_s", to=1e308),
    _set("asked", "budget_s", to=-1),
    _set("asked", "save_folder", to=""),
    _set("asked", "save_folder", to="a\0b"),
    _set("asked", "save_folder", to="mine.py"),
    _set("asked", "save_folder", to="x" * 300),
    _set("seed", to=-1),
    _set("seed", to=2**64),
    _set("elapsed_s", to=-1e308),
    _set("parts", to=-1),
    _set("interval_s", to=0),
    _set("interval_s", to=-1),
    _set("throughput", to={"": [-1, 2**62]}),
    _set("kernels", 0, "coverage", to={"-1": -1}),
    _set("kernels", 0, "ratios", to={"float99": {"-99999": 3}}),
    _set("kernels", 0, "cases", to=-5),
    _set("findings", 0, "path", to="a\0b"),
    _set("findings", 0, "replaces", to=""),
    _set("findings", 0, "failure", "message", to="\x1b[2J\0"),
    _set("findings", to=[json.loads(spliced(TINY))]),
)  # fmt: skip


def _raw(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


_PLACED: tuple[Callable[[Path], None], ...] = (
    os.mkfifo, Path.mkdir, lambda path: path.symlink_to("state.json"), lambda path: path.symlink_to("/dev/zero"),
    lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 34),
    _raw(b""), _raw(b"\xff\0"), _raw(nested(200_000).encode()), _raw(b"null"),
)  # fmt: skip


class States(Part):
    inputs: ClassVar[int] = len(_CHANGES) + len(_PLACED) + 8
    patience_s: ClassVar[float] = 300.0

    def run(self, numbers: range, dice: random.Random) -> Seen:
        (number,) = numbers
        project = self.yard.project
        (project / _MINE).write_bytes(KERNELS.read_bytes())
        for folder in ("regressions", ".attnfuzz"):
            (project / folder).mkdir()
        (project / "regressions" / "link.json").symlink_to(self.yard.foreign / "precious.json")
        (project / "linked").symlink_to(self.yard.foreign)
        (project / "regressions" / "a.json").write_bytes(spliced(TINY))
        self._place(project / ".attnfuzz" / "state.json", number, dice)
        done = self.yard.command("explore", "--resume", "--budget", "4s", "--workers", "1", limit_s=90.0)
        seen = faults_of(done, must="work" if number == 0 else "either", cpu_s=120.0)
        seen.faults += self.yard.faults_in_files()
        return seen

    def _place(self, path: Path, number: int, dice: random.Random) -> None:
        document = state_document()
        if number < len(_CHANGES):
            _CHANGES[number](document)
            path.write_bytes(spliced(document).replace(b"FOREIGN", os.fsencode(self.yard.foreign)))
        elif number < len(_CHANGES) + len(_PLACED):
            _PLACED[number - len(_CHANGES)](path)
        else:
            data = mutated_document(document, dice, changes=1)
            path.write_bytes(mutated_bytes(data, dice) if dice.random() < 0.3 else data)
