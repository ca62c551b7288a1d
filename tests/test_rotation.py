"""Tests that take turns: each case has one day of a few."""

from collections import Counter
from types import SimpleNamespace

import pytest

from tests.support.rotation import DAYS, left_out

TURNS = 3
"""How often the days come in turn."""


class Item:
    """What is asked of a test."""

    def __init__(self, test, case, *mark, marks=(), **by):
        self.nodeid = f"{test}[{case}]"
        self.callspec = SimpleNamespace(params={"kind": case.partition("-")[0]})
        self.markers = {name: getattr(pytest.mark, name).mark for name in marks}
        if mark:
            self.markers["rotates"] = pytest.mark.rotates(*mark, **by).mark

    def get_closest_marker(self, name):
        return self.markers.get(name)


def days_of(items):
    """The days on which each test runs, of as many in turn that all turns are complete."""
    run = {item.nodeid: [] for item in items}
    for today in range(700_000, 700_000 + TURNS * DAYS):
        for item in set(items) - left_out(items, today):
            run[item.nodeid].append(today % DAYS)
    return run


def test_each_case_has_a_day():
    days = days_of([Item("a.py::test", str(case), DAYS) for case in range(12)])
    assert all(len(own) == TURNS and len(set(own)) == 1 for own in days.values())
    assert sorted(Counter(own[0] for own in days.values()).values()) == [2, 2, 2, 3, 3]


def test_a_day_may_be_named_and_other_tests_run_each_day():
    days = days_of([Item("a.py::test", "x", DAYS, 3), Item("a.py::test", "y")])
    assert days == {"a.py::test[x]": [3] * TURNS, "a.py::test[y]": [*range(DAYS)] * TURNS}


def test_slow_tests_and_those_of_clusters_take_turns():
    cases = "wxyz"
    days = days_of(
        [
            *(Item("a.py::test", case, marks=["slow"]) for case in cases),
            *(Item("b.py::test", case, marks=["cluster"]) for case in cases),
            Item("c.py::test", "x", 1, marks=["slow"]),
            Item("d.py::test", "x", DAYS, 3, marks=["slow"]),
        ]
    )
    counts = {name: len(own) for name, own in days.items()}
    assert {counts[f"{file}.py::test[{case}]"] for file in "ab" for case in cases} == {TURNS}
    assert counts["c.py::test[x]"] == TURNS * DAYS
    assert days["d.py::test[x]"] == [3] * TURNS


def test_first_cases_have_all_days():
    days = days_of([Item(f"a.py::test_{number}", "x", DAYS) for number in range(200)])
    assert min(Counter(own[0] for own in days.values()).values()) > 200 / DAYS / 2


def test_cases_of_a_file_with_one_value_run_together():
    cases = ["a-x", "a-y", "b-x", "b-y"]
    days = days_of([Item(f"a.py::{test}", case, DAYS, by="kind") for test in "st" for case in cases])
    assert len({tuple(own) for name, own in days.items() if "[a-" in name}) == 1
    assert len({tuple(own) for name, own in days.items() if "[b-" in name}) == 1
    assert len({tuple(own) for own in days.values()}) == 2


def test_no_case_waits_longer():
    with pytest.raises(pytest.UsageError, match=r"a\.py::test"):
        days_of([Item("a.py::test", "x", DAYS + 1)])
