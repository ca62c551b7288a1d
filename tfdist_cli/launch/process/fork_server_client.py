"""The launcher's side of `fork_server`: recipe tasks start in milliseconds, since one process imports for all."""

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
"""Modules that every recipe task imports; they import TensorFlow and Keras."""
SERVER = "tfdist_cli.launch.process.fork_server"
_PERIOD = 1.0
"""Seconds between two checks for an expected packet of a fork server."""
_SILENT_PERIODS = 10
"""Checks in a row without a packet after which a fork server counts as stopped or stuck, and is killed. Checks are
counted in place of seconds, since a pause of the whole machine then counts as one."""
_PIPE_CAPACITY = 32 * 1024
"""Bytes that a pipe accepts without a reader."""
_READ_LATE = {
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "TF_CONFIG",
    "TF_CPP_MIN_LOG_LEVEL",
    "TF_NUM_INTEROP_THREADS",
    "TF_NUM_INTRAOP_THREADS",
}
"""Variables that TensorFlow reads only when a task creates its first context or starts CUDA, and those that a fork
applies
again: the log level and the number of OpenMP threads."""
_READ_AT_IMPORT = re.compile(
    r"""
    (TF|TFRT|XLA|KERAS|GRPC|ABSL|CUDA|CUDNN|NCCL|NVIDIA|ROCM|HIP|ONEDNN|DNNL|MKL|OMP|KMP|GOMP|OPENBLAS|GOTO|NPY|NUMPY|HDF5
    |GCS|AWS|LLVM|GFORTRAN|OPENSSL|SSL|PROTOCOL_BUFFERS|PYDANTIC|PSUTIL|TYPER|WRAPT|PILLOW|XDG|LC|LD|MALLOC|GLIBC)_.*
    |PYTHON.*|MPL.*|MATPLOTLIB.*|MALLOC.*|LANG|LANGUAGE|HOME|TMP|TEMP|TMPDIR|TZ|DISABLE_HOST_SEND_RECV_REGISTRATION
    """,
    re.VERBOSE,
)
"""Variables that are read while TensorFlow, Keras and their dependencies are imported, by the names of the libraries.
Found by tracing the calls of `getenv`. The pattern is wide, since a name too many costs only another fork server."""


def import_environment(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The part of a task's environment that is read during the imports; all tasks of a fork server share it."""
    read = ((name, value) for name, value in env.items() if _READ_AT_IMPORT.fullmatch(name) and name not in _READ_LATE)
    return tuple(sorted(read))


def fork_server_environment(env: Mapping[str, str], run_dir: Path) -> dict[str, str]:
    """The environment of a task's fork server: the launcher's, with the variables of the task that are read by imports.

    It names the run and its launcher, since the kernel shows it as the environment of each task.

    Args:
        env: the task's whole environment.
        run_dir: the run's directory.
    """
    # OpenBLAS would create its other threads during the import, and they would not exist after a fork.
    own = {"OMP_NUM_THREADS": "1", LAUNCHER_PID: str(os.getpid()), TASK_DIR: str(run_dir)}
    level = {name: env[name] for name in ("TF_CPP_MIN_LOG_LEVEL",) if name in env}
    return {**os.environ, **dict(import_environment(env)), **level, **own}


class ForkServerExited(Exception):
    """A fork server has exited, or could not import: the task must be started in another way."""


class ForkServerClient:
    """A fork server and its tasks.

    Args:
        env: its environment, see `fork_server_environment`.
        network: the network of the run.
        on_exit: called with its process id, which may be reused from then on, after its exit.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, env: Mapping[str, str], network: Network = HOST, on_exit: Callable[[int], None] = lambda _: None
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reading, self._lifeline = os.pipe()
        output_pipe, written_pipe = os.pipe()
        self._popen = subprocess.Popen(
            [*network.enter, sys.executable, "-m", SERVER, str(theirs.fileno()), str(reading), *IMPORTS],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=written_pipe,
            stderr=written_pipe,
            pass_fds=(theirs.fileno(), reading, *network.files),
            start_new_session=True,
        )
        theirs.close()
        os.close(reading)
        os.close(written_pipe)
        ours.setblocking(False)
        fcntl.fcntl(output_pipe, fcntl.F_SETFL, os.O_NONBLOCK)
        self._on_exit = on_exit
        self._channel = ours
        self._has_exited = False
        self._packets = 0
        """How many packets it has sent."""
        self._output_pipe = output_pipe
        self._import_output = b""
        """The output of the imports, which is copied to each task's output."""
        self._numbers = count()
        self._writable = asyncio.Event()
        """Set when the channel accepts another packet, or is closed."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._requests: dict[int, _ForkRequest] = {}
        self._tasks: dict[int, ForkedTask] = {}
        self._loop.add_reader(ours, self._on_packets)
        self._loop.add_reader(output_pipe, self._on_import_output)

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's."""
        return self._popen.pid

    @property
    def has_exited(self) -> bool:
        """Whether it has exited."""
        return self._has_exited

    @property
    def has_failed(self) -> bool:
        """Whether it exited before the imports were done, as another one would, too."""
        return self._ready.done() and self._ready.exception() is not None

    @property
    def ready(self) -> asyncio.Future[None]:
        """Done once it can fork, or has exited."""
        return self._ready

    async def fork(self, argv: Sequence[str], env: Mapping[str, str]) -> ForkedTask:
        """Starts a task, once the server is `ready`.

        Args:
            argv: a command that `launch.local.forkable.can_fork` accepts.
            env: its whole environment.

        Raises:
            Gone: the fork server has ended.
            OSError: there can be no more processes.
        """
        if self._has_exited:
            raise ForkServerExited
        with ExitStack() as given:
            content = os.memfd_create("task")
            given.callback(os.close, content)
            own = {
                name: value for name, value in env.items() if name != LAUNCHER_PID
            }  # the lifeline has the same effect
            os.write(content, json.dumps({"command": list(argv), "env": own}).encode())
            os.lseek(content, 0, os.SEEK_SET)
            outputs = []
            files = [content]
            for _ in range(2):
                read, write = os.pipe()
                given.callback(os.close, write)
                files.append(write)
                outputs.append(os.fdopen(read, "rb", buffering=0))
            os.write(files[-1], self._import_output[:_PIPE_CAPACITY])
            read, write = os.pipe()
            given.callback(os.close, read)
            files.append(read)
            start = given.enter_context(os.fdopen(write, "wb", buffering=0))
            request = _ForkRequest((outputs[0], outputs[1]), start, self._loop.create_future())
            number = next(self._numbers)
            try:
                await self._send(json.dumps({"fork": number}).encode(), files)
                self._requests[number] = request
                self._expect_packet(lambda: number in self._requests)
                return await request.forked
            except BaseException:
                self._requests.pop(number, None)
                for output in outputs:
                    output.close()
                raise

    def reap(self, pid: int) -> None:
        """Lets the server reap a task whose exit code is known."""
        if not self._has_exited:
            try:
                # If the fork server is stopped and the channel full, a zombie stays until the end of the run.
                with suppress(BlockingIOError):
                    self._channel.send(json.dumps({"reap": pid}).encode())
            except OSError:
                self.close()
        if self._has_exited:  # the task is then a child of this process
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def close(self) -> None:
        """Kills the fork server; its running tasks become children of the launcher."""
        if self._has_exited:
            return
        self._has_exited = True
        for file in (self._channel, self._output_pipe):
            self._loop.remove_reader(file)
        self._loop.remove_writer(self._channel)
        self._popen.kill()
        self._popen.wait()  # from then on its tasks are children of this process
        while data := self._receive():
            self._handle(json.loads(data))
        self._channel.close()
        self._writable.set()
        os.close(self._output_pipe)
        self._on_exit(self.pid)
        if not self._ready.done():
            self._ready.set_exception(ForkServerExited())
            self._ready.exception()  # marks the exception as retrieved
        for request in self._requests.values():
            request.forked.set_exception(ForkServerExited())
        self._requests.clear()
        for task in self._tasks.values():
            task.adopt()
        self._tasks.clear()

    def close_lifeline(self) -> None:
        """Makes the kernel kill its remaining tasks, even if the server has exited."""
        os.close(self._lifeline)

    def _expect_packet(self, is_expected: Callable[[], bool]) -> None:
        """Kills the fork server if an expected packet does not arrive; its tasks become children of this process.

        Args:
            is_expected: whether the packet is still expected.
        """
        packets, silent = self._packets, 0

        def look() -> None:
            nonlocal packets, silent
            if self._has_exited or not is_expected():
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
                self._writable.clear()
                self._loop.add_writer(self._channel, self._writable.set)
                await self._writable.wait()
                if not self._has_exited:
                    self._loop.remove_writer(self._channel)
            except OSError:
                self.close()
                raise ForkServerExited from None
            else:
                return

    def _on_packets(self) -> None:
        data = self._receive()
        if data:
            self._handle(json.loads(data))
        elif data is not None:
            self.close()

    def _receive(self) -> bytes | None:
        """The next packet; empty at the end of the channel; None if no packet is available yet."""
        while True:
            try:
                return self._channel.recv(4096)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # it has exited with a packet unread; reported once, before its own packets

    def _handle(self, packet: Mapping[str, int]) -> None:
        self._packets += 1
        if "ready" in packet:
            self._on_import_output()
            self._ready.set_result(None)
        elif "exited" in packet:
            if task := self._tasks.pop(packet["exited"], None):
                task.set_exit_code(packet["code"])
            else:
                self.reap(packet["exited"])  # its start was cancelled
        elif request := self._requests.pop(packet["forked"], None):
            self._on_forked(request, packet)

    def _on_forked(self, request: _ForkRequest, packet: Mapping[str, int]) -> None:
        if "error" in packet:
            request.forked.set_exception(OSError(packet["error"], os.strerror(packet["error"])))
            return
        task = ForkedTask(self, packet["pid"], request.outputs)
        self._tasks[task.pid] = task
        # Its exit is noticed here as well: a stopped fork server cannot report it, and only the server has the exit
        # code.
        task.watch(lambda: self._expect_packet(lambda: task.pid in self._tasks))
        with suppress(BrokenPipeError):  # it has been killed already
            request.start.write(b"1")
        request.forked.set_result(task)

    def _on_import_output(self) -> None:
        with suppress(BlockingIOError):
            written = os.read(self._output_pipe, _PIPE_CAPACITY)
            if not written:
                self._loop.remove_reader(self._output_pipe)
            elif not self._ready.done():
                self._import_output += written


@dataclass(frozen=True)
class _ForkRequest:
    """A task that is being forked.

    Args:
        outputs: the ends to read its stdout and stderr from.
        start: a pipe; the task runs after a byte on it.
        forked: the future task.
    """

    outputs: tuple[IO[bytes], IO[bytes]]
    start: IO[bytes]
    forked: asyncio.Future[ForkedTask]


class ForkedTask:
    """A task of a fork server; implements `process.Program`.

    Args:
        fork_server: its parent.
        pid: its process id, which is also its group's.
        outputs: the ends to read its stdout and stderr from.
    """

    def __init__(self, fork_server: ForkServerClient, pid: int, outputs: tuple[IO[bytes], IO[bytes]]) -> None:
        self.pid = pid
        self.outputs = outputs
        self._fork_server = fork_server
        self._code: int | None = None
        self._adopted = False
        self._callbacks: list[Callable[[], None]] = []
        self._cancel_watch: Callable[[], None] = lambda: None

    def watch(self, callback: Callable[[], None]) -> None:
        """Makes the running loop call `callback` when the kernel reports the exit of the process."""
        self._cancel_watch = watch_exit(self.pid, callback)

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Makes the running loop call `callback` once the task has exited."""
        if self._code is None:
            self._callbacks.append(callback)
        else:
            asyncio.get_running_loop().call_soon(callback)

    def reap(self) -> int:
        """Returns the exit code, or -n for signal n. The process id may be reused from then on."""
        if self._code is None:
            raise RuntimeError("the task has not exited")
        if not self._adopted:
            self._fork_server.reap(self.pid)
        return self._code

    def set_exit_code(self, code: int) -> None:
        """Sets the exit code, or -n for signal n, and calls the callbacks."""
        self._cancel_watch()
        self._code = code
        for callback in self._callbacks:
            callback()

    def adopt(self) -> None:
        """Watches the task itself after the fork server's exit, which made it a child of this process."""
        self._adopted = True

        def over() -> None:
            self.set_exit_code(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))

        watch_exit(self.pid, over)
