"""Every recipe in recipes/ loads, and its module fulfils the contract of docs/reference/recipe.md."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli import Shard
from tfdist_cli.errors import UsageError
from tfdist_cli.spec.loading.load import load_recipe
from tfdist_cli.task.module import RecipeModule

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
SMALLER = {
    "ctr": ["params.examples={train: 700, test: 40}", "params.rows=2000"],
    "crnn": ["params.lines={train: 700, test: 40}"],
    "digits_augmented": ["params.shift=0"],
    "dlrm": ["params.examples={train: 700, test: 40}", "params.rows=2000"],
    "stream": ["params.examples={train: 700, test: 40}", "params.max_bytes=60000"],
    "two_tower": ["params.examples={train: 700, test: 40}", "params.users=300", "params.items=100"],
}


class Contract(NamedTuple):
    """The expected number of training examples, shape of a model's output, and shape and type of a label."""

    examples: int
    output: tuple[int, ...]
    label: tuple[int, ...]
    label_type: str


CONTRACTS = {
    "digits": Contract(1437, (10,), (), "int64"),
    "mnist": Contract(60, (10,), (), "int64"),
    "ctr": Contract(700, (1,), (), "float32"),
    "crnn": Contract(700, (16, 11), (6,), "int32"),
    "dlrm": Contract(700, (1,), (), "float32"),
    "stream": Contract(700, (1,), (1,), "float32"),
    "two": Contract(700, (1,), (), "float32"),
}


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def recipe(request, tmp_path, monkeypatch):
    """A recipe, with an MNIST whose training split has 60 images beside the 5,000 for validation."""
    generator = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, count in (("train", 5_060), ("test", 40)):
        arrays[f"x_{part}"] = generator.integers(0, 32, (count, 28, 28), dtype=np.uint8)
        arrays[f"y_{part}"] = generator.integers(0, 10, count, dtype=np.uint8)
    np.savez(tmp_path / "mnist.npz", **arrays)
    monkeypatch.setenv("MNIST", str(tmp_path / "mnist.npz"))
    return load_recipe(request.param, SMALLER.get(request.param.stem, []))


@pytest.fixture
def contract(request):
    """The data that a recipe trains on is the first word of its name."""
    return CONTRACTS[request.node.callspec.params["recipe"].stem.split("_")[0]]


@pytest.fixture
def module(recipe, monkeypatch):
    if recipe.module == "two_tower":
        pytest.importorskip("keras_rs")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, recipe.module, raising=False)
    yield RecipeModule.load(recipe)
    del sys.modules[recipe.module]


def examples(dataset):
    return [
        (b"".join(part.tobytes() for part in tf.nest.flatten(x)), y.tobytes()) for x, y in dataset.as_numpy_iterator()
    ]


def test_the_model_is_compiled_and_gives_logits(contract, module):
    model = module.model()
    assert isinstance(model, keras.Model)
    assert model.compiled
    assert model.output_shape == (None, *contract.output)


@pytest.mark.slow
def test_the_dataset_has_single_examples_that_the_model_takes(contract, module):
    model = module.model()
    for split in ("train", "test"):
        x, y = module.dataset(split, Shard()).element_spec
        inputs = [(tensor.shape[1:], tensor.dtype) for tensor in model.inputs]
        assert [(tuple(spec.shape), spec.dtype.name) for spec in tf.nest.flatten(x)] == inputs
        assert (y.shape, y.dtype) == (contract.label, contract.label_type)


@pytest.mark.rotates(5)
@pytest.mark.slow
def test_shards_divide_the_data(contract, module):
    whole = examples(module.dataset("train", Shard()))
    parts = [examples(module.dataset("train", Shard(index, 3, index))) for index in range(3)]
    assert len(whole) == contract.examples
    assert sorted(whole) == sorted(example for part in parts for example in part)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.slow
@pytest.mark.rotates(5)
def test_a_step_trains(module):
    keras.utils.set_random_seed(1)  # Adagrad's first steps are large: from some initial weights the loss rises at first
    model = module.model()
    batch = next(iter(module.dataset("train", Shard()).batch(32)))
    losses = [float(model.train_on_batch(*batch)[0]) for _ in range(5)]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


def test_callbacks_are_keras_callbacks(module):
    assert all(isinstance(callback, keras.callbacks.Callback) for callback in module.callbacks() or ())


def test_a_recipe_for_mnist_names_the_missing_file(recipe, module, tmp_path):
    if not recipe.params.get("mnist"):
        assert len(module.dataset("train", Shard()))  # the data of all other recipes is in the package, or is generated
        return
    (tmp_path / "mnist.npz").unlink()
    with raises(UsageError, "no-such-file") as caught:
        module.dataset("train", Shard())
    assert str(tmp_path / "mnist.npz") in str(caught.value)
