"""The launcher and its agents, with a stand-in for `ssh`; tests/cluster/test_ssh.py has real hosts."""

import json
import logging
import re
import shlex
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.support import profiled
from tests.support.codes import raises
from tests.support.outcome import OneJoin, Outcome
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.run.directory import RunDir
from tfdist_cli.launch.ssh.launcher import SshLauncher, _one_line, held_again
from tfdist_cli.launch.ssh.link import HostLost
from tfdist_cli.launch.ssh.placement import place
from tfdist_cli.launch.ssh.run import LOST
from tfdist_cli.launch.supervisor.events import Exited, Output, RecordReceived, RequestReceived, SignalReceived, Started
from tfdist_cli.launch.supervisor.state import JobPolicy, Timeouts
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import make_plan
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.sections.role_spec import RestartSpec
from tfdist_cli.spec.task_id import TaskId

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)


class Ran(Outcome):
    """The outcome of a run on hosts."""

    plan: Any = None
    addresses: Any = None


@pytest.fixture
def run(fake_ssh, tmp_path, monkeypatch):
    """Runs a command in every task of a cluster, with the current folder copied."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(
        cluster,
        *command,
        react=lambda event, state: None,
        restarts=0,
        joins=None,
        run_dir=tmp_path / "here" / "runs" / "x",
    ):
        launcher, ran = SshLauncher(), Ran(react)
        launcher.check(cluster, command)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "launcher.lock").touch()

        def own(start):
            return {"TFDIST_TASK_DIR": str(run_dir / start.task.slug), "N": str(start.attempt)}

        with launcher.reserve(cluster) as addresses:
            common = {"addresses": addresses, "run_dir": run_dir, "machine": Machine(1), "command": command}
            plan = make_plan(cluster, None, machines=launcher.machines(), **common)
            extended = make_plan(joins[1], None, machines=launcher.machines(), **common) if joins else None
            handler = OneJoin(joins[0], extended) if joins else None
            ran.plan, ran.addresses = plan, addresses
            timeouts, policy = Timeouts(shutdown=0.5), {"worker": RestartSpec(policy="job")}
            rules = JobPolicy(plan.strategy, timeouts=timeouts, max_restarts=restarts, restarts=policy)
            ran.run(launcher, plan, rules, own, handler)
        return ran

    return run


def is_alive(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def mirrored(make_cluster, hosts=("h1", "h2"), **ssh):
    return make_cluster("multi_worker_mirrored", hosts=hosts, worker=2, ssh={"python": sys.executable, **ssh})


@pytest.mark.slow
def test_tasks_run_on_their_hosts(run, make_cluster, fake_ssh):
    Path("a'; b.txt").write_text("copied")
    script = """
        printf 'out\\n\\377b\\n'; printf 'err\\n\\036{"kind":"state","state":"training"}\\nlast' >&2
        cat *.txt; echo; pwd; echo $TFDIST_RUN_DIR; echo "$TF_CONFIG"; [ -d $TFDIST_TASK_DIR ] && echo $N
        command -v python
        exit 3
    """
    ran = run(mirrored(make_cluster), "sh", "-c", script)
    assert ran.state.exit_code == 3
    assert ran.logs[W0, "stderr"] == b"err\nlast"
    assert RecordReceived(W0, {"kind": "state", "state": "training"}) in ran.events
    out, strange, copied, folder, run_dir, config, attempt, python = ran.lines(W0)
    assert (out, strange, copied, attempt) == ("out", "\ufffdb", "copied", "1")
    assert folder.startswith(f"{fake_ssh}/h1/.tfdist/sync/cluster-")
    assert folder.endswith("/here")
    run_id = (ran.plan.run_dir / "hosts_id").read_text().strip()
    assert run_dir == f"{fake_ssh}/h1/.tfdist/runs/x/{run_id}"
    assert [address.split(":")[0] for address in json.loads(config)["cluster"]["worker"]] == ["192.0.2.1", "192.0.2.2"]
    assert Path(python).parent == Path(sys.executable).parent
    assert ran.plan.as_json()["tasks"][1]["address"].startswith("192.0.2.2:")
    assert re.findall(r"\d+(?= of| bytes)|h\d:", ran.lines(W1, "stderr")[0]) == ["1", "6", "h2:"]


@pytest.mark.slow
def test_a_profile_is_copied_before_it_is_reported(run, make_cluster, fake_ssh):
    """In pieces: it is larger than one."""
    cluster = make_cluster("single", hosts=["h1"], chief=1, ssh={"python": sys.executable})
    found = []

    def react(event, state):
        if isinstance(event, RecordReceived) and event.record["kind"] == "profiled":
            found.append((ran_dir / profiled.ORDER.path).read_bytes())
        return profiled.order_when_ready(TaskId("chief"))(event, state)

    ran_dir = Path("runs/x").absolute()
    ran = run(cluster, "sh", "-c", profiled.SCRIPT, react=react)
    assert ran.state.exit_code == 0
    assert found == [profiled.expected()]
    assert [path.name for path in (ran_dir / profiled.ORDER.path).parent.iterdir()] == ["worker-0.xplane.pb"]


@pytest.mark.slow
def test_a_worker_joins_on_a_host_that_had_no_task(run, make_cluster):
    def cluster(workers):
        roles = {"chief": 1, "ps": 1, "worker": {"replicas": workers, "max": 2}}
        return make_cluster("parameter_server", hosts=["h1", "h2", "h3"], ssh={"python": sys.executable}, **roles)

    def react(event, state):
        match event:
            case Output(task, _, lines) if task == W0 and "up" in lines:
                yield RequestReceived()
            case Output(task, _, lines) if task == W1 and "up" in lines:
                yield SignalReceived(signal.SIGTERM)

    script = 'echo "$TF_CONFIG"; echo "$TFDIST_JOIN_ADDRESS"; echo up; exec sleep 1000'
    ran = run(cluster(1), "sh", "-c", script, react=react, joins=(W1, cluster(2)))
    assert (ran.state.exit_code, ran.state.attempt) == (143, 1)
    config, control, _ = ran.lines(W1)
    addresses = {str(task): str(address) for task, address in ran.addresses.items()}
    assert json.loads(config)["cluster"]["worker"] == [addresses["worker:0"], addresses["worker:1"]]
    chief, port = addresses["chief:0"].split(":")
    assert control == f"{chief}:{int(port) + 1}"
    assert len({address.split(":")[0] for address in addresses.values() if address != addresses["chief:0"]}) == 3


@pytest.mark.slow
def test_shared_files_are_not_copied(run, make_cluster, fake_ssh):
    ran = run(mirrored(make_cluster, shared=True), "sh", "-c", "pwd; echo $TFDIST_RUN_DIR; ls $TFDIST_RUN_DIR")
    folder, run_dir, *files = ran.lines(W1)
    assert (folder, run_dir) == (str(Path.cwd()), str(ran.plan.run_dir))
    assert "cluster.yaml" in files
    assert not list(fake_ssh.glob("*/.tfdist"))
    assert not (ran.plan.run_dir / "hosts_id").exists()


@pytest.mark.slow
def test_only_the_same_run_continues_in_its_directory_on_the_hosts(run, make_cluster, tmp_path):
    """Runs are identified by the directory here, which may be in another project or created again."""
    cluster = make_cluster("multi_worker_mirrored", hosts=["h1"], worker=1, ssh={"python": sys.executable})
    script = 'cd "$TFDIST_RUN_DIR"; ls checkpoint 2>/dev/null || echo none; touch checkpoint; [ $N = $1 ]'
    other = tmp_path / "other" / "runs" / "x"

    def launched(attempts=1, **more):
        return run(cluster, "sh", "-c", script, "sh", str(attempts), restarts=attempts - 1, **more).lines(W0)

    assert launched(2) == ["none", "checkpoint"]
    assert launched() == ["checkpoint"], "the run continues"
    assert launched(run_dir=other) == ["none"], "another run"
    assert launched(run_dir=other) == ["checkpoint"]
    shutil.rmtree(other)
    assert launched(run_dir=other) == ["none"], "a new run after a removal"


@pytest.mark.slow
def test_tf_config_has_the_reserved_addresses(run, make_cluster):
    """Tasks of one role are spread over hosts. A role's list of addresses is sorted by index."""
    cluster = make_cluster(hosts=["h1", "h2"], chief=1, ps=2, worker=4, ssh={"python": sys.executable})
    ran = run(cluster, "sh", "-c", 'echo "$TF_CONFIG"')
    planned = {str(task.task): str(task.address) for task in ran.plan.tasks}
    assert tuple(ran.addresses) == cluster.tasks, "the run's cluster file uses this order"
    config = json.loads(ran.plan.tasks[0].env["TF_CONFIG"])["cluster"]
    assert {f"{role}:{index}": address for role in config for index, address in enumerate(config[role])} == planned
    hosts = {task: f"192.0.2.{host.address[1:]}" for task, host in place(cluster).items()}
    assert {task: address.rpartition(":")[0] for task, address in planned.items()} == {
        str(task): host for task, host in hosts.items()
    }


@pytest.mark.slow
def test_a_recipe_is_read_from_its_copy(make_cluster, fake_ssh, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "digits.py").write_text("")
    cluster = mirrored(make_cluster).model_copy(update={"recipe": project / "recipe.yaml"})
    launcher = SshLauncher()
    launcher.check(cluster, ())
    with launcher.reserve(cluster) as addresses:
        run_dir = RunDir(tmp_path / "run", 1)
        resolved, recipe = run_dir.resolve(cluster, Recipe(module="digits", module_dir=project), addresses)
        plan = make_plan(resolved, recipe, addresses=addresses, run_dir=run_dir.path, machine=Machine(1))
        plans = [launcher._host_run(plan, host).agent_plan(plan) for host in launcher._connected]
    for host, sent in zip(("h1", "h2"), plans, strict=True):
        folder = Path(yaml.safe_load(sent["files"]["recipe.yaml"])["module_dir"])
        assert folder.is_relative_to(fake_ssh / host / ".tfdist" / "sync")
        assert (folder / "digits.py").exists()
        assert sent["start"] == str(folder)
        assert sent["tasks"][0]["argv"][-2:] == [f"{fake_ssh}/{host}/.tfdist/runs/run/ID/cluster.yaml", "--planned"]


@pytest.mark.slow
def test_the_progress_of_a_copy_is_logged(run, make_cluster, monkeypatch, caplog):
    monkeypatch.setattr("tfdist_cli.launch.ssh.launcher._PROGRESS_SECONDS", 0.0)
    Path("large").write_bytes(bytes(3_000_000))
    with caplog.at_level(logging.INFO, "tfdist.launch"):
        run(mirrored(make_cluster), "true")
    lines = [message for message in caplog.messages if "h2" in message]
    assert lines == [f"copying to h2: {size} MB of 3 MB" for size in ("1.05", "2.1", "3")]
    with caplog.at_level(logging.INFO, "tfdist.launch"):
        line = run(mirrored(make_cluster), "true").lines(W1, "stderr")[0]
    assert re.findall(r"\d+(?= of| bytes)|h\d:", line) == ["0", "0", "h2:"]


@pytest.mark.slow
def test_a_folder_with_another_projects_files_is_refused(run, make_cluster, fake_ssh, tmp_path):
    def launched(folder):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "a.txt").write_text(folder)
        run(mirrored(make_cluster, sync=[tmp_path / folder], to="~/kept"), "true")

    launched("one")
    launched("one")
    with raises(UsageError, "folder-has-other-files") as caught:
        launched("two")
    assert re.search(r"^h1: .*/kept\b.*/one\b.*/two\b", caught.value.message)
    assert "to: …" in str(caught.value.hint)
    assert (fake_ssh / "h1" / "kept" / "one" / "a.txt").exists()
    assert not (fake_ssh / "h1" / "kept" / "two").exists()


@pytest.mark.slow
def test_a_signal_reaches_every_host_and_remaining_tasks_are_killed(run, make_cluster):
    code = "trap 'echo signalled; trap \"\" TERM' TERM; echo ready $$; while :; do sleep 0.1; done"
    pids = []

    def react(event, state):
        if isinstance(event, Output) and event.lines[0].startswith("ready"):
            pids.append(int(event.lines[0].split()[1]))
            return (SignalReceived(signal.SIGTERM),) if len(pids) == 2 else ()
        return ()

    ran = run(mirrored(make_cluster), "sh", "-c", code, react=react)
    assert ran.state.exit_code == 143
    assert "signalled" in ran.lines(W1)
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.slow
def test_a_lost_connection_is_the_cause_and_the_host_is_connected_again(run, make_cluster):
    """The agent of a host is killed. Its watchdog kills the task, and the restart connects again."""
    started = []

    def react(event, state):
        if isinstance(event, Started):
            started.append(event)
            if event.task == W1 and len(started) <= 2:
                psutil.Process(event.pid).parent().kill()

    ran = run(mirrored(make_cluster), "sh", "-c", "[ $N = 2 ] || exec sleep 1000", react=react, restarts=1)
    assert ran.state.exit_code == 0
    [loss] = ran.state.lost_tasks
    assert (loss.task, loss.ended.code) == (W1, 255)
    assert " h2 was lost" in loss.ended.cause
    assert not [event.pid for event in started if is_alive(event.pid)]


@pytest.mark.slow
def test_no_metrics_are_lost_over_a_lost_connection(run, make_cluster, fake_ssh):
    """A line that is written during the loss is received after the reconnection."""
    hosts = [{"address": "h1", "reachable_as": "127.0.0.1"}]
    cluster = make_cluster("multi_worker_mirrored", hosts=hosts, worker=1, ssh={"python": sys.executable})
    script = 'cd "$TFDIST_RUN_DIR"; echo $N >> metrics.jsonl; [ $N = 2 ] || { echo $$; exec sleep 1000; }'

    def of_the_host():
        [metrics] = fake_ssh.glob("h1/.tfdist/runs/x/*/metrics.jsonl")
        return metrics

    def react(event, state):
        if isinstance(event, Output) and (event.task, event.stream) == (W0, "stdout"):
            psutil.Process(int(event.lines[0])).parent().kill()
        elif isinstance(event, Exited) and event.code == LOST:
            with of_the_host().open("a") as file:
                file.write("meanwhile\n")

    ran = run(cluster, "sh", "-c", script, react=react, restarts=1)
    assert ran.state.exit_code == 0
    assert (ran.plan.run_dir / "metrics.jsonl").read_text() == of_the_host().read_text() == "1\nmeanwhile\n2\n"


@pytest.mark.slow
def test_a_flood_of_output_is_received_completely(run, make_cluster):
    ran = run(make_cluster("single", hosts=["h1"], chief=1), "seq", "1", "300000")
    assert ran.lines(TaskId("chief")) == [str(number) for number in range(1, 300_001)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "error", "code", "values", "hint"),
    [
        (["h1", "down1"], HostLost, "ssh-host-unreachable", ["down1", "Connection refused"], "`ssh down1`"),
        ([{"address": "h1", "python": "/no/python"}], UsageError, "tfdist-missing", ["/no/python", "h1"], "python: …"),
        (["h1", "127.0.0.2"], UsageError, "address-not-reachable", ["worker:1", "127.0.0.2"], "reachable_as: NAME"),
        (["h1", "localhost"], UsageError, "address-not-reachable", ["worker:1", "localhost"], "NAME"),
        (
            ["h1", {"address": "h2", "reachable_as": "localhost"}],
            UsageError,
            "address-not-reachable",
            ["h2", "localhost"],
            "NAME",
        ),
    ],
)
def test_hosts_that_cannot_run_tasks(run, make_cluster, hosts, error, code, values, hint):
    with raises(error, code) as caught:
        run(mirrored(make_cluster, hosts), "true")
    assert all(value in caught.value.message for value in values)
    assert hint in str(caught.value.hint)


def test_this_machine_may_be_one_of_the_hosts_under_a_name_that_all_resolve(make_cluster, fake_ssh):
    SshLauncher().check(mirrored(make_cluster, ["h1", {"address": "localhost", "reachable_as": "h9"}]), ("true",))


def test_a_machine_without_ssh(make_cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises(UsageError, "program-not-found") as caught:
        SshLauncher().check(mirrored(make_cluster), ("true",))
    assert "openssh-client" in str(caught.value.hint)


def test_render_prints_the_commands_of_a_start(make_cluster, fake_ssh, tmp_path, monkeypatch):
    folder = tmp_path / "a'; echo foo ü"
    folder.mkdir()
    monkeypatch.chdir(folder)
    cluster, launcher = mirrored(make_cluster), SshLauncher()
    addresses = launcher.preview_addresses(cluster)
    assert [str(address) for address in addresses.values()] == ["h1:0", "h2:0"]
    plan = make_plan(
        cluster,
        None,
        addresses=addresses,
        run_dir=folder / "runs/x",
        machine=Machine(1),
        command=("echo", "it's; here"),
    )
    first, ssh, copied, task, *others = launcher.render(plan).splitlines()
    assert first == "# h1: worker:0"
    assert shlex.split(ssh)[0] == "ssh"
    assert shlex.split(ssh)[-2] == "h1"
    assert copied.startswith("# copies ")
    assert shlex.quote(str(folder)) in copied
    assert shlex.split(task)[-2:] == ["echo", "it's; here"]
    assert "TFDIST_RUN_DIR=~/.tfdist/runs/x/ID" in shlex.split(task)
    assert others[0] == "# h2: worker:1"
    assert not list(fake_ssh.iterdir())
    assert "\n" not in _one_line("a\nb")


def test_a_host_holds_ports_under_an_address_of_its_own(make_cluster):
    """Others may reach it through another machine's address, which none of its interfaces has."""
    outside = Address("203.0.113.5", 4000)
    assert held_again(mirrored(make_cluster), W0, outside) == Address("127.0.0.1", 4000)
    named = make_cluster("multi_worker_mirrored", worker={"hosts": ["h1:4000", "h2:4000"]})
    assert held_again(named, W0, outside) == outside
