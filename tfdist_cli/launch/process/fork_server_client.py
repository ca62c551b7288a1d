"""The launcher's side of `fork_server`: recipe tasks that start in milliseconds, since one process imports for all."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO

from tfdist_cli.launch.process.network import HOST, Network
from tfdist_cli.launch.process.process import watch_exit
from tfdist_cli.protocol.records import LAUNCHER_PID, TASK_DIR

IMPORTS = ("tfdist_cli.cli.app", "tfdist_cli.cli.role", "tfdist_cli.task.recipe", "tfdist_cli.train.cluster.join")
"""What a task imports before it knows what it is to do; TensorFlow and Keras come with it."""
SERVER = "tfdist_cli.launch.process.fork_server"
_PERIOD = 1.0
"""Seconds between two looks at whether a fork server has said what it owes."""
_SILENT_PERIODS = 10
"""Looks in a row without a word after which it is taken to be stopped, or stuck, and killed; after a pause of the whole
machine only one of them is over."""
_PIPE_ROOM = 32 * 1024
"""Bytes that a pipe takes at once, whether somebody reads or not."""
_READ_LATE = {
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "TF_CONFIG",
    "TF_CPP_MIN_LOG_LEVEL",
    "TF_NUM_INTEROP_THREADS",
    "TF_NUM_INTRAOP_THREADS",
}
"""Read when a task makes its first context or starts CUDA; or, the level of the log and OpenMP's threads, set anew."""
_READ_AT_IMPORT = re.compile(
    r"""
    (TF|TFRT|XLA|KERAS|GRPC|ABSL|CUDA|CUDNN|NCCL|NVIDIA|ROCM|HIP|ONEDNN|DNNL|MKL|OMP|KMP|GOMP|OPENBLAS|GOTO|NPY|NUMPY|HDF5
    |GCS|AWS|LLVM|GFORTRAN|OPENSSL|SSL|PROTOCOL_BUFFERS|PYDANTIC|PSUTIL|TYPER|WRAPT|PILLOW|XDG|LC|LD|MALLOC|GLIBC)_.*
    |PYTHON.*|MPL.*|MATPLOTLIB.*|MALLOC.*|LANG|LANGUAGE|HOME|TMP|TEMP|TMPDIR|TZ|DISABLE_HOST_SEND_RECV_REGISTRATION
    """,
    re.VERBOSE,
)
"""Variables that importing TensorFlow, Keras and what comes with them reads, by the names of the libraries: seen by
counting the calls of `getenv`, and wide, since a process more is all that it costs to be wrong about a name."""


def can_fork(argv: Sequence[str]) -> bool:
    """Whether a command is a task of a recipe, on a system that can have fork servers: Linux from 5.3 on."""
    able = sys.platform.startswith("linux") and hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")
    return able and tuple(argv[:4]) == (sys.executable, "-m", "tfdist_cli", "role")


def import_environment(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What of a task's environment has to be set before TensorFlow is imported: all tasks of a fork server share it."""
    read = ((name, value) for name, value in env.items() if _READ_AT_IMPORT.fullmatch(name) and name not in _READ_LATE)
    return tuple(sorted(read))


def fork_server_environment(env: Mapping[str, str], run_dir: Path) -> dict[str, str]:
    """The environment of the fork server for a task: the launcher's, and of the task's own only what the imports read.

    It names the run and its launcher, since the kernel goes on to show it as that of each task.

    Args:
        env: the task's whole environment.
        run_dir: the run's directory.
    """
    # OpenBLAS would make its other threads at the import, and they would not survive a fork.
    own = {"OMP_NUM_THREADS": "1", LAUNCHER_PID: str(os.getpid()), TASK_DIR: str(run_dir)}
    level = {name: env[name] for name in ("TF_CPP_MIN_LOG_LEVEL",) if name in env}
    return {**os.environ, **dict(import_environment(env)), **level, **own}


class ForkServerExited(Exception):
    """A fork server has ended, or could not import: the task is to be started in another way."""


class ForkServerClient:
    """A fork server, and its tasks.

    Args:
        env: its environment, see `fork_server_environment`.
        network: the run's.
        ended: called with its process id, which is free from then on, once it has ended.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, env: Mapping[str, str], network: Network = HOST, ended: Callable[[int], None] = lambda _: None
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reading, self._lifeline = os.pipe()
        said, saying = os.pipe()
        self._popen = subprocess.Popen(
            [*network.enter, sys.executable, "-m", SERVER, str(theirs.fileno()), str(reading), *IMPORTS],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=saying,
            stderr=saying,
            pass_fds=(theirs.fileno(), reading, *network.files),
            start_new_session=True,
        )
        theirs.close()
        os.close(reading)
        os.close(saying)
        ours.setblocking(False)
        fcntl.fcntl(said, fcntl.F_SETFL, os.O_NONBLOCK)
        self._ended = ended
        self._channel = ours
        self._gone = False
        self._packets = 0
        """How many it has sent."""
        self._said = said
        self._at_import = b""
        """What the imports have written, which each task's own would have."""
        self._numbers = count()
        self._room = asyncio.Event()
        """Set when the channel takes another order, or is closed."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._orders: dict[int, _Order] = {}
        self._tasks: dict[int, ForkedTask] = {}
        self._loop.add_reader(ours, self._hear)
        self._loop.add_reader(said, self._overhear)

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's."""
        return self._popen.pid

    @property
    def is_gone(self) -> bool:
        """Whether it has ended."""
        return self._gone

    @property
    def has_failed(self) -> bool:
        """Whether it has ended before it had imported: another one would, too."""
        return self._ready.done() and self._ready.exception() is not None

    @property
    def ready(self) -> asyncio.Future[None]:
        """Done when it can fork, or has ended instead."""
        return self._ready

    async def fork(self, argv: Sequence[str], env: Mapping[str, str]) -> ForkedTask:
        """Makes a task, once it is `ready`.

        Args:
            argv: a command that `can_fork` allows.
            env: its whole environment.

        Raises:
            Gone: the fork server has ended.
            OSError: there can be no more processes.
        """
        if self._gone:
            raise ForkServerExited
        with ExitStack() as given:
            content = os.memfd_create("order")
            given.callback(os.close, content)
            own = {name: value for name, value in env.items() if name != LAUNCHER_PID}  # it has a lifeline instead
            os.write(content, json.dumps({"command": list(argv), "env": own}).encode())
            os.lseek(content, 0, os.SEEK_SET)
            outputs = []
            files = [content]
            for _ in range(2):
                read, write = os.pipe()
                given.callback(os.close, write)
                files.append(write)
                outputs.append(os.fdopen(read, "rb", buffering=0))
            os.write(files[-1], self._at_import[:_PIPE_ROOM])
            read, write = os.pipe()
            given.callback(os.close, read)
            files.append(read)
            begin = given.enter_context(os.fdopen(write, "wb", buffering=0))
            order = _Order((outputs[0], outputs[1]), begin, self._loop.create_future())
            number = next(self._numbers)
            try:
                await self._send(json.dumps({"fork": number}).encode(), files)
                self._orders[number] = order
                self._expect_word(lambda: number in self._orders)
                return await order.forked
            except BaseException:
                self._orders.pop(number, None)
                for output in outputs:
                    output.close()
                raise

    def reap(self, pid: int) -> None:
        """Lets a task's number go, once it is known how the task has ended."""
        if not self._gone:
            try:
                # Should the fork server be stopped and the channel full, a zombie stays until the end of the run.
                with suppress(BlockingIOError):
                    self._channel.send(json.dumps({"reap": pid}).encode())
            except OSError:
                self.close()
        if self._gone:  # and has left it to this process
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def close(self) -> None:
        """Ends the fork server; its tasks, if any are left, become the launcher's own children."""
        if self._gone:
            return
        self._gone = True
        for file in (self._channel, self._said):
            self._loop.remove_reader(file)
        self._loop.remove_writer(self._channel)
        self._popen.kill()
        self._popen.wait()  # only then are its tasks this process's own
        while data := self._received():
            self._take(json.loads(data))
        self._channel.close()
        self._room.set()
        os.close(self._said)
        self._ended(self.pid)
        if not self._ready.done():
            self._ready.set_exception(ForkServerExited())
            self._ready.exception()  # nobody may wait for it any more
        for order in self._orders.values():
            order.forked.set_exception(ForkServerExited())
        self._orders.clear()
        for task in self._tasks.values():
            task.adopt()
        self._tasks.clear()

    def let_tasks_go(self) -> None:
        """Closes what its tasks live by, also when it has ended itself: the kernel kills those that are still there."""
        os.close(self._lifeline)

    def _expect_word(self, owes: Callable[[], bool]) -> None:
        """Ends the fork server if it is silent for long while it owes a word: its tasks are then this process's own.

        Args:
            owes: whether it still does.
        """
        packets, silent = self._packets, 0

        def look() -> None:
            nonlocal packets, silent
            if self._gone or not owes():
                return
            silent = silent + 1 if packets == self._packets else 0
            packets = self._packets
            if silent >= _SILENT_PERIODS:
                self.close()
            else:
                self._loop.call_later(_PERIOD, look)

        self._loop.call_later(_PERIOD, look)

    async def _send(self, packet: bytes, files: list[int]) -> None:
        while True:
            try:
                socket.send_fds(self._channel, [packet], files)
            except BlockingIOError:
                self._room.clear()
                self._loop.add_writer(self._channel, self._room.set)
                await self._room.wait()
                if not self._gone:
                    self._loop.remove_writer(self._channel)
            except OSError:
                self.close()
                raise ForkServerExited from None
            else:
                return

    def _hear(self) -> None:
        data = self._received()
        if data:
            self._take(json.loads(data))
        elif data is not None:
            self.close()

    def _received(self) -> bytes | None:
        """The next packet: nothing at the end, None where there may be more."""
        while True:
            try:
                return self._channel.recv(4096)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # it has died and left an order unread: told once, before what it has said

    def _take(self, packet: Mapping[str, int]) -> None:
        self._packets += 1
        if "ready" in packet:
            self._overhear()
            self._ready.set_result(None)
        elif "exited" in packet:
            if task := self._tasks.pop(packet["exited"], None):
                task.ended(packet["code"])
            else:
                self.reap(packet["exited"])  # it never began: whoever wanted it does not any more
        elif order := self._orders.pop(packet["forked"], None):
            self._answer(order, packet)

    def _answer(self, order: _Order, packet: Mapping[str, int]) -> None:
        if "error" in packet:
            order.forked.set_exception(OSError(packet["error"], os.strerror(packet["error"])))
            return
        task = ForkedTask(self, packet["pid"], order.outputs)
        self._tasks[task.pid] = task
        # Its end is seen here too: a stopped fork server cannot report it, and nobody else knows the exit code.
        task.watch(lambda: self._expect_word(lambda: task.pid in self._tasks))
        with suppress(BrokenPipeError):  # something has killed it already
            order.begin.write(b"1")
        order.forked.set_result(task)

    def _overhear(self) -> None:
        with suppress(BlockingIOError):
            written = os.read(self._said, _PIPE_ROOM)
            if not written:
                self._loop.remove_reader(self._said)
            elif not self._ready.done():
                self._at_import += written


@dataclass(frozen=True)
class _Order:
    """A task that is to be forked.

    Args:
        outputs: the ends to read its stdout and stderr from.
        begin: a pipe; it begins with a byte.
        forked: the task to be.
    """

    outputs: tuple[IO[bytes], IO[bytes]]
    begin: IO[bytes]
    forked: asyncio.Future[ForkedTask]


class ForkedTask:
    """A task of a fork server, as `process.Program` wants it.

    Args:
        fork server: its parent.
        pid: its process id, which is also its group's.
        outputs: the ends to read its stdout and stderr from.
    """

    def __init__(self, fork_server: ForkServerClient, pid: int, outputs: tuple[IO[bytes], IO[bytes]]) -> None:
        self.pid = pid
        self.outputs = outputs
        self._fork_server = fork_server
        self._code: int | None = None
        self._adopted = False
        self._heard: list[Callable[[], None]] = []
        self._leave_watch: Callable[[], None] = lambda: None

    def watch(self, callback: Callable[[], None]) -> None:
        """Has the running loop call `callback` when the process is seen to have ended, however that was."""
        self._leave_watch = watch_exit(self.pid, callback)

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Has the running loop call `callback` once the task has ended."""
        if self._code is None:
            self._heard.append(callback)
        else:
            asyncio.get_running_loop().call_soon(callback)

    def reap(self) -> int:
        """How the task has ended; its number is free then."""
        if self._code is None:
            raise RuntimeError("it has not ended")
        if not self._adopted:
            self._fork_server.reap(self.pid)
        return self._code

    def ended(self, code: int) -> None:
        """The task has ended: takes its exit code, or -n for signal n."""
        self._leave_watch()
        self._code = code
        for callback in self._heard:
            callback()

    def adopt(self) -> None:
        """The fork server is gone, and the kernel has given the task to this process."""
        self._adopted = True

        def over() -> None:
            self.ended(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))

        watch_exit(self.pid, over)
