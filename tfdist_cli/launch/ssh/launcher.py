"""The ssh launcher: connects to the hosts, sees that they fit together, copies what they need, and runs the tasks."""

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
from tfdist_cli.launch.ssh.run import Site, SshRun
from tfdist_cli.launch.ssh.versions import compare, installed
from tfdist_cli.launch.supervisor.events import Output
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.plan import Plan
from tfdist_cli.plan.resources import Machine
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.ssh import HostSpec
from tfdist_cli.spec.task_id import TaskId

MOST_UNASKED = 1024**3
"""Bytes that are copied without the cluster file naming them: a folder that is larger was hardly meant."""
_TELL_PERIOD = 2.0
"""Seconds from one word of how far a copy is to the next."""
log = logging.getLogger("tfdist.launch")
Answer = TypeVar("Answer")


@dataclass
class _Reached:
    """A host that is connected.

    Args:
        host: which host.
        link: the connection.
        hello: what its agent has said of it.
        tasks: its tasks, with the addresses that are held there.
        copied: what was copied to it, in words.
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
        self._reached: list[_Reached] = []

    def check(self, cluster: Cluster, command: Sequence[str]) -> None:
        """Without `ssh` there is no way to the hosts, and without a host for each task no cluster."""
        self._trains = not command
        if shutil.which("ssh") is None:
            raise no_ssh()
        foreseen = {address.host: task for task, address in self.preview_addresses(cluster).items()}
        _check_reachable(foreseen, {task: host.address for task, host in place(cluster).items()})

    def preview_addresses(self, cluster: Cluster) -> Mapping[TaskId, Address]:
        """As written, or a free port of the host."""
        return {
            task: cluster.address(task) if cluster.role(task).hosts else Address(host.reachable_as or host.address, 0)
            for task, host in place(cluster).items()
        }

    def machines(self) -> Mapping[str, Machine]:
        """The hosts as their agents have found them."""
        return {address.host: each.hello.machine for each in self._reached for address in each.tasks.values()}

    @contextmanager
    def reserve(self, cluster: Cluster) -> Iterator[Mapping[TaskId, Address]]:
        """Connects to the hosts, has each keep a port for each of its tasks, and copies the files there.

        Raises:
            UsageError: hosts don't fit together, or cannot run their tasks.
            HostLost: a host cannot be reached.
        """
        placed = place(cluster)
        hosts = list(dict.fromkeys(placed.values()))
        links = []
        try:
            for host in hosts:
                links.append(Link(cluster, host))  # noqa: PERF401 those before one that fails are to be ended
            hellos = _at_once(Link.greet, links)
            named = {link.host.address: hello.versions for link, hello in zip(links, hellos, strict=True)}
            compare(named, installed(), trains=self._trains, same=cluster.over_ssh.versions == "same")
            self._hold(cluster, placed, links, hellos)
            self._copy(cluster)
            held = {task: address for each in self._reached for task, address in each.tasks.items()}
            yield {task: held[task] for task in cluster.tasks}  # a task's index is its place among those of its role
        except BaseException:
            for link in links:
                link.kill()
            raise
        finally:
            _at_once(Link.close, links)

    def render(self, plan: Plan) -> str:
        """For each host the command that starts the agent, and what the agent then does."""
        copies = Copies.of(plan.cluster, plan.cluster.recipe if plan.recipe else None)
        paths, placed = paths_of(plan, copies), place(plan.cluster)
        return "\n".join(
            line
            for host in dict.fromkeys(placed.values())
            for line in _rendered(plan, host, paths, copies, [task for task in placed if placed[task] == host])
        )

    @asynccontextmanager
    async def start(self, plan: Plan, context: LaunchContext) -> AsyncIterator[SshRun]:
        """A run on the hosts that were reserved."""
        if self._copies:
            give_id(plan.run_dir)
        run = SshRun(plan, context, [self._site(plan, each) for each in self._reached])
        for each in self._reached:
            if each.copied:
                await context.events.put_output(Output(next(iter(each.tasks)), "stderr", (f"tfdist: {each.copied}",)))
        try:
            yield run
        finally:
            await run.close()

    def _hold(
        self, cluster: Cluster, placed: Mapping[TaskId, HostSpec], links: Sequence[Link], hellos: Sequence[Hello]
    ) -> None:
        wanted = []
        for link, hello in zip(links, hellos, strict=True):
            reach = link.host.reachable_as or hello.address or link.host.address
            tasks = [task for task, host in placed.items() if host == link.host]
            wanted.append(
                {task: cluster.address(task) if cluster.role(task).hosts else Address(reach, 0) for task in tasks}
            )
        names = {address.host: task for each in wanted for task, address in each.items()}
        _check_reachable(names, {task: host.address for task, host in placed.items()})
        held = _at_once(lambda pair: pair[0].hold(pair[1]), list(zip(links, wanted, strict=True)))
        self._reached = [
            _Reached(link.host, link, hello, tasks) for link, hello, tasks in zip(links, hellos, held, strict=True)
        ]

    def _copy(self, cluster: Cluster) -> None:
        copies = self._copies = Copies.of(cluster, cluster.recipe if self._trains else None)
        if copies is None:
            return
        entries = list_files(copies.roots, cluster.over_ssh.exclude)
        size = sum(entry.size for entry in entries)
        if size > MOST_UNASKED and not cluster.over_ssh.sync:
            raise UsageError(
                f"{copies.roots[0]} has {_bytes(size)} in {len(entries)} files, which would be copied to every host",
                hint="say what is to be copied, 'ssh: {sync: [.], exclude: [data]}', or that it is there: "
                "'ssh: {shared: true}'",
            )
        _at_once(partial(_copy_to, copies, entries), self._reached)

    def _site(self, plan: Plan, reached: _Reached) -> Site:
        paths = paths_of(plan, self._copies).at_home(reached.hello.home)
        saves = plan.tasks[0].task in reached.tasks
        orders = {
            "run_dir": paths.there(str(plan.run_dir)),
            "files": files_at(plan, paths),
            "tasks": [task_at(each, paths, reached.hello.python) for each in plan.tasks if each.task in reached.tasks],
            "start": paths.start,
            "copied": bool(paths.pairs),
            "tells_metrics": saves and bool(paths.pairs),
        }

        def reconnect() -> Link:
            link = Link(plan.cluster, reached.host)
            try:
                link.greet()
                link.hold(reached.tasks)
            except BaseException:
                link.kill()
                raise
            return link

        return Site(reached.host.address, reached.link, reconnect, paths, orders, tuple(reached.tasks), saves)


def _at_once(function: Callable[[Any], Answer], hosts: Sequence[Any]) -> list[Answer]:
    """Calls a function for all hosts at once; the first error in their order counts, and nobody waits for the rest."""
    pool = ThreadPoolExecutor(max(1, len(hosts)))
    try:
        return [future.result() for future in [pool.submit(function, host) for host in hosts]]
    finally:
        pool.shutdown(wait=False)


def _copy_to(copies: Copies, entries: Sequence[Entry], reached: _Reached) -> None:
    began = time.monotonic()
    to = copies.to.replace("~", reached.hello.home, 1) if copies.to.startswith("~/") else copies.to
    told = began

    def tell(copied: int, size: int) -> None:
        nonlocal told
        if time.monotonic() - told > _TELL_PERIOD:
            told = time.monotonic()
            log.info("copying to %s: %s of %s", reached.host.address, _bytes(copied), _bytes(size))

    listed = FileList(copies.origin, tuple(entries))
    files, size = reached.link.copy(common_folder(copies.roots), listed, to, tell)
    seconds = time.monotonic() - began
    reached.copied = (
        f"copied {files} of {len(entries)} files, {_bytes(size)}, to {reached.host.address}:{to} in {seconds:.1f} s"
    )


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _check_reachable(names: Mapping[str, TaskId], hosts: Mapping[TaskId, str]) -> None:
    """Refuses addresses that mean another machine on each host, where there are several.

    Args:
        names: the hosts of the tasks' addresses, each with one of its tasks.
        hosts: the hosts that the tasks are on.

    Raises:
        UsageError: naming the first of them.
    """
    for name, task in names.items() if len(names) > 1 else ():
        if Address(name).is_loopback or _is_link_local(name):
            host = hosts.get(task, name)
            raise UsageError(
                f"{task} on {host} has the address {name}, which the other hosts cannot reach",
                hint=f"give {host} a name that all hosts know: hosts: [{{address: {host}, reachable_as: NAME}}]",
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
        yield f"# is sent what is new of {_one_line(root)}, for {_one_line(paths.there(str(root)))}, and runs"
    python = pythons(host)[0]
    for planned in plan.tasks:
        if planned.task in tasks:
            task = task_at(planned, paths, python)
            given = assignments(task["env"], planned.secrets)
            yield " ".join(("env", "-C", shlex.quote(paths.start), *given, shlex.join(task["argv"])))


def _one_line(path: object) -> str:
    return shlex.quote(str(path)).replace("\n", "\\n")
