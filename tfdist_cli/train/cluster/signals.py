"""Signals that end a wait of the main thread, whichever thread the kernel gives them to."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WAKE = signal.SIGURG
"""Sent to the main thread. It is harmless where no handler is installed."""
_AGAIN = 0.05
"""Seconds after which the main thread gets `_WAKE` again: it may have been about to wait."""
_LOOK_SECONDS = 0.001
"""How often it is looked whether a signal has another handler."""
_NOTICE_SECONDS = 5.0
"""The notifier looks once a second whether it has received a signal."""


class _Action:
    """What a signal does in this process: a `struct sigaction`, whose first field is the handler.

    Args:
        number: the signal.
    """

    _BYTES = 512
    """More than the structure has on any system."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._libc = ctypes.CDLL(None)
        self._own = self._now()

    def restore(self) -> None:
        """Sets it again as it was when this object was made, if the handler is another one."""
        pointer = ctypes.sizeof(ctypes.c_void_p)
        if self._now()[:pointer] != self._own[:pointer]:
            self._libc.sigaction(self._number, self._own, None)

    def _now(self) -> bytes:
        action = ctypes.create_string_buffer(self._BYTES)
        self._libc.sigaction(self._number, None, action)
        return action.raw


@contextmanager
def sigterm_kept(await_notice: Callable[[float], bool]) -> Iterator[None]:
    """Keeps what SIGTERM does in this process, whatever TensorFlow does within the context.

    The preemption notifier of TensorFlow's coordination service installs a handler, which Python does not know of. It
    notes the signal for those who ask, and the process continues: `kill`, a launcher or a scheduler could not end it.
    TensorFlow then waits for other tasks. So a thread looks for it meanwhile. It can do so only while no other thread
    holds Python's lock. A signal that arrives before is the notifier's; this process receives it again afterwards, as
    do those of the other tasks: one that ends makes all end.

    Args:
        await_notice: waits up to some seconds until the notifier has told of a signal to any task. Returns whether it
            has.
    """
    action, ended = _Action(signal.SIGTERM), threading.Event()

    def keep() -> None:
        while not ended.wait(_LOOK_SECONDS):
            action.restore()

    def repeat() -> None:
        if await_notice(_NOTICE_SECONDS):
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=keep, name="tfdist-sigterm", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        action.restore()
    threading.Thread(target=repeat, name="tfdist-sigterm-notice", daemon=True).start()


@contextmanager
def interruptible_waits() -> Iterator[None]:
    """Within the context, every signal with a Python handler interrupts a wait of the main thread.

    Python's handlers run in the main thread. A signal to a process is taken by any thread that does not block it: with
    busy cores often by one that starts another thread, as TensorFlow does. Nothing then wakes a main thread that waits
    for a message, and the handler runs when the message comes.

    In another thread than the main one, Python installs no handlers, and this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    main, awake = threading.get_ident(), threading.Event()
    received, written = socket.socketpair()
    written.setblocking(False)

    def wake() -> None:
        while numbers := received.recv(64):  # one byte for each signal that any thread has received
            awake.clear()
            while set(numbers) != {_WAKE} and not awake.is_set():
                signal.pthread_kill(main, _WAKE)
                awake.wait(_AGAIN)

    handler = signal.signal(_WAKE, lambda *_: awake.set())
    previous = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=wake, name="tfdist-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        written.close()
        thread.join()
        received.close()
        signal.signal(_WAKE, handler)
