"""Variables are placed on ps by their bytes, and large ones are sharded."""

import re

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import ShardRule
from tfdist_cli.train.variables import placement as module
from tfdist_cli.train.variables.placement import Placement, PlacementRules
from tfdist_cli.train.variables.sharding import RowShardedVariable, parts


class Servers:
    """The ps of a strategy."""

    def __init__(self, count):
        self._num_ps = count
        self._create_variable = self._create_variable_round_robin = self._update = None


def placed(count, sizes, **rules):
    """Returns the ps of variables with some numbers of rows of 4 bytes, and the bytes of each ps."""
    strategy = type("Strategy", (), {"extended": Servers(count)})()
    placement = Placement(strategy, PlacementRules(**rules))
    chosen = []
    for rows in sizes:
        shards = placement._rules.shard_count((rows,), 4 * rows, count)
        chosen.append(placement._next(shards))
        for ps, part in zip(chosen[-1], np.array_split(np.zeros(rows, np.float32), shards), strict=True):
            placement.bytes[ps] += part.nbytes
            placement._created += 1
    return chosen, placement.bytes


def test_kernels_and_biases_are_balanced():
    chosen, loads = placed(2, [784 * 500, 500, 500 * 500, 500, 500 * 10, 10])
    assert chosen == [[0], [1], [1], [1], [1], [1]]
    assert loads == [4 * 784 * 500, 4 * (500 + 500 * 500 + 500 + 5000 + 10)]


def test_round_robin():
    chosen, _ = placed(3, [5, 5, 100, 5, 5], placement="round_robin", shard=ShardRule(min_bytes=400))
    assert chosen == [[0], [1], [2, 0, 1], [2], [0]]


@given(st.integers(1, 5), st.lists(st.integers(0, 1000), max_size=30), st.integers(100, 4000))
def test_no_ps_has_more_than_the_mean_and_the_largest_unsharded_variable(servers, sizes, min_bytes):
    chosen, loads = placed(servers, sizes, shard=ShardRule(min_bytes=min_bytes))
    assert sum(loads) == 4 * sum(sizes)
    assert all(len(set(places)) == len(places) for places in chosen)
    largest = max((4 * size for size, places in zip(sizes, chosen, strict=True) if len(places) == 1), default=0)
    row = 4 if any(len(places) > 1 for places in chosen) else 0
    assert max(loads) <= np.mean(loads) + max(largest, row)


@pytest.mark.parametrize(
    ("shape", "rule", "shards"),
    [
        ((10, 4), {"min_bytes": 160}, 4),
        ((10, 4), {"min_bytes": 161}, 1),
        ((10, 4), {"min_bytes": 0, "max_shards": 3}, 3),
        ((3, 40), {"min_bytes": 0}, 3),
        ((1, 400), {"min_bytes": 0}, 1),
        ((0, 400), {"min_bytes": 0}, 1),
        ((), {"min_bytes": 0}, 1),
        ((10, 4), None, 1),
    ],
)
def test_the_number_of_shards(shape, rule, shards):
    rules = PlacementRules(shard=rule and ShardRule(**rule))
    assert rules.shard_count(shape, 4 * int(np.prod(shape)), 4) == shards


def network(optimizer):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            layers.Embedding(103, 6),
            layers.Flatten(),
            layers.Dense(10, "relu"),
            layers.BatchNormalization(),
            layers.Dense(3),
        ]
    )
    model.compile(optimizer, "mse")
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.fixture
def sharded(servers):
    with servers(3, shard=ShardRule(min_bytes=900)).scope():
        return network(keras.optimizers.Adam(use_ema=True))


def test_large_variables_are_sharded_by_rows(sharded):
    table, kernel, *whole = sharded.trainable_variables
    assert [tuple(part.shape) for part in parts(table)] == [(35, 6), (34, 6), (34, 6)]
    assert [tuple(part.shape) for part in parts(kernel)] == [(8, 10)] * 3
    assert all(len(parts(variable)) == 1 for variable in whole)
    assert table.shape == (103, 6)
    assert {part.dtype.name for part in parts(table)} == {"float32"}


def test_slots_are_sharded_like_their_variables(sharded):
    for variable in sharded.optimizer.variables[2:]:
        (of,) = (one for one in sharded.trainable_variables if one.path.replace("/", "_") in variable.path)
        assert [part.shape for part in parts(variable)] == [part.shape for part in parts(of)]
        assert [part.device for part in parts(variable)] == [part.device for part in parts(of)]


def test_the_bytes_of_each_ps_are_reported(sharded, servers, log, monkeypatch):
    records = []
    monkeypatch.setattr(module, "emit", lambda kind, **fields: records.append((kind, fields)))
    monkeypatch.setattr(module, "_task", lambda part: "ps:1" if "dense" in part.name else "ps:0")
    servers(3).placement.report(sharded, sharded.optimizer.variables)
    variables = [*sharded.variables, *sharded.metrics_variables, *sharded.optimizer.variables]
    dense = sum(variable.numpy().nbytes for variable in variables if "dense" in variable.path)
    rest = sum(variable.numpy().nbytes for variable in variables) - dense
    sizes = {"ps:0": rest, "ps:1": dense, "ps:2": 0}
    assert records == [("placement", {"bytes": sizes, "variables": {"ps:0": 7, "ps:1": 6, "ps:2": 0}})]
    (line,) = log
    for part in (f"ps:0 stores {rest / 1e3:.1f} kB", f"ps:1 stores {dense / 1e3:.1f} kB", "ps:2 stores 0 bytes"):
        assert part in line
    assert re.findall(r"\((\d+) variables\)", line) == ["7", "6", "0"]


def test_the_bytes_are_counted(servers):
    strategy = servers(3, shard=ShardRule(min_bytes=900))
    with strategy.scope():
        model = network("adam")
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables[:2]]
    assert sum(strategy.placement.bytes) == sum(variable.numpy().nbytes for variable in variables)


@pytest.mark.slow
def test_keras_uses_sharded_variables_like_others(sharded, tmp_path):
    plain = network(keras.optimizers.Adam(use_ema=True))
    for ours, theirs in zip(
        [*sharded.variables, *sharded.optimizer.variables], [*plain.variables, *plain.optimizer.variables], strict=True
    ):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=ours.path)
    table = sharded.trainable_variables[0]
    assert isinstance(table.value, RowShardedVariable)
    assert sharded.optimizer._get_variable_index(table) == 0
    weights = [weight + 1 for weight in sharded.get_weights()]
    sharded.set_weights(weights)
    table.assign(table * 2)
    table.assign_add(np.ones(table.shape))
    weights[0] = weights[0] * 2 + 1
    for ours, wanted in zip(sharded.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(ours, wanted)
    np.testing.assert_array_equal(np.asarray(table), weights[0])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(table), weights[0])
    np.testing.assert_array_equal(table[40:60], weights[0][40:60])
    sharded.summary(print_fn=lambda *_, **__: None)
    assert "(103, 6)" in repr(table)
    sharded.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    sharded.save_weights(tmp_path / "model.weights.h5")
    sharded.set_weights(plain.get_weights())
    sharded.load_weights(tmp_path / "model.weights.h5")
    for model in (loaded, sharded):
        for one, wanted in zip(model.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(one, wanted)
    ids = np.array([[0, 34, 35, 102]])
    np.testing.assert_allclose(sharded(ids), loaded(ids), rtol=1e-6)


def test_averages_replace_sharded_weights(sharded):
    averages = [np.random.default_rng(n).random(v.shape) for n, v in enumerate(sharded.trainable_variables)]
    for variable, average in zip(sharded.optimizer._model_variables_moving_average, averages, strict=True):
        variable.assign(average)
    sharded.optimizer.finalize_variable_values(sharded.trainable_variables)
    for variable, average in zip(sharded.trainable_variables, averages, strict=True):
        np.testing.assert_array_equal(variable.numpy(), average.astype(np.float32))


def test_rules_cannot_change_after_the_first_variable(servers):
    strategy = servers(2)
    other = PlacementRules("round_robin", None)
    strategy.placement.set_rules(other)
    with strategy.scope():
        keras.Variable(np.zeros(3))
    strategy.placement.set_rules(PlacementRules("round_robin", None))
    with raises(TrainingError, "placement-changed") as caught:
        strategy.placement.set_rules(PlacementRules())
    assert str(other) in caught.value.message
    assert str(PlacementRules()) in caught.value.message
    assert str(PlacementRules()).endswith("shard=ShardRule(min_bytes=67108864, max_shards=None)")
