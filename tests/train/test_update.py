"""An update as a worker of parameter servers applies it is the update that Keras would apply."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.train.compare import difference
from tests.train.optimizers import OPTIMIZERS
from tfdist_cli.train.update import apply, leave_sums_to_engine

VALUES = [np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), np.float32([0.5, -0.25])]
STEPS = 7


def parameters():
    first = keras.Variable(VALUES[0], name="kernel")
    first.constraint = keras.constraints.MaxNorm(1.2)
    return [first, keras.Variable(VALUES[1], name="bias"), keras.Variable(np.float32([3.0]), name="unused")]


def gradients(step):
    random = np.random.default_rng(step)
    return [tf.constant(random.normal(size=value.shape).astype(np.float32)) for value in VALUES] + [None]


def updated(optimizer, update, scaled=lambda step, gradient: gradient):
    """Parameters and optimizer after some updates, each in a compiled function."""
    variables = parameters()
    optimizer.build(variables)

    @tf.function(autograph=False)
    def one(*given):
        scale = optimizer.scale_loss(tf.constant(1.0))
        update(optimizer, [*(gradient * scale for gradient in given), None], variables)

    for step in range(STEPS):
        one(*(scaled(step, gradient) for gradient in gradients(step)[:-1]))
    return variables, optimizer


def assert_equal(ours, plain):
    # Adam divides by 1 - 0.999 ** step, of which float32 keeps 4 digits at first: a rounding before it shows after it.
    assert difference(ours[0], plain[0]) < 3e-6
    assert difference(ours[1].variables, plain[1].variables) < 3e-6


def applied_by_keras(optimizer, given, variables):
    optimizer.apply(given, variables)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_kerass(name):
    keras.utils.set_random_seed(3)
    plain = updated(OPTIMIZERS[name](), applied_by_keras)
    optimizer = OPTIMIZERS[name]()
    leave_sums_to_engine(optimizer)
    ours = updated(optimizer, apply)
    assert_equal(ours, plain)
    assert int(optimizer.iterations.numpy()) == STEPS // (3 if name == "accumulation" else 1)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_gradients_that_are_not_finite_are_left_out_and_lower_the_scale():
    def with_overflow(step, gradient):
        return gradient * np.float32("inf") if step in (2, 3) else gradient

    plain = updated(OPTIMIZERS["dynamic loss scale"](), applied_by_keras, with_overflow)
    ours = updated(OPTIMIZERS["dynamic loss scale"](), apply, with_overflow)
    assert_equal(ours, plain)
    assert int(ours[1].iterations.numpy()) == STEPS - 2
    assert float(ours[1].dynamic_scale.numpy()) == 2.0**8


def test_sparse_gradients():
    def table(optimizer, update):
        variable = keras.Variable(np.arange(8, dtype=np.float32).reshape(4, 2))
        optimizer.build([variable])

        @tf.function(autograph=False)
        def one():
            slices = tf.IndexedSlices(tf.ones([3, 2]), tf.constant([0, 2, 0]), tf.constant([4, 2]))
            update(optimizer, [slices], [variable])

        one()
        return [variable], optimizer

    for name in ("sgd", "adam", "adagrad", "clipnorm"):
        assert_equal(table(OPTIMIZERS[name](), apply), table(OPTIMIZERS[name](), applied_by_keras))


def test_the_count_of_updates_is_one_atomic_addition():
    optimizer = keras.optimizers.SGD(0.1)
    variables = parameters()
    optimizer.build(variables)
    graph = tf.function(lambda: apply(optimizer, gradients(0), variables)).get_concrete_function().graph
    (counter,) = [inner for outer, inner in graph.captures if outer is optimizer.iterations.value.handle]
    assert [operation.type for operation in counter.consumers()] == ["AssignAddVariableOp", "ReadVariableOp"]
