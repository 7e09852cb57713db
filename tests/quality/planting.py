"""Plants a bug in a copy of the bundled kernels, so that attnfuzz and other test suites can be shown to find it."""

from __future__ import annotations

import re
from pathlib import Path

from attnfuzz.overlay import write_overlay
from tests.quality.mutants import Mutant

__all__ = ["KERNELS", "lay_over", "plant"]

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

_IMPORT_OF_MODULES = re.compile(r"^from attnfuzz\.kernels import (\([^)]*\)|.*)$", re.MULTILINE)


def plant(mutant: Mutant, folder: Path) -> str:
    """Write the mutated kernels to ``folder`` as modules of their own; returns the target of the mutated kernel.

    Raises ValueError if an edit no longer fits the kernels it was written for.
    """
    prefix = f"mutant_{mutant.name}_"
    for name, source in _sources(mutant).items():
        # Flat modules with names of their own: no copy can be mistaken for the real kernels, or for another mutant.
        source = _IMPORT_OF_MODULES.sub(lambda found: _aliases(found[1], prefix), source)
        (folder / f"{prefix}{name}").write_text(source.replace("from attnfuzz.kernels.", f"from {prefix}"))
    return f"{folder / (prefix + 'bundled.py')}:{mutant.kernel}"


def lay_over(mutant: Mutant, folder: Path) -> Path:
    """Write the files that the mutant changes to ``folder``, and an overlay that has them loaded; returns the overlay.

    Raises ValueError as `plant` does.
    """
    sources = _sources(mutant)
    changed = {edit.file for edit in mutant.edits}
    for name in changed:
        (folder / name).write_text(sources[name])
    write_overlay(folder / "overlay.json", {KERNELS / name: folder / name for name in changed})
    return folder / "overlay.json"


def _sources(mutant: Mutant) -> dict[str, str]:
    """All files of the kernels, with the mutant's edits."""
    sources = {path.name: path.read_text() for path in KERNELS.glob("*.py") if path.name != "__init__.py"}
    for edit in mutant.edits:
        found = sources[edit.file].count(edit.old)
        if found != 1:
            raise ValueError(f"mutant {mutant.name}: {edit.old!r} occurs {found} times in {edit.file}; must be once")
        sources[edit.file] = sources[edit.file].replace(edit.old, edit.new)
    return sources


def _aliases(names: str, prefix: str) -> str:
    return "\n".join(f"import {prefix}{name} as {name}" for name in re.findall(r"\w+", names))
