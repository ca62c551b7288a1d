"""The pods of a run, with a stand-in for kubectl that replays their statuses."""

import json
import signal
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.codes import raises
from tests.support.outcome import OneJoin, Outcome
from tfdist_cli.errors import TfdistError, UsageError
from tfdist_cli.launch.kubernetes import run as run_module
from tfdist_cli.launch.kubernetes.launcher import KubernetesLauncher
from tfdist_cli.launch.supervisor.events import Exited, Output, RecordReceived, RequestReceived, SignalReceived, Started
from tfdist_cli.launch.supervisor.state import JobPolicy, Timeouts
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.plan import make_plan
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.task_id import TaskId

CHIEF, WORKER, PS = TaskId("chief"), TaskId("worker"), TaskId("ps")
SERVES = [["running", 0], ["until_deleted", 143]]
TRAINS = [["running", 0], ["says", '\x1e{"kind":"state","state":"training"}'], ["says", "done"], ["exits", 0]]


class PodsOutcome(Outcome):
    def __init__(self, folder, react):
        super().__init__(react)
        self.folder = folder

    @property
    def calls(self):
        return (self.folder / "calls").read_text().splitlines()

    def pod(self, name):
        return yaml.safe_load((self.folder / f"Pod.{name}.yaml").read_text())


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "kubectl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("kubectl.py")} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("KUBECTL_FOLDER", str(tmp_path))
    monkeypatch.setenv("KUBECTL_SCRIPT", "{}")
    return tmp_path


def cluster(workers=1, **settings):
    roles = {"chief": {}, "worker": {"replicas": workers, "max": 2}, "ps": {}}
    kubernetes = {"kind": "pods", "namespace": "training", **settings}
    return Cluster.model_validate(
        {"name": "it", "strategy": "parameter_server", "roles": roles, "kubernetes": kubernetes}
    )


@pytest.fixture
def run(kubectl, monkeypatch):
    monkeypatch.setattr(run_module, "_EXIT_SECONDS", 0.05)

    def run(
        chief=SERVES, worker=SERVES, ps=SERVES, react=lambda event, state: (), restarts=0, request_handler=None, **more
    ):
        monkeypatch.setenv("KUBECTL_SCRIPT", json.dumps({"chief": chief, "worker": worker, "ps": ps, **more}))
        launcher = KubernetesLauncher()
        plan = plan_of(kubectl, cluster())
        own = {"TFDIST_RECORDS": "1", "TFDIST_LAUNCHER_PID": "1", "TFDIST_TASK_DIR": "/here"}
        rules = JobPolicy("parameter_server", timeouts=Timeouts(shutdown=20.0), max_restarts=restarts)
        return PodsOutcome(kubectl, react).run(launcher, plan, rules, lambda start: own, request_handler)

    return run


def plan_of(folder, wanted):
    addresses = KubernetesLauncher().preview_addresses(wanted)
    return make_plan(wanted, None, addresses=addresses, run_dir=folder, machine=Machine(2), command=("train",))


@pytest.mark.slow
def test_a_pod_joins_while_the_others_run(run, kubectl):
    second = TaskId("worker", 1)

    def react(event, state):
        match event:
            case Started(task) if task == WORKER:
                yield RequestReceived()
            case Started(task) if task == second:
                yield SignalReceived(15)

    handler = OneJoin(second, plan_of(kubectl, cluster(workers=2)))
    outcome = run(react=react, request_handler=handler)
    assert (outcome.state.exit_code, outcome.state.attempt) == (143, 1)
    [container] = outcome.pod("it-worker-1-4")["spec"]["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert json.loads(env["TF_CONFIG"])["cluster"]["worker"] == ["worker-0.it:2222", "worker-1.it:2222"]
    assert env["TFDIST_JOIN_ADDRESS"] == "chief-0.it:2223"
    policy = yaml.safe_load((kubectl / "NetworkPolicy.it.yaml").read_text())
    assert [each["port"] for each in policy["spec"]["ingress"][0]["ports"]] == [2222, 2223]


@pytest.mark.slow
def test_a_job_ends_with_its_chief(run):
    outcome = run(chief=TRAINS)
    assert outcome.state.exit_code == 0
    assert outcome.of(Exited)[0] == Exited(CHIEF, 0)
    assert {(event.task, event.code) for event in outcome.of(Exited)[1:]} == {(WORKER, 143), (PS, 143)}
    assert "done" in outcome.lines(stream=None)
    assert RecordReceived(CHIEF, {"kind": "state", "state": "training"}) in outcome.events
    stopped = [call for call in outcome.calls if call.startswith("delete pod ") and "--force" not in call]
    assert [call.rpartition(" ")[2] for call in stopped] == 2 * ["--grace-period=3600"], "as long as the launcher waits"
    assert outcome.calls[-1].split()[:2] == ["delete", "pods,services,configmaps,networkpolicies"]


@pytest.mark.slow
def test_pods_that_exit_after_the_chief_are_not_deleted_before(run, monkeypatch):
    monkeypatch.setattr(run_module, "_EXIT_SECONDS", 20.0)
    follows = [["running", 0], ["follows", ["it-chief-0-1", 0]]]
    outcome = run(chief=TRAINS, worker=follows, ps=follows)
    assert {event.code for event in outcome.of(Exited)} == {0}
    deleted = [call for call in outcome.calls if call.startswith("delete pod ")]
    assert len(deleted) == 3
    assert all(call.endswith("--grace-period=0 --force") for call in deleted)  # exited pods


@pytest.mark.slow
def test_a_deleted_pod_that_disappears_was_terminated(run):
    outcome = run(chief=TRAINS, worker=[["running", 0], ["gone_when_deleted", 0]])
    assert Exited(WORKER, 143) in outcome.events
    assert outcome.state.exit_code == 0


@pytest.mark.slow
def test_a_killed_ps_is_reported_before_the_chief_that_fails_as_a_consequence(run):
    fails = [["running", 0], ["follows", ["it-ps-0-3", 1]]]
    outcome = run(chief=fails, ps=[["running", 0], ["exits", 137]])
    assert outcome.of(Exited)[0] == Exited(PS, 137)
    assert outcome.state.failures[0] == PS


@pytest.mark.slow
def test_created_objects(run):
    outcome = run(chief=TRAINS)
    made = {path.name.rpartition(".")[0] for path in outcome.folder.glob("*.yaml")}
    assert made == {
        "NetworkPolicy.it", "ConfigMap.it", "Service.it", "Pod.it-chief-0-1", "Pod.it-worker-0-2", "Pod.it-ps-0-3"
    }  # fmt: skip
    [container] = outcome.pod("it-worker-0-2")["spec"]["containers"]
    assert container["command"][:4] == ["tfdist", "role", "--task", "worker:0"]
    names = {each["name"] for each in container["env"]}
    assert "TFDIST_RECORDS" in names
    assert not {"TFDIST_LAUNCHER_PID", "TFDIST_TASK_DIR"} & names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (["waiting", "ImagePullBackOff"], ": ImagePullBackOff: as it is"),
        (["unschedulable", "0/3 nodes"], ": Unschedulable: 0/3 nodes"),
    ],
)
def test_the_reason_why_a_pod_does_not_start_is_shown_once(run, problem, reason):
    left = [SignalReceived(signal.SIGTERM)]

    def react(event, state):
        shown = isinstance(event, Output) and any(line.endswith(reason) for line in event.lines)
        return [left.pop()] if shown and left else ()

    outcome = run(worker=[problem, problem, ["until_deleted", 143]], react=react)
    [line] = [line for line in outcome.lines(stream=None) if line.endswith(reason)]
    assert "it-worker-0-2" in line
    assert outcome.state.exit_code == 143
    deleted = [call.split() for call in outcome.calls if call.startswith("delete pod ")]
    assert any("it-worker-0-2" in call and "--force" not in call for call in deleted)


@pytest.mark.slow
def test_a_container_that_is_being_created_is_not_a_problem(run):
    outcome = run(chief=[["waiting", "ContainerCreating"], *TRAINS])
    assert not [line for line in outcome.lines(stream=None) if "ContainerCreating" in line]


@pytest.mark.slow
def test_a_pod_that_fails_ends_the_job_with_its_code(run, monkeypatch):
    monkeypatch.setattr(run_module, "_FIRST_EXIT_TIMEOUT", 0.05)
    outcome = run(worker=[["running", 0], ["exits", 7]])
    assert outcome.state.exit_code == 7
    assert outcome.state.failures == (WORKER,)


@pytest.mark.slow
def test_a_pod_that_disappears_is_replaced(run, monkeypatch):
    monkeypatch.setattr(run_module, "_FIRST_EXIT_TIMEOUT", 0.05)
    left = [SignalReceived(signal.SIGINT)]

    def react(event, state):
        return [left.pop()] if isinstance(event, Output) and "again" in event.lines and left else ()

    gone = [["running", 0], ["gone", 0]]
    again = [["running", 0], ["says", "again"], ["until_deleted", 143]]
    outcome = run(react=react, restarts=1, **{"it-worker-0-2": gone, "it-worker-0-4": again})
    first = outcome.of(Exited)[0]
    assert (first.task, first.code) == (WORKER, 137)
    assert "it-worker-0-2" in first.cause
    assert outcome.state.exit_code == 130


@pytest.mark.slow
def test_a_watch_that_ends_is_repeated(run, monkeypatch):
    monkeypatch.setattr(run_module, "_WATCH_PAUSE", 0.0)
    outcome = run(chief=[["running", 0], ["watch_ends", 0], ["exits", 0]])
    assert outcome.state.exit_code == 0
    assert sum(call.split()[:3] == ["get", "pod", "it-chief-0-1"] for call in outcome.calls) == 2


@pytest.mark.slow
def test_output_whose_connection_breaks_is_read_on(run, monkeypatch):
    monkeypatch.setattr(run_module, "_LOG_PAUSE", 0.05)
    outcome = run(chief=[["running", 0], ["says", "a line"], ["read_again", 0], ["exits", 0]])
    assert outcome.state.exit_code == 0
    first, second, *_ = [call for call in outcome.calls if call.startswith("logs") and "it-chief" in call]
    assert "--since" not in first
    assert "--since=" in second


@pytest.mark.slow
def test_watches_without_events(run, monkeypatch):
    monkeypatch.setattr(run_module, "_WATCH_PAUSE", 0.0)
    with raises(TfdistError, "kubernetes-unreachable") as caught:
        run(chief=[["says", ""]])
    assert "it-chief-0-1" in caught.value.message


def test_an_existing_job_of_the_same_name_is_not_deleted(run, kubectl):
    (kubectl / "ConfigMap.it.yaml").write_text("")
    with raises(TfdistError, "kubernetes-job-rejected") as caught:
        run()
    assert caught.value.message.endswith("already exists")
    assert [call for call in (kubectl / "calls").read_text().splitlines() if "delete" in call] == []


def test_check(kubectl, monkeypatch):
    KubernetesLauncher().check(cluster(), ())
    with raises(UsageError, "kind-not-launchable"):
        KubernetesLauncher().check(cluster(kind="jobset"), ())
    monkeypatch.setenv("KUBECTL_DOWN", "1")
    with raises(UsageError, "kubernetes-unreachable") as caught:
        KubernetesLauncher().check(cluster(), ())
    assert caught.value.message.endswith(" was refused")
    monkeypatch.setenv("PATH", str(kubectl))
    with raises(UsageError, "program-not-found"):
        KubernetesLauncher().check(cluster(), ())
