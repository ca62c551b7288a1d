"""The network of a run's tasks: a private one cannot be reached from outside, and a refused one is reported."""

import errno
import os
import socket
import subprocess
import sys

import pytest

from tests.launch.local.test_launcher import python
from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.process import network, network_namespace
from tfdist_cli.launch.process.network import HOST, network_of
from tfdist_cli.launch.supervisor.events import Exited, NetworkReady, Output, SignalReceived
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import make_plan
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.task_id import TaskId

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
NOBODY = 65534
W0, W1 = TaskId("worker", 0), TaskId("worker", 1)


def plan_of(tmp_path, recipe=None, **keys):
    keys = {"strategy": "multi_worker_mirrored", "roles": {"worker": {"replicas": 2}}} | keys
    cluster = Cluster.model_validate(keys)
    addresses = {task: cluster.address(task) for task in cluster.tasks}
    return make_plan(cluster, recipe, addresses=addresses, run_dir=tmp_path, machine=Machine(2), command=("true",))


RECIPE = Recipe.model_validate({"module": "m"})
IN_BUCKET = Recipe.model_validate({"module": "m", "checkpoint": {"every_steps": 1, "dir": "s3://bucket/run"}})
LAN = [f"{host}:2222" for host in ("10.1.2.3", "10.1.2.4")]


@pytest.fixture
def refused(monkeypatch):
    """A system that allows no namespace."""

    def refuse(ports, kept):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(network, "_make", refuse)


def kernel_allows(user):
    """Whether the kernel gives a user a network namespace, or one with a namespace of users: asked without our code."""
    code = (
        f"import ctypes, os; kernel = ctypes.CDLL(None); os.setuid({user}); "
        f"os._exit(bool(kernel.unshare({CLONE_NEWNET}) and kernel.unshare({CLONE_NEWUSER | CLONE_NEWNET})))"
    )
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def allowed():
    """Skips a test where there can be no private network."""
    if not (sys.platform.startswith("linux") and kernel_allows(os.getuid())):
        pytest.skip("this kernel allows this user no network namespace")


@pytest.mark.usefixtures("refused")
def test_what_is_asked_for_and_refused_is_an_error(tmp_path):
    with raises(UsageError, "no-private-network") as refused:
        network_of(plan_of(tmp_path, network="private")).__enter__()
    assert os.strerror(errno.EPERM) in refused.value.message
    assert "docs/how-to/secure-ports.md" in (refused.value.hint or "")


@pytest.mark.usefixtures("refused")
def test_a_recipe_whose_network_is_open_is_reported_once_with_what_to_do():
    with network_of(plan_of("run", RECIPE)) as (made, ready):
        assert made == HOST
        assert ready
        assert not ready.private
        assert "Operation not permitted" in ready.text
        assert "docs/how-to/secure-ports.md" in ready.text


@pytest.mark.parametrize(
    ("keys", "recipe", "warns"),
    [
        ({"network": "host"}, RECIPE, False),
        ({"network": "host"}, None, False),
        ({}, None, True),
        ({}, IN_BUCKET, True),
        ({"strategy": "single", "roles": {"chief": {}}}, RECIPE, False),
        ({"roles": {"worker": {"hosts": LAN}}}, RECIPE, False),
    ],
    ids=["host", "host for a program", "a program", "a bucket", "one process", "other addresses"],
)
def test_this_machines_network(keys, recipe, warns):
    with network_of(plan_of("run", recipe, **keys)) as (made, ready):
        assert made == HOST
        assert bool(ready) == warns


@pytest.mark.usefixtures("allowed")
def test_a_recipe_has_a_network_of_its_own():
    with network_of(plan_of("run", RECIPE)) as (made, ready):
        assert made != HOST
        assert ready
        assert ready.private


MEET = """
    import json, os, socket, sys
    config = json.loads(os.environ["TF_CONFIG"])
    addresses = [each.rpartition(":") for each in config["cluster"]["worker"]]
    ports = [int(port) for _, _, port in addresses]
    print(*(name for _, name in socket.if_nameindex()), flush=True)
    if config["task"]["index"] == 0:
        listener = socket.create_server(("", ports[0]))
        print("listens", flush=True)
        print(listener.accept()[0].recv(10).decode(), flush=True)
        listener.accept()
    else:
        while True:
            try:
                socket.create_connection(("localhost", ports[0])).sendall(b"met")
                break
            except ConnectionRefusedError:
                pass
"""


@pytest.mark.usefixtures("allowed")
def test_tasks_meet_where_no_process_else_reaches_them(run, free_port):
    ports = [free_port(), free_port()]
    hosts = {"hosts": [f"localhost:{port}" for port in ports]}
    keys = {"strategy": "multi_worker_mirrored", "roles": {"worker": hosts}, "network": "private"}

    def react(event, state):
        if isinstance(event, Output) and "met" in event.lines:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("localhost", ports[0]), timeout=5)
            return [SignalReceived(15)]
        return ()

    outcome = run(*python(MEET), cluster=Cluster.model_validate(keys), react=react)
    assert outcome.lines(W0) == ["lo", "listens", "met"]
    assert outcome.lines(W1) == ["lo"]
    assert outcome.of(NetworkReady) == [NetworkReady(private=True, text=network.PRIVATE)]


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(("program", "code"), [("/nonexistent/program", 127), ("/", 126)])
def test_a_program_that_cannot_be_started_in_it(run, program, code):
    keys = {"strategy": "multi_worker_mirrored", "roles": {"worker": {}}, "network": "private"}
    outcome = run(program, cluster=Cluster.model_validate(keys))
    assert outcome.of(Exited) == [Exited(W0, code)]
    assert f"tfdist: {program} cannot be started" in outcome.logs[W0, "stderr"].decode()


@pytest.mark.usefixtures("allowed")
def test_a_port_in_it_is_kept_for_its_task(tmp_path):
    hosts = {"hosts": ["localhost:34567", "localhost:34568"]}
    with network_of(plan_of(tmp_path, network="private", roles={"worker": hosts})) as (made, _):
        code = "import socket; socket.socket().bind(('', 34567))"
        tried = subprocess.run(
            [*made.enter, sys.executable, "-c", code],
            pass_fds=made.files,
            capture_output=True,
            text=True,
            check=False,
        )
    assert os.strerror(errno.EADDRINUSE) in tried.stderr


def test_a_private_network_has_no_other_addresses():
    keys = {"strategy": "multi_worker_mirrored", "roles": {"worker": {"hosts": LAN}}, "network": "private"}
    with pytest.raises(ValueError, match=r"worker:0 has 10\.1\.2\.3:2222"):
        Cluster.model_validate(keys)


def test_a_user_without_rights_gets_a_namespace_of_users():
    """What root may do without one, another user does in one, in which it is itself."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    if not kernel_allows(NOBODY):
        pytest.skip("this kernel allows it to root alone")
    code = (  # which may not read Python's files
        "import ctypes, fcntl, os, pathlib, socket, struct, sys; "
        f"script = pathlib.Path({network_namespace.__file__!r}).read_text(); os.setgid({NOBODY}); os.setuid({NOBODY}); "
        "ctypes.CDLL(None).prctl(4, 1, 0, 0, 0); "  # PR_SET_DUMPABLE, which a change of the user ends
        "sys.argv = ['namespace', 'make', '2222']; exec(script)"
    )
    made = subprocess.run([sys.executable, "-c", code], input="", capture_output=True, text=True, check=True)
    assert made.stdout == "ok 1\n"


@pytest.fixture
def free_port():
    """Ports that are free, as far as can be known."""

    def choose():
        with socket.socket() as bound:
            bound.bind(("", 0))
            return bound.getsockname()[1]

    return choose


BIND = "import socket, sys; socket.socket().bind(('', int(sys.argv[1])))"


@pytest.mark.usefixtures("allowed")
def test_further_ports_are_reserved_in_a_private_network():
    with network_of(plan_of("run", RECIPE)) as (made, _):

        def bind(port):
            command = [*made.enter, sys.executable, "-c", BIND, str(port)]
            return subprocess.run(command, pass_fds=made.files, stderr=subprocess.DEVNULL, check=False).returncode

        assert bind(23481) == 0
        made.reserve({23481, 23482})
        made.reserve({23482})  # once more
        assert [bind(port) for port in (23481, 23482, 23483)] == [1, 1, 0]
    HOST.reserve({23481})  # this machine's network has no reservations of its own
