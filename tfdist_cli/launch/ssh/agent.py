"""The agent on a host: runs its tasks as the local launcher does, and tells the launcher of them over ssh.

Run as a program, by `ssh`. Standard input and output are the connection. When it ends, or nothing has been heard over
it for some time, the tasks are told to end, and killed a few seconds later. The agent goes last.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from tfdist_cli.errors import TfdistError, UsageError
from tfdist_cli.launch.local.launcher import LocalLauncher
from tfdist_cli.launch.process.ports import hold_addresses
from tfdist_cli.launch.process.watchdog import GRACE
from tfdist_cli.launch.run.history import METRICS_FILE
from tfdist_cli.launch.ssh.files import FileList, IncomingFile, lacking, remove_former, write_whole
from tfdist_cli.launch.ssh.frames import Channel, ConnectionEnded, Frame
from tfdist_cli.launch.ssh.versions import installed
from tfdist_cli.launch.supervisor.events import (
    Event,
    EventQueue,
    Exited,
    Output,
    RecordReceived,
    Start,
    Started,
    Stop,
    StopSignal,
    Stream,
)
from tfdist_cli.launch.supervisor.launcher import LaunchContext, Run
from tfdist_cli.plan.plan import CLUSTER_FILE, Plan, PlannedTask
from tfdist_cli.plan.resources import Machine, Resources
from tfdist_cli.protocol.records import LAUNCHER_PID, RECORD_SEPARATOR, TASK_DIR
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.loading.load import load_run
from tfdist_cli.spec.task_id import TaskId

PING_PERIOD = 3.0
"""Seconds between two signs of life of the launcher."""
SILENCE = 15.0
"""Seconds without one after which the connection is taken to be cut."""
_PERIOD = 0.5


def main() -> None:
    """Serves one launcher."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what else prints here must not end up between the frames
    channel = Channel(source, sink)
    try:
        _serve(channel)
    except ConnectionEnded:
        return
    except TfdistError as error:
        with suppress(ConnectionEnded):
            channel.write(_problem(error))


def _serve(channel: Channel) -> None:
    channel.greet()
    channel.write(_hello())
    with ExitStack() as held:
        copying = _Copying(channel)
        held.callback(copying.drop)
        while True:
            frame = channel.read()
            match frame.kind:
                case "hold":
                    channel.write(_hold(frame, held))
                case "copy" | "piece" | "copied":
                    copying.take(frame)
                case "plan":
                    asyncio.run(_Tasks(channel, frame).run())
                    return


def _hello() -> Frame:
    machine = Machine.here()
    fields = {
        "python": sys.executable,
        "home": str(Path.home()),
        "address": (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2],
        "versions": installed(),
        "cores": machine.cores,
        "gpus": machine.gpus,
        "memory": machine.memory,
        "no_proxy": dict(machine.no_proxy),
    }
    return Frame("hello", fields)


def _hold(frame: Frame, held: ExitStack) -> Frame:
    wanted = {TaskId.parse(task): Address(*address) for task, address in frame["addresses"].items()}
    try:
        addresses = held.enter_context(hold_addresses(wanted))
    except UsageError as error:
        return _problem(error)
    return Frame("held", {"addresses": {str(task): [each.host, each.port] for task, each in addresses.items()}})


def _problem(error: TfdistError) -> Frame:
    return Frame("error", {"message": error.message, "hint": error.hint, "usage": isinstance(error, UsageError)})


class _Copying:
    """Takes in files."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._to = Path()
        self._listed = FileList()
        self._open: IncomingFile | None = None

    def drop(self) -> None:
        """Leaves no part of a file behind, whose rest never comes."""
        if self._open:
            self._open.drop()

    def take(self, frame: Frame) -> None:
        """One step of it.

        Raises:
            UsageError: the folder has files of others.
            TfdistError: the file system refuses.
        """
        try:
            self._take(frame)
        except OSError as error:
            raise TfdistError(
                f"files cannot be copied to {self._to}: {error}", hint="make room there, or name another 'ssh: {to: …}'"
            ) from error

    def _take(self, frame: Frame) -> None:
        if frame.kind == "copy":
            self._to = Path(frame["to"])
            self._listed = FileList.from_json(frame.fields)
            remove_former(self._to, self._listed)
            self._channel.write(Frame("wanted", {"wanted": lacking(self._to, self._listed.entries)}))
        elif frame.kind == "piece":
            self._open = self._open or IncomingFile(self._to, self._listed.entries[frame["file"]])
            self._open.add(frame.payload, last=frame["last"])
            if frame["last"]:
                self._open = None
        else:
            self._channel.write(Frame("copied"))


class _Unsent:
    """What tasks have written and the launcher has not been told yet; it keeps the logs."""

    def __init__(self) -> None:
        self._data: dict[tuple[TaskId, Stream], bytes] = defaultdict(bytes)

    def write(self, task: TaskId, stream: Stream, data: bytes) -> None:
        """Adds to it."""
        self._data[task, stream] += data

    def take(self, task: TaskId, stream: Stream) -> bytes:
        """Gives it out, once."""
        return self._data.pop((task, stream), b"")


class _Teller:
    """Sends frames from a thread that nobody waits for at the end.

    On a host that is cut off, a write that finds the connection full comes back only when the kernel gives it up.

    Args:
        channel: the connection.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._frames: queue.SimpleQueue[tuple[Frame, asyncio.Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._send, daemon=True).start()

    async def tell(self, frame: Frame) -> None:
        """Sends a frame; when the launcher hears no more, nobody does."""
        told = self._loop.create_future()
        self._frames.put((frame, told))
        await told

    def _send(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            while True:
                frame, told = self._frames.get()
                with suppress(ConnectionEnded):
                    self._channel.write(frame)
                self._loop.call_soon_threadsafe(_settle, told)


def _settle(told: asyncio.Future[None]) -> None:
    if not told.done():
        told.set_result(None)


class _Tasks:
    """The tasks of one plan, as the launcher has them started and ended.

    Args:
        channel: the connection.
        frame: the plan, with only the tasks of this host.
    """

    def __init__(self, channel: Channel, frame: Frame) -> None:
        self._channel = channel
        self._run_dir = Path(frame["run_dir"])
        self._plan = _read_plan(frame, self._run_dir)
        self._metrics = _Tail(self._run_dir / METRICS_FILE) if frame["tells_metrics"] else None
        self._own: dict[TaskId, Mapping[str, str]] = {}
        self._alive: set[TaskId] = set()
        self._unsent = _Unsent()
        _enter(Path(frame["start"]), make=frame["copied"])

    async def run(self) -> None:
        """Carries out what the launcher says, until it says no more and no task is left."""
        events = EventQueue()
        loop = asyncio.get_running_loop()
        orders: asyncio.Queue[Frame | None] = asyncio.Queue()
        threading.Thread(target=self._hear, args=(loop, orders), daemon=True).start()
        async with LocalLauncher().start(self._plan, LaunchContext(events, self._unsent, self._prepare)) as run:
            telling = loop.create_task(self._tell(events))
            while (frame := await _next(orders)) is not None:
                self._carry_out(frame, run)
                if telling.done():
                    break
            self._channel.close()  # a launcher that hears again later has lost this host, however its tasks end
            for task in tuple(self._alive):
                run.act(Stop(task, StopSignal.TERMINATE))
            deadline = time.monotonic() + GRACE
            while self._alive and not telling.done() and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
        telling.cancel()
        with suppress(asyncio.CancelledError):
            await telling

    def _hear(self, loop: asyncio.AbstractEventLoop, orders: asyncio.Queue[Frame | None]) -> None:
        """Passes on what comes, and that nothing more does."""
        while True:
            try:
                frame = self._channel.read()
            except ConnectionEnded:
                loop.call_soon_threadsafe(orders.put_nowait, None)
                return
            loop.call_soon_threadsafe(orders.put_nowait, frame)

    def _carry_out(self, frame: Frame, run: Run) -> None:
        if frame.kind == "start":
            task = TaskId.parse(frame["task"])
            self._own[task] = frame["env"]
            self._alive.add(task)
            run.act(Start(task, frame["attempt"]))
        elif frame.kind == "end":
            run.act(Stop(TaskId.parse(frame["task"]), StopSignal(frame["how"])))

    def _prepare(self, start: Start) -> Mapping[str, str]:
        own = {**self._own[start.task], LAUNCHER_PID: str(os.getpid())}
        Path(own[TASK_DIR]).mkdir(parents=True, exist_ok=True)
        return own

    async def _tell(self, events: EventQueue) -> None:
        """Tells the launcher of what happens, and sees tasks end also when it hears no more."""
        teller = _Teller(self._channel)
        while True:
            event = await events.get(_PERIOD)
            if isinstance(event, Exited):
                self._alive.discard(event.task)
            for frame in (*self._new_metrics(), *self._frames(event)):
                await teller.tell(frame)

    def _frames(self, event: Event) -> list[Frame]:
        match event:
            case Started(task, pid):
                return [Frame("started", {"task": str(task), "pid": pid})]
            case Output(task, stream):
                return self._output(task, stream)
            case RecordReceived(task, record):
                self._unsent.write(task, "stderr", f"{RECORD_SEPARATOR}{json.dumps(record)}\n".encode())
                return self._output(task, "stderr")
            case Exited(task):
                rest = [*self._output(task, "stdout"), *self._output(task, "stderr")]
                return [*rest, Frame("exited", {"task": str(task), **_end(event)})]
        return []

    def _output(self, task: TaskId, stream: Stream) -> list[Frame]:
        data = self._unsent.take(task, stream)
        return [Frame("output", {"task": str(task), "stream": stream}, data)] if data else []

    def _new_metrics(self) -> list[Frame]:
        anew, lines = self._metrics.new() if self._metrics else (False, b"")
        return [Frame("metrics", {"anew": anew}, lines)] if anew or lines else []


class _Tail:
    """A file as it grows; a training that goes back to a checkpoint puts another in its place, or shortens it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def new(self) -> tuple[bool, bytes]:
        """Whether it is another file than the last time, and its lines that are new: all of them then."""
        anew = False
        try:
            if self._file is None or not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                former, self._file, anew = self._file, self._path.open("rb"), True
                if former:
                    former.close()
            elif self._path.stat().st_size < self._file.tell():
                self._file.seek(0)
                anew = True
        except OSError:  # there is none yet
            return False, b""
        place = self._file.tell()
        lines, feed, _ = self._file.read().rpartition(b"\n")
        self._file.seek(place + len(lines + feed))
        return anew, lines + feed


def _end(event: Exited) -> dict[str, Any]:
    return {"code": event.code, "ago": event.ago, "oom_killed": event.oom_killed}


async def _next(orders: asyncio.Queue[Frame | None]) -> Frame | None:
    """What the launcher says next; None when it is gone."""
    try:
        return await asyncio.wait_for(orders.get(), SILENCE)
    except asyncio.TimeoutError:
        return None


def _read_plan(frame: Frame, run_dir: Path) -> Plan:
    """Writes the files of a run where its tasks read them, and makes its plan.

    Raises:
        TfdistError: they cannot be written.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in frame["files"].items():
            write_whole(run_dir / name, text.encode())
    except OSError as error:
        raise TfdistError(
            f"the run directory {run_dir} cannot be written: {error}", hint="name another 'ssh: {run_dir: …}'"
        ) from error
    cluster, recipe = load_run(run_dir / CLUSTER_FILE)
    cluster = cluster.model_copy(update={"network": "host"})  # where the tasks of other hosts reach these
    return Plan(cluster, recipe, run_dir, tuple(_planned(task) for task in frame["tasks"]))


def _planned(task: Mapping[str, Any]) -> PlannedTask:
    resources = Resources(task["intra_op_threads"], task["inter_op_threads"], tuple(task["gpus"]))
    argv, env = tuple(task["argv"]), dict(task["env"])
    return PlannedTask(TaskId.parse(task["task"]), Address.parse(task["address"]), argv, env, resources)


def _enter(folder: Path, *, make: bool) -> None:
    """Goes where programs start, or else home; a bare `python` in them is to be the one that runs here.

    Args:
        folder: the folder there.
        make: whether it belongs to what is copied, and is only missing since no file of it was.

    Raises:
        TfdistError: it cannot be made.
    """
    if make:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TfdistError(
                f"the folder {folder} cannot be made: {error.strerror}", hint="launch from another folder"
            ) from error
    os.chdir(folder if folder.is_dir() else Path.home())
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


if __name__ == "__main__":
    main()
