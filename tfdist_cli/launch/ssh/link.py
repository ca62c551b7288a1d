"""One connection to a host: an `ssh` process with an agent at its other end."""

from __future__ import annotations

import io
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tfdist_cli.errors import TfdistError, UsageError
from tfdist_cli.launch.ssh.command import NO_PYTHON, agent_command, python_command, pythons, ssh_argv
from tfdist_cli.launch.ssh.files import FileList, pieces
from tfdist_cli.launch.ssh.frames import Channel, ConnectionEnded, Frame
from tfdist_cli.plan.resources import Machine
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.ssh import HostSpec
from tfdist_cli.spec.task_id import TaskId

_GREETING_TIMEOUT = 60.0
_END_TIMEOUT = 10.0
"""Seconds for an agent to end its tasks and itself, before `ssh` is ended instead."""
_KEPT_LINES = 20
_SAYS_OF_SSH = (
    ("Permission denied", "make `ssh {host}` work without a password: add your key to an agent, or to the host"),
    ("Host key verification failed", "connect once by hand, `ssh {host}`, and check the key that it shows"),
    ("Could not resolve hostname", "correct the name in 'hosts', or add it to ~/.ssh/config"),
)


class HostLost(TfdistError):
    """A host cannot be reached, or can be no more."""


@dataclass(frozen=True)
class Hello:
    """What an agent says of its host.

    Args:
        python: the Python that it runs.
        home: its user's home folder.
        address: the IP address that ssh has come to.
        versions: as `versions.installed` gives them.
        machine: its cores and GPUs.
    """

    python: str
    home: str
    address: str
    versions: Mapping[str, str]
    machine: Machine


class Link:
    """A connection; asking and answering, until `frames` are read as they come.

    Args:
        cluster: says how hosts are reached.
        host: which host.
    """

    def __init__(self, cluster: Cluster, host: HostSpec) -> None:
        self.host = host
        self._popen = _start(ssh_argv(cluster, host, agent_command(host)))
        source = io.BufferedReader(io.FileIO(_not_none(self._popen.stdout).fileno(), closefd=False))
        self._channel = Channel(source, _not_none(self._popen.stdin))
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def greet(self) -> Hello:
        """Waits for the agent.

        Raises:
            HostLost: the host cannot be reached, or has no tfdist.
        """
        overdue = threading.Timer(_GREETING_TIMEOUT, self._popen.kill)
        overdue.start()
        try:
            self._channel.await_greeting()
            said = self._channel.read()
        except ConnectionEnded:
            raise self._unreachable(late=not overdue.is_alive()) from None
        finally:
            overdue.cancel()
        # An agent of an earlier tfdist does not say the last; what is wrong with its version is told later.
        machine = Machine(said["cores"], tuple(said["gpus"]), said["memory"], said.fields.get("no_proxy", {}))
        return Hello(said["python"], said["home"], said["address"], said["versions"], machine)

    def hold(self, addresses: Mapping[TaskId, Address]) -> dict[TaskId, Address]:
        """Has the host keep a port for each task, a free one where none is named.

        Raises:
            UsageError: a port cannot be had.
            HostLost: the host is gone.
        """
        wanted = {str(task): [address.host, address.port] for task, address in addresses.items()}
        held = self._ask(Frame("hold", {"addresses": wanted}))["addresses"]
        return {task: Address(*held[str(task)]) for task in addresses}

    def copy(self, base: Path, listed: FileList, to: str, tell: Callable[[int, int], None]) -> tuple[int, int]:
        """Copies what the host lacks.

        Args:
            base: the folder that the files are in.
            listed: the files.
            to: the folder on the host.
            tell: called now and then with the bytes that were copied, and those that there are to copy.

        Returns:
            How many files were copied, and how many bytes.

        Raises:
            UsageError: a file cannot be read, or the folder has files of others.
            HostLost: the host is gone, or cannot keep them.
        """
        wanted = self._ask(Frame("copy", {"to": to, **listed.as_json()}))["wanted"]
        copied, size = 0, sum(listed.entries[index].size for index in wanted)
        for index in wanted:
            path = base / listed.entries[index].path
            try:
                for data, last in pieces(path):
                    self._send(Frame("piece", {"file": index, "last": last}, data))
                    copied += len(data)
                    tell(copied, size)
            except OSError as error:
                raise UsageError(f"{path} cannot be copied: {error.strerror}", hint="or exclude it") from error
        self._ask(Frame("copied"))
        return len(wanted), copied

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Gives the agent its tasks; from now on it speaks when there is something to say."""
        self.send(Frame("plan", dict(plan)))

    def read(self) -> Frame:
        """The next frame.

        Raises:
            ConnectionEnded: the host is gone.
        """
        return self._channel.read()

    def send(self, frame: Frame) -> None:
        """Sends a frame; a host that is gone is noticed where its frames are read."""
        with suppress(ConnectionEnded):
            self._channel.write(frame)

    @property
    def cause(self) -> str:
        """Why the connection has ended, as far as `ssh` or the agent has said so."""
        self._popen.wait()
        self._listening.join(1.0)
        said = f": {self._said[-1]}" if self._said else ""
        return f"the connection to {self.host.address} was lost{said}"

    def close(self) -> None:
        """Tells the agent to end what is left, and waits for it."""
        self._channel.close()
        try:
            self._popen.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def kill(self) -> None:
        """Ends the connection at once."""
        self._popen.kill()

    def _ask(self, frame: Frame) -> Frame:
        self._send(frame)
        try:
            answer = self._channel.read()
        except ConnectionEnded:
            raise HostLost(self.cause, hint="see whether the host is up, and launch again") from None
        if answer.kind == "error":
            kind = UsageError if answer["usage"] else HostLost
            raise kind(f"{self.host.address}: {answer['message']}", hint=answer["hint"])
        return answer

    def _send(self, frame: Frame) -> None:
        try:
            self._channel.write(frame)
        except ConnectionEnded:
            raise HostLost(self.cause, hint="see whether the host is up, and launch again") from None

    def _listen(self) -> None:
        for line in _not_none(self._popen.stderr):
            text = line.decode(errors="replace").strip()
            if text:
                self._said.append(text)

    def _unreachable(self, *, late: bool) -> TfdistError:
        code, name = self._popen.wait(), self.host.address
        self._listening.join(1.0)
        if code == NO_PYTHON:
            tried = " or ".join(pythons(self.host))
            return UsageError(
                f"there is no tfdist for {tried} on {name}",
                hint=f"install it there, or name the Python that has it: hosts: [{{address: {name}, python: …}}]",
            )
        said = f"it did not answer within {_GREETING_TIMEOUT:g} s" if late else "\n".join(self._said)
        fitting = (hint for words, hint in _SAYS_OF_SSH if words in said)
        hint = next(fitting, "see what `ssh {host}` says").format(host=name)
        return HostLost(f"{name} cannot be reached: {said or f'ssh ended with {code}'}", hint=hint)


def run_program(cluster: Cluster, host: HostSpec, program: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Runs a small program of Python on a host, by the interpreter that its tasks would have.

    Args:
        cluster: says how hosts are reached.
        host: which host.
        program: its source, which may import tfdist.
        timeout: seconds, the connection included.

    Returns:
        Its exit code, 255 when the host cannot be reached, and its output.

    Raises:
        UsageError: there is no `ssh` here.
        subprocess.TimeoutExpired: it took longer.
    """
    argv = ssh_argv(cluster, host, python_command(host, ("-",)))
    try:
        return subprocess.run(argv, input=program, capture_output=True, text=True, timeout=timeout, check=False)
    except FileNotFoundError:
        raise no_ssh() from None


def no_ssh() -> UsageError:
    """What to say where the program is missing."""
    return UsageError("there is no program 'ssh' here", hint="install it, such as by: apt-get install openssh-client")


def _start(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts `ssh` in a session of its own: Ctrl-C in the terminal is for the launcher, and there is nobody to ask."""
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
        raise RuntimeError("all were asked for as pipes")
    return stream
