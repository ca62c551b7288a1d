"""Seed counters: no two steps draw with the same count."""

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.model.rng.counters import SeedCounters, numbers_after
from tfdist_cli.train.model.rng.unseeded import UnseededDraws


class Step:
    """A model whose layer draws three times in each step."""

    def __init__(self):
        self.model, self.layer = None, keras.layers.Dropout(0.5)
        self.unseeded = UnseededDraws()
        self.state = [self.layer.seed_generator.state]

    def plan_updates(self, _spec):
        pass

    def increments(self, _spec, indices, *, training=True):
        return [np.array([0, 3 * training]) for _ in indices]


def counts(counters, replicas, steps):
    """The counts that each replica of some steps starts with."""
    state, first = [tf.constant([0, 0], tf.uint32)], tf.constant(counters.numbers(0), tf.int64)
    found = [counters.state_for_step(state, numbers_after(first, s), r) for s in steps for r in range(replicas)]
    return [int(each[0][1]) for each in found]


def test_counts_go_on_where_they_were_when_the_number_of_replicas_changes(monkeypatch):
    step = Step()
    monkeypatch.setattr("tfdist_cli.train.model.rng.counters.layers_of", lambda _: [step.layer])
    counters = SeedCounters(step, None, replicas=1)
    drawn = counts(counters, 1, range(4))
    counters.resize(4, 3)
    drawn += counts(counters, 3, range(4, 7))
    counters.resize(7, 2)
    drawn += counts(counters, 2, range(7, 9))
    assert drawn == list(range(0, 3 * (4 + 9 + 4), 3))
    counters.write(9)
    assert int(step.state[0].value[1]) == 3 * (4 + 9 + 4)


def test_the_same_function_draws_what_follows_wherever_the_counters_start(monkeypatch):
    step = Step()
    monkeypatch.setattr("tfdist_cli.train.model.rng.counters.layers_of", lambda _: [step.layer])
    counters = SeedCounters(step, None, replicas=2)

    @tf.function
    def drawn(numbers, replica):
        return counters.state_for_step([tf.constant([0, 0], tf.uint32)], numbers, replica)[0][1]

    found = []
    for first in (0, 40, 7):
        counters.start_at(first)
        numbers = [tf.constant(counters.numbers(first + number), tf.int64) for number in range(3)]
        found += [int(drawn(own, tf.constant(replica))) for own in numbers for replica in range(2)]
        counters.write(first + 3)
    assert found == list(range(0, 3 * 18, 3))
    assert drawn.experimental_get_tracing_count() == 1
