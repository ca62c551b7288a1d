"""Tests of checkpoints: complete or absent; a training resumes exactly from the newest undamaged one."""

import contextlib
import json
import os
import re
import resource
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import BATCH, FEATURES, batches, classes, classifier, difference
from tfdist_cli import Checkpoints
from tfdist_cli.errors import ResultNotSaved, TrainingError
from tfdist_cli.spec.sections.updates import ShardRule
from tfdist_cli.train.checkpoint import store as module
from tfdist_cli.train.checkpoint import tensors
from tfdist_cli.train.checkpoint.files import retention
from tfdist_cli.train.checkpoint.files.state import DamagedCheckpoint, TrainingState
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.data.pipeline import Pipeline
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.variables import sharding
from tfdist_cli.train.variables.sharding import parts

pytestmark = pytest.mark.slow


def build(units=4, optimizer="adam"):
    keras.utils.set_random_seed(7)
    return classifier(
        layers.Dense(units, "relu"), layers.BatchNormalization(), layers.Dropout(0.4), optimizer=optimizer
    )


def built(**given):
    step = ModelStep(build(**given))
    step.build(batches().element_spec)
    return step


def shuffled(shard):
    """44 examples, in a different order in each pass; a batch of 8 may cross from one pass into the next."""
    whole = batches().unbatch()
    return Pipeline(BATCH, seed=3).batches(whole, shard)


def train(folder, max_steps, model=None, **given):
    model = model or build()
    options = {"steps_per_epoch": 6, "steps_per_execution": 2, "max_steps": max_steps} | given
    tfdist.fit(model, shuffled, checkpoints=Checkpoints(folder, every_steps=5, keep=9), **options)
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model after 17 uninterrupted steps."""
    return train(tmp_path_factory.mktemp("whole"), 17)


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("last_steps", [[1, 13], [5, 12]])
def test_a_resumed_training_equals_an_uninterrupted_one(last_steps, whole, tmp_path):
    for stop in last_steps:
        train(tmp_path, stop)
    parts = train(tmp_path, 17)
    assert difference(whole.variables, parts.variables) == 0
    assert difference(whole.optimizer.variables, parts.optimizer.variables) == 0
    assert int(parts.optimizer.iterations) == 17


def test_arrays_resume_after_the_examples_trained_on(tmp_path):
    def fit(folder, **given):
        model = build()
        tfdist.fit(model, classes(100), checkpoints=Checkpoints(folder, every_steps=3), **given)
        return model

    whole = fit(tmp_path / "whole", max_steps=11)
    fit(tmp_path / "parts", max_steps=6)
    assert difference(whole.variables, fit(tmp_path / "parts", max_steps=11).variables) == 0


def test_the_last_checkpoint_has_averaged_weights(tmp_path):
    model = train(tmp_path, 5, build(optimizer=keras.optimizers.SGD(0.1, use_ema=True)))
    again = built(optimizer=keras.optimizers.SGD(0.1, use_ema=True))
    folder = CheckpointFolder(tmp_path)
    folder.restore(folder.find(5), again)
    assert difference(model.variables, again.model.variables) == 0


def test_nothing_is_left_to_train(tmp_path, log):
    model = train(tmp_path, 7)
    again = train(tmp_path, 7)
    assert difference(model.variables, again.variables) == 0
    assert any("step 7 of 7" in line for line in log)


def flip(path, bit=13):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1 << bit % 8
    path.write_bytes(data)


DAMAGE = {
    "truncated": lambda path: _data(path).write_bytes(_data(path).read_bytes()[:-1]),
    "empty": lambda path: _data(path).write_bytes(b""),
    "a bit flipped": lambda path: flip(_data(path)),
    "index flipped": lambda path: flip(path / "variables.index"),
    "missing": lambda path: _data(path).unlink(),
    "no state": lambda path: (path / "state.json").unlink(),
    "empty state": lambda path: (path / "state.json").write_text(""),
    "state is a list": lambda path: (path / "state.json").write_text("[1, 2]"),
    "state is a text": lambda path: (path / "state.json").write_text('"step"'),
    "state is another": lambda path: (path / "state.json").write_text('{"format": 1, "files": 3}'),
    "state is binary": lambda path: (path / "state.json").write_bytes(b"\xff\xfe\x00"),
    "state is deep": lambda path: (path / "state.json").write_text("[" * 100_000),
    "another step": lambda path: _edit(path, step=11),
    "no files": lambda path: _edit(path, files={}),
    "a later format": lambda path: _edit(path, format=99),
    "an empty folder": lambda path: (shutil.rmtree(path), path.mkdir()),
    "a file": lambda path: (shutil.rmtree(path), path.write_text("")),
}


def _data(path):
    (data,) = path.glob("variables.data*")
    return data


def _edit(path, **values):
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | values))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    train(folder, 10)
    return folder


@pytest.mark.rotates(5)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_andnamed_variables(damage, trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    DAMAGE[damage](tmp_path / "step-00000010")
    found, reasons = CheckpointFolder(tmp_path).newest()
    assert found.state.step == 5
    assert len(reasons) == 1
    assert "step-00000010" in reasons[10]


def test_any_changed_bit_of_the_state_is_detected(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "step-00000010" / "state.json"
    whole, unchanged = path.read_bytes(), CheckpointFolder(tmp_path).find(10).state
    for place in range(0, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = CheckpointFolder(tmp_path).find(10)
        except DamagedCheckpoint:
            continue
        assert found.state == unchanged, "a digit beyond a number's precision may differ"


def test_training_resumes_from_the_newest_undamaged_checkpoint(whole, trained, tmp_path, log):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    flip(_data(tmp_path / "step-00000010"))
    assert difference(train(tmp_path, 17).variables, whole.variables) == 0
    assert any("damaged" in line and "step-00000010/variables.data" in line for line in log)
    assert any(line.endswith(f"{tmp_path}/damaged-step-00000010") for line in log)
    assert any(f"{tmp_path}/step-00000005" in line for line in log)
    assert CheckpointFolder(tmp_path).newest() == (CheckpointFolder(tmp_path).find(17), {})
    assert "has been changed" in _reason(tmp_path / "damaged-step-00000010", tmp_path / "again")


def _reason(damaged, folder):
    shutil.copytree(damaged, folder / "step-00000010")
    with pytest.raises(DamagedCheckpoint) as raised:
        CheckpointFolder(folder).find(10)
    return str(raised.value)


def test_damaged_checkpoints_get_different_names(step, tmp_path):
    folder = CheckpointFolder(tmp_path)
    for name in ("damaged-step-00000003", "damaged-step-00000003-2", "damaged-step-00000003-3"):
        save_steps(folder, [3], step)
        assert folder.set_aside(3) == tmp_path / name
    assert folder.steps() == []


def test_a_damaged_checkpoint_that_cannot_be_renamed_stays(trained, tmp_path, log, monkeypatch):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    flip(_data(tmp_path / "step-00000010"))

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(CheckpointFolder, "set_aside", fail)
    train(tmp_path, 7)
    assert any("[Errno 5]" in line for line in log)


def test_the_files_of_a_killed_save_are_removed(step, tmp_path):
    folder = CheckpointFolder(tmp_path)
    save_steps(folder, [3], step)
    before = sorted(tmp_path.rglob("*"))
    for name in (".writing-00000004-77", ".removing-step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "variables.index").write_text("")
    (tmp_path / "step-00000003" / ".state.json.77").write_text("")
    folder.prepare()
    assert sorted(tmp_path.rglob("*")) == before


def test_other_files_in_the_folder_stay(tmp_path):
    for name in ("notes.txt", ".hidden", "step-best", "damaged-step-00000001"):
        (tmp_path / name).mkdir()
    CheckpointFolder(tmp_path).prepare()
    assert len(list(tmp_path.iterdir())) == 4


def test_damaged_checkpoints_are_neither_counted_nor_removed(step, tmp_path):
    folder = CheckpointFolder(tmp_path, keep=2)
    save_steps(folder, [1, 2], step)
    _data(tmp_path / "step-00000002").write_bytes(b"")
    save_steps(folder, [3], step)
    assert folder.steps() == [1, 2, 3]
    save_steps(folder, [4], step)
    assert folder.steps() == [2, 3, 4]


def test_it_is_an_error_if_all_checkpoints_are_damaged(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("step-*"):
        (path / "state.json").unlink()
    with raises(TrainingError, "checkpoint-damaged") as caught:
        train(tmp_path, 17)
    assert f"{tmp_path}/step-00000010" in caught.value.message


def test_folders_of_other_names_and_a_named_pipe_are_skipped(step, tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(step, TrainingState(7, 0))
    for name in ("step-²", "step-00000008x", "step-00000009"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "step-00000009" / "state.json")
    found, damaged = folder.newest()
    assert found.state.step == 7
    assert list(damaged) == [9]
    assert "not a regular file" in damaged[9]


def test_a_removed_folder_is_not_created_again(step, tmp_path):
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    folder.prepare()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError):
        folder.save(step, TrainingState(1, 0))
    assert not (tmp_path / "run").exists()


def test_folders_that_are_not_checkpoints_are_ignored(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    (tmp_path / "step-00000099.tmp").mkdir()
    (tmp_path / "step-last").mkdir()
    (tmp_path / ".writing-00000099-1").mkdir()
    found, reasons = CheckpointFolder(tmp_path).newest()
    assert (found.state.step, reasons) == (10, {})


@pytest.mark.parametrize(
    ("given", "code", "named"),
    [
        ({"units": 5}, "checkpoint-of-another-model", ["kernel", "(5, 4)", "(5, 5)"]),
        ({"optimizer": "sgd"}, "checkpoint-of-another-model", ["variables"]),
        ({"optimizer": "nadam"}, "checkpoint-of-another-model", ["variables"]),
        ({"optimizer": keras.optimizers.AdamW()}, "checkpoint-of-another-optimizer", ["Adam,", "AdamW"]),
    ],
)
def test_a_checkpoint_of_another_model_is_an_error(given, code, named, trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    with raises(TrainingError, code) as caught:
        train(tmp_path, 17, model=build(**given))
    assert all(each in caught.value.message for each in named), caught.value


def three_layers(frozen, optimizer="adam"):
    hidden = [layers.Dense(FEATURES, name=name) for name in "abc"]
    model = keras.Sequential([keras.Input((FEATURES,)), *hidden], name="three")
    for layer in hidden:
        layer.trainable = layer.name != frozen
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    step = ModelStep(model)
    step.build(batches().element_spec)
    return step


@pytest.mark.parametrize("optimizer", [True, False])
def test_weights_are_not_restored_into_the_layer_that_is_trained_instead(optimizer, tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(three_layers("a"), TrainingState(1, 0))
    with raises(TrainingError, "checkpoint-of-another-model") as caught:
        folder.restore(folder.find(1), three_layers("b"), optimizer=optimizer)
    assert re.findall(r"[abc]/\w+", caught.value.message) == ["b/kernel", "a/kernel"]


@pytest.mark.parametrize("saved", ["", "c"])
def test_the_same_variables_in_another_group_are_another_model(saved, tmp_path):
    """The groups have the same variables, one after the other, and SGD has none of its own."""
    folder = CheckpointFolder(tmp_path)
    folder.save(three_layers(saved, "sgd"), TrainingState(1, 0))
    for frozen in ("", "c"):
        refused = raises(TrainingError, "checkpoint-of-another-model") if frozen != saved else contextlib.nullcontext()
        with refused:
            folder.restore(folder.find(1), three_layers(frozen, "sgd"))


def test_layers_without_names_of_their_own_are_restored_by_their_order(tmp_path):
    step, again = built(), built()
    assert [each.path for each in step.parameters] != [each.path for each in again.parameters]
    folder = CheckpointFolder(tmp_path)
    folder.save(step, TrainingState(1, 0))
    folder.restore(folder.find(1), again)
    assert difference(step.parameters, again.parameters) == 0


def test_an_evaluator_needs_no_optimizer(trained):
    step = built(optimizer="sgd")
    folder = CheckpointFolder(trained)
    folder.restore(folder.find(10), step, optimizer=False)
    assert difference(step.model.variables, train(trained, 10).variables) == 0


@pytest.fixture(scope="module")
def step():
    return built()


def save_steps(folder, steps, step):
    for number in steps:
        folder.save(step, TrainingState(number, 0))


def test_old_checkpoints_are_removed(step, tmp_path):
    folder = CheckpointFolder(tmp_path, keep=2)
    save_steps(folder, [5, 10, 15, 100], step)
    assert folder.steps() == [15, 100]


def test_a_damaged_newer_checkpoint_is_not_counted(step, tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1)
    save_steps(folder, [5, 30], step)
    folder.save(step, TrainingState(5, 0))
    flip(_data(tmp_path / "step-00000030"))
    save_steps(folder, [10], step)
    assert folder.steps() == [10, 30]
    assert folder.newest()[0].state.step == 10
    save_steps(folder, [30, 35], step)
    assert folder.steps() == [35]


def test_checkpoints_that_are_not_evaluated_are_kept(step, tmp_path, monkeypatch):
    monkeypatch.setattr(retention, "UNEVALUATED_KEPT", 3)
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.mark_evaluated([])
    save_steps(folder, [1, 2, 3], step)
    assert folder.steps() == [1, 2, 3]
    folder.mark_evaluated([1, 2])
    save_steps(folder, [4, 5, 6], step)
    assert folder.steps() == [3, 4, 5, 6]
    save_steps(folder, [7, 8], step)
    assert folder.steps() == [5, 6, 7, 8]


def test_an_unreadable_evaluator_file_is_ignored(step, tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1)
    (tmp_path / "evaluator.json").write_text("")
    save_steps(folder, [1, 2], step)
    assert folder.steps() == [2]


def test_a_checkpoint_of_the_same_step_is_replaced(step, tmp_path):
    folder = CheckpointFolder(tmp_path)
    save_steps(folder, [3], step)
    step.parameters[0].assign(step.parameters[0] + 1)
    changed = step.parameters[0].numpy()
    folder.save(step, TrainingState(3, 0, final=True))
    step.parameters[0].assign(changed - 1)
    folder.restore(folder.find(3), step)
    np.testing.assert_array_equal(step.parameters[0].numpy(), changed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003"]


def test_a_checkpoint_whose_replacement_was_interrupted_is_found(step, tmp_path):
    folder = CheckpointFolder(tmp_path)
    save_steps(folder, [3], step)
    (tmp_path / "step-00000003").rename(tmp_path / ".replaced-step-00000003")
    assert CheckpointFolder(tmp_path).newest()[0].state.step == 3


@pytest.mark.parametrize("place", ["write_variables", "digest_of", "write_synced", "sync"])
def test_a_failed_save_leaves_earlier_checkpoints_and_no_files(place, step, tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path, keep=1)
    save_steps(folder, [1], step)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, place, fail)
    with pytest.raises(OSError, match="No space"):
        save_steps(folder, [2], step)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert folder.newest()[0].state.step == 1


def test_a_write_error_of_tensorflow_has_one_line(step, tmp_path):
    folder = CheckpointFolder(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            save_steps(folder, [1], step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def fill_disk(monkeypatch, full):
    """Makes saving fail for states for which `full` returns true."""
    save = CheckpointFolder.save

    def save_unless_full(folder, step, state, **given):
        if full(state):
            raise OSError(28, "No space left on device")
        return save(folder, step, state, **given)

    monkeypatch.setattr(CheckpointFolder, "save", save_unless_full)


def test_training_continues_if_a_checkpoint_cannot_be_written(whole, tmp_path, monkeypatch, log):
    fill_disk(monkeypatch, lambda state: state.step == 10)
    model = train(tmp_path, 17)
    assert CheckpointFolder(tmp_path).steps() == [5, 15, 17]
    assert any("step 10 " in line and "No space left" in line for line in log)
    assert difference(model.variables, whole.variables) == 0


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    fill_disk(monkeypatch, lambda state: state.step > 10)
    with raises(ResultNotSaved, "checkpoint-not-written") as caught:
        train(tmp_path, 17)
    assert "No space left" in caught.value.message
    assert CheckpointFolder(tmp_path).steps() == [5, 10]


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(TrainingError, "checkpoint-dir-not-writable") as caught:
        train(tmp_path / "file" / "checkpoints", 6)
    assert "Not a directory" in caught.value.message


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("given", "saves"),
    [
        ({"every_steps": 4}, [4, 8, 12, 13]),
        ({"every_steps": 13}, [13]),
        ({"every_steps": 100}, [13]),
        ({"every_seconds": 1e-9}, [4, 8, 12, 13]),
        ({"every_seconds": 3600}, [13]),
        ({"every_steps": 6, "every_seconds": 3600}, [6, 12, 13]),
    ],
)
def test_when_checkpoints_are_saved(given, saves, tmp_path, monkeypatch):
    steps, save = [], CheckpointFolder.save

    def noting(folder, step, state, **more):
        with contextlib.suppress(IndexError):
            assert steps[-1] <= state.step
        steps.append(state.step)
        return save(folder, step, state, **more)

    monkeypatch.setattr(CheckpointFolder, "save", noting)
    tfdist.fit(
        classifier(),
        lambda shard: batches().repeat(),
        steps_per_epoch=100,
        max_steps=13,
        steps_per_execution=4,
        checkpoints=Checkpoints(tmp_path, keep=20, **given),
    )
    assert list(dict.fromkeys(steps)) == saves


def sharded_over(servers, count, optimizer="adam"):
    """Returns a built model whose variables of more than one row are sharded over some ps."""
    with servers(count, shard=ShardRule(min_bytes=0)).scope():
        return built(optimizer=optimizer)


def randomize(step):
    numbers = np.random.default_rng(5)
    for variable in [*step.model.variables, *step.model.optimizer.variables]:
        variable.assign(numbers.random(variable.shape) * 100)


@pytest.mark.rotates(5)
@pytest.mark.parametrize("block", [40, 2**20])
@pytest.mark.parametrize(("saving", "restoring"), [(1, 3), (3, 1), (3, 2), (2, 3), (3, 3)])
def test_any_number_of_shards_is_restored_to_any_other(saving, restoring, block, servers, tmp_path, monkeypatch):
    monkeypatch.setattr(sharding, "BLOCK_BYTES", block)
    monkeypatch.setattr(tensors, "FILE_BYTES", 3 * block)
    some, others = sharded_over(servers, saving), sharded_over(servers, restoring)
    randomize(some)
    folder = CheckpointFolder(tmp_path)
    folder.save(some, TrainingState(4, 0))
    folder.restore(folder.find(4), others)
    assert max(len(parts(variable)) for variable in others.model.optimizer.variables) == restoring
    assert difference(some.model.variables, others.model.variables) == 0
    assert difference(some.model.optimizer.variables, others.model.optimizer.variables) == 0
    scoring = sharded_over(servers, restoring, optimizer="sgd")
    folder.restore(folder.find(4), scoring, optimizer=False)
    assert difference(some.model.variables, scoring.model.variables) == 0


def test_blocks_are_merged_into_one_checkpoint(servers, tmp_path, monkeypatch):
    monkeypatch.setattr(sharding, "BLOCK_BYTES", 40)
    monkeypatch.setattr(tensors, "FILE_BYTES", 100)
    step = sharded_over(servers, 3)
    path = CheckpointFolder(tmp_path).save(step, TrainingState(4, 0))
    names = {entry.name for entry in path.iterdir()}
    data = sorted(names - {"state.json", "variables.index"})
    assert data == [f"variables.data-{n:05d}-of-{len(data):05d}" for n in range(len(data))]
    reader = tf.train.load_checkpoint(str(path / "variables"))
    assert len(reader.get_variable_to_shape_map()) == len(step.model.variables) + len(step.model.optimizer.variables)
    kernel = reader.get_tensor("parameters/0/.ATTRIBUTES/VARIABLE_VALUE")
    np.testing.assert_array_equal(kernel, step.parameters[0].numpy())


def test_a_batch_is_no_larger_than_a_file(servers, tmp_path, monkeypatch):
    monkeypatch.setattr(sharding, "BLOCK_BYTES", 40)
    monkeypatch.setattr(tensors, "FILE_BYTES", 100)
    step = sharded_over(servers, 3)
    largest = max(piece.bytes for variable in step.model.variables for piece in sharding.pieces(variable))
    batches = [
        sum(entry.piece.bytes for entry in batch)
        for batch in tensors._batches(tensors.entries_of(tensors.named_variables(step)))
    ]
    assert max(batches) <= max(100, largest) < sum(batches)


def test_names_equal_those_of_tf_train_checkpoint(step, tmp_path):
    folder = CheckpointFolder(tmp_path)
    save_steps(folder, [3], step)
    groups = {"parameters": step.parameters, "state": step.state, "optimizer": step.model.optimizer.variables}
    values = {name: [tf.Variable(one.numpy()) for one in group] for name, group in groups.items()}
    tf.train.Checkpoint(**values).write(str(tmp_path / "theirs"))
    ours = tf.train.load_checkpoint(str(tmp_path / "step-00000003" / "variables"))
    theirs = tf.train.load_checkpoint(str(tmp_path / "theirs"))
    names = ours.get_variable_to_shape_map()
    assert names.keys() < theirs.get_variable_to_shape_map().keys()
    assert len(names) == sum(len(group) for group in groups.values())
    assert all(np.array_equal(ours.get_tensor(name), theirs.get_tensor(name)) for name in names)
