"""Local steps on a worker's copy have the same result as the same steps on the ps."""

import itertools
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tests.support.compare import difference
from tests.support.optimizers import OPTIMIZERS
from tests.train.optimizers.test_apply import variable
from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import LearningRate, ShardRule
from tfdist_cli.train.engine.parameter_server.asynchronous.local_steps import LocalSteps
from tfdist_cli.train.engine.parameter_server.transport import Transport
from tfdist_cli.train.model.embeddings import LookedUpRows, Lookup
from tfdist_cli.train.optimizers.apply import apply, why_not_fused
from tfdist_cli.train.optimizers.learning_rate import RateScaling
from tfdist_cli.train.optimizers.registry import fused_update_of
from tfdist_cli.train.variables.sharding import parts

ROWS, TABLE = 7, 1
VALUES = [
    np.linspace(-1, 1, 21, dtype=np.float32).reshape(7, 3),
    np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2) / 9,
    np.float32([0.5, -0.25]),
    np.float32([3.0]),
]
"""A kernel, a table, a bias, and one that the loss does not depend on."""
ROUNDS = [[[0, 2, 6], [2, 0, 2]], [[3], [6, 3, 0]], [[5], [5]]]
"""For each round and step the rows that a batch looks up, some of them more than once; with 3 shards the rows 3 and 5
are the first of a shard."""
RATE = RateScaling(LearningRate(scale="linear", warmup_steps=4), 2)


def looked_up(numbers):
    return Lookup([LookedUpRows.on_worker(each) for each in numbers], [])


def with_rules():
    """Yields the optimizers that have kernels."""
    for name, make in OPTIMIZERS.items():
        variables, optimizer = [variable(value, "any") for value in VALUES], make()
        optimizer.build(variables)
        if fused_update_of(optimizer) is not None and why_not_fused(optimizer, variables) is None:
            yield name


WITH_RULES = list(with_rules())


def model(make):
    variables = [variable(value, f"v{number}") for number, value in enumerate(VALUES)]
    optimizer = make()
    optimizer.build(variables)
    return variables, optimizer


def gradients(rounds=ROUNDS):
    """For each round and step the gradients of kernel, looked-up rows and bias, and the rows."""
    random = np.random.default_rng(5)

    def some(*shape):
        return tf.constant(random.normal(size=shape).astype(np.float32))

    return [[(some(7, 3), some(len(rows), 2), some(2), rows) for rows in steps] for steps in rounds]


def by_parts(gradient, of):
    return tf.split(gradient, [part.shape[0] for part in parts(of)])


def by_shard(rows, table):
    """The numbers of some rows in each shard, counted from the shard's first row."""
    bounds = np.cumsum([0, *(part.shape[0] for part in parts(table))])
    found = [[row - begin for row in rows if begin <= row < end] for begin, end in itertools.pairwise(bounds)]
    return [tf.constant(own, tf.int32) for own in found]


def on_the_ps(make, rounds, rate=RATE):
    """Each step is an update on the ps."""
    variables, optimizer = model(make)
    for kernel, values, bias, rows in (step for steps in rounds for step in steps):
        found, where = tf.unique(tf.constant(rows))
        summed = tf.math.unsorted_segment_sum(values, where, tf.size(found))
        own, begin = [], 0
        for shard in parts(variables[TABLE]):
            end = begin + shard.shape[0]
            mine = tf.where((found >= begin) & (found < end))[:, 0]
            own.append(tf.IndexedSlices(tf.gather(summed, mine), tf.gather(found, mine) - begin, shard.shape))
            begin = end
        given = [by_parts(kernel, variables[0]), own, [bias], None]
        tf.function(partial(apply, optimizer, given, variables, rate), autograph=False)()
    return variables, optimizer


def on_copies(make, *groups, wire="float32", rate=RATE):
    """Each round is taken on a copy; the rounds of a group read the parameters before the first one is merged."""
    variables, optimizer = model(make)
    transport = Transport(variables, [TABLE], wire)
    local = LocalSteps(optimizer, variables, [TABLE], transport, rate)

    def several(rounds, updates):
        begun = []
        for steps in rounds:
            wanted = [row for *_, own in steps for row in own]
            rows = sorted(set(wanted))  # ordered by shards
            where = tf.constant([rows.index(row) for row in wanted])
            lookup = looked_up(by_shard(rows, variables[TABLE]))
            places = tf.split(where, [len(own) for *_, own in steps])
            begun.append((local.copy(lookup, transport.pull(lookup)), steps, places))
        for copy, steps, places in begun:
            given = [
                [kernel, tf.IndexedSlices(values, place, [tf.size(place), 2]), bias, None]
                for (kernel, values, bias, _), place in zip(steps, places, strict=True)
            ]
            local.update(copy, iter(given), tf.constant(updates, tf.int64))
            updates += len(steps)
        for copy, *_ in begun:
            arrived, add = local.send(copy)
            with tf.control_dependencies(arrived):
                add()

    done = 0
    for rounds in groups:
        tf.function(partial(several, rounds, done), autograph=False)()
        done += sum(len(steps) for steps in rounds)
    return variables, optimizer


def one_by_one(rounds):
    return [[steps] for steps in rounds]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("adam", 3), ("ftrl", 1)])
def test_one_workers_rounds_equal_updates(name, count, servers):
    """Two of the optimizers in `test_every_rule`."""
    check(name, count, servers)


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", WITH_RULES)
def test_every_rule(name, servers):
    check(name, 3, servers)


def check(name, count, servers):
    with servers(count, shard=ShardRule(min_bytes=50)).scope():
        wanted = on_the_ps(OPTIMIZERS[name], gradients())
        found = on_copies(OPTIMIZERS[name], *one_by_one(gradients()))
    assert [len(parts(each)) for each in found[0]] == [count, count, 1, 1]
    assert difference(found[0], model(OPTIMIZERS[name])[0]) > 1e-3
    assert difference(found[0], wanted[0]) < 3e-6
    assert difference(found[1].variables[2:], wanted[1].variables[2:]) < 3e-6, "slots"


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad", "lion", "clipnorm"])
def test_slots_are_merged_as_if_all_gradients_had_arrived_one_after_the_other(name, servers):
    """Slots that depend only on the gradients, not on the parameters of the copies."""
    with servers(3, shard=ShardRule(min_bytes=50)).scope():
        wanted = on_the_ps(OPTIMIZERS[name], gradients(), rate=None)
        found = on_copies(OPTIMIZERS[name], gradients(), rate=None)
    assert difference(found[1].variables[2:], wanted[1].variables[2:]) < 1e-6


@pytest.mark.slow
def test_sgds_copies_add_up(servers):
    with servers(3, shard=ShardRule(min_bytes=50)).scope():
        wanted = on_the_ps(OPTIMIZERS["sgd"], gradients())
        found = on_copies(OPTIMIZERS["sgd"], gradients())
    assert difference(found[0], wanted[0]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amsgrad", "adamax"])
def test_maxima_are_merged_as_the_larger_one(name, servers):
    with servers(1).scope():
        _, one = on_copies(OPTIMIZERS[name], gradients()[:1])
        _, other = on_copies(OPTIMIZERS[name], gradients()[2:])
        _, both = on_copies(OPTIMIZERS[name], gradients()[::2])
    slot = fused_update_of(both).slots[-1]
    for found, *own in zip(*(getattr(each, slot.attribute) for each in (both, one, other)), strict=True):
        first, second = (each.numpy() for each in own)
        # Each round looks up other rows of the table.
        decay = slot.decay_rate**2 if found.shape != VALUES[TABLE].shape else 1
        np.testing.assert_allclose(found.numpy(), np.maximum(first * decay, second), rtol=1e-6)


@pytest.mark.slow
def test_a_mean_of_squares_is_never_negative(servers):
    """After many steps the decayed value is smaller than the rounding errors."""
    still = [[(tf.zeros([7, 3]), tf.zeros([1, 2]), tf.zeros([2]), [0])] * 10] * 4
    with servers(1).scope():
        make = partial(keras.optimizers.RMSprop, 0.01, rho=0.35)
        _, optimizer = on_copies(make, gradients()[:1], still)
    assert min(slot.numpy().min() for slot in optimizer._velocities) >= 0


@pytest.mark.slow
def test_a_narrow_wire_rounds_parameters_and_changes(servers):
    with servers(1).scope():
        exact = on_copies(OPTIMIZERS["adam"], *one_by_one(gradients()))
        found = on_copies(OPTIMIZERS["adam"], *one_by_one(gradients()), wire="bfloat16")
    assert 0 < difference(found[0], exact[0]) < 2.0**-8
    assert difference(found[1].variables[2:], exact[1].variables[2:]) < 1e-6, "slots are not rounded"


def test_sizes_are_those_of_parameters_and_slots(servers):
    with servers(1).scope():
        variables, optimizer = model(OPTIMIZERS["adam"])
        transport = Transport(variables, [TABLE], "float16")
        lookup = looked_up([tf.constant([1, 4, 5])])
        sizes = LocalSteps(optimizer, variables, [TABLE], transport, None).sizes(lookup)
    values = 21 + 3 * 2 + 2 + 1
    assert {name: int(size) for name, size in sizes.items()} == {
        "pulled": values * (2 + 2 * 4),
        "pushed": values * (2 + 2 * 4) + 3 * 4 * 3 + 2 * 4,
    }


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("nadam", "optimizer-without-kernels", "Nadam"),
        ("average", "optimizer-without-kernels", "use_ema"),
        ("dynamic loss scale", "loss-scaling-unsupported", "mixed_float16"),
    ],
)
def test_optimizers_whose_updates_cannot_be_merged_are_refused(name, code, reason):
    variables, optimizer = model(OPTIMIZERS[name])
    with raises(TrainingError, code) as error:
        LocalSteps(optimizer, variables, [TABLE], Transport(variables, [TABLE]), None)
    assert reason in error.value.message
