"""The data workers of a training, as its chief sees them: those that serve, and those that leave."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tfdist_cli.errors import TimeoutExceeded, TrainingError, label
from tfdist_cli.protocol import task_events
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster.data_service.server import DISPATCHER
from tfdist_cli.train.cluster.membership import GRANTED, JOIN, LEFT, Answer, Request, last_worker
from tfdist_cli.train.cluster.rendezvous import wait_until_exited

_PROGRAM = f"{__package__}.filter_program"
Lost = Callable[[TrainingError], Any]


@dataclass(eq=False)
class _Member:
    """One process of a data worker.

    Args:
        address: its address.
        leaving: whether it takes no more examples.
        left: whether all examples that it took have been read.
    """

    address: Address
    leaving: bool = False
    left: bool = False


class DataWorkers:
    """Watches the tasks of `tf.data`'s service, and lets data workers join and leave.

    All methods may be called by any thread.

    Args:
        task: this task.
        tasks: the tasks of the service at the start, and their addresses.
        lost: called once when one of them exits while this process still runs, unless it has left before. A reader
            would wait forever: the examples that were distributed to that task are not given to another one.
    """

    def __init__(self, task: TaskId, tasks: Mapping[TaskId, Address], lost: Lost) -> None:
        self._task = task
        self._lost = lost
        self._first = threading.Lock()
        self._lock = threading.Lock()
        self._filter: _Filter | None = None
        self._dispatcher = tasks.get(DISPATCHER)
        self._start = {each: _Member(address) for each, address in tasks.items()}
        self._members = {each: member for each, member in self._start.items() if each != DISPATCHER}

    def watch(self) -> None:
        """Watches the tasks of the start, all of which have started."""
        for task, member in self._start.items():
            self._follow(task, member)

    def dispatcher(self) -> str:
        """Returns what readers take for the dispatcher's address, so that data workers may leave."""
        with self._lock:
            return self._started_filter().address

    def ask(self, request: Request) -> Answer:
        """Returns the answer to a data worker that has joined, that wants to leave, or that has left."""
        with self._lock:
            member = self._members.get(request.task)
            if request.asks == JOIN:
                if member is None or member.left:
                    self._members[request.task] = member = _Member(request.address)
                    self._follow(request.task, member)
                return GRANTED
            if member is None:
                return GRANTED
            if request.asks == LEFT:
                member.left = member.leaving
                return GRANTED
            if not member.leaving and sum(not each.leaving for each in self._members.values()) == 1:
                return Answer(last_worker(request.task))
            member.leaving = True
            self._started_filter().remove(member.address)
            return GRANTED

    def withdraw(self, request: Request) -> None:
        """Nothing: that a data worker has exited is noticed by the connection to it."""

    def _started_filter(self) -> _Filter:
        if self._filter is None:
            self._filter = _Filter(str(self._dispatcher), self._report)
        return self._filter

    def _follow(self, task: TaskId, member: _Member) -> None:
        def wait() -> None:
            with suppress(TimeoutExceeded):  # it had exited before
                wait_until_exited(self._task, member.address, timeout=0)
            with self._lock:
                left = member.left
            if not left:
                self._report(_task_lost(task, member.address))

        threading.Thread(target=wait, name=f"watch-{task}", daemon=True).start()

    def _report(self, error: TrainingError) -> None:
        if self._first.acquire(blocking=False):
            self._lost(error)


class _Filter:
    """The process of `filter_program`.

    Args:
        dispatcher: the dispatcher's address.
        lost: called if the process exits.

    Attributes:
        address: where it stands in for the dispatcher.
    """

    def __init__(self, dispatcher: str, lost: Lost) -> None:
        own, others = socket.socketpair()
        with others:
            # Signals to the group of this process do not end it in its own session: the chief saves, and still reads.
            end, command = others.fileno(), [sys.executable, "-m", _PROGRAM, dispatcher]
            self._process = subprocess.Popen(command, stdin=end, stdout=end, start_new_session=True)
        with own:
            self._lines = own.makefile("rw", encoding="utf-8")
        self.address = self._lines.readline().strip()
        threading.Thread(target=self._wait, args=(lost,), name="watch-data-filter", daemon=True).start()

    def remove(self, address: Address) -> None:
        """Leaves out the data worker at this address from the passes that follow."""
        self._lines.write(f"{address}\n")
        self._lines.flush()
        self._lines.readline()

    def _wait(self, lost: Lost) -> None:
        code = self._process.wait()
        lost(
            TrainingError(
                f"the process between the chief and {DISPATCHER} exited with code {code}",
                code="data-filter-lost",
                hint="see the chief's output for the reason; then start all tasks again: training continues from its "
                "last checkpoint",
            )
        )


def _task_lost(task: TaskId, address: Address) -> TrainingError:
    what = (
        "the data is not distributed any more" if task == DISPATCHER else "the examples that it had received are lost"
    )
    return TrainingError(
        f"{task} at {address} exited before the training ended: {what}",
        code="task-lost",
        hint=f"see the output of {task} for the reason; then start all tasks again: training continues from its last "
        "checkpoint",
    )


def end_process(error: TrainingError) -> None:
    """Prints an error and exits at once: the main thread waits in TensorFlow, which cannot be interrupted."""
    sys.stderr.write(f"{label(error.code)}: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
    task_events.exited(error.exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code)
