"""Training goes on while a checkpoint is written, and what is written is what there was when it was asked for."""

import queue
import subprocess
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import callbacks as kc

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import batches, classes, classifier
from tests.support.optimizers import OPTIMIZERS
from tfdist_cli import Checkpoints
from tfdist_cli.errors import ResultNotSaved, TrainingError
from tfdist_cli.spec.sections.updates import ShardRule
from tfdist_cli.train.checkpoint import store, tensors, writer
from tfdist_cli.train.checkpoint.store import CheckpointFolder, TrainingState
from tfdist_cli.train.checkpoint.tensors import Snapshot, saved_variables
from tfdist_cli.train.checkpoint.writer import CheckpointContent, CheckpointWriter
from tfdist_cli.train.model.train_step import ModelStep


def built(model=None):
    step = ModelStep(model or classifier())
    step.build(batches().element_spec)
    return step


def differ(copies, step):
    """Whether variables have other values than these."""
    pairs = zip(copies, saved_variables(step), strict=True)
    return not all(np.array_equal(copy, variable.numpy()) for copy, variable in pairs)


def content(number, **given):
    return CheckpointContent(TrainingState(number, 0), **given)


class Disk:
    """Files are written when `open` is set; `busy` says that they would be."""

    def __init__(self, monkeypatch):
        self.open, self.busy = threading.Event(), threading.Event()
        write = tensors.write_variables

        def slowly(*given):
            self.busy.set()
            assert self.open.wait(60)
            write(*given)

        monkeypatch.setattr(store, "write_variables", slowly)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk(monkeypatch)
    yield disk
    disk.open.set()


def test_it_returns_before_the_files_are_there(disk, tmp_path):
    step, folder = built(), CheckpointFolder(tmp_path)
    before = [variable.numpy() for variable in saved_variables(step)]
    saving = CheckpointWriter(folder, step)
    arrays = [np.zeros(3)]
    saving.save(content(1, arrays=arrays), wait=False)
    assert disk.busy.wait(60)
    assert folder.steps() == []
    arrays[0] += 1
    for variable in saved_variables(step):
        variable.assign(variable + 1)
    disk.open.set()
    saving.finish()
    found = folder.find(1)
    np.testing.assert_array_equal(found.arrays()[0], np.zeros(3))
    folder.restore(found, step)
    assert not differ(before, step)


def test_one_is_written_after_the_other(disk, tmp_path):
    folder = CheckpointFolder(tmp_path)
    saving = CheckpointWriter(folder, built())
    saving.save(content(1), wait=False)
    assert disk.busy.wait(60)
    second = threading.Thread(target=saving.save, args=(content(2),), kwargs={"wait": True})
    second.start()
    second.join(0.05)
    assert second.is_alive()
    disk.open.set()
    second.join(60)
    assert folder.steps() == [1, 2]


@pytest.mark.parametrize(
    ("wanted", "bytes_", "beside"),
    [("auto", 2**30, True), ("auto", 10, False), (True, 10, True), (False, 2**30, False)],
)
def test_who_waits(wanted, bytes_, beside, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SNAPSHOT_BYTES", bytes_)
    writers, write = [], tensors.write_variables

    def noting(*given):
        writers.append(threading.current_thread() is not threading.main_thread())
        write(*given)

    monkeypatch.setattr(store, "write_variables", noting)
    saving = CheckpointWriter(CheckpointFolder(tmp_path), built(), wanted)
    saving.save(content(1), wait=False)
    saving.finish()
    saving.save(content(2), wait=True)
    assert writers == [beside, False]


def test_a_disk_that_is_full_is_said_and_the_next_one_is_tried(tmp_path, monkeypatch, log):
    folder = CheckpointFolder(tmp_path)
    saving = CheckpointWriter(folder, built())
    records = []
    monkeypatch.setattr(writer, "emit", lambda kind, **fields: records.append((kind, fields["step"])))

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store, "write_variables", fail)
        saving.save(content(1), wait=False)
        saving.finish()
    assert any("step 1 " in line and "No space left" in line for line in log)
    assert saving.unsaved is not None
    saving.save(content(2), wait=False)
    saving.finish()
    assert records == [("checkpoint_failed", 1), ("checkpoint", 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_task_that_is_gone_ends_the_training(tmp_path, monkeypatch):
    def fail(*_):
        raise tf.errors.UnavailableError(None, None, "Socket closed")

    monkeypatch.setattr(store, "write_variables", fail)
    saving = CheckpointWriter(CheckpointFolder(tmp_path), built())
    saving.save(content(1), wait=False)
    with pytest.raises(tf.errors.UnavailableError):
        saving.finish()
    saving.finish()


def test_a_training_that_fails_waits_for_what_is_being_written(disk, tmp_path):
    x, y = classes(48)
    x[8 * 4 + 3] = np.nan  # in the fifth batch
    threading.Timer(0.3, disk.open.set).start()
    model, kept = classifier(keras.layers.Dense(4)), Checkpoints(tmp_path, every_steps=4)
    with raises(TrainingError, "loss-not-finite"):
        tfdist.fit(model, batches(x, y), steps_per_execution=1, checkpoints=kept)
    assert CheckpointFolder(tmp_path).steps() == [4]


def test_but_not_for_ever(disk, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "CLOSE_SECONDS", 0.01)
    saving = CheckpointWriter(CheckpointFolder(tmp_path), built())
    saving.save(content(1), wait=False)
    assert disk.busy.wait(60)
    saving.close()
    assert not disk.open.is_set()


class Holding(kc.Callback):
    """Takes a snapshot after a batch, and keeps another copy."""

    def on_train_begin(self, logs=None):
        self.step = ModelStep(self.model)
        self.snapshot = None

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.snapshot = Snapshot(self.step)
            self.copies = [variable.numpy() for variable in saved_variables(self.step)]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_leave_a_snapshot_as_it_was(optimizer, tmp_path):
    """Keras's operations and TensorFlow's fused kernels; also Lion, Nadam and others that only Keras has."""
    model = classifier(optimizer=OPTIMIZERS[optimizer]())
    tfdist.fit(model, batches(), callbacks=[holding := Holding()])
    CheckpointFolder(tmp_path).save(holding.step, TrainingState(3, 0), read=holding.snapshot.read)
    assert differ(holding.copies, holding.step)
    CheckpointFolder(tmp_path).restore(CheckpointFolder(tmp_path).find(3), holding.step)
    assert not differ(holding.copies, holding.step)


def test_a_snapshot_of_spread_variables(servers, tmp_path):
    with servers(3, shard=ShardRule(min_bytes=0)).scope():
        step = built()
    before = [variable.numpy() for variable in saved_variables(step)]
    snapshot = Snapshot(step)
    for variable in saved_variables(step):
        variable.assign(np.ones(variable.shape) * 5)
    CheckpointFolder(tmp_path).save(step, TrainingState(3, 0), read=snapshot.read)
    assert not snapshot._values  # memory is given back piece by piece
    CheckpointFolder(tmp_path).restore(CheckpointFolder(tmp_path).find(3), step)
    assert not differ(before, step)


@pytest.fixture
def told(monkeypatch):
    """What is told of checkpoints: `("checkpoint", 4)`."""
    records = queue.Queue()
    monkeypatch.setattr(writer, "emit", lambda kind, **fields: records.put((kind, fields["step"])))
    return records


class Room(kc.Callback):
    """Takes all the room there is when a checkpoint has been saved, and gives it back when another could not be.

    Args:
        folder: on the disk.
        told: what is told of checkpoints.
        full: the checkpoint's step.
        free: the other one's.
    """

    def __init__(self, folder, told, full, free=None):
        super().__init__()
        self.ballast = folder / "ballast"
        self.told, self.full, self.free = told, full, free

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.full:  # the first step after it
            while self.told.get(timeout=60) != ("checkpoint", self.full):
                pass
            fill(self.ballast)
        if batch == self.free:
            while self.told.get(timeout=60) != ("checkpoint_failed", self.free):
                pass
            self.ballast.unlink()


def fill(ballast):
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(2**20))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_is_really_full(asynchronous, small_disk, told, log):
    model = classifier(keras.layers.Dense(64))
    data = batches(*classes(160))  # 20 steps
    kept = Checkpoints(small_disk / "kept", every_steps=4, keep=1, asynchronous=asynchronous)
    tfdist.fit(model, data, callbacks=[Room(small_disk, told, 4, 12)], checkpoints=kept, steps_per_execution=1)
    failed = [int(line.split("step ")[1].split()[0]) for line in log if "No space left" in line]
    assert failed == [8, 12]
    assert CheckpointFolder(small_disk / "kept").newest()[0].state.step == 20
    assert [path.name for path in (small_disk / "kept").iterdir()] == ["step-00000020"]


def test_what_is_good_stays_when_the_disk_stays_full(small_disk, told):
    model, data = classifier(keras.layers.Dense(64)), batches(*classes(160))
    kept = Checkpoints(small_disk / "kept", every_steps=4, keep=1)
    room = Room(small_disk, told, 4)
    with raises(ResultNotSaved, "checkpoint-not-written") as caught:
        tfdist.fit(model, data, callbacks=[room], checkpoints=kept, steps_per_execution=1)
    assert "No space left" in caught.value.message
    assert CheckpointFolder(small_disk / "kept").newest()[0].state.step == 4
    assert sorted(path.name for path in (small_disk / "kept").iterdir()) == ["step-00000004"]
    room.ballast.unlink()
    tfdist.fit(classifier(keras.layers.Dense(64)), data, checkpoints=kept)
    assert CheckpointFolder(small_disk / "kept").steps() == [20]


def test_a_full_disk_is_no_hindrance_at_the_start(small_disk, log):
    fill(small_disk / "ballast")
    with raises(ResultNotSaved, "checkpoint-not-written"):
        tfdist.fit(classifier(), batches(), checkpoints=Checkpoints(small_disk, every_steps=4))
    assert any("step 4 " in line and "No space left" in line for line in log)


def test_a_folder_that_is_read_only_is_an_error_before_the_first_step(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    begun = time.monotonic()
    with raises(TrainingError, "checkpoint-dir-not-writable") as caught:
        tfdist.fit(classifier(), batches().repeat(), steps_per_epoch=10**9, checkpoints=Checkpoints(small_disk))
    assert "Read-only file system" in caught.value.message
    assert "checkpoint.dir" in str(caught.value.hint)
    assert time.monotonic() - begun < 60
