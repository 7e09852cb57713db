"""Makes the stacks that faulthandler writes fit to be read: the executor's own frames are in all of them."""

import re

__all__ = ["strip_framework_frames"]

_FRAME = re.compile(r'^  File "(?P<path>[^"]*)", line \d+ in ')
_FRAMEWORK = re.compile(r"[/\\]attnfuzz[/\\](safe_start|execution[/\\](serve|nursery|zygote))\.py$|^<frozen runpy>$")


def strip_framework_frames(output: str) -> str:
    """`output` without the stack frames of the isolation layer and without the list of loaded extension modules."""
    return "".join(line for line in output.splitlines(keepends=True) if not _is_noise(line))


def _is_noise(line: str) -> bool:
    frame = _FRAME.match(line)
    return line.startswith("Extension modules: ") or (frame is not None and bool(_FRAMEWORK.search(frame["path"])))
