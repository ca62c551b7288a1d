"""The data that all programs read."""

import numpy as np
import pytest

from benchmarks.data import TARGET, fields, write
from benchmarks.sizes import BATCHES, SIZES

SMALL = ("mlp", "transformer", "two_tower", "wide_deep", "table_8")


@pytest.mark.parametrize("key", SMALL)
def test_every_field_has_all_examples_and_is_the_same_each_time(key, tmp_path):
    size, folders = SIZES[key], (tmp_path / "first", tmp_path / "second")
    for folder in folders:
        folder.mkdir()
        write(folder, size)
    for name, (dtype, shape) in fields(size).items():
        values = np.fromfile(folders[0] / name, dtype)
        assert values.size == BATCHES * size.batch * int(np.prod(shape))
        assert (folders[1] / name).read_bytes() == (folders[0] / name).read_bytes()
    assert list(fields(size))[-1] == TARGET


def test_ids_are_rows_of_their_tables_and_few_are_frequent(tmp_path):
    size = SIZES["two_tower"]
    write(tmp_path, size)
    for name, rows in zip(("user", "item"), size.rows, strict=True):
        ids = np.fromfile(tmp_path / name, "int32")
        assert 0 <= ids.min() < ids.max() < rows
        counts = np.sort(np.unique(ids, return_counts=True)[1])[::-1]
        assert counts[:100].sum() > 0.3 * len(ids)  # of 300,000 rows, or 100,000
