"""The ssh launcher: connects to the hosts, compares their versions, copies files, and runs the tasks."""

from __future__ import annotations

import ipaddress
import logging
import shlex
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.local.launcher import assignments
from tfdist_cli.launch.ssh.command import agent_command, pythons, ssh_argv
from tfdist_cli.launch.ssh.files import Entry, FileList, common_folder, list_files
from tfdist_cli.launch.ssh.link import Hello, Link, no_ssh
from tfdist_cli.launch.ssh.paths import Copies, PathMap, files_at, give_id, paths_of, task_at
from tfdist_cli.launch.ssh.placement import place
from tfdist_cli.launch.ssh.run import HostRun, SshRun
from tfdist_cli.launch.ssh.versions import compare, installed
from tfdist_cli.launch.supervisor.events import Output
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.join_address import join_address
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import Plan
from tfdist_cli.spec.address import LOOPBACK, Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.ssh import HostSpec
from tfdist_cli.spec.task_id import TaskId

MAX_DEFAULT_COPY_BYTES = 1024**3
"""The most bytes that are copied if the cluster file does not name the folder: a larger folder is likely a mistake."""
_PROGRESS_SECONDS = 2.0
"""Seconds between two lines about the progress of a copy."""
log = logging.getLogger("tfdist.launch")
Result = TypeVar("Result")


@dataclass
class _ConnectedHost:
    """A host with a connection.

    Args:
        host: the host.
        link: the connection.
        hello: the agent's description of the host.
        tasks: the host's tasks, with the addresses that are reserved there.
        copied: a line about the copied files.
    """

    host: HostSpec
    link: Link
    hello: Hello
    tasks: Mapping[TaskId, Address]
    copied: str = ""


class SshLauncher:
    """Starts the tasks on other machines."""

    def __init__(self) -> None:
        self._trains = True
        self._copies: Copies | None = None
        self._connected: list[_ConnectedHost] = []

    def check(self, cluster: Cluster, command: Sequence[str]) -> None:
        """Checks for `ssh`, and that each task has a host and an address that the other hosts can reach."""
        self._trains = not command
        if shutil.which("ssh") is None:
            raise no_ssh()
        names = {address.host: task for task, address in self.preview_addresses(cluster).items()}
        _check_reachable(names, {task: host.address for task, host in place(cluster).items()})

    def preview_addresses(self, cluster: Cluster) -> Mapping[TaskId, Address]:
        """Returns the addresses in the file, or port 0 of the task's host."""
        return {
            task: cluster.address(task) if cluster.role(task).hosts else Address(host.reachable_as or host.address, 0)
            for task, host in place(cluster).items()
        }

    def machines(self) -> Mapping[str, Machine]:
        """Returns the hosts' resources, as their agents report them."""
        return {address.host: each.hello.machine for each in self._connected for address in each.tasks.values()}

    @contextmanager
    def reserve(self, cluster: Cluster) -> Iterator[Mapping[TaskId, Address]]:
        """Connects to the hosts, reserves a port for each task, and copies the files.

        Raises:
            UsageError: versions differ, or a host cannot run its tasks.
            HostLost: a host cannot be connected.
        """
        placed = place(cluster)
        hosts = list(dict.fromkeys(placed.values()))
        links = []
        try:
            for host in hosts:
                links.append(Link(cluster, host))  # noqa: PERF401 the links before a failure have to be killed
            hellos = _in_parallel(Link.greet, links)
            versions = {link.host.address: hello.versions for link, hello in zip(links, hellos, strict=True)}
            compare(versions, installed(), trains=self._trains, same=cluster.over_ssh.versions == "same")
            self._hold(cluster, placed, links, hellos)
            self._copy(cluster)
            held = {task: address for each in self._connected for task, address in each.tasks.items()}
            yield {
                task: held[task] for task in cluster.possible_tasks
            }  # in this order: a role's addresses are sorted by index
        except BaseException:
            for link in links:
                link.kill()
            raise
        finally:
            _in_parallel(Link.close, links)

    def render(self, plan: Plan) -> str:
        """Returns for each host the command that starts the agent, and the commands that the agent runs."""
        copies = Copies.of(plan.cluster, plan.cluster.recipe_file if plan.recipe else None)
        paths = paths_of(plan, copies)
        placed = {task: host for task, host in place(plan.cluster).items() if task in plan.cluster.tasks}
        return "\n".join(
            line
            for host in dict.fromkeys(placed.values())
            for line in _rendered(plan, host, paths, copies, [task for task in placed if placed[task] == host])
        )

    @asynccontextmanager
    async def start(self, plan: Plan, context: LaunchContext) -> AsyncIterator[SshRun]:
        """Yields a run on the connected hosts."""
        if self._copies:
            give_id(plan.run_dir)
        run = SshRun(plan, context, [self._host_run(plan, each) for each in self._connected])
        for each in self._connected:
            if each.copied:
                task = next((task for task in each.tasks if task in plan.cluster.tasks), plan.tasks[0].task)
                await context.events.put_output(Output(task, "stderr", (f"tfdist: {each.copied}",)))
        try:
            yield run
        finally:
            await run.close()

    def _hold(
        self, cluster: Cluster, placed: Mapping[TaskId, HostSpec], links: Sequence[Link], hellos: Sequence[Hello]
    ) -> None:
        wanted = []
        for link, hello in zip(links, hellos, strict=True):
            name = link.host.reachable_as or hello.address or link.host.address
            tasks = [task for task, host in placed.items() if host == link.host]
            wanted.append(
                {task: cluster.address(task) if cluster.role(task).hosts else Address(name, 0) for task in tasks}
            )
        everywhere = {task: address for each in wanted for task, address in each.items()}
        names = {address.host: task for task, address in everywhere.items()}
        _check_reachable(names, {task: host.address for task, host in placed.items()})
        beside = (
            next((task for task in placed if task.traits.drives), None) if join_address(cluster, everywhere) else None
        )
        held = _in_parallel(lambda pair: pair[0].hold(pair[1], beside), list(zip(links, wanted, strict=True)))
        reserved = zip(links, hellos, held, strict=True)
        self._connected = [_ConnectedHost(link.host, link, hello, tasks) for link, hello, tasks in reserved]

    def _copy(self, cluster: Cluster) -> None:
        copies = self._copies = Copies.of(cluster, cluster.recipe_file if self._trains else None)
        if copies is None:
            return
        entries = list_files(copies.roots, cluster.over_ssh.exclude)
        size = sum(entry.size for entry in entries)
        if size > MAX_DEFAULT_COPY_BYTES and not cluster.over_ssh.sync:
            raise UsageError(
                f"{copies.roots[0]} has {_bytes(size)} in {len(entries)} files, which would be copied to every host",
                code="copy-too-large",
                hint="name the files to copy, 'ssh: {sync: [.], exclude: [data]}', or, if the hosts share this "
                "machine's files, write 'ssh: {shared: true}'",
            )
        _in_parallel(partial(_copy_to, copies, entries), self._connected)

    def _host_run(self, plan: Plan, connected: _ConnectedHost) -> HostRun:
        paths = paths_of(plan, self._copies).at_home(connected.hello.home)
        saves, python = plan.tasks[0].task in connected.tasks, connected.hello.python

        def agent_plan(plan: Plan) -> dict[str, Any]:
            return {
                "run_dir": paths.there(str(plan.run_dir)),
                "files": files_at(plan, paths),
                "tasks": [task_at(each, paths, python) for each in plan.tasks if each.task in connected.tasks],
                "start": paths.start,
                "copied": bool(paths.pairs),
                "tells_metrics": saves and bool(paths.pairs),
            }

        def reconnect() -> Link:
            link = Link(plan.cluster, connected.host)
            try:
                link.greet()
                link.hold({task: held_again(plan.cluster, task, at) for task, at in connected.tasks.items()}, None)
            except BaseException:
                link.kill()
                raise
            return link

        return HostRun(
            connected.host.address, connected.link, reconnect, paths, agent_plan, tuple(connected.tasks), saves
        )


def held_again(cluster: Cluster, task: TaskId, at: Address) -> Address:
    """The address that a host holds again: others may reach it under one that none of its interfaces has.

    Args:
        cluster: the cluster.
        task: a task on that host.
        at: the address that other tasks have of it.
    """
    return at if cluster.role(task).hosts else Address(LOOPBACK, at.port)


def _in_parallel(function: Callable[[Any], Result], hosts: Sequence[Any]) -> list[Result]:
    """Calls a function for all hosts in parallel. Raises the first error in their order without waiting for others."""
    pool = ThreadPoolExecutor(max(1, len(hosts)))
    try:
        return [future.result() for future in [pool.submit(function, host) for host in hosts]]
    finally:
        pool.shutdown(wait=False)


def _copy_to(copies: Copies, entries: Sequence[Entry], connected: _ConnectedHost) -> None:
    began = time.monotonic()
    to = copies.to.replace("~", connected.hello.home, 1) if copies.to.startswith("~/") else copies.to
    logged = began

    def log_progress(copied: int, size: int) -> None:
        nonlocal logged
        if time.monotonic() - logged > _PROGRESS_SECONDS:
            logged = time.monotonic()
            log.info("copying to %s: %s of %s", connected.host.address, _bytes(copied), _bytes(size))

    listed = FileList(copies.origin, tuple(entries))
    files, size = connected.link.copy(common_folder(copies.roots), listed, to, log_progress)
    seconds = time.monotonic() - began
    connected.copied = (
        f"copied {files} of {len(entries)} files, {_bytes(size)}, to {connected.host.address}:{to} in {seconds:.1f} s"
    )


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _check_reachable(names: Mapping[str, TaskId], hosts: Mapping[TaskId, str]) -> None:
    """Refuses loopback and link-local addresses if there are several hosts: they mean another machine on each host.

    Args:
        names: the hosts of the tasks' addresses, each with one of its tasks.
        hosts: the host of each task.

    Raises:
        UsageError: for the first such address.
    """
    for name, task in names.items() if len(names) > 1 else ():
        if Address(name).is_loopback or _is_link_local(name):
            host = hosts.get(task, name)
            raise UsageError(
                f"{task} on {host} has the address {name}, which the other hosts cannot reach",
                code="address-not-reachable",
                hint=f"give {host} a name that all hosts resolve: hosts: [{{address: {host}, reachable_as: NAME}}]",
            )


def _is_link_local(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_link_local
    except ValueError:
        return False


def _rendered(
    plan: Plan, host: HostSpec, paths: PathMap, copies: Copies | None, tasks: Sequence[TaskId]
) -> Iterator[str]:
    yield f"# {host.address}: {', '.join(map(str, tasks))}"
    yield shlex.join(ssh_argv(plan.cluster, host, agent_command(host)))
    for root in copies.roots if copies else ():
        yield f"# copies new files of {_one_line(root)} to {_one_line(paths.there(str(root)))}, and runs"
    python = pythons(host)[0]
    for planned in plan.tasks:
        if planned.task in tasks:
            task = task_at(planned, paths, python)
            given = assignments(task["env"], planned.secrets)
            yield " ".join(("env", "-C", shlex.quote(paths.start), *given, shlex.join(task["argv"])))


def _one_line(path: object) -> str:
    return shlex.quote(str(path)).replace("\n", "\\n")
