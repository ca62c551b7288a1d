"""Batches are read, and what they look up is sent, for several rounds at once."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.compare import difference
from tests.support.local_coordinator import NoPause, local_engine
from tfdist_cli.spec.sections.updates import EmbeddingRule, Updates
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.parameter_server.asynchronous.unrolled import UnrolledFunctions
from tfdist_cli.train.engine.parameter_server.batches import BatchReader
from tfdist_cli.train.model.embeddings import EmbeddingTables, Lookup

ROWS, STEPS = 50, 12


class Cluster:
    """Tables and a transport that note what they are asked for; the rows of a round are its batches."""

    def __init__(self, *, are_numbered=True):
        self.are_numbered = are_numbered
        self.looked_up, self.sent = [], []
        self.tables = self.transport = self

    def lookups(self, rounds):
        self.looked_up.append(rounds)
        return [Lookup([*batches], []) for batches in rounds]

    def sent_ahead(self, lookups):
        self.sent.append(len(lookups))
        return [Lookup([], [["sent"]]) for _ in lookups]


def read_all(cluster, rounds, **options):
    reader, numbers = BatchReader(cluster, rounds, **options), iter(range(100))
    return [reader.next_round(lambda: next(numbers)) for _ in rounds]


def test_five_rounds_are_looked_up_and_sent_together():
    cluster = Cluster()
    read = read_all(cluster, [2, 1, 1, 1, 1, 2, 1])
    assert [each.batches for each in read] == [[0, 1], [2], [3], [4], [5], [6, 7], [8]]
    assert cluster.looked_up == [[[0, 1], [2], [3], [4], [5]], [[6, 7], [8]]]
    assert cluster.sent == [5, 2]
    assert all(each.is_sent and each.sent.positions == [["sent"]] for each in read)
    assert [each.lookup.rows for each in read] == [each.batches for each in read]


@pytest.mark.parametrize(("numbered", "ahead"), [(False, True), (True, False)])
def test_rounds_are_looked_up_one_by_one_where_each_depends_on_the_one_before(numbered, ahead):
    cluster = Cluster(are_numbered=numbered)
    read = read_all(cluster, [1, 1, 1], ahead=ahead)
    assert cluster.looked_up == [[[0]], [[1]], [[2]]]
    assert not cluster.sent
    assert all(each.sent is each.lookup and not each.is_sent for each in read)


def test_a_round_alone_is_sent_with_its_pull():
    cluster = Cluster()
    [*_, last] = read_all(cluster, [1] * 6)
    assert cluster.sent == [5]
    assert last.sent is last.lookup


def test_batches_that_are_read_together_wait_for_the_step_before_them():
    with tf.Graph().as_default():
        before = [tf.constant(0.0, name=f"before{number}") for number in range(6)]
        reader = BatchReader(Cluster(), [1] * 6)
        read = [reader.next_round(tf.timestamp, [each]) for each in before]
        waits = [{each.name for each in own.batches[0].op.control_inputs} for own in read]
    assert waits == [{"before0"}] * 5 + [{"before5"}]


def recommender():
    keras.utils.set_random_seed(7)
    user = keras.Input((), dtype="int32")
    model = keras.Model(user, keras.layers.Dense(1)(keras.layers.Embedding(ROWS, 4)(user)))
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "updates", [Updates(), Updates(mode="sync"), Updates(mode="bounded", staleness=1)], ids=["async", "sync", "bounded"]
)
def test_every_rule_looks_several_steps_up_at_once(updates, servers, monkeypatch):
    found, rounds = [], []
    lookups = EmbeddingTables.lookups
    random = np.random.default_rng(0)
    data = random.integers(0, ROWS, [40, 8]).astype(np.int32), random.normal(size=[40, 8, 1]).astype(np.float32)

    def recorded(self, each, **options):
        rounds.append(len(each))
        return lookups(self, each, **options)

    monkeypatch.setattr(EmbeddingTables, "lookups", recorded)
    monkeypatch.setattr(UnrolledFunctions, "is_ready", lambda *_, **__: True)
    for size in (1, 6):
        rounds.clear()
        rules = Rules(updates=updates, embeddings=EmbeddingRule(min_bytes=1))
        engine, model = local_engine(
            monkeypatch, servers(2), recommender, tf.data.Dataset.from_tensor_slices(data), rules, workers=1
        )
        list(engine.run(STEPS, first=0, size=size, adapts=False, pause=NoPause()))
        assert (5 in rounds) == (size == 6)
        found.append(model.variables)
    if updates.mode == "sync":  # in this process, asynchronous executions run side by side
        assert difference(*found) < 1e-6
