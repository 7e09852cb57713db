"""Drawings for HTML pages: elements whose attributes and texts are escaped."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape

from attnfuzz.untrusted_text import only_printable

Attribute = str | float | None


def element(tag: str, *children: Markup, **attributes: Attribute) -> Markup:
    """``<tag ...>children</tag>``. ``stroke_width`` is written stroke-width, ``class_`` class; None is left out."""
    named = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items() if value is not None)
    written = Markup("").join(
        Markup(' {}="{}"').format(name, number(value) if isinstance(value, float) else value) for name, value in named
    )
    return Markup("<{0}{1}>{2}</{0}>").format(tag, written, Markup("").join(children))


def text(content: str, x: float, y: float, **attributes: Attribute) -> Markup:
    """A ``<text>`` whose baseline begins at (``x``, ``y``), unless ``text_anchor`` says otherwise."""
    return element("text", escape(only_printable(content)), x=float(x), y=float(y), **attributes)


def path_of_rects(rects: Iterable[tuple[float, float, float, float]]) -> str:
    """The ``d`` of one path that draws all of ``(x, y, width, height)``: far shorter than as many elements."""
    return "".join(
        f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h{number(-width)}z" for x, y, width, height in rects
    )


def number(value: float) -> str:
    """At most two decimals, and none that are 0."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else str(int(value))
