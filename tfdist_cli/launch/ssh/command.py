"""The commands that reach a host: what `ssh` is given, and what the shell at the other end runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.ssh import HostSpec

AGENT = "tfdist_cli.launch.ssh.agent"
CONNECT_TIMEOUT = 10
ALIVE_INTERVAL, ALIVE_COUNT = 4, 2
"""A host is lost when nothing has come from it for 4 s, and two questions then find no answer in 4 s each: 12 s."""
NO_PYTHON = 113
"""What the remote shell ends with when it finds no Python with tfdist."""
_OPTIONS = {
    "BatchMode": "yes",  # it never waits for a password
    "ConnectTimeout": str(CONNECT_TIMEOUT),
    "ServerAliveInterval": str(ALIVE_INTERVAL),
    "ServerAliveCountMax": str(ALIVE_COUNT),
    # A connection of its own: one that others share does not follow these settings, and outlives its first user.
    "ControlMaster": "no",
    "ControlPath": "none",
    # What a user's configuration may want of a login, and no launch.
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "EscapeChar": "none",
}


def ssh_argv(cluster: Cluster, host: HostSpec, command: str) -> list[str]:
    """The `ssh` command that runs a shell command on a host."""
    argv = ["ssh"]
    if cluster.over_ssh.config:
        argv += ["-F", str(cluster.over_ssh.config)]
    for name, value in _OPTIONS.items():
        argv += ["-o", f"{name}={value}"]
    if host.port:
        argv += ["-p", str(host.port)]
    if host.user:
        argv += ["-l", host.user]
    return [*argv, "--", host.address, command]


def pythons(host: HostSpec) -> tuple[str, ...]:
    """The Pythons that may be the host's, the best first."""
    return (host.python,) if host.python else (sys.executable, "python3")


def python_command(host: HostSpec, arguments: Sequence[str], *, without: bool = False) -> str:
    """A shell command that runs the host's Python, the first that has tfdist.

    Args:
        host: which host.
        arguments: what Python is given.
        without: whether, where none has tfdist, the first Python that there is will do.
    """
    has_tfdist = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tfdist_cli') is None)"
    tried = " ".join(_word(python) for python in pythons(host))
    conditions = [f'"$python" -c {shlex.quote(has_tfdist)} 2>/dev/null']
    if without:
        conditions.append('command -v "$python" >/dev/null')
    script = " ".join(
        f'for python in {tried}; do {condition} && exec "$python" {shlex.join(arguments)}; done;'
        for condition in conditions
    )
    return f"exec sh -c {shlex.quote(f'{script} exit {NO_PYTHON}')}"  # whichever shell the user has there


def agent_command(host: HostSpec) -> str:
    """A shell command that runs the agent."""
    return python_command(host, ("-m", AGENT))


def _word(path: str) -> str:
    """A word of a shell command; the home folder is the host's to fill in."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
