"""The network of a run's tasks on this machine: a private one, or the machine's.

TensorFlow's servers listen on every interface without authentication. In a network namespace with only a loopback
interface, only the run's own tasks can connect to them, and the tasks cannot connect to anything else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.process import network_namespace
from tfdist_cli.launch.supervisor.events import NetworkReady
from tfdist_cli.plan.plan import Plan
from tfdist_cli.spec.sections.recipe import services_of
from tfdist_cli.spec.strategies import STRATEGIES

_SCRIPT = (sys.executable, "-I", "-S", str(Path(network_namespace.__file__)))
PRIVATE = "the tasks have a private network: no other process can connect to them, and they reach no other host"
OPEN = "everyone who can connect to this machine can run code in the tasks: TensorFlow's servers have no authentication"


@dataclass(frozen=True)
class Network:
    """A network in which commands can run.

    Args:
        enter: the prefix of a command; empty for this machine's network.
        files: the open files that the prefix needs.
        maker: the process that keeps a private network; None for this machine's network.
    """

    enter: tuple[str, ...] = ()
    files: tuple[int, ...] = ()
    maker: subprocess.Popen[bytes] | None = field(default=None, compare=False)

    def reserve(self, ports: Collection[int]) -> None:
        """Reserves further ports."""
        if ports and self.maker and self.maker.stdin and self.maker.stdout:
            self.maker.stdin.write(f"{' '.join(map(str, ports))}\n".encode())
            self.maker.stdin.flush()
            self.maker.stdout.readline()


HOST = Network()


@contextmanager
def network_of(plan: Plan) -> Iterator[tuple[Network, NetworkReady | None]]:
    """The network of a plan's tasks, and what the user should know about it. It exists until the context is left.

    Raises:
        UsageError: the cluster file requires a private network, and this machine does not allow it.
    """
    wanted, warning = (plan.cluster.network, "") if plan.cluster.network else _default(plan)
    if wanted == "host":
        yield HOST, NetworkReady(private=False, text=warning) if warning else None
        return
    with ExitStack() as kept:
        reason = ""
        try:
            network = _make(ports_of(plan), kept)
        except OSError as error:
            network, reason = HOST, error.strerror or str(error)
        if reason and plan.cluster.network == "private":
            raise UsageError(
                f"this machine allows no private network: {reason}",
                code="no-private-network",
                hint="remove 'network: private', and close the ports with a firewall: see docs/how-to/secure-ports.md",
            )
        if reason:
            text = f"{OPEN}, and a private network is not allowed here ({reason}): see docs/how-to/secure-ports.md"
            yield network, NetworkReady(private=False, text=text)
        else:
            yield network, NetworkReady(private=True, text=PRIVATE)


def _default(plan: Plan) -> tuple[str, str]:
    """The network of a cluster whose file names none, and a warning if it is open.

    A recipe's tasks get a private network, unless they use a storage service. A program after `--` keeps the network
    that it has without tfdist.
    """
    listening = [planned for planned in plan.tasks if planned.task.traits.listens]
    alone = STRATEGIES[plan.strategy].one_process and not any(one.task.traits.auxiliary for one in listening)
    if alone or any(not one.address.is_loopback for one in listening):
        return "host", ""
    if plan.recipe and (used := services_of(plan.recipe)):
        return "host", f"{OPEN}: the recipe uses {used[0]}, which a private network does not reach"
    if plan.recipe is None:
        return "host", f"{OPEN}; 'network: private' in the cluster file closes them, see docs/how-to/secure-ports.md"
    return "private", ""


def _make(ports: Sequence[int], kept: ExitStack) -> Network:
    """Creates a network namespace, which exists until `kept` is closed.

    Raises:
        OSError: this machine does not allow it.
    """
    if not sys.platform.startswith("linux"):
        raise OSError(f"{sys.platform} has no network namespaces")
    maker = kept.enter_context(
        subprocess.Popen(
            [*_SCRIPT, "make", *map(str, ports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
    )
    if maker.stdout is None:
        raise RuntimeError("stdout is not a pipe")
    answer = maker.stdout.readline().decode().split()
    if answer[:1] != ["ok"]:
        raise OSError(" ".join(answer) or "the process that creates it has exited")
    files = [os.open(f"/proc/{maker.pid}/ns/net", os.O_RDONLY)]
    kept.callback(os.close, files[0])
    user = -1
    if answer[1] == "1":
        user = os.open(f"/proc/{maker.pid}/ns/user", os.O_RDONLY)
        kept.callback(os.close, user)
        files.append(user)
    return Network((*_SCRIPT, "enter", str(user), str(files[0])), tuple(files), maker)


def ports_of(plan: Plan) -> list[int]:
    """The ports on which tasks listen, or may listen later."""
    listening = [planned.address.port for planned in plan.tasks if planned.task.traits.listens]
    return [*listening, *plan.spare_ports]
