"""SIGTERM as a request: the training acts on it between two steps, and between two executions of an evaluation."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING

from tfdist_cli.errors import ExitCode, TfdistError, label
from tfdist_cli.train.tf_compat import exit_hooks

if TYPE_CHECKING:
    from typing_extensions import Self

_active: list[SigtermRequest] = []
"""Those whose context this process is in: at most one."""
_forking = threading.local()
"""`mask`: the signals that a thread blocked before it began to fork."""


class Terminated(TfdistError):
    """The process received SIGTERM. If the training has checkpoints, its state is saved."""

    exit_code = ExitCode.TERMINATED


def _text(error: Terminated) -> str:
    return f"{label(error.code)}: {error.message}\n"


exit_hooks.exit_code_of(Terminated, ExitCode.TERMINATED, _text)


class SigtermRequest:
    """Context manager that notes SIGTERM instead of exiting.

    In a thread other than the main one, Python installs no signal handlers, and nothing is noted.
    """

    def __init__(self) -> None:
        self._received = threading.Event()
        self._previous: signal.Handlers | None = None

    def is_received(self) -> bool:
        """Whether the process received SIGTERM."""
        return self._received.is_set()

    def __enter__(self) -> Self:
        _active.append(self)
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._note)  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        _active.remove(self)
        self.restore()

    def restore(self) -> None:
        """Restores the handler from before the context."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._received.set()


def _block() -> None:
    """Blocks SIGTERM in the thread that forks: Python drops what a child receives until its handlers are restored."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _restore_in_child() -> None:
    """Lets SIGTERM end a process that is forked during the training, such as one of a `multiprocessing.Pool`."""
    for request in reversed(_active):
        request.restore()
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_restore_in_child)


def termination_requested() -> bool:
    """Whether SIGTERM was received during the training that this process is in."""
    return any(request.is_received() for request in _active)


def end_if_terminated() -> None:
    """Ends what a callback does, such as an evaluation, so that the training can save its state.

    Raises:
        Terminated: SIGTERM was received during the training that this process is in.
    """
    if termination_requested():
        raise Terminated("SIGTERM received", code="terminated")
