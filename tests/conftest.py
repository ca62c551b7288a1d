"""Shared by all tests: signals as in a terminal, and long tests that take turns from day to day."""

import datetime
import os
import signal

import hypothesis
import pytest

hypothesis.settings.register_profile("tfdist", deadline=None)
hypothesis.settings.load_profile("tfdist")  # an example takes as long as the machine's load lets it
_DAY = "TFDIST_TEST_DAY"
"""The number of the day, which chooses the rotating tests. One process sets it for all, also when midnight comes."""


def pytest_configure():
    """Restores default signal handling: below nohup, or behind a `&`, started programs would ignore some signals."""
    for each, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(each) is signal.SIG_IGN:
            signal.signal(each, usual)
    os.environ.setdefault(_DAY, str(datetime.datetime.now(datetime.timezone.utc).toordinal()))


def pytest_report_header():
    """Tells how to repeat the choice of rotating tests."""
    return f"rotating tests: {_DAY}={os.environ[_DAY]}; TFDIST_TEST_LONG=1 runs all"


def pytest_collection_modifyitems(config, items):
    """Deselects rotating tests on the days that are not theirs."""
    if os.environ.get("TFDIST_TEST_LONG") == "1":
        return
    left_out = [item for item in items if not _runs_today(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _runs_today(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("rotates")
    if marker is None:
        return True
    days, day = marker.args
    return int(os.environ[_DAY]) % days == day
