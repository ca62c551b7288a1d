"""Inputs of models from columns, and predictions as columns."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tests.support.table_models import not_compiled
from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.task import table_recipe
from tfdist_cli.task.table_prediction import batch_predictor, with_predictions
from tfdist_cli.train.data.shard import Shard

pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'tfdist-cli[parquet]'")
from pyarrow import parquet  # noqa: E402 it is an extra

pytestmark = pytest.mark.slow

TABLE = pyarrow.table({"a": [1.0, 2.0], "n": [3, 4], "v": [[5, 6], [7, 8]], "y": [0, 1]})


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (["n", "v"], np.array([[3, 5, 6], [4, 7, 8]], np.int64)),
        (["v", "a"], np.array([[5, 6, 1], [7, 8, 2]], np.float32)),
        ({"x": ["n"], "z": ["a"]}, {"x": np.array([[3], [4]]), "z": np.array([[1], [2]], np.float32)}),
    ],
)
def test_inputs_of_examples_and_of_batches(features, expected, tmp_path):
    parquet.write_table(TABLE, tmp_path / "0.parquet")
    params = {"data": {"train": str(tmp_path / "*.parquet")}, "features": features, "label": "y"}
    ((x, y),) = table_recipe.dataset(params, "train", Shard()).batch(2)
    columns = {name: np.array(TABLE[name].to_pylist()) for name in table_recipe.feature_columns(features)}
    columns = {name: array.astype(np.float64 if name == "a" else np.int64) for name, array in columns.items()}
    for found in (x, table_recipe.inputs(columns, features, rank=1)):
        tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
        tf.nest.map_structure(lambda got, want: np.testing.assert_equal(got.dtype, want.dtype), found, expected)
    assert y.numpy().tolist() == [0, 1]


def model(name, folder=None, **arguments):
    return table_recipe.model({"model": name, "folder": folder, "arguments": arguments})


@pytest.mark.parametrize("name", ["builtins:dict", "tests.support.table_models:not_compiled"])
def test_a_model_has_to_be_compiled(name):
    with raises(TrainingError, "not-a-compiled-model"):
        model(name)


def test_the_function_gets_its_arguments():
    made = model("tests.support.table_models:Models.four", units=5)
    assert made.layers[0].units == 5


def test_the_function_is_imported_from_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "models_of_a_user.py").write_text("import tests.support.table_models as m\nbuild = m.four_classes\n")
    assert model("models_of_a_user:build", str(tmp_path)).compiled


@pytest.mark.parametrize(
    "name", ["nowhere:build", "tests.support.table_models:none", "tests.support.table_models:__name__"]
)
def test_functions_that_are_not_there(name):
    with raises(UsageError, "no-such-module"):
        model(name)


@pytest.fixture
def predict(tmp_path):
    not_compiled().save(tmp_path / "m.keras")
    return batch_predictor((tmp_path / "m.keras").read_bytes(), ["v", "a"])


@pytest.mark.parametrize(("kind", "column"), [("array", [[12.0, 12.0], [17.0, 17.0]]), ("class", [0.0, 0.0])])
def test_predictions_are_a_column(predict, kind, column):
    (batch,) = TABLE.to_batches()
    found = with_predictions(batch.select(["n"]), predict(batch), kind, "p")
    assert found.schema.names == ["n", "p"]
    assert found.column("p").to_pylist() == column


def test_outputs_that_are_no_value(predict):
    (batch,) = TABLE.to_batches()
    with raises(UsageError, "several-outputs"):
        with_predictions(batch, predict(batch), "value", "p")


@pytest.mark.parametrize(
    ("values", "code"),
    [([None, [1, 2]], "empty-values"), ([[1], [2, 3]], "unequal-lists"), ([[1, None], [2, 3]], "empty-values")],
)
def test_rows_that_cannot_be_predicted(predict, values, code):
    (batch,) = pyarrow.table({"a": [1.0, 2.0], "v": values}).to_batches()
    with raises(UsageError, code):
        predict(batch)
