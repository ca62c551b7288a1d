"""Clusters of hosts, and a stand-in for `ssh`."""

import pytest

from tfdist_cli.spec.sections.cluster import Cluster

SSH = """#!/bin/sh
# Runs commands on this machine. Each host is a home folder. Hosts whose names start with "down" are down.
echo "$@" >> {homes}/calls
while [ "$1" != -- ]; do shift; done
case $2 in down*) echo "ssh: connect to host $2 port 22: Connection refused" >&2; exit 255;; esac
export HOME={homes}/"$2" SSH_CONNECTION="192.0.2.254 1 192.0.2.${{2#h}} 22"
mkdir -p "$HOME"
cd "$HOME"
echo "Welcome to $2"
exec sh -c "$3"
"""


@pytest.fixture
def make_cluster():
    """A cluster of hosts, by its strategy, hosts and roles."""

    def make(strategy="parameter_server", *, hosts=("h1", "h2", "h3"), ssh=None, **roles):
        given = {role: {"replicas": spec} if isinstance(spec, int) else spec for role, spec in roles.items()}
        spec = {"strategy": strategy, "launcher": "ssh", "roles": given, "ssh": ssh}
        return Cluster.model_validate({**spec, "hosts": list(hosts) if hosts else None})

    return make


@pytest.fixture
def fake_ssh(tmp_path, monkeypatch):
    """Puts the stand-in on PATH, and returns the folder of homes."""
    homes, programs = tmp_path / "homes", tmp_path / "bin"
    homes.mkdir()
    programs.mkdir()
    program = programs / "ssh"
    program.write_text(SSH.format(homes=homes))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    return homes
