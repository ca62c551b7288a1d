"""Named signatures of a SavedModel: each is called after loading it with TensorFlow alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.codes import raises
from tfdist_cli.errors import UsageError

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
NAMES = tf.constant(["cat", "dog"])


@pytest.fixture(scope="module")
def model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2, "softmax")])
    model.compile("sgd", "mse")
    return model


def signatures(model):
    """The three forms."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def from_text(lines):
        numbers = tf.strings.to_number(tf.strings.split(lines, ",").to_tensor(shape=[None, 3]))
        return {"name": tf.gather(NAMES, tf.argmax(model(numbers), axis=1))}

    return {
        "embed": keras.Model(model.inputs[0], model.layers[0].output),
        "scaled": (lambda x, factor: model(x * factor), [tf.TensorSpec([None, 3]), tf.TensorSpec([])]),
        "from_text": from_text,
    }


def test_each_signature_computes_what_it_says(model, tmp_path):
    path = tfdist.export(model, tmp_path / "served", version=3, signatures=signatures)
    loaded = tf.saved_model.load(str(path))
    served = loaded.signatures
    assert set(served) == {"serving_default", "serve", "embed", "scaled", "from_text"}
    expected = model(X).numpy()
    (default,) = served["serving_default"](tf.constant(X)).values()
    np.testing.assert_allclose(default, expected, rtol=1e-5)
    np.testing.assert_allclose(loaded.serve(X), expected, rtol=1e-5)
    np.testing.assert_allclose(loaded.embed(X), model.layers[0](X), rtol=1e-5)
    (scaled,) = served["scaled"](x=tf.constant(X), factor=tf.constant(2.0)).values()
    np.testing.assert_allclose(scaled, model(2 * X), rtol=1e-5)
    lines = tf.constant([",".join(map(str, row)) for row in X])
    assert served["from_text"](lines)["name"].numpy().tolist() == NAMES.numpy()[expected.argmax(axis=1)].tolist()


def test_another_default(model, tmp_path):
    def embedding(model):
        return {"serving_default": keras.Model(model.inputs[0], model.layers[0].output)}

    loaded = tf.saved_model.load(str(tfdist.export(model, tmp_path / "served", signatures=embedding)))
    (found,) = loaded.signatures["serving_default"](tf.constant(X)).values()
    np.testing.assert_allclose(found, model.layers[0](X), rtol=1e-5)


def uses_a_table(_):
    table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, 0, -1, -2)
    return {"look_up": (lambda key: table[key], [tf.TensorSpec([None], tf.int64)])}


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (lambda _: ["embed"], "invalid-signatures"),
        (lambda _: {"no name": None}, "invalid-signatures"),
        (lambda _: {"embed": 3}, "invalid-signatures"),
        (lambda _: {"embed": tf.function(lambda x: x)}, "invalid-signatures"),
        (lambda model: {"serve": model}, "reserved-signature"),
        (uses_a_table, "signature-not-exportable"),
        ({"a": "dict"}, "invalid-argument"),
    ],
)
def test_invalid_signatures(given, code, model, tmp_path):
    with raises(UsageError, code):
        tfdist.export(model, tmp_path / "served", signatures=given)
    assert not (tmp_path / "served").exists()


def test_only_a_saved_model_has_signatures(model, tmp_path):
    with raises(UsageError, "invalid-argument"):
        tfdist.export(model, tmp_path / "model.keras", format="keras", signatures=signatures)
