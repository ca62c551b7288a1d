"""Runs the tasks of a plan on their hosts: sends commands over each host's connection, and receives its events."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from tfdist_cli.errors import TfdistError
from tfdist_cli.launch.process.stream import forward
from tfdist_cli.launch.process.task_output import OutputParser, Parsed
from tfdist_cli.launch.run.history import METRICS_FILE
from tfdist_cli.launch.ssh.agent import PING_PERIOD
from tfdist_cli.launch.ssh.files import write_whole
from tfdist_cli.launch.ssh.frames import ConnectionEnded, Frame
from tfdist_cli.launch.ssh.link import AgentLink
from tfdist_cli.launch.ssh.paths import PathMap
from tfdist_cli.launch.supervisor.events import (
    Action,
    Exited,
    Profile,
    RecordReceived,
    Start,
    Started,
    Stop,
    StopSignal,
    Stream,
)
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.plan import Plan
from tfdist_cli.spec.task_id import TaskId

LOST = 255
"""The exit code of a task whose host is lost, which is also that of `ssh` then."""
_RECONNECT_SECONDS = 2.0
"""Seconds between two attempts to reconnect to a host."""
_EXIT_DELAY = 0.25
"""Seconds by which exits on hosts other than the chief's are delayed, so that they are not reported before the chief's
exit. Events of one host may overtake those of another by about the network's latency."""


@dataclass(frozen=True)
class HostRun:
    """A host, and the part of a plan that runs there.

    Args:
        name: the host's name in messages.
        link: the connection, with the reserved ports.
        reconnect: opens a new connection.
        paths: maps paths of this machine to the host.
        agent_plan: the part of a plan that the agent gets.
        tasks: the host's tasks.
        saves: whether the task that saves checkpoints is among them.
    """

    name: str
    link: AgentLink
    reconnect: Callable[[], AgentLink]
    paths: PathMap
    agent_plan: Callable[[Plan], Mapping[str, Any]]
    tasks: tuple[TaskId, ...]
    saves: bool


class SshRun:
    """The tasks of a plan on their hosts.

    Args:
        plan: the tasks.
        context: takes the events and the output of the tasks.
        hosts: the hosts.
    """

    def __init__(self, plan: Plan, context: LaunchContext, hosts: Iterable[HostRun]) -> None:
        self._hosts = [_Host(plan, context, host) for host in hosts]
        self._host_of = {task: host for host in self._hosts for task in host.tasks}
        self._pinging = asyncio.get_running_loop().create_task(self._ping())

    def act(self, action: Action) -> None:
        """Starts, stops or profiles a task."""
        self._host_of[action.task].act(action)

    def follow(self, plan: Plan) -> None:
        """Replaces the plan: a task that joins has a host, and a port there, since the launch."""
        for host in self._hosts:
            host.follow(plan)

    async def close(self) -> None:
        """Kills the remaining tasks, and ends the agents."""
        self._pinging.cancel()
        await asyncio.gather(*(host.close() for host in self._hosts))

    async def _ping(self) -> None:
        while True:
            for host in self._hosts:
                host.ping()
            await asyncio.sleep(PING_PERIOD)


class _Host:
    """The tasks of one host."""

    def __init__(self, plan: Plan, context: LaunchContext, host: HostRun) -> None:
        self.tasks = host.tasks
        self._plan = plan
        self._context = context
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._link: AgentLink | None = None
        self._last_problem = ""
        self._alive: dict[TaskId, dict[Stream, OutputParser]] = {}
        self._waiting: dict[TaskId, Frame] = {}
        """Tasks that start as soon as the host is connected again."""
        self._profiles: set[str] = set()
        """Where profiles of the host's tasks are stored in the run directory."""
        self._reconnecting: asyncio.Task[None] | None = None
        self._closing = False
        self._attach(host.link)

    def act(self, action: Action) -> None:
        """Starts, stops or profiles a task."""
        if isinstance(action, Profile):
            self._profiles.add(action.order.path)
            if self._link:
                self._link.send(Frame("profile", {"task": str(action.task), "order": asdict(action.order)}))
        elif isinstance(action, Start):
            env = {name: self._host.paths.there(value) for name, value in self._context.prepare(action).items()}
            frame = Frame("start", {"task": str(action.task), "attempt": action.attempt, "env": env})
            if self._link:
                self._start(action.task, frame)
            else:
                self._waiting[action.task] = frame
                self._reconnect()
        elif action.task in self._waiting:
            del self._waiting[action.task]
            cause = f"{self._host.name} could not be reached again: {self._last_problem}"
            self._context.events.put(Exited(action.task, LOST, cause=cause))
        elif self._link:
            self._link.send(Frame("end", {"task": str(action.task), "how": action.signal.value}))

    def follow(self, plan: Plan) -> None:
        """Replaces the plan, here and at the agent; an agent that is connected later gets it then."""
        self._plan = plan
        if self._link:
            self._link.follow(self._host.agent_plan(plan))

    def ping(self) -> None:
        """Sends a ping to the agent."""
        if self._link:
            self._link.send(Frame("ping"))

    async def close(self) -> None:
        """Kills the remaining tasks, and ends the agent."""
        self._closing = True
        if self._reconnecting:
            self._reconnecting.cancel()
        if self._link:
            for task in self._alive:
                self.act(Stop(task, StopSignal.KILL))
            await asyncio.to_thread(self._link.close)

    def _start(self, task: TaskId, frame: Frame) -> None:
        self._alive[task] = {stream: OutputParser(self._context.mask) for stream in get_args(Stream)}
        if self._link:
            self._link.send(frame)

    def _attach(self, link: AgentLink) -> None:
        self._link = link
        link.begin(self._host.agent_plan(self._plan))
        threading.Thread(target=self._read, args=(link,), daemon=True).start()

    def _read(self, link: AgentLink) -> None:
        """Receives the host's frames one by one. A host whose frames are not read blocks."""
        with suppress(CancelledError):  # the event loop is closed
            while not self._closing:
                try:
                    frame = link.read()
                except ConnectionEnded:
                    if not self._closing:
                        self._loop.call_soon_threadsafe(self._lost, link, link.cause)
                    return
                asyncio.run_coroutine_threadsafe(self._handle(frame), self._loop).result()

    async def _handle(self, frame: Frame) -> None:
        try:
            await self._dispatch(frame)
        except Exception as error:  # noqa: BLE001 the supervisor's loop raises it
            self._context.events.fail(error)

    async def _dispatch(self, frame: Frame) -> None:
        if frame.kind == "error":
            code = frame.fields.get("code", "")
            raise TfdistError(f"{self._host.name}: {frame['message']}", code=code, hint=frame["hint"])
        if frame.kind == "metrics":
            await self._keep_metrics(frame)
            return
        if frame.kind == "profile":
            self._keep_profile(frame)
            return
        task = TaskId.parse(frame["task"])
        match frame.kind:
            case "started":
                self._context.events.put(Started(task, frame["pid"]))
            case "output":
                stream: Stream = frame["stream"]
                parser = self._alive[task][stream]
                await self._forward(task, stream, parser.feed(frame.payload), parser.unfinished)
            case "exited":
                await self._exited(task, frame)

    async def _keep_metrics(self, frame: Frame) -> None:
        path = self._plan.run_dir / METRICS_FILE
        try:
            keep_metrics(path, frame.payload, replaced=frame["anew"])
        except OSError as error:  # a full disk here must not end the training there
            record = {"kind": "metrics_failed", "reason": f"{path} is incomplete: {error.strerror}"}
            await self._context.events.put_output(RecordReceived(self._plan.tasks[0].task, record))

    def _keep_profile(self, frame: Frame) -> None:
        """Adds a piece to the copy of a profile. A full disk here must not end the training there."""
        if frame["path"] not in self._profiles:
            return
        path = self._plan.run_dir / frame["path"]
        new = path.with_name(f".{path.name}.new")
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with new.open("wb" if frame["first"] else "ab") as file:
                file.write(frame.payload)
            if frame["last"]:
                new.replace(path)

    async def _forward(self, task: TaskId, stream: Stream, parsed: Parsed, unfinished: str) -> None:
        parsed.records = [self._located(record) for record in parsed.records]
        await forward(task, stream, parsed, unfinished, self._context)

    async def _exited(self, task: TaskId, frame: Frame) -> None:
        for stream, parser in self._alive.pop(task).items():
            await self._forward(task, stream, parser.close(), "")
        delay = 0.0 if self._host.saves else _EXIT_DELAY
        exited = Exited(task, frame["code"], frame["ago"] + delay, frame["oom_killed"])
        self._loop.call_later(delay, self._context.events.put, exited)

    def _lost(self, link: AgentLink, cause: str) -> None:
        """Reports all tasks of a lost host as exited: the agent stops them, or the host is down."""
        if self._closing or link is not self._link:
            return
        self._link = None
        self._last_problem = cause
        for task in tuple(self._alive):
            del self._alive[task]
            self._context.events.put(Exited(task, LOST, cause=cause))

    def _reconnect(self) -> None:
        if self._reconnecting is None or self._reconnecting.done():
            self._reconnecting = self._loop.create_task(self._connect_again())

    async def _connect_again(self) -> None:
        """Tries to connect to the host as long as a task waits for it."""
        while self._waiting:
            connecting = self._loop.run_in_executor(None, self._host.reconnect)
            try:
                link = await asyncio.shield(connecting)
            except asyncio.CancelledError:
                connecting.add_done_callback(_kill_unused)
                raise
            except TfdistError as error:
                self._last_problem = error.message
                await asyncio.sleep(_RECONNECT_SECONDS)
                continue
            self._attach(link)
            for task, frame in self._waiting.items():
                self._start(task, frame)
            self._waiting.clear()

    def _located(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a record with the host's name in front of its paths."""
        if not self._host.paths.pairs:
            return dict(record)
        located = dict(record)
        if isinstance(record.get("path"), str):
            located["path"] = f"{self._host.name}:{record['path']}"
        if isinstance(record.get("paths"), list):
            located["paths"] = [f"{self._host.name}:{path}" for path in record["paths"]]
        return located


def keep_metrics(path: Path, lines: bytes, *, replaced: bool) -> None:
    """Updates a metrics file to the content of the one on a host.

    Args:
        path: the file here.
        lines: the new complete lines there.
        replaced: whether these are all lines there. Lines that only the file here has, of steps that are repeated, move
            to `metrics_lost.jsonl` beside it, as on the host.
    """
    if not replaced:
        with path.open("ab") as file:
            file.write(lines)
        return
    there = set(lines.splitlines())
    here = path.read_bytes().splitlines() if path.exists() else []
    lost = [line + b"\n" for line in here if line not in there]
    if lost:
        with path.with_name(f"{path.stem}_lost{path.suffix}").open("ab") as file:
            file.writelines(lost)
    write_whole(path, lines)


def _kill_unused(connecting: asyncio.Future[AgentLink]) -> None:
    """Ends a connection that was opened after the run had been closed."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().kill()
