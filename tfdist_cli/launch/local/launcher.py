"""Runs the tasks of a plan as processes of this machine."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from tfdist_cli.errors import TfdistError, UsageError
from tfdist_cli.launch.process import watchdog
from tfdist_cli.launch.process.background_tasks import BackgroundTasks
from tfdist_cli.launch.process.fork_server_client import (
    ForkServerClient,
    ForkServerExited,
    can_fork,
    fork_server_environment,
    import_environment,
)
from tfdist_cli.launch.process.network import Network, network_of
from tfdist_cli.launch.process.oom import OomKills
from tfdist_cli.launch.process.orphans import adopting, end_orphans, reap_orphans
from tfdist_cli.launch.process.ports import hold
from tfdist_cli.launch.process.process import SIGNALS, Process, Program, Spawned
from tfdist_cli.launch.process.stream import TaskStream
from tfdist_cli.launch.supervisor.events import Action, Exited, Output, Start, Started, Stop, StopSignal
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.plan import Plan, PlannedTask
from tfdist_cli.plan.resources import Machine
from tfdist_cli.requirements import require_tensorflow
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.secret import SecretSpec
from tfdist_cli.spec.task_id import TaskId

_CLEANUP_SECONDS = 5.0
_FILES_PER_TASK = 8
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_HEAD_START = 0.05
"""Seconds that the end of any task but the first waits to be noted: a worker that follows its chief out must not pass
for one that left it alone, and the kernel closes the chief's connections a moment before the chief counts as ended."""


class LocalLauncher:
    """Starts processes here."""

    def check(self, cluster: Cluster, command: Sequence[str]) -> None:
        """Every task takes open files; without TensorFlow no recipe trains, without the program no task runs it."""
        _make_room_for_files(len(cluster.tasks))
        if not command:
            for role in {task.role: cluster.role(task) for task in cluster.tasks}.values():
                require_tensorflow({**os.environ, **role.env})
            return
        for task in cluster.tasks:
            if shutil.which(command[0], path=cluster.role(task).env.get("PATH")) is None:
                if os.sep in command[0] and Path(command[0]).is_file():
                    raise UsageError(
                        f"{task} cannot run {command[0]!r}: it is not executable",
                        hint=f"give what runs it, such as `python {command[0]}`, or make it executable (chmod +x)",
                    )
                raise UsageError(
                    f"{task} cannot run {command[0]!r}: there is no such program",
                    hint="give a program that is on PATH, or its path",
                )

    def preview_addresses(self, cluster: Cluster) -> Mapping[TaskId, Address]:
        """As written, or a free port of this machine."""
        return {task: cluster.address(task) for task in cluster.tasks}

    @contextmanager
    def reserve(self, cluster: Cluster) -> Iterator[Mapping[TaskId, Address]]:
        """Free ports for the tasks without an address, and a check of the addresses given."""
        with hold(cluster) as addresses:
            yield addresses

    def machines(self) -> Mapping[str, Machine]:
        """None: all tasks are here."""
        return {}

    def render(self, plan: Plan) -> str:
        """A shell command for each task."""
        return "\n".join(
            " ".join(("env", *assignments(planned.env, planned.secrets), shlex.join(planned.argv)))
            for planned in plan.tasks
        )

    @asynccontextmanager
    async def start(self, plan: Plan, context: LaunchContext) -> AsyncIterator[LocalRun]:
        """A run whose tasks are guarded: they end with the launcher even when that is killed."""
        with network_of(plan) as (network, told), adopting():
            if told:
                context.events.put(told)
            scratch = _make_scratch()
            run = LocalRun(plan, context, network, _start_guard(scratch), scratch)
            try:
                yield run
            finally:
                await run.close()


class LocalRun:
    """The processes of one run.

    Args:
        plan: the tasks.
        context: takes the events and the output of the tasks.
        network: the tasks' network.
        watchman: the guard, which is told of each process group.
        scratch: the tasks' temporary folder, which the guard removes; None where there can be none.
    """

    def __init__(
        self,
        plan: Plan,
        context: LaunchContext,
        network: Network,
        watchman: subprocess.Popen[bytes],
        scratch: str | None,
    ) -> None:
        self._plan = plan
        self._network = network
        self._context = context
        self._watchman = watchman
        self._scratch = {} if scratch is None else {"TMPDIR": scratch}
        self._processes: dict[TaskId, Process] = {}
        self._awaited: dict[TaskId, asyncio.Future[StopSignal]] = {}
        """The tasks that are about to start, and how they are told to end before they have."""
        self._fork_servers: dict[tuple[tuple[str, str], ...], ForkServerClient] = {}
        """By what must stand in the environment when they import."""
        self._replaced: list[ForkServerClient] = []
        """Those that have died, whose tasks may live."""
        self._before = {child.pid for child in psutil.Process().children()}
        """The processes that this one has had before: none of them is a task's."""
        self._background = BackgroundTasks(context.events)
        self._leaving: deque[TaskId] = deque()
        """Tasks whose program has ended, in this order, which the order of their `Exited` follows."""
        self._left: dict[TaskId, tuple[int, float]] = {}
        """The exit codes of tasks that are gone altogether, and when their programs ended."""
        self._kernel = OomKills()

    def act(self, action: Action) -> None:
        """Starts a task, or tells it to end."""
        if isinstance(action, Start):
            planned, own = self._plan[action.task], self._context.prepare(action)
            self._processes.pop(action.task, None)
            self._awaited[action.task] = asyncio.get_running_loop().create_future()
            self._background.start(self._start(planned, {**os.environ, **self._scratch, **planned.env, **own}))
        elif action.task in self._awaited:
            if not self._awaited[action.task].done():
                self._awaited[action.task].set_result(action.signal)
        elif action.task in self._processes:
            self._processes[action.task].end(action.signal)

    async def close(self) -> None:
        """Kills what is left of the tasks, ends what they have left behind, and lets the guard go."""
        for task in (*self._awaited, *self._processes):
            self.act(Stop(task, StopSignal.KILL))
        await self._background.finish(_CLEANUP_SECONDS)
        for fork_server in self._fork_servers.values():
            fork_server.close()
        for fork_server in (*self._fork_servers.values(), *self._replaced):
            fork_server.let_tasks_go()
        await asyncio.to_thread(end_orphans, self._before)
        if self._watchman.stdin is not None:
            self._watchman.stdin.close()
        try:
            await asyncio.to_thread(self._watchman.wait, _CLEANUP_SECONDS)
        except subprocess.TimeoutExpired:
            self._watchman.kill()  # somebody has stopped it, and it has nothing to do any more
            self._watchman.wait()

    @property
    def _ours(self) -> set[int]:
        """The processes that are reaped where they are awaited."""
        tasks = {process.pid for process in self._processes.values()}
        return {*self._before, *tasks, *(fork_server.pid for fork_server in self._fork_servers.values())}

    async def _start(self, planned: PlannedTask, env: Mapping[str, str]) -> None:
        task = planned.task
        told = self._awaited[task]
        try:
            program = await self._program(planned, env)
        except OSError as error:
            await self._not_started(planned, error)
            return
        finally:
            del self._awaited[task]
        if program is None:
            self._context.events.put(Exited(task, -SIGNALS[told.result()]))
            return
        process = self._processes[task] = Process(program)
        self._tell_guard("+", process.pid)
        if told.done():
            process.end(told.result())
        self._context.events.put(Started(task, process.pid))
        await self._live(task, process)

    async def _program(self, planned: PlannedTask, env: Mapping[str, str]) -> Program | None:
        """Starts a task: by a fork if there is a fork server for it; None when it was told to end before.

        Raises:
            OSError: it cannot be started.
        """
        told = self._awaited[planned.task]
        for _ in range(2):  # a fork server may turn out to have died, and is replaced then
            fork_server = self._fork_server(planned, env)
            if fork_server is None:
                break
            await asyncio.wait((fork_server.ready, told), return_when=asyncio.FIRST_COMPLETED)
            if told.done():
                return None
            with suppress(ForkServerExited):
                return await fork_server.fork(planned.argv, env)
        # Where no fork server can import, an interpreter goes wrong of the same, and says so in the task's log.
        return self._spawn(planned, env)

    def _spawn(self, planned: PlannedTask, env: Mapping[str, str]) -> Spawned:
        return Spawned((*self._network.enter, *planned.argv), env, self._network.files)

    def _fork_server(self, planned: PlannedTask, env: Mapping[str, str]) -> ForkServerClient | None:
        """The fork server of a task; one that has died is replaced, unless it had not even imported."""
        if not can_fork(planned.argv):
            return None
        key = import_environment(env)
        fork_server = self._fork_servers.get(key)
        if fork_server is None or (fork_server.is_gone and not fork_server.has_failed):
            self._replaced += [] if fork_server is None else [fork_server]
            own, forget = fork_server_environment(env, self._plan.run_dir), partial(self._tell_guard, "-")
            fork_server = self._fork_servers[key] = ForkServerClient(own, self._network, forget)
            self._tell_guard("+", fork_server.pid)
        return None if fork_server.has_failed else fork_server

    async def _not_started(self, planned: PlannedTask, error: OSError) -> None:
        text = f"tfdist: {planned.argv[0]} cannot be started: {_reason(error)}"
        self._context.logs.write(planned.task, "stderr", f"{text}\n".encode())
        await self._context.events.put_output(Output(planned.task, "stderr", (text,)))
        self._context.events.put(Exited(planned.task, 127 if isinstance(error, FileNotFoundError) else 126))

    async def _live(self, task: TaskId, process: Process) -> None:
        """One task, from its start until it and everything it started is gone."""
        ended = asyncio.Event()
        process.on_exit(ended.set)
        stdout, stderr = process.outputs
        pipes = (TaskStream(task, "stdout", stdout, self._context), TaskStream(task, "stderr", stderr, self._context))
        await ended.wait()
        ended_at = time.monotonic()
        if task != self._plan.tasks[0].task:
            await asyncio.sleep(_HEAD_START)
        self._leaving.append(task)
        code = await process.leave()
        self._tell_guard("-", process.pid)
        reap_orphans(self._ours)
        await asyncio.gather(*(pipe.drain() for pipe in pipes))
        self._report_exit(task, code, ended_at)

    def _report_exit(self, task: TaskId, code: int, ended_at: float) -> None:
        self._left[task] = code, ended_at
        while self._leaving and self._leaving[0] in self._left:
            left = self._leaving.popleft()
            code, ended_at = self._left.pop(left)
            oom_killed = self._kernel.claim() if code in _KILLED else None
            self._context.events.put(Exited(left, code, time.monotonic() - ended_at, oom_killed))

    def _tell_guard(self, sign: str, group: int) -> None:
        if self._watchman.stdin is None:
            return
        try:
            self._watchman.stdin.write(f"{sign}{group}\n".encode())
        except BrokenPipeError:
            # Somebody has killed the guard. The run is not worse for it as long as the launcher itself lives.
            self._watchman.stdin = None


def assignments(env: Mapping[str, str], secrets: Mapping[str, SecretSpec]) -> Iterator[str]:
    """A task's variables as a shell sets them; a secret by where it is."""
    yield from (shlex.quote(f"{name}={value}") for name, value in env.items())
    yield from (f"{shlex.quote(name)}={spec.source}" for name, spec in secrets.items())


def _make_room_for_files(tasks: int) -> None:
    """Raises the soft limit of open files where the tasks' pipes, logs, ports and handles would not fit under it.

    Raises:
        UsageError: they would not fit under the hard limit either.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 256 + _FILES_PER_TASK * tasks
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        if limit < (needed := 64 + _FILES_PER_TASK * tasks):
            raise UsageError(
                f"a launcher of {tasks} tasks needs up to {needed} open files, and the limit is {limit}",
                code="too-few-open-files",
                hint="raise the limit on open files (ulimit -n), or launch fewer tasks",
            )


def _reason(error: OSError) -> str:
    if error.errno == errno.EAGAIN:
        return "the limit on processes is reached, the user's (ulimit -u) or the container's"
    return error.strerror or str(error)


def _make_scratch() -> str | None:
    """A folder for the tasks' temporary files, such as those of TensorFlow's AutoGraph, which nobody else removes."""
    try:
        return tempfile.mkdtemp(prefix="tfdist-")
    except OSError:  # a full disk, perhaps: a task that needs a temporary file says so itself
        return None


def _start_guard(scratch: str | None) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(watchdog.__file__)), *([] if scratch is None else [scratch])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise TfdistError(
            f"no process can be started: {_reason(error)}", hint="end other programs, or raise it"
        ) from error
