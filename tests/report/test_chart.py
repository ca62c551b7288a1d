"""Charts and their axes."""

import json
import math
import re

import pytest

from tfdist_cli.report import figures
from tfdist_cli.report.chart import MOST_POINTS, RATE, Series, chart, thin


def shapes(html):
    return [
        [tuple(map(float, each.split(","))) for each in text.split()] for text in re.findall(r'points="([^"]*)"', html)
    ]


def test_a_line_spans_the_drawing():
    ((first, middle, last),) = shapes(chart("x", [Series("a", [(0, 0), (5, 1), (10, 2)])], y=RATE))
    assert (first[0], middle[0], last[0]) == (0, 500, 1000)
    assert first[1] == 1000 > middle[1] > last[1] > 0


def test_values_that_are_not_finite_interrupt_it():
    points = [(0, 1.0), (1, 2.0), (2, math.nan), (3, 3.0), (4, math.inf), (5, 1.0), (6, 2.0)]
    html = chart("x", [Series("a", points)])
    assert [len(part) for part in shapes(html)] == [2, 2, 2]
    assert len(set(shapes(html)[1])) == 1  # a dot
    (found,) = re.findall(r'data-chart="([^"]*)"', html)
    data = json.loads(found.replace("&quot;", '"'))
    assert [x for x, _ in data["series"][0]["points"]] == [0, 1, 3, 5, 6]


@pytest.mark.parametrize("points", [[], [(0, math.nan)]])
def test_nothing_to_draw_is_no_chart(points):
    assert chart("x", [Series("a", points)]) == ""


@pytest.mark.parametrize("points", [[(1, 1)], [(1, 0), (2, 0)], [(0, 1e300), (1, -1e300)], [(0, 5e-324)], [(2**62, 1)]])
def test_any_values_are_drawn_inside(points):
    html = chart("x", [Series("a", points)])
    drawn = [value for part in shapes(html) for point in part for value in point]
    assert drawn
    assert all(0 <= value <= 1000 for value in drawn)


def test_many_points_keep_their_extremes():
    points = [(float(x), 0.0) for x in range(100_000)]
    points[777], points[99_000] = (777.0, 9.0), (99_000.0, -9.0)
    kept = thin(points)
    assert len(kept) <= MOST_POINTS
    assert {points[0], points[777], points[99_000], points[-1]} <= set(kept)
    assert kept == sorted(kept)
    assert len(thin([(float(x), math.nan) for x in range(10_000)])) <= MOST_POINTS


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2.5, 5, 7.5, 10]), (0, 1, [0, 0.25, 0.5, 0.75, 1]), (3, 3, [3]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round(low, high, expected):
    assert figures.ticks(low, high) == pytest.approx(expected)


def test_ticks_of_times_are_those_of_a_clock():
    assert figures.time_ticks(0, 3600) == [0, 900, 1800, 2700, 3600]
    assert figures.time_ticks(7, 100) == [30, 60, 90]
    assert len(figures.time_ticks(0, 1e8)) < 8
    assert len(figures.time_ticks(0, 0.01)) > 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (figures.plain(None), figures.UNKNOWN),
        (figures.plain(1234567.0), "1,234,567"),
        (figures.plain(0.123456), "0.1235"),
        (figures.plain(math.nan), "nan"),
        (figures.size(1.234e9), "1.23 GB"),
        (figures.size_rate(999.7), "1 kB/s"),
        (figures.time(3.456), "3.46 s"),
        (figures.time(125), "2 min 5 s"),
        (figures.time(7500), "2 h 5 min"),
    ],
)
def test_figures(text, expected):
    assert text == expected
