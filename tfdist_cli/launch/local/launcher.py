"""Runs the tasks of a plan as processes of this machine."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shlex
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import psutil

from tfdist_cli.errors import TfdistError, UsageError
from tfdist_cli.launch.local.affinity import BoundTasks
from tfdist_cli.launch.local.forkable import can_fork, obstacle
from tfdist_cli.launch.process.background_tasks import BackgroundTasks
from tfdist_cli.launch.process.fork_server_client import (
    ForkServerClient,
    ForkServerExited,
    fork_server_environment,
    import_environment,
)
from tfdist_cli.launch.process.network import Network, network_of, ports_of
from tfdist_cli.launch.process.oom import OomKills
from tfdist_cli.launch.process.orphans import Watchdog, adopting, end_orphans, reap_orphans
from tfdist_cli.launch.process.ports import hold
from tfdist_cli.launch.process.process import SIGNALS, Process, Program, Spawned
from tfdist_cli.launch.process.stream import TaskStream
from tfdist_cli.launch.supervisor.events import Action, Exited, Profile, Start, Started, Stop, StopSignal
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import Plan, PlannedTask
from tfdist_cli.protocol.profile_order import write_order
from tfdist_cli.protocol.records import TASK_DIR
from tfdist_cli.requirements import require_tensorflow
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.secret import SecretSpec
from tfdist_cli.spec.task_id import TaskId

_CLEANUP_SECONDS = 5.0
_FILES_PER_TASK = 8
_REAP_DELAY = 0.2
"""Seconds from a task's exit until the processes that it has left behind are reaped."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_FIRST_EXIT_TIMEOUT = 0.05
"""Seconds by which the exits of all tasks except the first are delayed. A worker that exits after its chief must not
count as failed, and the kernel closes the chief's connections a moment before it reports the chief's exit."""


class LocalLauncher:
    """Starts processes on this machine."""

    def check(self, cluster: Cluster, command: Sequence[str]) -> None:
        """Checks the limit on open files, and that TensorFlow or the program is installed."""
        _raise_file_limit(len(cluster.tasks))
        if not command:
            for role in {task.role: cluster.role(task) for task in cluster.tasks}.values():
                require_tensorflow({**os.environ, **role.env})
            return
        for task in cluster.tasks:
            if shutil.which(command[0], path=cluster.role(task).env.get("PATH")) is None:
                if os.sep in command[0] and Path(command[0]).is_file():
                    raise UsageError(
                        f"{task} cannot run {command[0]!r}: it is not executable",
                        code="program-not-executable",
                        hint=f"add the interpreter, such as `python {command[0]}`, or make it executable (chmod +x)",
                    )
                raise UsageError(
                    f"{task} cannot run {command[0]!r}: there is no such program",
                    code="program-not-found",
                    hint="use a program that is on PATH, or its path",
                )

    def preview_addresses(self, cluster: Cluster) -> Mapping[TaskId, Address]:
        """The configured addresses; port 0 stands for a free port of this machine."""
        return {task: cluster.address(task) for task in cluster.possible_tasks}

    @contextmanager
    def reserve(self, cluster: Cluster) -> Iterator[Mapping[TaskId, Address]]:
        """Reserves a free port for each task without an address, and checks the other addresses."""
        with hold(cluster) as addresses:
            yield addresses

    def machines(self) -> Mapping[str, Machine]:
        """No remote machines."""
        return {}

    def render(self, plan: Plan) -> str:
        """A shell command for each task."""
        return "\n".join(
            " ".join(("env", *assignments(planned.env, planned.secrets), shlex.join(planned.argv)))
            for planned in plan.tasks
        )

    @asynccontextmanager
    async def start(self, plan: Plan, context: LaunchContext) -> AsyncIterator[LocalRun]:
        """A run whose tasks end with the launcher, even if that is killed."""
        with network_of(plan) as (network, ready), adopting():
            if ready:
                context.events.put(ready)
            scratch = _make_scratch()
            run = LocalRun(plan, context, network, _start_watchdog(scratch), scratch)
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
        watchdog: ends the process groups if this process is killed.
        scratch: the tasks' temporary folder, which the watchdog removes; None if it could not be created.
    """

    def __init__(
        self, plan: Plan, context: LaunchContext, network: Network, watchdog: Watchdog, scratch: str | None
    ) -> None:
        self._plan = plan
        self._network = network
        self._context = context
        self._watchdog = watchdog
        self._scratch = {} if scratch is None else {"TMPDIR": scratch}
        self._processes: dict[TaskId, Process] = {}
        self._prepared: dict[TaskId, Mapping[str, str]] = {}
        """The variables of each task's last start."""
        self._starting: dict[TaskId, asyncio.Future[StopSignal]] = {}
        """The tasks that are being started, and the stop signals that came before they were."""
        self._fork_servers: dict[tuple[tuple[str, str], ...], ForkServerClient] = {}
        """By the variables that must be set during the imports."""
        self._replaced: list[ForkServerClient] = []
        """Fork servers that have exited, whose tasks may still run."""
        self._own = {child.pid for child in psutil.Process().children()}
        """The children that this process had before the run."""
        self._background = BackgroundTasks(context.events)
        self._exited: deque[TaskId] = deque()
        """Tasks whose program has exited, in this order, which is the order of their `Exited` events."""
        self._exits: dict[TaskId, tuple[int, float]] = {}
        """The exit codes of tasks whose whole group has exited, and the times of their programs' exits."""
        self._oom_kills = OomKills()
        self._bound = BoundTasks()
        self._explained = False
        self._reaping: asyncio.TimerHandle | None = None

    def act(self, action: Action) -> None:
        """Starts, stops or profiles a task."""
        if isinstance(action, Profile):
            write_order(Path(self._prepared[action.task][TASK_DIR]), action.order)
        elif isinstance(action, Start):
            planned, own = self._plan[action.task], self._context.prepare(action)
            self._processes.pop(action.task, None)
            self._prepared[action.task] = own
            self._starting[action.task] = asyncio.get_running_loop().create_future()
            self._background.start(self._start(planned, {**os.environ, **self._scratch, **planned.env, **own}))
        elif action.task in self._starting:
            if not self._starting[action.task].done():
                self._starting[action.task].set_result(action.signal)
        elif action.task in self._processes:
            self._processes[action.task].stop(action.signal)

    def follow(self, plan: Plan) -> None:
        """Replaces the plan; the fork servers stay, and fork the tasks that start from now on."""
        self._network.reserve(set(ports_of(plan)) - set(ports_of(self._plan)))
        self._plan = plan
        self._bound.follow(plan)

    async def close(self) -> None:
        """Kills the remaining tasks, and ends the processes that they have left behind and the watchdog."""
        for task in (*self._starting, *self._processes):
            self.act(Stop(task, StopSignal.KILL))
        await self._background.finish(_CLEANUP_SECONDS)
        for fork_server in self._fork_servers.values():
            fork_server.close()
        for fork_server in (*self._fork_servers.values(), *self._replaced):
            fork_server.close_lifeline()
        if self._reaping:
            self._reaping.cancel()
        await asyncio.to_thread(end_orphans, self._own)
        await asyncio.to_thread(self._watchdog.close, _CLEANUP_SECONDS)

    @property
    def _reaped(self) -> set[int]:
        """The children that are reaped elsewhere than by `reap_orphans`."""
        tasks = {process.pid for process in self._processes.values()}
        return {*self._own, *tasks, *(fork_server.pid for fork_server in self._fork_servers.values())}

    async def _start(self, planned: PlannedTask, env: Mapping[str, str]) -> None:
        task = planned.task
        stopped = self._starting[task]
        try:
            program = await self._start_program(planned, env)
        except OSError as error:
            await self._report_failed_start(planned, error)
            return
        finally:
            del self._starting[task]
        if program is None:
            self._context.events.put(Exited(task, -SIGNALS[stopped.result()]))
            return
        process = self._processes[task] = Process(program)
        self._bound.start(planned, process.pid)
        self._watchdog.add(process.pid)
        if stopped.done():
            process.stop(stopped.result())
        self._context.events.put(Started(task, process.pid))
        await self._supervise(task, process)

    async def _start_program(self, planned: PlannedTask, env: Mapping[str, str]) -> Program | None:
        """Starts a task's program, by a fork if there is a fork server for it; None if it was stopped before.

        Raises:
            OSError: it cannot be started.
        """
        stopped = self._starting[planned.task]
        for _ in range(2):  # a fork server may turn out to have exited, and is then replaced
            fork_server = self._fork_server(planned, env)
            if fork_server is None:
                break
            await asyncio.wait((fork_server.ready, stopped), return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                return None
            with suppress(ForkServerExited):
                return await fork_server.fork(planned.argv, env)
        # If no fork server can import, an interpreter fails likewise, and the task's log has its error.
        await self._explain_interpreters(planned, env)
        return self._spawn(planned, env)

    def _spawn(self, planned: PlannedTask, env: Mapping[str, str]) -> Spawned:
        return Spawned((*self._network.enter, *planned.argv), env, self._network.files)

    def _fork_server(self, planned: PlannedTask, env: Mapping[str, str]) -> ForkServerClient | None:
        """The fork server of a task. One that has exited is replaced, unless its imports had failed."""
        if not can_fork(planned.argv, env):
            return None
        key = import_environment(env)
        fork_server = self._fork_servers.get(key)
        if fork_server is None or (fork_server.has_exited and not fork_server.has_failed):
            self._replaced += [] if fork_server is None else [fork_server]
            own = fork_server_environment(env, self._plan.run_dir)
            fork_server = self._fork_servers[key] = ForkServerClient(own, self._network, self._watchdog.remove)
            self._watchdog.add(fork_server.pid)
        return None if fork_server.has_failed else fork_server

    async def _explain_interpreters(self, planned: PlannedTask, env: Mapping[str, str]) -> None:
        """Says why several tasks of a program import TensorFlow each, once."""
        if len(self._plan.tasks) > 1 and not self._explained and (why := obstacle(planned.argv, env)):
            self._explained = True
            await self._context.add_line(planned.task, f"each task starts an interpreter, and is not forked: {why}")

    async def _report_failed_start(self, planned: PlannedTask, error: OSError) -> None:
        await self._context.add_line(planned.task, f"{planned.argv[0]} cannot be started: {_reason(error)}")
        self._context.events.put(Exited(planned.task, 127 if isinstance(error, FileNotFoundError) else 126))

    async def _supervise(self, task: TaskId, process: Process) -> None:
        """Follows a task from its start until its whole process group has exited."""
        exited = asyncio.Event()
        process.on_exit(exited.set)
        stdout, stderr = process.outputs
        streams = (TaskStream(task, "stdout", stdout, self._context), TaskStream(task, "stderr", stderr, self._context))
        await exited.wait()
        exited_at = time.monotonic()
        if task != self._plan.tasks[0].task:
            await asyncio.sleep(_FIRST_EXIT_TIMEOUT)
        self._exited.append(task)
        code = await process.wait_for_group()
        self._watchdog.remove(process.pid)
        self._bound.end(task)
        self._reap_soon()
        await asyncio.gather(*(stream.drain() for stream in streams))
        self._report_exit(task, code, exited_at)

    def _reap_soon(self) -> None:
        """Reaps what exited tasks have left behind, once for all tasks that exit at about the same time.

        It looks at every process of the machine: if it did so for each of N tasks, their end would cost N².
        """
        if self._reaping is None:
            self._reaping = asyncio.get_running_loop().call_later(_REAP_DELAY, self._reap)

    def _reap(self) -> None:
        self._reaping = None
        reap_orphans(self._reaped)

    def _report_exit(self, task: TaskId, code: int, exited_at: float) -> None:
        """Reports the exits in the order in which the programs exited."""
        self._exits[task] = code, exited_at
        while self._exited and self._exited[0] in self._exits:
            first = self._exited.popleft()
            code, exited_at = self._exits.pop(first)
            oom_killed = self._oom_kills.claim() if code in _KILLED else None
            self._context.events.put(Exited(first, code, time.monotonic() - exited_at, oom_killed))


def assignments(env: Mapping[str, str], secrets: Mapping[str, SecretSpec]) -> Iterator[str]:
    """A task's variables in shell syntax; a secret by its source."""
    yield from (shlex.quote(f"{name}={value}") for name, value in env.items())
    yield from (f"{shlex.quote(name)}={spec.source}" for name, spec in secrets.items())


def _raise_file_limit(tasks: int) -> None:
    """Raises the soft limit on open files if the tasks' pipes, logs, ports and handles exceed it.

    Raises:
        UsageError: they exceed the hard limit as well.
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
    """A folder for the tasks' temporary files, such as those of TensorFlow's AutoGraph, which nothing else removes."""
    try:
        return tempfile.mkdtemp(prefix="tfdist-")
    except OSError:  # for example on a full disk; a task that needs a temporary file reports that itself
        return None


def _start_watchdog(scratch: str | None) -> Watchdog:
    """Starts the watchdog.

    Raises:
        TfdistError: no process can be started.
    """
    try:
        return Watchdog("groups", *([] if scratch is None else [scratch]))
    except OSError as error:
        raise TfdistError(
            f"no process can be started: {_reason(error)}",
            code="too-few-processes",
            hint="stop other programs, or raise the limit",
        ) from error
