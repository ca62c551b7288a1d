"""Workers that join a running training and leave it, by `tfdist scale` and by SIGTERM."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.chaos import UNDISTURBED, Training, accuracy, check_metrics

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]

ELASTIC = "strategy: parameter_server\nroles: {chief: {}, ps: {}, worker: {replicas: 1, max: 3}}\nrecipe: recipe.yaml\n"


@pytest.fixture
def training(tmp_path):
    training = Training(tmp_path, ELASTIC, "--set", "params.microseconds=400", "--max-restarts", "0")
    yield training
    training.stop()


def scale(training, *arguments):
    command = [sys.executable, "-m", "tfdist_cli", "scale", training.run, *arguments]
    asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert asked.returncode == 0, asked.stderr
    return asked.stdout


def steps_of(training, worker):
    return training.trained[-1].get("worker_steps", {}).get(worker, 0) if training.trained else 0


@pytest.mark.rotates(5, 1)
def test_workers_join_and_leave_without_a_restart(training):
    training.until(lambda: training.trained and training.trained[-1]["step"] > 20, seconds=120)
    assert "worker:1, worker:2 joined after" in scale(training, "worker=3")
    training.until(lambda: min(steps_of(training, f"worker:{index}") for index in range(3)) > 5, seconds=60)
    started = [line for line in training.lines("events.jsonl") if line["event"] == "started"]
    pid = next(line["pid"] for line in started if line["task"] == "worker:1")
    os.kill(pid, signal.SIGTERM)  # as of a node that is taken away
    training.until(lambda: any(
        line["event"] == "exited" and line["task"] == "worker:1" for line in training.lines("events.jsonl")
    ), seconds=60)  # fmt: skip
    assert not psutil.pid_exists(pid)
    assert "worker:2 left after" in scale(training, "worker=1")
    done = training.finish(150)
    assert done.code == 0, done.stderr
    assert done.processes_left == []
    assert (done.report["attempts"], done.report["losses"]) == (1, [])
    first, second = done.report["resizes"]
    assert (first["joined"], first["failed"]) == (["worker:1", "worker:2"], [])
    assert second["left"] == ["worker:2"]
    statuses = {task["task"]: task["status"] for task in done.report["tasks"]}
    assert (statuses["worker:1"], statuses["worker:2"]) == ("left", "left")
    trained = check_metrics(done.run_dir)
    assert sum(trained[-1]["worker_steps"].values()) == trained[-1]["step"]
    assert all(trained[-1]["worker_steps"][f"worker:{index}"] > 5 for index in range(3))
    assert abs(accuracy(done) - UNDISTURBED) <= 0.01
