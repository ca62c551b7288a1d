"""Variables dealt out to ps by their bytes, and large ones spread over several."""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import ShardRule
from tfdist_cli.train.variables import placement as module
from tfdist_cli.train.variables.placement import Placement, PlacementRules
from tfdist_cli.train.variables.sharding import Shards, parts


class Servers:
    """What TensorFlow's strategy knows of its ps."""

    def __init__(self, count):
        self._num_ps = count
        self._create_variable = self._create_variable_round_robin = self._update = None


def dealt(count, sizes, **rules):
    """Where variables of so many rows of four bytes go, and the bytes of each ps then."""
    strategy = type("Strategy", (), {"extended": Servers(count)})()
    placement = Placement(strategy, PlacementRules(**rules))
    chosen = []
    for rows in sizes:
        shards = placement._rules.shards((rows,), 4 * rows, count)
        chosen.append(placement._next(shards))
        for ps, part in zip(chosen[-1], np.array_split(np.zeros(rows, np.float32), shards), strict=True):
            placement.bytes[ps] += part.nbytes
            placement._dealt += 1
    return chosen, placement.bytes


def test_kernels_and_biases_go_to_both():
    chosen, loads = dealt(2, [784 * 500, 500, 500 * 500, 500, 500 * 10, 10])
    assert chosen == [[0], [1], [1], [1], [1], [1]]
    assert loads == [4 * 784 * 500, 4 * (500 + 500 * 500 + 500 + 5000 + 10)]


def test_in_turn():
    chosen, _ = dealt(3, [5, 5, 100, 5, 5], placement="round_robin", shard=ShardRule(min_bytes=400))
    assert chosen == [[0], [1], [2, 0, 1], [2], [0]]


@given(st.integers(1, 5), st.lists(st.integers(0, 1000), max_size=30), st.integers(100, 4000))
def test_no_ps_has_more_than_the_mean_and_the_largest_whole_variable(servers, sizes, spread_from):
    chosen, loads = dealt(servers, sizes, shard=ShardRule(min_bytes=spread_from))
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
def test_how_many_shards(shape, rule, shards):
    rules = PlacementRules(shard=rule and ShardRule(**rule))
    assert rules.shards(shape, 4 * int(np.prod(shape)), 4) == shards


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
def spread(servers):
    with servers(3, shard=ShardRule(min_bytes=900)).scope():
        return network(keras.optimizers.Adam(use_ema=True))


def test_large_variables_are_cut_into_rows(spread):
    table, kernel, *whole = spread.trainable_variables
    assert [tuple(part.shape) for part in parts(table)] == [(35, 6), (34, 6), (34, 6)]
    assert [tuple(part.shape) for part in parts(kernel)] == [(8, 10)] * 3
    assert all(len(parts(variable)) == 1 for variable in whole)
    assert table.shape == (103, 6)
    assert {part.dtype.name for part in parts(table)} == {"float32"}


def test_slots_are_cut_alike(spread):
    for variable in spread.optimizer.variables[2:]:
        (of,) = (one for one in spread.trainable_variables if one.path.replace("/", "_") in variable.path)
        assert [part.shape for part in parts(variable)] == [part.shape for part in parts(of)]
        assert [part.device for part in parts(variable)] == [part.device for part in parts(of)]


def test_what_each_ps_holds_is_told(spread, servers, log, monkeypatch):
    told = []
    monkeypatch.setattr(module, "emit", lambda kind, **fields: told.append((kind, fields)))
    monkeypatch.setattr(module, "_task", lambda part: "ps:1" if "dense" in part.name else "ps:0")
    servers(3).placement.report(spread)
    variables = [*spread.variables, *spread.metrics_variables, *spread.optimizer.variables]
    dense = sum(variable.numpy().nbytes for variable in variables if "dense" in variable.path)
    rest = sum(variable.numpy().nbytes for variable in variables) - dense
    sizes = {"ps:0": rest, "ps:1": dense, "ps:2": 0}
    assert told == [("placement", {"bytes": sizes, "variables": {"ps:0": 7, "ps:1": 6, "ps:2": 0}})]
    (line,) = log
    assert line == (
        f"ps:0 holds {rest / 1e3:.1f} kB (7 variables), ps:1 holds {dense / 1e3:.1f} kB (6 variables), "
        "ps:2 holds 0 bytes (0 variables), with metrics and optimizer slots"
    )


def test_the_bytes_are_those_of_the_model(servers):
    strategy = servers(3, shard=ShardRule(min_bytes=900))
    with strategy.scope():
        model = network("adam")
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables[:2]]
    assert sum(strategy.placement.bytes) == sum(variable.numpy().nbytes for variable in variables)


def test_keras_does_with_it_what_it_does_with_any(spread, tmp_path):
    plain = network(keras.optimizers.Adam(use_ema=True))
    for ours, theirs in zip(
        [*spread.variables, *spread.optimizer.variables], [*plain.variables, *plain.optimizer.variables], strict=True
    ):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=ours.path)
    table = spread.trainable_variables[0]
    assert isinstance(table.value, Shards)
    assert spread.optimizer._get_variable_index(table) == 0
    weights = [weight + 1 for weight in spread.get_weights()]
    spread.set_weights(weights)
    table.assign(table * 2)
    table.assign_add(np.ones(table.shape))
    weights[0] = weights[0] * 2 + 1
    for ours, wanted in zip(spread.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(ours, wanted)
    np.testing.assert_array_equal(np.asarray(table), weights[0])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(table), weights[0])
    np.testing.assert_array_equal(table[40:60], weights[0][40:60])
    spread.summary(print_fn=lambda *_, **__: None)
    assert "(103, 6)" in repr(table)
    spread.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    spread.save_weights(tmp_path / "model.weights.h5")
    spread.set_weights(plain.get_weights())
    spread.load_weights(tmp_path / "model.weights.h5")
    for model in (loaded, spread):
        for one, wanted in zip(model.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(one, wanted)
    ids = np.array([[0, 34, 35, 102]])
    np.testing.assert_allclose(spread(ids), loaded(ids), rtol=1e-6)


def test_averages_take_the_place_of_weights_shard_by_shard(spread):
    averages = [np.random.default_rng(n).random(v.shape) for n, v in enumerate(spread.trainable_variables)]
    for variable, average in zip(spread.optimizer._model_variables_moving_average, averages, strict=True):
        variable.assign(average)
    spread.optimizer.finalize_variable_values(spread.trainable_variables)
    for variable, average in zip(spread.trainable_variables, averages, strict=True):
        np.testing.assert_array_equal(variable.numpy(), average.astype(np.float32))


def test_other_rules_are_refused_once_there_are_variables(servers):
    strategy = servers(2)
    other = PlacementRules("round_robin", None)
    strategy.placement.follow(other)
    with strategy.scope():
        keras.Variable(np.zeros(3))
    strategy.placement.follow(PlacementRules("round_robin", None))
    with pytest.raises(
        TrainingError,
        match=r"placed by placement='round_robin', shard=None already, and now placement='greedy', "
        r"shard=ShardRule\(min_bytes=67108864, max_shards=None\) is asked for",
    ):
        strategy.placement.follow(PlacementRules())
