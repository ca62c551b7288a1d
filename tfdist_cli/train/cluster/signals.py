"""Signals that end a wait of the main thread, whichever thread the kernel gives them to."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_WAKE = signal.SIGURG
"""Sent to the main thread. It is harmless where no handler is installed."""
_AGAIN = 0.05
"""Seconds after which the main thread gets `_WAKE` again: it may have been about to wait."""


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Keeps what SIGTERM does in this process, whatever TensorFlow does within the context.

    The preemption notifier of TensorFlow's coordination service installs a handler, which Python does not know of. It
    notes the signal for those who ask, and the process continues: `kill`, a launcher or a scheduler could not end it.

    In another thread than the main one, Python installs no handlers, and this does nothing.
    """
    try:
        yield
    finally:
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


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
