"""Coverage of a kernel's input space for an HTML page: the map of all pairs of levels, and tables of some of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from markupsafe import Markup

from attnfuzz.campaign.draw.coverage import Coverage, Level
from attnfuzz.report.svg import element, number, path_of_rects

__all__ = ["FEATURED", "CoverageMap", "PairTable", "coverage_map", "pair_tables", "shade"]

FEATURED = (
    ("page size", "last page"),
    ("length", "needle"),
    ("head size", "GQA ratio"),
    ("layout", "cache strides"),
    ("dtype", "split filling"),
    ("splits", "length"),
    ("dtype", "last tile"),
    ("prefix LSE", "suffix LSE"),
    ("dtype", "heads"),
    ("head size", "tokens"),
)
"""Pairs of axes with a table of their own, as far as a kernel has them: where bugs in attention kernels are at home."""

_SHADES = (1, 3, 10, 30, 100)
"""A shade begins at each of these numbers of cases."""
_CELL, _AXIS_GAP = 10.0, 5.0
_LABELS = 190.0


def shade(cases: int) -> str:
    """The class of a cell: "hole" for a pair that was never met, then "s1" to "s5" for more cases."""
    return f"s{sum(cases >= least for least in _SHADES)}" if cases else "hole"


@dataclass(frozen=True, slots=True)
class PairTable:
    """Cases by pair of levels of two axes."""

    rows_axis: str
    columns_axis: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[int, ...]], ...]


def pair_tables(coverage: Coverage) -> list[PairTable]:
    """Those of ``FEATURED`` that this kernel has."""
    axes = coverage.axes
    order = {axis: i for i, axis in enumerate(axes)}
    tables = []
    for first, second in FEATURED:
        if first in axes and second in axes:
            one, other = sorted((first, second), key=order.__getitem__)
            rows = tuple(
                (level, tuple(coverage.cases((one, level), (other, partner)) for partner in axes[other]))
                for level in axes[one]
            )
            tables.append(PairTable(one, other, axes[other], rows))
    return tables


@dataclass(frozen=True, slots=True)
class CoverageMap:
    """The drawing, and what its cells are: for the script that tells them when they are pointed at.

    ``cells[i]`` are the cases of level ``i`` with each level before it; -1 on the same axis.
    """

    svg: Markup
    data: dict[str, Any]


def coverage_map(coverage: Coverage) -> CoverageMap:
    """Every level of every axis against every other one, as a triangle with the levels' names along its edge."""
    levels = [(axis, level) for axis, names in coverage.axes.items() for level in names]
    places = list(_places(levels))
    cells = [[_cases(coverage, levels[j], levels[i]) for j in range(i)] for i in range(len(levels))]
    size = places[-1] + _CELL if places else 0.0
    svg = element(
        "svg",
        *_shaded(cells, places),
        *_names(levels, places),
        class_="map",
        viewBox=f"0 0 {number(size + _LABELS)} {number(size + _CELL)}",
        width=size + _LABELS,
        role="img",
        aria_label="cases by pair of features",
    )
    names = [f"{axis}: {level}" for axis, level in levels]
    return CoverageMap(svg, {"names": names, "places": places, "cell": _CELL, "cells": cells})


def _cases(coverage: Coverage, one: Level, other: Level) -> int:
    if one[0] == other[0]:
        return -1
    return coverage.cases(one, other)


def _places(levels: list[Level]) -> Iterator[float]:
    """Where the row and the column of each level begin."""
    place = 0.0
    for _, group in groupby(levels, key=lambda level: level[0]):
        for _ in group:
            yield place
            place += _CELL
        place += _AXIS_GAP


def _shaded(cells: list[list[int]], places: list[float]) -> Iterator[Markup]:
    """One path for each shade."""
    rects: dict[str, list[tuple[float, float, float, float]]] = {}
    for i, row in enumerate(cells):
        for j, cases in enumerate(row):
            if cases >= 0:
                rects.setdefault(shade(cases), []).append((places[j], places[i], _CELL - 1, _CELL - 1))
    return (element("path", d=path_of_rects(found), class_=name) for name, found in sorted(rects.items()))


def _names(levels: list[Level], places: list[float]) -> Iterator[Markup]:
    """Beside the diagonal, where a level's row ends and its column begins; an axis is named beside its first level."""
    shown = ""
    for level, place in zip(levels, places, strict=True):
        axis, name = level
        label = element("tspan", Markup.escape(name))
        if axis != shown:
            label += element("tspan", Markup.escape(f"  {axis}"), class_="axis")
        shown = axis
        yield element("rect", x=place, y=place, width=_CELL - 1, height=_CELL - 1, class_="self")
        yield element("text", label, x=place + _CELL + 3, y=place + _CELL - 1.5, class_="name")
