"""Tests of the checkpoint writer: it writes the values of the moment of the save while training continues."""

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
from tfdist_cli.train.checkpoint.files.state import TrainingState
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.checkpoint.tensors import Snapshot, saved_variables
from tfdist_cli.train.checkpoint.writer import CheckpointContent, CheckpointWriter
from tfdist_cli.train.model.train_step import ModelStep


def built(model=None):
    step = ModelStep(model or classifier())
    step.build(batches().element_spec)
    return step


def differ(copies, step):
    """Returns whether variables differ from copies."""
    pairs = zip(copies, saved_variables(step), strict=True)
    return not all(np.array_equal(copy, variable.numpy()) for copy, variable in pairs)


def content(number, **given):
    return CheckpointContent(TrainingState(number, 0), **given)


class Disk:
    """A disk that writes only after `open` is set; `busy` is set when a write is waiting."""

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


def test_save_returns_before_files_are_written(disk, tmp_path):
    step, folder = built(), CheckpointFolder(tmp_path)
    before = [variable.numpy() for variable in saved_variables(step)]
    checkpoint_writer = CheckpointWriter(folder, step)
    arrays = [np.zeros(3)]
    checkpoint_writer.save(content(1, arrays=arrays), wait=False)
    assert disk.busy.wait(60)
    assert folder.steps() == []
    arrays[0] += 1
    for variable in saved_variables(step):
        variable.assign(variable + 1)
    disk.open.set()
    checkpoint_writer.finish()
    found = folder.find(1)
    np.testing.assert_array_equal(found.arrays()[0], np.zeros(3))
    folder.restore(found, step)
    assert not differ(before, step)


def test_checkpoints_are_written_one_at_a_time(disk, tmp_path):
    folder = CheckpointFolder(tmp_path)
    checkpoint_writer = CheckpointWriter(folder, built())
    checkpoint_writer.save(content(1), wait=False)
    assert disk.busy.wait(60)
    second = threading.Thread(target=checkpoint_writer.save, args=(content(2),), kwargs={"wait": True})
    second.start()
    second.join(0.05)
    assert second.is_alive()
    disk.open.set()
    second.join(60)
    assert folder.steps() == [1, 2]


@pytest.mark.parametrize(
    ("asynchronous", "bytes_", "in_background"),
    [("auto", 2**30, True), ("auto", 10, False), (True, 10, True), (False, 2**30, False)],
)
def test_when_a_checkpoint_is_written_in_the_background(asynchronous, bytes_, in_background, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SNAPSHOT_BYTES", bytes_)
    writers, write = [], tensors.write_variables

    def recording(*given):
        writers.append(threading.current_thread() is not threading.main_thread())
        write(*given)

    monkeypatch.setattr(store, "write_variables", recording)
    checkpoint_writer = CheckpointWriter(CheckpointFolder(tmp_path), built(), asynchronous)
    checkpoint_writer.save(content(1), wait=False)
    checkpoint_writer.finish()
    checkpoint_writer.save(content(2), wait=True)
    assert writers == [in_background, False]


def test_a_full_disk_is_reported_and_the_next_save_is_tried(tmp_path, monkeypatch, log):
    folder = CheckpointFolder(tmp_path)
    checkpoint_writer = CheckpointWriter(folder, built())
    records = []
    monkeypatch.setattr(writer, "emit", lambda kind, **fields: records.append((kind, fields["step"])))

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store, "write_variables", fail)
        checkpoint_writer.save(content(1), wait=False)
        checkpoint_writer.finish()
    assert any("step 1 " in line and "No space left" in line for line in log)
    assert checkpoint_writer.unsaved is not None
    checkpoint_writer.save(content(2), wait=False)
    checkpoint_writer.finish()
    assert records == [("checkpoint_failed", 1), ("checkpoint", 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_failed_task_is_an_error(tmp_path, monkeypatch):
    def fail(*_):
        raise tf.errors.UnavailableError(None, None, "Socket closed")

    monkeypatch.setattr(store, "write_variables", fail)
    checkpoint_writer = CheckpointWriter(CheckpointFolder(tmp_path), built())
    checkpoint_writer.save(content(1), wait=False)
    with pytest.raises(tf.errors.UnavailableError):
        checkpoint_writer.finish()
    checkpoint_writer.finish()


def test_a_failed_training_waits_for_its_checkpoint(disk, tmp_path):
    x, y = classes(48)
    x[8 * 4 + 3] = np.nan  # in the fifth batch
    threading.Timer(0.3, disk.open.set).start()
    model, checkpoints = classifier(keras.layers.Dense(4)), Checkpoints(tmp_path, every_steps=4)
    with raises(TrainingError, "loss-not-finite"):
        tfdist.fit(model, batches(x, y), steps_per_execution=1, checkpoints=checkpoints)
    assert CheckpointFolder(tmp_path).steps() == [4]


def test_close_waits_for_a_limited_time(disk, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "CLOSE_SECONDS", 0.01)
    checkpoint_writer = CheckpointWriter(CheckpointFolder(tmp_path), built())
    checkpoint_writer.save(content(1), wait=False)
    assert disk.busy.wait(60)
    checkpoint_writer.close()
    assert not disk.open.is_set()


class TakeSnapshot(kc.Callback):
    """Takes a snapshot after a batch, and copies the variables."""

    def on_train_begin(self, logs=None):
        self.step = ModelStep(self.model)
        self.snapshot = None

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.snapshot = Snapshot(self.step)
            self.copies = [variable.numpy() for variable in saved_variables(self.step)]


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_do_not_change_a_snapshot(optimizer, tmp_path):
    """With Keras's ops and TensorFlow's fused kernels; also Lion, Nadam and others that only Keras has."""
    model = classifier(optimizer=OPTIMIZERS[optimizer]())
    tfdist.fit(model, batches(), callbacks=[callback := TakeSnapshot()])
    CheckpointFolder(tmp_path).save(callback.step, TrainingState(3, 0), read=callback.snapshot.read)
    assert differ(callback.copies, callback.step)
    CheckpointFolder(tmp_path).restore(CheckpointFolder(tmp_path).find(3), callback.step)
    assert not differ(callback.copies, callback.step)


def test_a_snapshot_of_sharded_variables(servers, tmp_path):
    with servers(3, shard=ShardRule(min_bytes=0)).scope():
        step = built()
    before = [variable.numpy() for variable in saved_variables(step)]
    snapshot = Snapshot(step)
    for variable in saved_variables(step):
        variable.assign(np.ones(variable.shape) * 5)
    CheckpointFolder(tmp_path).save(step, TrainingState(3, 0), read=snapshot.read)
    assert not snapshot._values  # memory is freed piece by piece
    CheckpointFolder(tmp_path).restore(CheckpointFolder(tmp_path).find(3), step)
    assert not differ(before, step)


@pytest.fixture
def records(monkeypatch):
    """The records of checkpoints: `("checkpoint", 4)`."""
    records = queue.Queue()
    monkeypatch.setattr(writer, "emit", lambda kind, **fields: records.put((kind, fields["step"])))
    return records


class FillDisk(kc.Callback):
    """Fills the disk after a checkpoint is saved, and frees the space after another one could not be saved.

    Args:
        folder: a folder on the disk.
        records: the records of checkpoints.
        full: the step of the first checkpoint.
        free: the step of the second.
    """

    def __init__(self, folder, records, full, free=None):
        super().__init__()
        self.ballast = folder / "ballast"
        self.records, self.full, self.free = records, full, free

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.full:  # the first step after it
            while self.records.get(timeout=60) != ("checkpoint", self.full):
                pass
            fill(self.ballast)
        if batch == self.free:
            while self.records.get(timeout=60) != ("checkpoint_failed", self.free):
                pass
            self.ballast.unlink()


def fill(ballast):
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(2**20))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_real_full_disk(asynchronous, small_disk, records, log):
    model = classifier(keras.layers.Dense(64))
    data = batches(*classes(160))  # 20 steps
    checkpoints = Checkpoints(small_disk / "checkpoints", every_steps=4, keep=1, asynchronous=asynchronous)
    tfdist.fit(
        model, data, callbacks=[FillDisk(small_disk, records, 4, 12)], checkpoints=checkpoints, steps_per_execution=1
    )
    failed = [int(line.split("step ")[1].split()[0]) for line in log if "No space left" in line]
    assert failed == [8, 12]
    assert CheckpointFolder(small_disk / "checkpoints").newest()[0].state.step == 20
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step-00000020"]


@pytest.mark.slow
def test_the_last_good_checkpoint_stays_if_the_disk_stays_full(small_disk, records):
    model, data = classifier(keras.layers.Dense(64)), batches(*classes(160))
    checkpoints = Checkpoints(small_disk / "checkpoints", every_steps=4, keep=1)
    room = FillDisk(small_disk, records, 4)
    with raises(ResultNotSaved, "checkpoint-not-written") as caught:
        tfdist.fit(model, data, callbacks=[room], checkpoints=checkpoints, steps_per_execution=1)
    assert "No space left" in caught.value.message
    assert CheckpointFolder(small_disk / "checkpoints").newest()[0].state.step == 4
    assert sorted(path.name for path in (small_disk / "checkpoints").iterdir()) == ["step-00000004"]
    room.ballast.unlink()
    tfdist.fit(classifier(keras.layers.Dense(64)), data, checkpoints=checkpoints)
    assert CheckpointFolder(small_disk / "checkpoints").steps() == [20]


@pytest.mark.slow
def test_a_full_disk_is_not_an_error_at_the_start(small_disk, log):
    fill(small_disk / "ballast")
    with raises(ResultNotSaved, "checkpoint-not-written"):
        tfdist.fit(classifier(), batches(), checkpoints=Checkpoints(small_disk, every_steps=4))
    assert any("step 4 " in line and "No space left" in line for line in log)


def test_a_read_only_folder_is_an_error_before_the_first_step(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    begun = time.monotonic()
    with raises(TrainingError, "checkpoint-dir-not-writable") as caught:
        tfdist.fit(classifier(), batches().repeat(), steps_per_epoch=10**9, checkpoints=Checkpoints(small_disk))
    assert "Read-only" in caught.value.message
    assert "checkpoint.dir" in str(caught.value.hint)
    assert time.monotonic() - begun < 60
