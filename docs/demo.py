"""A bug found, replayed, repaired and replayed, on the broken kernel of docs/first-finding.md: `make demo`."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "first-finding.md"
ATTNFUZZ = [sys.executable, "-P", "-m", "attnfuzz"]


def main(folder: Path) -> str | None:
    """Work in ``folder``; what was not as the page promises, or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").touch()  # it is a project: regressions/ is saved here
    text = PAGE.read_text(encoding="utf-8")
    (kernel,) = re.findall(r"```python\n(# my_decode\.py\n.*?)```", text, re.DOTALL)
    wrong, right = (re.findall(rf"^\{sign}(.*)$", text, re.MULTILINE)[0] for sign in "-+")
    (folder / "my_decode.py").write_text(kernel, encoding="utf-8")
    say(f"A paged decode kernel with one bug: {folder / 'my_decode.py'}")
    if run(folder, "explore", "my_decode.py", "--budget", "60s", "--fail-fast", "--quiet") != 1:
        return "the bug was not found in a minute: this machine is busy; run it again"
    say("The finding is saved. It fails again whenever it is run:")
    if run(folder, "replay") != 1:
        return "the saved case did not fail again"
    say(f"Now the repair, of one line of my_decode.py:\n\n-{wrong}\n+{right}\n")
    (folder / "my_decode.py").write_text(kernel.replace(wrong, right), encoding="utf-8")
    if run(folder, "replay") != 0:
        return "the repaired kernel still fails"
    say(
        "Now yours. Decorate the function that launches your kernel, as docs/first-finding.md shows, then\n\n"
        "  . .venv/bin/activate\n  attnfuzz explore path/to/your_kernel.py"
    )
    return None


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


def run(folder: Path, *arguments: str) -> int:
    say(f"$ {shlex.join(['attnfuzz', *arguments])}")
    environment = {**os.environ, "PYTHONPATH": os.fspath(PAGE.parents[1])}
    return subprocess.run([*ATTNFUZZ, *arguments], cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(*sys.argv[1:2] or ["build/demo"])))
