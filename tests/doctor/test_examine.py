"""Looking at hosts, all of which are this machine."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from importlib.metadata import version

import psutil
import pytest

from tests.support.codes import raises
from tfdist_cli.doctor import probe
from tfdist_cli.doctor.examine import examine
from tfdist_cli.doctor.findings import findings_of
from tfdist_cli.doctor.sites import HERE, Site, sites_of
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.ssh.command import NO_PYTHON, python_command
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.sections.ssh import HostSpec
from tfdist_cli.spec.task_id import TaskId

WORKER, PS = TaskId("worker"), TaskId("ps")
TENSORFLOW = probe.installed(probe.PACKAGES["tensorflow"])
CLUSTER = Cluster.model_validate({"strategy": "single", "roles": {"chief": {}}})


def look(*sites):
    return asyncio.run(examine(sites, [], imports=False))


class Script(Site):
    """A host whose Python runs something else than the probe."""

    def python(self, arguments):
        return [sys.executable, "-c", self.folders["script"], *arguments]


def site(name, *tasks, kind=Site, **folders):
    return kind(name, {task: Address("127.0.0.1", 0) for task in tasks}, folders, tasks)


def test_all_reach_all():
    seen = look(site("a", WORKER), site("b", PS))
    assert [[(reach.task, reach.error, reach.right) for reach in one.connections] for one in seen] == [
        [(WORKER, "", True), (PS, "", True)]
    ] * 2
    assert all(abs(one.clock[0]) < 1 for one in seen)
    assert seen[0].ports[WORKER]["port"] == seen[0].connections[0].address.port


def test_a_busy_port_is_not_tried():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        [one] = look(Site("a", {PS: Address("127.0.0.1", port), WORKER: Address("127.0.0.1", 0)}, {}, (PS, WORKER)))
    assert one.ports[PS]["error"] == "EADDRINUSE"
    assert [reach.task for reach in one.connections] == [WORKER]
    assert [finding.code for finding in findings_of([one], trains=False)] == ["busy-port"]


class Bare(Site):
    """A host with a Python of its own, which a folder named in `folders` has."""

    def python(self, arguments):
        return [f"{self.folders['venv']}/bin/python", *arguments]


def test_an_interpreter_without_tensorflow_and_one_with_another(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name in ("bare", "other"):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / name)], check=True)
    [packages] = (tmp_path / "other").glob("lib/python*/site-packages")
    for package, number in (
        ("tensorflow", "2.99.0"),
        ("tfdist-cli", version("tfdist-cli")),
        ("keras", version("keras")),
    ):
        folder = packages / f"{package.replace('-', '_')}-{number}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n")
    monkeypatch.chdir(tmp_path)
    chief = TaskId("chief")
    bare = site("bare", PS, kind=Bare, venv=str(tmp_path / "bare"))
    other = site("other", WORKER, kind=Bare, venv=str(tmp_path / "other"))
    found = findings_of(look(site("here", chief), bare, other))
    errors = {(finding.code, finding.place): finding for finding in found if finding.level == "error"}
    assert set(errors) == {("no-tensorflow", "bare"), ("wrong-version", "other")}
    assert errors["no-tensorflow", "bare"].fix.startswith(f"{tmp_path}/bare/bin/python -m pip install")
    assert errors["wrong-version", "other"].message == f"TensorFlow is 2.99.0, and {TENSORFLOW} on here"
    assert errors["wrong-version", "other"].fix == f"give both the same: pip install 'tensorflow=={TENSORFLOW}'"


WRONG_CLOCK = """
import sys, time
from tfdist_cli.doctor import probe
print("welcome")
sys.stdin.buffer.read(int(sys.argv[-1]))
probe.main(clock=lambda: time.time() + 100)
"""


def test_a_clock_that_is_off_and_a_login_that_greets():
    [one] = look(site("a", PS, kind=Script, script=WRONG_CLOCK))
    assert one.no_answer is None
    assert one.clock[0] == pytest.approx(100, abs=1)


def test_a_host_that_ends_keeps_no_other_from_being_looked_at():
    seen = look(site("a", kind=Script, script="import sys; sys.exit('no such luck')"), site("b", PS))
    assert (seen[0].no_answer.code, seen[0].no_answer.stderr) == (1, "no such luck")
    assert seen[1].connections[0].right


KILLED = """
import asyncio, os, signal
from tfdist_cli.doctor.examine import ProbeSession
from tfdist_cli.doctor.sites import Site

async def be_killed():
    async with ProbeSession(Site("a")) as session:
        await session.ask({"do": "listen", "ports": {"ps:0": 0}, "token": ""})
        print(session._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(be_killed())
"""


@pytest.mark.slow
def test_a_probe_ends_with_the_doctor():
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(killed.stdout)).wait(20)


def test_no_ssh(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with raises(UsageError, "program-not-found"):
        look(Site("far", ssh=(CLUSTER, HostSpec(address="far"))))


def test_sites():
    roles = {
        "chief": {"hosts": ["127.0.0.1:1"]},
        "worker": {"hosts": ["10.255.0.7:1", "10.255.0.7:2"]},
        "ps": {"hosts": ["localhost:3"]},
        "evaluator": {"hosts": ["10.255.0.8"]},
    }
    cluster = Cluster.model_validate({"strategy": "parameter_server", "roles": roles, "run_dir": "/data/runs"})
    recipe = Recipe.model_validate({"module": "m", "checkpoint": {"every_steps": 5, "dir": "/data/ck"}})
    here, seventh, eighth = sites_of(cluster, recipe, "/here/runs")
    assert (here.name, here.remote, seventh.remote) == (HERE, False, True)
    assert {str(task): address.port for task, address in here.ports.items()} == {"chief:0": 1, "ps:0": 3}
    assert here.folders == eighth.folders == {"run directories": "/data/runs", "checkpoints": "/data/ck"}
    assert [str(task) for task in seventh.tasks] == ["worker:0", "worker:1"]
    assert not seventh.folders
    assert not eighth.ports


def test_hosts_of_the_ssh_launcher():
    hosts = ["h1", {"address": "h2", "slots": 2, "python": "~/venv/bin/python", "reachable_as": "h2.internal"}]
    roles = {"chief": {}, "worker": {"replicas": 2}, "ps": {"hosts": ["h2:4000"]}}
    described = {"strategy": "parameter_server", "launcher": "ssh", "hosts": hosts, "roles": roles}
    here, first, second = sites_of(Cluster.model_validate(described), None, "/here/runs")
    assert (here.tasks, here.folders) == ((), {"run directories": "/here/runs"})
    assert first.folders == second.folders == {"run directories": "~/.tfdist/runs"}
    assert {str(task): str(address) for task, address in first.ports.items()} == {"chief:0": ":0", "worker:0": ":0"}
    assert second.ports == {TaskId("worker", 1): Address("h2.internal", 0), PS: Address("h2", 4000)}
    argv = second.python(("-c", "print('a b; $HOME')"))
    assert argv[0] == "ssh"
    assert argv[-2] == "h2"
    assert '"$HOME"/venv/bin/python' in argv[-1]


def test_any_python_will_do_where_none_has_tfdist(tmp_path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    for python, has_it in ((bare / "bin" / "python", False), (sys.executable, True)):
        host = HostSpec(address="h", python=str(python))
        command = python_command(host, ("-c", "import sys; print(sys.executable)"), without_tfdist=True)
        run = subprocess.run(["sh", "-c", command], cwd=tmp_path, env={}, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == str(python)
        own = python_command(host, ("-c", "pass"))
        assert subprocess.run(["sh", "-c", own], cwd=tmp_path, env={}, check=False).returncode == (
            0 if has_it else NO_PYTHON
        )


@pytest.mark.parametrize(
    ("launcher", "here"), [("local", 3), ("slurm", 0), ("kubernetes", 0), ("compose", 0), ("ray", 0)]
)
def test_tasks_that_run_elsewhere_need_nothing_of_this_machine(launcher, here):
    roles = {"chief": {}, "ps": {}, "worker": {"gpus": 1}}
    cluster = Cluster.model_validate({"strategy": "parameter_server", "launcher": launcher, "roles": roles})
    (site,) = sites_of(cluster, None, "runs")
    assert len(site.tasks) == here
