"""Disturbing a training: a launch of the digits, and what is done to its tasks while it runs."""

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
"""Softmax regression on the digits; its data comes slowly: a training lasts, and leaves the machine to others.

With weight decay it has a single best point, and the decaying rate comes to rest there, in whatever order steps came.
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
    """How many examples were seen."""

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
EXAMPLES = 360
"""Digits that are not trained on."""
UNDISTURBED = 0.9528
"""What the training comes to when nothing is done to it: 343 of 360 digits, or one more or less, whatever its seed and
however many tasks it has."""
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
MIRRORED = "strategy: multi_worker_mirrored\nroles: {worker: {replicas: 2}}\nrecipe: recipe.yaml\n"


@dataclass(frozen=True)
class Blow:
    """Something that is done to a task.

    Args:
        task: whom it hits, or `launcher`.
        step: the step of the training at which it does, at the earliest.
        signum: the signal.
        doing: what the chief is to be doing then.
    """

    task: str
    step: int
    signum: int = signal.SIGKILL
    doing: str = ""


class Training:
    """A launch that is disturbed while it runs.

    Args:
        folder: where it runs.
        cluster: the cluster file.
        options: for `tfdist launch`.
    """

    def __init__(self, folder, cluster=SERVERS, *options):
        self.run = folder / "run"
        self._launch = project(folder, cluster, RECIPE, RECIPE_YAML), "--run-dir", "run", *options
        self.process = start(*self._launch)

    def again(self):
        """Launches it once more after the launcher's end."""
        before = self.launches
        self.process = start(*self._launch)
        self.until(lambda: self.launches > before)

    @property
    def launches(self):
        return sum(line["event"] == "launch" for line in self.lines("events.jsonl"))

    def lines(self, name):
        """The whole lines of one of the run's files so far."""
        path = self.run / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def events(self, kind, task=None):
        """The events of a kind, and of a task or of none, since the last launch began."""
        lines = self.lines("events.jsonl")
        begun = max((number for number, line in enumerate(lines) if line["event"] == "launch"), default=0)
        return [line for line in lines[begun:] if line["event"] == kind and line.get("task", task) == task]

    @property
    def trained(self):
        """The lines on the training."""
        return [line for line in self.lines("metrics.jsonl") if line["split"] == "train"]

    def until(self, condition, seconds=90):
        """Waits for a condition that nothing announces; returns what it gave."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > deadline or self.process.poll():
                self.stop()
                raise AssertionError(f"it did not come: {self.process.communicate()[1][-4000:]}")
            try:
                self.process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
        return found

    def strike(self, blow):
        """Waits for its step, and strikes.

        Returns:
            The last moment before it, in seconds since 1970; None when the training was over before.
        """

        def due():
            trained = self.trained
            if not trained or trained[-1]["step"] < blow.step:
                return False
            if blow.doing and self.events("state", "chief:0")[-1]["state"] != blow.doing:
                return False
            if blow.signum == signal.SIGSTOP and not self.has_begun:
                return False  # a task that is stopped before it has come up is not waited for but by the start timeout
            return blow.task == "launcher" or self._alive(blow.task)

        self.until(lambda: due() or self.process.poll() == 0)
        if self.process.poll() is not None:
            return None
        pid = self.process.pid if blow.task == "launcher" else self.events("started", blow.task)[-1]["pid"]
        struck = time.time() - 0.001  # events tell whole milliseconds
        os.kill(pid, blow.signum)
        return struck

    @property
    def has_begun(self):
        """Whether the last launch has trained."""
        told = [line for chief in ("chief:0", "worker:0") for line in self.events("state", chief)]
        return any(line["state"] == "training" for line in told)

    def _alive(self, task):
        return len(self.events("started", task)) > len(self.events("exited", task))

    def finish(self, timeout=100):
        return finish(self.process, timeout)

    def stop(self):
        """Ends what still runs."""
        if self.process.poll() is None:
            self.process.kill()


def moment(line):
    """When an event was, in seconds since 1970."""
    return datetime.fromisoformat(line["time"]).timestamp()


def accuracy(done):
    """The last score on the digits that were not trained on."""
    return [line for line in done.lines("metrics.jsonl") if line["split"] == "test"][-1]["values"]["accuracy"]


def check_metrics(run_dir: Path):
    """No step is told twice, and the workers' steps are those of the training since it was resumed."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["split"] == "train"]
    told = [(line["step"], line["epoch_done"]) for line in trained]
    assert told == sorted(set(told)), "each step is told once, or once more as the last of its epoch"
    # Metrics of the training cover an epoch, and after a restart what is left of it; a score covers all of the data.
    assert {line["values"]["examples"] for line in lines if line["split"] == "test"} == {EXAMPLES}
    return trained
