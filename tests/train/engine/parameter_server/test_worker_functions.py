"""Who waits for workers hears of what went wrong with any of them."""

import queue
import threading
from types import SimpleNamespace

import pytest
import tensorflow as tf
from tensorflow.python.distribute.coordinator.remote_value import RemoteValueStatus

from tfdist_cli.train.engine.parameter_server import worker_functions
from tfdist_cli.train.engine.parameter_server.worker_functions import WorkerFunctions, raise_failure


@pytest.fixture
def remotes(monkeypatch):
    """What the functions of two workers will have come to."""
    monkeypatch.setattr(worker_functions, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(worker_functions, "_CAUSE_SECONDS", 0.1)
    return [SimpleNamespace(_status=RemoteValueStatus.NOT_READY, _error=None) for _ in range(2)]


def of(remotes):
    return WorkerFunctions(2, lambda worker, _: remotes[worker])


def test_messages_come_in_their_order_and_none_after_a_while_without(remotes):
    news = queue.SimpleQueue()
    for message in ("first", "second"):
        news.put(message)
    own = of(remotes)
    assert [own.next(news) for _ in range(3)] == ["first", "second", None]


def test_what_the_thread_that_listens_has_failed_of_is_raised(remotes):
    news = queue.SimpleQueue()
    news.put(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        of(remotes).next(news)


def test_a_worker_that_has_failed_is_heard_of_before_any_message(remotes):
    news = queue.SimpleQueue()
    news.put("told")
    remotes[1]._status, remotes[1]._error = RemoteValueStatus.READY, ValueError("not finite")
    with pytest.raises(ValueError, match="not finite"):
        of(remotes).next(news)


def test_a_worker_that_is_gone_is_no_failure(remotes):
    remotes[0]._status, remotes[0]._error = RemoteValueStatus.ABORTED, OSError("connection reset")
    own = of(remotes)
    assert own.next(queue.SimpleQueue()) is None
    assert own.at_work
    remotes[1]._status = RemoteValueStatus.ABORTED
    assert not own.at_work


CANCELLED = tf.errors.CancelledError(None, None, "another function failed")


def fail(remote, error):
    remote._status, remote._error = RemoteValueStatus.READY, error


def test_the_cause_is_raised_and_not_what_was_cancelled_for_it(remotes):
    fail(remotes[0], CANCELLED)
    fail(remotes[1], ValueError("the cause"))
    with pytest.raises(ValueError, match="the cause"):
        of(remotes).check()


def test_a_cause_that_a_thread_reports_after_a_cancellation_is_raised(remotes):
    fail(remotes[0], CANCELLED)
    news = queue.SimpleQueue()
    news.put("a message")
    news.put(ValueError("the cause"))
    with pytest.raises(ValueError, match="the cause"):
        of(remotes).next(news)


def test_a_threads_cancellation_is_not_raised_before_its_cause(remotes):
    news = queue.SimpleQueue()
    news.put(CANCELLED)
    own = of(remotes)
    threading.Timer(0.03, fail, [remotes[1], ValueError("the cause")]).start()
    with pytest.raises(ValueError, match="the cause"):
        own.next(news)


def test_a_cancellation_without_a_cause_is_raised(remotes):
    fail(remotes[0], CANCELLED)
    with pytest.raises(tf.errors.CancelledError):
        of(remotes).check()


def test_what_a_thread_failed_of_at_the_end_is_raised(remotes):
    news = queue.SimpleQueue()
    news.put("a message that nobody waits for")
    raise_failure(news)
    news.put(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        raise_failure(news)
