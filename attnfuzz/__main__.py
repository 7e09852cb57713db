"""``python -m attnfuzz``."""

import sys

from attnfuzz.safe_start import put_path_in_order


def _main() -> None:
    """Python has put the working directory first, where a file could be taken for an installed module."""
    if not sys.flags.safe_path:
        del sys.path[0]
    put_path_in_order()
    from attnfuzz.cli import main

    main()


_main()
