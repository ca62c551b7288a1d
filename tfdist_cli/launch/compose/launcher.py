"""Runs the tasks of a plan in containers of this machine, one network for all of them."""

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
from tfdist_cli.launch.compose import watchdog
from tfdist_cli.launch.compose.services import (
    RUN_LABEL,
    compose_file,
    project_name,
    run_argv,
    service_name,
    service_of,
)
from tfdist_cli.launch.process.background_tasks import BackgroundTasks
from tfdist_cli.launch.process.stream import TaskStream
from tfdist_cli.launch.supervisor.events import Action, Exited, Start, Started, StopSignal, Stream
from tfdist_cli.launch.supervisor.exit_ordering import ExitOrdering
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.plan import Plan
from tfdist_cli.protocol.records import LAUNCHER_PID
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.compose import Compose
from tfdist_cli.spec.task_id import TaskId

ENGINES = ("podman", "docker")
_HEAD_START, _AFTERTHOUGHT = 2.0, 0.5
"""Seconds for `ExitOrdering`: an engine tells of two ends in any order."""
_AGAIN = 0.2
"""Seconds until a container that could not be told to end is told again."""
_CLEANUP_SECONDS = 10.0


class ComposeLauncher(RemoteAddresses):
    """Starts containers here."""

    def check(self, cluster: Cluster, command: Sequence[str]) -> None:  # noqa: ARG002
        """Without an engine and an image there are no containers."""
        image = (cluster.compose or Compose()).image
        engine = _engine(cluster)
        if engine is None:
            wanted = (cluster.compose or Compose()).engine
            raise UsageError(
                f"{'podman or docker' if wanted == 'auto' else wanted} is not on PATH, and runs the containers",
                code="program-missing",
                hint="install podman or docker, or use --on local",
            )
        found = _called(engine, "image", "inspect", "--format", "{{.Id}}", image)
        if found.returncode:
            raise UsageError(
                f"{engine} has no image {image!r}: {_last_line(found.stderr)}",
                code="image-missing",
                hint=f"`{engine} build -t {image} .` in tfdist's own folder makes it, `{engine} pull {image}` fetches "
                "one from a registry; compose.image names another",
            )

    def preview_addresses(self, cluster: Cluster) -> Mapping[TaskId, Address]:
        """Each container has a name of its own in their network, and its own ports."""
        return named_addresses(cluster, "containers", service_name)

    def render(self, plan: Plan) -> str:
        """A compose file with the containers that are started."""
        return compose_file(plan, _engine(plan.cluster) or "docker")

    @asynccontextmanager
    async def start(self, plan: Plan, context: LaunchContext) -> AsyncIterator[ComposeRun]:
        """A run in a network of its own. Containers and network go with the launcher even when that is killed."""
        engine = _engine(plan.cluster)
        if engine is None:
            raise UsageError("there is no container engine on PATH", hint="install podman or docker")
        run = ComposeRun(plan, context, engine)
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
        self._told: dict[TaskId, StopSignal] = {}
        """How tasks were told to end whose client was not yet there to be told."""
        self._starts = 0
        self._background = BackgroundTasks(context.events)
        self._exit_ordering = ExitOrdering(context.events, plan.tasks[0].task, _HEAD_START, _AFTERTHOUGHT)
        self._watchman = _start_last_will(engine, self._project)

    async def open(self) -> None:
        """Makes the network, and the folders that are to be mounted.

        Raises:
            TfdistError: the engine makes no network.
        """
        recipe = self._plan.recipe
        if recipe and recipe.checkpoint and recipe.checkpoint.dir:
            recipe.checkpoint.dir.mkdir(parents=True, exist_ok=True)
        made = await asyncio.to_thread(_called, self._engine, "network", "create", "--internal", self._project)
        if made.returncode:
            raise TfdistError(f"{self._engine} makes no network for the containers: {_last_line(made.stderr)}")

    def act(self, action: Action) -> None:
        """Starts a task's container, or tells it to end."""
        if isinstance(action, Start):
            self._exit_ordering.task_started(action.task)
            self._containers.pop(action.task, None)
            self._told.pop(action.task, None)
            self._background.start(self._live(action.task, self._context.prepare(action)))
        else:
            self._end(action.task, action.signal)

    async def close(self) -> None:
        """Kills what is left, and has the network removed."""
        for planned in self._plan.tasks:
            self._end(planned.task, StopSignal.KILL)
        await self._background.finish(_CLEANUP_SECONDS)
        if self._watchman.stdin is not None:
            self._watchman.stdin.close()
        await asyncio.to_thread(self._watchman.wait)

    def _end(self, task: TaskId, how: StopSignal) -> None:
        if task in self._containers:
            self._background.start(self._containers[task].end(how))
        else:
            self._told[task] = how

    async def _live(self, task: TaskId, own: Mapping[str, str]) -> None:
        """One container, from its start until it is gone."""
        container = await self._start(task, own)
        self._context.events.put(Started(task, container.pid))
        pipes = [TaskStream(task, stream, output, self._context) for stream, output in container.outputs.items()]
        code = await container.wait()
        await asyncio.gather(*(pipe.drain() for pipe in pipes))
        await self._exit_ordering.report(Exited(task, code))
        await container.remove()

    async def _start(self, task: TaskId, own: Mapping[str, str]) -> _Container:
        service = service_of(self._plan, self._plan[task], self._engine)
        self._starts += 1
        name = f"{self._project}-{service.name}-{self._starts}"
        # No process of a container has the launcher for its parent, which is what its number is looked at for.
        inside = [key for key in own if key != LAUNCHER_PID]
        argv = run_argv(service, self._plan.run_dir, self._project, name, inside)
        container = await _Container.start(self._engine, name, argv, own)
        self._containers[task] = container
        if task in self._told:
            self._end(task, self._told[task])
        return container


class _Container:
    """A container, and the engine's client that stays with it: its output and exit code are the container's.

    Args:
        engine: the program that runs containers.
        name: the container's name.
        client: the engine's client.
        outputs: the ends to read its streams from.
    """

    def __init__(
        self, engine: str, name: str, client: asyncio.subprocess.Process, outputs: Mapping[Stream, IO[bytes]]
    ) -> None:
        self._engine = engine
        self._name = name
        self._client = client
        self.outputs = outputs

    @classmethod
    async def start(cls, engine: str, name: str, argv: Sequence[str], own: Mapping[str, str]) -> _Container:
        """Has the engine start it. The client is in a session of its own: Ctrl-C reaches the launcher only."""
        (out, out_in), (err, err_in) = os.pipe(), os.pipe()
        try:
            client = await asyncio.create_subprocess_exec(
                engine,
                *argv,
                stdin=subprocess.DEVNULL,
                stdout=out_in,
                stderr=err_in,
                env={**os.environ, **own},
                start_new_session=True,
            )
        finally:
            os.close(out_in)
            os.close(err_in)
        return cls(engine, name, client, {"stdout": os.fdopen(out, "rb", 0), "stderr": os.fdopen(err, "rb", 0)})

    @property
    def pid(self) -> int:
        """The client's process."""
        return self._client.pid

    async def wait(self) -> int:
        """Waits for the end; the container's exit code."""
        return await self._client.wait()

    async def remove(self) -> None:
        """Removes what has ended: an engine that does so itself leaves its client nothing to tell the exit code of."""
        await _succeeds(self._engine, "rm", "--force", self._name)

    async def end(self, how: StopSignal) -> None:
        """Tells it to end, again and again as long as it is not yet running; a client forgets what came too early."""
        signal_name = "TERM" if how is StopSignal.TERMINATE else "KILL"
        while self._client.returncode is None:
            if await _succeeds(self._engine, "kill", "--signal", signal_name, self._name):
                return
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._client.wait(), _AGAIN)


async def _succeeds(engine: str, *arguments: str) -> bool:
    """Calls the engine, which need not succeed."""
    nothing = subprocess.DEVNULL
    called = await asyncio.create_subprocess_exec(engine, *arguments, stdin=nothing, stdout=nothing, stderr=nothing)
    return await called.wait() == 0


def _engine(cluster: Cluster) -> str | None:
    """The program that runs containers; None when it is not there."""
    wanted = (cluster.compose or Compose()).engine
    return next((name for name in ENGINES if wanted in ("auto", name) and shutil.which(name)), None)


def _called(engine: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([engine, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it says nothing")


def _start_last_will(engine: str, project: str) -> subprocess.Popen[bytes]:
    script = str(Path(watchdog.__file__))
    return subprocess.Popen(
        [sys.executable, "-I", "-S", script, engine, f"{RUN_LABEL}={project}", project],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        bufsize=0,
        start_new_session=True,
    )
