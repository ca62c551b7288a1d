"""Converting Keras scripts."""

import ast
import inspect
import textwrap

import pytest

import tfdist_cli as tfdist
from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.init.convert import convert

HEAD = "import keras\n\nmodel = keras.Sequential([keras.layers.Dense(1)])\nmodel.compile('sgd', 'mse')\n"


def converted(text, name="train.py"):
    return convert(textwrap.dedent(text), name)


def under_scope(text):
    """The first words of the statements under `with tfdist.scope():`."""
    (scope,) = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.With)]
    assert ast.unparse(scope.items[0]) == "tfdist.scope()"
    return [ast.unparse(each).split("(")[0] for each in scope.body]


def fit_of(text):
    (call,) = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tfdist.fit"
    ]
    return ast.unparse(call)


def test_the_two_lines(tmp_path):
    text = converted(HEAD + "history = model.fit(x, y, epochs=2)\n").text
    assert text.splitlines() == [
        "import keras",
        "import tfdist_cli as tfdist",
        "",
        "with tfdist.scope():",
        "    model = keras.Sequential([keras.layers.Dense(1)])",
        "    model.compile('sgd', 'mse')",
        "history = tfdist.fit(model, x, y, epochs=2)",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        "x, y",
        "x=x, y=y",
        "dataset, None, epochs=3",
        "x, y, 64, 5, 0",
        "x, y, sample_weight=w, class_weight={0: 2.0}, validation_split=0.1",
        "x, y, verbose=2, **more",
        "*data, callbacks=[f(1)]",
    ],
)
def test_arguments_stay_as_they_are(arguments):
    result = converted(HEAD + f"model.fit({arguments})\n")
    assert fit_of(result.text) == f"tfdist.fit(model, {arguments})"
    assert not result.notes


def test_statements_that_the_model_needs_are_under_the_scope():
    text = converted("""
        import numpy as np
        from tensorflow.keras import layers, Model
        from keras.datasets import mnist
        from keras.optimizers import Adam as Own
        (x, y), _ = mnist.load_data()
        size = x.shape[1]
        inputs = layers.Input((size,))
        h = layers.Dense(3)(inputs)
        for _ in range(2):
            h = layers.Dense(3)(h)
        net = Model(inputs, h)
        print(size)
        rule = Own(0.1)
        net.compile(rule, "mse")
        done = True
        net.fit(x, y)
    """).text
    assert under_scope(text) == ["inputs = layers.Input", "h = layers.Dense", "for _ in range", "net = Model",
                                 "print", "rule = Own", "net.compile"]  # fmt: skip


def test_a_model_of_a_function():
    text = converted("""
        import tensorflow as tf

        class Net(tf.keras.Model):
            pass

        def build(units):
            net = Net(units)
            net.compile("sgd", "mse")
            return net

        def main():
            made = build(3)
            print("made")
            made.fit(data, epochs=1)

        if __name__ == "__main__":
            main()
    """).text
    assert under_scope(text) == ["made = build"]
    assert fit_of(text) == "tfdist.fit(made, data, epochs=1)"


def test_the_main_part_of_a_script():
    text = converted("""
        import keras
        if __name__ == "__main__":
            model = keras.Sequential()
            model.add(keras.layers.Dense(1))
            model.compile("sgd", "mse")
            model.fit(x, y)
    """).text
    assert under_scope(text) == ["model = keras.Sequential", "model.add", "model.compile"]


def test_lines_within_strings_are_not_indented():
    text = converted(
        HEAD.replace("model.compile", 'note = """\nas it is\n"""\nmodel.compile') + "model.fit(x, y)\n"
    ).text
    assert "\nas it is\n" in text
    assert under_scope(text)[1].startswith("note")


def test_long_calls_are_broken_and_wide_characters_do_not_shift_them():
    text = converted(HEAD + f"é = model.fit(x, y, callbacks=[{', '.join(['ü'] * 60)}]); b = 1\n").text
    assert len(fit_of(text)) > 100
    assert max(map(len, text.splitlines())) < 250


def test_other_fits_stay():
    text = converted(HEAD + "scaler = Scaler()\nscaler.fit(x)\nmodel.fit(x, y)\n").text
    assert "scaler.fit(x)" in text


def test_two_models():
    text = converted(HEAD + "model.fit(x, y)\n" + HEAD.replace("model", "other") + "other.fit(x, y)\n").text
    assert text.count("with tfdist.scope():") == 2
    assert text.count("tfdist.fit(") == 2


def test_a_model_from_elsewhere_is_left_to_the_user():
    result = converted("from models import net\nnet.fit(data, epochs=3)\n")
    assert "scope" not in result.text
    assert [line for line, _ in result.notes] == [2]


def test_another_backend_has_a_note():
    text = 'import os\nos.environ["KERAS_BACKEND"] = "jax"\n' + HEAD + "model.fit(x, y)\n"
    assert [line for line, _ in converted(text).notes] == [2]


def test_the_import_stands_once_below_the_docstring():
    text = converted(f'"""Trains."""\n# A comment.\nx = 1\n{HEAD}model.fit(x, y)\n').text
    assert text.splitlines()[1] == "import tfdist_cli as tfdist"
    again = converted("import tfdist_cli as tfdist\n" + HEAD + "model.fit(x, y)\n").text
    assert again.count("import tfdist_cli") == 1


def test_a_file_without_a_last_newline_and_with_carriage_returns():
    text = converted((HEAD + "model.fit(x, y)").replace("\n", "\r\n")).text
    assert fit_of(text) == "tfdist.fit(model, x, y)"


@pytest.mark.parametrize(
    ("text", "code"),
    [("def f(:", "script-syntax-error"), ("print(1)\n", "no-fit-call"), ("scaler.fit(x)\n", "no-fit-call")],
)
def test_a_script_that_cannot_be_converted(text, code):
    with raises(UsageError, code):
        converted(text)


@pytest.mark.tensorflow
@pytest.mark.slow
def test_the_arguments_are_those_of_both_fits():
    keras = pytest.importorskip("keras")
    arguments = list(inspect.signature(keras.Model.fit).parameters)[1:]
    assert list(inspect.signature(tfdist.fit).parameters)[1 : 1 + len(arguments)] == arguments
