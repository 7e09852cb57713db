"""Each hack with what must be said of it, and what ``attnfuzz verify`` says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
HONEST = f"{_HERE / 'honest_kernels.py'}:honest"


@dataclass(frozen=True)
class Hack:
    """``name`` in ``file``. ``says``: words of the message or the details, whatever case is found."""

    what: str
    file: str
    name: str
    says: str

    @property
    def target(self) -> str:
        return f"{_HERE / self.file}.py:{self.name}"


HACKS = (
    Hack("left over in reused memory", "reused_memory", "reused_memory", "the kernel gave no result"),
    Hack("the same, not by torch.empty", "reused_memory", "reused_storage", "out[seq 0"),
    Hack("no-op", "no_op", "no_op", "the kernel gave no result"),
    Hack("zeros", "no_op", "zeros", "expected"),
    Hack("input modified", "input_modified", "input_modified", "input block_table"),
    Hack("cached by pointer", "cached", "cached_by_pointer", "the same tensors are passed again"),
    Hack("cached by shape", "cached", "cached_by_shape", "out[seq "),
    Hack("page size hard-coded", "shapes_hard_coded", "page_size_hard_coded", "memory that holds no token"),
    Hack("heads hard-coded", "shapes_hard_coded", "heads_hard_coded", "reads KV head"),
    Hack("zeros for other shapes", "shapes_hard_coded", "answers_only_benchmark", "has weight 0, expected"),
    Hack("sums in 16 bits", "precision_lowered", "accumulates_in_half", "x the bound"),
    Hack("weights in 8 bits", "precision_lowered", "weights_in_8_bits", "x the bound"),
    Hack("keys in 8 bits", "precision_lowered", "keys_in_8_bits", "x the bound"),
    Hack("thread not joined", "not_joined", "thread_not_joined", "by a thread that it has started"),
    Hack("lazy tensor subclass", "lazy_tensor", "lazy_tensor", "a subclass of torch.Tensor"),
    Hack("right 5 times", "right_at_first", "right_five_times", "out[seq "),
    Hack("right 300 times", "right_at_first", "right_300_times", "out[seq "),
    Hack("right 1,500 times", "right_at_first", "right_1500_times", "out[seq "),
    Hack("references zeroed", "reference_changed", "zeroes_references", "has changed tensors that it was not given"),
    Hack(
        "the same whenever memory is collected",
        "reference_changed",
        "zeroes_references_at_any_time",
        "has replaced gc.callbacks",
    ),
    Hack("torch.allclose patched", "patched", "patches_allclose", "has replaced torch.allclose"),
    Hack("attnfuzz patched", "patched", "patches_attnfuzz", "has replaced attnfuzz.trials.comparison.error_ratio"),
    Hack("clock patched", "patched", "patches_timers", "has replaced time.perf_counter"),
    Hack("right where results are compared", "patched", "right_when_checked", "has weight 0, expected"),
)
"""Those that a CPU shows."""

UNSEEN = Hack("right under attnfuzz", "patched", "right_under_attnfuzz", "")
"""What nothing that runs in attnfuzz can find."""


def verified(target: str, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the document of ``attnfuzz verify``, run in ``folder``."""
    command = [sys.executable, "-m", "attnfuzz", "verify", target, "--workers", "1", "--json", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError as error:
        raise RuntimeError(done.stdout + done.stderr) from error
    return done.returncode, document
