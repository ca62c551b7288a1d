"""The agent on a host: runs the host's tasks with the local launcher, and sends their events to the launcher.

`ssh` runs this module as a program. Its stdin and stdout are the connection. When the connection ends, or no frame
arrives for some time, the tasks get SIGTERM, and SIGKILL a few seconds later. Then the agent exits.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from tfdist_cli.errors import TfdistError, UsageError
from tfdist_cli.launch.local.launcher import LocalLauncher
from tfdist_cli.launch.process.ports import hold_addresses
from tfdist_cli.launch.process.watchdog import GRACE
from tfdist_cli.launch.run.history import METRICS_FILE
from tfdist_cli.launch.ssh.files import CHUNK, FileList, IncomingFile, lacking, remove_former, write_whole
from tfdist_cli.launch.ssh.frames import Channel, ConnectionEnded, Frame
from tfdist_cli.launch.ssh.versions import installed
from tfdist_cli.launch.supervisor.events import (
    Event,
    EventQueue,
    Exited,
    Output,
    Profile,
    RecordReceived,
    Start,
    Started,
    Stop,
    StopSignal,
    Stream,
)
from tfdist_cli.launch.supervisor.launcher import LaunchContext, Run
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import CLUSTER_FILE, Plan, PlannedTask
from tfdist_cli.plan.resources import Resources
from tfdist_cli.protocol.profile_order import ProfileOrder
from tfdist_cli.protocol.records import LAUNCHER_PID, RECORD_SEPARATOR, TASK_DIR
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.loading.load import load_run
from tfdist_cli.spec.task_id import TaskId

PING_PERIOD = 3.0
"""Seconds between two pings of the launcher."""
PING_TIMEOUT = 15.0
"""Seconds without a frame after which the connection counts as lost."""
_POLL_SECONDS = 0.5


def main() -> None:
    """Serves one launcher."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # other output must not mix with the frames
    channel = Channel(source, sink)
    try:
        _serve(channel)
    except ConnectionEnded:
        return
    except TfdistError as error:
        with suppress(ConnectionEnded):
            channel.write(_error(error))


def _serve(channel: Channel) -> None:
    channel.greet()
    channel.write(_hello())
    with ExitStack() as held:
        receiver = _FileReceiver(channel)
        held.callback(receiver.drop)
        while True:
            frame = channel.read()
            match frame.kind:
                case "hold":
                    channel.write(_hold(frame, held))
                case "copy" | "piece" | "copied":
                    receiver.handle(frame)
                case "plan":
                    asyncio.run(_TaskRunner(channel, frame).run())
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
        "core_ids": machine.core_ids,
    }
    return Frame("hello", fields)


def _hold(frame: Frame, held: ExitStack) -> Frame:
    wanted = {TaskId.parse(task): Address(*address) for task, address in frame["addresses"].items()}
    try:
        beside = TaskId.parse(frame["beside"]) if frame["beside"] else None
        addresses = held.enter_context(hold_addresses(wanted, beside))
    except UsageError as error:
        return _error(error)
    return Frame("held", {"addresses": {str(task): [each.host, each.port] for task, each in addresses.items()}})


def _error(error: TfdistError) -> Frame:
    usage = isinstance(error, UsageError)
    return Frame("error", {"message": error.message, "code": error.code, "hint": error.hint, "usage": usage})


class _FileReceiver:
    """Receives the files that are copied to the host."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._to = Path()
        self._listed = FileList()
        self._open: IncomingFile | None = None

    def drop(self) -> None:
        """Discards an incomplete file."""
        if self._open:
            self._open.drop()

    def handle(self, frame: Frame) -> None:
        """Handles one frame of the copy.

        Raises:
            UsageError: the folder has files of another origin.
            TfdistError: a file cannot be written.
        """
        try:
            self._handle(frame)
        except OSError as error:
            raise TfdistError(
                f"files cannot be copied to {self._to}: {error}",
                code="files-not-writable",
                hint="free space there, or name another folder, 'ssh: {to: …}'",
            ) from error

    def _handle(self, frame: Frame) -> None:
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
    """Output of tasks that has not been sent yet. The launcher writes the logs."""

    def __init__(self) -> None:
        self._data: dict[tuple[TaskId, Stream], bytes] = defaultdict(bytes)

    def write(self, task: TaskId, stream: Stream, data: bytes) -> None:
        """Appends to a stream's output."""
        self._data[task, stream] += data

    def pop(self, task: TaskId, stream: Stream) -> bytes:
        """Returns and removes a stream's output."""
        return self._data.pop((task, stream), b"")


class _Sender:
    """Sends frames from a daemon thread.

    If the host is cut off and the connection's buffer is full, a write blocks until the kernel closes the connection.
    The agent must not wait for that.

    Args:
        channel: the connection.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._frames: queue.SimpleQueue[tuple[Frame, asyncio.Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._send, daemon=True).start()

    async def send(self, frame: Frame) -> None:
        """Sends a frame, and waits until it is written. Does nothing if the connection is lost."""
        written = self._loop.create_future()
        self._frames.put((frame, written))
        await written

    def _send(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            while True:
                frame, written = self._frames.get()
                with suppress(ConnectionEnded):
                    self._channel.write(frame)
                self._loop.call_soon_threadsafe(_set_done, written)


def _set_done(written: asyncio.Future[None]) -> None:
    if not written.done():
        written.set_result(None)


class _TaskRunner:
    """Runs the tasks of a plan by the launcher's commands.

    Args:
        channel: the connection.
        frame: the plan, with only the tasks of this host.
    """

    def __init__(self, channel: Channel, frame: Frame) -> None:
        self._channel = channel
        self._run_dir = Path(frame["run_dir"])
        self._plan = _read_plan(frame, self._run_dir)
        self._metrics = _Tail(self._run_dir / METRICS_FILE) if frame["tells_metrics"] else None
        self._start_env: dict[TaskId, Mapping[str, str]] = {}
        self._alive: set[TaskId] = set()
        self._none_alive = asyncio.Event()
        self._unsent = _Unsent()
        self._profiles: dict[str, str] = {}
        """By the requests, where in the run directory the tasks store their profiles."""
        _enter(Path(frame["start"]), make=frame["copied"])

    async def run(self) -> None:
        """Executes the launcher's commands until the connection ends, and then stops the remaining tasks."""
        events = EventQueue()
        loop = asyncio.get_running_loop()
        commands: asyncio.Queue[Frame | None] = asyncio.Queue()
        threading.Thread(target=self._receive, args=(loop, commands), daemon=True).start()
        async with LocalLauncher().start(self._plan, LaunchContext(events, self._unsent, self._prepare)) as run:
            sending = loop.create_task(self._send_events(events))
            while (frame := await _next(commands)) is not None:
                self._execute(frame, run)
                if sending.done():
                    break
            self._channel.close()  # if the network recovers, the launcher must still count this host as lost
            for task in tuple(self._alive):
                run.act(Stop(task, StopSignal.TERMINATE))
            if self._alive:
                exits = loop.create_task(self._none_alive.wait())
                await asyncio.wait({sending, exits}, timeout=GRACE, return_when=asyncio.FIRST_COMPLETED)
                exits.cancel()
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await sending

    def _receive(self, loop: asyncio.AbstractEventLoop, commands: asyncio.Queue[Frame | None]) -> None:
        """Puts the received frames into the queue, and None at the end of the connection."""
        while True:
            try:
                frame = self._channel.read()
            except ConnectionEnded:
                loop.call_soon_threadsafe(commands.put_nowait, None)
                return
            loop.call_soon_threadsafe(commands.put_nowait, frame)

    def _execute(self, frame: Frame, run: Run) -> None:
        if frame.kind == "start":
            task = TaskId.parse(frame["task"])
            self._start_env[task] = frame["env"]
            self._alive.add(task)
            self._none_alive.clear()
            run.act(Start(task, frame["attempt"]))
        elif frame.kind == "follow":
            self._plan = _read_plan(frame, self._run_dir)
            run.follow(self._plan)
        elif frame.kind == "profile":
            order = ProfileOrder(**frame["order"])
            self._profiles[order.request] = order.path
            run.act(Profile(TaskId.parse(frame["task"]), order))
        elif frame.kind == "end":
            run.act(Stop(TaskId.parse(frame["task"]), StopSignal(frame["how"])))

    def _prepare(self, start: Start) -> Mapping[str, str]:
        env = {**self._start_env[start.task], LAUNCHER_PID: str(os.getpid())}
        Path(env[TASK_DIR]).mkdir(parents=True, exist_ok=True)
        return env

    async def _send_events(self, events: EventQueue) -> None:
        """Sends the events to the launcher, and notes exits also after the connection is lost."""
        sender = _Sender(self._channel)
        while True:
            event = await events.get(_POLL_SECONDS)
            if isinstance(event, Exited):
                self._alive.discard(event.task)
                if not self._alive:
                    self._none_alive.set()
            for frame in (*self._new_metrics(), *self._profile(event)):
                await sender.send(frame)
            for frame in self._frames(event):
                await sender.send(frame)

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

    def _profile(self, event: Event) -> Iterator[Frame]:
        """Yields the pieces of a profile that a task has stored, before it is reported."""
        record = event.record if isinstance(event, RecordReceived) else {}
        path = self._profiles.pop(str(record.get("request")), None)
        if path is None or record.get("kind") != "profiled":
            return
        with suppress(OSError), (self._run_dir / path).open("rb") as file:  # the launcher misses what was removed
            left = os.fstat(file.fileno()).st_size
            first = True
            while first or left > 0:
                piece = file.read(CHUNK)
                left = left - len(piece) if piece else 0
                yield Frame("profile", {"path": path, "first": first, "last": left <= 0}, piece)
                first = False

    def _output(self, task: TaskId, stream: Stream) -> list[Frame]:
        data = self._unsent.pop(task, stream)
        return [Frame("output", {"task": str(task), "stream": stream}, data)] if data else []

    def _new_metrics(self) -> list[Frame]:
        replaced, lines = self._metrics.read_new() if self._metrics else (False, b"")
        return [Frame("metrics", {"anew": replaced}, lines)] if replaced or lines else []


class _Tail:
    """Follows a growing file. A training that is restored from a checkpoint replaces or shortens the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def read_new(self) -> tuple[bool, bytes]:
        """Returns whether the file was replaced since the last call, and its new lines: all lines if it was."""
        replaced = False
        try:
            if self._file is None or not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                former, self._file, replaced = self._file, self._path.open("rb"), True
                if former:
                    former.close()
            elif self._path.stat().st_size < self._file.tell():
                self._file.seek(0)
                replaced = True
        except OSError:  # the file does not exist yet
            return False, b""
        offset = self._file.tell()
        lines, line_feed, _ = self._file.read().rpartition(b"\n")
        self._file.seek(offset + len(lines + line_feed))
        return replaced, lines + line_feed


def _end(event: Exited) -> dict[str, Any]:
    return {"code": event.code, "ago": event.ago, "oom_killed": event.oom_killed}


async def _next(commands: asyncio.Queue[Frame | None]) -> Frame | None:
    """Returns the launcher's next frame; None if the connection is lost."""
    try:
        return await asyncio.wait_for(commands.get(), PING_TIMEOUT)
    except asyncio.TimeoutError:
        return None


def _read_plan(frame: Frame, run_dir: Path) -> Plan:
    """Writes the cluster file and the recipe into the run directory, and returns the plan.

    Raises:
        TfdistError: the run directory cannot be written.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in frame["files"].items():
            write_whole(run_dir / name, text.encode())
    except OSError as error:
        raise TfdistError(
            f"the run directory {run_dir} cannot be written: {error}",
            code="run-dir-not-writable",
            hint="name another folder, 'ssh: {run_dir: …}'",
        ) from error
    cluster, recipe = load_run(run_dir / CLUSTER_FILE)
    cluster = cluster.model_copy(update={"network": "host"})  # tasks on other hosts connect to these
    return Plan(cluster, recipe, run_dir, tuple(_planned(task) for task in frame["tasks"]))


def _planned(task: Mapping[str, Any]) -> PlannedTask:
    threads = task["intra_op_threads"], task["inter_op_threads"]
    resources = Resources(*threads, tuple(task["gpus"]), cores=tuple(task["cores"]))
    argv, env = tuple(task["argv"]), dict(task["env"])
    return PlannedTask(TaskId.parse(task["task"]), Address.parse(task["address"]), argv, env, resources)


def _enter(folder: Path, *, make: bool) -> None:
    """Changes to the working directory of programs, or to the home folder, and puts this Python first on PATH.

    Args:
        folder: the working directory.
        make: whether to create it: if it belongs to the copied folders, it may be missing because it has no files.

    Raises:
        TfdistError: it cannot be created.
    """
    if make:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TfdistError(
                f"the folder {folder} cannot be created: {error.strerror}",
                code="folder-not-creatable",
                hint="launch from another folder",
            ) from error
    os.chdir(folder if folder.is_dir() else Path.home())
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


if __name__ == "__main__":
    main()
