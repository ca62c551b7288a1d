"""Which trainings in lockstep meet in shared memory, and what their boards have."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.lockstep.round_operations import Rounds
from tfdist_cli.train.cluster.shared_memory.memory import IDENTITY_BYTES
from tfdist_cli.train.engine.parameter_server.gradient_store import GradientStore
from tfdist_cli.train.engine.parameter_server.lockstep import shared_memory, token_queues
from tfdist_cli.train.engine.parameter_server.lockstep.shared_memory import SharedLockstepFunctions, suits
from tfdist_cli.train.engine.parameter_server.messages import ReportLayout
from tfdist_cli.train.engine.parameter_server.transport import Transport

HERE = "/job:localhost/replica:0/task:0/device:CPU:0"


@pytest.fixture
def variables():
    with tf.device(HERE):
        return [tf.Variable(tf.reshape(tf.range(6, dtype=tf.float32), [2, 3])), tf.Variable([7.0, 8.0])]


@pytest.fixture
def context(monkeypatch, variables):
    """A training for which everything is as it has to be."""
    monkeypatch.setattr(shared_memory, "ps_devices", lambda _: [HERE])
    with tf.device(HERE):
        state = [tf.Variable(number, trainable=False) for number in (1.0, 2.0, 3.0)]
    return SimpleNamespace(
        shares_memory=True,
        transport=Transport(variables, shared=True),
        step=SimpleNamespace(updates_within=False, examples_per_batch=None, state=state),
        coordinator=SimpleNamespace(strategy=None),
        assigned={1: 0.0},
    )


def test_variables_that_cross_whole_suit(context):
    assert suits(context)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        (lambda context: context, {"shares_memory": False}),
        (lambda context: context.step, {"updates_within": True}),
        (lambda context: context.step, {"examples_per_batch": 8}),
    ],
)
def test_other_trainings_do_not_suit(context, part, change):
    vars(part(context)).update(change)
    assert not suits(context)


def test_tables_and_separate_tasks_do_not_suit(context, variables):
    for transport in (Transport(variables), Transport(variables, [0], shared=True), Transport([], shared=True)):
        context.transport = transport
        assert not suits(context)


def test_state_that_is_not_on_a_ps_does_not_suit(context, monkeypatch):
    monkeypatch.setattr(shared_memory, "ps_devices", lambda _: ["/job:ps/replica:0/task:0/device:CPU:0"])
    assert not suits(context)


def test_a_ps_with_nothing_but_frozen_weights_does_not_suit(context, monkeypatch):
    other = "/job:localhost/replica:0/task:0/device:CPU:1"
    monkeypatch.setattr(shared_memory, "ps_devices", lambda _: [HERE, other])
    for place, suitable in ((0, False), (1, True)):  # the second one is assigned
        state = SimpleNamespace(device=other, shape=tf.TensorShape([]))
        monkeypatch.setattr(
            shared_memory, "parts", lambda each, state=state: [state] if isinstance(each, str) else [each]
        )
        context.step.state[:] = [tf.Variable(0.0)] * 2
        context.step.state[place] = "elsewhere"
        assert suits(context) is suitable


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_a_worker_sees_what_a_ps_shows(context, variables, wire):
    context.transport = Transport(variables, dtype=wire, shared=True)
    functions = SharedLockstepFunctions.__new__(SharedLockstepFunctions)
    functions.devices, functions.layout = [HERE], ReportLayout(1, 1, 0)
    functions.store = GradientStore.__new__(GradientStore)
    functions.store.context = context
    functions.divide_state(context)
    layout = functions._layout_of_boards()
    shown = functions._shown(HERE, first=True)
    assert [array.size for array in layout.values[0]] == [int(tf.size(each)) for each in shown]
    assert [array.dtype for array in layout.values[0]] == [each.dtype.as_numpy_dtype for each in shown]
    assert [array.size for array in layout.others[0]] == [8]
    assert layout.report.size == functions.layout.size
    assert len(functions._shown(HERE, first=False)) == len(shown) - 2  # but for the state that no step assigns
    pulled, state = functions._seen(shown)
    for value, variable in zip(pulled.values, variables, strict=True):
        assert np.array_equal(value, variable)
    assert [float(each) for each in state] == [1.0, 2.0, 3.0]


def test_a_ps_that_shows_nothing_more_waits_for_its_part_of_the_update_too(context):
    """One that stores only weights that are not trained: workers must not see its next token before the others'."""
    functions = SharedLockstepFunctions.__new__(SharedLockstepFunctions)
    functions.devices, functions.store = [HERE], GradientStore.__new__(GradientStore)
    context.transport, context.assigned = Transport([], shared=True), {}
    functions.store.context = context
    functions.divide_state(context)
    functions.rounds = Rounds([HERE], Layout([[]], [[]], Array(np.dtype(np.float64), 1)))

    @tf.function(autograph=False)
    def publish(ps, sequence, collected):
        done = tf.identity(collected, name="collected")
        return functions._publish(0, {"ps": [ps]}, sequence, sequence, [done])

    ps, number = tf.zeros([1, IDENTITY_BYTES], tf.uint8), tf.constant(0, tf.int64)
    [published] = [
        each
        for each in publish.get_concrete_function(ps, number, number).graph.get_operations()
        if each.type == "PyFunc"
    ]
    assert [each.name for each in published.inputs[1].op.control_inputs] == ["collected_1"]  # after its argument


def test_each_ps_counts_its_updates_if_it_makes_its_part_alone(context):
    optimizer, weight = keras.optimizers.SGD(), keras.Variable([0.0])
    optimizer.build([weight])
    context.step = SimpleNamespace(optimizer=optimizer, parameters=[weight])
    for divide in (True, False):
        context.updates_divide = divide
        counts = shared_memory._counts(context)
        assert (counts is not None) is divide
        assert not divide or counts.on(weight.value.device) is optimizer.iterations.value


def test_a_run_begins_with_the_optimizers_count_and_a_rehearsal_beside_one_leaves_it(monkeypatch):
    monkeypatch.setattr(token_queues, "CHIEF_DEVICE", HERE)
    done = []
    functions = SharedLockstepFunctions.__new__(SharedLockstepFunctions)
    counts = SimpleNamespace(begin=lambda: done.append("counts"))
    rounds = SimpleNamespace(opened=lambda workers: done.append(int(workers)))
    vars(functions).update(counts=counts, rounds=rounds, _workers=2)
    orders = functions.new_orders()
    orders.start(0)
    assert done == [2]  # also when functions are rehearsed
    functions.begin()
    assert done == [2, "counts"]
