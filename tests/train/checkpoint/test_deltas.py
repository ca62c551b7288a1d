"""A delta checkpoint restores the same bits as a full one of the same moment."""

import threading
import uuid
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import batches, classifier
from tests.support.local_coordinator import NoPause, local_engine
from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.spec.sections.updates import ShardRule, Updates
from tfdist_cli.storage.remote import RemoteFolder
from tfdist_cli.tables.hashing import GROUP
from tfdist_cli.train.checkpoint import store, tensors
from tfdist_cli.train.checkpoint.bucket import BucketCheckpoints
from tfdist_cli.train.checkpoint.files.retention import steps_to_remove
from tfdist_cli.train.checkpoint.files.state import TrainingState
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.checkpoint.tensors import saved_variables
from tfdist_cli.train.checkpoint.writer import CheckpointContent, CheckpointWriter
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.layers import DynamicEmbedding, row_index
from tfdist_cli.train.layers.changed_rows import ChangedRows
from tfdist_cli.train.layers.dynamic_tables import row_indices, track_changes
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.optimizers.registry import fused_update_of

pytestmark = pytest.mark.slow

WIDTH, BATCH = 4, 16
SPEC = tf.TensorSpec([BATCH, 3], tf.int64), tf.TensorSpec([BATCH, 1])
POLICIES = {"plain": {}, "lru": {"evict": "lru"}, "lfu": {"evict": "lfu", "admit_after": 2, "ttl": 1e-4}}


def adagrad():
    return keras.optimizers.Adagrad(0.3)


def adam():
    """In one process, Keras's Adam changes all rows that have momentum."""
    return keras.optimizers.Adam(0.05)


def build(policy="lru", optimizer=adagrad, groups=None):
    given = {"capacity": round((groups or (4 if policy == "plain" else 1)) * GROUP)}
    tables = [DynamicEmbedding(WIDTH, name=f"table_{n}", **given, **POLICIES[policy]) for n in range(2)]
    ids = keras.Input((3,), dtype="int64")
    vectors = keras.layers.Concatenate()([tables[0](ids), tables[1](ids // 2)])
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(vectors)))
    model.compile(optimizer(), "mse")
    return model


def stream(steps=60):
    """New ids all the time: in tables of one group, some lose their rows, and come back."""
    ids = np.random.default_rng(1).integers(0, 2500, (steps * BATCH, 3))
    return batches(ids, np.ones((len(ids), 1), np.float32), batch=BATCH)


def built(policy="lru", *, tracked=True, optimizer=adagrad, groups=None):
    model = build(policy, optimizer, groups)
    step = ModelStep(model)
    step.build(SPEC)
    if tracked:
        track_changes(model)
    return step


def values(step):
    return [variable.value.numpy() for variable in saved_variables(step)]


def assert_restores(folder, number, expected, policy="lru", **given):
    step = built(policy, tracked=False, **given)
    folder.restore(folder.find(number), step)
    for own, value, variable in zip(values(step), expected, saved_variables(step), strict=True):
        np.testing.assert_array_equal(own, value, err_msg=variable.path)


def change(step, *rows):
    """Changes some rows, as updates do."""
    for index in row_indices(step.model):
        update = fused_update_of(step.model.optimizer)
        slots = [slot.value for slot in update.slot_variables(index.table)]
        gradient = tf.IndexedSlices(tf.ones([len(rows), WIDTH]), tf.constant(rows), index.table.shape)
        update.sparse(index.table.value, slots, gradient, tf.constant(0.1), tf.constant(3, tf.int64))


def save(folder, step, number, *, full_every=4, wait=True):
    saving = CheckpointWriter(folder, step, True, full_every)
    saving.save(CheckpointContent(TrainingState(number, 0)), wait=wait)
    saving.finish()
    folder.flush()
    if saving.unsaved:
        raise saving.unsaved


@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("policy", "optimizer"), [("plain", adam), ("lru", adagrad), ("lfu", adagrad)], ids=["adam", "lru", "lfu"]
)
def test_deltas_of_a_training_have_all_that_changed(policy, optimizer, tmp_path, monkeypatch):
    at, real = {}, CheckpointFolder.save

    def noting(self, step, state, **given):
        at[state.step] = values(step)
        return real(self, step, state, **given)

    monkeypatch.setattr(CheckpointFolder, "save", noting)
    checkpoints = tfdist.Checkpoints(tmp_path, every_steps=10, keep=100, full_every=4, asynchronous=False)
    tfdist.fit(build(policy, optimizer), stream(), epochs=1, checkpoints=checkpoints)
    folder = CheckpointFolder(tmp_path)
    assert [folder.find(number).state.deltas for number in folder.steps()] == [0, 1, 2, 3, 0, 1]
    for number in folder.steps():
        assert_restores(folder, number, at[number], policy, optimizer=optimizer)


def held(step):
    """What each table holds for its ids, and for those without rows."""
    for index in row_indices(step.model):
        ids, rows = index.ids()
        at = np.append(0, rows[np.argsort(ids)])
        yield np.sort(ids)
        for variable in index.row_variables:
            yield variable.value.numpy().reshape(-1, *index.row_shape(variable))[at]


@pytest.mark.rotates(5)
@pytest.mark.parametrize(("policy", "optimizer"), [("plain", adam), ("lru", adagrad)])
def test_a_checkpoint_is_read_into_tables_of_another_size(policy, optimizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "FILE_BYTES", 40 * GROUP)  # so that there are several pieces
    checkpoints = tfdist.Checkpoints(tmp_path, every_steps=20, keep=100, full_every=4)
    before = build(policy, optimizer)
    tfdist.fit(before, stream(), epochs=1, checkpoints=checkpoints)
    folder = CheckpointFolder(tmp_path)
    assert folder.find(60).state.deltas == 2
    step = built(policy, tracked=True, optimizer=optimizer, groups=6)
    change(step, 7, 11)  # of a training that fell back to the checkpoint
    folder.restore(folder.find(60), step)
    assert [int(index.table.shape[0]) // GROUP for index in row_indices(step.model)] == [
        6 if policy == "lru" else 9
    ] * 2
    for own, expected in zip(held(step), held(ModelStep(before)), strict=True):
        np.testing.assert_array_equal(own, expected)
    save(folder, step, 61)
    assert folder.find(61).state.deltas == 0  # a delta has the numbers of rows
    assert_restores(folder, 61, values(step), policy, optimizer=optimizer, groups=6)


def test_tables_of_parameter_servers_are_read_into_larger_ones(servers, tmp_path, monkeypatch):
    monkeypatch.setattr(row_index, "_is_shared", lambda: True)
    before = build("plain")
    tfdist.fit(before, stream(), epochs=1, checkpoints=tfdist.Checkpoints(tmp_path, every_steps=60))
    folder = CheckpointFolder(tmp_path)
    with servers(3, shard=ShardRule(min_bytes=100)).scope():
        step = built("plain", tracked=False, groups=6)
        folder.restore(folder.find(60), step)
    for own, expected in zip(held(step), held(ModelStep(before)), strict=True):
        np.testing.assert_array_equal(own, expected)


def test_a_table_that_is_too_small_for_a_checkpoint_evicts_or_says_so(tmp_path):
    tfdist.fit(build("plain"), stream(), epochs=1, checkpoints=tfdist.Checkpoints(tmp_path, every_steps=60))
    folder = CheckpointFolder(tmp_path)
    with raises(TrainingError, "dynamic-embedding-full"):
        folder.restore(folder.find(60), built("plain", groups=0.5))
    step = built("lru", groups=1)
    folder.restore(folder.find(60), step)
    assert [len(index.ids()[0]) for index in row_indices(step.model)] == [pytest.approx(GROUP, rel=0.03)] * 2


@pytest.mark.rotates(5)
@pytest.mark.parametrize("updates", [Updates(), Updates(local_steps=2)], ids=["async", "local steps"])
def test_deltas_of_parameter_servers_move_to_other_ones(updates, servers, tmp_path, monkeypatch):
    monkeypatch.setattr(row_index, "_is_shared", lambda: True)
    monkeypatch.setattr(row_index, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(tensors, "FILE_BYTES", 2000)  # so that there are several pieces

    def tracked():
        model = build()
        track_changes(model)
        return model

    strategy = servers(2, shard=ShardRule(min_bytes=100))
    engine, _ = local_engine(monkeypatch, strategy, tracked, stream(), Rules(updates=updates))
    step, folder = engine._step, CheckpointFolder(tmp_path)
    with strategy.scope():
        for number in (10, 20, 30):
            list(engine.run(10, first=number - 10, size=10, adapts=False, pause=NoPause()))
            save(folder, step, number, wait=number == 20)
    expected = values(step)
    assert folder.find(30).state.deltas == 2
    assert_restores(folder, 30, expected)
    with servers(3, shard=ShardRule(min_bytes=100)).scope():
        assert_restores(folder, 30, expected)


def test_a_delta_has_only_what_changed(tmp_path):
    step, folder = built("plain"), CheckpointFolder(tmp_path)
    save(folder, step, 1)
    change(step, 7, 2000)
    save(folder, step, 2)
    save(folder, step, 3)
    full, one, none = (folder.find(number) for number in (1, 2, 3))
    own = [
        sum(size for name, (size, _) in each.state.files.items() if f"delta-{n}" in name)
        for n, each in ((1, one), (2, none))
    ]
    assert own[1] < own[0] < sum(size for size, _ in full.state.files.values()) / 20
    assert (full.path / "variables.index").samefile(none.path / "variables.index")
    assert (one.path / "delta-1.index").samefile(none.path / "delta-1.index")
    found = tf.train.load_checkpoint(str(one.path / "delta-1"))
    assert found.get_tensor("rows/1").tolist() == [7, 2000]
    assert_restores(folder, 3, values(step), "plain")


def test_weights_that_a_callback_assigns_are_in_the_next_delta(tmp_path):
    step, folder = built(), CheckpointFolder(tmp_path)
    save(folder, step, 1)
    step.model.set_weights([weight + 1 for weight in step.model.get_weights()])
    save(folder, step, 2)
    assert folder.find(2).state.deltas == 1
    assert_restores(folder, 2, values(step))


def test_a_training_goes_on_with_deltas_of_what_it_resumes_from(tmp_path):
    save(CheckpointFolder(tmp_path), step := built(), 1)
    folder, again = CheckpointFolder(tmp_path), built()
    folder.restore(folder.find(1), again)
    change(again, 5)
    save(folder, again, 2)
    assert folder.find(2).state.deltas == 1
    assert_restores(folder, 2, values(again))
    assert any((old != new).any() for old, new in zip(values(step), values(again), strict=True))


def test_the_checkpoint_after_a_failed_one_is_full(tmp_path, monkeypatch):
    step, folder = built(), CheckpointFolder(tmp_path)
    save(folder, step, 1)
    change(step, 5)

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store, "write_changes", fail)
        with pytest.raises(OSError, match="No space"):
            save(folder, step, 2)
    save(folder, step, 3)
    assert folder.find(3).state.deltas == 0
    assert_restores(folder, 3, values(step))


def test_files_are_copied_where_there_are_no_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    step, folder = built(), CheckpointFolder(tmp_path)
    save(folder, step, 1)
    save(folder, step, 2)
    (folder.find(1).path / "variables.index").unlink()
    assert_restores(folder, 2, values(step))


def test_damage_of_a_full_checkpoint_leaves_the_one_before(tmp_path, caplog):
    step, folder = built(), CheckpointFolder(tmp_path, keep=2)
    for number in range(1, 7):
        save(folder, step, number, full_every=3)
    assert folder.steps() == [3, 5, 6]  # 3 is a delta of 1, and shares no file with the others
    file = next(folder.find(6).path.glob("variables.data-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    found, damaged = CheckpointFolder(tmp_path).newest()
    assert (found.state.step, sorted(damaged)) == (3, [5, 6])
    assert all("variables.data" in reason for reason in damaged.values())
    (folder.find(3).path / "delta-1.index").unlink()
    with raises(TrainingError, "checkpoint-damaged"):
        tfdist.fit(build(), stream(1), epochs=1, checkpoints=tfdist.Checkpoints(tmp_path))


@pytest.mark.parametrize(
    ("shared", "keep", "removed"),
    [
        ({1: 1, 2: 2, 3: 3}, 1, [1, 2]),
        ({1: 1, 2: 1, 3: 3, 4: 3, 5: 3}, 2, [1, 3]),
        ({1: 1, 2: 1, 3: 3, 4: 3}, 2, [1]),
        ({1: 1, 2: 1, 3: 3}, 1, [1, 2]),
        ({1: 1, 2: 1}, 1, [1]),
        ({}, 1, []),
    ],
)
def test_which_checkpoints_are_removed(shared, keep, removed):
    assert steps_to_remove(shared, keep, None) == removed


def test_a_model_without_dynamic_tables_has_full_checkpoints(tmp_path, log):
    checkpoints = tfdist.Checkpoints(tmp_path, every_steps=2, full_every=5)
    tfdist.fit(classifier(), batches(), epochs=1, checkpoints=checkpoints)
    folder = CheckpointFolder(tmp_path)
    assert {folder.find(number).state.deltas for number in folder.steps()} == {0}
    assert any("full_every" in line for line in log)


def test_a_bucket_gets_only_the_new_files(tmp_path, monkeypatch):
    url, sent, upload = Url(f"memory://{uuid.uuid4()}"), [], RemoteFolder.upload

    def noting(self, file, name):
        sent.append(name)
        upload(self, file, name)

    monkeypatch.setattr(RemoteFolder, "upload", noting)
    step, folder = built(), BucketCheckpoints(url, 1, tmp_path / "local")
    folder.prepare()
    for number in (1, 2, 3):
        change(step, number)
        save(folder, step, number)
    assert {name for name in sent if "variables" not in name} == {
        f"step-0000000{n + 1}/delta-{n}.{kind}" for n in (1, 2) for kind in ("index", "data-00000-of-00001")
    }
    other = BucketCheckpoints(url, 1, tmp_path / "other")
    other.prepare()
    assert other.newest()[0].state.deltas == 2
    assert_restores(other, 3, values(step))
    again = built()
    other.restore(other.find(3), again)
    save(other, again, 4)
    assert other.find(4).state.deltas == 0  # what was downloaded is not kept


def test_rows_that_change_while_they_are_saved_are_in_this_or_the_next_delta(monkeypatch):
    monkeypatch.setattr(row_index, "_is_shared", lambda: True)
    model = build()
    track_changes(model)
    step = ModelStep(model)
    step.build(SPEC)
    index, other = row_indices(model)
    update = fused_update_of(model.optimizer)
    slots = [slot.value for slot in update.slot_variables(index.table)]
    stop, copy = threading.Event(), {id(variable): variable.value.numpy().copy() for variable in index.row_variables}
    random = np.random.default_rng(3)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def train(ids):
        found = index.fetch(ids, create=True)
        rows = found.rows[0]
        gradient = tf.IndexedSlices(tf.random.normal([tf.size(rows), WIDTH]), rows, index.table.shape)
        update.sparse(index.table.value, slots, gradient, tf.constant(0.1), tf.constant(3, tf.int64))

    def work(seed):
        own = np.random.default_rng(seed)
        while not stop.is_set():
            train(tf.constant(own.integers(0, 2000, 50)))

    def take():
        changed = ChangedRows(index)
        numbers = changed.numbers()
        for variable in index.row_variables:
            flat = copy[id(variable)].reshape(-1, *index.row_shape(variable))
            for piece in changed.pieces(variable):
                flat[numbers[piece.first : piece.first + piece.count]] = piece.read().numpy()
        return len(numbers)

    train(tf.constant(random.integers(0, 2000, 50)))
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    counts = [take() for _ in range(40)]
    stop.set()
    for thread in threads:
        thread.join()
    take()
    assert min(counts[1:]) < GROUP
    for variable in index.row_variables:
        np.testing.assert_array_equal(copy[id(variable)], variable.value.numpy(), err_msg=variable.path)
    assert ChangedRows(index).count == ChangedRows(other).count == 0
