"""Looks at all hosts of a cluster at once: sends each the probe, asks what it has, has them connect to each other."""

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
"""Hosts that are looked at together."""


class Silent(Exception):
    """A host does not answer.

    Args:
        code: what the command that reaches it ended with; None when it still ran.
        said: what it wrote to standard error.
    """

    def __init__(self, code: int | None, said: str) -> None:
        super().__init__(said)
        self.code, self.said = code, said


@dataclass(frozen=True)
class Reach:
    """What came of one host connecting to a task of another.

    Args:
        task: the task whose port it was.
        address: the address that was tried.
        error: why there was no connection, as the kernel names it; empty when there was one.
        right: whether the probe of the task's own host answered there.
    """

    task: TaskId
    address: Address
    error: str = ""
    right: bool = True


@dataclass(frozen=True)
class Seen:
    """What was seen of a host.

    Args:
        site: the host.
        facts: what the probe's `look` told; empty when the host didn't answer.
        silence: why it didn't.
        clock: seconds that its clock is ahead of this machine's, and by how much that may be wrong.
        ports: what the probe's `listen` told of each task's port.
        reached: the tasks that it connected to, those on itself among them.
    """

    site: Site
    facts: Mapping[str, Any] = field(default_factory=dict)
    silence: Silent | None = None
    clock: tuple[float, float] = (0.0, 0.0)
    ports: Mapping[TaskId, Mapping[str, Any]] = field(default_factory=dict)
    reached: tuple[Reach, ...] = ()


class Conversation:
    """A probe on a host, and the questions that it is asked.

    Args:
        site: the host.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self._said: deque[str] = deque(maxlen=20)

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
                f"there is no program {argv[0]!r} here, by which {self.site.name} is reached",
                hint="install it, such as by: apt-get install openssh-client",
            ) from None
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        if stdin is None or stdout is None or stderr is None:
            raise RuntimeError("all were asked for as pipes")
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
        """Asks, and waits for the answer.

        Raises:
            Silent: there is none.
        """
        self._write(json.dumps(question).encode() + b"\n")
        try:
            line = await asyncio.wait_for(self._answer(), seconds)
        except asyncio.TimeoutError:
            raise Silent(None, f"no answer within {seconds:g} s") from None
        if not line:
            code = await self._process.wait()
            await self._listening
            raise Silent(code, "\n".join(self._said))
        return json.loads(line)

    def _write(self, data: bytes) -> None:
        with suppress(ConnectionError):  # it has ended, which the next answer tells
            self._questions.write(data)

    async def _answer(self) -> bytes:
        """The next line of JSON; a login's greetings may come before."""
        while line := await self._answers.readline():
            if line.startswith((b"{", b"[")):
                return line
        return b""

    async def _listen(self, stderr: asyncio.StreamReader) -> None:
        async for line in stderr:
            self._said.append(line.decode(errors="replace").rstrip())


async def examine(sites: Sequence[Site], names: Sequence[str], *, imports: bool) -> list[Seen]:
    """Looks at hosts.

    Args:
        sites: the hosts.
        names: the host names that each is to look up.
        imports: whether hosts with tasks, or the only one, import TensorFlow to see what it sees, which takes seconds.

    Returns:
        What was seen of each, in their order.
    """
    async with AsyncExitStack() as open_:
        turns = asyncio.Semaphore(_AT_ONCE)
        talks = [await open_.enter_async_context(Conversation(site)) for site in sites]
        alone = len(sites) == 1
        seen = await asyncio.gather(
            *(_look(talk, names, turns, imports=imports and (alone or bool(talk.site.tasks))) for talk in talks)
        )
        listening: dict[TaskId, Address] = {}
        for one in seen:
            for task, told in one.ports.items():
                if "error" not in told:
                    listening[task] = Address(one.site.ports[task].host or one.facts["address"], told["port"])
        return list(await asyncio.gather(*map(_connect, talks, seen, [listening] * len(talks))))


_TOKEN = f"tfdist-doctor-{secrets.token_hex(16)}"
"""What the probes of this examination answer with; whoever says something else is another program."""


async def _look(talk: Conversation, names: Sequence[str], turns: asyncio.Semaphore, *, imports: bool) -> Seen:
    site = talk.site
    question = {"do": "look", "names": list(names), "folders": [*site.folders.values()]}
    async with turns:
        try:
            seconds = _ANSWER_SECONDS + (probe.IMPORT_TIMEOUT if imports else 0)
            facts = await talk.ask({**question, "imports": imports}, seconds)
            clock = min([await _clock(talk) for _ in range(_CLOCK_QUESTIONS)], key=lambda measured: measured[1])
            wanted = {str(task): address.port for task, address in site.ports.items()}
            ports = await talk.ask({"do": "listen", "ports": wanted, "token": _TOKEN})
        except Silent as silence:
            return Seen(site, silence=silence)
    return Seen(site, facts, None, clock, {TaskId.parse(task): told for task, told in ports.items()})


async def _clock(talk: Conversation) -> tuple[float, float]:
    """How far a host's clock is ahead, by the middle of question and answer, and half the time between these."""
    before, began = time.time(), time.monotonic()
    now = (await talk.ask({"do": "clock"}))["now"]
    half = (time.monotonic() - began) / 2
    return now - (before + half), half


async def _connect(talk: Conversation, seen: Seen, listening: Mapping[TaskId, Address]) -> Seen:
    if seen.silence:
        return seen
    tried = list(listening.items())
    question = {"do": "connect", "to": [[address.host, address.port] for _, address in tried]}
    waves = 1 + len(tried) // 64
    try:
        answers = await talk.ask(question, _ANSWER_SECONDS + waves * probe.CONNECT_TIMEOUT)
    except Silent as silence:
        return Seen(seen.site, silence=silence)
    reached = tuple(
        Reach(task, address, told.get("error", ""), "error" in told or told["heard"] == _TOKEN)
        for (task, address), told in zip(tried, answers, strict=True)
    )
    return Seen(seen.site, seen.facts, None, seen.clock, seen.ports, reached)
