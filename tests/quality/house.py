"""How large the package is, and how far one idea is spread in it: ``python -m tests.quality.house [ROOT ...]``.

Prints one table with a column for each ROOT (a checkout; by default this one), so that two states of the tree can be
set beside each other: ``git worktree add ../before COMMIT`` and ``python -m tests.quality.house ../before .``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAME_LINES = 6
FIELDS = ("v_head_size", "query_lens", "layout", "variant")
_OF_CASE = re.compile(r"isinstance\([^()]*\b\w*Case\b")


def measured(root: Path) -> dict[str, str]:
    """What is counted, by its words."""
    sources = sorted(path for folder in ("attnfuzz", "kernels", "strategies") for path in _python(root / folder))
    tests = list(_python(root / "tests"))
    texts = {path: path.read_text(encoding="utf-8") for path in sources}
    folders = Counter(path.parent.relative_to(root) for path in sources)
    lines = Counter({path: text.count("\n") for path, text in texts.items()})
    folder, modules = folders.most_common(1)[0]
    longest, length = lines.most_common(1)[0]
    counted = {
        "lines": f"{sum(lines.values()):,}",
        "modules": f"{len(sources):,}",
        "lines of tests": f"{sum(path.read_text(encoding='utf-8').count(chr(10)) for path in tests):,}",
        "files of tests": f"{len(tests):,}",
        "most modules in one folder": f"{modules} ({folder})",
        "longest module": f"{length} ({longest.relative_to(root)})",
        "`isinstance(..., ...Case)`": str(sum(len(_OF_CASE.findall(text)) for text in texts.values())),
        "public classes whose name exists twice": str(len(_twice(texts))),
        f"pairs of places that share {SAME_LINES} lines": str(_pairs_alike(texts)),
    }
    outside = {path: text for path, text in texts.items() if root / "kernels" not in path.parents}
    for field in FIELDS:
        named = sum(bool(re.search(rf"\b{field}\b", text)) for text in outside.values())
        counted[f"modules outside kernels/ that name `{field}`"] = str(named)
    return counted


def _python(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*.py") if not any(part.is_symlink() for part in path.parents))


def _twice(texts: dict[Path, str]) -> list[str]:
    names = Counter(
        node.name
        for text in texts.values()
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sorted(name for name, times in names.items() if times > 1)


def _pairs_alike(texts: dict[Path, str]) -> int:
    """Runs of lines that stand in two places; those of imports and of a module's head say nothing."""
    seen: Counter[str] = Counter()
    for text in texts.values():
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if len(line) > 3 and not line.startswith(("from ", "import ", '"', "#"))]
        seen.update("\n".join(lines[i : i + SAME_LINES]) for i in range(0, len(lines) - SAME_LINES + 1))
    return sum(times * (times - 1) // 2 for times in seen.values())


def main() -> None:
    roots = [Path(argument).resolve() for argument in sys.argv[1:]] or [ROOT]
    tables = [measured(root) for root in roots]
    print(f"| | {' | '.join(root.name for root in roots)} |")
    print(f"|---|{'---|' * len(roots)}")
    for name in tables[0]:
        print(f"| {name} | {' | '.join(table[name] for table in tables)} |")


if __name__ == "__main__":
    main()
