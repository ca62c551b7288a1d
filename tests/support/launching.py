"""Runs `tfdist launch`, and reads its results."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

RECIPE = '''
"""Ten classes that follow from eight numbers: learned in seconds."""

import keras
import numpy as np
import tensorflow as tf


def model(params):
    network = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)])
    network.compile(
        keras.optimizers.Adam(params.get("learning_rate", 0.01)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return network


def dataset(params, split, shard):
    numbers = np.random.default_rng(0 if split == "train" else 1)
    x = numbers.random((512 if split == "train" else 101, 8), np.float32)
    y = x[:, :4].argmax(axis=1)
    return tf.data.Dataset.from_tensor_slices((x, y)).shard(shard.count, shard.index)
'''
RECIPE_YAML = """
module: four_classes
train: {epochs: 4, batch_size: 16, steps_per_execution: 4}
checkpoint: {every_steps: 40}
export: {format: [saved_model, keras]}
"""
PARAMETER_SERVER = (
    "strategy: parameter_server\nroles: {chief: {}, ps: {}, worker: {replicas: 2}%s}\nrecipe: recipe.yaml\n"
)
LONG = RECIPE_YAML.replace("epochs: 4", "epochs: 100000").replace("every_steps: 40", "every_steps: 200")
PATIENCE = 240
"""Seconds: a generous timeout; on an idle machine each wait takes a few."""
ROOT = Path(__file__).parents[2]
MIRRORED = "strategy: multi_worker_mirrored\nroles: {worker: {replicas: 2}}\nrecipe: recipe.yaml\n"


@dataclass
class LaunchResult:
    """The result of a launch."""

    code: int
    stderr: str
    report: dict
    processes_left: list

    @property
    def run_dir(self):
        return Path(self.report["run_dir"])

    def lines(self, name):
        """The lines of one of the run's JSON Lines files."""
        return [json.loads(line) for line in (self.run_dir / name).read_text().splitlines()]


def project(folder, cluster=PARAMETER_SERVER % "", recipe=RECIPE, recipe_yaml=RECIPE_YAML):
    """Writes a user's project: a cluster, a recipe and its module."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cluster.yaml").write_text(cluster)
    (folder / "recipe.yaml").write_text(recipe_yaml)
    (folder / "four_classes.py").write_text(recipe)
    return folder


def start(folder, *arguments, env=None):
    """Starts `tfdist launch cluster.yaml`, with additional environment variables."""
    return subprocess.Popen(
        [sys.executable, "-m", "tfdist_cli", "launch", "cluster.yaml", "--json", *map(str, arguments)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        env={name: value for name, value in os.environ.items() if not name.startswith(("TFDIST_", "TF_CONFIG"))}
        | (env or {}),
        start_new_session=True,
    )


def start_program(name, folder, *arguments):
    """Starts a program of `tests/support/programs` in a folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TFDIST_", "TF_CONFIG"))}
    return subprocess.Popen(
        [sys.executable, ROOT / "tests" / "support" / "programs" / name, *map(str, arguments)],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def interrupt_program(process):
    """Interrupts a program that trains in the folder `store`, and returns the result of its run."""
    folder = Path(psutil.Process(process.pid).cwd())
    await_event(process, "store/*/run", "checkpoint")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    (training,) = (folder / "store").iterdir()
    assert [path.name for path in training.iterdir()] == ["run"]  # the copies of rows are gone
    assert not started_in(folder)
    return json.loads((training / "run" / "result.json").read_text())


def finish(process, timeout=100):
    """Waits for a launch. One that hangs is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, err = process.communicate()
        raise AssertionError(f"the launch did not end within {timeout} s:\n{err[-3000:]}") from None
    report = json.loads(out) if out.startswith("{") else {}
    return LaunchResult(process.returncode, err, report, left_of(process.pid))


def launch(folder, *arguments, timeout=100):
    """Runs `tfdist launch cluster.yaml` to its end."""
    return finish(start(folder, *arguments), timeout)


def await_event(process, run, name):
    """Waits until a run has an event, and returns the last one of that name, by polling: nothing announces it.

    Args:
        process: the program that has launched it.
        run: the run's directory, as a pattern of the program's folder.
        name: the event.
    """
    folder, deadline = Path(psutil.Process(process.pid).cwd()), time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        lines = [line for path in folder.glob(f"{run}/events.jsonl") for line in path.read_text().splitlines()]
        if found := [event for event in map(json.loads, lines) if event["event"] == name]:
            return found[-1]
        time.sleep(0.1)
    raise AssertionError(f"no event {name}")


def started_in(folder):
    """The processes whose current folder this is: those that a launch there has started, also by way of an engine."""
    found = psutil.process_iter(["cwd", "status", "cmdline"])
    return [each.info for each in found if each.info["cwd"] == str(folder) and each.info["status"] != "zombie"]


def left_of(launcher):
    """The processes of a launcher's tasks that still run; their environment has the launcher's process id."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TFDIST_LAUNCHER_PID") == str(launcher) and process.status() != "zombie":
                left.append(process.cmdline())
        except psutil.Error:
            continue
    return left
