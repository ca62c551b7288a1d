"""A run with the export of a small model, made by hand."""

import keras
import numpy as np
import pytest

MODULE = """
import keras
import numpy as np
import tensorflow as tf

X = np.random.default_rng(0).normal(size=(50, 3)).astype("float32")

def model(params):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model

def dataset(params, split, shard):
    examples = tf.data.Dataset.from_tensor_slices((X, X[:, :2])).shard(shard.count, shard.index)
    return examples.shuffle(9) if split == "shuffled" else examples
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The run directory, and its model."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    (folder / "export").mkdir(parents=True)
    (folder / "own_recipe.py").write_text(MODULE)
    (folder / "recipe.yaml").write_text("module: own_recipe\n")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.save(folder / "export" / "model.keras")
    return folder, model


@pytest.fixture
def x():
    """More examples than a part has."""
    return np.random.default_rng(1).normal(size=(107, 3)).astype(np.float32)
