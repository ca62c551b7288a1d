"""Injects faults into a training: a launch with the digits data set, and faults of its tasks while it runs."""

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests.support.launching import finish, project, start

RECIPE = '''
"""Softmax regression on the digits. Its data is slow, so that a training lasts without loading the machine.

With weight decay the optimum is unique, and the decaying rate converges to it in any order of steps.
"""

import keras
import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep

from tfdist_cli.datasets import digits


def model(params):
    decay = keras.regularizers.L2(1e-3)
    network = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, kernel_regularizer=decay)])
    network.compile(
        keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 20 * 44), momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", Counts()],
    )
    return network


class Counts(keras.metrics.Metric):
    """Counts the examples."""

    def __init__(self):
        super().__init__(name="examples")
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.shape(y_true)[0])

    def result(self):
        return self.count


def dataset(params, split, shard):
    examples = tf.data.Dataset.from_tensor_slices(digits.load(split))
    examples = examples.shard(shard.count, shard.index)
    return examples.apply(sleep(params["microseconds"] * (1 if split == "train" else 2)))
'''
LAYER = "keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, kernel_regularizer=decay)])"
TWO_LAYERS = """inputs = keras.Input((64,))
    upper, lower = keras.ops.split(inputs, 2, axis=1)
    outputs = keras.layers.Dense(10, kernel_regularizer=decay)(upper)
    outputs = outputs + keras.layers.Dense(10, use_bias=False, kernel_regularizer=decay)(lower)
    network = keras.Model(inputs, outputs)"""
RECIPE_IN_TWO_LAYERS = RECIPE.replace(f"network = {LAYER}", TWO_LAYERS)
"""The same regression with a layer for each half of the image."""
EXAMPLES = 360
"""Digits in the test split."""
UNDISTURBED = 0.9528
"""The accuracy without faults: 343 of 360 digits, or one more or less, for any seed and any number of tasks."""
RECIPE_YAML = """
module: four_classes
params: {microseconds: 600}
train: {epochs: 20, batch_size: 32}
checkpoint: {every_steps: 100}
evaluate: {split: test, every_epochs: 5}
"""
SERVERS = """
strategy: parameter_server
roles: {chief: {}, ps: {}, worker: {replicas: 2}, evaluator: {}}
recipe: recipe.yaml
"""
STAGES = """
strategy: model_parallel
roles: {chief: {}, worker: {replicas: 2}, evaluator: {}}
recipe: recipe.yaml
"""
MIRRORED = "strategy: multi_worker_mirrored\nroles: {worker: {replicas: 2}}\nrecipe: recipe.yaml\n"


@dataclass(frozen=True)
class Fault:
    """A signal to a task.

    Args:
        task: the task, or `launcher`.
        step: the earliest step of the training for it.
        signum: the signal.
        doing: the state in which the chief must be.
    """

    task: str
    step: int
    signum: int = signal.SIGKILL
    doing: str = ""


class Training:
    """A launch into which faults are injected.

    Args:
        folder: where it runs.
        cluster: the cluster file.
        options: for `tfdist launch`.
        module: the recipe's module.
    """

    def __init__(self, folder, cluster=SERVERS, *options, module=RECIPE):
        self.run = folder / "run"
        self._launch = project(folder, cluster, module, RECIPE_YAML), "--run-dir", "run", *options
        self.process = start(*self._launch)

    def relaunch(self):
        """Launches the run again after the launcher's exit."""
        before = self.launches
        self.process = start(*self._launch)
        self.until(lambda: self.launches > before)

    @property
    def launches(self):
        return sum(line["event"] == "launch" for line in self.lines("events.jsonl"))

    def lines(self, name):
        """The complete lines of one of the run's files so far."""
        path = self.run / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def events(self, kind, task=None):
        """The events of a kind, optionally of one task, since the last launch began."""
        lines = self.lines("events.jsonl")
        started = max((number for number, line in enumerate(lines) if line["event"] == "launch"), default=0)
        return [line for line in lines[started:] if line["event"] == kind and line.get("task", task) == task]

    @property
    def trained(self):
        """The lines of the training's metrics."""
        return [line for line in self.lines("metrics.jsonl") if line["split"] == "train"]

    def until(self, condition, seconds=90):
        """Polls a condition that has no event, and returns its value."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > deadline or self.process.poll():
                self.stop()
                raise AssertionError(f"the condition did not become true: {self.process.communicate()[1][-4000:]}")
            try:
                self.process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
        return found

    def inject(self, fault):
        """Waits for the fault's step, and sends its signal.

        Returns:
            The time just before it, in seconds since 1970; None if the training ended before.
        """

        def due():
            trained = self.trained
            if not trained or trained[-1]["step"] < fault.step:
                return False
            if fault.doing and self.events("state", "chief:0")[-1]["state"] != fault.doing:
                return False
            if fault.signum == signal.SIGSTOP and not self.has_begun:
                return False  # for a task that is stopped before it is up only the start timeout applies
            return fault.task == "launcher" or self._alive(fault.task)

        self.until(lambda: due() or self.process.poll() == 0)
        if self.process.poll() is not None:
            return None
        pid = self.process.pid if fault.task == "launcher" else self.events("started", fault.task)[-1]["pid"]
        injected = time.time() - 0.001  # the times of events are rounded to milliseconds
        os.kill(pid, fault.signum)
        return injected

    @property
    def has_begun(self):
        """Whether the last launch has started to train."""
        states = [line for chief in ("chief:0", "worker:0") for line in self.events("state", chief)]
        return any(line["state"] == "training" for line in states)

    def _alive(self, task):
        return len(self.events("started", task)) > len(self.events("exited", task))

    def finish(self, timeout=100):
        return finish(self.process, timeout)

    def stop(self):
        """Kills the launcher if it still runs."""
        if self.process.poll() is None:
            self.process.kill()


def moment(line):
    """The time of an event, in seconds since 1970."""
    return datetime.fromisoformat(line["time"]).timestamp()


def accuracy(done):
    """The last accuracy on the test split."""
    return [line for line in done.lines("metrics.jsonl") if line["split"] == "test"][-1]["values"]["accuracy"]


def finished(training, steps: int):
    """Waits until a training has ended as it should, after some steps; returns its outcome."""
    done = training.finish(200)
    assert done.code == 0, done.stderr[-5000:]
    assert done.processes_left == []
    assert done.report["step"] == check_metrics(done.run_dir)[-1]["step"] == steps
    return done


def check_metrics(run_dir: Path):
    """Checks that no step is logged twice, and that tests cover the whole test split."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["split"] == "train"]
    steps = [(line["step"], line["epoch_done"]) for line in trained]
    assert steps == sorted(set(steps)), "each step is logged once, or once more as the last of its epoch"
    # Metrics of the training cover an epoch, or after a restart the rest of it; those of a test cover the whole split.
    assert {line["values"]["examples"] for line in lines if line["split"] == "test"} == {EXAMPLES}
    return trained
