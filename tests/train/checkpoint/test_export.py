"""Tests of exports: they predict as the trained model, and replace only earlier exports."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import classifier
from tfdist_cli.errors import ResultNotSaved, TrainingError, UsageError
from tfdist_cli.spec.export_formats import EXPORT_FORMATS

X = np.random.default_rng(0).normal(50, 10, (24, 3)).astype(np.float32)
Y = np.ones((24, 1), np.float32)


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """A model that creates its variables when it is called."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.out = layers.Dense(4, "tanh"), layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))


@keras.saving.register_keras_serializable("tests")
class TwoInputs(keras.Model):
    """A model with two integer inputs."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.words, self.user, self.out = layers.Embedding(9, 4), layers.Embedding(5, 4), layers.Dense(1)

    def call(self, x):
        return self.out(keras.ops.mean(self.words(x["words"]), axis=1) + self.user(x["user"]))


@keras.saving.register_keras_serializable("tests")
class BuildMethod(Subclassed):
    """A model that creates its variables in `build`."""

    def build(self, shape):
        self.hidden.build(shape)
        self.out.build((None, 4))
        self.built = True


@keras.saving.register_keras_serializable("tests")
class PairInput(keras.Model):
    """A model whose input is a pair."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.left, self.right = layers.Dense(1), layers.Dense(1)

    def call(self, x):
        return self.left(x[0]) + self.right(x[1])


def functional():
    x = keras.Input((3,))
    return keras.Model(x, layers.Dense(1)(layers.Concatenate()([x, layers.Dense(2, "tanh")(x)])))


def sequential():
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, "relu"), layers.BatchNormalization(), layers.Dense(1)])


def normalized():
    normal = layers.Normalization()
    normal.adapt(X)
    return keras.Sequential([keras.Input((3,)), keras.Sequential([normal, layers.Dense(2)]), layers.Dense(1)])


def with_lookup(lookup):
    x = keras.Input((3,), dtype=lookup.dtype if isinstance(lookup, layers.IntegerLookup) else "string")
    return keras.Model(x, layers.Dense(1)(layers.Flatten()(layers.Embedding(40, 2)(lookup(x)))))


def numbers():
    lookup = layers.IntegerLookup()
    lookup.adapt(NUMBERS)
    return with_lookup(lookup)


def strings():
    lookup = layers.StringLookup()
    lookup.adapt(STRINGS)
    return with_lookup(lookup)


def texts():
    vectors = layers.TextVectorization(output_sequence_length=3)
    vectors.adapt(TEXTS)
    x = keras.Input((1,), dtype="string")
    return keras.Model(x, layers.Dense(1)(layers.Flatten()(layers.Embedding(40, 2)(vectors(x)))))


def tf_idf_strings():
    lookup = layers.StringLookup(output_mode="tf_idf")
    lookup.adapt(STRINGS)
    x = keras.Input((3,), dtype="string")
    return keras.Model(x, layers.Dense(1)(lookup(x)))


def tf_idf_texts():
    vectors = layers.TextVectorization(output_mode="tf_idf")
    vectors.adapt(TEXTS)
    x = keras.Input((1,), dtype="string")
    return keras.Model(x, layers.Dense(1)(vectors(x)))


OLD_KERAS = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 14)
"""Whether Keras itself cannot load an adapted `TextVectorization(output_mode="tf_idf")`."""
NUMBERS = np.arange(5, 77).reshape(24, 3) % 30
STRINGS = np.array([[f"word {number}" for number in row] for row in NUMBERS])
TEXTS = np.array([["a b c"], ["d e a"], ["c c f g"]] * 8)
WORDS = {"words": NUMBERS % 9, "user": np.arange(24) % 5}
KINDS = {
    "functional": (functional, X),
    "sequential": (sequential, X),
    "subclassed": (Subclassed, X),
    "subclassed with several inputs": (TwoInputs, WORDS),
    "subclassed with build": (BuildMethod, X),
    "subclassed with a pair": (PairInput, (X, X[:, :2])),
    "adapted normalization": (normalized, X),
    "adapted numbers": (numbers, NUMBERS),
    "adapted strings": (strings, STRINGS),
    "adapted texts": (texts, TEXTS),
    "adapted weights of words": (tf_idf_strings, STRINGS),
    "adapted weights of texts": (tf_idf_texts, TEXTS),
}


def trained(build, x):
    with tfdist.scope():
        model = build()
        model.compile(keras.optimizers.SGD(1e-4), "mse")
    examples = tf.data.Dataset.from_tensor_slices((x, Y)).batch(8, drop_remainder=True)
    tfdist.fit(model, examples, epochs=1)
    return model


def first_examples(x, count=3):
    return tf.nest.map_structure(lambda each: tf.constant(each[:count]), x)


def assert_close(actual, expected):
    """Asserts equality up to rounding, which differs between a graph and eager ops."""
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("rebuilt", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_export_predicts_as_the_model_does(kind, rebuilt, tmp_path):
    build, x = KINDS[kind]
    if OLD_KERAS and build in (tf_idf_strings, tf_idf_texts):
        pytest.skip(f"Keras {keras.__version__} cannot load adapted weights of words, 3.14 can")
    model = trained(build, x)

    def again():
        made = build()
        made.compile("sgd", "mse")
        return made

    rebuild = again if rebuilt else None
    served = tf.saved_model.load(tfdist.export(model, tmp_path / "served", rebuild=rebuild))
    loaded = keras.saving.load_model(tfdist.export(model, tmp_path / "keras", format="keras", rebuild=rebuild))
    expected = np.array(model(first_examples(x)))
    assert_close(served.serve(first_examples(x)), expected)
    assert_close(loaded(first_examples(x)), expected)


def onnx_outputs(path, x):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(path)
    return session.run(None, {session.get_inputs()[0].name: np.asarray(x)})[0]


def litert_outputs(path, x):
    interpreter = tf.lite.Interpreter(str(path))
    runner = interpreter.get_signature_runner("serving_default")
    (name,) = runner.get_input_details()
    return runner(**{name: x})["output_0"]


def openvino_outputs(path, x):
    openvino = pytest.importorskip("openvino")
    exact = {"INFERENCE_PRECISION_HINT": "f32"}  # processors with bfloat16 use it otherwise
    return openvino.Core().compile_model(path / "model.xml", "CPU", exact)(np.asarray(x))[0]


CONVERTED = {"onnx": onnx_outputs, "litert": litert_outputs, "openvino": openvino_outputs}


def require_libraries(form):
    for library in EXPORT_FORMATS[form].libraries:
        pytest.importorskip(library)


TO_CONVERT = [(functional, "int8"), (sequential, None), (Subclassed, None)]


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize(("build", "quantize"), TO_CONVERT)
@pytest.mark.parametrize("form", ["onnx", "litert"])
def test_a_converted_model_predicts_as_the_model_does(form, build, quantize, tmp_path):
    compare_converted(form, build, quantize, tmp_path)


@pytest.mark.slow
@pytest.mark.rotates(5, 4)
@pytest.mark.parametrize(("build", "quantize"), TO_CONVERT)
def test_openvino_predicts_as_the_model_does(build, quantize, tmp_path):
    compare_converted("openvino", build, quantize, tmp_path)


def compare_converted(form, build, quantize, tmp_path):
    require_libraries(form)
    model = trained(build, X)
    path = tfdist.export(model, tmp_path / "out", format=form, quantize=quantize)
    served = tf.saved_model.load(tfdist.export(model, tmp_path / "served", quantize=quantize))
    examples = first_examples(X)
    expected = served.serve(examples) if quantize else model(examples)
    assert_close(CONVERTED[form](path, examples), np.array(expected))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["onnx", pytest.param("openvino", marks=pytest.mark.rotates(5, 4))])
def test_an_operation_that_a_format_lacks_is_an_error(form, tmp_path):
    require_libraries(form)
    with raises(ResultNotSaved, "export-not-converted"):
        tfdist.export(strings(), tmp_path / "out", format=form)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_quantized_weights_take_a_quarter_and_predict_nearly_the_same(tmp_path):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2000, "relu"), layers.Dense(40), layers.Dense(1)])
    model.compile("adam", "mse")
    paths = [tfdist.export(model, tmp_path / str(each), quantize=each) for each in (None, "int8")]
    sizes = [(path / "variables" / "variables.data-00000-of-00001").stat().st_size for path in paths]
    assert sizes[1] < 0.35 * sizes[0]
    loaded = [tf.saved_model.load(path) for path in paths]
    served = [np.array(each.serve(X)) for each in loaded]
    np.testing.assert_allclose(served[1], served[0], atol=0.05 * float(np.abs(served[0]).max()))
    assert not np.array_equal(served[1], served[0])
    assert np.array_equal(model(X), served[0]), "the model itself is not changed"


@pytest.mark.skipif(OLD_KERAS, reason=f"Keras {keras.__version__} cannot quantize weights alone, 3.14 can")
def test_a_model_without_layers_to_quantize_is_an_error(tmp_path):
    model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization()])
    with raises(ResultNotSaved, "nothing-to-quantize"):
        tfdist.export(model, tmp_path / "out", quantize="int8")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_versions_are_folders_that_serving_reads(tmp_path):
    model = sequential()
    paths = [tfdist.export(model, tmp_path / "digits", version=number) for number in (3, 12, 12)]
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == ["digits/3", "digits/12", "digits/12"]
    assert sorted(each.name for each in (tmp_path / "digits").iterdir()) == ["12", "3"]
    signatures = tf.saved_model.load(paths[-1]).signatures
    (output,) = signatures["serving_default"](tf.constant(X)).values()
    assert_close(output, np.array(model(X)))


@pytest.mark.parametrize(
    "given",
    [
        {"version": 1, "format": "keras"},
        {"version": -1},
        {"version": "1"},
        {"quantize": "int4"},
        {"quantize": "int8", "format": "keras"},
        {"format": "h5"},
    ],
)
def test_arguments_that_have_no_meaning_are_errors(given, tmp_path):
    with raises(UsageError, "invalid-argument"):
        tfdist.export(compiled(), tmp_path / "out", **given)


@pytest.mark.parametrize("rebuild", [None, Subclassed])
def test_a_subclassed_model_without_training_is_exported_to_keras_only(rebuild, tmp_path):
    model = Subclassed()
    expected = np.array(model(first_examples(X)))
    loaded = keras.saving.load_model(tfdist.export(model, tmp_path / "keras", format="keras", rebuild=rebuild))
    assert_close(loaded(first_examples(X)), expected)
    with raises(TrainingError, "model-inputs-unknown"):
        tfdist.export(model, tmp_path / "served", rebuild=rebuild)


def test_a_subclassed_model_without_inputs_is_an_error(tmp_path):
    with raises(TrainingError, "model-inputs-unknown"):
        tfdist.export(Subclassed(), tmp_path / "keras", format="keras")


@pytest.mark.parametrize("build", [texts, tf_idf_texts])
def test_adapted_texts_are_exported_without_training(build, tmp_path):
    if build is tf_idf_texts and OLD_KERAS:
        with raises(TrainingError, "keras-too-old"):
            tfdist.export(build(), tmp_path / "model")
        return
    model = build()
    loaded = keras.saving.load_model(tfdist.export(model, tmp_path / "keras", format="keras"))
    assert_close(loaded(first_examples(TEXTS)), np.array(model(first_examples(TEXTS))))


def compiled(*made, **given):
    model = keras.Sequential([keras.Input((3,)), *made, layers.Dense(1)])
    model.compile(**({"optimizer": "sgd", "loss": "mse"} | given))
    return model


@pytest.mark.parametrize(
    ("rebuild", "differences"),
    [
        (lambda: compiled(layers.Dense(5)), ["/kernel", "(3, 1)", "(3, 5)"]),
        (lambda: compiled(layers.Dropout(0.5)), ["2 variables in 3", "2 variables in 4"]),
    ],
)
def test_a_model_that_is_rebuilt_differently_is_an_error(rebuild, differences, tmp_path):
    with raises(TrainingError, "model-rebuilt-differently") as caught:
        tfdist.export(compiled(), tmp_path / "out", rebuild=rebuild)
    assert all(each in caught.value.message for each in differences), caught.value
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["saved_model", "keras"])
def test_an_earlier_export_is_replaced(form, tmp_path):
    first = tfdist.export(compiled(layers.Dense(2)), tmp_path / "out", format=form)
    assert tfdist.export(compiled(), tmp_path / "out", format=form) == first
    assert [each.name for each in tmp_path.iterdir()] == [first.name]


@pytest.mark.parametrize("beside", [(), ("saved_model.pb", "variables")])
def test_a_folder_with_other_files_is_not_replaced(beside, tmp_path):
    for name in ("thesis.txt", *beside):
        (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "out" / name).touch()
    with raises(UsageError, "export-path-exists"):
        tfdist.export(compiled(), tmp_path / "out")
    assert (tmp_path / "out" / "thesis.txt").exists()


def test_paths_that_are_not_replaced(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.keras").mkdir()
    with raises(UsageError, "export-path-exists"):
        tfdist.export(compiled(), tmp_path / "file")
    with raises(UsageError, "export-path-exists"):
        tfdist.export(compiled(), tmp_path / "folder", format="keras")
    (tmp_path / "empty").mkdir()
    assert (tfdist.export(compiled(), tmp_path / "empty") / "saved_model.pb").exists()


class CustomMetric(keras.metrics.Mean):
    """A metric of the user's."""


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"metrics": [CustomMetric()]}, "CustomMetric"),
        ({"loss": lambda y_true, y_pred: keras.ops.mean(y_pred)}, "lambda"),
        ({"metrics": ["mae", keras.metrics.AUC()], "optimizer": keras.optimizers.Adam(0.1)}, None),
    ],
)
def test_a_keras_file_has_no_custom_loss_or_metrics(given, named, tmp_path, log):
    path = tfdist.export(compiled(**given), tmp_path / "out", format="keras")
    loaded = keras.saving.load_model(path)
    assert loaded.compiled == (named is None)
    assert len(log) == bool(named)
    assert all(str(named) in line for line in log)


@pytest.mark.parametrize("form", ["saved_model", "keras"])
def test_a_full_disk_is_an_error(form, small_disk):
    model = classifier(keras.layers.Dense(200))
    path = small_disk / "export" / "model"
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "ballast").write_bytes(bytes(2**20))
    with raises(ResultNotSaved, "export-not-written") as caught:
        tfdist.export(model, path, format=form)
    assert str(path) in caught.value.message
    assert "No space left" in caught.value.message
    assert "\n" not in caught.value.message
    assert list(path.parent.iterdir()) == []
