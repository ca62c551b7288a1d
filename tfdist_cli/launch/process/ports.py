"""Addresses of tasks on this machine: free ports that stay free until their task binds them, and checks of given ones.

A port is held by a socket that is bound to it on every interface but does not listen. Linux lets one socket listen
there beside it if both have `SO_REUSEADDR`, as gRPC's and Python's servers do; no connection and no request for "any
free port" gets it. `tests/cluster/test_ports_held.py` shows it with a `tf.distribute.Server`.
"""

from __future__ import annotations

import errno
import ipaddress
import platform
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

import psutil

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId

_CAN_SHARE = platform.system() == "Linux"
"""Elsewhere a port that is held cannot be listened on: it is free when it is chosen, and let go."""


@contextmanager
def hold(cluster: Cluster) -> Iterator[dict[TaskId, Address]]:
    """Every task's address, with free ports for the tasks that have none, kept until the context is left.

    Raises:
        UsageError: an address is another machine's, or its port is taken.
    """
    with hold_addresses({task: cluster.address(task) for task in cluster.tasks}) as addresses:
        yield addresses


@contextmanager
def hold_addresses(wanted: Mapping[TaskId, Address]) -> Iterator[dict[TaskId, Address]]:
    """The same of addresses, port 0 being any that is free."""
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
                free = held.enter_context(_bound(0, reuse=False))
                _share(free)
                addresses[task] = Address(address.host, free.getsockname()[1])
        if not _CAN_SHARE:
            held.close()
        yield addresses


def check_here(addresses: Mapping[TaskId, Address]) -> None:
    """Refuses the addresses of other machines.

    Raises:
        UsageError: naming the first task that is not here.
    """
    here = _interface_addresses()
    known: dict[str, bool] = {}
    for task, address in addresses.items():
        if address.host not in known:
            known[address.host] = address.is_loopback or bool(_resolve(task, address.host) & here)
        if not known[address.host]:
            raise UsageError(
                f"{task} is to run on {address.host}, which is not this machine, {socket.gethostname()}",
                hint=f"start each task on its own host: tfdist role --task {task} --cluster CLUSTER",
            )


def _check_distinct(addresses: Mapping[TaskId, Address]) -> None:
    """Refuses two tasks with one port: a TensorFlow server listens on every interface, whatever address it is given."""
    owners: dict[int, TaskId] = {}
    for task, address in addresses.items():
        if not task.traits.listens:
            continue
        other = owners.setdefault(address.port, task)
        if other != task:
            raise UsageError(
                f"{other} and {task} both have port {address.port} of this machine, on different addresses of it",
                hint="give each a port of its own: a TensorFlow server listens on every interface of its machine",
            )


@contextmanager
def _hold_given(task: TaskId, address: Address) -> Iterator[None]:
    with ExitStack() as held:
        try:
            bound = held.enter_context(_bound(address.port, reuse=False))
        except PermissionError:
            raise UsageError(
                f"{task} may not listen on port {address.port}: ports below 1024 need special rights",
                hint="give it a port from 1024 on, such as 2222",
            ) from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            bound = _reclaimed(task, address.port)
            held.enter_context(bound)
        _share(bound)
        yield


def _reclaimed(task: TaskId, port: int) -> socket.socket:
    """The port when only old connections are left on it, which a server may ignore.

    Raises:
        UsageError: somebody uses it. One who has bound it but doesn't listen is not to be seen, and is most likely
            another launch that holds it for its own task.
    """
    users = _users(port)
    closed = users.pop(psutil.CONN_TIME_WAIT, None)
    if closed and not users:
        with suppress(OSError):
            return _bound(port, reuse=True)
    by = _name(next(iter(users.values()))) if users else "another launch, or a program that has not begun to listen"
    raise UsageError(
        f"{task} cannot listen on port {port}: it is in use by {by}",
        hint="end that program, or give the task another port; without an address it gets a free one",
    )


def _bound(port: int, *, reuse: bool) -> socket.socket:
    """A socket on every interface, IPv4 and IPv6 where there is IPv6."""
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
    """Lets a server listen on the port beside this socket. Set after binding, it lets no other socket in before."""
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
            f"{task} is to run on {host}, a name that does not resolve here: {error.strerror}",
            hint="correct the name, or give the host's IP address",
        ) from error
    return {_plain(str(entry[4][0])) for entry in found}


def _plain(text: str) -> str:
    """The address without its zone, loopbacks all alike."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return "loopback" if address.is_loopback else str(address)


def _users(port: int) -> dict[str, set[int]]:
    """The processes with a socket on the port, by the socket's state, listeners first; 0 is one not to be known."""
    users: dict[str, set[int]] = {}
    with suppress(psutil.AccessDenied):
        for socket_ in psutil.net_connections("tcp"):
            if socket_.laddr and socket_.laddr.port == port:
                users.setdefault(socket_.status, set()).add(socket_.pid or 0)
    return dict(sorted(users.items(), key=lambda item: item[0] != psutil.CONN_LISTEN))


def _name(pids: set[int]) -> str:
    """A process, as far as this user may know it."""
    pid = max(pids)
    if not pid:
        return "a program of another user"
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"
