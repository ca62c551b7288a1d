"""The `ssh` commands that reach a host, and the shell commands that they run there."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.ssh import HostSpec

AGENT = "tfdist_cli.launch.ssh.agent"
CONNECT_TIMEOUT = 10
ALIVE_INTERVAL, ALIVE_COUNT = 4, 2
"""After 4 s without data, ssh sends two keep-alives, 4 s apart. A host that answers none is lost after 12 s."""
NO_PYTHON = 113
"""The exit code of the remote shell when no Python there has tfdist."""
_OPTIONS = {
    "BatchMode": "yes",  # fails where a password would be asked for
    "ConnectTimeout": str(CONNECT_TIMEOUT),
    "ServerAliveInterval": str(ALIVE_INTERVAL),
    "ServerAliveCountMax": str(ALIVE_COUNT),
    # No shared connection: it would not use these settings, and it outlives its first user.
    "ControlMaster": "no",
    "ControlPath": "none",
    # Settings that a user's configuration may have for logins.
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "EscapeChar": "none",
}


def ssh_argv(cluster: Cluster, host: HostSpec, command: str) -> list[str]:
    """Returns the `ssh` command that runs a shell command on a host."""
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
    """Returns the Python interpreters to try on the host, in order of preference."""
    return (host.python,) if host.python else (sys.executable, "python3")


def python_command(host: HostSpec, arguments: Sequence[str], *, without_tfdist: bool = False) -> str:
    """Returns a shell command that runs the host's first Python that has tfdist.

    Args:
        host: the host.
        arguments: Python's arguments.
        without_tfdist: whether to fall back to the first Python without tfdist.
    """
    has_tfdist = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tfdist_cli') is None)"
    tried = " ".join(_word(python) for python in pythons(host))
    conditions = [f'"$python" -c {shlex.quote(has_tfdist)} 2>/dev/null']
    if without_tfdist:
        conditions.append('command -v "$python" >/dev/null')
    script = " ".join(
        f'for python in {tried}; do {condition} && exec "$python" {shlex.join(arguments)}; done;'
        for condition in conditions
    )
    return f"exec sh -c {shlex.quote(f'{script} exit {NO_PYTHON}')}"  # the user's login shell may not be a POSIX shell


def agent_command(host: HostSpec) -> str:
    """Returns a shell command that runs the agent."""
    return python_command(host, ("-m", AGENT))


def _word(path: str) -> str:
    """Quotes a word of a shell command. The remote shell expands a leading `~/`."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
