"""The plot of the published figures."""

from benchmarks.grid import CONTESTS, FIGURES
from benchmarks.plot import title


def test_each_published_contest_has_a_bar_of_its_own():
    assert len({title(CONTESTS[name]) for name in FIGURES}) == len(FIGURES)
