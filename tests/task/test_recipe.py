"""Tests of a recipe's task: results that cannot be saved."""

import stat
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import tensorflow as tf
from keras.callbacks import LambdaCallback

import tfdist_cli as tfdist
from tests.support.codes import raises
from tfdist_cli.errors import ResultNotSaved, TrainingError, UsageError
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.spec.sections.recipe import Export, Recipe
from tfdist_cli.task import recipe
from tfdist_cli.task.export import export_checkpoint
from tfdist_cli.task.prediction.job import model_of
from tfdist_cli.train.checkpoint import model_files
from tfdist_cli.train.cluster import join
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.trainer import fit

pytestmark = pytest.mark.slow

MODULE = """
import os
import shutil
import keras
import numpy as np
import tensorflow as tf

def model(params):
    network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    network.compile("sgd", "mse")
    return network

def dataset(params, split, shard):
    return tf.data.Dataset.from_tensor_slices((np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)))

def callbacks(params):
    def remove(epoch, logs):
        for folder in params["removed"]:
            os.rename(folder, folder + ".gone")  # at once, while a checkpoint may be written
            shutil.rmtree(folder + ".gone", ignore_errors=True)

    return [keras.callbacks.LambdaCallback(on_epoch_end=remove)]

def signatures(model):
    return {"doubled": (lambda x: 2 * model(x), [tf.TensorSpec([None, 3])])}
"""


def write_module(folder, monkeypatch):
    """Writes the recipe's module, and lets this process import it and join a cluster anew."""
    (folder / "one_layer.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "one_layer", raising=False)
    monkeypatch.setattr(join, "_joined", None)


def configurations(monkeypatch):
    """Returns a list to which `fit` and `run_recipe` add the configuration that they would train with."""
    built = []
    for module in (fit, recipe):
        monkeypatch.setattr(module, "train", lambda context, model, config: built.append(config))
    return built


def test_a_recipe_and_fit_build_the_same_configuration(tmp_path, monkeypatch):
    write_module(tmp_path, monkeypatch)
    built = configurations(monkeypatch)
    spec = {
        "module": "one_layer",
        "module_dir": tmp_path,
        "params": {"removed": []},
        "checkpoint": {"every_steps": 2, "every_seconds": 60, "dir": tmp_path / "checkpoints", "keep": 5},
        "train": {"batch_size": 2, "epochs": 3, "max_steps": 7},
        "updates": {"mode": "sync"},
        "wire": "bfloat16",
    }
    recipe.run_recipe(join.join(Environment(run_dir=tmp_path)), Recipe.model_validate(spec))
    one_layer = sys.modules["one_layer"]
    tfdist.fit(
        one_layer.model({}),
        one_layer.dataset({}, "train", None).batch(2),
        epochs=3,
        max_steps=7,
        validation_data=one_layer.dataset({}, "test", None).batch(2),
        callbacks=one_layer.callbacks(spec["params"]),
        checkpoints=tfdist.Checkpoints(tmp_path / "checkpoints", every_steps=2, every_seconds=60, keep=5),
        updates=tfdist.Updates(mode="sync"),
        wire="bfloat16",
    )
    first, second = built
    for name in ("steps_per_epoch", "share", "epochs", "max_steps", "steps_per_execution", "rules"):
        assert getattr(first, name) == getattr(second, name), name
    assert first.steps_per_epoch == 4
    assert [vars(config.checkpoints.folder) for config in built] == [vars(first.checkpoints.folder)] * 2
    assert replace(second.checkpoints, folder=first.checkpoints.folder) == first.checkpoints
    assert [(config.validation.steps, config.validation.every_epochs) for config in built] == [(None, 1)] * 2
    assert [[type(callback) for callback in config.callbacks] for config in built] == [[LambdaCallback]] * 2


ARRAYS = "(np.ones((8, 3), np.float32), np.ones((8, 1), np.float32))"


@pytest.mark.parametrize(
    ("returned", "sizes"),
    [
        (f"tf.data.Dataset.from_tensor_slices({ARRAYS})", [[2] * 4, None]),
        (ARRAYS, [[2] * 4, [2] * 2]),
        ("tuple(part[: 2 + 2 * shard.count] for part in " + ARRAYS + ")", [[2] * 2, [2] * 3]),
    ],
)
def test_arrays_are_divided_unless_the_recipe_has_done_so(returned, sizes, tmp_path, monkeypatch):
    write_module(tmp_path, monkeypatch)
    examples = f"tf.data.Dataset.from_tensor_slices({ARRAYS})"
    (tmp_path / "one_layer.py").write_text(MODULE.replace(examples, returned))
    spec = {"module": "one_layer", "module_dir": tmp_path, "params": {"removed": []}, "train": {"batch_size": 2}}
    built = configurations(monkeypatch)
    recipe.run_recipe(join.join(Environment(run_dir=tmp_path)), Recipe.model_validate(spec))
    (config,) = built
    for shards, expected in enumerate(sizes, start=1):
        with nullcontext() if expected else raises(TrainingError, "shard-ignored"):
            assert [len(x) for x, _ in config.data(Shard(0, shards, 0)).take(len(expected or [0]))] == expected


def test_a_dataset_of_batches_of_batches_is_named(tmp_path, monkeypatch):
    write_module(tmp_path, monkeypatch)
    examples = "np.ones((8, 1), np.float32)))"
    (tmp_path / "one_layer.py").write_text(MODULE.replace(examples, f"{examples}.batch(4).batch(2)"))
    spec = {"module": "one_layer", "module_dir": tmp_path, "params": {"removed": []}}
    with raises(TrainingError, "batched-twice"):
        recipe.run_recipe(join.join(Environment(run_dir=tmp_path)), Recipe.model_validate(spec))


def test_the_model_is_exported_if_the_last_checkpoint_is_not_written(tmp_path, monkeypatch):
    write_module(tmp_path, monkeypatch)
    checkpoints, run_dir = tmp_path / "disk" / "checkpoints", tmp_path / "run"
    run_dir.mkdir()
    spec = {
        "module": "one_layer",
        "module_dir": tmp_path,
        "params": {"removed": [str(tmp_path / "disk"), str(run_dir)]},
        "checkpoint": {"every_steps": 2, "dir": checkpoints},
        "evaluate": None,
        "train": {"batch_size": 2},
        "export": {"format": "keras"},
    }
    context = join.join(Environment(run_dir=run_dir))
    with raises(ResultNotSaved, "checkpoint-not-written") as caught:
        recipe.run_recipe(context, Recipe.model_validate(spec))
    assert "No such file" in caught.value.message
    assert (run_dir / "export" / "model.keras").is_file()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700, "only the owner can read it"
    assert not checkpoints.parent.exists(), "a removed folder is not created again"


def test_a_missing_library_of_an_export_is_an_error_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    spec = {"module": "never_imported", "module_dir": tmp_path, "export": {"format": ["keras", "onnx"]}}
    with raises(UsageError, "export-library-missing"):
        recipe.run_recipe(join.join(Environment(run_dir=tmp_path)), Recipe.model_validate(spec))


def test_a_missing_function_of_signatures_is_an_error_before_the_training(tmp_path, monkeypatch):
    write_module(tmp_path, monkeypatch)
    spec = {"module": "one_layer", "module_dir": tmp_path, "export": {"signatures": "missing"}}
    with raises(UsageError, "recipe-function-missing"):
        recipe.run_recipe(join.join(Environment(run_dir=tmp_path)), Recipe.model_validate(spec))


def exporting(folder, export, **more):
    """A recipe that trains and exports."""
    own = {"module": "one_layer", "module_dir": folder, "params": {"removed": []}, "train": {"batch_size": 2}}
    return {**own, "evaluate": None, "export": export, **more}


def test_a_format_that_lacks_an_operation_does_not_stop_the_others(tmp_path, monkeypatch):
    write_module(tmp_path, monkeypatch)

    def refused(*_):
        raise ResultNotSaved("no such operation", code="export-not-converted")

    monkeypatch.setattr(model_files, "_convert", refused)
    formats = {"format": ["litert", "saved_model"], "versions": True, "signatures": "signatures"}
    spec = exporting(tmp_path, formats, checkpoint={"every_steps": 2})
    with raises(ResultNotSaved, "export-not-converted"):
        recipe.run_recipe(join.join(Environment(run_dir=tmp_path)), Recipe.model_validate(spec))
    assert [each.name for each in (tmp_path / "export").iterdir()] == ["serving"]
    (version,) = (tmp_path / "export" / "serving").iterdir()
    assert int(version.name) > 0
    assert "doubled" in tf.saved_model.load(str(version)).signatures
    assert model_of(tmp_path, tmp_path / "checkpoints", None) == (version, None)
    again = export_checkpoint(Recipe.model_validate(spec), tmp_path, 2, Export(versions=True), tmp_path / "served")
    assert again == tmp_path / "served" / "2"


@pytest.mark.slow
def test_a_model_that_accumulates_gradients_is_exported(tmp_path, monkeypatch):
    write_module(tmp_path, monkeypatch)
    text = MODULE.replace('"sgd"', "keras.optimizers.SGD(gradient_accumulation_steps=2)")
    assert text != MODULE
    (tmp_path / "one_layer.py").write_text(text)
    spec = exporting(tmp_path, {"format": "keras"})
    recipe.run_recipe(join.join(Environment(run_dir=tmp_path)), Recipe.model_validate(spec))
    assert (tmp_path / "export" / "model.keras").is_file()
