"""Which asynchronous trainings make exchanges in shared memory, and what a ps does with a request."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory import exchange_operations
from tfdist_cli.train.cluster.shared_memory.exchanges import Wanted
from tfdist_cli.train.engine.parameter_server import context as context_module
from tfdist_cli.train.engine.parameter_server.asynchronous.shared_memory import (
    SharedExchanges,
    is_not_answered,
    suits,
)
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.transport import Transport
from tfdist_cli.train.optimizers.update_numbers import UpdateCounts

HERE = "/job:localhost/replica:0/task:0/device:CPU:0"


def training(optimizer, **updates):
    """A training for which everything is as it has to be."""
    with tf.device(HERE):
        parameters = [keras.Variable(np.float32([[1, 2, 3], [4, 5, 6]])), keras.Variable(np.float32([7, 8]))]
        optimizer.build(parameters)
    changed = {"local_steps": 1, "prefetch": False, "delay_compensation": 0.0, **updates}
    return Training(
        workers=Workers([0, 1]),
        transport=Transport(parameters, shared=True),
        step=SimpleNamespace(updates_within=False, parameters=parameters, optimizer=optimizer),
        rules=SimpleNamespace(optimized=True, updates=SimpleNamespace(**changed)),
        rate=None,
    )


class Training(SimpleNamespace):
    """What decides, and makes updates, in a training."""

    updates_divide = ParameterServerContext.updates_divide
    sent_rate = ParameterServerContext.sent_rate
    apply_on = ParameterServerContext.apply_on


class Workers(list):
    """Two of at most two workers."""

    share_memory_now = True
    most = 2


@pytest.fixture
def context():
    found = training(keras.optimizers.SGD(0.5))
    found.workers = Workers([0, 1])
    return found


def test_variables_that_cross_whole_suit(context):
    assert suits(context)


@pytest.mark.parametrize(
    "change",
    [
        lambda context: setattr(context.workers, "share_memory_now", False),
        lambda context: setattr(context.workers, "most", 3),  # one that joins may be on another host
        lambda context: setattr(context.step, "updates_within", True),
        lambda context: setattr(context.rules, "optimized", False),
        lambda context: setattr(context.rules.updates, "local_steps", 2),
        lambda context: setattr(context.rules.updates, "prefetch", True),
        lambda context: setattr(context.rules.updates, "delay_compensation", 0.1),
        lambda context: setattr(context, "transport", Transport(context.step.parameters)),
        lambda context: setattr(context, "transport", Transport(context.step.parameters, [0], shared=True)),
        lambda context: setattr(context, "transport", Transport([], shared=True)),
    ],
)
def test_other_trainings_do_not_suit(context, change):
    change(context)
    assert not suits(context)


@pytest.mark.parametrize(
    ("optimizer", "suitable"),
    [
        (keras.optimizers.Adam(clipnorm=1.0), True),
        (keras.optimizers.Adam(global_clipnorm=1.0), False),  # the norm is that of all ps
        (keras.optimizers.Nadam(), False),
        (keras.optimizers.SGD(use_ema=True), False),
    ],
)
def test_each_ps_has_to_make_its_part_of_an_update_alone(context, optimizer, suitable):
    changed = training(optimizer)
    context.step, context.transport = changed.step, changed.transport
    assert suits(context) is suitable


def test_an_optimizer_that_counts_elsewhere_does_not_suit(context, monkeypatch):
    elsewhere = SimpleNamespace(value=SimpleNamespace(device="/job:ps/replica:0/task:1/device:CPU:0"))
    monkeypatch.setattr(context_module, "iterations", lambda _: elsewhere)
    assert not suits(context)


@pytest.fixture
def exchanges(context):
    exchange_operations.register()
    counts = UpdateCounts(context.step.optimizer, [each.value for each in context.step.parameters])
    found = SharedExchanges(context, counts, tf.Variable(False))
    found._present = [True, True]
    yield found
    found._operations.close()
    exchange_operations._process._drop_ended()


def serve_one(exchanges, monkeypatch):
    """Lets the ps take the request that was sent."""
    serving = exchanges._serving_function(0)
    monkeypatch.setattr(tf, "while_loop", lambda _, body, start, **__: body(*start))
    serving()


def test_a_ps_applies_gradients_with_the_rate_of_the_worker(context, exchanges, monkeypatch):
    number, rate = exchanges.begin([]), tf.constant([0.25], tf.float64)
    gradients = [tf.ones([2, 3]), tf.fill([2], 2.0)]
    pulled, initial = context.transport.pull(), [each.numpy().copy() for each in context.step.parameters]
    sent = exchanges.push(number, rate, gradients, pulled, pulls=True)
    exchanges._stopped.assign(True)
    serve_one(exchanges, monkeypatch)
    answer = exchanges.answer(sent)
    assert [int(answer.before), int(answer.updates), bool(answer.stopped)] == [0, 1, True]
    assert int(context.step.optimizer.iterations) == 1
    for variable, before, value, step in zip(
        context.step.parameters, initial, exchanges.pulled(answer.values).values, (0.25, 0.5), strict=True
    ):
        np.testing.assert_array_equal(variable, before - step)
        np.testing.assert_array_equal(value, variable)


def test_a_parameter_without_a_gradient_stays(context, exchanges, monkeypatch):
    number, rate = exchanges.begin([]), tf.constant([0.25], tf.float64)
    initial = context.step.parameters[1].numpy().copy()
    sent = exchanges.push(number, rate, [tf.ones([2, 3]), None], context.transport.pull(), pulls=False)
    serve_one(exchanges, monkeypatch)
    assert int(exchanges.answer(sent).updates) == 1
    np.testing.assert_array_equal(context.step.parameters[1], initial)


def test_values_are_pulled_without_an_update(context, exchanges, monkeypatch):
    sent = exchanges._operations.request(exchanges.begin([]), Wanted.VALUES, exchanges.rate(), [])
    serve_one(exchanges, monkeypatch)
    answer = exchanges.answer(sent)
    assert [int(answer.before), int(answer.updates), bool(answer.stopped)] == [0, 0, False]
    np.testing.assert_array_equal(exchanges.pulled(answer.values).values[0], context.step.parameters[0])
    assert exchanges.rate().numpy().tolist() == [0.5]


def test_the_ps_computes_the_rate_of_a_schedule(context):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    changed = training(keras.optimizers.SGD(schedule))
    context.step, context.transport = changed.step, changed.transport
    found = SharedExchanges.__new__(SharedExchanges)
    found._context, found._present = context, [True, True]
    found._counts = UpdateCounts(context.step.optimizer, [each.value for each in context.step.parameters])
    before = context.step.parameters[0].numpy().copy()
    for rate in (0.5, 0.25):
        found._update(HERE, tf.zeros([], tf.float64), [tf.ones([8])])
        before -= rate
        np.testing.assert_array_equal(context.step.parameters[0], before)


def test_a_failure_that_follows_from_that_of_a_ps_is_told_apart():
    errors = [tf.errors.UnknownError(None, None, text) for text in ("NotAnswered: a ps has ended", "another one")]
    assert [is_not_answered(each) for each in errors] == [True, False]
