"""``python -m attnfuzz``."""

import sys

# Python has put the working directory first, where a file could be taken for an installed module. What follows is found
# in the package that runs.
if not sys.flags.safe_path:
    del sys.path[0]

from attnfuzz.cli import main

main()
