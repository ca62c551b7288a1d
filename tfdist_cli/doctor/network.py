"""What keeps hosts from reaching each other, or lets strangers reach them."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Iterator, Sequence

from tfdist_cli.doctor.examine import Reach, Seen
from tfdist_cli.doctor.finding import Finding
from tfdist_cli.launch.ssh.command import NO_PYTHON
from tfdist_cli.spec.sections.cluster import Cluster

_SAYS_OF_SSH = (
    ("Could not resolve hostname", "unknown-host", "correct its name, or give its IP address"),
    ("Permission denied", "refused-key", "make `ssh {host}` work without a password: ssh-copy-id {host}"),
    ("Host key verification failed", "unknown-host-key", "connect by hand once, `ssh {host}`, and compare its key"),
    ("HOST IDENTIFICATION HAS CHANGED", "changed-host-key", "find out why; then: ssh-keygen -R {host}"),
    ("Connection refused", "no-ssh-server", "correct the port that ssh goes to, or start sshd on {host}"),
    ("timed out", "unreachable", "see whether {host} is up, and whether a firewall drops ssh"),
    ("No route to host", "unreachable", "see whether {host} is up, and on this network"),
    ("unreachable", "unreachable", "see whether {host} is up, and on this network"),
)
"""What ssh says, what that means, and what to do."""


def silence_finding(one: Seen) -> Finding:
    """Why a host could not be looked at."""
    name, silence = one.site.name, one.silence
    if silence is None:
        raise ValueError(f"{name} has answered")
    said = silence.said.splitlines()[-1] if silence.said else f"the probe ended with {silence.code}"
    if silence.code == NO_PYTHON:
        fix = "install Python 3.10 or later there, with tfdist"
        return Finding("no-python", "error", name, "there is no python3 on it", fix)
    if silence.code == 255:
        for words, code, fix in _SAYS_OF_SSH:
            if words in silence.said:
                return Finding(code, "error", name, f"ssh: {said}", fix.format(host=name))
    fix = f"see what `ssh {name} python3 --version` says" if one.site.remote else "see what its Python says"
    return Finding("no-answer", "error", name, f"it could not be looked at: {said}", fix)


def name_findings(one: Seen) -> Iterator[Finding]:
    """Whether it knows the names of the cluster's hosts."""
    if not one.site.tasks:
        return
    for name, addresses in one.facts["names"].items():
        if not addresses:
            yield Finding(
                "unknown-name",
                "error",
                one.site.name,
                f"the name {name} means nothing there, so its tasks cannot connect to {name}",
                f"add a line 'IP-ADDRESS {name}' to its /etc/hosts, or write IP addresses in the cluster file",
            )


def port_findings(one: Seen) -> Iterator[Finding]:
    """Whether its tasks can have their ports."""
    for task, told in one.ports.items():
        error, port = told.get("error"), told["port"]
        if error == "EADDRINUSE":
            by = told["by"] or "a program of another user, or one that is not to be seen"
            yield Finding(
                "busy-port",
                "error",
                one.site.name,
                f"{task} cannot listen on port {port}: it is in use by {by}",
                f"end that program, or give {task} another port",
            )
        elif error == "EACCES":
            yield Finding(
                "forbidden-port",
                "error",
                one.site.name,
                f"{task} may not listen on port {port}: ports below 1024 need special rights",
                f"give {task} a port from 1024 on, such as 2222",
            )
        elif error:
            yield Finding(
                "no-port",
                "error",
                one.site.name,
                f"{task} cannot listen on port {port}: {error}",
                f"give {task} another port",
            )


def exposure_findings(one: Seen, cluster: Cluster | None) -> Iterator[Finding]:
    """Whether it has an address that strangers reach; the local launcher gives tasks a network of their own."""
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
            f"it has a public address, {public[0]}, and TensorFlow listens on every address: unless a firewall keeps "
            f"them out, strangers reach {which} and can run any operation there",
            "let a firewall pass the cluster's own hosts alone; see docs/how-to/secure-ports.md",
        )


def reach_findings(awake: Sequence[Seen]) -> Iterator[Finding]:
    """What came of connecting, one finding for all that one host refuses in one way."""
    owners = {task: one for one in awake for task in one.ports}
    groups: dict[tuple[str, str, bool], list[tuple[Seen, Reach]]] = {}
    for one in awake:
        for reach in one.reached:
            if one.site.tasks and (reach.error or not reach.right) and reach.error != "unknown":
                key = owners[reach.task].site.name, reach.error, reach.right
                groups.setdefault(key, []).append((one, reach))
            elif not one.site.tasks and not reach.error and reach.right:
                yield from _reached_from_outside(one, owners[reach.task], reach)
    for refused in groups.values():
        yield _refused(refused, owners[refused[0][1].task])


def _reached_from_outside(one: Seen, owner: Seen, reach: Reach) -> Iterator[Finding]:
    if reach.task == next(iter(owner.ports)):  # its other ports are told with the first
        yield Finding(
            "exposed-port",
            "warning",
            owner.site.name,
            f"{one.site.name}, which runs no task, reaches {reach.task} at {reach.address}: whoever else does can run "
            "any operation there",
            "let its firewall pass the cluster's own hosts alone; see docs/how-to/secure-ports.md",
        )


_REFUSALS = {
    "timeout": "nothing comes back: a firewall drops it, or the address is another machine's",
    "ECONNREFUSED": "it is refused, though the task listens: a firewall rejects it, or the address is wrong",
    "EHOSTUNREACH": "the host cannot be reached: it is on another network, or a firewall rejects it",
    "ENETUNREACH": "there is no route to it",
}


def _refused(refused: Sequence[tuple[Seen, Reach]], owner: Seen) -> Finding:
    sources = list({one.site.name: one for one, _ in refused}.values())
    reaches = list({reach.task: reach for _, reach in refused}.values())
    who = _listed([one.site.name for one in sources])
    what = _listed([f"{reach.task} at {reach.address}" for reach in reaches])
    first = reaches[0]
    if not first.right:
        message = f"another program, or another machine, answers {who} for {what}"
        fix = f"correct the address: it is not the one by which {owner.site.name} is reached"
        return Finding("wrong-host", "error", owner.site.name, message, fix)
    said = _REFUSALS.get(first.error, f"the connection fails with {first.error}")
    message = f"{who} cannot reach {what}: {said}"
    if owner in sources and not _has(owner, first.address.host):
        fix = f"correct the address: {owner.site.name} itself does not reach its task there"
        return Finding("wrong-host", "error", owner.site.name, message, fix)
    fixed = owner.site.ports[first.task].port
    strangers = [one for one in sources if one is not owner] or sources
    fix = f"let it in on {owner.site.name}, such as by: {_allow(owner.facts['firewall'], _source(strangers[0]), fixed)}"
    more = [f"the other port{'s' if len(reaches) > 2 else ''}"] if len(reaches) > 1 and fixed else []
    more += [f"the other host{'s' if len(strangers) > 2 else ''}"] if len(strangers) > 1 else []
    return Finding(
        "blocked-port", "error", owner.site.name, message, f"{fix}; the same for {' and '.join(more)}" if more else fix
    )


def _has(owner: Seen, host: str) -> bool:
    """Whether an address is one of a host's own: then a firewall stands before it, even for the host itself."""
    return bool({host, *owner.facts["names"].get(host, ())} & set(owner.facts["addresses"]))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {names[1]}" if len(names) == 2 else _first_of(names)


def _first_of(names: Sequence[str]) -> str:
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"


def _source(one: Seen) -> str:
    """The address that another host sees."""
    own = [text for text in one.facts["addresses"] if not ipaddress.ip_address(text).is_loopback]
    return next((text for text in own if ":" not in text), "ADDRESS")


def _allow(tool: str, source: str, port: int) -> str:
    """The command that lets connections to a port, or to all those that servers may get, through."""
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
