"""Tests that take turns: a case of a test with the mark `rotates` runs on one day of a few.

Slow tests, and those of clusters, take turns without that mark: there are more than a thousand of them.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable

import pytest

DAYS = 5
"""After so many days each case has run. A slow test, or one of a cluster, with the mark `rotates(1)` runs each day."""


def left_out(items: Iterable[pytest.Item], today: int) -> set[pytest.Item]:
    """Returns the tests whose day is another one.

    Args:
        items: all tests.
        today: the number of the day.
    """
    found = set()
    cases: defaultdict[str, list] = defaultdict(list)
    for item in items:
        marker = _marker(item)
        if marker and (today - _day(item, marker, cases)) % marker.args[0]:
            found.add(item)
    return found


def _marker(item: pytest.Item) -> pytest.Mark | None:
    own = item.get_closest_marker("rotates")
    if own or not (item.get_closest_marker("slow") or item.get_closest_marker("cluster")):
        return own
    return pytest.mark.rotates(DAYS).mark


def _day(item: pytest.Item, marker: pytest.Mark, cases: defaultdict[str, list]) -> int:
    """The day that the mark names, or one that follows from the number of the case of a parametrized test.

    Each test begins with another day, else most tests of few cases would have their first case on the same one. Tests
    of a file whose cases take turns by an argument begin with the same day: their fixtures train what these ask for.

    Args:
        item: the test.
        marker: its mark.
        cases: the cases of each test before this one; a new case is added.
    """
    if not 0 < marker.args[0] <= DAYS:
        raise pytest.UsageError(f"{item.nodeid}: rotates({marker.args[0]}), but a case runs at least each {DAYS} days")
    if len(marker.args) == 2:
        return marker.args[1]
    name, by = item.nodeid.partition("[")[0], marker.kwargs.get("by")
    case = item.callspec.params[by] if by else item.nodeid  # type: ignore[attr-defined] # of a parametrized test
    if case not in cases[name]:
        cases[name].append(case)
    return cases[name].index(case) + zlib.crc32((name.partition("::")[0] if by else name).encode())
