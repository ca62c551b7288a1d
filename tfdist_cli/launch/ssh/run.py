"""The tasks of one run on their hosts: orders go out over each host's connection, and its news comes in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from tfdist_cli.errors import TfdistError
from tfdist_cli.launch.process.task_output import OutputParser, Parsed
from tfdist_cli.launch.run.history import METRICS_FILE
from tfdist_cli.launch.ssh.agent import PING_PERIOD
from tfdist_cli.launch.ssh.files import write_whole
from tfdist_cli.launch.ssh.frames import ConnectionEnded, Frame
from tfdist_cli.launch.ssh.link import Link
from tfdist_cli.launch.ssh.paths import PathMap
from tfdist_cli.launch.supervisor.events import (
    Action,
    Exited,
    Output,
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
"""The exit code of a task whose host was lost: that of `ssh` then."""
_RETRY = 2.0
"""Seconds between two attempts to reach a host again."""
_HEAD_START = 0.25
"""Seconds that the end of a task waits to be noted on hosts other than the chief's: see `launcher.py`. News of one host
may overtake that of another by about as much as a network's delay."""


@dataclass(frozen=True)
class Site:
    """A host, and what it takes to run its tasks there.

    Args:
        name: the host's, for messages.
        link: the connection, with the host's ports held.
        reconnect: makes another one.
        paths: where folders are there.
        orders: what the agent is given of the plan.
        tasks: its tasks.
        saves: whether the task that saves is among them.
    """

    name: str
    link: Link
    reconnect: Callable[[], Link]
    paths: PathMap
    orders: Mapping[str, Any]
    tasks: tuple[TaskId, ...]
    saves: bool


class SshRun:
    """The tasks of a plan on their hosts.

    Args:
        plan: the tasks.
        context: takes the events and the output of the tasks.
        sites: the hosts.
    """

    def __init__(self, plan: Plan, context: LaunchContext, sites: Iterable[Site]) -> None:
        self._hosts = [_Host(plan, context, site) for site in sites]
        self._host_of = {task: host for host in self._hosts for task in host.tasks}
        self._pinging = asyncio.get_running_loop().create_task(self._ping())

    def act(self, action: Action) -> None:
        """Has a task started or told to end."""
        self._host_of[action.task].act(action)

    async def close(self) -> None:
        """Has what is left killed, and the agents ended."""
        self._pinging.cancel()
        await asyncio.gather(*(host.close() for host in self._hosts))

    async def _ping(self) -> None:
        while True:
            for host in self._hosts:
                host.ping()
            await asyncio.sleep(PING_PERIOD)


class _Host:
    """The tasks of one host."""

    def __init__(self, plan: Plan, context: LaunchContext, site: Site) -> None:
        self.tasks = site.tasks
        self._plan = plan
        self._context = context
        self._site = site
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._trouble = ""
        self._alive: dict[TaskId, dict[Stream, OutputParser]] = {}
        self._waiting: dict[TaskId, Frame] = {}
        """Tasks that are to start as soon as the host can be reached."""
        self._reconnecting: asyncio.Task[None] | None = None
        self._closing = False
        self._attach(site.link)

    def act(self, action: Action) -> None:
        """Has a task started or told to end."""
        if isinstance(action, Start):
            env = {name: self._site.paths.there(value) for name, value in self._context.prepare(action).items()}
            frame = Frame("start", {"task": str(action.task), "attempt": action.attempt, "env": env})
            if self._link:
                self._start(action.task, frame)
            else:
                self._waiting[action.task] = frame
                self._reconnect()
        elif action.task in self._waiting:
            del self._waiting[action.task]
            cause = f"{self._site.name} could not be reached again: {self._trouble}"
            self._context.events.put(Exited(action.task, LOST, cause=cause))
        elif self._link:
            self._link.send(Frame("end", {"task": str(action.task), "how": action.signal.value}))

    def ping(self) -> None:
        """Gives the agent a sign of life."""
        if self._link:
            self._link.send(Frame("ping"))

    async def close(self) -> None:
        """Has what is left killed, and the agent ended."""
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

    def _attach(self, link: Link) -> None:
        self._link = link
        link.begin(self._site.orders)
        threading.Thread(target=self._read, args=(link,), daemon=True).start()

    def _read(self, link: Link) -> None:
        """Takes the host's news, one after another: what is not taken yet slows the host down."""
        with suppress(CancelledError):  # the loop has ended
            while not self._closing:
                try:
                    frame = link.read()
                except ConnectionEnded:
                    if not self._closing:
                        self._loop.call_soon_threadsafe(self._lost, link, link.cause)
                    return
                asyncio.run_coroutine_threadsafe(self._take(frame), self._loop).result()

    async def _take(self, frame: Frame) -> None:
        try:
            await self._heard(frame)
        except Exception as error:  # noqa: BLE001 an error of ours ends the run, in the loop that acts
            self._context.events.fail(error)

    async def _heard(self, frame: Frame) -> None:
        if frame.kind == "error":
            raise TfdistError(f"{self._site.name}: {frame['message']}", hint=frame["hint"])
        if frame.kind == "metrics":
            await self._keep_metrics(frame)
            return
        task = TaskId.parse(frame["task"])
        match frame.kind:
            case "started":
                self._context.events.put(Started(task, frame["pid"]))
            case "output":
                stream: Stream = frame["stream"]
                parser = self._alive[task][stream]
                await self._pass_on(task, stream, parser.feed(frame.payload), parser.unfinished)
            case "exited":
                await self._exited(task, frame)

    async def _keep_metrics(self, frame: Frame) -> None:
        path = self._plan.run_dir / METRICS_FILE
        try:
            keep_metrics(path, frame.payload, anew=frame["anew"])
        except OSError as error:  # a full disk here is no reason to end a training there
            record = {"kind": "metrics_failed", "reason": f"{path} is not complete: {error.strerror}"}
            await self._context.events.put_output(RecordReceived(self._plan.tasks[0].task, record))

    async def _pass_on(self, task: TaskId, stream: Stream, parsed: Parsed, unfinished: str) -> None:
        """Passes on what was written: what is for the log, lines to show, and records."""
        if parsed.log:
            self._context.logs.write(task, stream, parsed.log)
        if parsed.lines or unfinished:
            await self._context.events.put_output(Output(task, stream, tuple(parsed.lines), unfinished))
        for record in parsed.records:
            await self._context.events.put_output(RecordReceived(task, self._located(record)))

    async def _exited(self, task: TaskId, frame: Frame) -> None:
        for stream, parser in self._alive.pop(task).items():
            await self._pass_on(task, stream, parser.close(), "")
        wait = 0.0 if self._site.saves else _HEAD_START
        exited = Exited(task, frame["code"], frame["ago"] + wait, frame["oom_killed"])
        self._loop.call_later(wait, self._context.events.put, exited)

    def _lost(self, link: Link, cause: str) -> None:
        """All tasks of a host that is lost count as gone: the agent ends them, or the host has."""
        if self._closing or link is not self._link:
            return
        self._link = None
        self._trouble = cause
        for task in tuple(self._alive):
            del self._alive[task]
            self._context.events.put(Exited(task, LOST, cause=cause))

    def _reconnect(self) -> None:
        if self._reconnecting is None or self._reconnecting.done():
            self._reconnecting = self._loop.create_task(self._reach())

    async def _reach(self) -> None:
        """Tries to reach the host for as long as a task waits for it."""
        while self._waiting:
            connecting = self._loop.run_in_executor(None, self._site.reconnect)
            try:
                link = await asyncio.shield(connecting)
            except asyncio.CancelledError:
                connecting.add_done_callback(_end_unwanted)
                raise
            except TfdistError as error:
                self._trouble = error.message
                await asyncio.sleep(_RETRY)
                continue
            self._attach(link)
            for task, frame in self._waiting.items():
                self._start(task, frame)
            self._waiting.clear()

    def _located(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """A record whose paths say which host they are on."""
        if not self._site.paths.pairs:
            return dict(record)
        located = dict(record)
        if isinstance(record.get("path"), str):
            located["path"] = f"{self._site.name}:{record['path']}"
        if isinstance(record.get("paths"), list):
            located["paths"] = [f"{self._site.name}:{path}" for path in record["paths"]]
        return located


def keep_metrics(path: Path, lines: bytes, *, anew: bool) -> None:
    """Has a file of metrics hold the lines of the one on a host.

    Args:
        path: the file here.
        lines: what is new there, whole lines.
        anew: whether these are all. Those that only the file here has then, of steps that are taken once more, move to
            `metrics_lost.jsonl` beside it, as they do there.
    """
    if not anew:
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


def _end_unwanted(connecting: asyncio.Future[Link]) -> None:
    """Ends a connection that was made when nobody waited for it any more."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().kill()
