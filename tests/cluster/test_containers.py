"""A cluster of containers, started as in docs/how-to/containers.md from the image TFDIST_TEST_IMAGE."""

import os
import subprocess
import time
import uuid

import pytest

from tests.support.lab import containers

IMAGE = os.environ.get("TFDIST_TEST_IMAGE", "")
ENGINE = containers.engine()
SERVERS = {"ps0": "ps:0", "worker0": "worker:0", "worker1": "worker:1"}
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("engine"),
    pytest.mark.skipif(not (IMAGE and ENGINE), reason="no container engine, or TFDIST_TEST_IMAGE names no image"),
]


def engine(*arguments, timeout=300):
    return subprocess.run([ENGINE, *arguments], capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def network():
    name = f"tfdist-{uuid.uuid4().hex[:8]}"
    assert engine("network", "create", "--internal", name).returncode == 0
    yield name
    engine("rm", "--force", "--volumes", *(f"{name}-{host}" for host in ("chief", *SERVERS)))
    engine("volume", "rm", "--force", name)
    engine("network", "rm", name)


def start(network, host, task, *arguments):
    """Starts a task with the host name `host` in the network, and returns the container's name."""
    name = f"{network}-{host}"
    options = ["--name", name, "--network", network, "--network-alias", host, "--volume", f"{network}:/tfdist/runs"]
    command = ["role", "--task", task, "--cluster", "configs/role_containers.yaml", *arguments]
    started = engine("run", "--detach", *options, IMAGE, *command)
    assert started.returncode == 0, started.stderr
    return name


def exit_code(name):
    engine("wait", name)
    return int(engine("inspect", "--format", "{{.State.ExitCode}}", name).stdout)


def output(name):
    done = engine("logs", name)
    return done.stdout + done.stderr


def healthy(name):
    """Whether the health check of a container passes: its server responds."""
    return engine("exec", name, "python", "-m", "tfdist_cli.task.health").returncode == 0


def wait_for(name, condition, seconds=120):
    """Waits until a condition on a container's name holds. No event announces it outside of the container."""
    deadline = time.monotonic() + seconds
    while not condition(name):
        assert time.monotonic() < deadline, output(name)
        time.sleep(0.5)


def says(text):
    return lambda name: text in output(name)


@pytest.mark.rotates(5, 1)
def test_four_containers_train_and_exit_with_0(network):
    servers = [start(network, host, task) for host, task in SERVERS.items()]
    chief = start(network, "chief", "chief")
    assert exit_code(chief) == 0, output(chief)
    assert [exit_code(name) for name in servers] == [0, 0, 0]
    scores = [line for line in output(chief).splitlines() if "test:" in line]
    assert float(scores[-1].split("accuracy")[1].split()[0]) >= 0.96
    assert engine("run", "--rm", "--entrypoint", "id", IMAGE, "--user").stdout.strip() != "0"


@pytest.mark.rotates(5, 0)
def test_sigterm_saves_and_the_next_chief_continues(network):
    servers = [start(network, host, task) for host, task in SERVERS.items()]
    chief = start(network, "chief", "chief", "--set", "train.epochs=500")
    wait_for(chief, says("epoch 2/"))
    assert all(map(healthy, servers))
    engine("stop", "--time", "60", chief)
    assert exit_code(chief) == 143, output(chief)
    assert [exit_code(name) for name in servers] == [143, 143, 143]
    engine("rm", chief, *servers)
    for host, task in SERVERS.items():
        start(network, host, task)
    chief = start(network, "chief", "chief")
    wait_for(chief, says("resuming from"))
    assert exit_code(chief) == 0, output(chief)


def test_an_unused_server_exits_promptly_on_sigterm(network):
    ps = start(network, "ps0", "ps:0")
    wait_for(ps, says("host names"))  # it has loaded TensorFlow, and needs the chief's
    before = time.monotonic()
    engine("stop", "--time", "60", ps)
    assert exit_code(ps) == 143, output(ps)
    assert time.monotonic() - before < 20
