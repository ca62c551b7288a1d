"""Rows that a training pushes after its checkpoints, read without TensorFlow."""

import json
import subprocess
import sys
import uuid
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import batches
from tfdist_cli.errors import ResultNotSaved, TrainingError, UsageError
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage.local import LocalFolder
from tfdist_cli.storage.remote import RemoteFolder
from tfdist_cli.storage.retry import StorageError
from tfdist_cli.tables.layout import Manifest, sequences
from tfdist_cli.train.layers import DynamicEmbedding

WIDTH = 4
IDS = np.random.default_rng(1).integers(0, 2500, (20 * 16, 2))
pytestmark = pytest.mark.slow
POLICIES = {"plain": {"capacity": 3000}, "lru": {"capacity": 1000, "evict": "lru"}, "admitted": {"admit_after": 3}}


def build(**policy):
    ids = keras.Input((2,), dtype="int64")
    table = DynamicEmbedding(WIDTH, name="items", **({"capacity": 3000} | policy))
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))
    model.compile(keras.optimizers.Adagrad(0.3), "mse")
    return model


def train(model, tmp_path, at, steps, full_every=4, every=5):
    checkpoints = tfdist.Checkpoints(tmp_path / "saved", every, full_every=full_every, push_tables=at)
    tfdist.fit(
        model, batches(IDS, np.ones((len(IDS), 1), np.float32), batch=16), max_steps=steps, checkpoints=checkpoints
    )


def assert_same(model, reader):
    layer = model.get_layer("items")
    wanted = np.arange(2600)
    np.testing.assert_array_equal(reader["items"].lookup(wanted), layer(wanted, training=False))
    found = np.sort(layer.vocabulary()[0])
    np.testing.assert_array_equal(np.flatnonzero(reader["items"].has(np.arange(2600))), found)


@pytest.mark.rotates(5)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_reader_follows_a_training_and_its_restarts(policy, tmp_path):
    at, model = tmp_path / "pushed", build(**POLICIES[policy])
    train(model, tmp_path, at, 5)
    reader = tfdist.TableReader(at)
    assert (reader.sequence, reader.step, list(reader)) == (1, 5, ["items"])
    assert_same(model, reader)
    for steps in (10, 15, 20, 30):
        model = build(**POLICIES[policy])
        train(model, tmp_path, at, steps)
        assert reader.refresh()
        assert_same(model, reader)
        assert_same(model, tfdist.TableReader(at))
        assert not reader.refresh()
    kinds = {
        n: Manifest.parsed((at / f"{n:08d}.json").read_bytes(), "").kind for n in sequences(LocalFolder(at).sizes())
    }
    assert list(kinds.values())[:1] == ["base"]
    assert "delta" in kinds.values()


BY_NUMPY = """
import json, sys
import numpy as np
from pathlib import Path
at, held = Path(sys.argv[1]), {}
newest = json.loads(max(at.glob("*.json")).read_text())
for number in range(newest["base"], newest["sequence"] + 1):
    for file in json.loads((at / f"{number:08d}.json").read_text())["files"]:
        found = np.load(at / file["name"])
        for row, id, present, values in zip(*(found[key] for key in ("rows", "ids", "present", "values"))):
            held[int(row)] = (int(id) if present else None, values.tolist())
assert not {"tensorflow", "tfdist_cli", "keras"} & set(sys.modules)
print(json.dumps({id: values for id, values in held.values() if id is not None}))
"""


def test_the_files_can_be_read_by_numpy_alone(tmp_path):
    at, model = tmp_path / "pushed", build(**POLICIES["lru"])
    train(model, tmp_path, at, 15)
    assert len(sequences(LocalFolder(at).sizes())) == 3
    ran = subprocess.run([sys.executable, "-c", BY_NUMPY, at], capture_output=True, text=True, check=True)
    found = {int(key): values for key, values in json.loads(ran.stdout).items()}
    ids, rows = model.get_layer("items").vocabulary()
    whole = np.asarray(model.get_layer("items").embeddings)
    assert found == {int(id_): whole[row].tolist() for id_, row in zip(ids, rows, strict=True)}


def test_the_reader_needs_no_tensorflow(tmp_path):
    train(build(), tmp_path, tmp_path / "pushed", 5)
    code = "import sys, tfdist_cli as t; r = t.TableReader(sys.argv[1]); r['items'].lookup(['a', 'b']); "
    code += "assert not {'tensorflow', 'keras', 'fsspec'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, tmp_path / "pushed"], check=True)


def test_old_bases_are_removed_and_a_slow_reader_takes_the_new_one(tmp_path):
    at, model = tmp_path / "pushed", build(**POLICIES["lru"])
    train(model, tmp_path, at, 5)
    slow = tfdist.TableReader(at)
    model = build(**POLICIES["lru"])
    train(model, tmp_path, at, 60, full_every=2)
    names = LocalFolder(at).sizes()
    assert sequences(names)[0] > 1
    assert {name[:8] for name in names} == {f"{number:08d}" for number in sequences(names)}
    slow.refresh()
    assert_same(model, slow)


def test_a_damaged_push_changes_nothing(tmp_path):
    at, model = tmp_path / "pushed", build()
    train(model, tmp_path, at, 5)
    reader, expected = tfdist.TableReader(at), model.get_layer("items")(IDS).numpy()
    train(build(), tmp_path, at, 10)
    file = at / "00000002-000.npz"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with raises(UsageError, "pushed-tables-damaged"):
        reader.refresh()
    np.testing.assert_array_equal(reader["items"].lookup(IDS), expected)
    model = build()
    train(model, tmp_path, at, 40)
    assert reader.refresh()
    assert_same(model, reader)
    (at / "00000099.json").write_text("{}")
    with raises(UsageError, "pushed-tables-damaged"):
        reader.refresh()


def test_what_fails_is_pushed_later(tmp_path, monkeypatch, log):
    upload, failing = LocalFolder.upload, [True]

    def fails_at_first(self, file, name):
        if failing:
            failing.pop()
            raise OSError(28, "No space left on device")
        upload(self, file, name)

    monkeypatch.setattr(LocalFolder, "upload", fails_at_first)
    model = build()
    train(model, tmp_path, tmp_path / "pushed", 10)
    assert any("No space" in line for line in log)
    assert_same(model, tfdist.TableReader(tmp_path / "pushed"))
    assert not list((tmp_path / "saved").glob(".pushing*"))

    def fails(*_):
        raise StorageError("no answer")

    monkeypatch.setattr(LocalFolder, "upload", fails)
    with raises(ResultNotSaved, "tables-not-pushed"):
        train(build(), tmp_path, tmp_path / "pushed", 15)


def test_a_bucket(tmp_path):
    url, model = Url(f"memory://{uuid.uuid4()}") / "pushed", build()
    train(model, tmp_path, str(url), 10)
    assert sequences(RemoteFolder(url).sizes()) == [1, 2]
    assert_same(model, tfdist.TableReader(str(url)))


def test_another_training_begins_with_a_base(tmp_path):
    at = tmp_path / "pushed"
    train(build(), tmp_path, at, 5)
    reader = tfdist.TableReader(at)
    train(model := build(capacity=5000), tmp_path / "other", at, 5)
    assert reader.refresh()
    assert Manifest.parsed((at / "00000002.json").read_bytes(), "").kind == "base"
    assert_same(model, reader)


def test_strings(tmp_path):
    given = keras.Input((), dtype="string")
    model = keras.Model(given, keras.layers.Dense(1)(DynamicEmbedding(WIDTH, 100, name="words")(given)))
    model.compile(keras.optimizers.SGD(0.3), "mse")
    words = np.array(["anne", "bob", "Grüße", "x" * 100] * 4)
    saved = tfdist.Checkpoints(tmp_path / "saved", 2, push_tables=tmp_path / "pushed")
    tfdist.fit(model, words, np.ones(16, np.float32), batch_size=4, checkpoints=saved)
    found = tfdist.TableReader(tmp_path / "pushed")["words"]
    np.testing.assert_array_equal(found.lookup(words), model.get_layer("words")(tf.constant(words)))
    assert found.has(["bob", "carl"]).tolist() == [True, False]


def test_places_that_cannot_be(tmp_path):
    with raises(UsageError, "no-pushed-tables"):
        tfdist.TableReader(tmp_path)
    with raises(UsageError, "unsupported-scheme"):
        tfdist.Checkpoints(tmp_path, 1, push_tables="ftp://x/y")
    (tmp_path / "file").write_text("")
    with raises(TrainingError, "pushed-tables-unreadable"):
        train(build(), tmp_path, Path(tmp_path / "file"), 5)
