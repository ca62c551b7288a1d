"""Shared by all tests: signals as in a terminal, and long tests that take turns from day to day."""

import datetime
import logging
import os
import signal
from collections import defaultdict

import hypothesis
import pytest

hypothesis.settings.register_profile("tfdist", deadline=None)
hypothesis.settings.load_profile("tfdist")  # an example takes as long as the machine's load lets it
pytest_plugins = ("tests.support.s3_fixtures",)
_DAY = "TFDIST_TEST_DAY"
"""The number of the day, which chooses the rotating tests. One process sets it for all, also when midnight comes."""


def pytest_configure():
    """Restores default signal handling: below nohup, or behind a `&`, started programs would ignore some signals."""
    for each, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(each) is signal.SIG_IGN:
            signal.signal(each, usual)
    os.environ.setdefault(_DAY, str(datetime.datetime.now(datetime.timezone.utc).toordinal()))


@pytest.fixture(autouse=True)
def _log_as_before():
    """Removes what a test has set up for tfdist's log: its handlers write to that test's captured output."""
    log = logging.getLogger("tfdist")
    before = list(log.handlers), log.level, log.propagate
    yield
    log.handlers[:], log.level, log.propagate = before


def pytest_report_header():
    """Tells how to repeat the choice of rotating tests."""
    return f"rotating tests: {_DAY}={os.environ[_DAY]}; TFDIST_TEST_LONG=1 runs all"


def pytest_collection_modifyitems(config, items):
    """Deselects rotating tests on the days that are not theirs."""
    if os.environ.get("TFDIST_TEST_LONG") == "1":
        return
    today, left_out = int(os.environ[_DAY]), set()
    cases: defaultdict[str, list] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("rotates")
        if marker and (today - _day(item, marker, cases[item.nodeid.partition("[")[0]])) % marker.args[0]:
            left_out.add(item)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _day(item: pytest.Item, marker: pytest.Mark, cases: list) -> int:
    """The day that the mark names, or the number of the case of a parametrized test.

    Args:
        item: the test.
        marker: its mark.
        cases: the cases of the same test before this one; a new case is added.
    """
    if len(marker.args) == 2:
        return marker.args[1]
    by = marker.kwargs.get("by")
    case = item.callspec.params[by] if by else item.nodeid  # type: ignore[attr-defined] # of a parametrized test
    if case not in cases:
        cases.append(case)
    return cases.index(case)
