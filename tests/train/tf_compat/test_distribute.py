"""Strategies: the private methods are there, and there is no public way."""

import inspect
from contextlib import nullcontext

import keras
import pytest
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, parameter_server_strategy_v2
from tensorflow.python.distribute.ps_values import DistributedTable
from tensorflow.python.distribute.values import DistributedVariable

from tfdist_cli.train.tf_compat import distribute
from tfdist_cli.train.tf_compat.distribute import VariableMethods, updating

EXTENDED = parameter_server_strategy_v2.ParameterServerStrategyV2Extended


def test_how_variables_are_created_and_updated_is_replaced():
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    seen = []

    def create(creator, **kwargs):
        seen.append("create")
        return own.create(creator, **kwargs)

    def update(variable, function, args, kwargs, group):
        seen.append("update")
        return own.update(variable, function, args, kwargs, group)

    own = distribute.replace_variable_methods(strategy, VariableMethods(create, update))
    with strategy.scope():
        variable = tf.Variable(1.0)
        strategy.extended.update(variable, lambda variable, value: variable.assign(value), args=(2.0,))
    assert seen == ["create", "update"]
    assert variable.numpy() == 2


def test_parameter_servers_have_these_methods():
    for name in ("_create_variable", "_create_variable_round_robin", "_create_var_creator", "_update"):
        assert callable(getattr(EXTENDED, name))
    for name in ("num_ps", "set_next_ps", "creator_of"):
        assert not hasattr(tf.distribute.ParameterServerStrategy, name)


def test_the_next_ps(servers):
    strategy = servers(3)
    assert distribute.num_ps(strategy) == 3
    distribute.set_next_ps(strategy, 2)
    assert strategy.extended._variable_count == 2
    assert callable(distribute.creator_of(strategy, lambda **_: None, {}))


def test_what_made_a_model_an_optimizer_and_a_variable():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        made = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD()
    before = keras.Sequential([keras.Input([2])])
    assert distribute.strategy_of(made) is strategy
    assert distribute.strategy_of(optimizer) is strategy
    assert distribute.strategy_of(made.weights[0].value) is strategy
    assert distribute.strategy_of(tf.Variable(1.0)) is None
    with strategy.scope():
        assert distribute.strategy_of(before) is None
        assert before.distribute_strategy is strategy, "the public property says who made a model now"
    assert not hasattr(optimizer, "distribute_strategy")


def test_mirrored_variables_become_numbers():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.5)
    assert type(optimizer.iterations.value).__mro__[1].__module__.endswith("distribute.values")
    for method in ("__float__", "__int__"):
        assert method not in vars(DistributedVariable), "TensorFlow's class converts by itself now"
    distribute.convert_variables_to_numbers()
    try:
        assert float(optimizer.learning_rate) == 0.5
        assert int(optimizer.iterations) == 0
    finally:
        del DistributedVariable.__float__, DistributedVariable.__int__


def merged_in_a_condition(strategy):
    """Updates a variable within a condition, as Keras does when it accumulates gradients."""
    with strategy.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)

    @tf.function
    def run():
        def step():
            tf.cond(tf.constant(True), lambda: variable.assign_add(1.0), variable.read_value)

        strategy.run(step)

    run()
    return variable.numpy()


def test_replicas_update_apart_within_a_condition():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with distribute.updates_apart(strategy):
        assert not strategy.extended._use_merge_call()
        assert merged_in_a_condition(strategy) == 2
    assert strategy.extended._use_merge_call()
    with pytest.raises(RuntimeError, match="merge_call"):
        merged_in_a_condition(strategy)


def test_a_scope_is_left():
    strategy, default = tf.distribute.OneDeviceStrategy("CPU:0"), tf.distribute.get_strategy()
    with strategy.scope():
        with distribute.without_strategy():
            assert not tf.distribute.has_strategy()
        assert tf.distribute.get_strategy() is strategy
        with pytest.raises(RuntimeError), default.scope():
            pass


def test_a_strategy_knows_the_device_of_an_update():
    with updating("CPU:0"):
        assert distribute_lib.get_update_replica_id() == "CPU:0"
    assert distribute_lib.get_update_replica_id() is None


def test_a_single_replica_updates_variables_within_a_function_that_it_calls():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        count = keras.Variable(1, dtype="int64", aggregation="only_first_replica")

    def increase(merges):
        def replica():
            with merges():
                tf.function(lambda: count.assign_add(1), autograph=False)()

        strategy.run(replica)

    run = tf.function(increase, autograph=False)
    with pytest.raises(RuntimeError, match="merge_call"):  # otherwise it is no longer needed
        run(nullcontext)
    run(distribute.merges_at_once)
    assert count.numpy() == 2


def table_of_workers():
    """A lookup table as `ParameterServerStrategy` makes it, without workers."""
    table = object.__new__(DistributedTable)
    numbers = tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2])
    table._coordinator_instance = tf.lookup.StaticHashTable(numbers, -1)
    table._maybe_build_distributed_table = lambda: None
    return table


def test_a_condition_within_a_loop_uses_a_lookup_table(monkeypatch):
    table = table_of_workers()

    def sum_of_numbers(key):
        def added(total):
            number = table.lookup(key)
            return tf.cond(number > 0, lambda: total + number + table.lookup(key), lambda: total - 3)

        return tf.while_loop(lambda total: abs(total) < 5, lambda total: [added(total)], [tf.constant(0, tf.int32)])[0]

    calls = [tf.constant("b"), tf.constant("?")]
    handle = DistributedTable.resource_handle.fget
    while (before := inspect.getclosurevars(handle).nonlocals.get("own")) is not None:
        handle = before  # another test has joined a cluster in this process
    monkeypatch.setattr(DistributedTable, "resource_handle", property(handle))
    with pytest.raises(tf.errors.InvalidArgumentError, match="placeholder"):  # otherwise it is no longer needed
        tf.function(sum_of_numbers, autograph=False)(calls[0])
    distribute.use_tables_in_conditions()
    run = tf.function(sum_of_numbers, autograph=False)
    assert [run(key).numpy() for key in calls] == [8, -6]
    table._coordinator_instance = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["b"], [9]), -1)
    assert run(calls[0]).numpy() == 18, "each call has the table of its worker"
