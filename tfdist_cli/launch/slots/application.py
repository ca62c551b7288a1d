"""An application of an engine: the program that asks for slots, and the connections of the slots' agents."""

from __future__ import annotations

import io
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tfdist_cli.errors import InvalidValue, TfdistError, UsageError
from tfdist_cli.launch.slots.driver_errors import DriverError, parse_error
from tfdist_cli.launch.slots.handshake import DRIVER, OPTIONS, SECRET, Caller, accept
from tfdist_cli.launch.ssh.frames import Channel, ConnectionEnded, Frame
from tfdist_cli.launch.ssh.link import AgentLink, Hello, HostLost
from tfdist_cli.protocol.masking import Mask
from tfdist_cli.spec.sections.secret import SecretSpec

_POLL_SECONDS = 0.2
_END_SECONDS = 15.0
"""Seconds in which the agents stop their tasks and the driver exits; it is killed after that."""
_GREETING_SECONDS = 60.0
"""Seconds in which the agents of all slots describe their hosts, once they have connected."""
_KEPT_LINES = 20


@dataclass(frozen=True)
class Submission:
    """How an application is started.

    Args:
        engine: the engine's name in messages.
        argv: returns the command, given the address to which slots connect.
        host: the name or address of this machine that the slots can reach.
        slots: the number of slots.
        timeout: seconds in which all slots have to connect.
        env: variables for the command, beside those of this process.
        secrets: options of the engine that the driver is told in its environment, with the sources of their values.
    """

    engine: str
    argv: Callable[[str], Sequence[str]]
    host: str
    slots: int
    timeout: float
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, SecretSpec] = field(default_factory=dict)

    def read_secrets(self) -> dict[str, str]:
        """Reads the values of the secret options.

        Raises:
            UsageError: one has no value.
        """
        values = {}
        for name, spec in self.secrets.items():
            try:
                values[name] = spec.read()
            except InvalidValue as error:
                raise UsageError(
                    f"{self.engine.lower()}.conf.{name}: {error}",
                    code="secret-not-found",
                    hint="secrets are read at each launch of a run: set the variable, or write the file, before it",
                ) from None
        return values


class SlotLink(AgentLink):
    """A connection from a slot's agent.

    Args:
        caller: the slot.
        connection: its socket.
        reason: returns why the application has ended, as far as that is known.
        on_end: is called when the connection has ended, before anyone learns of it.
    """

    def __init__(
        self, caller: Caller, connection: socket.socket, reason: Callable[[], str], on_end: Callable[[], None]
    ) -> None:
        self.host = caller.host
        self._connection = connection
        self._reason = reason
        self._on_end = on_end
        sink = io.FileIO(connection.fileno(), "wb", closefd=False)
        super().__init__(f"slot {caller.slot} on {caller.host}", Channel(connection.makefile("rb"), sink))

    def read(self) -> Frame:
        """Waits for the next frame, and returns it.

        Raises:
            ConnectionEnded: the connection is lost.
        """
        try:
            return super().read()
        except ConnectionEnded:
            self._on_end()
            raise

    @property
    def cause(self) -> str:
        """Why the connection has ended."""
        reason = self._reason()
        return f"{self.name} was lost" + (f": {reason}" if reason else "")

    def close(self) -> None:
        """Ends the outgoing direction: the agent stops its tasks and exits."""
        with suppress(OSError):  # the connection is broken already
            self._connection.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Ends the connection immediately."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


class Application:
    """A started application.

    Args:
        submission: how it is started.
    """

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._secret = secrets.token_hex()
        options = submission.read_secrets()
        told = {OPTIONS: json.dumps(options)} if options else {}
        self._mask = Mask(options.values())
        self.links: dict[int, SlotLink] = {}
        """The connections by the numbers of the slots."""
        self.hellos: dict[int, Hello] = {}
        self.is_up = False
        """Whether all slots are connected."""
        self._driver: socket.socket | None = None
        self._closing = False
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._error: DriverError | None = None
        self._listener = self._listen()
        address = f"{submission.host}:{self._listener.getsockname()[1]}"
        self._popen = subprocess.Popen(
            submission.argv(address),
            env={**os.environ, **submission.env, SECRET: self._secret, **told},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the launcher
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def has_ended(self) -> bool:
        """Whether the driver has exited: all slots are lost then."""
        return self._popen.poll() is not None or not self._reader.is_alive()

    def await_slots(self) -> None:
        """Waits until the agents of all slots have connected and described their hosts.

        Raises:
            UsageError: the application cannot run as it is configured.
            HostLost: it has ended, or the slots have not come up in time.
        """
        deadline = time.monotonic() + self._submission.timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while len(self.links) < self._submission.slots:
                if self.has_ended:
                    raise self._ended()
                if time.monotonic() > deadline:
                    raise self._timed_out()
                if selector.select(_POLL_SECONDS):
                    self._accept()
        timer = threading.Timer(_GREETING_SECONDS, self.abort)
        timer.start()
        try:
            for slot, link in self.links.items():
                self.hellos[slot] = link.greet()
        except ConnectionEnded:
            raise self._ended() from None
        finally:
            timer.cancel()
        self.is_up = True

    def abort(self) -> None:
        """Kills the driver, so that the thread that waits for the slots ends."""
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def close(self) -> None:
        """Makes the agents and the driver exit, and kills the driver if it does not."""
        self._closing = True
        for link in self.links.values():
            link.close()
        if len(self.links) < self._submission.slots and self._driver:
            self._driver.close()  # it waits for slots, and exits
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(_END_SECONDS if self._driver else 0.0)
        self.kill()

    def kill(self) -> None:
        """Ends the connections and the driver immediately."""
        for link in self.links.values():
            link.kill()
        if self._driver:
            self._driver.close()
        self._listener.close()
        self.abort()
        self._popen.wait()

    def _listen(self) -> socket.socket:
        host = self._submission.host
        try:
            return socket.create_server((host, 0), backlog=self._submission.slots + 1)
        except OSError as error:
            raise UsageError(
                f"{host} is no address of this machine: {error.strerror or error}",
                code="no-own-address",
                hint=f"name one that the hosts of {self._submission.engine} can reach: "
                f"{self._submission.engine.lower()}: {{address: …}}",
            ) from error

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        caller = accept(connection, self._secret)
        if caller is None or caller.slot in self.links or caller.slot >= self._submission.slots:
            connection.close()
        elif caller.slot == DRIVER:
            self._driver = connection
        else:
            self.links[caller.slot] = SlotLink(caller, connection, self._reason, self._lose_slots)

    def _read(self) -> None:
        """Reads the driver's output. Its end is the end of the application, and agents without a slot have to exit."""
        for line in self._popen.stdout or ():
            text = self._mask.text(line.decode(errors="replace").rstrip())
            self._error = parse_error(text) or self._error
            if text:
                self._lines.append(text)
        self._lose_slots()

    def _lose_slots(self) -> None:
        """Ends all connections when one has ended: without one slot, the engine ends the others.

        A task that was restarted in another slot in the meantime would be lost.
        """
        if not self._closing:
            for link in tuple(self.links.values()):
                link.kill()

    def _reason(self) -> str:
        self._reader.join(1.0)
        return self._error.message if self._error else ""

    def _ended(self) -> TfdistError:
        self._reader.join(1.0)
        engine = self._submission.engine
        if self._error:
            kind = UsageError if self._error.usage else HostLost
            return kind(f"{engine}: {self._error.message}", code=self._error.code, hint=self._error.hint)
        lines = "\n".join(self._lines) or f"its driver exited with code {self._popen.wait()}"
        return HostLost(
            f"{engine} runs no application: {lines}",
            code="application-ended",
            hint=f"check the address of {engine}, and its options in the cluster file",
        )

    def _timed_out(self) -> TfdistError:
        submission = self._submission
        missing = submission.slots - len(self.links)
        return HostLost(
            f"{missing} of {submission.slots} slots of {submission.engine} have not connected to {submission.host} "
            f"within {submission.timeout:g} s",
            code="slots-not-started",
            hint="check that as many slots are free, and that their hosts reach this machine, or raise wait_seconds",
        )
