"""A `DynamicEmbedding` trains like an `Embedding` with the same rows, whatever trains it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import batches
from tests.support.local_coordinator import NoPause, local_engine
from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.spec.sections.updates import ShardRule, Updates
from tfdist_cli.tables.hashing import GROUP
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.layers import DynamicEmbedding, row_index

pytestmark = pytest.mark.slow

IDS, WIDTH, BATCH = 1400, 4, 64
random = np.random.default_rng(0)
X, Y = random.integers(0, IDS, (4 * BATCH, 3)), random.normal(size=(4 * BATCH, 1)).astype(np.float32)
SEEN = np.unique(X)
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.3),
    "adagrad": lambda: keras.optimizers.Adagrad(0.3),
    "adam": lambda: keras.optimizers.Adam(0.05),
}


def build(layer, optimizer="adagrad", dtype="int64"):
    ids = keras.Input((3,), dtype=dtype)
    kernel = keras.initializers.GlorotUniform(seed=1)
    model = keras.Model(ids, keras.layers.Dense(1, kernel_initializer=kernel)(keras.layers.Flatten()(layer(ids))))
    model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def initializer():
    return keras.initializers.RandomUniform(seed=3)


def dynamic(**given):
    return DynamicEmbedding(WIDTH, IDS, embeddings_initializer=initializer(), name="table", **given)


def embedding():
    return keras.layers.Embedding(IDS, WIDTH, embeddings_initializer=initializer(), name="table")


def rows_of(model):
    """The rows of all ids that the data has."""
    table = model.get_layer("table")
    whole = table.embeddings.value.numpy()
    if not isinstance(table, DynamicEmbedding):
        return whole[SEEN]
    ids, rows = table.vocabulary()
    assert np.sort(ids).tolist() == SEEN.tolist()
    return whole[rows[np.argsort(ids)]]


def assert_same(model, other):
    np.testing.assert_allclose(rows_of(model), rows_of(other), rtol=1e-5, atol=1e-6)
    for some, others in zip(model.layers[-1].weights, other.layers[-1].weights, strict=True):
        np.testing.assert_allclose(some.numpy(), others.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.rotates(5)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_process_trains_it_like_an_embedding(optimizer):
    models = [build(layer, optimizer) for layer in (dynamic(), embedding())]
    for model in models:
        tfdist.fit(model, batches(X, Y, batch=BATCH), epochs=2)
    assert_same(*models)


@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("updates", "given"),
    [(Updates(), {}), (Updates(mode="sync"), {}), (Updates(), {"evict": "lru"})],
    ids=["async", "sync", "evicting"],
)
def test_parameter_servers_train_it_like_an_embedding(updates, given, servers, monkeypatch):
    monkeypatch.setattr(row_index, "_is_shared", lambda: True)
    models = []
    for layer in (lambda: dynamic(**given), embedding):
        strategy = servers(3, shard=ShardRule(min_bytes=100))
        engine, model = local_engine(
            monkeypatch,
            strategy,
            lambda layer=layer: build(layer()),
            batches(X, Y, batch=BATCH),
            Rules(updates=updates),
        )
        list(engine.run(2, first=0, size=2, adapts=False, pause=NoPause()))
        models.append(model)
    some, others = (model.get_layer("table") for model in models)
    ids, rows = some.vocabulary()
    np.testing.assert_allclose(
        some.embeddings.value.numpy()[rows], others.embeddings.value.numpy()[ids], rtol=1e-5, atol=1e-6
    )
    assert len(some.embeddings.value.variables) == 2  # groups of rows are not divided


def test_a_row_that_another_id_takes_over_starts_with_new_slots():
    model = build(DynamicEmbedding(WIDTH, GROUP, evict="lru", name="table"))
    ids = np.arange(3 * 4000).reshape(-1, 3)
    tfdist.fit(model, batches(ids, np.ones((len(ids), 1), np.float32), batch=8), epochs=1)
    found, rows = model.get_layer("table").vocabulary()
    assert GROUP // 2 < len(found) < GROUP
    (slot,) = [each for each in model.optimizer.variables if each.shape == (GROUP, WIDTH)]
    assert (slot.numpy()[rows] < 0.1 + 1).all()
    assert found.max() == ids.max()


def test_a_subclassed_model_is_built_by_its_first_batch(tmp_path):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.table, self.head = DynamicEmbedding(WIDTH, IDS), keras.layers.Dense(1)

        def call(self, ids, training=None):
            return self.head(tf.reduce_mean(self.table(ids, training=training), axis=1))

    model = Own()
    model.compile("adagrad", "mse")
    tfdist.fit(model, batches(X[:BATCH], Y[:BATCH], batch=BATCH), epochs=1)
    tfdist.export(model, tmp_path / "export", rebuild=Own)
    loaded = tf.saved_model.load(tmp_path / "export")
    np.testing.assert_allclose(loaded.serve(tf.constant(X)), model(X), rtol=1e-6)
    assert len(model.table.vocabulary()[0]) == len(np.unique(X[:BATCH]))


def test_strings_are_ids():
    words = np.array([["a", "b", "c"], ["c", "d", ""]])
    model = build(dynamic(), dtype="string")
    tfdist.fit(model, batches(words, Y[:2], batch=2), epochs=1)
    hashes = tf.strings.to_hash_bucket_fast(["a", "b", "c", "d", ""], 2**63 - 1).numpy()
    assert sorted(model.get_layer("table").vocabulary()[0]) == sorted(hashes)


def test_a_file_of_keras_has_the_index(tmp_path):
    model = build(dynamic(admit_after=2, evict="lfu", ttl=60))
    tfdist.fit(model, batches(X, Y, batch=BATCH), epochs=1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(X), model(X))
    assert loaded.get_layer("table").get_config() == model.get_layer("table").get_config()


def test_a_copy_masks_as_the_layer_does():
    layer = DynamicEmbedding(WIDTH, 100, mask_zero=True, activity_regularizer="l2")
    copy = DynamicEmbedding.from_config(layer.get_config())
    ids = tf.constant([[1, 0]])
    assert copy.compute_mask(ids).numpy().tolist() == layer.compute_mask(ids).numpy().tolist() == [[True, False]]
    assert copy.get_config() == layer.get_config()


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "float64"])
def test_vectors_have_the_type_of_those_of_an_embedding(dtype):
    plain, ours = keras.layers.Embedding(10, WIDTH, dtype=dtype), DynamicEmbedding(WIDTH, 10, dtype=dtype)
    ids = tf.constant([[1, 2]])
    for training in (False, True):
        assert ours(ids, training=training).dtype == plain(ids).dtype
    assert ours.embeddings.dtype == plain.embeddings.dtype


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float64", 8), ("bfloat16", 2), ("mixed_bfloat16", 4)])
def test_the_bytes_of_a_table_are_limited_whatever_its_type(dtype, size):
    layer = DynamicEmbedding(8, max_bytes=10**6, evict="lru", dtype=dtype)
    assert 0.9e6 < layer.input_dim * (8 * size + 20) <= 1e6


def test_the_best_weights_cannot_be_restored_without_the_ids():
    model = build(dynamic())
    stopping = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    with raises(UsageError, "best-weights-of-dynamic-table"):
        tfdist.fit(model, batches(X, Y, batch=BATCH), epochs=1, callbacks=[stopping])


def test_a_saved_model_looks_up_ids_without_tfdist(tmp_path):
    model = build(dynamic())
    tfdist.fit(model, batches(X, Y, batch=BATCH), epochs=1)
    tfdist.export(model, tmp_path / "export", format="saved_model")
    loaded = tf.saved_model.load(tmp_path / "export")
    unknown = np.full((1, 3), 10**15)
    for ids in (X, unknown):
        np.testing.assert_allclose(loaded.serve(tf.constant(ids)), model(ids), rtol=1e-6)


def test_what_does_not_update_rows_is_refused():
    model = build(dynamic())
    model.compile(keras.optimizers.Nadam(), "mse")
    with raises(TrainingError, "dynamic-embedding-needs-row-updates"):
        tfdist.fit(model, batches(X, Y, batch=BATCH), epochs=1)


@pytest.mark.parametrize(
    "given",
    [
        *({}, {"capacity": 1, "max_bytes": 10**6}, {"max_bytes": 10**6}, {"max_bytes": 1, "evict": "lru"}),
        {"capacity": 1, "embeddings_constraint": "non_neg"},
    ],
)
def test_arguments_that_do_not_fit_are_refused(given):
    with raises(UsageError, "invalid-argument"):
        DynamicEmbedding(WIDTH, **given)


def test_an_initializer_that_cannot_draw_single_rows_is_refused():
    with raises(UsageError, "dynamic-embedding-initializer"):
        DynamicEmbedding(WIDTH, 10, embeddings_initializer="glorot_uniform")


def test_a_table_that_evicts_nothing_has_a_row_for_each_id_up_to_its_capacity():
    layer = DynamicEmbedding(1, capacity=50_000)
    layer.build()
    ids = tf.range(4_900_000, 4_950_000, dtype=tf.int64)  # a bucket that gets many of these was full at 0.8 of the rows
    rows, _ = tf.function(layer.index.rows)(ids, create=True)
    assert len(np.unique(rows)) == 50_000
    assert 0 not in rows


def test_a_full_table_ends_the_training_with_what_to_do():
    with tfdist.scope():
        ids = keras.Input((), dtype="int64")
        model = keras.Model(ids, keras.layers.Dense(1)(DynamicEmbedding(2, capacity=100)(ids)))
        model.compile("adagrad", "mse")
    with raises(TrainingError, "dynamic-embedding-full"):
        tfdist.fit(model, np.arange(5000), np.ones((5000, 1)), batch_size=500)
