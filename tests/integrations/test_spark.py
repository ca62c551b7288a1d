"""Trainings on DataFrames: what is refused before anything starts."""

from types import SimpleNamespace

import pytest

import tfdist_cli as tfdist
from tests.support.codes import raises
from tfdist_cli.errors import UsageError

sql = pytest.importorskip("pyspark.sql", reason="needs pyspark: pip install 'tfdist-cli[spark]'")
COLUMNS = {"features": ["a"], "label": "y"}


def of_connect(*bases):
    """An object of Spark Connect."""
    return type("Connect", bases, {"__module__": "pyspark.sql.connect.some", "__init__": lambda self: None})


@pytest.mark.parametrize("bases", [(), (sql.DataFrame,)], ids=["3.5", "4"])
def test_dataframes_of_spark_connect_are_refused(bases, tmp_path):
    frame = object.__new__(of_connect(*bases))
    with raises(UsageError, "spark-connect"):
        tfdist.spark.fit("m:f", frame, **COLUMNS, store=tmp_path)
    with raises(UsageError, "spark-connect"):
        tfdist.spark.KerasModel()._transform(frame)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("validation_data", [None, "rows"])
def test_a_session_of_spark_connect_is_refused(validation_data, tmp_path, monkeypatch):
    builder = SimpleNamespace(getOrCreate=of_connect())
    monkeypatch.setattr("tfdist_cli.integrations.spark.training.SparkSession", SimpleNamespace(builder=builder))
    with raises(UsageError, "spark-connect"):
        tfdist.spark.fit("m:f", "rows", **COLUMNS, validation_data=validation_data, store=tmp_path)


def test_other_tables_are_refused(tmp_path):
    with raises(UsageError, "not-a-dataframe"):
        tfdist.spark.fit("m:f", [1, 2], **COLUMNS, store=tmp_path)
