"""Which synchronous trainings are updated by workers in the memory of the ps, and that they are what the ps make."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.local_coordinator import NoPause, local_engine
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.cluster.shared_memory.lockstep import step_operations, words
from tfdist_cli.train.cluster.shared_memory.lockstep.chief import NoMoreSteps
from tfdist_cli.train.cluster.shared_memory.lockstep.ps import Aborted
from tfdist_cli.train.cluster.shared_memory.lockstep.worker import WorkerSteps
from tfdist_cli.train.cluster.shared_memory.memory import IDENTITY_BYTES
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.pacing import ArrivalPacing
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.engine import ParameterServerEngine
from tfdist_cli.train.engine.parameter_server.lockstep import (
    shared_memory,
    token_queues,
    updating_worker,
    worker_updates,
)
from tfdist_cli.train.engine.parameter_server.lockstep.token_queues import RUN
from tfdist_cli.train.engine.parameter_server.lockstep.worker_updates import StepOrders, WorkerUpdateFunctions
from tfdist_cli.train.engine.parameter_server.messages import StepKind
from tfdist_cli.train.engine.parameter_server.workers import Workers
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.tf_compat.keras_optimizer import iterations

HERE = "/job:localhost/replica:0/task:0/device:CPU:0"
# The larger epsilon keeps gradients that are nothing but rounding errors small.
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)),
    "Adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "AMSGrad": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, epsilon=1e-3, weight_decay=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.001, epsilon=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.05, clipvalue=0.01),
    "Adadelta": lambda: keras.optimizers.Adadelta(1.0, epsilon=1e-3),
    "Adamax": lambda: keras.optimizers.Adamax(0.01, epsilon=1e-3),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.05, l1_regularization_strength=0.001),
    "Lion": lambda: keras.optimizers.Lion(0.001),
}
X = np.random.default_rng(0).random((96, 20), np.float32)
Y = np.arange(96) % 3


def network(make_optimizer, units=200):
    """A model with state that a step assigns, and with weights that no step changes."""
    keras.utils.set_random_seed(1)
    frozen = keras.layers.Dense(20, trainable=False)
    hidden = [keras.layers.Dense(units, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
    model = keras.Sequential([keras.Input((20,)), frozen, *hidden, keras.layers.Dense(3)])
    model.compile(make_optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


@pytest.fixture
def engine_of(monkeypatch, servers):
    """Makes an engine whose only worker shares memory with the only ps, and its model."""
    monkeypatch.setattr(ParameterServerEngine, "_share_memory", lambda self: True)
    monkeypatch.setattr(shared_memory, "ps_devices", lambda _: [HERE])
    monkeypatch.setattr(Workers, "share_memory_among", lambda self, workers: True)
    step_operations.register()
    monkeypatch.setattr(worker_updates, "opens_memory", lambda _: True)
    strategy = servers(1)

    def made(build, updates=None, drop_remainder=True, **rules):
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16, drop_remainder=drop_remainder)
        given = Rules(updates or Updates(mode="sync"), **rules)
        return local_engine(monkeypatch, strategy, build, data, given, workers=1)

    return made


def functions_of(engine):
    return engine._updates.updates.functions


def trained(engine, model, runs=((2, 2), (5, 2))):
    """Trains in several runs, with a variable that is assigned between two of them; returns what is known then."""
    first, losses = 0, []
    for steps, size in runs:
        for execution in engine.run(steps, first=first, size=size, adapts=False, pause=NoPause()):
            losses += execution.losses.tolist()
        first += steps
        model.layers[1].weights[0].assign(model.layers[1].weights[0] * 0.5)
    return losses, [each.numpy() for each in [*model.variables, *model.optimizer.variables]]


@pytest.mark.parametrize(
    "name",
    [
        each if each == "Adam" else pytest.param(each, marks=[pytest.mark.slow, pytest.mark.rotates(5)])
        for each in OPTIMIZERS
    ],
)
def test_workers_make_the_updates_of_the_ps(name, engine_of, monkeypatch):
    assert check_updates(partial(network, OPTIMIZERS[name]), engine_of, monkeypatch).count_of_factors == 1


def test_gradients_of_compiled_steps_have_no_factors(engine_of, monkeypatch):
    build = partial(network, OPTIMIZERS["SGD"])
    assert check_updates(build, partial(engine_of, jit=True), monkeypatch).count_of_factors == 0


def test_batches_of_any_size_have_no_factors(engine_of, monkeypatch):
    build = partial(network, OPTIMIZERS["Adam"])
    engine_of = partial(engine_of, drop_remainder=False)
    assert check_updates(build, engine_of, monkeypatch).count_of_factors == 0


def matrices_alone():
    """A model all of whose parameters have factors."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(size, use_bias=False) for size in (320, 16)]
    model = keras.Sequential([keras.Input((20,)), keras.layers.Identity(), *layers])
    model.compile(OPTIMIZERS["AdamW"](), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_all_parameters_may_have_factors(engine_of, monkeypatch):
    assert check_updates(matrices_alone, engine_of, monkeypatch).count_of_factors == 2


def of_two_types():
    """A model whose weights are of two types."""
    layers = [keras.layers.Dense(size, dtype=dtype) for size, dtype in ((900, "float32"), (3, "float64"))]
    model = keras.Sequential([keras.Input((20,)), *layers])
    model.compile(keras.optimizers.SGD(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Sliced(keras.layers.Layer):
    """Uses a part of its weight alone: a kernel could write its result in the place of the part."""

    def build(self, shape):
        self.table = self.add_weight(shape=(64, shape[-1]), name="table")

    def call(self, inputs):
        return inputs + keras.ops.sum(keras.ops.exp(self.table[:16]), axis=0)


def with_sliced_weight():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((20,)), Sliced(), keras.layers.Dense(200), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_no_kernel_writes_in_the_place_of_a_part_of_a_weight(engine_of, monkeypatch):
    check_updates(with_sliced_weight, engine_of, monkeypatch)


@pytest.fixture
def one_thread(monkeypatch):
    """Workers have one thread for an operation, and take three steps in a function as soon as they may."""
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    monkeypatch.setattr(ArrivalPacing, "size", lambda self, size: size)
    monkeypatch.setattr(worker_updates, "MOST_TOGETHER", 3)


RUNS = ((2, 2), (11, 6), (5, 2))
"""Steps, and steps in an execution: workers take some of them one by one."""


@pytest.mark.parametrize("build", [partial(network, OPTIMIZERS["Adam"]), matrices_alone, with_sliced_weight])
@pytest.mark.parametrize("phases", [False, True])
def test_steps_that_are_one_function_are_those_that_are_taken_one_by_one(
    build, phases, engine_of, one_thread, monkeypatch, caplog
):
    caplog.set_level("INFO", "tfdist")
    engine, model = engine_of(build, phases=phases)
    found = trained(engine, model, RUNS)
    assert not [each for each in caplog.messages if "executor" in each or "optimizations" in each]
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS")
    engine, model = engine_of(build, phases=phases)
    expected = trained(engine, model, RUNS)
    assert len(found[0]) == 18
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for value, wanted in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)


def test_the_single_threaded_executor_runs_them(engine_of, one_thread, monkeypatch):
    """Without it, a training fails where several steps may be taken."""
    monkeypatch.setattr(updating_worker, "SINGLE_THREADED", "NO_SUCH_EXECUTOR")
    engine, model = engine_of(partial(network, OPTIMIZERS["Adam"]))
    trained(engine, model, runs=[(2, 2)])
    with pytest.raises(tf.errors.OpError) as failure:
        trained(engine, model, runs=[(6, 6)])
    assert "NO_SUCH_EXECUTOR" in str(failure.value)


def recurrent():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Reshape((4, 5)), keras.layers.LSTM(32), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((20,)), *layers])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def refused(monkeypatch):
    monkeypatch.setattr(updating_worker, "why_not_in_order", lambda *_: "it does not suit")


def drawing(monkeypatch):
    monkeypatch.setattr(updating_worker, "copied", lambda *_: None)


@pytest.mark.parametrize(
    ("build", "patch", "logged"),
    [
        (recurrent, lambda _: None, "loops or conditions"),
        (matrices_alone, refused, "it does not suit"),
        (matrices_alone, drawing, ""),
    ],
    ids=["a_loop", "refused", "random_numbers_from_seeds"],
)
def test_other_steps_are_taken_one_by_one(build, patch, logged, engine_of, one_thread, monkeypatch, caplog):
    caplog.set_level("INFO", "tfdist")
    patch(monkeypatch)
    monkeypatch.setattr(updating_worker, "in_rows", None)
    engine, model = engine_of(build)
    assert isinstance(functions_of(engine), WorkerUpdateFunctions)
    losses, _ = trained(engine, model, runs=RUNS)
    assert len(losses) == 18
    assert [logged in each for each in caplog.messages if "executor" in each] == [True] * bool(logged)
    assert not [each for each in caplog.messages if "optimizations" in each]


def check_updates(build, engine_of, monkeypatch):
    """Checks that workers make the same updates as the ps would; returns their functions."""
    engine, model = engine_of(build)
    assert isinstance(functions_of(engine), WorkerUpdateFunctions)
    losses, values = trained(engine, model)
    assert int(np.asarray(iterations(model.optimizer).value)) == 7
    with monkeypatch.context() as patch:
        patch.setattr(worker_updates, "suits", lambda _: False)
        patch.setattr("tfdist_cli.train.engine.parameter_server.lockstep.updates.suits", lambda _: False)
        other, reference = engine_of(build)
    assert not isinstance(functions_of(other), WorkerUpdateFunctions)
    expected_losses, expected = trained(other, reference)
    assert len(losses) == 7
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-3)
    for value, wanted in zip(values, expected, strict=True):
        # Sums are made in another order by other threads, and Lion takes the sign of a gradient.
        assert np.mean(np.abs(value - wanted) > 1e-3 * (1 + np.abs(wanted))) < 0.02
    return functions_of(engine)


@pytest.mark.parametrize(
    ("build", "rules"),
    [
        (partial(network, lambda: keras.optimizers.Adam(clipnorm=1.0)), {}),  # the norm is that of a whole variable
        (partial(network, lambda: keras.optimizers.Adam(use_ema=True)), {}),
        (partial(network, keras.optimizers.SGD, units=4), {}),  # not worth to be divided
        (of_two_types, {}),
        (partial(network, keras.optimizers.SGD), {"wire": "bfloat16"}),
        (partial(network, keras.optimizers.SGD), {"optimized": False}),
    ],
)
def test_other_trainings_do_not_suit(build, rules, engine_of):
    assert not isinstance(functions_of(engine_of(build, **rules)[0]), WorkerUpdateFunctions)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (Workers, "most", 2),  # one that joins may be on another host
        (words, "supported", lambda: False),
        (worker_updates, "opens_memory", lambda _: False),  # the chief is in another container
        (ParameterServerContext, "updates_divide", False),
        (ModelStep, "reads_optimizers", lambda *_: True),
        (ModelStep, "trains_all", lambda *_: False),  # what has no gradient would be updated with 0
    ],
)
def test_other_clusters_and_parameters_do_not_suit(owner, name, value, engine_of, monkeypatch):
    monkeypatch.setattr(owner, name, value)
    assert not isinstance(functions_of(engine_of(partial(network, keras.optimizers.SGD))[0]), WorkerUpdateFunctions)


def test_an_order_is_executed_in_turn_and_memory_is_opened_once(monkeypatch):
    monkeypatch.setattr(token_queues, "CHIEF_DEVICE", HERE)
    calls, ps = [], tf.reshape(tf.range(2 * IDENTITY_BYTES), [2, IDENTITY_BYTES])

    class Steps:
        def opened(self):
            calls.append("opened")
            return tf.cast(ps, tf.uint8)

        def of_chief(self, ps):
            calls.append("of chief")

        def abort(self, ps):
            calls.append("aborted")

    orders = StepOrders(Steps())
    for run in range(2):
        orders.start(run * RUN)
        orders.order(StepKind.CHUNK)
    assert [orders.kinds.get() for _ in range(2)] == [StepKind.CHUNK] * 2
    assert np.array(orders.numbers, np.int64).view(np.uint8).tolist() == orders.handles[1].numpy().reshape(-1).tolist()
    assert orders.of(0) == {}
    orders.abort(1)
    assert calls == ["opened", "of chief", "aborted"]


def test_what_is_collected_of_a_run_that_was_aborted_is_an_error_of_the_ps(monkeypatch):
    monkeypatch.setattr(token_queues, "CHIEF_DEVICE", HERE)

    class Steps:
        def opened(self):
            return tf.zeros([1, IDENTITY_BYTES], tf.uint8)

        def of_chief(self, ps):
            return self

        def collect(self, first, count, allowed, *, ends):
            raise NoMoreSteps

        def check(self, ps):
            raise tf.errors.UnavailableError(None, None, "the ps is lost")

        def abort(self, ps):
            pass

    orders = StepOrders(Steps())
    orders.start(RUN)
    with pytest.raises(tf.errors.UnavailableError):
        orders.report(0, 1, 2, ends=True)


def test_a_run_that_is_aborted_is_followed_by_one_in_new_memory(engine_of, monkeypatch):
    engine, model = engine_of(partial(network, keras.optimizers.SGD))
    updates = engine._updates.updates
    queues, commit = [], WorkerSteps.commit

    def fail(steps, sequence, *given):
        queues.append(updates._queues)
        if sequence % RUN == 3:
            raise OSError("no more")
        commit(steps, sequence, *given)

    with monkeypatch.context() as patch:
        patch.setattr(WorkerSteps, "commit", fail)
        with pytest.raises(tf.errors.OpError):
            trained(engine, model, [(40, 2)])
    assert updates._queues is None
    with pytest.raises(Aborted):
        step_operations._process._steps(np.asarray(queues[-1].handles[1])[0])
    assert len(trained(engine, model, [(3, 1)])[0]) == 3
