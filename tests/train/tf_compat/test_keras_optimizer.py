"""What Keras's optimizers keep private is there, and still not public."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.tf_compat import keras_optimizer
from tfdist_cli.train.tf_compat.keras_optimizer import ITERATIONS, LEARNING_RATE, SlotNames

OPTIMIZERS = {
    "adam": (keras.optimizers.Adam(amsgrad=True), ["MOMENTUMS", "VELOCITIES", "VELOCITY_HATS"]),
    "rmsprop": (
        keras.optimizers.RMSprop(momentum=0.5, centered=True),
        ["VELOCITIES", "MOMENTUMS", "AVERAGE_GRADIENTS"],
    ),
    "adagrad": (keras.optimizers.Adagrad(), ["ACCUMULATORS"]),
    "adadelta": (keras.optimizers.Adadelta(), ["ACCUMULATED_GRADIENTS", "ACCUMULATED_DELTAS"]),
    "adamax": (keras.optimizers.Adamax(), ["ADAMAX_MEANS", "ADAMAX_NORMS"]),
    "ftrl": (keras.optimizers.Ftrl(), ["ACCUMULATORS", "LINEARS"]),
    "lion": (keras.optimizers.Lion(), ["MOMENTUMS"]),
}


def built(optimizer, count=2):
    parameters = [keras.Variable(np.ones(3)) for _ in range(count)]
    optimizer.build(parameters)
    return optimizer, parameters


@pytest.mark.parametrize(("optimizer", "names"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_slots_are_lists_with_one_variable_for_each_parameter(optimizer, names):
    _, parameters = built(optimizer)
    for name in names:
        attribute = getattr(SlotNames, name)
        assert [slot.shape for slot in getattr(optimizer, attribute)] == [(3,)] * len(parameters)
        assert not hasattr(optimizer, attribute.removeprefix("_")), f"{attribute} is public now"


def test_every_slot_name_is_tested():
    names = {name for name in vars(SlotNames) if not name.startswith("_")}
    assert names == {name for _, names in OPTIMIZERS.values() for name in names}


def test_the_public_count_is_not_the_variable():
    optimizer, _ = built(keras.optimizers.SGD(gradient_accumulation_steps=2))
    counter = keras_optimizer.iterations(optimizer)
    assert counter is getattr(optimizer, ITERATIONS)
    counter.assign(5)
    assert int(optimizer.iterations) == 2, "the public count is the variable's now"


def test_the_public_rate_is_not_the_schedule():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    optimizer, _ = built(keras.optimizers.SGD(schedule))
    assert keras_optimizer.learning_rate(optimizer) is schedule is getattr(optimizer, LEARNING_RATE)
    assert optimizer.learning_rate is not schedule, "the public rate is the schedule now"
    assert isinstance(keras_optimizer.learning_rate(keras.optimizers.SGD(0.1)), keras.Variable)


def test_parameters_and_their_places():
    optimizer, parameters = built(keras.optimizers.SGD())
    assert [keras_optimizer.index_of(optimizer, parameter) for parameter in parameters] == [0, 1]
    assert all(a is b for a, b in zip(keras_optimizer.parameters_of(optimizer), parameters, strict=True))
    assert not any(parameter is variable for parameter in parameters for variable in optimizer.variables)


def test_what_weight_decay_leaves_out():
    optimizer, parameters = built(keras.optimizers.AdamW())
    optimizer.exclude_from_weight_decay(var_list=parameters[:1])
    optimizer, parameters = built(keras.optimizers.AdamW())
    assert [keras_optimizer.decays(optimizer, parameter) for parameter in parameters] == [True, True]
    excluding = keras.optimizers.AdamW()
    own = [keras.Variable(np.ones(3), name=name) for name in ("kernel", "bias")]
    excluding.exclude_from_weight_decay(var_names=["bias"])
    excluding.build(own)
    assert [keras_optimizer.decays(excluding, parameter) for parameter in own] == [True, False]


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer")
def test_which_optimizer_of_several_updates_a_parameter():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2), keras.layers.Dense(1)])
    first, _ = model.layers
    others = keras.optimizers.OptimizerMap(keras.optimizers.Adam(), {f".*{first.name}/.*": keras.optimizers.SGD()})
    multi = keras.optimizers.MultiOptimizer(others)
    multi.build(model.trainable_variables)
    found = [keras_optimizer.inner_index_of(multi, variable) for variable in model.trainable_variables]
    kinds = [type(multi.optimizers[number]).__name__ for number in found]
    assert kinds == ["SGD", "SGD", "Adam", "Adam"]


def test_gradients_are_summed_over_replicas_unless_that_is_off(monkeypatch):
    optimizer, parameters = built(keras.optimizers.SGD(1.0), count=1)
    calls = []

    def summed(_, pairs):
        calls.append(len(pairs))
        return pairs

    monkeypatch.setattr(type(optimizer), "_all_reduce_sum_gradients", summed)
    step = [tf.zeros([3])]
    optimizer.apply(step, parameters)
    before = list(calls)
    keras_optimizer.disable_gradient_sums(optimizer)
    optimizer.apply(step, parameters)
    assert (before, calls) == ([1], [1]), "Keras sums gradients elsewhere now"
