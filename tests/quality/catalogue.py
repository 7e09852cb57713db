"""`python -m tests.quality.catalogue FILE`: every planted bug, as the page docs/quality.md."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.quality.mutants import MUTANTS, Mutant

_KINDS = {
    "A": "empty states",
    "B": "splits",
    "C": "dead memory that leaks",
    "D": "index overflow",
    "E": "strides",
    "F": "block tables",
    "G": "tile and page boundaries",
    "H": "head size and GQA",
    "I": "masks",
    "J": "logits",
    "K": "scales of an 8-bit cache",
    "L": "log-sum-exp",
    "M": "dependence on the batch",
    "N": "stale plans",
    "O": "races and hangs",
    "P": "specialisation",
    "Q": "limits and workspaces",
    "R": "precision",
    "S": "misplaced rows",
}


def catalogue() -> str:
    """The page, of what `mutants.toml` holds."""
    shipped = sum(bool(mutant.reference) for mutant in MUTANTS)
    kinds = ", ".join(f"{letter} {kind}" for letter, kind in _KINDS.items())
    return f"""\
# Planted bugs

{len(MUTANTS)} bugs that attnfuzz must find in the bundled kernels and shrink; {shipped} have shipped in other kernels.
In a clone, to hunt two of them, and all, with the seconds that each took:

```sh
python -m tests.quality --only v_not_masked lse_in_base_two
make quality
```

[Measurements](measurements.md#bugs-found) has how many the newest run found, and how soon.

| column | holds |
|---|---|
| mutant | the bug's name in `tests/quality/mutants.toml`, which has its source |
| class | {kinds} |
| re-created from | reports of the bug in a released kernel; empty: another mistake of the same class |
| check | the [check](oracles.md) that must object; any: whichever objects first |
| smallest | fields of the case that a finding must be shrunk to |

| mutant | bug | class | re-created from | check | smallest |
|---|---|---|---|---|---|
{"".join(map(_row, MUTANTS))}"""


def _row(mutant: Mutant) -> str:
    smallest = ", ".join(f"{name} {value}" for name, value in mutant.minimal.items())
    cells = (mutant.name, mutant.bug, mutant.classes, mutant.reference, mutant.oracle, smallest)
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(catalogue(), encoding="utf-8")
