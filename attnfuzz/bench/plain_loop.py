"""What one would write without attnfuzz's harness: a Hypothesis test per kernel that draws a case and judges it.

``python -m attnfuzz.bench.plain_loop DEVICE SECONDS WARMUP_S KERNEL...`` prints one line of JSON. Cases, reference,
bounds and oracles are those of a campaign; there is no isolation, no batch and no working set of compiled formats.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from attnfuzz import safe_start

__all__ = ["PlainLoop", "run_plain_loop"]


class PlainLoop(msgspec.Struct, frozen=True):
    """Cases judged in ``seconds``, each kernel having had the same part of them."""

    cases: int
    seconds: float

    @property
    def rate(self) -> float:
        """Cases a second."""
        return self.cases / self.seconds


def run_plain_loop(kernels: Sequence[str], *, device: str, seconds: float, warmup_s: float) -> PlainLoop:
    """Run the loop in a process of its own. Raises ``RuntimeError`` with what that process wrote if it fails."""
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    command = safe_start.command("attnfuzz.bench.plain_loop", device, str(seconds), str(warmup_s), *kernels)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the plain loop ended with status {done.returncode}: {done.stderr.strip()[-2000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=PlainLoop)


def main(arguments: list[str]) -> None:
    """Give each kernel its part of the time, twice: first to warm up, then to count."""
    from attnfuzz.declaration import load_kernels
    from attnfuzz.judging.service import JudgingService

    device, seconds, warmup_s, *targets = arguments
    JudgingService()  # an executor's settings: one thread, and the interpreter's speed-ups
    kernels = [kernel for target in targets for kernel in load_kernels(target)]
    for kernel in kernels:
        _loop(kernel, device, float(warmup_s) / len(kernels))
    counts = [_loop(kernel, device, float(seconds) / len(kernels)) for kernel in kernels]
    total = PlainLoop(sum(cases for cases, _ in counts), sum(elapsed for _, elapsed in counts))
    print(msgspec.json.encode(total).decode())


def _loop(kernel: object, device: str, seconds: float) -> tuple[int, float]:
    from hypothesis import HealthCheck, Phase, given, settings

    from attnfuzz.declaration import Kernel
    from attnfuzz.judging.judge import judge
    from attnfuzz.problems.cases import Case
    from attnfuzz.strategies.cases import cases
    from attnfuzz.strategies.sizes import CPU_SIZES, GPU_SIZES

    if not isinstance(kernel, Kernel):
        raise TypeError(f"kernel={kernel!r} must be a Kernel")
    declared = kernel.declaration
    sizes = GPU_SIZES if device == "cuda" else CPU_SIZES
    started, judged = time.perf_counter(), 0

    @settings(
        max_examples=1_000_000,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(declared.problem, supports=declared.supports, options=declared.options, sizes=sizes))
    def test(case: Case) -> None:
        nonlocal judged
        if time.perf_counter() - started >= seconds:
            raise KeyboardInterrupt
        verdict = judge(kernel, case, device=device)
        if verdict.failure is not None:
            raise AssertionError(verdict.failure.message)
        judged += 1

    try:
        test()
    except KeyboardInterrupt:  # the time is up: the one exception that Hypothesis does not take for a failure
        return judged, time.perf_counter() - started
    return judged, time.perf_counter() - started


if __name__ == "__main__":
    main(sys.argv[1:])
