"""Who waits for workers hears of what went wrong with any of them."""

import queue
from types import SimpleNamespace

import pytest
from tensorflow.python.distribute.coordinator.remote_value import RemoteValueStatus

from tfdist_cli.train.engine.parameter_server import worker_functions
from tfdist_cli.train.engine.parameter_server.worker_functions import WorkerFunctions


@pytest.fixture
def remotes(monkeypatch):
    """What the functions of two workers will have come to."""
    monkeypatch.setattr(worker_functions, "_LOOK_SECONDS", 0.01)
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
