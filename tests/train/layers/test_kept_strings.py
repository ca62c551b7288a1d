"""A `DynamicEmbedding` with `string_bytes` has the string of each row, wherever the row goes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.local_coordinator import NoPause, local_engine
from tests.support.words import words
from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.spec.sections.updates import ShardRule, Updates
from tfdist_cli.tables.hashing import GROUP, as_ids
from tfdist_cli.tables.strings import decoded
from tfdist_cli.train.checkpoint.files.state import TrainingState
from tfdist_cli.train.checkpoint.store import CheckpointFolder
from tfdist_cli.train.checkpoint.writer import CheckpointContent, CheckpointWriter
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.layers import DynamicEmbedding, row_index
from tfdist_cli.train.layers.dynamic_tables import row_indices, track_changes
from tfdist_cli.train.model.train_step import ModelStep

pytestmark = pytest.mark.slow

WIDTH, BATCH = 4, 32
SPEC = tf.TensorSpec([BATCH], tf.string), tf.TensorSpec([BATCH, 1])
WORDS = np.array([word for word in words(2500) if b"\0" not in word], object)
"""NumPy's strings have no zeros at their ends."""
LONGEST = max(map(len, WORDS))


def build(optimizer="adagrad", **given):
    ids = keras.Input((), dtype="string")
    layer = DynamicEmbedding(WIDTH, name="words", **({"capacity": 3000, "string_bytes": 40} | given))
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    model.compile(optimizer, "mse")
    return model


def data(texts):
    texts = list(texts)
    return tf.data.Dataset.from_tensor_slices((texts, tf.ones([len(texts), 1]))).batch(BATCH, drop_remainder=True)


def fit(model, texts, **given):
    tfdist.fit(model, data(texts), epochs=1, verbose=0, **given)


def vocabulary(model):
    """The strings by their rows; each belongs to the id of its row."""
    strings, rows = model.get_layer("words").vocabulary()
    ids, same = model.get_layer("words").index.ids()
    assert rows.tolist() == same.tolist()
    whole = np.array([not text.endswith("…") for text in strings])
    np.testing.assert_array_equal(as_ids(strings[whole]), ids[whole])
    return dict(zip(rows.tolist(), strings.tolist(), strict=True))


@pytest.mark.rotates(5)
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_each_id_of_a_training_has_its_string(optimizer):
    model = build(optimizer)
    fit(model, WORDS[:320])
    found = vocabulary(model).values()
    shown = [word.decode("utf-8", "surrogateescape") if len(word) <= 40 else "é" * 20 + "…" for word in WORDS[:320]]
    assert sorted(found) == sorted(shown)
    tfdist.evaluate(model, data(WORDS[320:640]), verbose=0)
    assert len(vocabulary(model)) == len(found)


def test_a_replaced_row_loses_its_string():
    model = build(capacity=GROUP, evict="lru")
    fit(model, WORDS)
    found = vocabulary(model)
    assert len(found) < GROUP
    assert (
        {WORDS[len(WORDS) // BATCH * BATCH - 1].decode()}
        < set(found.values())
        < {word.decode("utf-8", "surrogateescape") for word in WORDS}
    )


def test_of_two_strings_with_one_id_the_first_one_is_kept(monkeypatch):
    monkeypatch.setattr(row_index, "strings_as_ids", lambda strings: tf.cast(tf.strings.length(strings), tf.int64))
    index = build().get_layer("words").index
    for texts in (["ab", "cd", "e"], ["fg", "h"]):
        rows = index.rows(tf.constant(texts), create=True)[0].numpy()
        assert rows[0] == index.rows(tf.constant(["xy"]), create=False)[0]
    assert sorted(index.strings_of(index.ids()[1])) == ["ab", "e"]


def test_ids_that_wait_for_admission_are_not_listed():
    model = build(admit_after=2)
    fit(model, [b"a"] * BATCH + [*WORDS[100:131], b"a"])
    assert list(vocabulary(model).values()) == ["a"]


def test_integers_have_no_strings():
    ids = keras.Input((), dtype="int64")
    with raises(UsageError, "dynamic-embedding-no-strings"):
        DynamicEmbedding(WIDTH, 100, string_bytes=8)(ids)
    with raises(UsageError, "invalid-argument"):
        DynamicEmbedding(WIDTH, 100, string_bytes=0)


def test_ragged_and_sparse_strings():
    layer = DynamicEmbedding(WIDTH, 100, string_bytes=8)
    ragged = tf.ragged.constant([["a", "b"], []])
    assert layer(ragged, training=True).shape.as_list() == [2, None, WIDTH]
    layer(tf.sparse.from_dense([["c", ""]]), training=True)
    assert sorted(layer.vocabulary()[0]) == ["", "a", "b", "c"]


def test_the_limit_of_bytes_has_the_strings():
    layer = DynamicEmbedding(WIDTH, max_bytes=10**6, evict="lru", string_bytes=63)
    layer.build()
    of_all = [layer.embeddings, *layer.index.variables]
    used = sum(int(np.prod(each.shape)) * each.value.dtype.size for each in of_all)
    assert 0.8 * 10**6 < used <= 10**6


def test_nothing_is_added_without_strings():
    table = DynamicEmbedding(WIDTH, 100)
    table.build()
    assert len(table.index.variables) == 3
    graph = tf.function(lambda ids: table.index.fetch(ids, create=True).positions).get_concrete_function(
        tf.TensorSpec([None], tf.int64)
    )
    written = graph.graph.as_graph_def()
    nodes = [*written.node, *(node for function in written.library.function for node in function.node_def)]
    assert not {"DecodePaddedRaw", "Substr", "StringToHashBucketFast"} & {node.op for node in nodes}
    assert not any(node.attr["dtype"].type == tf.string.as_datatype_enum and node.op == "Placeholder" for node in nodes)


def test_files_of_keras_and_exports_have_them(tmp_path):
    model = build()
    fit(model, WORDS[:320])
    model.save(tmp_path / "model.keras")
    assert vocabulary(keras.models.load_model(tmp_path / "model.keras")) == vocabulary(model)
    tfdist.export(model, tmp_path / "export")
    loaded = tf.saved_model.load(tmp_path / "export")
    some = tf.constant(WORDS[:7].tolist())
    np.testing.assert_allclose(loaded.serve(some), model(some), rtol=1e-6)
    keys, _, _, strings = loaded.indices
    rows = np.flatnonzero(keys.numpy())
    by_hand = {int(row): bytes(strings.numpy()[row]).rstrip(b"\0")[:-1] for row in rows}
    whole = {row: text for row, text in vocabulary(model).items() if not text.endswith("…")}
    assert {row: by_hand[row].decode("utf-8", "surrogateescape") for row in whole} == whole
    assert decoded(strings.numpy()[rows]).tolist() == list(vocabulary(model).values())


def built(**given):
    model = build(**given)
    track_changes(model)
    step = ModelStep(model)
    step.build(SPEC)
    return step


@pytest.mark.rotates(2, 0)
def test_checkpoints_of_parameter_servers_have_them_on_any_number_of_ps(servers, tmp_path, monkeypatch):
    monkeypatch.setattr(row_index, "_is_shared", lambda: True)
    monkeypatch.setattr(row_index, "GRACE_SECONDS", 0.0)
    given = {"capacity": 2 * GROUP, "evict": "lru"}
    strategy = servers(2, shard=ShardRule(min_bytes=100))

    def tracked():
        model = build(**given)
        track_changes(model)
        return model

    engine, model = local_engine(monkeypatch, strategy, tracked, data(WORDS), Rules(updates=Updates()))
    folder = CheckpointFolder(tmp_path)
    with strategy.scope():
        for number in (20, 40, 60):
            list(engine.run(20, first=number - 20, size=20, adapts=False, pause=NoPause()))
            saving = CheckpointWriter(folder, engine._step, True, 4)
            saving.save(CheckpointContent(TrainingState(number, 0)), wait=True)
    expected = vocabulary(model)
    assert folder.find(60).state.deltas == 2
    assert len(expected) > GROUP
    assert len(row_indices(model)[0].first_rows) == 2
    for count in (1, 3):
        with servers(count, shard=ShardRule(min_bytes=100)).scope():
            again = built(**given)
            folder.restore(folder.find(60), again)
            assert vocabulary(again.model) == expected


@pytest.mark.rotates(5)
@pytest.mark.parametrize("policy", [{}, {"capacity": GROUP, "evict": "lru"}, {"admit_after": 2}])
def test_pushed_tables_have_them(policy, tmp_path):
    def train(steps):
        model = build(**policy)
        at = tfdist.Checkpoints(tmp_path / "saved", 10, full_every=4, push_tables=tmp_path / "pushed")
        order = np.random.default_rng(1).integers(0, len(WORDS), 60 * BATCH)
        fit(model, WORDS[order], max_steps=steps, checkpoints=at)
        return model

    train(10)
    reader = tfdist.TableReader(tmp_path / "pushed")
    for steps in (30, 60):
        layer = train(steps).get_layer("words")
        reader.refresh()
        for each in (reader, tfdist.TableReader(tmp_path / "pushed")):
            strings, vectors = each["words"].vocabulary()
            own, rows = layer.vocabulary()
            assert strings.tolist() == own.tolist()
            np.testing.assert_array_equal(vectors, layer.embeddings.numpy()[rows])
            whole = np.array([not text.endswith("…") for text in strings])
            np.testing.assert_array_equal(each["words"].lookup(strings[whole]), vectors[whole])


def test_pushed_tables_without_strings_list_numbers(tmp_path):
    model = build(string_bytes=None)
    saved = tfdist.Checkpoints(tmp_path / "saved", 5, push_tables=tmp_path / "pushed")
    fit(model, WORDS[:320], checkpoints=saved)
    ids, vectors = tfdist.TableReader(tmp_path / "pushed")["words"].vocabulary()
    own, rows = model.get_layer("words").vocabulary()
    np.testing.assert_array_equal(ids, own)
    np.testing.assert_array_equal(vectors, model.get_layer("words").embeddings.numpy()[rows])


def test_a_checkpoint_without_strings_is_of_another_model(tmp_path):
    def train(**given):
        fit(build(**given), WORDS[:320], checkpoints=tfdist.Checkpoints(tmp_path, 5))

    train(string_bytes=None)
    with raises(TrainingError, "checkpoint-of-another-model"):
        train()
