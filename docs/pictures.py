"""Make docs/pictures anew: `make pictures`, or `python docs/pictures.py FOLDER`.

The kernel is that of docs/first-finding.md, which loads V without a mask, with wrong KV heads as a second bug. What is
shown is what `attnfuzz explore` makes of it on a CPU: the panel as a terminal showed it, the report as Chromium does.
"""

import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.text import Text

PAGE = Path(__file__).parent / "first-finding.md"
COLUMNS, LINES = 110, 30
ATTNFUZZ = [sys.executable, "-m", "attnfuzz"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
NEW_FRAME = re.compile(r"(?:\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)+)|\x1b\[\?25[lh]")
"""How rich begins to draw over what it drew before."""


def main(folder: Path) -> None:
    """Write weights.svg, panel.svg and, where there is a Chromium, report.png to ``folder``."""
    with TemporaryDirectory() as made:
        work = Path(made)
        (work / "pyproject.toml").touch()
        text = PAGE.read_text(encoding="utf-8")
        (kernel,) = re.findall(r"```python\n(# my_decode\.py\n.*?)```", text, re.DOTALL)
        before, after = (re.findall(rf"^\{sign}(.*)$", text, re.MULTILINE)[0] for sign in "-+")
        (work / "heads.json").write_text(re.findall(r"```json\n(.*?)```", text, re.DOTALL)[0], encoding="utf-8")

        wrong_heads = kernel.replace("head // group_size", "head % num_kv_heads")
        (work / "my_decode.py").write_text(wrong_heads.replace(before, after), encoding="utf-8")
        run(work, "explain", "heads.json", "-o", os.fspath(folder.resolve() / "weights.svg"))

        (work / "my_decode.py").write_text(wrong_heads, encoding="utf-8")
        command = ["explore", "my_decode.py", "--budget", "30s", "--seed", "0", "--device", "cpu"]
        shown = in_terminal(work, *command, "--html", "report.html")
        drawn = terminal(screen(shown), f"attnfuzz {' '.join(command[:4])}")
        (folder / "panel.svg").write_text(drawn, encoding="utf-8")
        if browser := next(filter(None, map(shutil.which, BROWSERS)), None):
            photograph(browser, work / "report.html", folder / "report.png")
        else:
            print("there is no Chromium (apt-get install chromium), so report.png is left as it was", file=sys.stderr)


def run(work: Path, *arguments: str) -> None:
    """A command of attnfuzz, whose exit status tells of the kernel."""
    environment = {**os.environ, "PYTHONPATH": os.fspath(PAGE.parents[1])}
    subprocess.run([*ATTNFUZZ, *arguments], cwd=work, env=environment, stdout=subprocess.DEVNULL, check=False)


def in_terminal(work: Path, *arguments: str) -> str:
    """All that a command of attnfuzz writes to a terminal."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {
        **os.environ,
        "PYTHONPATH": os.fspath(PAGE.parents[1]),
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
    }
    process = subprocess.Popen(
        [*ATTNFUZZ, *arguments], cwd=work, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = b""
    while process.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                written += os.read(ours, 1 << 16)
            except OSError:  # how a terminal says that its last writer is gone
                break
    process.wait()
    os.close(ours)
    return written.decode().replace("\r\n", "\n")


def screen(written: str) -> str:
    """The panel while a finding is made smaller, with the lines above it."""
    above, screens = [], []
    for text in NEW_FRAME.split(written):
        lines = text.split("\n")
        clock = next((number for number, line in enumerate(lines) if line.endswith(" left\x1b[0m")), None)
        if clock is not None:
            above += lines[: clock - 1]
            screens.append("\n".join([*above, *lines[clock - 1 :]]))
    return next((one for one in screens if re.search(r"shrinking, [1-9]", one)), screens[-1])


def terminal(text: str, title: str) -> str:
    """A picture of a terminal with ``text`` in it, in the fonts of whoever looks at it."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text.strip("\n")))
    drawn = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=title), flags=re.DOTALL)
    return re.sub(r"\s*\n\s*", "\n", drawn).replace("Fira Code, monospace", "ui-monospace, monospace")


def photograph(browser: str, page: Path, picture: Path) -> None:
    """The first screen of ``page``."""
    subprocess.run(
        [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--blink-settings=preferredColorScheme=1", "--window-size=1100,1270",
            f"--user-data-dir={page.parent / 'profile'}", f"--screenshot={picture.resolve()}", page.as_uri(),
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE.parent / "pictures")
