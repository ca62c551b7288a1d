"""One process reads and updates the rows of its batch, and trains as Keras's `fit`, which passes over whole tables."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import assert_same, train_both
from tests.support.optimizers import OPTIMIZERS
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.table_rows import TableRows, rows_are_cheaper
from tfdist_cli.train.model import jit
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.optimizers.registry import FusedUpdate

ROWS, OTHERS, BATCH = 40, 30, 8
IDS = np.random.default_rng(0).integers(0, 6, (44, 3)).astype(np.int32)
"""Most rows occur several times in a batch, and most tables have rows that never occur."""
TARGETS = np.random.default_rng(1).normal(size=(44, 2)).astype(np.float32)
SPEC = (tf.TensorSpec([BATCH, 3], tf.int32), tf.TensorSpec([BATCH, 2]))
BY_ROWS = {"sgd", "adagrad", "cosine with warm-up", "rate by a function"}
ALL = tfdist.EmbeddingRule(min_bytes=0)


def looked_up(optimizer="adagrad", **table):
    """A table that is looked up twice, and another one."""
    ids = keras.Input((3,), dtype="int32")
    shared = keras.layers.Embedding(ROWS, 4, name="shared", **table)
    other = keras.layers.Embedding(OTHERS, 4, name="other")(ids[:, 2:] - 6)  # negative ids: from the end
    looked = [keras.layers.Flatten()(each) for each in (shared(ids), shared(ids[:, :1]), other)]
    model = keras.Model(ids, keras.layers.Dense(2)(keras.layers.Concatenate()(looked)))
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def data_of(ids):
    return tf.data.Dataset.from_tensor_slices((ids, TARGETS)).batch(BATCH)


def data():
    return data_of(IDS)


@pytest.fixture
def updates(monkeypatch):
    """The shapes of the tables whose rows are updated, as functions are traced."""
    traced = []
    sparse = FusedUpdate.sparse_each

    def recorded(update, variable, *args):
        traced.append(variable.shape.as_list())
        return sparse(update, variable, *args)

    monkeypatch.setattr(FusedUpdate, "sparse_each", recorded)
    return traced


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "loss scale"])  # Keras cannot scale rows
def test_rows_train_as_kerass_whole_tables(name, updates):
    plain, ours = train_both(lambda: looked_up(OPTIMIZERS[name]()), data(), validation=data(), embeddings=ALL)
    assert_same(plain, ours, tolerance=3e-6)
    assert {tuple(shape) for shape in updates} == ({(ROWS, 4), (OTHERS, 4)} if name in BY_ROWS else set())


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_row_that_occurs_several_times_is_updated_by_each_of_its_gradients(policy, updates):
    keras.config.set_dtype_policy(policy)
    plain, ours = train_both(
        lambda: looked_up(keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.0)), data(), embeddings=ALL
    )
    assert updates
    assert_same(plain, ours, 1e-6 if policy == "float32" else 2e-3)


def rows_of(model, **rules):
    step = ModelStep(model)
    step.build(SPEC)
    return TableRows(step, SPEC, Rules(**({"embeddings": ALL} | rules)))


def names(rows):
    return [variable.path.partition("/")[0] for variable in rows.variables]


class TestWhichTables:
    """Which tables are read row by row."""

    @pytest.fixture(scope="class")
    @staticmethod
    def model():
        return looked_up()

    def test_tables_of_which_only_lookups_read_rows(self, model):
        assert names(rows_of(model)) == ["shared", "other"]

    def test_not_small_ones(self, model):
        assert names(rows_of(model, embeddings=tfdist.EmbeddingRule(min_bytes=4 * 4 * ROWS))) == ["shared"]

    def test_none_if_that_is_switched_off(self, model):
        assert not rows_of(model, embeddings=None)
        assert not rows_of(model, optimized=False)

    def test_none_if_xla_is_asked_for(self, model):
        assert not rows_of(model, jit=True)
        assert rows_of(model, jit="auto")

    def test_none_on_a_gpu(self, model, monkeypatch):
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["GPU:0"] if kind == "GPU" else [])
        assert not rows_of(model)

    def test_not_those_that_are_regularized(self):
        assert names(rows_of(looked_up(embeddings_regularizer="l2"))) == ["other"]

    def test_not_those_of_which_a_batch_looks_up_more_rows_than_there_are(self, monkeypatch):
        monkeypatch.setattr("tests.train.engine.test_table_rows.ROWS", 4 * BATCH - 1)
        assert names(rows_of(looked_up())) == ["other"]


@pytest.mark.slow
def test_neither_training_nor_evaluation_reads_a_whole_table():
    rows = rows_of(looked_up())

    def shapes(read):
        found = read.get_concrete_function().graph.get_operations()
        return {tuple(op.outputs[0].shape.as_list()) for op in found if op.type == "ReadVariableOp"}

    dense = {(20, 2), (2,)}
    batch = (tf.constant(IDS[:BATCH]), tf.constant(TARGETS[:BATCH]))
    assert shapes(tf.function(lambda: rows.read([batch])[0].values, autograph=False)) == dense
    assert shapes(tf.function(lambda: rows.evaluation_reader()(batch)[0], autograph=False)) == dense


@pytest.mark.slow
def test_xla_is_not_measured_for_tables_that_are_read_by_rows(monkeypatch, log):
    monkeypatch.setattr(jit, "_timed", None)  # not called
    tfdist.fit(looked_up(), data(), embeddings=ALL, jit="auto")
    assert [line for line in log if line.startswith("jit:")]


@pytest.mark.rotates(5)
@pytest.mark.parametrize(("at", "wrong"), [(0, ROWS), (40, ROWS), (40, -ROWS - 1)])
@pytest.mark.parametrize("where", ["training", "validation"])
def test_an_id_without_a_row_is_an_error(where, at, wrong):
    ids = IDS.copy()
    ids[at, 0] = wrong
    given = {"training": data(), "validation": data()} | {where: data_of(ids)}
    with raises(TrainingError, "id-out-of-range") as caught:
        tfdist.fit(looked_up(), given["training"], validation_data=given["validation"], embeddings=ALL)
    assert {str(wrong), "'shared'", str(ROWS - 1)} <= set(re.split(r"[ ,]+", caught.value.message))


POLICIES = {
    "plain": {"capacity": 800},
    "admitted": {"capacity": 800, "admit_after": 2},
    "lru": {"capacity": 500, "evict": "lru"},
    "lfu, admitted": {"capacity": 500, "evict": "lfu", "admit_after": 3},
}
SEVERAL = np.random.default_rng(3).integers(0, 700, (44, 3))


def trained_dynamically(policy, rule):
    keras.utils.set_random_seed(3)
    initial = keras.initializers.RandomUniform(seed=5)
    table = tfdist.layers.DynamicEmbedding(4, embeddings_initializer=initial, **POLICIES[policy])
    ids = keras.Input((3,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(2)(keras.layers.Flatten()(table(ids))))
    model.compile(keras.optimizers.Adagrad(0.3), "mse")
    given = tf.data.Dataset.from_tensor_slices((np.concatenate([SEVERAL // 10, SEVERAL]), np.tile(TARGETS, (2, 1))))
    losses = tfdist.fit(model, given.batch(BATCH), epochs=3, embeddings=rule, verbose=0).history["loss"]
    found, rows = table.vocabulary()
    order, whole = np.argsort(found), np.asarray(table.embeddings)
    return losses, found[order], whole[rows[order]], whole[0]


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_dynamic_table_is_updated_by_rows_and_as_a_whole_table_is(policy, updates):
    whole = trained_dynamically(policy, None)
    assert not updates
    by_rows = trained_dynamically(policy, ALL)
    assert updates
    for one, other in zip(whole, by_rows, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.slow
def test_a_dynamic_table_that_something_else_reads_is_read_completely():
    ids = keras.Input((3,), dtype="int64")
    table = tfdist.layers.DynamicEmbedding(2, 10)
    vectors = keras.layers.Flatten()(table(ids))
    penalty = keras.layers.Lambda(lambda given: given + tf.reduce_sum(table.embeddings.value))
    model = keras.Model(ids, keras.layers.Dense(2)(penalty(vectors)))
    model.compile("adagrad", "mse")
    tfdist.fit(model, np.ones((8, 3), np.int64), np.ones((8, 2)), batch_size=4, embeddings=ALL, verbose=0)
    assert table.vocabulary()[0].tolist() == [1]


@pytest.mark.parametrize(
    ("lookups", "replicas", "cheaper"), [(50, 2, True), (51, 2, False), (34, 3, False), (None, 9, True)]
)
def test_rows_are_cheaper_if_they_are_few(lookups, replicas, cheaper):
    assert rows_are_cheaper(100, lookups, replicas) is cheaper
