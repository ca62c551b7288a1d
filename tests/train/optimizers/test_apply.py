"""Updates on parameter servers equal those of Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.compare import difference
from tests.support.optimizers import OPTIMIZERS
from tfdist_cli.spec.sections.updates import LearningRate, ShardRule
from tfdist_cli.train.optimizers.apply import (
    apply,
    disable_gradient_reduction,
    is_elementwise,
    supports_sparse_updates,
    why_not_fused,
)
from tfdist_cli.train.optimizers.learning_rate import RateScaling
from tfdist_cli.train.variables.sharding import parts

VALUES = [np.linspace(-1, 1, 21, dtype=np.float32).reshape(7, 3), np.float32([0.5, -0.25])]
STEPS = 7


def variable(value, name):
    """A variable created as by a layer, so that it is sharded where the placement requires it."""
    made = keras.Variable("zeros", shape=value.shape, name=name)
    made.assign(value)
    return made


def parameters(constraint=None):
    first = variable(VALUES[0], "kernel")
    first.constraint = constraint
    return [first, variable(VALUES[1], "bias"), variable(np.float32([3.0]), "unused")]


def gradients(step):
    random = np.random.default_rng(step)
    return [tf.constant(random.normal(size=value.shape).astype(np.float32)) for value in VALUES] + [None]


def by_parts(gradient, variable):
    """Splits a gradient by the shards of its variable."""
    if gradient is None:
        return None
    return tf.split(gradient, [part.shape[0] for part in parts(variable)])


def applied(optimizer, given, variables, rate=None):
    return apply(optimizer, [by_parts(*pair) for pair in zip(given, variables, strict=True)], variables, rate)


def applied_by_keras(optimizer, given, variables):
    optimizer.apply(given, variables)


def updated(optimizer, update, scaled=lambda step, gradient: gradient, constraint=None):
    """Returns parameters and optimizer after some updates, each run by a `tf.function`."""
    variables = parameters(constraint)
    optimizer.build(variables)

    @tf.function(autograph=False)
    def one(*given):
        scale = optimizer.scale_loss(tf.constant(1.0))
        update(optimizer, [*(gradient * scale for gradient in given), None], variables)

    for step in range(STEPS):
        one(*(scaled(step, gradient) for gradient in gradients(step)[:-1]))
    return variables, optimizer


def assert_equal(ours, plain):
    # Adam divides by 1 - 0.999 ** step, of which float32 keeps 4 digits at first, so rounding errors grow.
    assert difference(ours[0], plain[0]) < 3e-6
    assert difference(ours[1].variables, plain[1].variables) < 3e-6


def writes(graph, found):
    """Returns the operations that change one of some variables."""
    handles = {id(inner) for outer, inner in graph.captures if any(outer is each.handle for each in found)}
    taking = [each for each in graph.get_operations() if any(id(given) in handles for given in each.inputs)]
    return [each for each in taking if each.type != "ReadVariableOp"]


def ancestors(operation):
    seen, following = set(), [operation]
    while following:
        each = following.pop()
        if each.name not in seen:
            seen.add(each.name)
            following += [*(given.op for given in each.inputs), *each.control_inputs]
    return seen


@pytest.mark.slow
@pytest.mark.rotates(5, by="name")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("decay", [None, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_variable_changes_before_its_gradient_has_arrived(name, decay):
    """Until then, a worker may still have to read the variable for the same update."""
    optimizer = OPTIMIZERS[name]()
    optimizer.weight_decay = optimizer.weight_decay or decay
    variables = parameters()[:2]
    optimizer.build(variables)
    specs = [tf.TensorSpec(value.shape, name=f"given{place}") for place, value in enumerate(VALUES)]
    one = tf.function(lambda *given: applied(optimizer, given, variables), autograph=False).get_concrete_function(
        *specs
    )
    for place, own in enumerate(variables):
        found = writes(one.graph, [own.value])
        assert found
        assert all(f"given{place}" in ancestors(each) for each in found), [each.name for each in found]


CONSTRAINED = {f"{name} with a constraint": name for name in ("sgd", "adamw", "nadam", "global clipnorm")}


@pytest.mark.slow
@pytest.mark.rotates(5, by="name")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("name", [*OPTIMIZERS, *CONSTRAINED])
def test_updates_equal_those_of_keras_also_of_sharded_variables(name, servers):
    make = OPTIMIZERS[CONSTRAINED.get(name, name)]
    constraint = keras.constraints.MaxNorm(1.2) if name in CONSTRAINED else None
    keras.utils.set_random_seed(3)
    plain = updated(make(), applied_by_keras, constraint=constraint)
    for count in (1, 3):
        with servers(count, shard=ShardRule(min_bytes=80)).scope():
            optimizer = make()
            disable_gradient_reduction(optimizer)
            ours = updated(optimizer, applied, constraint=constraint)
        assert [len(parts(variable)) for variable in ours[0]] == [count, 1, 1]
        assert_equal(ours, plain)
        assert int(optimizer.iterations.numpy()) == STEPS // (3 if name == "accumulation" else 1)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_an_update_with_gradients_that_are_not_finite_is_skipped_and_lowers_the_scale():
    def with_overflow(step, gradient):
        return gradient * np.float32("inf") if step in (2, 3) else gradient

    plain = updated(OPTIMIZERS["dynamic loss scale"](), applied_by_keras, with_overflow)
    ours = updated(OPTIMIZERS["dynamic loss scale"](), applied, with_overflow)
    assert_equal(ours, plain)
    assert int(ours[1].iterations.numpy()) == STEPS - 2
    assert float(ours[1].dynamic_scale.numpy()) == 2.0**8


ROWS = 7
LOOKED_UP = [[0, 2, 6], [3, 0, 2], [5], [0, 1, 2, 3, 4, 5, 6]]
"""The rows of a table of 7 rows that each update touches. With 3 shards, rows 3 and 5 are the first of their shard."""
BY_ROWS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.5),
    "clipvalue": lambda: keras.optimizers.Adagrad(0.1, clipvalue=0.2),
    "global clipnorm": lambda: keras.optimizers.Adagrad(0.1, global_clipnorm=0.7),
    "loss scale factor": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0, clipnorm=0.5),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adagrad(0.1, global_clipnorm=0.7), initial_scale=4.0, dynamic_growth_steps=2
    ),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
}
"""Optimizers for which sparse updates equal dense ones."""


def table_and_bias(optimizer, update):
    """Returns a table and a bias after updates with sparse gradients of the table."""
    made = [variable(np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2) / 9, "table"), variable(VALUES[1], "bias")]
    optimizer.build(made)
    random = np.random.default_rng(5)
    for rows in LOOKED_UP:
        values = tf.constant(random.normal(size=(len(rows), 2)).astype(np.float32))
        bias = tf.constant(random.normal(size=2).astype(np.float32))

        @tf.function(autograph=False)
        def one(values=values, bias=bias, rows=rows):
            scale = optimizer.scale_loss(tf.constant(1.0))
            update(optimizer, tf.IndexedSlices(values * scale, tf.constant(rows), (ROWS, 2)), bias * scale, made)

        one()
    return made, optimizer


def applied_by_rows(optimizer, rows, bias, made):
    """Splits a sparse gradient by the shards of its variable."""
    own, begin = [], 0
    for shard in parts(made[0]):
        end = begin + shard.shape[0]
        mine = tf.boolean_mask(tf.range(tf.size(rows.indices)), (rows.indices >= begin) & (rows.indices < end))
        own.append(tf.IndexedSlices(tf.gather(rows.values, mine), tf.gather(rows.indices, mine) - begin, shard.shape))
        begin = end
    apply(optimizer, [own, [bias]], made)


def applied_to_the_whole(optimizer, rows, bias, made):
    optimizer.apply([tf.convert_to_tensor(rows), bias], made)


@pytest.mark.slow
@pytest.mark.rotates(5, by="name")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", BY_ROWS)
def test_sparse_updates_equal_dense_updates_of_keras(name, count, servers):
    plain = table_and_bias(BY_ROWS[name](), applied_to_the_whole)
    with servers(count, shard=ShardRule(min_bytes=30)).scope():
        ours = table_and_bias(BY_ROWS[name](), applied_by_rows)
    assert len(parts(ours[0][0])) == count
    assert_equal(ours, plain)
    assert int(ours[1].iterations.numpy()) == len(LOOKED_UP)


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw", "weight decay", "rmsprop", "lion", "ftrl"])
def test_rows_without_a_gradient_keep_their_values(name, servers):
    with servers(3, shard=ShardRule(min_bytes=30)).scope():
        made = [variable(np.ones((ROWS, 2), np.float32), "table"), variable(VALUES[1], "bias")]
        optimizer = OPTIMIZERS[name]()
        optimizer.build(made)
        for rows in ([1, 4], [4, 6]):
            applied_by_rows(optimizer, tf.IndexedSlices(tf.ones([2, 2]), tf.constant(rows), (ROWS, 2)), VALUES[1], made)
    changed = np.flatnonzero((made[0].numpy() != 1).any(axis=1))
    np.testing.assert_array_equal(changed, [1, 4, 6])


def test_a_scaled_and_warmed_up_rate_is_that_of_each_update():
    rate = RateScaling(LearningRate(scale="linear", warmup_steps=2), 3)
    variables, optimizer = [variable(np.zeros(2, np.float32), "weights")], keras.optimizers.SGD(0.1)
    optimizer.build(variables)
    moved = []
    for _ in range(3):
        before = variables[0].numpy()
        applied(optimizer, [tf.ones(2)], variables, rate)
        moved.append(float((before - variables[0].numpy())[0]))
    assert moved == pytest.approx([0.2, 0.3, 0.3], rel=1e-5)


def test_which_optimizers_support_sparse_updates():
    reasons = {"adam": None, "average": "use_ema", "accumulation": "gradient_accumulation_steps", "nadam": "Nadam"}
    for name, reason in reasons.items():
        variables, optimizer = parameters(), OPTIMIZERS[name]()
        optimizer.build(variables)
        assert supports_sparse_updates(optimizer, variables) == (reason is None)
        assert (reason or "") in (why_not_fused(optimizer, variables) or "")
    variables[0].constraint = keras.constraints.NonNeg()
    assert "constraint" in str(why_not_fused(OPTIMIZERS["sgd"](), variables))


@pytest.mark.slow
def test_the_count_of_updates_is_one_atomic_addition():
    optimizer = keras.optimizers.SGD(0.1)
    variables = parameters()
    optimizer.build(variables)
    function = tf.function(lambda *given: applied(optimizer, [*given, None], variables))
    graph = function.get_concrete_function(*gradients(0)[:-1]).graph
    (counter,) = [inner for outer, inner in graph.captures if outer is optimizer.iterations.value.handle]
    addition, read = counter.consumers()
    assert [addition.type, read.type] == ["AssignAddVariableOp", "ReadVariableOp"]
    # It waits for a gradient. Otherwise, a function of several steps would count all of them at its start.
    before = [addition]
    for op in before:
        before += [*op.control_inputs, *(each.op for each in op.inputs)]
    assert {tensor.op.name for tensor in graph.inputs[:2]} & {op.name for op in before}


NOT_ELEMENTWISE = {
    *("clipnorm", "global clipnorm"),  # norms
    *("average", "average now and then", "accumulation"),  # more than a kernel does
    *("nadam", "adafactor", "muon", "lamb", "dynamic loss scale", "several"),  # without a kernel of their own
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_which_optimizers_update_each_value_by_itself(name):
    variables, optimizer = parameters(), OPTIMIZERS[name]()
    optimizer.build(variables)
    assert is_elementwise(optimizer, variables) == (name not in NOT_ELEMENTWISE)


@pytest.mark.parametrize(("excluded", "alike"), [([], True), (["bias"], False), (["bias", "kernel", "unused"], True)])
def test_values_of_which_some_decay_are_not_updated_alike(excluded, alike):
    variables, optimizer = parameters(), keras.optimizers.AdamW(0.1, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=excluded)
    optimizer.build(variables)
    assert is_elementwise(optimizer, variables) == alike


def test_values_with_a_constraint_are_not_updated_by_themselves():
    variables, optimizer = parameters(keras.constraints.UnitNorm()), keras.optimizers.Adam(0.1)
    optimizer.build(variables)
    assert not is_elementwise(optimizer, variables)
