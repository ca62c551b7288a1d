"""Findings about connections: hosts that cannot connect, and ports that are exposed."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Iterator, Sequence

from tfdist_cli.doctor.examine import Connection, HostResult
from tfdist_cli.finding import Finding
from tfdist_cli.launch.ssh.command import NO_PYTHON
from tfdist_cli.spec.sections.cluster import Cluster

_SSH_ERRORS = (
    ("Could not resolve hostname", "unknown-host", "correct its name, or use its IP address"),
    ("Permission denied", "refused-key", "make `ssh {host}` work without a password: ssh-copy-id {host}"),
    ("Host key verification failed", "unknown-host-key", "connect once with `ssh {host}` and verify its key"),
    ("HOST IDENTIFICATION HAS CHANGED", "changed-host-key", "find out why; then: ssh-keygen -R {host}"),
    ("Connection refused", "no-ssh-server", "correct the ssh port, or start sshd on {host}"),
    ("timed out", "unreachable", "check that {host} is up and that no firewall drops ssh"),
    ("No route to host", "unreachable", "check that {host} is up and on this network"),
    ("unreachable", "unreachable", "check that {host} is up and on this network"),
)
"""Text in ssh's output, the code of the problem, and the fix."""


def no_answer_finding(one: HostResult) -> Finding:
    """Returns the finding for a host that did not answer."""
    name, no_answer = one.site.name, one.no_answer
    if no_answer is None:
        raise ValueError(f"{name} has answered")
    reason = no_answer.stderr.splitlines()[-1] if no_answer.stderr else f"the probe exited with {no_answer.code}"
    if no_answer.code == NO_PYTHON:
        fix = "install Python 3.10 or later there, with tfdist"
        return Finding("no-python", "error", name, "python3 is not installed", fix)
    if no_answer.code == 255:
        for words, code, fix in _SSH_ERRORS:
            if words in no_answer.stderr:
                return Finding(code, "error", name, f"ssh: {reason}", fix.format(host=name))
    fix = f"run `ssh {name} python3 --version`" if one.site.remote else "check its Python"
    return Finding("no-answer", "error", name, f"it could not be examined: {reason}", fix)


def name_findings(one: HostResult) -> Iterator[Finding]:
    """Yields host names of the cluster that it cannot resolve."""
    if not one.site.tasks:
        return
    for name, addresses in one.facts["names"].items():
        if not addresses:
            yield Finding(
                "unknown-name",
                "error",
                one.site.name,
                f"the host name {name} cannot be resolved there, so its tasks cannot connect to {name}",
                f"add a line 'IP-ADDRESS {name}' to its /etc/hosts, or write IP addresses in the cluster file",
            )


def port_findings(one: HostResult) -> Iterator[Finding]:
    """Yields ports that its tasks cannot listen on."""
    for task, result in one.ports.items():
        error, port = result.get("error"), result["port"]
        if error == "EADDRINUSE":
            by = result["by"] or "a program that this user cannot see"
            yield Finding(
                "busy-port",
                "error",
                one.site.name,
                f"{task} cannot listen on port {port}: it is used by {by}",
                f"stop that program, or assign another port to {task}",
            )
        elif error == "EACCES":
            yield Finding(
                "forbidden-port",
                "error",
                one.site.name,
                f"{task} may not listen on port {port}: ports below 1024 require privileges",
                f"assign a port from 1024 on to {task}, such as 2222",
            )
        elif error:
            yield Finding(
                "no-port",
                "error",
                one.site.name,
                f"{task} cannot listen on port {port}: {error}",
                f"assign another port to {task}",
            )


def exposure_findings(one: HostResult, cluster: Cluster | None) -> Iterator[Finding]:
    """Yields a warning if it has a public address. The local launcher's private network is not exposed."""
    if cluster and cluster.network != "host" and all(address.is_loopback for address in one.site.ports.values()):
        return
    public = [text for text in one.facts["addresses"] if ipaddress.ip_address(text).is_global]
    if public and one.ports:
        ports = sorted({address.port for address in one.site.ports.values() if address.port})
        which = f"ports {', '.join(map(str, ports))}" if ports else "the ports of its tasks"
        yield Finding(
            "exposed-port",
            "warning",
            one.site.name,
            f"it has a public address, {public[0]}, and TensorFlow listens on every address: without a "
            f"firewall, anyone can connect to {which} and run any operation there",
            "allow only the cluster's hosts in a firewall; see docs/how-to/secure-ports.md",
        )


def connection_findings(answering: Sequence[HostResult]) -> Iterator[Finding]:
    """Yields findings of connections; failures of one kind at one host make one finding."""
    owners = {task: one for one in answering for task in one.ports}
    groups: dict[tuple[str, str, bool], list[tuple[HostResult, Connection]]] = {}
    for one in answering:
        for connection in one.connections:
            if one.site.tasks and (connection.error or not connection.right) and connection.error != "unknown":
                key = owners[connection.task].site.name, connection.error, connection.right
                groups.setdefault(key, []).append((one, connection))
            elif not one.site.tasks and not connection.error and connection.right:
                yield from _exposed_port(one, owners[connection.task], connection)
    for failed in groups.values():
        yield _failed_connections(failed, owners[failed[0][1].task])


def _exposed_port(one: HostResult, owner: HostResult, connection: Connection) -> Iterator[Finding]:
    if connection.task == next(iter(owner.ports)):  # one finding for all ports of a host
        yield Finding(
            "exposed-port",
            "warning",
            owner.site.name,
            f"{one.site.name}, which runs no task, can connect to {connection.task} at {connection.address}: anyone "
            "who can connect can run any operation there",
            "allow only the cluster's hosts in its firewall; see docs/how-to/secure-ports.md",
        )


_CONNECTION_ERRORS = {
    "timeout": "no reply: a firewall drops the packets, or the address belongs to another machine",
    "ECONNREFUSED": "refused although the port is open: a firewall rejects it, or the address is wrong",
    "EHOSTUNREACH": "the host is unreachable: it is on another network, or a firewall rejects the connection",
    "ENETUNREACH": "no route to the network",
}


def _failed_connections(failed: Sequence[tuple[HostResult, Connection]], owner: HostResult) -> Finding:
    sources = list({one.site.name: one for one, _ in failed}.values())
    connections = list({connection.task: connection for _, connection in failed}.values())
    hosts = _listed([one.site.name for one in sources])
    targets = _listed([f"{connection.task} at {connection.address}" for connection in connections])
    first = connections[0]
    if not first.right:
        message = f"another program, or another machine, answers {hosts} for {targets}"
        fix = f"correct the address: it does not belong to {owner.site.name}"
        return Finding("wrong-host", "error", owner.site.name, message, fix)
    reason = _CONNECTION_ERRORS.get(first.error, f"the connection fails with {first.error}")
    message = f"{hosts} cannot connect to {targets}: {reason}"
    if owner in sources and not _has(owner, first.address.host):
        fix = f"correct the address: {owner.site.name} itself cannot connect to its task there"
        return Finding("wrong-host", "error", owner.site.name, message, fix)
    fixed = owner.site.ports[first.task].port
    strangers = [one for one in sources if one is not owner] or sources
    command = _firewall_command(owner.facts["firewall"], _visible_address(strangers[0]), fixed)
    fix = f"allow the connection on {owner.site.name}, for example: {command}"
    more = [f"the other port{'s' if len(connections) > 2 else ''}"] if len(connections) > 1 and fixed else []
    more += [f"the other host{'s' if len(strangers) > 2 else ''}"] if len(strangers) > 1 else []
    return Finding(
        "blocked-port", "error", owner.site.name, message, f"{fix}; the same for {' and '.join(more)}" if more else fix
    )


def _has(owner: HostResult, host: str) -> bool:
    """Whether an address belongs to the host. If so, a firewall blocks even its own connections."""
    return bool({host, *owner.facts["names"].get(host, ())} & set(owner.facts["addresses"]))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {names[1]}" if len(names) == 2 else _first_of(names)


def _first_of(names: Sequence[str]) -> str:
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"


def _visible_address(one: HostResult) -> str:
    """Returns the address that other hosts see."""
    own = [text for text in one.facts["addresses"] if not ipaddress.ip_address(text).is_loopback]
    return next((text for text in own if ":" not in text), "ADDRESS")


def _firewall_command(tool: str, source: str, port: int) -> str:
    """Returns the command that allows connections to a port, or to all ports that servers may use."""
    first, last = (port, port) if port else (1024, 65535)
    if tool == "ufw":
        return f"ufw allow from {source} to any port {_range(first, last, ':')} proto tcp"
    if tool == "firewalld":
        ports = _range(first, last, "-")
        rule = f'rule family="ipv4" source address="{source}" port port="{ports}" protocol="tcp" accept'
        return f"firewall-cmd --add-rich-rule={shlex.quote(rule)}"
    if tool == "nft":
        return f"nft insert rule inet filter input ip saddr {source} tcp dport {_range(first, last, '-')} accept"
    if tool == "iptables":
        return f"iptables -I INPUT -p tcp -s {source} --dport {_range(first, last, ':')} -j ACCEPT"
    return f"a rule for TCP from {source} to port {_range(first, last, '-')}"


def _range(first: int, last: int, sign: str) -> str:
    return str(first) if first == last else f"{first}{sign}{last}"
