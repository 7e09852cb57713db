"""Plants a bug in a copy of the bundled kernels, so that attnfuzz and other test suites can be shown to find it."""

from __future__ import annotations

from pathlib import Path

from attnfuzz.overlay import write_overlay
from tests.quality.mutants import Mutant

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def plant(mutant: Mutant, folder: Path) -> str:
    """Write the mutated kernels to ``folder``, as a package and a file that declares them; returns the mutated one.

    Raises ValueError if an edit no longer fits the kernels it was written for.
    """
    # With a name of its own: no copy can be mistaken for the real kernels, or for another mutant.
    package = f"mutant_{mutant.name}_kernels"
    entry = folder / f"mutant_{mutant.name}_bundled.py"
    for name, source in _sources(mutant).items():
        path = entry if name == "bundled.py" else folder / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.replace("attnfuzz.kernels", package))
    return f"{entry}:{mutant.kernel}"


def lay_over(mutant: Mutant, folder: Path) -> Path:
    """Write the files that the mutant changes to ``folder``, and an overlay that has them loaded; returns the overlay.

    Raises ValueError as `plant` does.
    """
    sources = _sources(mutant)
    copies = {name: folder / name.replace("/", "_") for name in {edit.file for edit in mutant.edits}}
    for name, copy in copies.items():
        copy.write_text(sources[name])
    write_overlay(folder / "overlay.json", {KERNELS / name: copy for name, copy in copies.items()})
    return folder / "overlay.json"


def _sources(mutant: Mutant) -> dict[str, str]:
    """All files of the kernels by their paths within `kernels/`, with the mutant's edits."""
    sources = {path.relative_to(KERNELS).as_posix(): path.read_text() for path in KERNELS.rglob("*.py")}
    for edit in mutant.edits:
        found = sources[edit.file].count(edit.old)
        if found != 1:
            raise ValueError(f"mutant {mutant.name}: {edit.old!r} occurs {found} times in {edit.file}; must be once")
        sources[edit.file] = sources[edit.file].replace(edit.old, edit.new)
    return sources
