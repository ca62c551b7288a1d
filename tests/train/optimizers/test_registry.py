"""A rule's updates are Keras's, step by step: of whole variables, of shards, of rows."""

import functools
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.optimizers import registry

pytestmark = pytest.mark.slow

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
SCATTERED = ("ResourceScatterUpdate",)
KERNELS = {  # of a whole variable, of rows
    "sgd": (("ResourceApplyGradientDescent",), SCATTERED),
    "momentum": (("ResourceApplyKerasMomentum",), ("ResourceSparseApplyKerasMomentum",)),
    "adam": (("ResourceApplyAdam",), SCATTERED),
    "amsgrad": (("ResourceApplyAdamWithAmsgrad",), SCATTERED),
    "adamw": (("ResourceApplyAdam",), SCATTERED),
    "adagrad": (("ResourceApplyAdagradV2",), SCATTERED),
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
        self.rule = registry.rule_of(optimizer)
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


@pytest.mark.parametrize("kind", ["sgd", "nesterov", "adam, other numbers", "adagrad", "ftrl", "lion"])
def test_a_schedule_gives_each_update_its_rate(kind):
    def schedule():
        return optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)

    plain = after_steps(kind, "by_keras", "float32", schedule)
    assert_equal(after_steps(kind, "dense", "float32", schedule), plain, TOLERANCES["float32"])
    assert_equal(after_steps(kind, "all_rows", "float32", schedule), plain, TOLERANCES["float32"])


@pytest.mark.parametrize("shape", [(), (5,), (3, 2, 2)])
def test_a_variable_may_have_any_shape(shape):
    for kind in ("sgd", "momentum", "adam, other numbers", "adagrad", "rmsprop", "ftrl"):
        plain, dense, some = (Trained(made(kind), shape=shape) for _ in range(3))
        gradient = tf.constant(normal(1, shape), tf.float32)
        plain.by_keras(gradient)
        dense.dense(gradient)
        assert_equal(dense.values(), plain.values(), TOLERANCES["float32"])
        if shape:
            some.sparse(gradient, tf.range(shape[0]))
            assert_equal(some.values(), plain.values(), TOLERANCES["float32"])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_gradient_stay_as_they_are_with_their_slots(kind, dtype):
    plain, ours = Trained(made(kind)), Trained(made(kind))
    for trained in (plain, ours):
        trained.by_keras(tf.constant(normal(1, SHAPE), tf.float32))
    before, rows = ours.values(), [4, 0]
    gradient = normal(2, SHAPE)
    gradient[[1, 2, 3, 5]] = 0
    plain.by_keras(tf.constant(gradient, tf.float32))
    ours.sparse(tf.constant(gradient[rows], tf.float32), tf.constant(rows, dtype))
    others = [row for row in range(SHAPE[0]) if row not in rows]
    for after, then, expected in zip(ours.values(), before, plain.values(), strict=True):
        np.testing.assert_array_equal(after[others], then[others])
        np.testing.assert_allclose(after[rows], expected[rows], rtol=1e-5, atol=1e-6)
    if kind == "sgd" or kind.startswith("adagrad"):  # the rules without memory: not lazy, but the same
        assert_equal(ours.values(), plain.values(), TOLERANCES["float32"])


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_and_rows_that_are_not_there(kind):
    ours = Trained(made(kind))
    before = ours.values()
    ours.sparse(tf.zeros([0, SHAPE[1]]), tf.zeros([0], tf.int64))
    for after, then in zip(ours.values(), before, strict=True):
        np.testing.assert_array_equal(after, then)
    for row in (SHAPE[0], -1):
        with pytest.raises(tf.errors.InvalidArgumentError):
            ours.sparse(tf.ones([1, SHAPE[1]]), tf.constant([row]))


def peak_of_memory():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def grown_by(action):
    """How far memory in use rises above what it was, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is in use now
    before = peak_of_memory()
    action()
    return peak_of_memory() - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is Linux's to tell")
@pytest.mark.parametrize(
    "kind", ["sgd", "momentum", "adagrad", "rmsprop", "rmsprop, momentum", "adadelta", "ftrl", "amsgrad"]
)
def test_nothing_copies_a_table_of_which_rows_are_updated(kind):
    table = (100_000, 100)
    size = 4 * table[0] * table[1]
    trained, rows = Trained(made(kind), shape=(1, 1)), tf.constant([7, 99_999])
    variable, *slots = (tf.Variable(tf.fill(table, 0.5)) for _ in range(1 + len(trained.slots)))
    trained.optimizer.weight_decay = 0.1

    @tf.function(autograph=False)
    def update():
        read = tf.gather(variable, rows)
        rate, number = tf.constant(0.1), tf.constant(3, tf.int64)
        trained.rule.sparse(trained.optimizer, variable, slots, read, rows, rate, number, decaying=True)

    update()
    copies = []
    while grown_by(lambda: copies.append(variable.read_value())) < size / 2:
        assert len(copies) < 100  # once memory that was freed before is used up, a copy shows
    assert grown_by(lambda: [update() for _ in range(3)]) < size / 4


@pytest.mark.parametrize("kind", KINDS)
def test_every_operation_runs_where_the_variable_is(kind):
    trained, device = Trained(made(kind)), "/job:ps/replica:0/task:1/device:CPU:0"
    trained.optimizer.weight_decay = 0.1
    with tf.Graph().as_default() as graph, tf.device("/job:worker/replica:0/task:0/device:CPU:0"):
        with tf.device(device):
            variable, *slots = (tf.Variable(tf.zeros(SHAPE)) for _ in range(1 + len(trained.slots)))
        gradient, rows, rate, number = tf.ones(SHAPE), tf.range(SHAPE[0]), tf.constant(0.1), tf.constant(0, tf.int64)
        sent = set(graph.get_operations())
        for update in (
            lambda: trained.rule.dense(trained.optimizer, variable, slots, gradient, rate, number),
            lambda: trained.rule.sparse(trained.optimizer, variable, slots, gradient, rows, rate, number),
            lambda: registry.in_turn(device, [], []),
            lambda: registry.decay(trained.optimizer, variable, rate),
            lambda: registry.decay_rows(trained.optimizer, variable, rows, rate),
        ):
            update()
        made_here = set(graph.get_operations()) - sent
        placed_by_handle = ("NoOp", "ReadVariableOp")  # TensorFlow reads a variable where it is, whatever the scope
        assert {operation.device for operation in made_here if operation.type not in placed_by_handle} == {device}


def in_threads(action, workers):
    threads = [threading.Thread(target=action, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def constant_update(trained, rows=False):
    """A compiled update by a gradient of ones, the same each time: their order does not matter."""
    slots, rate, number = [slot.value for slot in trained.slots], tf.constant(0.01), tf.constant(3, tf.int64)
    optimizer, variable, rule = trained.optimizer, trained.variable.value, trained.rule

    def dense():
        rule.dense(optimizer, variable, slots, tf.ones(variable.shape), rate, number)

    def sparse(places):
        gradient, decaying = tf.ones([tf.size(places), variable.shape[1]]), optimizer.weight_decay is not None
        args = optimizer, variable, slots, gradient, places, rate, number
        registry.in_turn(variable.device, [gradient], [lambda: rule.sparse(*args, decaying=decaying)])

    return tf.function(sparse if rows else dense, autograph=False)


KERNEL_OF_ALL = [kind for kind, (whole, _) in KERNELS.items() if kind == "sgd" or whole != KERNELS["sgd"][0]]


@pytest.mark.parametrize("kind", KERNEL_OF_ALL)
def test_no_update_of_a_whole_variable_is_lost_among_several_workers(kind):
    workers, times, shape = 3, 5, (300, 300)
    alone, together = Trained(made(kind), shape=shape), Trained(made(kind), shape=shape)
    update = constant_update(alone)
    for _ in range(workers * times):
        update()
    shared = constant_update(together)
    in_threads(lambda _: [shared() for _ in range(times)], workers)
    assert_equal(together.values(), alone.values(), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_update_of_rows_is_lost_among_several_workers(kind):
    workers, times, shape = 3, 5, (2000, 20)
    alone, together = Trained(made(kind), shape=shape), Trained(made(kind), shape=shape)
    rows = tf.range(0, shape[0], 2)
    update, shared = constant_update(alone, rows=True), constant_update(together, rows=True)
    for _ in range(workers * times):
        update(rows)
    shared(rows[:0])  # compiled before there are several
    in_threads(lambda _: [shared(rows) for _ in range(times)], workers)
    assert_equal(together.values(), alone.values(), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_update_other_rows_do_not_disturb_each_other(kind):
    workers, times, shape = 3, 5, (300, 20)
    alone, together = Trained(made(kind), shape=shape), Trained(made(kind), shape=shape)
    rows = [tf.range(worker, shape[0], workers) for worker in range(workers)]
    update, shared = constant_update(alone, rows=True), constant_update(together, rows=True)
    for worker in range(workers):
        for _ in range(times):
            update(rows[worker])
    in_threads(lambda worker: [shared(rows[worker]) for _ in range(times)], workers)
    assert_equal(together.values(), alone.values(), 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weight_decay_is_kerass_and_of_rows_only_where_there_are_rows(dtype):
    plain, whole, some = (Trained(optimizers.AdamW(0.1, weight_decay=0.02), dtype) for _ in range(3))
    rate = tf.constant(0.1)
    plain.optimizer._apply_weight_decay([plain.variable])
    registry.decay(whole.optimizer, whole.variable.value, rate)
    registry.decay_rows(some.optimizer, some.variable.value, tf.constant([4, 1]), rate)
    np.testing.assert_allclose(whole.variable.numpy(), plain.variable.numpy(), rtol=1e-7)
    np.testing.assert_allclose(some.variable.numpy()[[4, 1]], plain.variable.numpy()[[4, 1]], rtol=1e-7)
    others = [0, 2, 3, 5]
    np.testing.assert_array_equal(some.variable.numpy()[others], normal(0, SHAPE).astype(dtype)[others])


def test_some_variables_do_not_decay():
    variables = [keras.Variable([1.0], name=name) for name in ("kernel", "bias")]
    optimizer = optimizers.AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.build(variables)
    assert [registry.decays(optimizer, variable) for variable in variables] == [True, False]
    assert not registry.decays(optimizers.Adam(0.1), variables[0])


def cut(variable, at=(1, 4)):
    """Stores a Keras variable in three shards, as a variable partitioner does."""
    shards = [
        tf.Variable(part, name=f"{variable.name}/part_{i}") for i, part in enumerate(np.split(variable.numpy(), at))
    ]
    variable._value = tf.__internal__.distribute.ShardedVariable(shards)


@pytest.mark.parametrize("kind", ["sgd", "adam, other numbers", "adagrad", "rmsprop"])
def test_fused_updates_the_shards_of_a_sharded_variable(kind):
    plain, gradient = Trained(made(kind)), tf.constant(normal(1, SHAPE), tf.float32)
    sharded = keras.Variable(normal(0, SHAPE))
    cut(sharded)
    optimizer = made(kind)
    optimizer.build([sharded])
    slots = registry.rule_of(optimizer).slots(optimizer, sharded)
    for slot in slots:
        cut(slot)
    for _ in range(2):
        plain.by_keras(gradient)
        with registry.fused(optimizer):
            optimizer.apply([gradient], [sharded])
    assert_equal([np.float64(each.numpy()) for each in (sharded, *slots)], plain.values(), TOLERANCES["float32"])


def test_fused_ends_when_the_last_replica_leaves_it():
    optimizer = Trained(made("momentum")).optimizer
    first, second = registry.fused(optimizer), registry.fused(optimizer)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert "update_step" in vars(optimizer)
    second.__exit__(None, None, None)
    assert "update_step" not in vars(optimizer)


def test_fused_leaves_sparse_gradients_to_keras():
    plain, ours = Trained(made("momentum")), Trained(made("momentum"))
    slices = tf.IndexedSlices(tf.ones([3, SHAPE[1]]), tf.constant([0, 2, 0]), tf.constant(SHAPE))
    plain.by_keras(slices)
    with registry.fused(ours.optimizer):
        ours.by_keras(slices)
    assert_equal(ours.values(), plain.values(), 0)


class Hasty(optimizers.Adam):
    """A user's own."""


def test_optimizers_that_only_keras_can_run_are_told_why():
    half = optimizers.SGD(0.1)
    half.build([keras.Variable([1.0], dtype="bfloat16"), keras.Variable([1.0])])
    reasons = {
        optimizers.Nadam(0.1): "TensorFlow has no kernels for Nadam",
        Hasty(0.1): "Hasty is a class of its own, whose update may be another than Adam's",
        half: "parameters are of type bfloat16, not float32 or float64",
    }
    for optimizer, reason in reasons.items():
        assert registry.rule_of(optimizer) is None
        assert registry.why_not(optimizer) == reason
    assert registry.why_not(optimizers.Adam(0.1)) == ""


def test_slots_are_found_by_keras_variable_and_by_tensorflows():
    trained = Trained(made("adam"))
    by_keras = trained.rule.slots(trained.optimizer, trained.variable)
    by_tensorflow = trained.rule.slots(trained.optimizer, trained.variable.value)
    assert [id(slot) for slot in by_keras] == [id(slot) for slot in by_tensorflow]
    assert ["momentum" in by_keras[0].name, "velocity" in by_keras[1].name] == [True, True]
