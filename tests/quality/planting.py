"""Plants a bug in a copy of the bundled kernels, so that attnfuzz can be shown to find it."""

from __future__ import annotations

from pathlib import Path

from tests.quality.mutants import Mutant

__all__ = ["KERNELS", "plant"]

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def plant(mutant: Mutant, folder: Path) -> str:
    """Write the mutated kernels to ``folder`` as modules of their own; returns the target of the mutated kernel.

    Raises ValueError if an edit no longer fits the kernels it was written for.
    """
    sources = {path.name: path.read_text() for path in KERNELS.glob("*.py") if path.name != "__init__.py"}
    for edit in mutant.edits:
        found = sources[edit.file].count(edit.old)
        if found != 1:
            raise ValueError(f"mutant {mutant.name}: {edit.old!r} occurs {found} times in {edit.file}; must be once")
        sources[edit.file] = sources[edit.file].replace(edit.old, edit.new)
    prefix = f"mutant_{mutant.name}_"
    for name, source in sources.items():
        # Flat modules with names of their own: no copy can be mistaken for the real kernels, or for another mutant.
        source = source.replace("from attnfuzz.kernels import eager, launch, launch_paged", _aliases(prefix))
        (folder / f"{prefix}{name}").write_text(source.replace("from attnfuzz.kernels.", f"from {prefix}"))
    return f"{folder / (prefix + 'bundled.py')}:{mutant.kernel}"


def _aliases(prefix: str) -> str:
    return "\n".join(f"import {prefix}{name} as {name}" for name in ("eager", "launch", "launch_paged"))
