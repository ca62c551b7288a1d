"""Examines all hosts concurrently: sends each the probe, requests its facts, and tests connections between them."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist_cli.doctor import probe
from tfdist_cli.doctor.sites import Site
from tfdist_cli.errors import UsageError
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId

if TYPE_CHECKING:
    from typing_extensions import Self

_BOOT = "import sys; exec(compile(sys.stdin.buffer.read(int(sys.argv[1])), 'probe', 'exec'))"
_ANSWER_SECONDS = 30.0
_CLOCK_QUESTIONS = 3
_AT_ONCE = 32
"""Maximum number of hosts examined concurrently."""


class NoAnswer(Exception):
    """A host does not answer.

    Args:
        code: exit code of the command that connects to it; None if the command still ran.
        stderr: its output on stderr.
    """

    def __init__(self, code: int | None, stderr: str) -> None:
        super().__init__(stderr)
        self.code, self.stderr = code, stderr


@dataclass(frozen=True)
class Connection:
    """The result of connecting to the port of a task.

    Args:
        task: the task.
        address: the address of the port.
        error: the kernel's name of the error, such as ECONNREFUSED; empty on success.
        right: whether the probe on the task's host answered.
    """

    task: TaskId
    address: Address
    error: str = ""
    right: bool = True


@dataclass(frozen=True)
class HostResult:
    """The results of a host.

    Args:
        site: the host.
        facts: the result of the probe's `collect`; empty if the host did not answer.
        no_answer: why the host did not answer.
        clock: offset of its clock from this machine's in seconds (positive: ahead), and the uncertainty in seconds.
        ports: the result of the probe's `listen` for each task's port.
        connections: its connections to the tasks of all hosts, including its own.
    """

    site: Site
    facts: Mapping[str, Any] = field(default_factory=dict)
    no_answer: NoAnswer | None = None
    clock: tuple[float, float] = (0.0, 0.0)
    ports: Mapping[TaskId, Mapping[str, Any]] = field(default_factory=dict)
    connections: tuple[Connection, ...] = ()


class ProbeSession:
    """A session with the probe on a host.

    Args:
        site: the host.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self._stderr: deque[str] = deque(maxlen=20)

    async def __aenter__(self) -> Self:
        program = Path(probe.__file__).read_bytes()
        argv = self.site.python(("-c", _BOOT, str(len(program))))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=2**24,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise UsageError(
                f"the program {argv[0]!r}, which connects to {self.site.name}, is not installed",
                code="program-not-found",
                hint="install it, such as by: apt-get install openssh-client",
            ) from None
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        if stdin is None or stdout is None or stderr is None:
            raise RuntimeError("a stream of the probe is no pipe")
        self._questions, self._answers = stdin, stdout
        self._listening = asyncio.create_task(self._listen(stderr))
        self._write(program)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._questions.close()
        try:
            await asyncio.wait_for(self._process.wait(), 5.0)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._listening

    async def ask(self, question: Mapping[str, Any], seconds: float = _ANSWER_SECONDS) -> Any:
        """Sends a request and returns the answer.

        Args:
            question: the request; `do` names the action.
            seconds: timeout.

        Raises:
            NoAnswer: the host does not answer.
        """
        self._write(json.dumps(question).encode() + b"\n")
        try:
            line = await asyncio.wait_for(self._answer(), seconds)
        except asyncio.TimeoutError:
            raise NoAnswer(None, f"no answer within {seconds:g} s") from None
        if not line:
            code = await self._process.wait()
            await self._listening
            raise NoAnswer(code, "\n".join(self._stderr))
        return json.loads(line)

    def _write(self, data: bytes) -> None:
        with suppress(ConnectionError):  # the probe has exited: reading the answer reports it
            self._questions.write(data)

    async def _answer(self) -> bytes:
        """Returns the next line of JSON. Skips output of login scripts before it."""
        while line := await self._answers.readline():
            if line.startswith((b"{", b"[")):
                return line
        return b""

    async def _listen(self, stderr: asyncio.StreamReader) -> None:
        async for line in stderr:
            self._stderr.append(line.decode(errors="replace").rstrip())


async def examine(sites: Sequence[Site], names: Sequence[str], *, imports: bool) -> list[HostResult]:
    """Examines hosts.

    Args:
        sites: the hosts.
        names: host names that each host resolves.
        imports: whether hosts with tasks, or a single host, import TensorFlow, which takes seconds.

    Returns:
        The results, in the order of `sites`.
    """
    async with AsyncExitStack() as open_:
        slots = asyncio.Semaphore(_AT_ONCE)
        sessions = [await open_.enter_async_context(ProbeSession(site)) for site in sites]
        alone = len(sites) == 1
        seen = await asyncio.gather(
            *(
                _examine(session, names, slots, imports=imports and (alone or bool(session.site.tasks)))
                for session in sessions
            )
        )
        listening: dict[TaskId, Address] = {}
        for one in seen:
            for task, result in one.ports.items():
                if "error" not in result:
                    listening[task] = Address(one.site.ports[task].host or one.facts["address"], result["port"])
        return list(await asyncio.gather(*map(_connect, sessions, seen, [listening] * len(sessions))))


_TOKEN = f"tfdist-doctor-{secrets.token_hex(16)}"
"""The reply of this examination's probes. Any other reply comes from another program."""


async def _examine(
    session: ProbeSession, names: Sequence[str], slots: asyncio.Semaphore, *, imports: bool
) -> HostResult:
    site = session.site
    question = {"do": "look", "names": list(names), "folders": [*site.folders.values()]}
    async with slots:
        try:
            seconds = _ANSWER_SECONDS + (probe.IMPORT_TIMEOUT if imports else 0)
            facts = await session.ask({**question, "imports": imports}, seconds)
            clock = min([await _clock(session) for _ in range(_CLOCK_QUESTIONS)], key=lambda measured: measured[1])
            wanted = {str(task): address.port for task, address in site.ports.items()}
            ports = await session.ask({"do": "listen", "ports": wanted, "token": _TOKEN})
        except NoAnswer as no_answer:
            return HostResult(site, no_answer=no_answer)
    return HostResult(site, facts, None, clock, {TaskId.parse(task): result for task, result in ports.items()})


async def _clock(session: ProbeSession) -> tuple[float, float]:
    """Returns the offset of a host's clock, and half the round-trip time as its uncertainty, both in seconds."""
    before, began = time.time(), time.monotonic()
    now = (await session.ask({"do": "clock"}))["now"]
    half = (time.monotonic() - began) / 2
    return now - (before + half), half


async def _connect(session: ProbeSession, seen: HostResult, listening: Mapping[TaskId, Address]) -> HostResult:
    if seen.no_answer:
        return seen
    tried = list(listening.items())
    question = {"do": "connect", "to": [[address.host, address.port] for _, address in tried]}
    waves = 1 + len(tried) // 64
    try:
        answers = await session.ask(question, _ANSWER_SECONDS + waves * probe.CONNECT_TIMEOUT)
    except NoAnswer as no_answer:
        return HostResult(seen.site, no_answer=no_answer)
    connections = tuple(
        Connection(task, address, result.get("error", ""), "error" in result or result["heard"] == _TOKEN)
        for (task, address), result in zip(tried, answers, strict=True)
    )
    return HostResult(seen.site, seen.facts, None, seen.clock, seen.ports, connections)
