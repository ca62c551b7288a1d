"""A process that has imported what a recipe's tasks need, and makes each of them by a fork of itself.

Run as `python -m tfdist_cli.launch.process.fork_server CHANNEL LIFELINE MODULE…`, by `fork_server_client.py`. The two
numbers are open files: a Unix socket of packets, and a pipe that nobody writes to, which ends when the launcher does.

To it, each packet is JSON:

* `{"fork": n}` with four files: JSON `{"command": ["python", "-m", …], "env": {…}}`, standard output, standard error,
  and a pipe into which the launcher writes a byte once it knows of the task, which begins then; without it, it ends.
* `{"reap": pid}`: the launcher knows how this task has ended.

From it:

* `{"ready": 1}`: the imports are done.
* `{"forked": n, "pid": pid}` or `{"forked": n, "error": errno}`.
* `{"exited": pid, "code": code}`, -n for signal n; the task stays a zombie until it is reaped.

TensorFlow bears a fork as long as it has made no context and no thread, which importing it doesn't do. numpy's OpenBLAS
makes its threads at the import, unless it is told to have one; a task gets its number after the fork.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import re
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_F_SETSIG = 10
"""`fcntl.h` of Linux: which signal an open file sends when something happens to it."""
_SET_LOG_LEVEL = "_ZN4absl12lts_2025081414SetMinLogLevelENS0_18LogSeverityAtLeastE"
"""`absl::SetMinLogLevel` in TensorFlow 2.21, which reads `TF_CPP_MIN_LOG_LEVEL` once, when it is imported."""
_SET_BLAS_THREADS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


def main() -> None:
    """Imports, says so, and serves; in a task, returns from that and runs the task's module."""
    channel, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    end_with(lifeline)
    gc.disable()  # there is nothing to collect in an import, and looking for it takes a tenth of the time
    for name in sys.argv[3:]:
        importlib.import_module(name)
    gc.enable()
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        sys.exit(f"{threads} threads run after the imports: a fork would lose all but one")
    gc.freeze()  # what is here stays: a task's collector must not touch, and so copy, all of it
    task = _Server(channel, lifeline).serve()
    sys.argv = task.argv
    runpy.run_module(task.module, run_name="__main__", alter_sys=True)


@dataclass(frozen=True)
class _Task:
    """What a forked process is to be.

    Args:
        argv: the whole command, `[python, "-m", module, …]`.
        env: its whole environment.
    """

    command: list[str]
    env: Mapping[str, str]

    @property
    def module(self) -> str:
        return self.command[2]

    @property
    def argv(self) -> list[str]:
        return self.command[2:]


class _Server:
    def __init__(self, channel: socket.socket, lifeline: int) -> None:
        self._channel = channel
        self._lifeline = lifeline
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._watched: dict[int, int] = {}
        """The handles on the tasks that have not ended, and their process ids."""

    def serve(self) -> _Task:
        """Forks tasks and tells of their ends, for as long as the launcher listens; returns in each task."""
        self._tell(ready=1)
        while True:
            for key, _ in self._selector.select():
                if key.fd != self._channel.fileno():
                    self._tell_exit(key.fd)
                elif task := self._obey():
                    return task

    def _obey(self) -> _Task | None:
        data, files, _, _ = socket.recv_fds(self._channel, 4096, 4)
        if not data:
            os._exit(0)  # the launcher has closed its end
        packet = json.loads(data)
        if "reap" in packet:
            os.waitpid(packet["reap"], 0)
            return None
        return self._fork(packet["fork"], files)

    def _fork(self, number: int, files: list[int]) -> _Task | None:
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(forked=number, error=error.errno or 0)
            pid = -1
        if pid == 0:
            self._channel.close()  # the launcher learns of the server's death by its end
            *files, begin = files
            if not os.read(begin, 1):
                os._exit(128 + signal.SIGKILL)
            os.close(begin)
            return self._become_task(files)
        if pid > 0:
            handle = os.pidfd_open(pid)
            self._watched[handle] = pid
            self._selector.register(handle, selectors.EVENT_READ)
            self._tell(forked=number, pid=pid)
        for file in files:
            os.close(file)
        return None

    def _tell_exit(self, handle: int) -> None:
        self._selector.unregister(handle)
        os.close(handle)
        pid = self._watched.pop(handle)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if ended is not None:
            self._tell(exited=pid, code=ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)

    def _tell(self, **packet: int) -> None:
        try:
            self._channel.sendall(json.dumps(packet).encode())
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)

    def _become_task(self, files: list[int]) -> _Task:
        """Makes this fork what a fresh process would be."""
        os.setsid()
        self._selector.close()
        for handle in self._watched:
            os.close(handle)
        order, *outputs = files
        with open(order, encoding="utf-8") as file:  # noqa: PTH123 a number, not a path
            task = _Task(**json.load(file))
        for number, output in enumerate(outputs, start=1):
            os.dup2(output, number)
            os.close(output)
        end_with(self._lifeline)
        os.close(self._lifeline)
        os.environ.clear()
        os.environ.update(task.env)
        _read_again(task.env)
        _seed()
        _show(task.command)
        return task


def end_with(lifeline: int) -> None:
    """Has the kernel kill this process when the other end of a pipe is closed, whatever it does then.

    Unlike the signal at the death of a parent, this outlives the parent.
    """
    # The signal belongs to an open file, which a fork shares: this one is opened anew, and stays open.
    own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    with suppress(BlockingIOError):
        if not os.read(own, 1):  # it was closed before the kernel was asked
            os._exit(128 + signal.SIGKILL)


def _read_again(env: Mapping[str, str]) -> None:
    """Carries out what variables say that were read at the import. Where a library has no such call, they stay unheard.

    Those of the launcher's plan are meant; whoever sets another one gets a server of their own, see `fork_server`.
    """
    with suppress(KeyError, ValueError, StopIteration, AttributeError, OSError):
        level = int(env["TF_CPP_MIN_LOG_LEVEL"])
        getattr(_library("libtensorflow_framework"), _SET_LOG_LEVEL)(level)
    with suppress(KeyError, ValueError, StopIteration, OSError):
        threads = int(env["OMP_NUM_THREADS"])
        blas = _library("openblas")
        next(getattr(blas, name) for name in _SET_BLAS_THREADS if hasattr(blas, name))(threads)


def _library(name: str) -> ctypes.CDLL:
    """A shared library that is loaded, by a part of its file's name."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    paths = (match[0] for match in re.finditer(r"/.+$", maps, re.MULTILINE))
    return ctypes.CDLL(next(path for path in paths if name in path.rpartition("/")[2]))


def _seed() -> None:
    """Gives this task random numbers of its own, as a fresh process has: Python does so for `random` by itself."""
    random.seed()
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()


def _show(command: list[str]) -> None:
    """Has `ps` show the task's command, as far as there is room where the server's own stands."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
        text = "\0".join(["tfdist", *command[3:]]).encode()[: end - begin - 1]
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()
