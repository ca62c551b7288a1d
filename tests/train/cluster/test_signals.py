"""A signal ends a wait of the main thread, whichever thread receives it."""

import ctypes
import signal
import socket
import threading
import time

import pytest

from tfdist_cli.train.cluster.signals import interruptible_waits, sigterm_kept

LONG = 10.0


class Interrupted(Exception):
    """The handler ran."""


def interrupt(*_):
    raise Interrupted


@pytest.fixture
def connection():
    one, other = socket.socketpair()
    with one, other:
        one.settimeout(LONG)
        yield one


@pytest.fixture
def signalled():
    """Gives SIGTERM to another thread than the main one, as the kernel may do."""

    def receive():
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, interrupt)
    timer = threading.Timer(0.2, receive)
    timer.start()
    yield
    timer.join()
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("signalled")
def test_a_signal_to_another_thread_interrupts_the_main_one(connection):
    began = time.monotonic()
    with pytest.raises(Interrupted), interruptible_waits():
        connection.recv(1)
    assert time.monotonic() - began < LONG / 2


@pytest.mark.usefixtures("signalled")
def test_a_wait_continues_after_a_handler_that_raises_nothing(connection):
    received = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: received.set())
    connection.settimeout(1.0)
    with interruptible_waits(), pytest.raises(TimeoutError):
        connection.recv(1)
    assert received.is_set()


def test_what_was_there_before_is_there_afterwards(connection):
    before = signal.getsignal(signal.SIGURG)
    connection.setblocking(False)
    previous = signal.set_wakeup_fd(connection.fileno())
    with interruptible_waits():
        assert signal.getsignal(signal.SIGURG) != before
    assert signal.set_wakeup_fd(previous) == connection.fileno()
    assert signal.getsignal(signal.SIGURG) == before
    assert "tfdist-signals" not in [thread.name for thread in threading.enumerate()]


def test_another_thread_installs_nothing():
    handlers = []

    def enter():
        with interruptible_waits():
            handlers.append(signal.getsignal(signal.SIGURG))

    before = signal.getsignal(signal.SIGURG)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_a_handler_that_python_does_not_know_of_is_replaced_by_that_of_before():
    received, ignored = threading.Event(), ctypes.c_void_p(1)  # SIG_IGN of C
    before = signal.signal(signal.SIGTERM, lambda *_: received.set())
    try:
        with sigterm_kept(_no_notice):
            ctypes.CDLL(None).signal(int(signal.SIGTERM), ignored)
            deadline = time.monotonic() + LONG
            while not received.wait(0.01) and time.monotonic() < deadline:
                signal.raise_signal(signal.SIGTERM)
            assert received.is_set(), "it was to be replaced while the context lasts"
            ctypes.CDLL(None).signal(int(signal.SIGTERM), ignored)
        received.clear()
        signal.raise_signal(signal.SIGTERM)
        assert received.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_another_handler_nothing_changes():
    with sigterm_kept(_no_notice):
        own = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        signal.signal(signal.SIGTERM, own)
    assert signal.getsignal(signal.SIGTERM) is own


@pytest.mark.parametrize("noticed", [True, False])
def test_a_signal_that_tensorflow_took_is_received_again(noticed):
    received, asked = threading.Event(), threading.Event()

    def await_notice(seconds):
        assert seconds > 1, "the notifier looks once a second"
        asked.set()
        return noticed

    before = signal.signal(signal.SIGTERM, lambda *_: received.set())
    try:
        with sigterm_kept(await_notice):
            assert not asked.is_set(), "the handler is TensorFlow's yet"
        assert asked.wait(LONG)
        next((each.join() for each in threading.enumerate() if each.name == "tfdist-sigterm-notice"), None)
        assert received.wait(LONG if noticed else 0.0) == noticed
    finally:
        signal.signal(signal.SIGTERM, before)


def _no_notice(seconds):
    return False
