"""The pods of one run, by kubectl: each is created, watched, listened to and deleted."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from tfdist_cli.errors import TfdistError
from tfdist_cli.launch.kubernetes import watchdog
from tfdist_cli.launch.kubernetes.manifests import pod, shared_objects
from tfdist_cli.launch.kubernetes.pods import CONTAINER, job_name, settings
from tfdist_cli.launch.process.background_tasks import BackgroundTasks
from tfdist_cli.launch.process.stream import TaskStream
from tfdist_cli.launch.run.documents import to_yaml
from tfdist_cli.launch.supervisor.events import Action, Exited, Output, Start, Started, StopSignal
from tfdist_cli.launch.supervisor.exit_ordering import ExitOrdering
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.plan import Plan
from tfdist_cli.protocol.records import LAUNCHER_PID, TASK_DIR
from tfdist_cli.spec.task_id import TaskId

KILLED, TERMINATED = 137, 143
"""The codes of a pod that is gone without having told its own: of itself, and deleted."""
_HEAD_START, _AFTERTHOUGHT = 5.0, 2.0
"""Seconds for `ExitOrdering`: a node looks at its containers once a second, and nodes report in any order."""
_FAREWELL = 3.0
"""Seconds that a pod has to follow the first one out before it is deleted: the node then still tells its exit code."""
_DELETE = ("delete", "pod", "--wait=false", "--ignore-not-found")
_AT_ONCE = ("--grace-period=0", "--force")
_CHUNK = 64 * 1024
_SCHEDULING = "PodScheduled"
_TRIES = 5
"""How often in a row kubectl may end without a word of a pod: a watch ends now and then, and a server starts again."""
_PAUSE = 1.0
"""Seconds until it is asked again."""


class PodsRun:
    """The pods of one run.

    Args:
        plan: the tasks.
        context: takes the events and the output of the tasks.
    """

    def __init__(self, plan: Plan, context: LaunchContext) -> None:
        self._plan = plan
        self._context = context
        namespace = settings(plan).namespace
        self._kubectl = ["kubectl", *(["--namespace", namespace] if namespace else ())]
        self._names: dict[TaskId, str] = {}
        self._ended: dict[str, asyncio.Event] = {}
        """By the pods' names, whether they have ended."""
        self._deleted: set[str] = set()
        """The names of pods that were told to end."""
        self._starts = 0
        self._background = BackgroundTasks(context.events)
        self._exit_ordering = ExitOrdering(context.events, plan.tasks[0].task, _HEAD_START, _AFTERTHOUGHT)
        self._watchman: subprocess.Popen[bytes] | None = None

    async def open(self) -> None:
        """Makes what the pods share.

        Raises:
            TfdistError: Kubernetes refuses it; a job of that name may be there.
        """
        code, said = await self._call("create", "--filename", "-", stdin=to_yaml(shared_objects(self._plan)))
        if code:
            label = f"app.kubernetes.io/instance={job_name(self._plan)}"
            raise TfdistError(
                f"Kubernetes refuses the job {job_name(self._plan)}: {said}",
                hint="where a job of this name is there already, wait for it, choose another 'name', or delete it: "
                f"`kubectl delete pods,services,configmaps,networkpolicies -l {label}`",
            )
        self._watchman = _start_last_will([*self._kubectl, *_deletion(self._plan)])

    def act(self, action: Action) -> None:
        """Creates a task's pod, or deletes it."""
        if isinstance(action, Start):
            self._exit_ordering.task_started(action.task)
            self._starts += 1
            name = f"{job_name(self._plan)}-{action.task.slug.replace('_', '-')}-{self._starts}"
            self._names[action.task] = name
            self._ended[name] = asyncio.Event()
            self._background.start(self._live(action.task, name, self._context.prepare(action)))
        else:
            self._background.start(self._delete(self._names[action.task], action.signal))

    async def close(self) -> None:
        """Has all that is left deleted."""
        await self._background.finish(0.0)
        if self._watchman is not None and self._watchman.stdin is not None:
            self._watchman.stdin.close()
            await asyncio.to_thread(self._watchman.wait)

    async def _live(self, task: TaskId, name: str, own: Mapping[str, str]) -> None:
        """One pod, from its creation until it has ended."""
        secret = self._plan[task].secrets
        inside = {key: value for key, value in own.items() if key not in (LAUNCHER_PID, TASK_DIR, *secret)}
        code, said = await self._call("create", "--filename", "-", stdin=to_yaml([pod(self._plan, task, name, inside)]))
        if code:
            await self._say(task, f"the pod {name} cannot be made: {said}")
            self._context.events.put(Exited(task, 126))
            return
        self._context.events.put(Started(task, os.getpid()))
        end = await self._follow(task, name)
        await self._call(*_DELETE, name, *_AT_ONCE)  # its name in the DNS is the next one's, and led to either
        await self._exit_ordering.report(end)

    async def _follow(self, task: TaskId, name: str) -> Exited:
        """Watches a pod, telling why it doesn't start, and what it writes; its end."""
        listening: asyncio.Task[None] | None = None
        told = ""
        try:
            async with aclosing(self._statuses(name)) as statuses:
                async for status in statuses:
                    container = _container(status)
                    if listening is None and not container.keys().isdisjoint(("running", "terminated")):
                        listening = asyncio.get_running_loop().create_task(self._listen(task, name))
                    trouble = _trouble(status, container)
                    if trouble and trouble != told:
                        told = trouble
                        await self._say(task, f"the pod {name} does not start: {trouble}")
                    if "terminated" in container:
                        end = Exited(task, int(container["terminated"]["exitCode"]))
                        break
                else:
                    end = Exited(task, KILLED, cause=f"the pod {name} is gone")
                    if name in self._deleted:
                        end = Exited(task, TERMINATED)
            self._ended[name].set()
            if listening is not None:
                await listening
            return end
        finally:
            if listening is not None:
                listening.cancel()

    async def _statuses(self, name: str) -> AsyncGenerator[Mapping[str, Any], None]:
        """A pod's status each time it changes, until the pod is gone or has failed as a whole.

        Raises:
            TfdistError: Kubernetes does not answer, again and again.
        """
        watch = ("get", "pod", name, "--output", "json", "--watch", "--output-watch-events", "--ignore-not-found")
        silent = 0
        while silent < _TRIES:
            silent += 1
            async with aclosing(self._documents(*watch)) as events:
                async for event in events:
                    silent = 0
                    status = event["object"].get("status", {})
                    yield status
                    if event["type"] == "DELETED" or status.get("phase") == "Failed":
                        return
            await asyncio.sleep(_PAUSE)
        raise TfdistError(f"kubectl gives no news of the pod {name}", hint=f"try `kubectl describe pod {name}`")

    async def _listen(self, task: TaskId, name: str) -> None:
        """Passes on what a pod writes; Kubernetes keeps both of its streams as one."""
        reading, writing = os.pipe()
        try:
            client = await asyncio.create_subprocess_exec(
                *self._kubectl,
                *("logs", "--follow", "--container", CONTAINER, name),
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
            )
        finally:
            os.close(writing)
        pipe = TaskStream(task, "stderr", os.fdopen(reading, "rb", 0), self._context)
        try:
            await client.wait()
            await pipe.drain()
        finally:
            _end(client)

    async def _documents(self, *arguments: str) -> AsyncGenerator[Any, None]:
        """The JSON values that kubectl writes one after the other, as long as it does."""
        client = await asyncio.create_subprocess_exec(
            *self._kubectl,
            *arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if client.stdout is None:
            raise RuntimeError("it was asked for as a pipe")
        decoder, text = json.JSONDecoder(), ""
        try:
            while data := await client.stdout.read(_CHUNK):
                text = (text + data.decode(errors="replace")).lstrip()
                while text:
                    try:
                        value, end = decoder.raw_decode(text)
                    except ValueError:  # the rest of it is still to come
                        break
                    text = text[end:].lstrip()
                    yield value
        finally:
            _end(client)

    async def _delete(self, name: str, how: StopSignal) -> None:
        if how is StopSignal.TERMINATE and self._exit_ordering.first_exited:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended[name].wait(), _FAREWELL)
                return
        self._deleted.add(name)
        await self._call(*_DELETE, name, *(_AT_ONCE if how is StopSignal.KILL else ()))

    async def _say(self, task: TaskId, text: str) -> None:
        line = f"tfdist: {text}"
        self._context.logs.write(task, "stderr", f"{line}\n".encode())
        await self._context.events.put_output(Output(task, "stderr", (line,)))

    async def _call(self, *arguments: str, stdin: str = "") -> tuple[int, str]:
        """Calls kubectl; its exit code, and the last line of what it complained of."""
        client = await asyncio.create_subprocess_exec(
            *self._kubectl,
            *arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        _, said = await client.communicate(stdin.encode())
        lines = said.decode(errors="replace").strip().splitlines() or ["kubectl says nothing"]
        return client.returncode or 0, lines[-1]


def _container(status: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a pod's one container; empty when it has none yet."""
    found: list[dict[str, Any]] = status.get("containerStatuses", [])
    return dict(found[0].get("state", {})) if found else {}


def _trouble(status: Mapping[str, Any], container: Mapping[str, Any]) -> str:
    """Why a pod does not start; empty when it has, or will."""
    waiting = container.get("waiting", {})
    if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        return ": ".join(filter(None, (waiting["reason"], waiting.get("message"))))
    for condition in status.get("conditions", ()):
        if condition.get("type") == _SCHEDULING and condition.get("status") == "False":
            return ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))
    return ""


def _deletion(plan: Plan) -> list[str]:
    label = f"app.kubernetes.io/instance={job_name(plan)}"
    kinds = "pods,services,configmaps,networkpolicies"
    return ["delete", kinds, "--selector", label, "--wait=false", "--grace-period=5", "--ignore-not-found"]


def _end(client: asyncio.subprocess.Process) -> None:
    if client.returncode is None:
        client.kill()


def _start_last_will(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(watchdog.__file__)), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        bufsize=0,
        start_new_session=True,
    )
