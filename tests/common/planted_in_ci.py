"""A kernel with a bug, and the environment of a command that runs in no CI, for tests of what runs in one."""

from __future__ import annotations

import os

KERNEL = """
import attnfuzz
from attnfuzz.kernels import eager


@attnfuzz.kernel("dense_decode", supports=attnfuzz.Supports(dtypes=("float32",), head_sizes=(16,)))
def mine(inputs):
    out, lse = eager.dense_decode(inputs.q, inputs.k, inputs.v, inputs.seq_lens, inputs.scale)
    out[inputs.seq_lens > 4] += 1  # the bug
    return out, lse
"""
REPAIRED = KERNEL.replace("+= 1", "+= 0")

_CI = ("GITHUB", "BUILDKITE", "CI", "SLURM", "JOB_COMPLETION", "ATTNFUZZ_PROFILE")


def outside_of_a_ci() -> dict[str, str]:
    """The environment without what a CI or a scheduler puts there."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_CI)}
