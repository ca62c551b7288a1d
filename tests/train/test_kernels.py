"""A rule's updates are Keras's, step by step: of whole variables, of shards, of rows."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train import kernels

optimizers = keras.optimizers
KINDS = {
    "sgd": lambda rate=0.1: optimizers.SGD(rate),
    "momentum": lambda rate=0.1: optimizers.SGD(rate, momentum=0.9),
    "nesterov": lambda rate=0.1: optimizers.SGD(rate, momentum=0.8, nesterov=True),
    "adam": lambda rate=0.01: optimizers.Adam(rate),
    "adam, other numbers": lambda rate=0.05: optimizers.Adam(rate, beta_1=0.5, beta_2=0.9, epsilon=1e-3),
    "amsgrad": lambda rate=0.01: optimizers.Adam(rate, beta_2=0.9, amsgrad=True),
    "adamw": lambda rate=0.01: optimizers.AdamW(rate),
    "adagrad": lambda rate=0.1: optimizers.Adagrad(rate),
    "adagrad, other numbers": lambda rate=0.1: optimizers.Adagrad(rate, 1e-3, epsilon=1e-10),
    "adagrad, large epsilon": lambda rate=0.1: optimizers.Adagrad(rate, epsilon=0.01),
    "adagrad from zero": lambda rate=0.1: optimizers.Adagrad(rate, 0.0),
    "rmsprop": lambda rate=0.01: optimizers.RMSprop(rate),
    "rmsprop, momentum": lambda rate=0.01: optimizers.RMSprop(rate, rho=0.8, momentum=0.5, epsilon=1e-3),
    "rmsprop, centred": lambda rate=0.01: optimizers.RMSprop(rate, centered=True),
    "rmsprop, centred, momentum": lambda rate=0.01: optimizers.RMSprop(rate, momentum=0.5, centered=True),
    "adadelta": lambda rate=1.0: optimizers.Adadelta(rate),
    "adadelta, other numbers": lambda rate=0.5: optimizers.Adadelta(rate, rho=0.8, epsilon=1e-3),
    "adamax": lambda rate=0.01: optimizers.Adamax(rate),
    "ftrl": lambda rate=0.1: optimizers.Ftrl(rate),
    "ftrl, all terms": lambda rate=0.1: optimizers.Ftrl(
        rate,
        learning_rate_power=-0.7,
        l1_regularization_strength=0.1,
        l2_regularization_strength=0.02,
        l2_shrinkage_regularization_strength=0.03,
        beta=0.4,
    ),
    "lion": lambda rate=0.01: optimizers.Lion(rate),
}
SCATTERED = ("ResourceScatterSub", "ResourceScatterUpdate")
KERNELS = {  # of a whole variable, of rows
    "sgd": (("ResourceApplyGradientDescent",), ("ResourceScatterSub",)),
    "momentum": (("ResourceApplyKerasMomentum",), ("ResourceSparseApplyKerasMomentum",)),
    "adam": (("ResourceApplyAdam",), SCATTERED),
    "amsgrad": (("ResourceApplyAdamWithAmsgrad",), SCATTERED),
    "adamw": (("ResourceApplyAdam",), SCATTERED),
    "adagrad": (("ResourceApplyAdagradV2",), ("ResourceSparseApplyAdagradV2",)),
    "adagrad, large epsilon": (("ResourceApplyGradientDescent",), SCATTERED),
    "rmsprop": (("ResourceApplyGradientDescent",), SCATTERED),
    "rmsprop, momentum": (("ResourceApplyRMSProp",), ("ResourceSparseApplyRMSProp",)),
    "rmsprop, centred, momentum": (("ResourceApplyCenteredRMSProp",), ("ResourceSparseApplyCenteredRMSProp",)),
    "adadelta": (("ResourceApplyAdadelta",), ("ResourceSparseApplyAdadelta",)),
    "adamax": (("ResourceApplyAdaMax",), SCATTERED),
    "ftrl": (("ResourceApplyFtrlV2",), ("ResourceSparseApplyFtrlV2",)),
    "lion": (("ResourceApplyGradientDescent",), SCATTERED),
}
STEPS, SHAPE = 50, (6, 3)
ROWS = [3, 1, 0, 5, 2, 4]
# How far apart values may be after all steps, in parts of 1, or of a value above 1. The kernels take 1 - beta_2
# from beta_2 in the variable's type: in float32 that is 1.3e-5 of it off for 0.999.
TOLERANCES = {"float64": 1e-12, "float32": 1e-6}
TOLERANCE_OF_999 = 1e-5


class Trained:
    """A variable and its optimizer."""

    def __init__(self, optimizer, dtype="float32", shape=SHAPE):
        self.optimizer, self.variable = optimizer, keras.Variable(normal(0, shape), dtype=dtype)
        optimizer.build([self.variable])
        self.rule = kernels.rule_of(optimizer)
        self.slots = self.rule.slots(optimizer, self.variable)

    def by_keras(self, gradient):
        self.optimizer.apply([gradient], [self.variable])

    def dense(self, gradient):
        slots, rate, number = self._read()
        self.rule.dense(self.optimizer, self.variable.value, slots, gradient, rate, number)
        self.optimizer.iterations.assign_add(1)

    def sparse(self, gradient, rows):
        slots, rate, number = self._read()
        self.rule.sparse(self.optimizer, self.variable.value, slots, gradient, rows, rate, number)
        self.optimizer.iterations.assign_add(1)

    def all_rows(self, gradient):
        self.sparse(tf.gather(gradient, ROWS), tf.constant(ROWS))

    def values(self):
        return [np.float64(each.numpy()) for each in (self.variable, *self.slots)]

    def _read(self):
        optimizer, slots = self.optimizer, [slot.value for slot in self.slots]
        return slots, tf.convert_to_tensor(optimizer.learning_rate), tf.convert_to_tensor(optimizer.iterations)


def normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape)


def made(kind, *rate):
    optimizer = KINDS[kind](*rate)
    optimizer.weight_decay = None  # it comes before the update
    return optimizer


@functools.cache
def after_steps(kind, how, dtype, *schedule):
    """Variable and slots after all steps."""
    trained = Trained(made(kind, *(each() for each in schedule)), dtype)

    @tf.function(autograph=False)
    def steps(gradients):
        tf.while_loop(
            lambda step: step < STEPS,
            lambda step: (getattr(trained, how)(gradients[step]), step + 1)[1:],
            [tf.constant(0)],
        )

    steps(tf.constant(normal(1, (STEPS, *SHAPE)), dtype))
    return trained.values()


def assert_equal(ours, plain, tolerance):
    for our, expected in zip(ours, plain, strict=True):
        np.testing.assert_allclose(our, expected, rtol=tolerance, atol=tolerance)


def tolerance_of(kind, dtype):
    of_999 = dtype == "float32" and getattr(KINDS[kind](), "beta_2", 0) == 0.999
    return TOLERANCE_OF_999 if of_999 else TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_dense_updates_are_kerass(kind, dtype):
    plain = after_steps(kind, "by_keras", dtype)
    assert_equal(after_steps(kind, "dense", dtype), plain, tolerance_of(kind, dtype))
    assert np.max(np.abs(plain[0] - normal(0, SHAPE))) > 0.01


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_updates_of_all_rows_are_kerass(kind, dtype):
    plain = after_steps(kind, "by_keras", dtype)
    assert_equal(after_steps(kind, "all_rows", dtype), plain, tolerance_of(kind, dtype))


@pytest.mark.parametrize("kind", KERNELS)
def test_a_fused_kernel_updates_a_variable_where_there_is_one(kind):
    trained = Trained(made(kind))
    for update, expected in zip((trained.dense, trained.all_rows), KERNELS[kind], strict=True):
        graph = tf.function(update, autograph=False).get_concrete_function(tf.ones(SHAPE)).graph
        used = {operation.type for operation in graph.get_operations()}
        assert tuple(sorted(each for each in used if "Apply" in each or "Scatter" in each)) == expected
