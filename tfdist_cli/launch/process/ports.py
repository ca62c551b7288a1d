"""Addresses of tasks on this machine: reserves free ports until their tasks bind them, and checks configured ones.

A port is reserved by a socket that is bound to it on every interface but does not listen. Linux lets another socket
listen on the port if both have `SO_REUSEADDR`, as the servers of gRPC and Python have. No connection and no request for
"any free port" gets it. `tests/cluster/test_ports_held.py` shows it with a `tf.distribute.Server`.
"""

from __future__ import annotations

import errno
import ipaddress
import platform
import socket
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager, suppress

import psutil

from tfdist_cli.errors import UsageError
from tfdist_cli.plan.join_address import join_address
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId

_CAN_SHARE = platform.system() == "Linux"
"""On other systems no server can listen on a reserved port, so the port is released after it was chosen."""


_PAIRS = 100
"""How many free ports are tried until the port after one is free as well."""


@contextmanager
def hold(cluster: Cluster) -> Iterator[dict[TaskId, Address]]:
    """Every possible task's address, with free ports for tasks without one, reserved until the context is left.

    The port on which the chief takes workers that join is reserved as well, if it is free.

    Raises:
        UsageError: an address belongs to another machine, or its port is in use.
    """
    wanted = {task: cluster.address(task) for task in cluster.possible_tasks}
    beside = next((task for task in wanted if task.traits.drives and join_address(cluster, wanted)), None)
    with hold_addresses(wanted, beside) as addresses, ExitStack() as held:
        control = join_address(cluster, addresses)
        if control and beside and wanted[beside].port:
            with suppress(UsageError):  # the chief reports it if another program still uses the port then
                held.enter_context(_hold_given(beside, control))
        yield addresses


@contextmanager
def hold_addresses(wanted: Mapping[TaskId, Address], beside: TaskId | None = None) -> Iterator[dict[TaskId, Address]]:
    """Reserves addresses; port 0 stands for any free port.

    Args:
        wanted: the addresses.
        beside: a task for whose free port the next port is reserved as well.
    """
    addresses = dict(wanted)
    given = {task: address for task, address in addresses.items() if address.port}
    check_here(given)
    _check_distinct(given)
    with ExitStack() as held:
        for task, address in given.items():
            if task.traits.listens:
                held.enter_context(_hold_given(task, address))
        for task, address in addresses.items():
            if not address.port:
                taken = {each.port for each in addresses.values()}
                free = _pair(held, taken) if task == beside else _bound(0, reuse=False)
                _share(held.enter_context(free))
                addresses[task] = Address(address.host, free.getsockname()[1])
        if not _CAN_SHARE:
            held.close()
        yield addresses


def _pair(held: ExitStack, given: AbstractSet[int]) -> socket.socket:
    """A socket with a free port after which another free one follows, which `held` reserves."""
    for _ in range(_PAIRS):
        first = _bound(0, reuse=False)
        after = first.getsockname()[1] + 1
        if after < 65536 and after not in given:
            with suppress(OSError):
                second = held.enter_context(_bound(after, reuse=False))
                _share(second)
                return first
        first.close()
    return _bound(0, reuse=False)


def check_here(addresses: Mapping[TaskId, Address]) -> None:
    """Checks that all addresses belong to this machine.

    Raises:
        UsageError: names the first task with the address of another machine.
    """
    here = _interface_addresses()
    known: dict[str, bool] = {}
    for task, address in addresses.items():
        if address.host not in known:
            known[address.host] = address.is_loopback or bool(_resolve(task, address.host) & here)
        if not known[address.host]:
            raise UsageError(
                f"the host of {task} is {address.host}, but this machine is {socket.gethostname()}",
                code="not-this-machine",
                hint=f"start each task on its own host: tfdist role --task {task} --cluster CLUSTER",
            )


def _check_distinct(addresses: Mapping[TaskId, Address]) -> None:
    """Checks that no two tasks have the same port: a TensorFlow server listens on every interface of its machine."""
    owners: dict[int, TaskId] = {}
    for task, address in addresses.items():
        if not task.traits.listens:
            continue
        other = owners.setdefault(address.port, task)
        if other != task:
            raise UsageError(
                f"{other} and {task} both have port {address.port} of this machine, with different addresses",
                code="duplicate-port",
                hint="give each task a different port: a TensorFlow server listens on every interface of its machine",
            )


@contextmanager
def _hold_given(task: TaskId, address: Address) -> Iterator[None]:
    with ExitStack() as held:
        try:
            bound = held.enter_context(_bound(address.port, reuse=False))
        except PermissionError:
            raise UsageError(
                f"{task} may not listen on port {address.port}: ports below 1024 need special permissions",
                code="port-not-permitted",
                hint="use a port from 1024 on, such as 2222",
            ) from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            bound = _reclaimed(task, address.port)
            held.enter_context(bound)
        _share(bound)
        yield


def _reclaimed(task: TaskId, port: int) -> socket.socket:
    """A socket bound to a port on which only closed connections are left, which a server may ignore.

    Raises:
        UsageError: the port is in use. A process that has bound it but does not listen is not visible. Most likely it
            is another launch that has reserved it for a task.
    """
    users = _users(port)
    closed = users.pop(psutil.CONN_TIME_WAIT, None)
    if closed and not users:
        with suppress(OSError):
            return _bound(port, reuse=True)
    user = _name(next(iter(users.values()))) if users else "another launch, or a program that does not listen yet"
    raise UsageError(
        f"{task} cannot listen on port {port}: it is in use by {user}",
        code="port-in-use",
        hint="stop that program, or use another port; a task without an address gets a free port",
    )


def _bound(port: int, *, reuse: bool) -> socket.socket:
    """A socket bound to a port on every interface, for IPv4 and, if available, IPv6."""
    if socket.has_dualstack_ipv6():
        return _try_bound(socket.AF_INET6, "::", port, reuse=reuse)
    return _try_bound(socket.AF_INET, "", port, reuse=reuse)


def _try_bound(family: socket.AddressFamily, host: str, port: int, *, reuse: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if reuse:
            _share(bound)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def _share(bound: socket.socket) -> None:
    """Lets a server listen on the port of this socket. It is set after binding, which must fail for a port in use."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _interface_addresses() -> set[str]:
    return {
        _plain(entry.address)
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def _resolve(task: TaskId, host: str) -> set[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"the host of {task} is {host}, a name that does not resolve here: {error.strerror}",
            code="host-not-found",
            hint="correct the name, or use the host's IP address",
        ) from error
    return {_plain(str(entry[4][0])) for entry in found}


def _plain(text: str) -> str:
    """The address without its zone; all loopback addresses are equal."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return "loopback" if address.is_loopback else str(address)


def _users(port: int) -> dict[str, set[int]]:
    """The processes with a socket on the port, by the socket's state, listeners first; 0 is an unknown process."""
    users: dict[str, set[int]] = {}
    with suppress(psutil.AccessDenied):
        for socket_ in psutil.net_connections("tcp"):
            if socket_.laddr and socket_.laddr.port == port:
                users.setdefault(socket_.status, set()).add(socket_.pid or 0)
    return dict(sorted(users.items(), key=lambda item: item[0] != psutil.CONN_LISTEN))


def _name(pids: set[int]) -> str:
    """The name of a process, as far as this user may see it."""
    pid = max(pids)
    if not pid:
        return "a program of another user"
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"
