"""Each ps counts the updates of its own parameters, from the optimizer's count on."""

from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from tests.support.compare import classifier
from tfdist_cli.spec.sections.updates import LearningRate
from tfdist_cli.train.optimizers import update_numbers
from tfdist_cli.train.optimizers.learning_rate import RateScaling
from tfdist_cli.train.optimizers.update_numbers import SentNumbers, UpdateCounts
from tfdist_cli.train.variables.placement import created_beside

ELSEWHERE = "/job:ps/replica:0/task:1/device:CPU:0"


@pytest.fixture
def counts_of(monkeypatch):
    """Counts of an optimizer and of one further ps, which is this process."""

    def create(variable, initial, dtype):
        assert variable.device == ELSEWHERE
        return tf.Variable(initial, dtype=dtype)

    def make(optimizer):
        optimizer.build([keras.Variable([0.0])])
        stored = [optimizer.iterations.value, SimpleNamespace(device=ELSEWHERE), SimpleNamespace(device=ELSEWHERE)]
        return UpdateCounts(optimizer, stored)

    monkeypatch.setattr(update_numbers, "created_beside", create)
    return make


def taken(counts, scaling=None):
    """The learning rate and the count of an update on the further ps."""
    numbers = counts.numbers(tf.constant(0.5), tf.constant(100, tf.int64), scaling, lambda _: [])
    rate, count = numbers.on(ELSEWHERE)
    assert numbers.on(ELSEWHERE) == (rate, count)  # an update is counted once
    return float(rate), int(count)


def test_each_update_is_counted_from_the_optimizers_count_on(counts_of):
    optimizer = keras.optimizers.SGD(0.25)
    counts = counts_of(optimizer)
    optimizer.iterations.assign(7)
    counts.begin()
    assert [taken(counts) for _ in range(3)] == [(0.25, 7), (0.25, 8), (0.25, 9)]
    optimizer.iterations.assign(2)
    counts.begin()
    assert taken(counts) == (0.25, 2)


def test_a_schedule_and_a_warm_up_follow_the_count(counts_of):
    schedule = keras.optimizers.schedules.PolynomialDecay(1.0, 10, 0.0)
    counts = counts_of(keras.optimizers.SGD(schedule))
    assert [taken(counts)[0] for _ in range(3)] == pytest.approx([1.0, 0.9, 0.8])
    counts.begin()
    scaling = RateScaling(LearningRate(warmup_steps=4), 1)
    assert [taken(counts, scaling)[0] for _ in range(3)] == pytest.approx([0.25, 0.45, 0.6])


def test_the_ps_of_the_optimizer_has_its_numbers_already(counts_of):
    counts = counts_of(keras.optimizers.SGD(0.25))
    rate, count = tf.constant(0.5), tf.constant(100, tf.int64)
    assert counts.numbers(rate, count, None, lambda _: []).on(count.device) == (rate, count)


def test_numbers_are_sent_without_a_change():
    rate, count = tf.constant(0.1), tf.constant(2**53 - 1, tf.int64)
    sent_rate, sent_count = SentNumbers(rate, count).on("CPU:0")
    assert (sent_rate.dtype, float(sent_rate), int(sent_count)) == (tf.float32, float(rate), 2**53 - 1)


def test_a_variable_is_created_on_the_ps_of_another_one(servers):
    strategy = servers(3)
    with strategy.scope():
        model = classifier()
        before = list(strategy.placement.bytes)
        created = created_beside(model.trainable_variables[0].value, 5, tf.int64)
    assert (created.dtype, int(created), created.device) == (tf.int64, 5, model.trainable_variables[0].value.device)
    assert strategy.placement.bytes == before  # the strategy has not placed it on the next ps
