"""Runs the tasks of a plan in containers of this machine, in one network."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

from tfdist_cli.errors import TfdistError, UsageError
from tfdist_cli.launch.addresses import RemoteAddresses, named_addresses
from tfdist_cli.launch.compose import remove_containers
from tfdist_cli.launch.compose.services import (
    RUN_LABEL,
    compose_file,
    project_name,
    run_argv,
    service_name,
    service_of,
)
from tfdist_cli.launch.process.background_tasks import BackgroundTasks
from tfdist_cli.launch.process.orphans import Watchdog
from tfdist_cli.launch.process.stream import TaskStream
from tfdist_cli.launch.supervisor.events import Action, Exited, Profile, Start, Started, StopSignal, Stream
from tfdist_cli.launch.supervisor.exit_ordering import ExitOrdering
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.plan import Plan
from tfdist_cli.protocol.profile_order import write_order
from tfdist_cli.protocol.records import LAUNCHER_PID, TASK_DIR
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.compose import Compose
from tfdist_cli.spec.task_id import TaskId

ENGINES = ("podman", "docker")
_FIRST_EXIT_TIMEOUT, _CAUSE_TIMEOUT = 2.0, 0.5
"""Seconds for `ExitOrdering`: an engine may report two exits in any order."""
_RETRY_SECONDS = 0.2
"""Seconds until a container that could not be signalled is signalled again."""
_CLEANUP_SECONDS = 10.0


class ComposeLauncher(RemoteAddresses):
    """Starts containers on this machine."""

    def check(self, cluster: Cluster, command: Sequence[str]) -> None:  # noqa: ARG002
        """Checks for a container engine and the image."""
        image, engine = (cluster.compose or Compose()).image, _require_engine(cluster)
        inspected = _call(engine, "image", "inspect", "--format", "{{.Id}}", image)
        if inspected.returncode:
            raise UsageError(
                f"{engine} has no image {image!r}: {_last_line(inspected.stderr)}",
                code="image-missing",
                hint=f"build it with `{engine} build -t {image} .` in tfdist's source folder, fetch one with "
                f"`{engine} pull {image}`, or name another in compose.image",
            )

    def preview_addresses(self, cluster: Cluster) -> Mapping[TaskId, Address]:
        """Returns the containers' names in their network."""
        return named_addresses(cluster, "containers", service_name)

    def render(self, plan: Plan) -> str:
        """Returns a compose file with the same containers."""
        return compose_file(plan, _find_engine(plan.cluster) or "docker")

    @asynccontextmanager
    async def start(self, plan: Plan, context: LaunchContext) -> AsyncIterator[ComposeRun]:
        """Yields a run in its own network. Containers and network are removed even when the launcher is killed."""
        run = ComposeRun(plan, context, _require_engine(plan.cluster))
        try:
            await run.open()
            yield run
        finally:
            await run.close()


class ComposeRun:
    """The containers of one run.

    Args:
        plan: the tasks.
        context: takes the events and the output of the tasks.
        engine: the program that runs containers.
    """

    def __init__(self, plan: Plan, context: LaunchContext, engine: str) -> None:
        self._plan = plan
        self._context = context
        self._engine = engine
        self._project = f"{project_name(plan.run_dir)}-{os.getpid()}"
        self._containers: dict[TaskId, _Container] = {}
        self._prepared: dict[TaskId, Mapping[str, str]] = {}
        """The variables of each task's last start."""
        self._pending_signals: dict[TaskId, StopSignal] = {}
        """The signals for tasks whose client has not been started yet."""
        self._starts = 0
        self._background = BackgroundTasks(context.events)
        self._exit_ordering = ExitOrdering(context.events, plan.tasks[0].task, _FIRST_EXIT_TIMEOUT, _CAUSE_TIMEOUT)
        script = (sys.executable, "-I", "-S", remove_containers.__file__)
        label = f"{RUN_LABEL}={self._project}"
        self._watchdog = Watchdog("command", *script, engine, label, self._project)

    async def open(self) -> None:
        """Creates the network, and the folders to mount.

        Raises:
            TfdistError: the engine cannot create the network.
        """
        recipe = self._plan.recipe
        if recipe and recipe.checkpoint:
            for path in recipe.checkpoint.paths.values():
                path.mkdir(parents=True, exist_ok=True)
        create = (self._engine, "network", "create", "--internal", self._project)
        created = await asyncio.to_thread(_call, *create)
        if created.returncode:
            raise TfdistError(
                f"{self._engine} cannot create a network: {_last_line(created.stderr)}",
                code="container-network-failed",
                hint=f"try `{self._engine} network create --internal test`",
            )

    def act(self, action: Action) -> None:
        """Starts a task's container, signals it, or has it profiled."""
        if isinstance(action, Profile):
            write_order(Path(self._prepared[action.task][TASK_DIR]), action.order)
        elif isinstance(action, Start):
            self._exit_ordering.task_started(action.task)
            self._containers.pop(action.task, None)
            self._pending_signals.pop(action.task, None)
            variables = self._prepared[action.task] = self._context.prepare(action)
            self._background.start(self._run_task(action.task, variables))
        else:
            self._stop(action.task, action.signal)

    def follow(self, plan: Plan) -> None:
        """Replaces the plan; the network stays."""
        self._plan = plan

    async def close(self) -> None:
        """Kills the remaining containers, and removes the network."""
        for task in {*self._containers, *(planned.task for planned in self._plan.tasks)}:
            self._stop(task, StopSignal.KILL)
        await self._background.finish(_CLEANUP_SECONDS)
        await asyncio.to_thread(self._watchdog.close)

    def _stop(self, task: TaskId, stop_signal: StopSignal) -> None:
        if task in self._containers:
            self._background.start(self._containers[task].stop(stop_signal))
        else:
            self._pending_signals[task] = stop_signal

    async def _run_task(self, task: TaskId, variables: Mapping[str, str]) -> None:
        """Runs one container from its start to its removal."""
        container = await self._start(task, variables)
        self._context.events.put(Started(task, container.pid))
        streams = [TaskStream(task, stream, output, self._context) for stream, output in container.outputs.items()]
        code = await container.wait()
        await asyncio.gather(*(stream.drain() for stream in streams))
        await self._exit_ordering.report(Exited(task, code))
        await container.remove()

    async def _start(self, task: TaskId, variables: Mapping[str, str]) -> _Container:
        service = service_of(self._plan, self._plan[task], self._engine)
        self._starts += 1
        name = f"{self._project}-{service.name}-{self._starts}"
        # Tasks compare the launcher's pid with their parent's. In a container these never match.
        inherited = [key for key in variables if key != LAUNCHER_PID]
        argv = run_argv(service, self._plan.run_dir, self._project, name, inherited)
        container = await _Container.start(self._engine, name, argv, variables)
        self._containers[task] = container
        if task in self._pending_signals:
            self._stop(task, self._pending_signals[task])
        return container


class _Container:
    """A container, and the engine's client in the foreground, whose output and exit code are the container's.

    Args:
        engine: the program that runs containers.
        name: the container's name.
        client: the engine's client.
        outputs: the read ends of its streams.
    """

    def __init__(
        self, engine: str, name: str, client: asyncio.subprocess.Process, outputs: Mapping[Stream, IO[bytes]]
    ) -> None:
        self._engine = engine
        self._name = name
        self._client = client
        self.outputs = outputs

    @classmethod
    async def start(cls, engine: str, name: str, argv: Sequence[str], env: Mapping[str, str]) -> _Container:
        """Starts a container. Its client gets its own session, so that Ctrl-C reaches only the launcher."""
        (out, out_in), (err, err_in) = os.pipe(), os.pipe()
        try:
            client = await asyncio.create_subprocess_exec(
                engine,
                *argv,
                stdin=subprocess.DEVNULL,
                stdout=out_in,
                stderr=err_in,
                env={**os.environ, **env},
                start_new_session=True,
            )
        finally:
            os.close(out_in)
            os.close(err_in)
        return cls(engine, name, client, {"stdout": os.fdopen(out, "rb", 0), "stderr": os.fdopen(err, "rb", 0)})

    @property
    def pid(self) -> int:
        """The client's process id."""
        return self._client.pid

    async def wait(self) -> int:
        """Waits for the container's exit, and returns its exit code."""
        return await self._client.wait()

    async def remove(self) -> None:
        """Removes the exited container. An engine that removes it itself may lose its exit code."""
        await _succeeds(self._engine, "rm", "--force", self._name)

    async def stop(self, stop_signal: StopSignal) -> None:
        """Sends a signal, again while the container is not running yet: a client does not keep early signals."""
        name = "TERM" if stop_signal is StopSignal.TERMINATE else "KILL"
        while self._client.returncode is None:
            if await _succeeds(self._engine, "kill", "--signal", name, self._name):
                return
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._client.wait(), _RETRY_SECONDS)


async def _succeeds(engine: str, *arguments: str) -> bool:
    """Calls the engine, and returns whether it succeeds."""
    nothing = subprocess.DEVNULL
    called = await asyncio.create_subprocess_exec(engine, *arguments, stdin=nothing, stdout=nothing, stderr=nothing)
    return await called.wait() == 0


def _find_engine(cluster: Cluster) -> str | None:
    """Returns the program that runs containers; None if it is not on PATH."""
    engine = (cluster.compose or Compose()).engine
    return next((name for name in ENGINES if engine in ("auto", name) and shutil.which(name)), None)


def _require_engine(cluster: Cluster) -> str:
    """Returns the program that runs containers.

    Raises:
        UsageError: it is not on PATH.
    """
    found = _find_engine(cluster)
    if found is None:
        engine = (cluster.compose or Compose()).engine
        raise UsageError(
            f"{'podman or docker' if engine == 'auto' else engine} is not on PATH, and runs the containers",
            code="program-not-found",
            hint="install podman or docker, or use --on local",
        )
    return found


def _call(engine: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([engine, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")
