"""Steps whose updates are made in shared memory equal Keras's; the tests of clusters have several workers."""

import gc
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.compare import assert_same, batches, classes, classifier, train_both
from tests.support.descriptors import opened
from tests.support.optimizers import OPTIMIZERS
from tfdist_cli.protocol.phases import COLUMNS
from tfdist_cli.train.cluster.shared_memory.lockstep import step_operations
from tfdist_cli.train.cluster.shared_memory.memory import Region
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.mirrored import memory_updates
from tfdist_cli.train.engine.mirrored.collectives import Collectives
from tfdist_cli.train.engine.mirrored.engine import MirroredEngine
from tfdist_cli.train.engine.mirrored.memory_updates import MemoryUpdates
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.optimizers.apply import is_elementwise
from tfdist_cli.train.trainer.reporting import ProgressReporter

WHOLE = tf.data.Dataset.from_tensor_slices(classes(48)).batch(8, drop_remainder=True)
"""Batches of one size: their gradients are products of factors."""


@pytest.fixture
def in_memory(monkeypatch):
    """Lets one process take the steps of several ones; returns those of each training."""
    found = []

    def made(self):
        own = MemoryUpdates(self._step, self._element_spec, self._rules, self._strategy, self._collectives, self._seeds)
        found.append(own)
        assert own.shared
        self._step.sums_gradients = False
        return own

    monkeypatch.setattr(MirroredEngine, "_memory_updates", made)
    return found


def build(optimizer="adam", units=16):
    layers = keras.layers.Dense(64, "relu", kernel_regularizer="l2"), keras.layers.Dense(units, "relu")
    return classifier(*layers, optimizer=optimizer)


def with_state():
    """Random layers, whose numbers go on, and moving averages."""
    layers = keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.3), keras.layers.BatchNormalization()
    return classifier(*layers, keras.layers.Dense(16), optimizer=keras.optimizers.SGD(0.05, momentum=0.9))


def elementwise(name):
    model = classifier(optimizer=OPTIMIZERS[name]())
    model.optimizer.build(model.trainable_variables)
    return is_elementwise(model.optimizer, model.trainable_variables)


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("data", [batches(), WHOLE], ids=["of any size", "with factors"])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if elementwise(name)])
def test_training_equals_kerass(name, data, steps, in_memory):
    """But for a few values whose gradients are rounding errors, which some optimizers make large."""
    plain, ours = train_both(lambda: build(OPTIMIZERS[name]()), data, steps_per_execution=steps)
    assert_close(plain, ours)
    assert len(in_memory) == 1


def assert_close(plain, ours):
    pairs = zip((plain, ours), (plain.optimizer, ours.optimizer), strict=True)
    values = [[variable.numpy() for each in own for variable in each.variables] for own in pairs]
    for wanted, value in zip(*values, strict=True):
        assert np.mean(np.abs(value - wanted) > 1e-4 * (1 + np.abs(wanted))) < 0.02
    np.testing.assert_allclose(ours.history.history["loss"], plain.history.history["loss"], rtol=1e-4)


@pytest.mark.parametrize("steps", [1, 3])
def test_training_with_random_numbers_and_moving_averages_equals_kerass(steps, in_memory):
    plain, ours = train_both(with_state, WHOLE, steps_per_execution=steps)
    assert_same(plain, ours, tolerance=1e-5)
    assert len(in_memory) == 1


def test_variables_that_are_assigned_between_runs_are_trained_on(in_memory):
    """By a callback, after each epoch; and so is a learning rate."""

    class Change(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            kernel = self.model.layers[1].kernel
            kernel.assign(kernel * 0.5)
            self.model.optimizer.learning_rate = 0.01 / (2 + epoch)

    def trained(fit, **given):
        keras.utils.set_random_seed(7)
        model = build()
        fit(model, WHOLE, epochs=3, callbacks=[Change()], **given)
        return model

    assert_close(trained(keras.Model.fit, verbose=0, shuffle=False), trained(tfdist.fit))
    assert len(in_memory) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_the_results_of_steps_are_summed_after_their_last_update(count, in_memory, monkeypatch):
    """Others wait for that update, and look whether this task has begun something else."""
    seen = []

    def all_reduce(_, value, __):
        def note(value):
            seen.append(step_operations._process._replica(in_memory[-1]._number).following)
            return value

        return tf.ensure_shape(tf.numpy_function(note, [value], value.dtype, stateful=False), value.shape)

    monkeypatch.setattr(Collectives, "all_reduce", all_reduce)
    tfdist.fit(build(), WHOLE, epochs=1, steps_per_execution=count)
    assert seen == list(range(1 + count, 8, count))


def test_phases_are_measured(in_memory, monkeypatch):
    seen = []
    count, steps_with = ProgressReporter.count, MirroredEngine._steps_with
    monkeypatch.setattr(
        ProgressReporter, "count", lambda self, execution: (seen.append(execution.phases), count(self, execution))
    )

    def measured(self, tables):
        self._rules = replace(self._rules, phases=True)
        return steps_with(self, tables)

    monkeypatch.setattr(MirroredEngine, "_steps_with", measured)
    tfdist.fit(build(), WHOLE, epochs=1, steps_per_execution=2)
    assert in_memory
    for own in seen:
        (phases,) = own.values()
        found = dict(zip(COLUMNS, phases, strict=True))
        assert min(found[name] for name in ("compute", "all_reduce", "update")) > 0
        # The second kernel as factors, of 8 examples; the first one has a gradient of its regularizer as well.
        assert found["reduced"] == 2 * 4 * (5 * 64 + 8 * (64 + 16) + 16 * 3 + 64 + 16 + 3)


@pytest.mark.parametrize("free", [True, False])
def test_without_memory_it_is_of_no_use(free, monkeypatch):
    def full(more=0):
        raise OSError("no memory")

    made = []

    def tried(self):
        made.append(
            MemoryUpdates(self._step, self._element_spec, self._rules, self._strategy, self._collectives, self._seeds)
        )

    monkeypatch.setattr(MirroredEngine, "_memory_updates", tried)
    if not free:
        monkeypatch.setattr(Region, "identifying", full)
    tfdist.fit(build(), WHOLE, epochs=1)
    assert [own.shared for own in made] == [free]


def test_memory_is_freed_when_its_model_is_gone(in_memory):
    def used():
        tfdist.fit(build(), WHOLE, epochs=1)
        in_memory.clear()
        gc.collect()
        process = step_operations._process
        return opened(), (len(process._of_worker), len(process._of_ps))

    used()
    (before, kept), (after, then) = used(), used()
    assert then == kept
    assert not after - before


class Local:
    """The sums of tasks of one host."""

    local_all_reduce, workers = object(), 2


def suits(model, data=WHOLE, collectives=Local, **rules):
    step = ModelStep(model)
    step.build(data.element_spec)
    return memory_updates.suits(step, data.element_spec, Rules(**rules), collectives)


class Apart(Local):
    """The sums of tasks that share no memory."""

    local_all_reduce = None


def of_ids():
    ids = keras.Input((5,), dtype="int32")
    vectors = keras.layers.Flatten()(keras.layers.Embedding(500, 8)(ids))
    model = keras.Model(ids, keras.layers.Dense(3)(vectors))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def large(optimizer="adam"):
    return build(optimizer, units=512)


def test_large_models_of_one_host_suit():
    assert suits(large())


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (large, {"collectives": Apart}),
        (large, {"wire": "float16"}),
        (large, {"optimized": False}),
        (build, {}),  # too small
        (lambda: large(keras.optimizers.Adam(clipnorm=1.0)), {}),
        (lambda: large(keras.optimizers.Adam(use_ema=True)), {}),
        (lambda: large(keras.optimizers.Adam(gradient_accumulation_steps=2)), {}),
        (lambda: large(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())), {}),
        (of_ids, {"data": WHOLE.map(lambda x, y: (tf.cast(x, tf.int32), y))}),  # rows are updated
    ],
)
def test_others_do_not(make, given):
    assert not suits(make(), **given)
