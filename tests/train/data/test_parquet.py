"""Rows of Parquet files as examples."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tfdist_cli.train.data.length import cardinality
from tfdist_cli.train.data.parquet import read_parquet
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.tf_compat.data import calls_python

pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'tfdist-cli[parquet]'")
from pyarrow import parquet  # noqa: E402 it is an extra

pytestmark = pytest.mark.slow

ROWS = 10_000
COLUMNS = {
    "id": np.arange(ROWS),
    "x": np.random.default_rng(0).random((ROWS, 3), np.float32),
    "yes": np.arange(ROWS) % 3 == 0,
    "small": (np.arange(ROWS) % 200 - 100).astype(np.int8),
}


@pytest.fixture
def folder(tmp_path):
    for number, (start, end) in enumerate([(0, 6000), (6000, ROWS)]):
        part = {name: list(values[start:end]) for name, values in COLUMNS.items()}
        types = {"id": pyarrow.int64(), "x": pyarrow.list_(pyarrow.float32()), "yes": pyarrow.bool_()}
        types["small"] = pyarrow.int8()
        table = pyarrow.table({name: pyarrow.array(values, types[name]) for name, values in part.items()})
        parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=2500)
    return tmp_path


def test_rows_are_examples(folder):
    dataset = read_parquet(folder / "*.parquet", list(COLUMNS))
    (batch,) = dataset.batch(ROWS)
    for name, values in COLUMNS.items():
        np.testing.assert_array_equal(batch[name], values)
    assert batch["id"].dtype == tf.int64
    assert dataset.element_spec["x"].shape == (3,)


def test_shards_divide_the_rows(folder):
    shards = [tfdist.read_parquet(folder / "*.parquet", ["id"], Shard(index, 3)) for index in range(3)]
    found = [[int(row["id"]) for row in shard] for shard in shards]
    assert list(itertools.chain(*found)) == list(range(ROWS))
    assert [cardinality(shard) for shard in shards] == list(map(len, found))


def test_any_task_can_read_them(folder):
    assert not calls_python(read_parquet(folder / "*.parquet", ["id"]))


def test_empty_values_are_an_error(folder):
    parquet.write_table(pyarrow.table({"id": [1, None]}), folder / "a.parquet", write_statistics=False)
    with pytest.raises(tf.errors.OpError, match="empty values"):
        list(read_parquet(folder / "a.parquet", ["id"]))
