"""Checks before any container is started, with stand-ins for the engines."""

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.compose.launcher import ComposeLauncher
from tfdist_cli.spec.sections.cluster import Cluster


def cluster(compose=None, **worker):
    return Cluster.model_validate(
        {
            "strategy": "multi_worker_mirrored",
            "launcher": "compose",
            "roles": {"worker": worker},
            "compose": compose or {},
        }
    )


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Puts a stand-in of an engine on PATH, and nothing else."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(name, script):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return make


def test_no_engine(engine):
    with raises(UsageError, "program-not-found") as caught:
        ComposeLauncher().check(cluster(), ())
    assert "podman or docker" in caught.value.message
    engine("docker", "exit 0")
    ComposeLauncher().check(cluster(), ())
    with raises(UsageError, "program-not-found") as caught:
        ComposeLauncher().check(cluster({"engine": "podman"}), ())
    assert "docker" not in caught.value.message


def test_no_image(engine):
    engine("podman", 'echo first; echo "no such image: $5" >&2; exit 125')
    with raises(UsageError, "image-missing") as caught:
        ComposeLauncher().check(cluster({"image": "mine"}), ())
    assert "'mine'" in caught.value.message
    assert caught.value.message.endswith(": mine")
    assert "podman build -t mine" in str(caught.value.hint)


def test_podman_is_preferred_to_docker(engine):
    engine("podman", "exit 0")
    engine("docker", "exit 1")
    ComposeLauncher().check(cluster(), ())


def test_hosts_of_a_role_are_refused():
    with raises(UsageError, "hosts-not-supported") as caught:
        ComposeLauncher().preview_addresses(cluster(hosts=["a", "b"]))
    assert "roles.worker.hosts" in caught.value.message
    assert "'replicas: 2'" in str(caught.value.hint)


def test_addresses_are_the_containers_names():
    with ComposeLauncher().reserve(cluster(replicas=2)) as addresses:
        assert [str(address) for address in addresses.values()] == ["worker-0:2222", "worker-1:2222"]
