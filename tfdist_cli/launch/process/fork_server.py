"""A process that has imported the modules of a recipe's tasks, and starts each task by forking itself.

Run as `python -m tfdist_cli.launch.process.fork_server CHANNEL LIFELINE MODULE…`, by `fork_server_client.py`. The two
numbers are open files: a Unix socket for packets, and a pipe to which nothing is written and that ends with the
launcher.

Packets to the server, in JSON:

* `{"fork": n}` with four files: JSON `{"command": ["python", …], "env": {…}}`, standard output, standard error, and a
  pipe. The command is a Python file, or `-m` and a module, with arguments. The task runs after the launcher has written
  a byte to the pipe, and exits if the pipe ends without one.
* `{"reap": pid}`: the launcher has the exit code of this task.

Packets from the server:

* `{"ready": 1}`: the imports are done.
* `{"forked": n, "pid": pid}` or `{"forked": n, "error": errno}`.
* `{"exited": pid, "code": code}`, -n for signal n; the task stays a zombie until it is reaped.

TensorFlow can be forked as long as it has created no context and no thread, and importing it creates none. numpy's
OpenBLAS creates its threads during the import, unless it is limited to one; a task sets its number after the fork.
"""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import gc
import importlib.util
import json
import os
import random
import re
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

_F_SETSIG = 10
"""From `fcntl.h` of Linux: sets the signal that an open file sends after an event."""
_SET_LOG_LEVEL = "_ZN4absl12lts_2025081414SetMinLogLevelENS0_18LogSeverityAtLeastE"
"""`absl::SetMinLogLevel` in TensorFlow 2.21, which reads `TF_CPP_MIN_LOG_LEVEL` only once, during the import."""
_SET_BLAS_THREADS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")

_THREADS_OF_NO_FORK = frozenset({"jemalloc_bg_thd"})
"""Threads that a fork may lose: jemalloc prepares itself for forks, and works in the child without its thread, which
returns freed memory to the kernel. pandas brings it with pyarrow, and Keras imports pandas where it is installed."""


def main() -> None:
    """Imports the modules and serves; in a forked task, runs the task's module."""
    channel, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    exit_with(lifeline)
    gc.disable()  # imports leave no garbage, and the collector would take a tenth of the time
    for name in sys.argv[3:]:
        importlib.import_module(name)
    gc.enable()
    if lost := _threads_lost_by_a_fork():
        sys.exit(f"threads run after the imports, and would not exist after a fork: {', '.join(lost)}")
    gc.freeze()  # so that a task's collector does not write to, and thereby copy, these pages
    _Server(channel, lifeline).serve().run()


def _threads_lost_by_a_fork() -> list[str]:
    """Returns the names of the other threads of this process, but those that no fork needs."""
    own = threading.get_native_id()
    others = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != own]
    names = [(task / "comm").read_text(encoding="utf-8", errors="replace").strip() for task in others]
    return [name for name in names if name not in _THREADS_OF_NO_FORK]


@dataclass(frozen=True)
class _Task:
    """The task that a forked process runs.

    Args:
        command: the whole command, `[python, "-m", module, …]` or `[python, file, …]`.
        env: its whole environment.
    """

    command: list[str]
    env: Mapping[str, str]

    def run(self) -> None:
        """Runs it as the interpreter does after its start, in a `__main__` of its own."""
        module = self.command[1] == "-m"
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__dict__.update(__builtins__=builtins, __annotations__={})
        sys.orig_argv, sys.argv = self.command, self.command[2 if module else 1 :]
        try:
            if module:
                _run_module(main, sys.argv[0])
            else:
                self._run_file(main)
        except SystemExit:
            raise
        except BaseException as error:
            # Shown here without the frames of this module; raised again for the exit code, or the signal of Ctrl-C.
            own = _without_own_frames(error.__traceback__)
            sys.excepthook(type(error), error.with_traceback(own), own)
            sys.excepthook = lambda *_: None
            raise

    def _run_file(self, main: ModuleType) -> None:
        file = Path(self.command[1]).absolute()
        if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
            sys.path[0] = str(file.resolve().parent)
            if _shadows_imported(file.resolve().parent):
                # The program would import its own modules of these names, and get those that are imported already.
                os.execve(sys.executable, self.command, self.env)  # noqa: S606
        loader = SourceFileLoader("__main__", str(file))
        main.__dict__.update(__file__=str(file), __loader__=loader, __cached__=None)
        exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), main.__dict__)  # noqa: S102 it is the user's program


def _run_module(main: ModuleType, name: str) -> None:
    """Runs a module as `python -m` does.

    `runpy.run_module` would end the life of `__main__` with the module's last line, before functions that run at the
    exit.
    """
    spec = importlib.util.find_spec(name)
    if spec and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or not isinstance(spec.loader, InspectLoader):
        sys.exit(f"{sys.executable}: No module named {name}")
    code = spec.loader.get_code(spec.name)
    attributes = {"__spec__": spec, "__file__": spec.origin, "__loader__": spec.loader, "__package__": spec.parent}
    main.__dict__.update(attributes, __cached__=spec.cached)
    sys.argv[0] = str(spec.origin)
    exec(code, main.__dict__)  # type: ignore[arg-type]  # noqa: S102 it is the user's program, which has source


class _Server:
    def __init__(self, channel: socket.socket, lifeline: int) -> None:
        self._channel = channel
        self._lifeline = lifeline
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._running: dict[int, int] = {}
        """The running tasks: pidfd → process id."""

    def serve(self) -> _Task:
        """Forks tasks and reports their exits until the launcher closes the channel; returns in each forked task."""
        self._send(ready=1)
        while True:
            for key, _ in self._selector.select():
                if key.fd != self._channel.fileno():
                    self._report_exit(key.fd)
                elif task := self._handle_packet():
                    return task

    def _handle_packet(self) -> _Task | None:
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
            self._send(forked=number, error=error.errno or 0)
            pid = -1
        if pid == 0:
            self._channel.close()  # the launcher notices the server's exit by the end of the channel
            *files, begin = files
            if not os.read(begin, 1):
                os._exit(128 + signal.SIGKILL)
            os.close(begin)
            return self._set_up_task(files)
        if pid > 0:
            handle = os.pidfd_open(pid)
            self._running[handle] = pid
            self._selector.register(handle, selectors.EVENT_READ)
            self._send(forked=number, pid=pid)
        for file in files:
            os.close(file)
        return None

    def _report_exit(self, handle: int) -> None:
        self._selector.unregister(handle)
        os.close(handle)
        pid = self._running.pop(handle)
        exited = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if exited is not None:
            self._send(exited=pid, code=exited.si_status if exited.si_code == os.CLD_EXITED else -exited.si_status)

    def _send(self, **packet: int) -> None:
        try:
            self._channel.sendall(json.dumps(packet).encode())
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)

    def _set_up_task(self, files: list[int]) -> _Task:
        """Gives this fork the state of a new process."""
        os.setsid()
        self._selector.close()
        for handle in self._running:
            os.close(handle)
        order, *outputs = files
        with open(order, encoding="utf-8") as file:  # noqa: PTH123 a number, not a path
            task = _Task(**json.load(file))
        for number, output in enumerate(outputs, start=1):
            os.dup2(output, number)
            os.close(output)
        exit_with(self._lifeline)
        os.close(self._lifeline)
        os.environ.clear()
        os.environ.update(task.env)
        _apply_environment(task.env)
        _seed()
        _set_title(task.command)
        return task


def exit_with(lifeline: int) -> None:
    """Makes the kernel kill this process when the other end of a pipe is closed.

    Unlike the parent-death signal, this works after the parent has exited, too.
    """
    # The signal is a property of the open file description, which a fork shares. A new one is opened, and stays open.
    own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    with suppress(BlockingIOError):
        if not os.read(own, 1):  # it was closed before the signal was requested
            os._exit(128 + signal.SIGKILL)


def _apply_environment(env: Mapping[str, str]) -> None:
    """Applies variables that libraries read during the import, if the library has a function for it.

    Only variables of the launcher's plan are handled here. A task with other such variables gets another fork server,
    see `fork_server_client.import_environment`.
    """
    with suppress(KeyError, ValueError, StopIteration, AttributeError, OSError):
        level = int(env["TF_CPP_MIN_LOG_LEVEL"])
        getattr(_library("libtensorflow_framework"), _SET_LOG_LEVEL)(level)
    with suppress(KeyError, ValueError, StopIteration, OSError):
        threads = int(env["OMP_NUM_THREADS"])
        blas = _library("openblas")
        next(getattr(blas, name) for name in _SET_BLAS_THREADS if hasattr(blas, name))(threads)


def _library(name: str) -> ctypes.CDLL:
    """A loaded shared library, by a part of its file's name."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    paths = (match[0] for match in re.finditer(r"/.+$", maps, re.MULTILINE))
    return ctypes.CDLL(next(path for path in paths if name in path.rpartition("/")[2]))


def _shadows_imported(folder: Path) -> bool:
    """Whether a folder has modules with the names of others that are imported."""
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    imported = (sys.modules[name] for name in names & sys.modules.keys() - {"__main__"})
    return any(folder not in Path(getattr(module, "__file__", None) or "/").parents for module in imported)


def _without_own_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _seed() -> None:
    """Seeds the random number generators differently in each task, as in a new process."""
    random.seed()
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()


def _set_title(command: list[str]) -> None:
    """Makes `ps` show the task's command, as far as it fits in place of the server's own."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
        shown = ["tfdist", *command[3:]] if command[1:3] == ["-m", "tfdist_cli"] else command
        text = "\0".join(shown).encode()[: end - begin - 1]
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()
