"""Each plain kernel with what it takes, and the same with a bug; and what the command line says of them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

_HERE = Path(__file__).with_name("plain_kernels.py")
_UNIT = Path(__file__).parents[1] / "common" / "plain_kernels.py"


class Told(msgspec.Struct):
    """What a campaign says of one kernel: findings that count, what it takes for the contract, and how many cases."""

    name: str
    cases: int
    findings: list[dict[str, Any]]
    inferred: str | None = None

    @property
    def counted(self) -> list[dict[str, Any]]:
        return [one for one in self.findings if one["in_contract"]]


@dataclass(frozen=True)
class Pair:
    """Names in ``file``. ``supports`` is what is found out of both; ``says``, words of the finding, its case or cause.

    What is found out of the wrong one may differ: ``wrong_supports``; "nothing" if nothing is.
    """

    correct: str
    wrong: str
    supports: str
    says: str
    wrong_supports: str = ""
    file: Path = _HERE


PAIRS = (
    Pair(
        "triton_flash_decode",
        "triton_flash_decode_mixes_bases",
        'Supports(head_sizes=(16, 32, 64, 128, 256), block_sizes=(16,), layouts=("NHD",), strides="contiguous", '
        'empty_sequences=False, lse="none")',
        "seq_lens 17",
    ),
    Pair(
        "sdpa_decode",
        "sdpa_decode_masks_one_less",
        'Supports(lse="none")',
        "past the end of sequence 0",
    ),
    Pair(
        "triton_merge",
        "triton_merge_loses_max",
        'Supports(empty_state_lse=("-inf",))',
        "lse is the logarithm of the sum, without the maximum",
    ),
    Pair(
        "torch_prefill",
        "torch_prefill_aligned_top_left",
        'Supports(layouts=("NHD", "interleaved"), lse="none")',
        "as if it had no context",
    ),
    Pair(
        "hnd_decode",
        "hnd_decode_tiles_heads",
        'Supports(layouts=("HND",), empty_sequences=False, lse="none")',
        "KV head",
    ),
    Pair(
        "eager_partials",
        "eager_partials_drop_the_rest",
        'Supports(layouts=("NHD", "interleaved"))',
        "is dropped",
    ),
    Pair(
        "equal_strides",
        "equal_strides_without_rescaling",
        'Supports(block_sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256), layouts=("NHD", "interleaved"), lse="none")',
        "expected",
    ),
    Pair(
        "eager_split_decode",
        "eager_split_decode_drops_last_page",
        'Supports(layouts=("NHD", "interleaved"), empty_sequences=False, lse="none")',
        "is dropped",
        file=_UNIT,
    ),
    Pair(
        "textbook_merge",
        "textbook_merge_without_rescaling",
        'Supports(empty_state_lse=("-inf",))',
        "prefix and suffix have equal weights",
        wrong_supports="nothing",
        file=_UNIT,
    ),
    Pair(
        "triton_decode",
        "triton_decode_wrong_head",
        'Supports(head_sizes=(16, 32, 64, 128, 256), block_sizes=(16,), layouts=("NHD",), strides="contiguous", '
        'empty_sequences=False, lse="none")',
        "KV head",
        file=_UNIT,
    ),
)


def explore(folder: Path, *targets: str, budget: str, options: tuple[str, ...] = ()) -> tuple[dict[str, Told], str]:
    """What ``attnfuzz explore`` tells of each kernel by name, and all that it prints."""
    summary = folder / "summary.json"
    command = [sys.executable, "-m", "attnfuzz", "explore", *targets, "--budget", budget, "--workers", "1"]
    command += ["--device", "cpu", "--json", str(summary), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout + done.stderr)
    kernels = json.loads(summary.read_text())["kernels"]
    return {kernel["name"]: msgspec.convert(kernel, Told) for kernel in kernels}, done.stdout
