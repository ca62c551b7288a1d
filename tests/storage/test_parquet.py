"""Columns, pieces and bytes of Parquet files, as footers and rows tell them."""

import itertools

import numpy as np
import pytest

from tests.support.codes import raises
from tfdist_cli.errors import UsageError
from tfdist_cli.storage.parquet import Column, ParquetTable, Piece

pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'tfdist-cli[parquet]'")
from pyarrow import parquet  # noqa: E402 it is an extra


@pytest.fixture
def files(tmp_path):
    def write(*parts, rows=3, **options):
        for number, columns in enumerate(parts):
            parquet.write_table(pyarrow.table(columns), tmp_path / f"{number}.parquet", row_group_size=rows, **options)
        return [str(tmp_path / f"{number}.parquet") for number in range(len(parts))]

    return write


def ids(pieces):
    """The numbers of the column `id` of some pieces."""
    return [number for piece in pieces for chunk in piece.rows() for number in chunk.view(np.int64)[:, 0].tolist()]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 20])
@pytest.mark.parametrize("sizes", [[10], [4, 0, 7], [1, 1, 1]])
def test_each_row_is_in_one_part(files, sizes, count):
    starts = np.cumsum([0, *sizes])
    names = files(*({"id": pyarrow.array(range(a, b), pyarrow.int64())} for a, b in itertools.pairwise(starts)))
    table = ParquetTable.of(names, ["id"])
    parts = [ids(Piece.of_text(piece.as_text()) for piece in table.part(index, count)) for index in range(count)]
    assert [number for part in parts for number in part] == list(range(sum(sizes)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_only_the_row_groups_of_a_part_are_read(files):
    names = files({"id": list(range(9))}, {"id": list(range(9, 12))})
    (first,) = ParquetTable.of(names, ["id"]).part(1, 4)
    assert (first.groups, first.start, first.stop) == ((1,), 0, 3)


def test_columns_and_their_bytes(files):
    columns = {
        "fixed": pyarrow.array([[1, 2, 3], [4, 5, 6]], pyarrow.list_(pyarrow.int32(), 3)),
        "tensor": pyarrow.ExtensionArray.from_storage(
            pyarrow.fixed_shape_tensor(pyarrow.float32(), [2]),
            pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.float32(), 2)),
        ),
        "yes": pyarrow.array([True, False]),
        "list": pyarrow.array([[1.0, 2.0], [3.0, 4.0]]),
        "half": pyarrow.array(np.array([0.5, -1], np.float16)),
        "small": pyarrow.array([1, -2], pyarrow.int8()),
    }
    expected = (
        Column("fixed", "int32", 3),
        Column("tensor", "float32", 2),
        Column("yes", "bool", None),
        Column("list", "float64", 2),
        Column("half", "float16", None),
        Column("small", "int8", None),
    )
    table = ParquetTable.of(files(columns), list(columns))
    assert table.columns == expected
    (piece,) = table.part(0, 1)
    (rows,) = piece.rows()
    arrays = [np.array(columns[column.name].to_pylist(), column.dtype) for column in expected]
    assert rows.tobytes() == b"".join(array[row].tobytes() for row in range(2) for array in arrays)


@pytest.mark.parametrize("nested", [False, True])
def test_a_column_whose_name_begins_like_another_ones(nested, files):
    """Paths in a file are names with dots: those of a column's parts, and of other columns."""
    parts = [{"x": {"y": 0.5, "z": [1, 2]}, "w": None}, {"x": {"y": None, "z": []}, "w": {"k": 1}}]
    kind = pyarrow.struct(
        [
            ("x", pyarrow.struct([("y", pyarrow.float32()), ("z", pyarrow.large_list(pyarrow.int8()))])),
            ("w", pyarrow.map_(pyarrow.string(), pyarrow.int16())),
        ]
    )
    columns = {
        **({"before": pyarrow.array(parts, kind)} if nested else {}),
        "price.old": [None, 1.0],
        "emb.norm": [1.0, 2.0],
        "price": [1.0, 2.0],
        "emb": [[1, 2, 3], [4, 5, 6]],
        "emb.list": [[1], [2]],
    }
    table = ParquetTable.of(files(columns), ["price", "emb", "emb.norm"])
    assert [column.width for column in table.columns] == [None, 3, None]
    (rows,) = table.part(0, 1)[0].rows()
    prices = np.array([[1.0], [2.0]])
    numbers = np.array([[1, 2, 3], [4, 5, 6]])
    assert rows.tobytes() == np.hstack([each.view(np.uint8) for each in (prices, numbers, prices)]).tobytes()
    with raises(UsageError, "empty-values"):
        ParquetTable.of(files(columns), ["price.old"])


@pytest.mark.parametrize(
    ("values", "code"),
    [
        (["a", "b"], "column-not-numbers"),
        ([[["a"]], [["b"]]], "column-not-numbers"),
        ([None, 1], "empty-values"),
        ([None, None], "empty-values"),
        ([[1, None], [2, 3]], "empty-values"),
        ([None, [2, 3]], "empty-values"),
        ([[1], [2, 3]], "unequal-lists"),
        ([[1], []], "empty-values"),
        ([[], []], "empty-lists"),
        (pyarrow.array([], pyarrow.int64()), "no-rows"),
    ],
)
def test_values_that_are_no_numbers(files, values, code):
    with raises(UsageError, code):
        ParquetTable.of(files({"a": values}), ["a"])


@pytest.mark.parametrize("values", [[None, 1.0], [None, [2, 3]], [[1, None], [2, 3]], [[1], [2, 3, 4]], [[], [1, 2]]])
def test_files_without_statistics_are_checked_as_they_are_read(files, values):
    names = files({"a": values}, write_statistics=False)
    with pytest.raises((ValueError, UsageError)):  # noqa: PT012 either when the footers or when the rows are read
        for piece in ParquetTable.of(names, ["a"]).part(0, 1):
            list(piece.rows())


def test_files_that_differ(files):
    with raises(UsageError, "unequal-columns"):
        ParquetTable.of(files({"a": [1]}, {"a": [1.0]}), ["a"])
    with raises(UsageError, "unequal-lists"):
        ParquetTable.of(files({"a": [[1]]}, {"a": [[1, 2]]}), ["a"])
    with raises(UsageError, "unequal-columns"):
        ParquetTable.of(files({"a": [1]}, {"a": [[1]]}), ["a"])


def test_files_that_cannot_be_read(files, tmp_path):
    with raises(UsageError, "no-such-column"):
        ParquetTable.of(files({"a": [1]}), ["b"])
    with raises(UsageError, "unreadable-file"):
        ParquetTable.of([str(tmp_path / "none.parquet")], ["a"])
    (tmp_path / "text.parquet").write_text("text")
    with raises(UsageError, "invalid-parquet"):
        ParquetTable.of([str(tmp_path / "text.parquet")], ["a"])


def test_a_file_that_was_replaced_is_read_again(files):
    assert ParquetTable.of(files({"a": [1]}), ["a"]).rows == 1
    assert ParquetTable.of(files({"a": [1, 2]}), ["a"]).rows == 2
