"""`python -m tests.hacks`: how each known way to look right without being it is found, as a table in Markdown.

The exit status is 1 if one is not found or said to be something else, or if the honest kernel fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.hacks.verified import HACKS, HONEST, UNSEEN, Hack, verified


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hacks", description=__doc__)
    parser.add_argument("--budget", default="60s", help="for each hack")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="kernels of these names")
    arguments = parser.parse_args()
    options = ("--budget", arguments.budget, "--seed", arguments.seed, "--device", arguments.device)
    streams = [Hack("stream not joined", "not_joined", "stream_not_joined", "by a stream")]
    hacks = [*HACKS, *(streams if arguments.device == "cuda" else []), UNSEEN]
    print("| hack | found by | seconds | cases | what is said |")
    print("|---|---|---|---|---|")
    all_found = True
    with tempfile.TemporaryDirectory() as folder:
        for hack in hacks:
            if not arguments.only or hack.name in arguments.only:
                all_found &= _row(hack, Path(folder), options)
        status, told = verified(HONEST, Path(folder), *options)
    seconds, cases, verdict = told["elapsed_s"], told["cases"], told["verdict"]
    print(f"| none: the kernel that they are made of | | {seconds:.1f} | {cases} | {verdict} |")
    sys.exit(not all_found or status != 0)


def _row(hack: Hack, folder: Path, options: tuple[str, ...]) -> bool:
    _, told = verified(hack.target, folder, *options)
    found = told["counterexample"]
    oracle, message = (found["oracle"], found["message"]) if found else ("not found", "")
    said = " ".join((message, *found["details"])) if found else ""
    print(f"| {hack.what} | {oracle} | {told['elapsed_s']:.1f} | {told['cases']} | {message} |", flush=True)
    return hack is UNSEEN or (bool(found) and hack.says in said)


if __name__ == "__main__":
    main()
