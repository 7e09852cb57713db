"""``python -m attnfuzz``."""

from attnfuzz.cli import main

main()
