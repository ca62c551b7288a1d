"""Starts the tasks of a cluster one by one, as a scheduler does: each with its TF_CONFIG only."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from tests.support import fork_server
from tfdist_cli.launch.process.ports import hold
from tfdist_cli.plan.tf_config import tf_config_json
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId

PROGRAMS = Path(__file__).parent / "programs"
ROLE = (sys.executable, "-m", "tfdist_cli", "role")
TIMEOUT = 300
"""Timeout in seconds on a busy machine; on an idle one everything is fast."""
_OURS = ("TF_CONFIG", "TFDIST_")


def program(name, *arguments):
    """The command of one of the programs beside this file."""
    return (sys.executable, str(PROGRAMS / name), *map(str, arguments))


@dataclass
class TaskResult:
    """The result of a task."""

    code: int
    out: str
    err: str

    @property
    def result(self):
        """Its standard output, parsed as JSON."""
        return json.loads(self.out)


class Tasks:
    """A cluster on this machine. Its ports are reserved, and its processes end with the test.

    Args:
        folder: where the tasks run and their output goes.
        apart: whether they take the last ps for one of another host: they share no memory.
        roles: how many tasks of each role, `{"ps": 1, "worker": 2}`.
    """

    def __init__(self, folder, apart=False, **roles):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        strategy = "parameter_server" if "ps" in roles else "multi_worker_mirrored"
        counts = {role: {"replicas": count} for role, count in roles.items()}
        cluster = Cluster.model_validate({"strategy": strategy, "roles": counts})
        self._held = hold(cluster)
        self.addresses = self._held.__enter__()
        if apart:
            last = TaskId("ps", roles["ps"] - 1)
            self.addresses = {**self.addresses, last: replace(self.addresses[last], host="localhost")}
        self.tasks = [str(task) for task in self.addresses]
        self.processes = {}

    def start(self, argv, *tasks, env=None, fresh=False, among=None):
        """Starts the tasks named, all by default.

        Args:
            argv: a Python program.
            tasks: their names.
            env: additional environment variables.
            fresh: whether to start a new interpreter for each task in place of a fork; it takes seconds.
            among: the addresses in their TF_CONFIG; by default those of all tasks.
        """
        for task in tasks or self.tasks:
            own = {
                "TF_CONFIG": tf_config_json(among or self.addresses, TaskId.parse(task)),
                "TFDIST_START_TIMEOUT": str(TIMEOUT),
            }
            with self._log(task, "out").open("w") as out, self._log(task, "err").open("w") as err:
                own = {**plain_environment(), **own, **(env or {})}
                self.processes[task] = _begin(argv, self.folder, own, out, err, fresh)
        return self

    def finish(self, timeout=TIMEOUT):
        """Waits for the tasks; one that hangs fails the test.

        Returns:
            Each task's result, by its name.
        """
        deadline = time.monotonic() + timeout
        for task, process in self.processes.items():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                running = [name for name, other in self.processes.items() if other.poll() is None]
                self._show_stacks()
                raise AssertionError(f"{task} of {running} runs after {timeout} s\n{self.outputs()}") from None
        return {task: self.result_of(task) for task in self.processes}

    def code_of(self, task, timeout=TIMEOUT):
        """Waits for one task, and returns its exit code; if it hangs, fails with the stacks of all tasks."""
        try:
            return self.processes[task].wait(timeout)
        except subprocess.TimeoutExpired:
            self._show_stacks()
            raise AssertionError(f"{task} runs after {timeout} s\n{self.outputs()}") from None

    def _show_stacks(self):
        """Lets each task that runs write the stacks of its threads, and end."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)
        for process in self.processes.values():
            process.wait(10)

    def result_of(self, task):
        """The result of one task; its code is None while it runs."""
        out, err = (self._log(task, end).read_text() for end in ("out", "err"))
        return TaskResult(self.processes[task].poll(), out, err)

    def await_text(self, task, text, timeout=TIMEOUT):
        """Waits until a task has written a text."""
        self.await_that(task, lambda: any(text in self._log(task, end).read_text() for end in ("out", "err")), timeout)

    def await_path(self, task, path, timeout=TIMEOUT):
        """Waits until a task has made a file or folder."""
        self.await_that(task, path.exists, timeout)

    def await_that(self, task, condition, timeout=TIMEOUT):
        """Waits for what a task that runs does; or, without a task, for what follows from the exit of one."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"{task} has not done what is awaited\n{self.outputs()}"
            assert task is None or self.processes[task].poll() is None, f"{task} has exited\n{self.outputs()}"
            _pause(self.processes[task] if task else None)

    def outputs(self):
        """The output of all failed tasks, for a message."""
        return "\n".join(
            f"--- {task} ({self.processes[task].poll()})\n{self._log(task, 'out').read_text()[-1500:]}"
            f"{self._log(task, 'err').read_text()[-4000:]}"
            for task in self.processes
            if self.processes[task].poll() != 0
        )

    def leftover_processes(self):
        """The processes that the tasks have left behind."""
        groups = {process.pid for process in self.processes.values()}
        return [process.cmdline() for process in psutil.process_iter() if _group(process) in groups]

    def close(self):
        """Kills the remaining tasks with their process groups."""
        for process in self.processes.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                process.kill()  # it is over, or has no group of its own yet
        for process in self.processes.values():
            process.wait(10)
        self._held.__exit__(None, None, None)

    def _log(self, task, end):
        return self.folder / f"{task.replace(':', '-')}.{end}"


def alone(folder, argv, env=None, timeout=TIMEOUT, fresh=False):
    """Runs a Python program without a cluster; see `Tasks.start`."""
    own = {**plain_environment(), **(env or {})}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = _begin(argv, folder, own, out, err, fresh)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        out.seek(0)
        err.seek(0)
        return TaskResult(process.returncode, out.read(), err.read())


def _begin(argv, folder, env, out, err, fresh):
    if not fresh:
        return fork_server.fork(argv, folder, env, out, err)
    return subprocess.Popen(
        argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
    )


def plain_environment():
    """This process's environment without the variables that define a cluster."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return kept | {"TF_CPP_MIN_LOG_LEVEL": "2"}


def _pause(process):
    """Waits a moment while a task runs; its output cannot be awaited."""
    if process is None:
        time.sleep(0.05)
        return
    try:
        process.wait(0.05)
    except subprocess.TimeoutExpired:
        return


def _group(process):
    try:
        return os.getpgid(process.pid) if process.status() != "zombie" else None
    except (psutil.Error, ProcessLookupError):
        return None
