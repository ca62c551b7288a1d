"""Being told to end from outside: a signal is noted, and acted on when no step is under way."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING

from tfdist_cli.errors import ExitCode, TfdistError

if TYPE_CHECKING:
    from typing_extensions import Self


class Terminated(TfdistError):
    """The process was told to end; what was done is saved if the training has checkpoints."""

    exit_code = ExitCode.TERMINATED


class Termination:
    """SIGTERM as a request instead of an end, while it is installed.

    A process that cannot take signals here (its training runs in another thread) is never asked.
    """

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._before: signal.Handlers | None = None

    @property
    def requested(self) -> bool:
        """Whether the process was told to end."""
        return self._requested.is_set()

    def carry_out(self, step: int) -> None:
        """Ends the training.

        Raises:
            Terminated: always.
        """
        raise Terminated(f"told to end after step {step}")

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._requested.set()
