"""Connections to agents: the requests of any of them, and the one through an `ssh` process."""

from __future__ import annotations

import io
import subprocess
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tfdist_cli.errors import TfdistError, UsageError
from tfdist_cli.launch.ssh.command import NO_PYTHON, agent_command, pythons, ssh_argv
from tfdist_cli.launch.ssh.files import FileList, pieces
from tfdist_cli.launch.ssh.frames import Channel, ConnectionEnded, Frame
from tfdist_cli.plan.machine import Machine
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.ssh import HostSpec
from tfdist_cli.spec.task_id import TaskId

_GREETING_TIMEOUT = 60.0
_END_TIMEOUT = 10.0
"""Seconds in which the agent stops its tasks and exits; `ssh` is killed after that."""
_KEPT_LINES = 20
_HINTS = (
    ("Permission denied", "make `ssh {host}` work without a password: add your key to an agent, or to the host"),
    ("Host key verification failed", "connect once by hand with `ssh {host}`, and check the key that it shows"),
    ("Could not resolve hostname", "correct the name in 'hosts', or add it to ~/.ssh/config"),
)


class HostLost(TfdistError):
    """A host cannot be reached, or the connection to it is lost."""


@dataclass(frozen=True)
class Hello:
    """The agent's description of its host.

    Args:
        python: the agent's Python interpreter.
        home: the user's home folder.
        address: the IP address to which ssh has connected.
        versions: see `versions.installed`.
        machine: the cores and GPUs.
    """

    python: str
    home: str
    address: str
    versions: Mapping[str, str]
    machine: Machine


class AgentLink(ABC):
    """A connection to an agent: requests with answers until `begin`, then frames in both directions.

    Args:
        name: the agent's host in messages.
        channel: the frames.
    """

    def __init__(self, name: str, channel: Channel) -> None:
        self.name = name
        self._channel = channel

    def greet(self) -> Hello:
        """Waits for the agent's description of its host.

        Raises:
            ConnectionEnded: the agent does not start.
        """
        self._channel.await_greeting()
        hello = self._channel.read()
        # An agent of an earlier tfdist does not send the last two. The comparison of versions reports it later.
        no_proxy, core_ids = hello.fields.get("no_proxy", {}), tuple(hello.fields.get("core_ids", ()))
        machine = Machine(hello["cores"], tuple(hello["gpus"]), hello["memory"], no_proxy, core_ids)
        return Hello(hello["python"], hello["home"], hello["address"], hello["versions"], machine)

    @property
    @abstractmethod
    def cause(self) -> str:
        """Why the connection has ended."""

    @abstractmethod
    def close(self) -> None:
        """Makes the agent stop its tasks and exit, and waits for it."""

    @abstractmethod
    def kill(self) -> None:
        """Ends the connection immediately."""

    def hold(self, addresses: Mapping[TaskId, Address], beside: TaskId | None) -> dict[TaskId, Address]:
        """Reserves a port on the host for each task, a free one for port 0.

        Args:
            addresses: the addresses.
            beside: a task for whose free port the next port is reserved as well.

        Raises:
            UsageError: a port is not available.
            HostLost: the connection is lost.
        """
        wanted = {str(task): [address.host, address.port] for task, address in addresses.items()}
        held = self._request(
            Frame("hold", {"addresses": wanted, "beside": str(beside) if beside in addresses else None})
        )["addresses"]
        return {task: Address(*held[str(task)]) for task in addresses}

    def copy(self, base: Path, listed: FileList, to: str, on_progress: Callable[[int, int], None]) -> tuple[int, int]:
        """Copies the files that the host lacks.

        Args:
            base: the common folder of the files.
            listed: the files.
            to: the target folder on the host.
            on_progress: called after each piece with the number of copied bytes and of all bytes to copy.

        Returns:
            The number of copied files, and of copied bytes.

        Raises:
            UsageError: a file cannot be read, or the target folder has files of another origin.
            HostLost: the connection is lost, or the host cannot store the files.
        """
        wanted = self._request(Frame("copy", {"to": to, **listed.as_json()}))["wanted"]
        copied, size = 0, sum(listed.entries[index].size for index in wanted)
        for index in wanted:
            path = base / listed.entries[index].path
            try:
                for data, last in pieces(path):
                    self._send(Frame("piece", {"file": index, "last": last}, data))
                    copied += len(data)
                    on_progress(copied, size)
            except OSError as error:
                raise UsageError(
                    f"{path} cannot be copied: {error.strerror}",
                    code="unreadable-file",
                    hint="make it readable, or exclude it with 'ssh: {exclude: […]}'",
                ) from error
        self._request(Frame("copied"))
        return len(wanted), copied

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Sends the plan to the agent, which from now on sends frames when events occur."""
        self.send(Frame("plan", dict(plan)))

    def follow(self, plan: Mapping[str, Any]) -> None:
        """Replaces the plan while tasks run."""
        self.send(Frame("follow", dict(plan)))

    def read(self) -> Frame:
        """Waits for the next frame, and returns it.

        Raises:
            ConnectionEnded: the connection is lost.
        """
        return self._channel.read()

    def send(self, frame: Frame) -> None:
        """Sends a frame. A lost connection is noticed by the thread that reads."""
        with suppress(ConnectionEnded):
            self._channel.write(frame)

    def _request(self, frame: Frame) -> Frame:
        self._send(frame)
        try:
            answer = self._channel.read()
        except ConnectionEnded:
            raise self._connection_lost() from None
        if answer.kind == "error":
            kind = UsageError if answer["usage"] else HostLost
            code = answer.fields.get("code", "")
            raise kind(f"{self.name}: {answer['message']}", code=code, hint=answer["hint"])
        return answer

    def _send(self, frame: Frame) -> None:
        try:
            self._channel.write(frame)
        except ConnectionEnded:
            raise self._connection_lost() from None

    def _connection_lost(self) -> HostLost:
        return HostLost(self.cause, code="connection-lost", hint="check whether the host is up, and launch again")


class Link(AgentLink):
    """A connection through `ssh`.

    Args:
        cluster: the cluster, with the settings of ssh.
        host: the host.
    """

    def __init__(self, cluster: Cluster, host: HostSpec) -> None:
        self.host = host
        self._popen = _start(ssh_argv(cluster, host, agent_command(host)))
        source = io.BufferedReader(io.FileIO(_not_none(self._popen.stdout).fileno(), closefd=False))
        super().__init__(host.address, Channel(source, _not_none(self._popen.stdin)))
        self._stderr: deque[str] = deque(maxlen=_KEPT_LINES)
        self._stderr_reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr_reader.start()

    def greet(self) -> Hello:
        """Waits for the agent's description of its host.

        Raises:
            HostLost: the host cannot be reached.
            UsageError: no Python there has tfdist.
        """
        timer = threading.Timer(_GREETING_TIMEOUT, self._popen.kill)
        timer.start()
        try:
            return super().greet()
        except ConnectionEnded:
            raise self._unreachable(timed_out=not timer.is_alive()) from None
        finally:
            timer.cancel()

    @property
    def cause(self) -> str:
        """Why the connection has ended, with the last line that `ssh` or the agent has written to stderr."""
        self._popen.wait()
        self._stderr_reader.join(1.0)
        reason = f": {self._stderr[-1]}" if self._stderr else ""
        return f"the connection to {self.host.address} was lost{reason}"

    def close(self) -> None:
        """Makes the agent stop its tasks and exit, and waits for it."""
        self._channel.close()
        try:
            self._popen.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def kill(self) -> None:
        """Ends the connection immediately."""
        self._popen.kill()

    def _read_stderr(self) -> None:
        for line in _not_none(self._popen.stderr):
            text = line.decode(errors="replace").strip()
            if text:
                self._stderr.append(text)

    def _unreachable(self, *, timed_out: bool) -> TfdistError:
        code, name = self._popen.wait(), self.host.address
        self._stderr_reader.join(1.0)
        if code == NO_PYTHON:
            tried = " or ".join(pythons(self.host))
            return UsageError(
                f"tfdist is not installed for {tried} on {name}",
                code="tfdist-missing",
                hint=f"install it there, or name the Python that has it: hosts: [{{address: {name}, python: …}}]",
            )
        reason = f"it did not answer within {_GREETING_TIMEOUT:g} s" if timed_out else "\n".join(self._stderr)
        hint = next((hint for message, hint in _HINTS if message in reason), "try `ssh {host}`").format(host=name)
        return HostLost(
            f"{name} cannot be reached: {reason or f'ssh exited with code {code}'}",
            code="ssh-host-unreachable",
            hint=hint,
        )


def no_ssh() -> UsageError:
    """Returns the error for a machine without `ssh`."""
    return UsageError(
        "'ssh' is not on PATH",
        code="program-not-found",
        hint="install it, such as with `apt-get install openssh-client`",
    )


def _start(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts `ssh` in its own session, so that Ctrl-C reaches only the launcher, and ssh cannot ask questions."""
    try:
        popen = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise no_ssh() from None
    return popen


def _not_none(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise RuntimeError("all three streams are pipes")
    return stream
