"""The slots of a launch: one application after another, and the addresses of the tasks in the current one."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any

from tfdist_cli.launch.slots.application import Application, SlotLink, Submission
from tfdist_cli.launch.ssh.link import Hello
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId


class Fleet:
    """A slot for each task.

    If one slot is lost, the engine ends the others, too. Another application then takes their place. Its slots may be
    on other hosts, and always have other ports, so each text with an address of the plan is translated.

    Args:
        submission: how an application is started.
        tasks: the tasks, by the numbers of their slots.
    """

    def __init__(self, submission: Submission, tasks: tuple[TaskId, ...]) -> None:
        self._submission = submission
        self._tasks = tasks
        self._lock = threading.Lock()
        self._closed = False
        self._application: Application | None = None
        self._unused: dict[TaskId, SlotLink] = {}
        self._current: dict[TaskId, Address] = {}
        self.addresses: Mapping[TaskId, Address] = {}
        """The tasks' addresses in the first application, which the plan has."""
        self.hellos: dict[TaskId, Hello] = {}

    def open(self) -> None:
        """Starts the first application, and reserves an address for each task.

        Raises:
            UsageError: the application cannot run as it is configured.
            HostLost: it has ended, or the slots have not come up in time.
        """
        with self._lock:
            self._start()
            self.addresses = dict(self._current)

    def link(self, task: TaskId) -> SlotLink:
        """Returns the connection to a task's slot that is not in use: of a new application, if there is none.

        Raises:
            TfdistError: no application can be started now.
        """
        with self._lock:
            if task not in self._unused or self._application is None or self._application.has_ended:
                self._start()
            return self._unused.pop(task)

    def translated(self, value: Any) -> Any:
        """Returns plain JSON values with the tasks' current addresses in place of those of the plan."""
        now: dict[str, str] = {}
        for task, old in self.addresses.items():
            new = self._current[task]
            now[str(old)] = str(new)
            if task.traits.drives:
                now[str(_beside(old))] = str(_beside(new))
        pattern = re.compile("|".join(rf"(?<![\w.-]){re.escape(old)}(?!\d)" for old in now))
        return _replaced(value, lambda text: pattern.sub(lambda found: now[found[0]], text))

    @property
    def hosts(self) -> list[str]:
        """The hosts of the slots now."""
        return sorted({address.host for address in self._current.values()})

    def stop_starting(self) -> None:
        """Ends an application that another thread is waiting for, and starts no more."""
        self._closed = True
        if self._application and not self._application.is_up:
            self._application.abort()

    def close(self) -> None:
        """Makes the agents exit, and ends the application."""
        self.stop_starting()
        with self._lock:
            if self._application:
                self._application.close()

    def _start(self) -> None:
        """Replaces the application. The lock is held."""
        if self._application:
            self._application.kill()
        self._unused = {}
        application = self._application = Application(self._submission)
        try:
            if self._closed:
                application.abort()
            application.await_slots()
            for slot, task in enumerate(self._tasks):
                link = application.links[slot]
                self._current.update(link.hold({task: Address(link.host, 0)}, task if task.traits.drives else None))
                self.hellos[task], self._unused[task] = application.hellos[slot], link
        except BaseException:
            application.kill()
            raise


def _beside(address: Address) -> Address:
    """Returns the address at which the task that drives takes others, on the next port."""
    return Address(address.host, address.port + 1)


def _replaced(value: Any, replace: Any) -> Any:
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, dict):
        return {key: _replaced(each, replace) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(each, replace) for each in value]
    return value
