"""Line charts: an SVG that stretches with the page, with labels in HTML so that they keep their size."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tfdist_cli.report import figures
from tfdist_cli.report.markup import Markup, join, tag

COLOURS = 10
"""Colours of lines; see report.css."""
MOST_POINTS = 400
"""Points of a line that are drawn; of more, the extremes of each part are kept."""
_SIZE = 1000
"""Width and height of the drawing, in units of its own."""


@dataclass(frozen=True)
class Series:
    """A line.

    Args:
        name: its name in the legend.
        points: (x, y), in the order of x. A y that is not finite interrupts the line.
        colour: the number of its colour.
        dashed: whether it is dashed.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis.

    Args:
        name: what it shows, with its unit.
        text: formats a value.
        ticks: chooses round values from the least to the largest one.
        from_zero: whether it begins at 0.
    """

    name: str
    text: Callable[[float], str] = figures.plain
    ticks: Callable[[float, float], list[float]] = field(default=figures.ticks)
    from_zero: bool = False


STEP = Axis("step")
TIME = Axis("time", figures.time, figures.time_ticks)
RATE = Axis("steps/s", from_zero=True)


def chart(title: str, series: Iterable[Series], x: Axis = STEP, y: Axis | None = None) -> Markup:
    """Returns a chart; an empty text if no line has a point.

    Args:
        title: its title.
        series: the lines.
        x: the axis below.
        y: the axis at the left.
    """
    y = y or Axis("")
    lines = [each for each in series if any(math.isfinite(value) for _, value in each.points)]
    if not lines:
        return Markup()
    left, right = _range([at for line in lines for at, _ in line.points], x)
    low, high = _range([value for line in lines for _, value in line.points if math.isfinite(value)], y)
    low, high = _padded(low, high, y)

    def across(at: float) -> float:
        return (at - left) / (right - left) if right > left else 0.5

    def up(value: float) -> float:
        return (value - low) / (high - low)

    thinned = [Series(each.name, thin(each.points), each.colour, each.dashed) for each in lines]
    drawing = tag(
        "svg",
        *(_rule(up(value)) for value in y.ticks(low, high)),
        *(shape for line in thinned for shape in _shapes(line, across, up)),
        viewBox=f"0 0 {_SIZE} {_SIZE}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )
    labels = [tag("span", y.text(value), class_="y", style=f"bottom:{up(value):.2%}") for value in y.ticks(low, high)]
    labels += [tag("span", x.text(at), class_="x", style=f"left:{across(at):.2%}") for at in x.ticks(left, right)]
    unit = tag("small", f" {y.name}") if y.name else ""
    data = _data(thinned, x, (left, right), (low, high))
    return tag(
        "figure",
        tag("figcaption", title, unit),
        tag("div", drawing, *labels, class_="plot", data_chart=data, role="img", aria_label=_spoken(title, lines, y)),
        _legend(thinned) if len(lines) > 1 else "",
        _notes(lines),
        class_="chart",
    )


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Keeps at most `most` points: the first, the last, and the smallest and largest of each part."""
    if len(points) <= most:
        return list(points)
    kept = {0, len(points) - 1}
    size = len(points) / (most // 2 - 1)
    for part in range(most // 2 - 1):
        indices = range(int(part * size), int((part + 1) * size))
        finite = [index for index in indices if math.isfinite(points[index][1])] or [indices[0]]
        kept |= {min(finite, key=lambda index: points[index][1]), max(finite, key=lambda index: points[index][1])}
    return [points[index] for index in sorted(kept)]


def _range(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    return min(0.0, *values) if axis.from_zero else min(values), max(values)


def _padded(low: float, high: float, axis: Axis) -> tuple[float, float]:
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low if axis.from_zero and low >= 0 else low - margin), high + margin


def _rule(height: float) -> Markup:
    y = round(_SIZE * (1 - height), 1)
    return tag("line", x1=0, x2=_SIZE, y1=y, y2=y, class_="rule")


def _shapes(line: Series, across: Callable[[float], float], up: Callable[[float], float]) -> Iterable[Markup]:
    """Yields a polyline for each part of a line between values that are not finite."""
    for finite, part in groupby(line.points, key=lambda point: math.isfinite(point[1])):
        placed = [(round(across(at) * _SIZE, 1), round((1 - up(value)) * _SIZE, 1)) for at, value in part if finite]
        if not placed:
            continue
        if len(placed) == 1:
            placed = [placed[0], placed[0]]  # a round cap makes it a dot
        single = " dot" if placed[0] == placed[-1] else ""
        dashed = " dashed" if line.dashed else ""
        text = " ".join(f"{x:g},{y:g}" for x, y in placed)
        yield tag("polyline", points=text, class_=f"s{line.colour % COLOURS}{dashed}{single}")


def _data(lines: Sequence[Series], x: Axis, across: tuple[float, float], up: tuple[float, float]) -> str:
    """What the script needs to show the values under the pointer, with the texts that it would have to format."""
    series = [
        {
            "name": line.name,
            "colour": line.colour % COLOURS,
            "points": [
                [float(f"{at:.7g}"), float(f"{value:.5g}")] for at, value in line.points if math.isfinite(value)
            ],
        }
        for line in lines
    ]
    kind = "time" if x is TIME else "number"
    return json.dumps({"x": across, "y": up, "kind": kind, "name": x.name, "series": series}, separators=(",", ":"))


def _short(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _legend(lines: Sequence[Series]) -> Markup:
    def key(line: Series) -> Markup:
        return tag("i", class_=f"s{line.colour % COLOURS}{' dashed' if line.dashed else ''}")

    return tag("div", *(tag("span", key(line), line.name) for line in lines), class_="legend")


def _spoken(title: str, lines: Sequence[Series], y: Axis) -> str:
    """The chart for those who cannot see it: the last value of each line."""
    last = [
        (line.name, next(value for _, value in reversed(line.points) if math.isfinite(value))) for line in lines[:10]
    ]
    return f"{title}, the last values: " + ", ".join(f"{name} {y.text(value)}" for name, value in last)


def _notes(lines: Sequence[Series]) -> Markup:
    bad = {line.name: sum(not math.isfinite(value) for _, value in line.points) for line in lines}
    texts = [f"{count} values of {name} are not finite" for name, count in bad.items() if count]
    return tag("p", "; ".join(texts), class_="note") if texts else join()
