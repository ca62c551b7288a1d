"""Data workers that leave and join a training that runs: each example once in each pass."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.cluster.test_data_service import COUNT, IDS
from tests.support.chaos import Training

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SLEEP = "from tensorflow.python.data.experimental.ops.testing import sleep"
SLOW = IDS.replace("import tensorflow as tf", f"import tensorflow as tf\n{SLEEP}").replace(
    "return ids.map(", "return ids.apply(sleep(params['microseconds'])).map("
)
SERVED = (
    "strategy: parameter_server\n"
    "roles: {chief: {}, ps: {}, worker: {replicas: 2}, data_dispatcher: {}, data_worker: {replicas: 2, max: 3}}\n"
    "recipe: recipe.yaml\n"
)
OPTIONS = (
    *("--set", "params.microseconds=4000", "--set", "train.share=service", "--set", "train.batch_size=8"),
    *("--set", "train.epochs=6", "--set", "evaluate=null", "--max-restarts", "0"),
)


@pytest.fixture
def training(tmp_path):
    training = Training(tmp_path, SERVED, *OPTIONS, module=SLOW)
    yield training
    training.stop()


def scale(training, number):
    return subprocess.run(
        [sys.executable, "-m", "tfdist_cli", "scale", training.run, f"data_worker={number}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_each_example_is_there_once_in_each_pass_while_data_workers_leave_and_join(training):
    training.until(lambda: training.trained and training.trained[-1]["step"] > 5, seconds=180)
    for number in (1, 3):
        asked = scale(training, number)
        assert asked.returncode == 0, asked.stderr
    pid = training.events("started", "data_worker:1")[-1]["pid"]
    os.kill(pid, signal.SIGTERM)
    training.until(lambda: len(training.events("exited", "data_worker:1")) == 2)
    done = training.finish(200)
    assert done.code == 0, done.stderr
    assert done.processes_left == []
    assert (done.report["losses"], done.report["attempts"]) == ([], 1)
    assert [each["replicas"] for each in done.report["resizes"]] == [{"data_worker": [2, 1]}, {"data_worker": [1, 3]}]
    epochs = [line for line in done.lines("metrics.jsonl") if line["epoch_done"]]
    assert [line["values"]["once"] for line in epochs] == [COUNT] * 6


@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("number", "task", "signum"), [(3, "data_worker:2", signal.SIGKILL), (1, "data_worker:0", signal.SIGTERM)]
)
def test_one_that_joined_and_is_killed_or_the_last_one_ends_the_training(number, task, signum, training):
    training.until(lambda: training.trained and training.trained[-1]["step"] > 5, seconds=180)
    asked = scale(training, number)
    assert asked.returncode == 0, asked.stderr
    os.kill(training.events("started", task)[-1]["pid"], signum)
    done = training.finish(60)
    assert done.code != 0
    assert re.search(rf"error\[task-lost\]: {task} at 127\.0\.0\.1:", done.stderr), done.stderr
    assert done.processes_left == []
