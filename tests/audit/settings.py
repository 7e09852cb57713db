"""Settings, arguments and surroundings that are wrong, or odd: each is refused in one sentence, or works."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from attnfuzz.corpus import RegressionError, load_regression
from tests.audit.auditing import Part
from tests.audit.mutating import spliced
from tests.audit.specimens import TINY
from tests.audit.yard import Fault, Must, Seen, faults_of

_MERGE = ("merge", "empty", "-o", "merged")
_EXPLORE = ("explore", "mine.py:right", "--workers", "1", "--json", "a.json")
_SHOW, _REPLAY = ("show", "b.json"), ("replay", "b.json")
_SEARCH = (*_EXPLORE, "--budget", "4s")
_MOST_SAVED_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Tried:
    """A command and what surrounds it. ``prefix`` is a command that runs it, ``prepare`` is called right before."""

    arguments: Sequence[str | bytes]
    must: Must = "either"
    pyproject: bytes | None = None
    environment: Mapping[str, str] | None = None
    prefix: Sequence[str] = ()
    prepare: Callable[[], None] | None = None

    def __str__(self) -> str:
        setting = (self.pyproject or b"").decode(errors="replace")[:60].strip().splitlines()[-1:]
        return " ".join([
            *setting, *(f"{name}={value[:30]}" for name, value in (self.environment or {}).items()),
            *(word[:40] for word in self.prefix[-1:]),
            *(os.fsdecode(argument)[:40] for argument in self.arguments)])  # fmt: skip


def _no_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))


def _no_space() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


def _closed(*descriptors: int) -> Callable[[], None]:
    def prepare() -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    return prepare


def _full() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


_CROWDED = (
    "setpriv", "--reuid", "64321", "--clear-groups", "--inh-caps=-all,+dac_override",
    "--ambient-caps=-all,+dac_override", "prlimit", "--nproc=3",
)  # fmt: skip
"""Root has no such limit; whoever it becomes may read what root may."""
_IS_ROOT = os.geteuid() == 0
"""Nobody else can set up what these take."""
_NO_PROC = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")


def _environments() -> list[Tried]:
    search = [
        Tried(_SEARCH, environment=environment)
        for environment in (
            {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}, {"COLUMNS": "0"},
            {"COLUMNS": "x", "LINES": "-1", "TERM": "nonsense"}, {"HOME": "/nowhere"}, {"HOME": ""},
            {"TMPDIR": "/nowhere"}, {"TMPDIR": "/proc"}, {"CUDA_VISIBLE_DEVICES": "garbage"},
            {"OMP_NUM_THREADS": "many"}, {"TRITON_INTERPRET": "maybe"}, {"TRITON_CACHE_DIR": "/dev/null"},
            {"PYTHONPATH": f"/nowhere:{os.environ.get('PYTHONPATH', '')}"}, {"PATH": ""}, {"PYTHONHASHSEED": "0"},
            {"XDG_CACHE_HOME": "/dev/null"}, {"ATTNFUZZ_PROFILE": ""},
        )
    ]  # fmt: skip
    return [
        *search,
        Tried(_MERGE, "refuse", environment={"ATTNFUZZ_PROFILE": "nobody"}),
        Tried(_MERGE, "refuse", environment={"ATTNFUZZ_PROFILE": "\x1b[2J"}),
        *(Tried(_SEARCH, prepare=prepare) for prepare in (_closed(0), _no_space)),
        *(
            Tried(arguments, prepare=prepare)
            for arguments in (_SEARCH, ("list",), _SHOW)
            for prepare in (_closed(1), _closed(1, 2), _full, _no_files)
        ),
        *(Tried(arguments, prefix=_NO_PROC) for arguments in (_SEARCH, _SHOW, _REPLAY, ("list",)) if _IS_ROOT),
        *(
            Tried(arguments, prefix=_CROWDED, environment={"OMP_NUM_THREADS": "4"})
            for arguments in (("explore", "mine.py:right", "--budget", "4s"), _REPLAY, ("explain", "b.json"))
            if _IS_ROOT
        ),
    ]  # fmt: skip


def _toml() -> list[Tried]:
    values = (
        'budget = "0s"', 'budget = "-1m"', 'budget = "1e9y"', "budget = 10", 'budget = "nan"', 'budget = ""',
        "workers = 0", "workers = 257", "workers = 1.5", 'workers = "some"', "workers = true",
        "seed = -1", "seed = 4294967296", 'seed = "1"', "seed = 1.0", "seed = 99999999999999999999999",
        'device = "tpu"', "device = 1", 'oracles = []', 'oracles = ["omen"]', 'oracles = "accuracy"',
        'kernels = []', 'kernels = [""]', 'kernels = "a"', "kernels = [1]", 'tolerance = "loose"',
        "tolerance = { atol = -1, rtol = 0 }", "tolerance = { atol = nan, rtol = 0 }", "tolerance = { atol = 1 }",
        "tolerance = { atol = inf, rtol = inf }", 'fail_fast = "yes"',
        'regressions = ""', "regressions = 3", 'regressions = "a\\u0000b"', "unheard = 1",
        'profile = "nobody"', "profiles = 3", "profiles.a = 3", "profiles.a.budget = 3", "[[tool.attnfuzz.x]]",
        'budgte = "1m"', f'regressions = "{"x" * 300}"', 'regressions = "file"',
        'budget = 1979-05-27', f"workers = {'[' * 5000}",
    )  # fmt: skip
    refused = [Tried(_MERGE[:2], "refuse", b"[tool.attnfuzz]\n" + value.encode()) for value in values]
    files = (
        b'[tool.attnfuzz]\nregressions = "file/x"',
        b"\xff\xfe",
        b"[tool.attnfuzz",
        b"tool = 3",
        b"[tool]\nattnfuzz = []",
        b"a = " + b"[" * 100_000,
        b"\0",
    )
    return [*refused, *(Tried(_MERGE[:2], pyproject=data) for data in files), Tried(_MERGE, "work", b"")]


def _options() -> list[Tried]:
    wrong = (
        ("--budget", "0"), ("--budget", "-5s"), ("--budget", "nan"), ("--budget", "9e99h"), ("--budget", ""),
        ("--workers", "0"), ("--workers", "257"), ("--workers", "1.5"), ("--workers", "\u00b2"), ("--workers", ""),
        ("--seed", "-1"), ("--seed", "4294967296"), ("--seed", "x"), ("--oracle", "omen"), ("--device", "tpu"),
        ("--tolerance", "nan,nan"), ("--tolerance", "1"), ("--tolerance", "-1,0"), ("--tolerance", "inf,0"),
        ("--tolerance", ""), ("--profile", "nobody"),
        ("--json", "nowhere/a.json"), ("--json", "."), ("--json", "x" * 300), ("--junit", "file/x"),
        ("--html", ""), ("--save-dir", "file"), ("--save-dir", "file/x"), ("--save-dir", "/proc/x"),
        ("--save-dir", "x" * 300), ("--save-dir", "/dev/null/x"), ("--save-dir", "link"),
        ("--save-dir", "\x1b[2J" * 80),
        ("--unheard-of",), ("--resume",),
    )  # fmt: skip
    kernels: tuple[str | bytes, ...] = (
        "", "nowhere.py", "nowhere.py:k", "nothing_*", "nowhere:k", ".", "empty", "mine.py:nobody", "b.json", "fifo.py",
        "x" * 5000 + ".py", b"\xff.py", "binary.py", "exits.py", "[bold]x[/nothing]", "\x1b[2J", ":", "::", "mine.py:",
    )  # fmt: skip
    return [
        *(Tried((*_SEARCH, *pair), "refuse") for pair in wrong),
        *(
            Tried(("explore", kernel, "--budget", "4s"), "refuse" if kernel != "mine.py:" else "either")
            for kernel in kernels
        ),
    ]


_HARM_DONE = (
    *(Tried(("explore", f"speaks.py:{name}", "--workers", "1", "--budget", "15s"), "work")
      for name in ("unspeakable", "surrogate", "endless", "control", "nul")),
    Tried((*_EXPLORE, "--budget", "0.1s")),
    Tried((*_EXPLORE, "--budget", "1s")),
    Tried(("explore", "mine.py:right", "mine.py:slow", "--workers", "1", "--budget", "3s", "--json", "a.json")),
    Tried(("explore", "mine.py:never", "--workers", "1", "--budget", "3s", "--json", "a.json")),
)  # fmt: skip

_CI = ("ci", "mine.py:right", "--workers", "1", "--budget", "4s")


def _in_ci() -> list[Tried]:
    """What a CI or a scheduler says, and ``--shard``."""
    shards = ("", "1", "0/1", "3/2", "1/0", "-1/2", "1/2/3", "\u00b9/\u00b2", "1/" + "9" * 5000, "1/2\n", "x/y")
    job, count = "BUILDKITE_PARALLEL_JOB", "BUILDKITE_PARALLEL_JOB_COUNT"
    variables = (
        {job: "9" * 5000, count: "2"}, {job: "-1", count: "2"}, {job: "\u00b2", count: "3"}, {job: "7", count: "0"},
        {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_MIN": "x"},
        {"CI_NODE_INDEX": "0", "CI_NODE_TOTAL": "0"}, {"JOB_COMPLETION_INDEX": "\x1b[2J"},
        {"GITHUB_SHA": "\x1b[2J", "GITHUB_ACTIONS": "true"}, {"GITHUB_STEP_SUMMARY": "/nowhere/x"},
        {"GITHUB_STEP_SUMMARY": "x" * 5000}, {"BUILDKITE": "true", "BUILDKITE_COMMIT": "f" * 5000},
    )  # fmt: skip
    return [
        *(Tried((command, *rest, "--shard", shard), "refuse") for shard in shards
          for command, *rest in (_REPLAY, _CI)),
        *(Tried(_CI, environment=environment) for environment in variables),
        *(Tried((*_CI, "-o", folder), "refuse") for folder in ("file", "/proc/x", "x" * 5000, "link", "\x1b[2J" * 80)),
        Tried((*_CI, "-o", "")), Tried(("ci", "", "--budget", "4s"), "refuse"), Tried((*_CI, "--unheard-of"), "refuse"),
        Tried(("triage", "b.json"), "work"),
        Tried(("triage", "")),
        *(Tried(("triage", path), "refuse") for path in ("nowhere", "fifo.py", "empty")),
    ]  # fmt: skip


_HOSTILE = (
    *(Tried(("explore", f"hostile.py:{name}", "--workers", "1", "--budget", "15s"), "work")
      for name in ("stops_its_parent", "stops_it_at_last", "leaves_a_timer", "replaces_where", "leaves_no_file")),
    Tried(("explore", "goes_away.py", "mine.py:right", "--workers", "1", "--budget", "4s"), "work"),
    Tried(("explore", "waits_for_itself.py", "--budget", "4s"), "refuse"),
    Tried(("verify", "waits_for_itself.py", "--budget", "4s"), "refuse"),
)  # fmt: skip
"""Kernels that stop processes, or take from them what they need."""

SETTINGS: tuple[Tried, ...] = (*_HARM_DONE, *_options(), *_toml(), *_environments(), *_in_ci(), *_HOSTILE)
"""The first are kernels whose words ended a campaign, and campaigns that judged nothing."""

_SPEAKS = """
import attnfuzz


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


def says(error):
    @attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(dtypes=("float32",), head_sizes=(16,)))
    def kernel(inputs):
        raise error()

    return kernel


unspeakable = says(Unspeakable)
surrogate = says(lambda: ValueError("lone \\ud800 surrogate"))
endless = says(lambda: ValueError("x" * 50_000_000))
control = says(lambda: ValueError("\\x1b[2J\\x1b]0;title\\a\\r\\b"))
nul = says(lambda: ValueError("a\\0b"))
"""

_MINE = """
import time

import attnfuzz
from attnfuzz.kernels import eager

SUPPORTS = attnfuzz.Supports(dtypes=("float32",), head_sizes=(16,), strides="contiguous")


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def right(inputs):
    return eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def slow(inputs):
    time.sleep(5)
    return right(inputs)


@attnfuzz.kernel("dense_decode", supports=SUPPORTS)
def never(inputs):
    time.sleep(9)
    return right(inputs)
"""


_HOSTILE_KERNELS = """
import os, resource, signal

import torch

import attnfuzz
from attnfuzz.kernels import eager

SUPPORTS = attnfuzz.Supports(dtypes=("float32",), head_sizes=(16,), strides="contiguous")
calls = []


def after(harm):
    @attnfuzz.kernel("dense_decode", supports=SUPPORTS)
    def kernel(inputs):
        calls.append(None)
        found = eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)
        harm()
        return found

    return kernel


def late(number, frame):
    raise ValueError("too late")


def timer():
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.004, 0.004)


stops_its_parent = after(lambda: os.kill(os.getppid(), signal.SIGSTOP))
stops_it_at_last = after(lambda: len(calls) > 40 and os.kill(os.getppid(), signal.SIGSTOP))
leaves_a_timer = after(timer)
replaces_where = after(lambda: setattr(torch, "where", None))
leaves_no_file = after(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)))
"""


class Settings(Part):
    inputs: ClassVar[int] = len(SETTINGS)
    patience_s: ClassVar[float] = 400.0

    def run(self, numbers: range, dice: random.Random) -> Seen:
        (number,) = numbers
        one, project = SETTINGS[number], self.yard.project
        _furnish(project)
        if one.pyproject is not None:
            (project / "pyproject.toml").write_bytes(one.pyproject)
        done = self.yard.command(
            *one.arguments, environment=one.environment, prefix=one.prefix, prepare=one.prepare, limit_s=120.0
        )
        closed = one.prepare is not None  # then nobody hears what is said
        statuses = (0, 1, 2, 120) if closed else (0, 1, 2)
        seen = faults_of(done, must=one.must, cpu_s=120.0, statuses=statuses, speaks=not closed)
        seen.faults += [*self.yard.faults_in_files(), *_result_faults(project, done.status)]
        seen.faults = [Fault(fault.kind, f"{one}: {fault.text}") for fault in seen.faults]
        return seen


def _furnish(project: Path) -> None:
    (project / "empty").mkdir()
    (project / "mine.py").write_text(_MINE)
    (project / "speaks.py").write_text(_SPEAKS)
    (project / "hostile.py").write_text(_HOSTILE_KERNELS)
    (project / "goes_away.py").write_text("import os\n\nos.chdir('/')\n" + _MINE)
    (project / "waits_for_itself.py").write_text("import threading\nlock = threading.Lock()\n" + "lock.acquire()\n" * 2)
    (project / "binary.py").write_bytes(bytes(range(256)))
    (project / "exits.py").write_text("raise SystemExit(3)\n")
    (project / "b.json").write_bytes(spliced(TINY))
    (project / "file").touch()
    (project / "link").symlink_to("link")
    os.mkfifo(project / "fifo.py")


def _result_faults(project: Path, status: int | None) -> list[Fault]:
    """What a campaign left: a status that fits what it did, and findings that can be read again."""
    faults = []
    for path in (project / "regressions").glob("*.json"):
        if path.stat().st_size > _MOST_SAVED_BYTES:
            faults.append(Fault("other", f"a finding of {path.stat().st_size >> 10} KiB was saved"))
        try:
            load_regression(path)
        except RegressionError as error:
            faults.append(Fault("other", f"a finding was saved that cannot be read: {error}"))
    try:
        summary: dict[str, Any] = json.loads((project / "a.json").read_bytes())
    except (OSError, ValueError):
        summary = {}
    idle = [kernel for kernel in summary.get("kernels", ()) if not kernel["cases"]]
    if status == 0 and idle:
        faults.append(Fault("other", f"exit status 0, but {len(idle)} of its kernels were given no case"))
    return faults
