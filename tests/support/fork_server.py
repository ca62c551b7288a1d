"""Tasks that start in milliseconds: forks of a process that has imported TensorFlow for all of them.

It is the launcher's fork server, used by the tests of a process in place of a launcher.
"""

import atexit
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tfdist_cli.launch.process.fork_server_client import IMPORTS, SERVER, import_environment

ROOT = Path(__file__).parents[2]
MODULES = (*IMPORTS, "tfdist_cli.train.trainer.fit", "tensorflow.python.data.experimental.ops.testing")
READY = 120
"""Seconds for its imports on a busy machine."""


def fork(argv, folder, env, out, err):
    """Starts a Python program like `subprocess.Popen` with `start_new_session`, but as a fork.

    Args:
        argv: `[python, program, ...]` or `[python, "-m", module, ...]`.
        folder: where it runs.
        env: its whole environment.
        out: the file that is its standard output.
        err: the file that is its standard error.
    """
    if argv[0] != sys.executable:
        raise ValueError(f"not a program of this Python: {argv}")
    return _fork_server(import_environment(env)).fork(argv, folder, env, out, err)


@functools.cache
def _fork_server(read):
    """The fork server whose imports have read these variables."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("TF_CONFIG", "TFDIST_"))}
    # OpenBLAS would create its other threads during the import, and they would not exist after a fork.
    # A task that hangs shows the stacks of its threads on SIGABRT.
    settings = {"TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    made = ForkServerClient({**own, **dict(read), **settings})
    atexit.register(made.close)
    return made


class ForkServerClient:
    """A fork server and its tasks.

    Args:
        env: its environment.
    """

    def __init__(self, env):
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reading, self._lifeline = os.pipe()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", SERVER, str(theirs.fileno()), str(reading), *MODULES],
            cwd=ROOT, env=env, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), reading), start_new_session=True,
        )  # fmt: skip
        theirs.close()
        os.close(reading)
        self._running = {}
        self._channel.settimeout(READY)
        assert "ready" in self._receive()

    def fork(self, argv, folder, env, out, err):
        """Starts a program; see the function of this name."""
        command = [sys.executable, "-m", "tests.support.forked", str(folder), *map(str, argv[1:])]
        with os.fdopen(os.memfd_create("order"), "w+") as task_file:
            json.dump({"command": command, "env": {name: str(value) for name, value in env.items()}}, task_file)
            task_file.flush()
            task_file.seek(0)
            start, write = os.pipe()
            files = [task_file.fileno(), out.fileno(), err.fileno(), start]
            socket.send_fds(self._channel, [json.dumps({"fork": 0}).encode()], files)
            os.close(start)
        while "exited" in (packet := self._receive()):
            self._on_exit(packet)
        os.write(write, b"1")
        os.close(write)
        if "error" in packet:
            raise OSError(packet["error"], os.strerror(packet["error"]))
        self._running[packet["pid"]] = task = ForkedTask(self, packet["pid"])
        return task

    def listen(self, seconds):
        """Waits up to `seconds` for a task's exit, and handles all exits so far."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            while selector.select(max(0.0, seconds)):
                self._on_exit(self._receive())
                seconds = 0.0

    def close(self):
        """Ends the fork server and its tasks."""
        os.close(self._lifeline)
        self._channel.close()
        self._popen.wait()

    def _receive(self):
        data = self._channel.recv(4096)
        assert data, "the fork server has exited; its output is on this process's standard error"
        return json.loads(data)

    def _on_exit(self, packet):
        self._running.pop(packet["exited"]).returncode = packet["code"]
        self._channel.send(json.dumps({"reap": packet["exited"]}).encode())


class ForkedTask:
    """A task, with a part of the interface of `subprocess.Popen`.

    Args:
        fork_server: its parent.
        pid: its process id, which is also its group's.
    """

    def __init__(self, fork_server, pid):
        self.pid = pid
        self.returncode = None
        self._fork_server = fork_server

    def poll(self):
        if self.returncode is None:
            self._fork_server.listen(0)
        return self.returncode

    def wait(self, timeout=None):
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"task {self.pid}", timeout)
            self._fork_server.listen(min(left, 60))
        return self.returncode

    def send_signal(self, signum):
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self):
        self.send_signal(signal.SIGKILL)
