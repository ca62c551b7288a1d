"""What a recipe's `dataset` may return: it trains as the same data does with Keras's `fit`."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tests.support.python_data import Rows, generated
from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.task import recipe
from tfdist_cli.task.data import HELD_OUT, RecipeData
from tfdist_cli.task.module import RecipeModule
from tfdist_cli.train.cluster import join
from tfdist_cli.train.data.shard import ALL, Shard
from tfdist_cli.train.trainer.fit import train

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


def network():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, 0.9), loss, metrics=["accuracy"])
    return model


def made(dataset, model=None, **keys):
    """The data of a recipe whose module has this function."""
    module = SimpleNamespace(__file__="module.py", model=lambda _: network(), dataset=dataset)
    spec = Recipe.model_validate({"module": "module", **keys})
    return RecipeData(spec, RecipeModule(module, {}), model)


def sizes(batches, shard=ALL):
    return [len(tf.nest.flatten(batch)[0]) for batch in batches(shard)]


class Frame:
    """What pandas's objects have."""

    def __init__(self, array):
        self.to_numpy = lambda: array


WHOLE = tf.data.Dataset.from_tensor_slices((X, Y))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (lambda: WHOLE, [8, 8, 8]),
        (lambda: (Frame(X), Frame(Y)), [8, 8, 8]),
        (lambda: ({"keras_tensor": X}, Y), [8, 8, 8]),
        (lambda: WHOLE.batch(10), [10, 10, 4]),
        (lambda: WHOLE.batch(10).map(lambda x, y: (x, y)), [10, 10, 4]),
        (lambda: Rows(X, Y, batch=9), [9, 9, 6]),
        (lambda: generated(X, Y, batch=10, passes=1), [10, 10, 4]),
    ],
)
def test_data_of_any_form(data, expected):
    given = {"batch_size": 8} if 8 in expected else {}
    found = made(lambda *_: data(), network(), train={"shuffle": 0, **given})
    assert sizes(found.source.one_pass()) == expected
    assert len(list(found.examples("train", ALL))) == 24


def permuted(_, split, shard):
    """Draws the order of its examples."""
    order = np.random.permutation(24)[shard.index :: shard.count]
    return X[order], Y[order]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_shards_of_an_order_that_the_module_draws_are_a_division(split):
    data = made(permuted)
    rows = [row for index in range(3) for row, _ in data.examples(split, Shard(index, 3, index)).as_numpy_iterator()]
    assert sorted(map(tuple, rows)) == sorted(map(tuple, X))


def test_a_given_batch_size_does_not_go_with_batches():
    with raises(UsageError, "batch-size-without-arrays"):
        made(lambda *_: WHOLE.batch(10), network(), train={"batch_size": 8}).source  # noqa: B018 it raises


def test_batches_are_sharded_by_the_function():
    def dataset(params, split, shard):
        return WHOLE.batch(4).shard(shard.count, shard.index)

    assert sizes(made(dataset, network()).source.one_pass(), Shard(1, 2, 1)) == [4, 4, 4]
    with raises(TrainingError, "shard-ignored"):
        made(lambda *_: WHOLE.batch(4), network()).source.one_pass()(Shard(1, 2, 1))


def test_a_part_of_the_arrays_is_held_out():
    found = made(lambda *_: (X, Y), network(), train={"batch_size": 5}, evaluate={"validation_split": 0.25})
    trained = np.concatenate([x for x, _ in found.source.one_pass()(ALL)])
    np.testing.assert_array_equal(trained, X[:15])  # of 18, full batches
    np.testing.assert_array_equal(np.concatenate([x for x, _ in found.validation.data(ALL)]), X[18:])
    assert found.validation.name == HELD_OUT
    with raises(UsageError, "split-without-arrays"):
        made(lambda *_: WHOLE, network(), evaluate={"validation_split": 0.25}).validation  # noqa: B018 it raises


def test_evaluation_after_some_epochs():
    validation = made(lambda *_: (X, Y), evaluate={"every_epochs": [2, 5]}).validation
    assert [epoch for epoch in range(1, 7) if validation.is_due(epoch, last=epoch == 6)] == [2, 5]


def test_sequences_made_by_batch_are_single_examples():
    model = keras.Sequential([keras.Input((6, 4)), keras.layers.Flatten(), keras.layers.Dense(1)])
    rows = tf.data.Dataset.from_tensor_slices(X).batch(6, drop_remainder=True).map(lambda x: (x, x[0, :1]))
    assert sizes(made(lambda *_: rows, model, train={"batch_size": 2}).source.one_pass()) == [2, 2]


@pytest.mark.rotates(5)
@pytest.mark.parametrize("form", ["arrays", "batches", "PyDataset"])
def test_a_recipe_equals_keras(form, tmp_path, monkeypatch):
    """With class weights, an initial epoch, and data in any form."""
    forms = {"arrays": (X, Y), "batches": WHOLE.batch(8), "PyDataset": Rows(X, Y, batch=8)}
    module = SimpleNamespace(__file__="module.py", model=lambda _: network(), dataset=lambda *_: forms[form])
    weights = {0: 0.5, 1: 3.0}
    plain = network()
    expected = plain.fit(
        X, Y, 8, epochs=3, initial_epoch=1, class_weight=weights, shuffle=False, verbose=0, validation_data=(X, Y)
    )
    ours = []
    monkeypatch.setattr(join, "_joined", None)
    monkeypatch.setattr(RecipeModule, "load", lambda _: RecipeModule(module, {}))
    monkeypatch.setattr(recipe, "train", lambda *args: ours.append(train(*args)))
    length = {"epochs": 3, "initial_epoch": 1, "class_weight": weights, "shuffle": 0}
    spec = {"module": "module", "train": length | ({"batch_size": 8} if form == "arrays" else {})}
    recipe.run_recipe(join.join(Environment(run_dir=tmp_path)), Recipe.model_validate(spec))
    assert ours[0].epoch == [1, 2]
    for name, values in expected.history.items():
        np.testing.assert_allclose(ours[0].history[name], values, rtol=1e-5, err_msg=name)
