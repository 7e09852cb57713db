"""The drawing of an explanation as pixels, by resvg."""

from __future__ import annotations

from attnfuzz.report.explained import Explained
from attnfuzz.report.explained_svg import explained_svg

__all__ = ["RasteriserMissing", "explained_png"]

_ZOOM = 2.0
"""For screens with small pixels."""


class RasteriserMissing(ImportError):  # noqa: N818 - says what is missing
    """resvg is not installed; the message is one sentence with the remedy."""


def explained_png(explained: Explained) -> bytes:
    """The file, light. Raises RasteriserMissing."""
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise RasteriserMissing("a PNG needs resvg: pip install 'attnfuzz[png]', or name a file.svg") from error
    return svg_to_bytes(svg_string=explained_svg(explained, dark_screens=False), zoom=_ZOOM)
