import errno
import random

import pytest

from tfdist_cli.storage.retry import Retry, StorageError


class Time:
    """A clock that only `sleep` advances."""

    def __init__(self):
        self.now, self.waits = 0.0, []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


def failing(times, error):
    """A request that fails some times, and a list of its calls."""
    calls = []

    def request():
        calls.append(None)
        if len(calls) <= times:
            raise error
        return "answer"

    return request, calls


@pytest.mark.parametrize(
    "error", [TimeoutError(), ConnectionResetError(), OSError(errno.EBUSY, "Slow Down"), Exception("of a library")]
)
def test_requests_that_fail_for_a_while_are_repeated(error):
    time = Time()
    request, calls = failing(5, error)
    assert Retry(60, time.clock, time.sleep)("reading", request) == "answer"
    assert len(calls) == 6
    for shorter, longer in zip(time.waits, time.waits[1:], strict=False):
        assert longer > shorter * 1.1, "the waits get longer"


def test_a_retry_leaves_the_programs_random_numbers_alone():
    """Requests are retried in other threads while the program draws a seed or shuffles its data."""
    time, before = Time(), random.getstate()
    Retry(60, time.clock, time.sleep)("reading", failing(5, TimeoutError())[0])
    assert random.getstate() == before


def test_a_request_is_repeated_until_the_limit():
    time = Time()
    request, calls = failing(10**6, TimeoutError("too late"))
    with pytest.raises(StorageError) as caught:
        Retry(60, time.clock, time.sleep)("reading s3://bucket/x", request)
    assert time.now == 60
    assert 5 < len(calls) < 20
    assert "s3://bucket/x" in str(caught.value)


class NoCredentialsError(Exception):
    """Named as botocore's."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError("no bucket"), FileNotFoundError),
        (PermissionError("denied"), PermissionError),
        (NoCredentialsError("none"), PermissionError),
        (TypeError("a mistake"), StorageError),
    ],
)
def test_other_errors_are_not_repeated(error, expected):
    time = Time()
    request, calls = failing(1, error)
    with pytest.raises(expected):
        Retry(60, time.clock, time.sleep)("reading", request)
    assert (len(calls), time.waits) == (1, [])
