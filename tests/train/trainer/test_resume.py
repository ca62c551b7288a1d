"""Tests of resuming: a resumed training equals an uninterrupted one, with callbacks, metrics and history."""

import json
import os
import random
import shutil
import signal
from types import MappingProxyType, SimpleNamespace

import keras
import numpy as np
import pytest
from keras import callbacks as kc

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import CLASSES, batches, classes, classifier, difference
from tfdist_cli import Checkpoints
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.checkpoint.files.state import TrainingState
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.trainer.config.checkpoints import CheckpointConfig
from tfdist_cli.train.trainer.config.schedule import Schedule
from tfdist_cli.train.trainer.config.training import Counting, TrainingConfig
from tfdist_cli.train.trainer.resume import epoch_position, restore_checkpoint
from tfdist_cli.train.trainer.sigterm import Terminated

pytestmark = pytest.mark.slow

X, Y = classes(60, seed=3)
HARMFUL = batches(X, (Y + 1) % CLASSES)  # 8 steps; training on them makes the validation loss worse
VALIDATION = batches(*classes(21, seed=1))


class Drawing(kc.Callback):
    """Draws a random learning rate in each epoch, and records it."""

    def __init__(self):
        super().__init__()
        self.drawn = []
        self.ends = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.drawn.append((epoch, random.random(), np.random.uniform()))
        self.model.optimizer.learning_rate = 0.01 * self.drawn[-1][1]

    def on_epoch_end(self, epoch, logs=None):
        self.ends += 1


def train(folder, epochs=9, *, callbacks=None, data=HARMFUL, **given):
    """Trains until the validation loss has been worse for some epochs."""
    keras.utils.set_random_seed(7)
    model = classifier()
    callbacks = callbacks or [
        kc.EarlyStopping("val_loss", patience=3, min_delta=0.01, restore_best_weights=True),
        kc.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0),
        kc.ModelCheckpoint(str(folder / "best.keras"), monitor="val_loss", save_best_only=True),
        kc.LearningRateScheduler(lambda epoch, rate: rate * 0.95),
        Drawing(),
    ]
    tfdist.fit(
        model,
        data,
        callbacks=callbacks,
        checkpoints=Checkpoints(folder, every_steps=4, keep=99),
        **{"epochs": epochs, "validation_data": VALIDATION, "steps_per_execution": 2} | given,
    )
    return model, callbacks


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A folder with a checkpoint every 4 steps, of a training that a callback stopped."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    model, callbacks = train(folder)
    assert model.history.epoch == [0, 1, 2, 3]
    return folder, model, callbacks


def test_a_checkpoint_counts_the_batches_of_the_epoch_that_is_not_complete(uninterrupted):
    folder, _, _ = uninterrupted
    states = [json.loads(path.read_text()) for path in folder.glob("step-*/state.json")]
    assert {(each["step"], 8 * each["epoch"] + each["epoch_batches"]) for each in states} == {
        (step, step) for step in range(4, 33, 4)
    }
    assert max(states, key=lambda state: state["step"])["epoch_batches"] == 0


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("step", [4, 8, 20, 24, 32])  # within an epoch; at its last step; at the end
def test_a_resumed_training_equals_an_uninterrupted_one(step, uninterrupted, tmp_path):
    folder, model, callbacks = uninterrupted
    shutil.copytree(folder / f"step-{step:08d}", tmp_path / f"step-{step:08d}")
    again, others = train(tmp_path)
    assert difference(model.variables, again.variables) == 0
    assert difference(model.optimizer.variables, again.optimizer.variables) == 0
    assert again.history.history == model.history.history
    assert again.history.epoch == model.history.epoch
    for callback, other in zip(callbacks, others, strict=True):
        for name in ("best", "wait", "best_epoch", "stopped_epoch", "cooldown_counter", "min_delta", "drawn", "ends"):
            assert getattr(callback, name, None) == getattr(other, name, None)


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 20])  # before the length is known, and after it
def test_a_training_on_data_of_unknown_length_is_resumed(step, tmp_path):
    given = {"data": HARMFUL.filter(lambda *_: True), "epochs": 3, "callbacks": [Drawing()]}
    model, _ = train(tmp_path / "whole", **given)
    shutil.copytree(tmp_path / "whole" / f"step-{step:08d}", tmp_path / "rest" / f"step-{step:08d}")
    again, _ = train(tmp_path / "rest", **given)
    assert (again.history.epoch, int(again.optimizer.iterations)) == ([0, 1, 2], 24)
    assert difference(model.variables, again.variables) == 0
    assert again.history.history == model.history.history


def test_a_training_stopped_by_a_callback_stays_stopped(uninterrupted, tmp_path, log):
    shutil.copytree(uninterrupted[0], tmp_path, dirs_exist_ok=True)
    again, _ = train(tmp_path)
    assert int(again.optimizer.iterations) == 32
    assert any("stopped the training at step 32" in line for line in log)


@pytest.mark.parametrize(
    "given", [{"epochs": 10}, {"callbacks": [Drawing()], "epochs": 5}], ids=["epochs", "callbacks"]
)
def test_more_epochs_or_other_callbacks_continue_a_stopped_training(given, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted[0] / "step-00000032", tmp_path / "step-00000032")
    again, _ = train(tmp_path, **given)
    assert int(again.optimizer.iterations) == 40  # the fifth epoch is no better than the fourth


def test_epochs_of_another_length(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted[0] / "step-00000020", tmp_path / "step-00000020")
    given = {"data": HARMFUL.repeat(), "epochs": None, "steps_per_epoch": 6, "max_steps": 21}
    model, _ = train(tmp_path, callbacks=[kc.History()], **given)
    assert model.history.epoch == [0, 1, 3]  # two epochs of 8 steps; the fourth one of 6


class Weighted(keras.layers.Layer):
    """Adds a loss whose weight callbacks assign."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(), trainable=False, initializer="ones")

    def call(self, x):
        self.add_loss(self.weight * keras.ops.mean(keras.ops.square(x)))
        return x


class Anneals(kc.Callback):
    """Raises the weight of a loss from 0 by 0.1 in each epoch, and halves the learning rate."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def on_train_begin(self, logs=None):
        self.model.layers[-2].weight.assign(0.0)
        self.model.optimizer.learning_rate = 0.01

    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[-2].weight.assign_add(0.1)
        self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * 0.5

    def on_epoch_end(self, epoch, logs=None):
        self.noted.append(round(float(self.model.layers[-2].weight), 5))


@pytest.mark.parametrize("step", [8, 11])  # after an epoch, and within one
def test_variables_that_callbacks_assign_are_resumed(step, tmp_path):
    def annealed(folder):
        keras.utils.set_random_seed(7)
        model, callback = classifier(keras.layers.Dense(4, "relu"), Weighted()), Anneals()
        checkpoints = Checkpoints(folder, every_steps=1, keep=99)
        tfdist.fit(model, HARMFUL.take(4), epochs=4, callbacks=[callback], checkpoints=checkpoints)
        return model, callback

    whole, callback = annealed(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / f"step-{step:08d}", tmp_path / "rest" / f"step-{step:08d}")
    again, other = annealed(tmp_path / "rest")
    assert callback.noted == other.noted == [0.1, 0.2, 0.3, 0.4]
    assert difference(whole.variables, again.variables) == 0
    assert difference(whole.optimizer.variables, again.optimizer.variables) == 0
    assert again.history.history == whole.history.history


class RecordEpochs(kc.Callback):
    """Writes to a file which epochs have ended; copies the run at the beginning of the second epoch."""

    def __init__(self, run, copy):
        super().__init__()
        self.run, self.copy = run, copy

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and not self.copy.exists():
            shutil.copytree(self.run, self.copy)

    def on_epoch_end(self, epoch, logs=None):
        with (self.run / "ended").open("a") as file:
            file.write(f"{epoch}\n")


@pytest.mark.parametrize("every", [{"every_steps": 8}, {"every_seconds": 1e-6}], ids=str)
def test_the_end_of_an_epoch_is_recorded_once_if_a_checkpoint_is_due_at_its_last_step(every, tmp_path, monkeypatch):
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    monkeypatch.setenv("TFDIST_RUN_DIR", str(run))

    def launched(folder):
        monkeypatch.setattr("tfdist_cli.train.cluster.join._joined", None)
        monkeypatch.setenv("TFDIST_RUN_DIR", str(folder))
        checkpoints = Checkpoints(folder / "checkpoints", asynchronous=False, keep=99, **every)
        tfdist.fit(
            classifier(), HARMFUL, epochs=3, validation_data=VALIDATION, callbacks=[RecordEpochs(folder, copy)],
            checkpoints=checkpoints, steps_per_execution=8,
        )  # fmt: skip
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        ends = [(line["split"], line["step"]) for line in lines if line["epoch_done"] or line["split"] != "train"]
        assert ends == [(split, step) for step in (8, 16, 24) for split in ("train", "validation")]
        assert (folder / "ended").read_text() == "0\n1\n2\n"

    launched(run)
    assert CheckpointFolder(copy / "checkpoints").steps() == [8], "the checkpoint is saved after the end is recorded"
    launched(copy)


class SigtermInFirstEpoch(kc.Callback):
    """Sends SIGTERM to this process so that it is handled at the last step of the first epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 6:  # the next execution has the request
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_end_of_an_epoch_is_recorded_once_if_sigterm_arrives_at_its_last_step(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDIST_RUN_DIR", str(tmp_path))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with raises(Terminated, "terminated") as caught:
        tfdist.fit(classifier(), HARMFUL, epochs=2, callbacks=[SigtermInFirstEpoch()], checkpoints=checkpoints)
    assert "step 8" in caught.value.message
    for _ in range(2):
        monkeypatch.setattr("tfdist_cli.train.cluster.join._joined", None)
        model = classifier()
        tfdist.fit(model, HARMFUL, epochs=2, checkpoints=checkpoints)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["epoch_done"]] == [8, 16]
    assert model.history.epoch == [0, 1]


def test_sums_of_other_metrics_are_not_restored(tmp_path):
    step = ModelStep(model := classifier())
    step.build(HARMFUL.element_spec)
    folder = CheckpointFolder(tmp_path)
    folder.save(step, TrainingState(4, 0, steps_per_epoch=8, totals=[1e9]))
    tfdist.fit(model, HARMFUL, max_steps=8, checkpoints=Checkpoints(tmp_path, every_steps=99))
    assert model.history.history["loss"][0] < 10


def resumed(folder, workers, steps, *, synchronous=True, epochs=5, config=MappingProxyType({}), **state):
    """Resumes from a checkpoint with a number of workers and of steps in an epoch; returns start point and position."""
    step = ModelStep(classifier())
    step.build(HARMFUL.element_spec)
    CheckpointFolder(folder).save(step, TrainingState(**state))
    engine = SimpleNamespace(
        is_chief=True,
        synchronous=synchronous,
        sharers=workers,
        total=lambda values: values,
    )
    checkpoints = CheckpointConfig(CheckpointFolder(folder))
    config = TrainingConfig(lambda _: None, steps, epochs=epochs, checkpoints=checkpoints, **config)
    start, _ = restore_checkpoint(engine, step, config)
    schedule = Schedule(steps, config.last_step(start.origin), 1, origin=start.origin)
    return start, schedule, epoch_position(engine, start, schedule, [], 1), engine


class TwoWorkers:
    """What counting asks of the engine of a chief whose other worker has nothing to say."""

    is_chief = synchronous = True
    sharers = 2

    def __init__(self, *counted):
        self.counted, self.asked = counted, 0

    def total(self, values):
        return values

    def count(self, data, shards):
        self.asked += 1
        return np.array(self.counted, np.float64)


def counted(engine, folder, **state):
    """The lengths of two shards with which a training starts; from a checkpoint if there is a state."""
    step = ModelStep(classifier())
    step.build(HARMFUL.element_spec)
    checkpoints = CheckpointConfig(CheckpointFolder(folder))
    if state:
        checkpoints.folder.save(step, TrainingState(4, 0, steps_per_epoch=8, **state))

    def configured(lengths):
        return TrainingConfig(lambda _: None, sum(lengths), lengths=tuple(lengths))

    counting = Counting(lambda _: None, [Shard(0, 2, 0), Shard(1, 2, 1)], configured)
    _, config = restore_checkpoint(engine, step, TrainingConfig(None, 1, checkpoints=checkpoints, counting=counting))
    assert config.checkpoints is checkpoints
    return config.lengths


def test_data_is_counted_once_for_as_many_workers(tmp_path):
    engine = TwoWorkers(4, 3)
    assert counted(engine, tmp_path / "new") == (4, 3)
    assert counted(engine, tmp_path / "same", sharers=2, lengths=[5, 2]) == (5, 2)
    assert engine.asked == 1
    assert counted(engine, tmp_path / "other", sharers=3, lengths=[3, 3, 1]) == (4, 3)
    assert engine.asked == 2
    with raises(TrainingError, "empty-shard"):
        counted(TwoWorkers(7, 0), tmp_path / "empty")


def test_resuming_with_more_workers_then_with_fewer(tmp_path, log):
    """Two workers, 8 steps an epoch, stop after 2.5 of 5 epochs. An epoch of four workers has 4 steps, of one 16."""
    given = {"step": 20, "epoch": 2, "steps_per_epoch": 8, "sharers": 2, "batches": 40, "totals": [640.0]}
    start, schedule, at, _ = resumed(tmp_path / "4", 4, 4, **given)
    assert (start.step, start.origin, start.batches) == (20, 10, 40)
    assert (schedule.total, schedule.epochs) == (30, 5)
    assert [schedule.first_step(epoch) for epoch in (2, 3)] == [18, 22]
    assert (at.recorded, at.totals) == (2, [640.0])
    assert any("from 2 to 4" in line for line in log)

    later = given | {"step": 24, "epoch": 3, "steps_per_epoch": 4, "origin": 10, "sharers": 4, "batches": 56}
    start, schedule, at, _ = resumed(tmp_path / "1", 1, 16, **later)
    assert (start.origin, start.batches, at.recorded) == (24 - 56, 56, 3)
    assert (schedule.first_step(3), schedule.total) == (16, 48)  # one and a half epochs of 16 steps are left


@pytest.mark.parametrize(
    ("step", "epoch", "epoch_batches", "begins"),
    [
        (24, 2, 16, 8),  # the second epoch was cut short after 8 of its 16 steps: 16 of 32 are left
        (32, 2, 0, 32),  # complete: the third one follows
        (32, 1, 32, 32),  # complete, but its end is not recorded
    ],
)
def test_another_number_of_workers_at_the_end_of_an_epoch(step, epoch, epoch_batches, begins, tmp_path):
    """Two workers, 16 steps an epoch; one worker has 32."""
    given = {"steps_per_epoch": 16, "sharers": 2, "batches": 2 * step, "epoch_batches": epoch_batches}
    config = {"steps_of_pass": lambda _: 32}
    start, schedule, at, _ = resumed(tmp_path, 1, 32, step=step, epoch=epoch, config=config, **given)
    assert at.recorded == epoch
    assert schedule.first_step(step // 16) == begins
    assert start.batches == 2 * step


@pytest.mark.parametrize(
    ("synchronous", "config", "done", "batches"),
    [
        (True, {"steps_of_pass": 50}, 19, 207),  # 55 of 150 batches are done: 31 steps of three are left, and 2 batches
        (False, {"steps_of_pass": 50}, 50, 100),  # as many as an epoch has now
        (True, {"steps_of_pass": 50, "share": "copy"}, 13, 189),
        (True, {}, 13, 207),  # the user gave the steps of an epoch
    ],
)
def test_what_is_left_of_an_epoch_with_another_number_of_workers(synchronous, config, done, batches, tmp_path):
    """Two workers, with 75 steps an epoch, have done 19 steps of the second one, after others have."""
    state = {"step": 94, "epoch": 1, "steps_per_epoch": 75, "sharers": 2, "batches": 205, "epoch_batches": 55}
    if "steps_of_pass" in config:
        config = config | {"steps_of_pass": lambda _: 50}
    start, schedule, *_ = resumed(tmp_path, 3, 50, synchronous=synchronous, config=config, **state)
    assert (start.step - schedule.first_step(1), start.batches) == (done, batches)


def test_an_epoch_has_one_pass_however_often_the_number_of_workers_changes(tmp_path):
    step, origin, done, batches, sharers = 0, 0, 0, 0, 1
    for workers, taken in [(3, 13), (2, 8), (4, 9), (3, 10), (2, 7), (1, 0), (4, 0)]:
        step, done, batches = step + taken, done + taken * sharers, batches + taken * sharers
        state = {"step": step, "epoch": 0, "steps_per_epoch": 150 // sharers, "origin": origin, "sharers": sharers}
        state |= {"batches": batches, "epoch_batches": done}
        folder, config = tmp_path / f"{step}-{workers}", {"steps_of_pass": lambda count: 150 // count}
        start, schedule, *_ = resumed(folder, workers, 150 // workers, config=config, **state)
        left = schedule.last_step(0) - step
        assert 150 - workers < done + left * workers <= 150
        assert start.batches == (150 // workers - left) * workers
        origin, batches, sharers = start.origin, start.batches, workers


def test_resuming_with_the_same_number_of_workers(tmp_path):
    start, schedule, at, _ = resumed(
        tmp_path, 2, 8, synchronous=False, step=20, epoch=2, steps_per_epoch=8, origin=-4, sharers=2, batches=17
    )
    assert (start.origin, start.batches, schedule.total, at.recorded) == (-4, 17, 36, 2)


@pytest.mark.parametrize(("synchronous", "batches"), [(True, 60), (False, 20)])
def test_a_checkpoint_without_a_number_of_workers(synchronous, batches, tmp_path):
    start, schedule, at, _ = resumed(tmp_path, 3, 8, synchronous=synchronous, step=20, epoch=2, steps_per_epoch=8)
    assert (start.origin, start.batches, schedule.total, at.recorded) == (0, batches, 40, 2)


@pytest.mark.parametrize(("epochs", "stays"), [(5, True), (6, False)])
def test_a_stopped_training_stays_stopped_with_another_number_of_workers(epochs, stays, tmp_path):
    state = {"step": 16, "epoch": 2, "steps_per_epoch": 8, "sharers": 2, "batches": 32, "final": True, "stopped": 40}
    assert resumed(tmp_path, 4, 4, epochs=epochs, **state)[2].stopped is stays


class Members:
    """One of two tasks that sum: what the other one adds is given."""

    def __init__(self, *, is_chief, others):
        self.is_chief, self._others = is_chief, others

    def total(self, values):
        return values + self._others


@pytest.mark.parametrize(
    ("is_chief", "others", "code"), [(True, 0, "checkpoint-dir-not-writable"), (False, 1, "chief-failed")]
)
def test_no_task_begins_if_the_chief_cannot_use_the_checkpoints(is_chief, others, code, tmp_path):
    (tmp_path / "file").touch()
    folder = CheckpointFolder(tmp_path / "file" / "checkpoints")
    config = SimpleNamespace(checkpoints=CheckpointConfig(folder))
    with raises(TrainingError, code):
        restore_checkpoint(Members(is_chief=is_chief, others=others), None, config)
