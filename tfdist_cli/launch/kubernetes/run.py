"""The pods of one run, by kubectl: each is created, watched, listened to and deleted."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from tfdist_cli.errors import TfdistError
from tfdist_cli.launch.documents import to_yaml
from tfdist_cli.launch.kubernetes.manifests import pod, shared_objects
from tfdist_cli.launch.kubernetes.pods import CONTAINER, job_name, settings
from tfdist_cli.launch.process.background_tasks import BackgroundTasks
from tfdist_cli.launch.process.orphans import Watchdog
from tfdist_cli.launch.process.stream import TaskStream
from tfdist_cli.launch.supervisor.events import Action, Exited, Start, Started, Stop, StopSignal
from tfdist_cli.launch.supervisor.exit_ordering import ExitOrdering
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.plan import Plan
from tfdist_cli.protocol.records import LAUNCHER_PID, TASK_DIR
from tfdist_cli.spec.task_id import TaskId

KILLED, TERMINATED = 137, 143
"""The exit codes of a pod that disappeared without one: not deleted, and deleted by this launcher."""
_FIRST_EXIT_TIMEOUT, _CAUSE_TIMEOUT = 5.0, 2.0
"""Seconds for `ExitOrdering`: a node polls its containers once a second, and nodes report in any order."""
_EXIT_SECONDS = 3.0
"""Seconds in which a pod may exit after the first one, before it is deleted: until then its exit code is available."""
_DELETE = ("delete", "pod", "--wait=false", "--ignore-not-found")
_IMMEDIATELY = ("--grace-period=0", "--force")
_WITHOUT_HURRY = ("--grace-period=3600",)
"""The launcher deletes a pod immediately that has not ended after `--shutdown-timeout`. That may be longer than the
period of the pod."""
_CHUNK = 64 * 1024
_SCHEDULING = "PodScheduled"
_WATCHES = 5
"""How many watches in a row may end without an event: watches end now and then, and a server may restart."""
_LOG_PAUSE = 5.0
"""Seconds in which the exit of a pod is reported after the end of its output; otherwise the connection is broken."""
_WATCH_PAUSE = 1.0
"""Seconds until the next watch."""


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
        self._exited: dict[str, asyncio.Event] = {}
        """For each pod's name, an event that is set when the pod has exited."""
        self._deleted: set[str] = set()
        """The names of deleted pods."""
        self._starts = 0
        self._background = BackgroundTasks(context.events)
        self._exit_ordering = ExitOrdering(context.events, plan.tasks[0].task, _FIRST_EXIT_TIMEOUT, _CAUSE_TIMEOUT)
        self._watchdog: Watchdog | None = None

    async def open(self) -> None:
        """Creates the objects that the pods share.

        Raises:
            TfdistError: Kubernetes rejects them; a job of this name may exist.
        """
        code, reason = await self._call("create", "--filename", "-", stdin=to_yaml(shared_objects(self._plan)))
        if code:
            label = f"app.kubernetes.io/instance={job_name(self._plan)}"
            raise TfdistError(
                f"Kubernetes rejects the job {job_name(self._plan)}: {reason}",
                code="kubernetes-job-rejected",
                hint="if a job of this name exists, wait for it, choose another 'name', or delete it: "
                f"`kubectl delete pods,services,configmaps,networkpolicies -l {label}`",
            )
        self._watchdog = Watchdog("command", *self._kubectl, *_deletion(self._plan))

    def act(self, action: Action) -> None:
        """Creates a task's pod, or deletes it."""
        if isinstance(action, Start):
            self._exit_ordering.task_started(action.task)
            self._starts += 1
            name = f"{job_name(self._plan)}-{action.task.slug.replace('_', '-')}-{self._starts}"
            self._names[action.task] = name
            self._exited[name] = asyncio.Event()
            self._background.start(self._run_task(action.task, name, self._context.prepare(action)))
        elif isinstance(action, Stop):
            self._background.start(self._delete(self._names[action.task], action.signal))

    def follow(self, plan: Plan) -> None:
        """Replaces the plan; the objects that all pods share stay."""
        self._plan = plan

    async def close(self) -> None:
        """Deletes the remaining objects."""
        await self._background.finish(0.0)
        if self._watchdog is not None:
            await asyncio.to_thread(self._watchdog.close)

    async def _run_task(self, task: TaskId, name: str, variables: Mapping[str, str]) -> None:
        """Runs one pod from its creation to its deletion."""
        excluded = (LAUNCHER_PID, TASK_DIR, *self._plan[task].secrets)
        env = {key: value for key, value in variables.items() if key not in excluded}
        code, reason = await self._call("create", "--filename", "-", stdin=to_yaml([pod(self._plan, task, name, env)]))
        if code:
            await self._context.add_line(task, f"the pod {name} cannot be created: {reason}")
            self._context.events.put(Exited(task, 126))
            return
        self._context.events.put(Started(task, os.getpid()))
        exited = await self._follow(task, name)
        await self._call(*_DELETE, name, *_IMMEDIATELY)  # a restart gets the same DNS name, which must be unambiguous
        await self._exit_ordering.report(exited)

    async def _follow(self, task: TaskId, name: str) -> Exited:
        """Watches a pod, forwards its output and the reasons why it does not start, and returns its exit."""
        reading: asyncio.Task[None] | None = None
        shown = ""
        try:
            async with aclosing(self._statuses(name)) as statuses:
                async for status in statuses:
                    container = _container(status)
                    if reading is None and not container.keys().isdisjoint(("running", "terminated")):
                        reading = asyncio.get_running_loop().create_task(self._read_output(task, name))
                    problem = _start_problem(status, container)
                    if problem and problem != shown:
                        shown = problem
                        await self._context.add_line(task, f"the pod {name} does not start: {problem}")
                    if "terminated" in container:
                        exited = Exited(task, int(container["terminated"]["exitCode"]))
                        break
                else:
                    exited = Exited(task, KILLED, cause=f"the pod {name} was deleted or evicted")
                    if name in self._deleted:
                        exited = Exited(task, TERMINATED)
            self._exited[name].set()
            if reading is not None:
                await reading
            return exited
        finally:
            if reading is not None:
                reading.cancel()

    async def _statuses(self, name: str) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yields a pod's status each time it changes, until the pod is deleted or has failed.

        Raises:
            TfdistError: several watches in a row end without an event.
        """
        watch = ("get", "pod", name, "--output", "json", "--watch", "--output-watch-events", "--ignore-not-found")
        without_event = 0
        while without_event < _WATCHES:
            without_event += 1
            async with aclosing(self._documents(*watch)) as events:
                async for event in events:
                    without_event = 0
                    status = event["object"].get("status", {})
                    yield status
                    if event["type"] == "DELETED" or status.get("phase") == "Failed":
                        return
            await asyncio.sleep(_WATCH_PAUSE)
        raise TfdistError(
            f"kubectl does not report the status of the pod {name}",
            code="kubernetes-unreachable",
            hint=f"try `kubectl describe pod {name}`",
        )

    async def _read_output(self, task: TaskId, name: str) -> None:
        """Forwards a pod's output until its end.

        If the connection breaks meanwhile, the output continues from there. Lines of the second before may be repeated.
        """
        loop = asyncio.get_running_loop()
        since: tuple[str, ...] = ()
        while True:
            await self._forward_log(task, name, *since)
            broken = loop.time()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._exited[name].wait(), _LOG_PAUSE)
                return
            since = (f"--since={math.ceil(loop.time() - broken) + 1}s",)

    async def _forward_log(self, task: TaskId, name: str, *since: str) -> None:
        """Forwards a pod's output while the connection lasts. Kubernetes merges its two streams."""
        read_end, write_end = os.pipe()
        try:
            client = await asyncio.create_subprocess_exec(
                *self._kubectl,
                *("logs", "--follow", *since, "--container", CONTAINER, name),
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        output = TaskStream(task, "stderr", os.fdopen(read_end, "rb", 0), self._context)
        try:
            await client.wait()
            await output.drain()
        finally:
            _kill(client)

    async def _documents(self, *arguments: str) -> AsyncGenerator[Any, None]:
        """Yields the JSON values that kubectl writes, until it exits."""
        client = await asyncio.create_subprocess_exec(
            *self._kubectl,
            *arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if client.stdout is None:
            raise RuntimeError("stdout is a pipe")
        decoder, text = json.JSONDecoder(), ""
        try:
            while data := await client.stdout.read(_CHUNK):
                text = (text + data.decode(errors="replace")).lstrip()
                while text:
                    try:
                        value, end = decoder.raw_decode(text)
                    except ValueError:  # the value is incomplete
                        break
                    text = text[end:].lstrip()
                    yield value
        finally:
            _kill(client)

    async def _delete(self, name: str, stop_signal: StopSignal) -> None:
        if stop_signal is StopSignal.TERMINATE and self._exit_ordering.first_exited:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._exited[name].wait(), _EXIT_SECONDS)
                return
        self._deleted.add(name)
        await self._call(*_DELETE, name, *(_IMMEDIATELY if stop_signal is StopSignal.KILL else _WITHOUT_HURRY))

    async def _call(self, *arguments: str, stdin: str = "") -> tuple[int, str]:
        """Calls kubectl, and returns its exit code and the last line of its stderr."""
        client = await asyncio.create_subprocess_exec(
            *self._kubectl,
            *arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        _, stderr = await client.communicate(stdin.encode())
        lines = stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return client.returncode or 0, lines[-1]


def _container(status: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of a pod's container; empty if it has none yet."""
    containers: list[dict[str, Any]] = status.get("containerStatuses", [])
    return dict(containers[0].get("state", {})) if containers else {}


def _start_problem(status: Mapping[str, Any], container: Mapping[str, Any]) -> str:
    """Returns why a pod does not start; empty if it has started, or is being started."""
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


def _kill(client: asyncio.subprocess.Process) -> None:
    if client.returncode is None:
        client.kill()
