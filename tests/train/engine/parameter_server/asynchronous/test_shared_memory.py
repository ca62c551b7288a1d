"""Which asynchronous trainings update parameters in shared memory, and what these updates make of them."""

import threading
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.spec.sections.updates import LearningRate
from tfdist_cli.train.cluster.shared_memory import parameter_operations
from tfdist_cli.train.cluster.shared_memory.parameters import WorkerParameters
from tfdist_cli.train.engine.parameter_server import context as context_module
from tfdist_cli.train.engine.parameter_server.asynchronous import shared_memory
from tfdist_cli.train.engine.parameter_server.asynchronous.shared_memory import SharedUpdates, is_ended, suits
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.transport import Pulled, Transport
from tfdist_cli.train.optimizers import registry
from tfdist_cli.train.optimizers.apply import StoredParameter, apply, stored_parameters
from tfdist_cli.train.optimizers.learning_rate import RateScaling
from tfdist_cli.train.optimizers.terms import SQUARES, SummedTerms
from tfdist_cli.train.tf_compat import variables
from tfdist_cli.train.tf_compat.control_flow import after

HERE = "/job:localhost/replica:0/task:0/device:CPU:0"
OTHER = "/job:localhost/replica:0/task:0/device:CPU:1"
"""There is none: its operations run here."""
VALUES = [np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([7, 8]), np.float32(9), np.ones((4, 8), np.float32)]


def training(optimizer, values=VALUES[:2], rate=None, **updates):
    """A training for which everything is as it has to be."""
    with tf.device(HERE):
        parameters = [keras.Variable(value) for value in values]
        optimizer.build(parameters)
    changed = {"local_steps": 1, "prefetch": False, "delay_compensation": 0.0, **updates}
    return Training(
        workers=Workers([0, 1]),
        transport=Transport(parameters, shared=True),
        step=SimpleNamespace(
            updates_within=False, parameters=parameters, optimizer=optimizer, reads_optimizers=lambda _: False
        ),
        element_spec=None,
        rules=SimpleNamespace(optimized=True, updates=SimpleNamespace(**changed)),
        rate=rate,
    )


class Training(SimpleNamespace):
    """What decides, and makes updates, in a training."""

    updates_divide = ParameterServerContext.updates_divide
    sent_rate = ParameterServerContext.sent_rate
    apply_to = ParameterServerContext.apply_to


class Workers(list):
    """Two of at most two workers."""

    share_memory_now = True
    most = 2


@pytest.fixture
def context():
    return training(keras.optimizers.SGD(0.5))


def test_variables_that_cross_whole_suit(context):
    assert suits(context)


@pytest.mark.parametrize(
    "change",
    [
        lambda context: setattr(context.workers, "share_memory_now", False),
        lambda context: setattr(context.workers, "most", 3),  # one that joins may be on another host
        lambda context: setattr(context.step, "updates_within", True),
        lambda context: setattr(context.step, "reads_optimizers", lambda _: True),
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


def test_a_failure_that_follows_from_that_of_a_ps_is_told_apart():
    errors = [tf.errors.UnknownError(None, None, text) for text in ("UpdatesEnded: a ps has ended", "another one")]
    wrapped = RuntimeError("a worker has failed")
    vars(wrapped)["original_exception"] = errors[0]
    assert [is_ended(each) for each in (*errors, wrapped)] == [True, False, True]


class OnOther:
    """A variable that another ps stores."""

    device = OTHER

    def __init__(self, variable):
        self._variable = variable

    def __getattr__(self, name):
        return getattr(self._variable, name)


def with_other_ps(optimizer, parameters):
    """Every second parameter is on another ps, with its slots."""
    return [
        StoredParameter(each.variable, [OnOther(each.shards[0])], [[OnOther(slot)] for (slot,) in each.slots])
        if number % 2
        else each
        for number, each in enumerate(stored_parameters(optimizer, parameters))
    ]


@pytest.fixture
def shared(monkeypatch):
    """Returns a function: a training → what its workers and ps do."""
    parameter_operations.register()
    made = []

    def begun(context, ps=1):
        monkeypatch.setattr(shared_memory, "stored_parameters", with_other_ps if ps > 1 else stored_parameters)
        made.append(SharedUpdates(context))
        made[-1].begin()
        return made[-1]

    yield begun
    for each in made:
        each.close()
    parameter_operations._process._drop_ended()


class Stepping:
    """A worker's execution of some updates: a function of gradients, one for each parameter, for each update.

    After it, the variables of the ps have what it has made of them.
    """

    def __init__(self, updates, loop=False):
        self.updates = updates
        self.loop = loop
        self.function = tf.function(self._take, autograph=False)

    def __call__(self, gradients):
        before, updates, stopped, values = self.function(gradients)
        self.updates.outdate()
        self.updates.read_updates()
        return before.numpy().tolist(), int(updates), bool(stopped), [each.numpy() for each in values]

    def _take(self, gradients):
        rate, local = self.updates.rate(), self.updates.open([])
        answer = self.updates.pull(local)
        before = tf.TensorArray(tf.int64, size=len(gradients), element_shape=[])
        if self.loop:
            stacked = [None if each[0] is None else tf.stack(each) for each in zip(*gradients, strict=True)]

            def take(number, before, _, __, values):
                given = [None if each is None else each[number] for each in stacked]
                answer = self.updates.update(local, rate, given, Pulled.whole(values))
                written = before.write(number, answer.before)
                return number + 1, written, answer.updates, answer.stopped, answer.values

            start = [tf.constant(0), before, answer.updates, answer.stopped, answer.values]
            left = tf.while_loop(lambda number, *_: number < len(gradients), take, start, parallel_iterations=1)
            _, before, updates, stopped, values = left
        else:
            for number, given in enumerate(gradients):
                answer = self.updates.update(local, rate, given, Pulled.whole(answer.values))
                before = before.write(number, answer.before)
            updates, stopped, values = answer.updates, answer.stopped, answer.values
        before = before.stack()
        self.updates.close_local(local, [updates, stopped, before])
        return before, updates, stopped, values


def drawn(updates, values=VALUES, seed=0):
    """Gradients of some updates."""
    draw = np.random.default_rng(seed).normal
    return [[tf.constant(draw(size=value.shape), tf.float32) for value in values] for _ in range(updates)]


def assert_same(found, expected, tolerance=1e-6):
    for value, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=tolerance, atol=tolerance)


def test_an_update_applies_gradients_with_the_rate_of_the_worker(context, shared):
    updates, initial = shared(context), [value.copy() for value in VALUES[:2]]
    context.step.optimizer.learning_rate = 0.25
    before, count, stopped, values = Stepping(updates)([[tf.ones([2, 3]), tf.fill([2], 2.0)]])
    assert (before, count, stopped) == ([0], 1, False)
    for variable, start, value, step in zip(context.step.parameters, initial, values, (0.25, 0.5), strict=True):
        np.testing.assert_array_equal(variable, start - step)
        np.testing.assert_array_equal(value, start - step)


def test_the_rate_is_read_once_in_an_execution(context, shared):
    step = Stepping(shared(context))
    for rate, expected in ((0.25, 6.75), (0.5, 6.25)):
        context.step.optimizer.learning_rate = rate
        step([[tf.ones([2, 3]), tf.ones([2])]])
        assert context.step.parameters[1].numpy()[0] == expected


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("ps", [1, 2])
def test_a_parameter_without_a_gradient_stays(ps, loop, context, shared):
    updates, initial = shared(context, ps), context.step.parameters[1].numpy().copy()
    before, count, *_ = Stepping(updates, loop)([[tf.ones([2, 3]), None]] * 3)
    assert (before, count) == ([0, 1, 2], 3)
    np.testing.assert_array_equal(context.step.parameters[1], initial)
    np.testing.assert_array_equal(context.step.parameters[0], VALUES[0] - 1.5)


def test_values_are_pulled_without_an_update(context, shared):
    updates = shared(context)

    @tf.function(autograph=False)
    def pull():
        local = updates.open([])
        answer = updates.pull(local)
        updates.close_local(local, [answer.stopped])
        return answer.before, answer.updates, answer.stopped, answer.values

    before, count, stopped, values = pull()
    assert (int(before), int(count), bool(stopped)) == (0, 0, False)
    assert_same(values, VALUES[:2], 0)
    updates.stop()
    assert bool(pull()[2])
    updates.begin()
    assert not bool(pull()[2])


KINDS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1),
    "lion": lambda: keras.optimizers.Lion(0.1),
    "weight decay": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "clipped norms": lambda: keras.optimizers.Adam(0.1, clipnorm=0.5),
    "scaled loss": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=4.0),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)),
    "constant schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 1.0])
    ),
    "function": lambda: keras.optimizers.SGD(lambda: 0.25),
}


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("ps", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_updates_equal_those_of_variables(kind, ps, loop, shared):
    rate = RateScaling(LearningRate(scale="linear", warmup_steps=3), 2) if kind in ("sgd", "schedule") else None
    ours, plain = training(KINDS[kind](), VALUES, rate), training(KINDS[kind](), VALUES, rate)
    updates, gradients = shared(ours, ps), drawn(4)
    before, count, _, values = Stepping(updates, loop)(gradients)
    assert (before, count) == ([0, 1, 2, 3], 4)
    for given in gradients:
        apply(plain.step.optimizer, [[each] for each in given], plain.step.parameters, rate)
    assert_same(values, plain.step.parameters)
    assert_same(ours.step.parameters, plain.step.parameters)
    for own, others in zip(ours.step.optimizer.variables[2:], plain.step.optimizer.variables[2:], strict=True):
        np.testing.assert_allclose(own, others, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["adam", "rmsprop", "clipped norms"])
def test_sums_of_terms_are_updated_as_keras_does(kind, shared):
    """An embedding that is looked up: of a row that occurs several times, each term is squared."""
    ours, plain = training(KINDS[kind](), VALUES[:1]), training(KINDS[kind](), VALUES[:1])
    ours.transport = Transport(
        ours.step.parameters, shared=True, terms={0: SQUARES}
    )  # fmt: skip
    updates = shared(ours)
    looked_up = tf.IndexedSlices(
        tf.constant([[1.0, 2, 3], [2, 2, 2], [-1, 0, 1]]), tf.constant([1, 0, 1]), tf.constant([2, 3])
    )
    Stepping(updates)([[looked_up]] * 2)
    for _ in range(2):
        plain.step.optimizer.apply([looked_up], plain.step.parameters)
    assert_same(ours.step.parameters, plain.step.parameters, 1e-5)


def test_the_values_of_padded_variables_are_their_own(shared):
    values = [np.float32(1), np.float32([2]), np.full((17,), 3, np.float32)]
    context = training(keras.optimizers.Adam(1.0), values)
    updates = shared(context)
    _, _, _, found = Stepping(updates)([[tf.ones(value.shape) for value in values]] * 2)
    assert [each.shape for each in found] == [(), (1,), (17,)]
    assert_same(found, context.step.parameters, 0)
    assert_same(found, [value - 2 for value in values], 1e-5)


def test_workers_lose_no_update_of_each_other(shared):
    """The other one does without TensorFlow, whose threads are few: all of them could wait for the lock."""
    context, each = training(keras.optimizers.SGD(1.0, momentum=0.5), VALUES), 100
    updates, done = shared(context, ps=2), []
    ps, layout = updates._operations._ps, updates._operations._layout
    gradients = [[tf.zeros(value.shape) for value in VALUES]] * each
    step = Stepping(updates, loop=True)
    step.function.get_concrete_function(gradients)

    def subtract():
        other = WorkerParameters(layout, [own.tobytes() for own in ps])
        for _ in range(each):
            for number in range(len(ps)):
                done.append((number, other.acquire(number, counts=True)))
                for place in other._ps[number].content.stored[: len(layout.values[number])]:
                    np.subtract(place, 1, out=place)
                other.release(number)

    thread = threading.Thread(target=subtract)
    thread.start()
    before, *_ = step(gradients)
    thread.join(60)
    assert not thread.is_alive()
    assert sorted([*before, *(count for ps, count in done if not ps)]) == list(range(2 * each))
    assert_same(context.step.parameters, [value - each for value in VALUES], 0)


def test_what_is_assigned_in_a_run_is_shared(context, shared):
    updates = shared(context, ps=2)
    step = Stepping(updates)
    step([[tf.ones([2, 3]), tf.ones([2])]])
    assert int(context.step.optimizer.iterations) == 1
    with updates.read_when_used():
        context.step.parameters[0].assign(VALUES[0] * 10)
        context.step.parameters[1].assign(VALUES[1] * 10)
        updates.share_changes()
    _, count, _, values = step([[tf.ones([2, 3]), tf.ones([2])]])
    assert count == 2
    assert_same(values, [VALUES[0] * 10 - 0.5, VALUES[1] * 10 - 0.5], 0)
    assert_same(context.step.parameters, values, 0)


def test_variables_get_updates_when_they_are_used(context, shared, monkeypatch):
    updates, used = shared(context), []
    for name in ("_read_all", "_publish_changes"):
        own = getattr(updates, name)
        monkeypatch.setattr(updates, name, lambda own=own, name=name: (used.append(name), own()))
    take, gradients = Stepping(updates).function, [[tf.ones([2, 3]), tf.ones([2])]]
    parameter, counter = context.step.parameters[1], context.step.optimizer.iterations
    with updates.read_when_used():
        for _ in range(2):
            take(gradients)
            updates.outdate()
            updates.share_changes()
        assert used == []
        assert int(counter) == 2
        np.testing.assert_array_equal(parameter, VALUES[1] - 1)
        assert used == ["_read_all"]
        updates.share_changes()
        take(gradients)
        updates.outdate()
        parameter.assign_add([1.0, 1])
        np.testing.assert_array_equal(parameter, VALUES[1] - 0.5)
        updates.share_changes()
        updates.share_changes()
        assert used == ["_read_all", "_read_all", "_publish_changes"]
    *_, values = Stepping(updates)(gradients)
    np.testing.assert_array_equal(values[1], VALUES[1] - 1)


def test_functions_of_callbacks_see_updates_and_workers_what_they_assign(context, shared):
    updates, parameter = shared(context), context.step.parameters[1].value
    take, gradients = Stepping(updates).function, [[tf.ones([2, 3]), tf.ones([2])]]
    read = tf.function(lambda: parameter + 0, autograph=False)
    add = tf.function(lambda: parameter.assign_add([10.0, 10]), autograph=False)
    read(), add.get_concrete_function()
    with updates.read_when_used():
        take(gradients)
        updates.outdate()
        np.testing.assert_array_equal(read(), VALUES[1] - 0.5)
        add()
        np.testing.assert_array_equal(read(), VALUES[1] + 9.5)
        updates.share_changes()
        *_, values = take(gradients)
    np.testing.assert_array_equal(values[1], VALUES[1] + 9)


def test_a_run_begins_with_what_was_restored(shared):
    context = training(keras.optimizers.SGD(0.5, momentum=0.5))
    updates = shared(context)
    step = Stepping(updates)
    step([[tf.ones([2, 3]), tf.ones([2])]])
    optimizer = context.step.optimizer
    for variable, value in zip(context.step.parameters, VALUES, strict=False):
        variable.assign(value)
    for momentum in optimizer.momentums:
        momentum.assign(momentum * 0)
    optimizer.iterations.assign(40)
    updates.begin()
    before, count, _, values = step([[tf.ones([2, 3]), tf.ones([2])]])
    assert (before, count) == ([40], 41)
    assert_same(values, [value - 0.5 for value in VALUES[:2]], 0)


def test_the_end_of_a_run_assigns_the_count_and_the_parameters(context, shared):
    updates = shared(context, ps=2)
    Stepping(updates).function([[tf.ones([2, 3]), tf.ones([2])]] * 3)
    assert int(context.step.optimizer.iterations) == 0
    assert_same(context.step.parameters, VALUES[:2], 0)
    updates.end()
    functions = updates.start()
    assert sorted(functions) == ["parameters:0", "parameters:1"]
    for wait in functions.values():  # one after the other: both would wait in threads of this process
        wait()
    assert int(context.step.optimizer.iterations) == 3
    assert_same(context.step.parameters, [value - 1.5 for value in VALUES[:2]], 0)
    assert updates.start() is functions


def test_workers_make_no_updates_after_an_abort(context, shared):
    updates = shared(context, ps=2)
    step = Stepping(updates)
    functions = updates.start()
    updates.abort({})
    for wait in functions.values():
        wait()
    with pytest.raises(tf.errors.UnknownError) as raised:
        step([[tf.ones([2, 3]), tf.ones([2])]])
    assert is_ended(raised.value)
    assert_same(context.step.parameters, VALUES[:2], 0)


def ancestors(operation):
    """All operations that run before another one of the same graph."""
    found, left = set(), [operation]
    while left:
        one = left.pop()
        before = {*one.control_inputs, *(each.op for each in one.inputs)} - found
        found |= before
        left += before
    return found


def called(operation):
    """The function that an operation calls, if it is one of Python."""
    return operation.get_attr("token").decode().split("_")[-1] if operation.type == "PyFunc" else ""


def graph_of_update(context, updates, gradients):
    """The operations of an execution that makes one update, without those at its end."""

    @tf.function(autograph=False)
    def execute(given):
        local = updates.open([])
        values = [tf.identity(value) for value in VALUES]
        answer = updates.update(local, updates.rate(), [after(each, [each]) for each in given], Pulled.whole(values))
        return answer.before, answer.values

    return execute.get_concrete_function(gradients).graph.get_operations()


CHANGES = ("ResourceApply", "AssignAdd", "AssignSub")


@pytest.mark.parametrize("summed", [False, True], ids=["gradients", "terms"])
@pytest.mark.parametrize("ps", [1, 2])
@pytest.mark.parametrize("kind", registry.KERNELS)
def test_whatever_changes_the_memory_runs_under_the_lock(kind, ps, summed, shared, monkeypatch):
    context = training(kind(0.1, weight_decay=0.1), VALUES)
    taken = registry.terms_of(context.step.optimizer) if summed else None
    monkeypatch.setattr(
        context.transport,
        "whole_gradients",
        lambda given, _: [[SummedTerms(each, each, taken) if taken else each] for each in given],
    )
    updates = shared(context, ps)
    found = graph_of_update(context, updates, drawn(1)[0])
    acquired = [each for each in found if called(each) == "acquire"]
    released = [each for each in found if called(each) == "release"]
    assert len(acquired) == len(released) == ps
    changes = [each for each in found if called(each) == "write" or each.type.startswith(CHANGES)]
    reads = [each for each in found if each.type == "ReadVariableOp" and each.inputs[0].op.type == "VarHandleOp"]
    assert len({each.inputs[0].ref() for each in changes if not called(each)}) >= len(VALUES)
    before_releases = [ancestors(each) for each in released]
    for change in [*changes, *reads]:
        held = [acquire for acquire in acquired if acquire in ancestors(change)]
        assert held, change
        assert change in before_releases[acquired.index(held[-1])], change
    if ps > 1:
        assert released[0] in ancestors(acquired[1])


@pytest.mark.parametrize("summed", [False, True], ids=["gradients", "terms"])
@pytest.mark.parametrize("kind", registry.KERNELS)
def test_what_is_read_is_used_before_it_changes(kind, summed, shared, monkeypatch):
    """What has been read of a variable is the memory itself, see `variable_at`."""
    context = training(kind(0.1, weight_decay=0.1), VALUES[:1])
    taken = registry.terms_of(context.step.optimizer) if summed else None
    monkeypatch.setattr(
        context.transport,
        "whole_gradients",
        lambda given, _: [[SummedTerms(each, each, taken) if taken else each] for each in given],
    )
    updates = shared(context)
    order = []
    monkeypatch.setattr(shared_memory, "variable_at", recording(order))
    found = graph_of_update(context, updates, drawn(1, VALUES[:1])[0])
    indices = {handle: index for index, handle in enumerate(order)}
    for change in found:
        if called(change) == "write":
            changed = [int(tf.get_static_value(change.inputs[1]))]
        elif change.type.startswith(CHANGES):
            changed = [indices[each.op] for each in change.inputs if each.dtype == tf.resource]
        else:
            continue
        earlier = ancestors(change)
        for read in found:
            if read.type == "ReadVariableOp" and indices.get(read.inputs[0].op) in changed and read in earlier:
                users = set(read.outputs[0].consumers())
                assert users <= earlier, (change.name, users - earlier)


def recording(order):
    """Notes the handles of variables, in the order of the places."""
    make = variables.variable_at

    def variable_at(*given):
        made = make(*given)
        order.append(made.handle.op)
        return made

    return variable_at
