"""`python -m tests.plain`: what a newcomer is told of plain kernels and of their bugs, as a table in Markdown.

Each kernel is searched with nothing declared, and so is the same kernel with its bug. Then what was printed of the
correct one is pasted into a copy, which is searched for longer. The exit status is 1 if a correct kernel has a finding,
with or without its declaration, or a wrong one has not exactly one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.plain.pairs import PAIRS, Pair, Told, explore


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.plain", description=__doc__)
    parser.add_argument("--budget", default="60s", help="for each kernel, with and without its bug")
    parser.add_argument("--silent", default="10m", help="for each copy with the printed declaration")
    parser.add_argument("--only", nargs="+", metavar="KERNEL", help="these correct kernels")
    arguments = parser.parse_args()
    pairs = [pair for pair in PAIRS if not arguments.only or pair.correct in arguments.only]
    print(f"| kernel | findings | with its bug | declaration printed | findings with it in {arguments.silent} |")
    print("|---|---|---|---|---|")
    all_right = True
    for pair in pairs:
        right, wrong, silent = _searched(pair, arguments.budget, arguments.silent)
        numbers = [len(told.counted) for told in (right, wrong, silent)]
        all_right &= numbers == [0, 1, 0]
        cells = [pair.correct, f"{numbers[0]} in {right.cases} cases", f"{numbers[1]} in {wrong.cases}"]
        print("|", " | ".join([*cells, f"`{right.inferred}`", f"{numbers[2]} in {silent.cases}"]), "|", flush=True)
    sys.exit(not all_right)


def _searched(pair: Pair, budget: str, silent: str) -> tuple[Told, Told, Told]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy = folder / "mine.py"
        copy.write_text(pair.file.read_text())
        found = [explore(folder, f"mine.py:{one}", budget=budget)[0][one] for one in (pair.correct, pair.wrong)]
        copy.write_text(_declared(copy.read_text(), pair.correct, found[0].inferred))
        declared, _ = explore(folder, f"mine.py:{pair.correct}", budget=silent)
        return found[0], found[1], declared[pair.correct]


def _declared(source: str, kernel: str, supports: str | None) -> str:
    """``source`` with what was printed of ``kernel``."""
    before, name, after = source.partition(f'")\ndef {kernel}(')
    if not name:
        raise ValueError(f"no kernel {kernel} that declares nothing")
    return before + (f'", supports=attnfuzz.{supports}' if supports else '"') + name[1:] + after


if __name__ == "__main__":
    main()
