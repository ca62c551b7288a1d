"""What is refused before any container is started, with stand-ins for the engines."""

import pytest

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


@pytest.mark.parametrize(("wanted", "named"), [("auto", "podman or docker"), ("docker", "docker")])
def test_no_engine(engine, wanted, named):
    engine("docker" if wanted == "auto" else "podman", "exit 0")
    if wanted == "auto":
        ComposeLauncher().check(cluster(), ())
    else:
        with pytest.raises(UsageError, match=f"no {named} on PATH"):
            ComposeLauncher().check(cluster({"engine": wanted}), ())


def test_no_image(engine):
    engine("podman", 'echo first; echo "no such image: $5" >&2; exit 125')
    with pytest.raises(UsageError, match="podman gives no image 'mine': no such image: mine") as caught:
        ComposeLauncher().check(cluster({"image": "mine"}), ())
    assert "podman build -t mine" in str(caught.value.hint)


def test_podman_comes_before_docker(engine):
    engine("podman", "exit 0")
    engine("docker", "exit 1")
    ComposeLauncher().check(cluster(), ())


def test_hosts_of_a_role_are_refused():
    with pytest.raises(UsageError, match=r"roles.worker.hosts names machines") as caught:
        ComposeLauncher().preview_addresses(cluster(hosts=["a", "b"]))
    assert caught.value.hint == "write 'replicas: 2' in its place"


def test_addresses_are_the_containers_names():
    with ComposeLauncher().reserve(cluster(replicas=2)) as addresses:
        assert [str(address) for address in addresses.values()] == ["worker-0:2222", "worker-1:2222"]
