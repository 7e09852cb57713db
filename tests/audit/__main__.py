"""`python -m tests.audit [PART ...]`: tens of thousands of hostile inputs, and what must not come of any of them.

Regression files, cases, paths, symbolic links, settings, states, kills at random moments and commands with nothing to
judge are tried on this tree, in temporary folders. No input may end in a traceback, hang, touch a file that is none of
attnfuzz's business or run code that nobody asked for, and where nothing was judged none may say success. What does is
printed with the number that reproduces it alone, and the exit status is 1. The same seed gives the same inputs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from tests.audit.auditing import PARTS, Total, Violation, audit, part_named, show_table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.audit", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--count", type=int, help="try the first so many inputs of each part")
    amount.add_argument("--share", type=float, default=1.0, help="try the first part of the inputs, such as 0.01")
    amount.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="try these inputs of one part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="inputs tried at once")
    parser.add_argument("--json", type=Path, help="also write the figures and violations there")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))} is none of the parts {', '.join(PARTS)}")
    if arguments.only and len(arguments.parts) != 1:
        parser.error("--only needs the one PART whose numbers these are")

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends in order, as Ctrl-C does
    totals = []
    for name in arguments.parts or PARTS:
        inputs = part_named(PARTS[name]).inputs
        count = arguments.count or max(1, round(arguments.share * inputs))
        numbers = arguments.only or range(min(inputs, count))
        try:
            totals.append(audit(name, numbers, seed=arguments.seed, jobs=arguments.jobs, tell=_tell(arguments.seed)))
        except KeyboardInterrupt:
            show_table(totals)
            sys.exit(f"interrupted while trying {name}")
    show_table(totals)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(_as_json(totals, arguments.seed), indent=2))
    sys.exit(any(total.violations for total in totals))


def _tell(seed: int) -> Callable[[Violation], None]:
    def tell(violation: Violation) -> None:
        again = f"python -m tests.audit {violation.part} --only {violation.number} --seed {seed}"
        print(f"{violation.fault.kind}: {violation.fault.text}\n  {again}", flush=True)

    return tell


def _as_json(totals: list[Total], seed: int) -> bytes:
    names = ("part", "inputs", "refused", "accepted", "traceback", "hang", "foreign", "code", "other", "seconds")
    parts = [
        dict(zip(names, total.row(), strict=True))
        | {"violations": [{"number": one.number, **msgspec.structs.asdict(one.fault)} for one in total.violations]}
        for total in totals
    ]
    return msgspec.json.encode({"seed": seed, "parts": parts})


if __name__ == "__main__":
    main()
