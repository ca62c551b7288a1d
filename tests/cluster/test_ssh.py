"""Clusters on hosts with real sshd: complete trainings, and lost links, agents and launchers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.support.codes import codes_in
from tests.support.lab.hosts import ROOT, missing
from tests.support.launching import finish, start
from tfdist_cli.protocol.run_files import read_lines

REASON = missing()
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.skipif(bool(REASON), reason=REASON)]
CLUSTER = """
strategy: {strategy}
launcher: ssh
hosts: [{hosts}]
ssh: {{config: {config}, python: {python}}}
roles: {roles}
"""


@pytest.fixture
def folder(lab, tmp_path):
    """Creates a folder that the hosts cannot see, with a cluster file for them, and a recipe."""
    where = lab.here / tmp_path.name
    where.mkdir()

    def make(strategy, roles, recipe=True):
        hosts = ", ".join(host.name for host in lab.hosts)
        text = CLUSTER.format(strategy=strategy, hosts=hosts, config=lab.config, python=sys.executable, roles=roles)
        (where / "cluster.yaml").write_text(text + ("recipe: digits_mlp.yaml\n" if recipe else ""))
        for name in ("digits_mlp.yaml", "mlp.py") if recipe else ():
            shutil.copy(ROOT / "recipes" / name, where)
        return where

    for host in lab.hosts:
        host.mend()
    yield make
    lab.wait_until_empty(30)


@pytest.fixture
def begin(folder):
    """Launches a shell script in every task, and waits until all have started. Kills the launchers after the test."""
    begun = []

    def begin(script="exec sleep 1000", restart="{policy: never}"):
        where = folder("multi_worker_mirrored", f"{{worker: {{replicas: 3, restart: {restart}}}}}", recipe=False)
        begun.append(start(where, "--run-dir", "run", "--", "sh", "-c", script))
        await_event(where, "started", 3)
        return begun[-1], where

    yield begin
    for launcher in begun:
        launcher.kill()
        launcher.communicate()


def events(folder):
    path = folder / "run" / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def await_event(folder, wanted, count=1, seconds=60):
    """Waits for `count` events of a kind, and returns the last of them."""
    deadline = time.monotonic() + seconds
    while len(found := [event for event in events(folder) if event["event"] == wanted]) < count:
        assert time.monotonic() < deadline, events(folder)
        time.sleep(0.05)
    return found[-1]


@pytest.mark.rotates(5, 1)
def test_the_digits_are_learned_on_three_hosts(lab, folder):
    launched = finish(start(folder("parameter_server", "{chief: {}, ps: {}, worker: {replicas: 3}}")), 250)
    assert launched.code == 0, launched.stderr
    assert launched.report["metrics"]["test_accuracy"] > 0.96
    assert launched.report["step"] == 840
    chief = lab.hosts[0]
    assert [each["path"].partition(":")[0] for each in launched.report["checkpoints"]] == [chief.name] * 5
    exported = launched.report["exports"][0].removeprefix(f"{chief.name}:")
    assert exported.startswith(f"{chief.home}/.tfdist/runs/")
    assert Path(exported, "saved_model.pb").exists()
    run = Path(".tfdist/runs", launched.run_dir.name, (launched.run_dir / "hosts_id").read_text().strip())
    assert (lab.hosts[1].home / run).is_dir()
    assert not (lab.hosts[1].home / run / "checkpoints").exists()
    assert launched.lines("metrics.jsonl")[-1]["step"] == 840
    ran = yaml.safe_load((chief.home / run / "recipe.yaml").read_text())
    assert ran["module_dir"].startswith(f"{chief.home}/.tfdist/sync/"), "the copy is trained"
    plan = json.loads((launched.run_dir / "plan.json").read_text())
    assert {each["task"]: each["address"].partition(":")[0] for each in plan["tasks"]} == {
        "chief:0": lab.hosts[0].address,
        "ps:0": lab.hosts[0].address,
        "worker:0": lab.hosts[1].address,
        "worker:1": lab.hosts[2].address,
        "worker:2": lab.hosts[0].address,
    }
    assert not lab.processes()


@pytest.mark.rotates(5, 0)
def test_a_worker_on_another_host_is_profiled(lab, folder):
    where = folder("parameter_server", "{chief: {}, ps: {}, worker: {replicas: 2}}")
    launched = start(where, "--run-dir", "run", "--set", "train.epochs=100000")
    try:
        while not any(line["step"] > 300 for line in read_lines(where / "run" / "metrics.jsonl")):
            assert launched.poll() is None, launched.communicate()
            time.sleep(0.1)
        argv = [sys.executable, "-m", "tfdist_cli", "profile", where / "run", "--task", "worker:1", "--json"]
        profiled = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, check=True, timeout=60).stdout)
        launched.send_signal(signal.SIGINT)
        done = finish(launched, 100)
    finally:
        launched.kill()
    assert done.code == 130, done.stderr
    assert Path(profiled["path"]).stat().st_size == profiled["bytes"]
    assert any("MatMul" in each["name"] for each in profiled["operations"])
    assert not lab.processes()


@pytest.mark.rotates(5, 2)
def test_workers_of_other_hosts_join_and_leave(lab, folder):
    where = folder("parameter_server", "{chief: {}, ps: {}, worker: {max: 3}}")
    run = where / "run"
    launched = start(where, "--run-dir", "run", "--set", "train.epochs=100000")

    def await_steps(wanted):
        while not any(wanted(line) for line in read_lines(run / "metrics.jsonl")):
            assert launched.poll() is None, launched.communicate()
            time.sleep(0.1)

    def scaled(number):
        argv = [sys.executable, "-m", "tfdist_cli", "scale", run, f"worker={number}"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stderr

    try:
        await_steps(lambda line: line["step"] > 100)
        scaled(3)
        await_steps(lambda line: line.get("worker_steps", {}).get("worker:2", 0) > 20)
        assert len(lab.processes()) >= 5
        scaled(1)
        left = json.loads((run / "plan.json").read_text())
        now = max(line["step"] for line in read_lines(run / "metrics.jsonl"))
        await_steps(lambda line: line["step"] > now + 200)
        launched.send_signal(signal.SIGINT)
        done = finish(launched, 100)
    finally:
        launched.kill()
    assert done.code == 130, done.stderr
    assert (done.report["attempts"], done.report["losses"]) == (1, [])
    assert {each["task"] for each in left["tasks"]} == {"chief:0", "ps:0", "worker:0"}
    trained = [line for line in done.lines("metrics.jsonl") if line["split"] == "train"]
    steps = [(line["step"], line["epoch_done"]) for line in trained]
    assert steps == sorted(set(steps)), "a step was taken twice"
    assert sum(trained[-1]["worker_steps"].values()) == trained[-1]["step"]
    assert not lab.processes()


def test_a_killed_launcher(lab, begin):
    launcher, _ = begin()
    assert len([command for _, command in lab.processes() if command == "sleep 1000"]) == 3
    launcher.kill()
    launcher.communicate()
    assert lab.wait_until_empty(10) < 5


@pytest.mark.rotates(5, 2)
def test_ctrl_c_stops_the_tasks_of_every_host(lab, begin):
    launcher, _ = begin()
    launcher.send_signal(signal.SIGINT)
    assert finish(launcher).code == 130
    assert not lab.processes()


@pytest.mark.rotates(5, 0)
def test_a_link_that_is_cut_and_mended(lab, begin):
    """The cause names the host. Its tasks are killed there, and start again when it can be reached."""
    script = "case $TFDIST_TASK_DIR in *attempt_1*) exec sleep 1000;; esac"
    launcher, where = begin(script, "{policy: job, max: 1}")
    cut, began = lab.hosts[2], time.monotonic()
    cut.cut()
    lost = await_event(where, "loss")
    assert time.monotonic() - began < 20
    assert lost["task"] == "worker:2"
    assert f" {cut.name} was lost" in lost["cause"]
    while any("sleep" in command for _, command in cut.processes()):
        assert time.monotonic() - began < 40
        time.sleep(0.1)
    cut.mend()
    assert finish(launcher).code == 0
    assert [event["task"] for event in events(where) if event["event"] == "started"].count("worker:2") == 2


@pytest.mark.rotates(5, 3)
def test_a_connection_that_is_killed_on_the_host(lab, begin):
    launcher, _ = begin()
    for pid, command in lab.hosts[1].processes():
        if command.startswith("sshd:"):
            os.kill(pid, signal.SIGKILL)
    launched = finish(launcher)
    assert launched.code == 255
    assert "worker:1 failed after" in launched.stderr
    assert f" {lab.hosts[1].name} was lost" in launched.stderr


def test_a_host_that_rejects_the_key(lab, folder):
    where = folder("single", "{chief: {}}", recipe=False)
    (where / "config").write_text(lab.config.read_text().replace("/id\n", "/other\n"))
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", lab.config.parent / "other"], check=True)
    launched = finish(start(where, "--set", "ssh.config=config", "--", "true"))
    assert launched.code == 1
    assert codes_in(launched.stderr)[0] == "ssh-host-unreachable"
    assert lab.hosts[0].name in launched.stderr
    assert "Permission denied" in launched.stderr
