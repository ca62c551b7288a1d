"""Tests of reading clicks in Criteo's format from plain and gzipped files, and of malformed lines."""

import gzip
import math
import uuid

import numpy as np
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli.datasets import criteo
from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.storage.remote import RemoteFolder

pytestmark = pytest.mark.slow

ROWS = 1_000


def line(label="0", numbers=("",) * 13, categories=("",) * 26):
    return "\t".join([label, *numbers, *categories])


def numbered(number):
    """Returns a line that its first number identifies."""
    return line(str(number % 2), (str(number), *["7"] * 12), [f"{number * 26 + c:08x}" for c in range(26)])


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes lines to a file, gzipped if its name ends so."""

    def write_lines(name, lines, end="\n"):
        path = tmp_path / name
        data = "".join(one + end for one in lines).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write_lines


def arrays(dataset):
    """Returns all numbers, categories and labels."""
    x, y = next(dataset.batch(10_000).as_numpy_iterator())
    return x["numbers"], x["categories"], y


def first_numbers(dataset):
    """Returns the first number of each line, as written in the file."""
    return np.expm1(arrays(dataset)[0][:, 0]).round().astype(int).tolist()


def test_the_structure_of_examples(write):
    path = write("train.txt", [numbered(number) for number in range(5)])
    x, y = criteo.read(path, ROWS).element_spec
    assert x == {"numbers": tf.TensorSpec((13,), tf.float32), "categories": tf.TensorSpec((26,), tf.int64)}
    assert y == tf.TensorSpec((), tf.float32)
    numbers, categories, labels = arrays(criteo.read(path, ROWS))
    assert (numbers.shape, categories.shape) == ((5, 13), (5, 26))
    np.testing.assert_array_equal(labels, [0, 1, 0, 1, 0])


def test_numbers_that_are_negative_or_missing(write):
    given = ["0", "1", "-1", "-3", "", "2147483647", "12", *[""] * 6]
    numbers, _, _ = arrays(criteo.read(write("train.txt", [line("1", given)]), ROWS))
    expected = [0, math.log(2), 0, 0, -1, math.log1p(2147483647), math.log(13), *[-1] * 6]
    np.testing.assert_allclose(numbers[0], expected, rtol=1e-6)


def test_a_missing_category_has_its_own_row(write):
    texts = [f"{number:08x}" for number in range(26 * 40)]
    lines = [line(categories=texts[first : first + 26]) for first in range(0, len(texts), 26)]
    _, categories, _ = arrays(criteo.read(write("train.txt", [line(), *lines]), 50))
    np.testing.assert_array_equal(categories[0], np.arange(26))
    assert set(categories[1:].ravel()) == set(range(26, 50))


def test_the_same_text_in_another_column_has_another_id(write):
    _, categories, _ = arrays(criteo.read(write("train.txt", [line(categories=["68fd1e64"] * 26)] * 2), 10_000_000))
    assert len(set(categories[0])) == 26
    np.testing.assert_array_equal(categories[0], categories[1])


def test_ids_are_stable(write):
    """A trained embedding table is useful only with the same ids."""
    _, categories, _ = arrays(
        criteo.read(write("train.txt", [line(categories=["68fd1e64", "80e26c9b", *[""] * 24])]), 1_000_000)
    )
    assert categories[0, :2].tolist() == [937_849, 290_489]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_files_of_each_kind_are_read_equally(write, name, end):
    lines = [numbered(number) for number in range(2_500)]
    expected = criteo.from_lines([one.encode() for one in lines], ROWS)
    found = criteo.read(write(name, lines, end), ROWS)
    for array, known in zip(arrays(found), arrays(expected), strict=True):
        np.testing.assert_array_equal(array, known)


def test_lines_in_memory_have_a_length():
    lines = [numbered(number).encode() for number in range(10)]
    shards = [criteo.from_lines(lines, ROWS, index=index, count=4) for index in range(4)]
    assert [int(shard.cardinality()) for shard in shards] == [3, 3, 2, 2]
    assert [first_numbers(shard) for shard in shards] == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert int(criteo.from_lines([], ROWS).cardinality()) == 0


def test_one_file_is_sharded_by_lines(write):
    path = write("train.txt", [numbered(number) for number in range(3_001)])
    shards = [first_numbers(criteo.read(path, ROWS, index=index, count=2)) for index in range(2)]
    assert shards == [list(range(0, 3_001, 2)), list(range(1, 3_001, 2))]


def test_several_files_are_sharded_by_file(write, tmp_path):
    for day in range(3):
        write(f"day_{day}.gz", [numbered(10 * day + number) for number in range(2)])
    shards = [first_numbers(criteo.read(tmp_path / "day_*", ROWS, index=index, count=2)) for index in range(2)]
    assert shards == [[0, 1, 20, 21], [10, 11]]


def test_files_in_a_storage_service(write):
    folder = RemoteFolder(Url(f"memory://{uuid.uuid4()}"))
    for day, name in enumerate(("day_0", "day_1.gz", "day_2")):
        folder.write(name, write(name, [numbered(10 * day + number) for number in range(2)]).read_bytes())
    shards = [first_numbers(criteo.read(folder.url / "day_*", ROWS, index=index, count=2)) for index in range(2)]
    assert shards == [[0, 1, 20, 21], [10, 11]]
    folder.write("bad", b"1\t2\n")
    with raises(TrainingError, "data-malformed"):
        criteo.read(folder.url / "bad", ROWS)


def test_a_list_of_files_and_patterns_keeps_its_order(write, tmp_path):
    for name in ("b1", "b0", "a"):
        write(name, [numbered(0)])
    assert [path.name for path in criteo.find([tmp_path / "b*", str(tmp_path / "a")])] == ["b0", "b1", "a"]


def test_the_home_folder(write, tmp_path, monkeypatch):
    path = write("train.txt", [numbered(0)])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert criteo.find("~/train.txt") == [path]
    assert criteo.find("~/train*") == [path]


def test_a_name_that_looks_like_a_pattern(write):
    path = write("day[0].txt", [numbered(0)])
    assert criteo.find(path) == [path]


@pytest.mark.parametrize("files", ["absent.txt", "absent_*"])
def test_no_such_file(tmp_path, files):
    with raises(UsageError, "no-such-file"):
        criteo.read(tmp_path / files, ROWS)


def test_an_empty_list_of_files():
    with raises(UsageError, "invalid-argument"):
        criteo.read([], ROWS)


def test_too_few_rows(write):
    with raises(UsageError, "invalid-argument"):
        criteo.read(write("train.txt", [numbered(0)]), 26)


@pytest.mark.parametrize(
    ("content", "named", "hint"),
    [
        (b"", "empty", "13 integers"),
        (b"a,b,c\n", "line 1, has 1 columns", "13 integers"),
        (line().partition("\t")[2].encode(), "line 1, has 39 columns", "train.txt"),
    ],
)
def test_a_file_with_a_malformed_first_line_is_refused_at_once(tmp_path, content, named, hint):
    path = tmp_path / "train.txt"
    path.write_bytes(content)
    with raises(TrainingError, "data-malformed") as caught:
        criteo.read(path, ROWS)
    assert str(path) in caught.value.message
    assert named in caught.value.message
    assert hint in str(caught.value.hint)


def test_a_truncated_gzip_file(tmp_path):
    path = tmp_path / "train.gz"
    path.write_bytes(gzip.compress(numbered(0).encode())[:15])
    with raises(TrainingError, "unreadable-file") as caught:
        criteo.read(path, ROWS)
    assert str(path) in caught.value.message


@pytest.mark.rotates(5)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (line() + "\t", "41 columns"),
        ("", "[01] columns"),
        (line("2"), "label `2`"),
        (line(""), "label ``"),
        (line("1", ["1", "x", *[""] * 11]), "`x` in column 3,"),
        (line("1", [*[""] * 12, "1.5"]), "`1.5` in column 14,"),
    ],
    ids=["too_many", "blank", "label", "no_label", "no_number", "no_integer"],
)
def test_a_broken_line_is_named(write, count, broken, named):
    lines = [numbered(number) for number in range(2_600)]  # parsed in three batches, or two
    lines[2_501] = broken
    path = write("train.txt", lines)
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"{path}, line 2502, .*{named}"):
        list(criteo.read(path, ROWS, index=1 % count, count=count).batch(3_000))
