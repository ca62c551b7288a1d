"""Errors of workers and of threads are raised where the training runs."""

import queue
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import tensorflow as tf
from tensorflow.python.distribute.coordinator.remote_value import RemoteValueStatus

from tfdist_cli.train.engine.parameter_server import worker_functions
from tfdist_cli.train.engine.parameter_server.worker_functions import WorkerFunctions, raise_failure, receiving, running


@pytest.fixture
def remotes(monkeypatch):
    """The remote values of two workers' functions."""
    monkeypatch.setattr(worker_functions, "_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(worker_functions, "_CAUSE_SECONDS", 0.1)
    return [SimpleNamespace(_status=RemoteValueStatus.NOT_READY, _error=None) for _ in range(2)]


def of(remotes):
    return WorkerFunctions(2, lambda worker, _: remotes[worker])


def test_messages_come_in_their_order_and_none_after_a_while_without(remotes):
    messages = queue.SimpleQueue()
    for message in ("first", "second"):
        messages.put(message)
    own = of(remotes)
    assert [own.next_message(messages) for _ in range(3)] == ["first", "second", None]


def test_an_error_of_a_thread_is_raised(remotes):
    messages = queue.SimpleQueue()
    messages.put(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        of(remotes).next_message(messages)


def test_an_error_of_a_worker_is_raised_before_any_message_is_returned(remotes):
    messages = queue.SimpleQueue()
    messages.put("a message")
    remotes[1]._status, remotes[1]._error = RemoteValueStatus.READY, ValueError("not finite")
    with pytest.raises(ValueError, match="not finite"):
        of(remotes).next_message(messages)


def test_the_loss_of_a_worker_is_no_failure(remotes):
    remotes[0]._status, remotes[0]._error = RemoteValueStatus.ABORTED, OSError("connection reset")
    own = of(remotes)
    assert own.next_message(queue.SimpleQueue()) is None
    assert own.any_running
    remotes[1]._status = RemoteValueStatus.ABORTED
    assert not own.any_running


CANCELLED = tf.errors.CancelledError(None, None, "another function failed")


def fail(remote, error):
    remote._status, remote._error = RemoteValueStatus.READY, error


def test_the_cause_is_raised_and_not_the_cancellation_that_follows_from_it(remotes):
    fail(remotes[0], CANCELLED)
    fail(remotes[1], ValueError("the cause"))
    with pytest.raises(ValueError, match="the cause"):
        of(remotes).check()


def test_a_cause_that_a_thread_reports_after_a_cancellation_is_raised(remotes):
    fail(remotes[0], CANCELLED)
    messages = queue.SimpleQueue()
    messages.put("a message")
    messages.put(ValueError("the cause"))
    with pytest.raises(ValueError, match="the cause"):
        of(remotes).next_message(messages)


def test_a_cancellation_of_a_thread_is_not_raised_before_its_cause(remotes):
    messages = queue.SimpleQueue()
    messages.put(CANCELLED)
    own = of(remotes)
    threading.Timer(0.03, fail, [remotes[1], ValueError("the cause")]).start()
    with pytest.raises(ValueError, match="the cause"):
        own.next_message(messages)


def test_a_cancellation_without_a_cause_is_raised(remotes):
    fail(remotes[0], CANCELLED)
    with pytest.raises(tf.errors.CancelledError):
        of(remotes).check()


def test_an_error_of_a_thread_that_nothing_has_received_is_raised():
    messages = queue.SimpleQueue()
    messages.put("a message")
    raise_failure(messages)
    messages.put(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        raise_failure(messages)


def test_messages_are_received_until_the_end_of_the_context():
    source = queue.SimpleQueue()
    with receiving(source.get, lambda: source.put(None)) as messages:
        source.put("first")
        assert messages.get(timeout=60) == "first"
        source.put("last")
    assert messages.get(timeout=60) == "last"


class Functions:
    """Two functions that run until they are told to end."""

    def __init__(self):
        self.ended, self.calls, self.messages = threading.Event(), [], queue.SimpleQueue()

    def wait(self):
        self.ended.wait()

    def end(self):
        self.calls.append("end")
        self.ended.set()

    def run(self, function):
        return running(
            {"one": self.wait, "other": function},
            self.messages,
            scope=nullcontext,
            end=self.end,
            abort=lambda threads: self.calls.append(sorted(threads)),
        )


def test_functions_are_told_to_end_at_the_end_of_the_context():
    functions = Functions()
    with functions.run(functions.wait):
        assert not functions.calls
    assert functions.calls == ["end"]


def test_functions_are_aborted_if_the_context_is_left_by_an_exception():
    functions = Functions()

    def training():
        with functions.run(functions.wait):
            raise KeyError

    with pytest.raises(KeyError):
        training()
    assert functions.calls == [["one", "other"]]
    functions.ended.set()


def test_an_error_of_a_function_is_raised_at_the_end_of_the_context():
    functions = Functions()

    def failing():
        raise OSError("gone")

    def training():
        with functions.run(failing):
            pass

    with pytest.raises(OSError, match="gone"):
        training()
