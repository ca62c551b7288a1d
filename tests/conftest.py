"""Shared by all tests: signals as in a terminal, no GPUs, and long tests that take turns from day to day."""

import datetime
import gc
import logging
import os
import signal

import hypothesis
import pytest

from tests.support.rotation import left_out

hypothesis.settings.register_profile("tfdist", deadline=None)
hypothesis.settings.load_profile("tfdist")  # an example takes as long as the machine's load lets it
pytest_plugins = ("tests.support.s3_fixtures",)
_DAY = "TFDIST_TEST_DAY"
"""The number of the day, which chooses the rotating tests. One process sets it for all, also when midnight comes."""
_GPUS = "TFDIST_TEST_GPUS"
"""If it is 1, tests see this machine's GPUs. What they expect of plans, and of some paths, is that of the CPU."""


def pytest_configure():
    """Restores default signal handling: below nohup, or behind a `&`, started programs would ignore some signals."""
    for each, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(each) is signal.SIG_IGN:
            signal.signal(each, usual)
    if os.environ.get(_GPUS) != "1":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
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
    not_today = left_out(items, int(os.environ[_DAY]))
    if not_today:
        config.hook.pytest_deselected(items=list(not_today))
        items[:] = [item for item in items if item not in not_today]


def pytest_collection_finish():
    """Lets the garbage collector pass over what lives as long as this process: TensorFlow's and Keras's modules."""
    gc.collect()
    gc.freeze()
