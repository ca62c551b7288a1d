"""Clicks in the line format of Criteo's display advertising data, as a `tf.data.Dataset` of single examples.

A line has 40 columns, separated by tabs: the label, 1 for a click and 0 for none; 13 integers, some of them negative;
and 26 categories of 8 hexadecimal digits. A missing integer or category is empty.
"""

from __future__ import annotations

import glob
import gzip
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.spec.path_scheme import Location, Url, checked_location
from tfdist_cli.storage.remote_file import open_location
from tfdist_cli.train.data.files import list_files, read_lines

NUMBERS = 13
CATEGORIES = 26
COLUMNS = 1 + NUMBERS + CATEGORIES
MISSING_NUMBER = -1.0
"""The number for a missing integer. It is less than any other number, so that a model can distinguish it from 0."""
_PARSE_BATCH = 1024
"""Lines that are parsed together: enough that the overhead of each op does not matter."""
_LONG_LINE = 1 << 16
_GZIP = b"\x1f\x8b"
_FORMAT = f"a line is a label, {NUMBERS} integers and {CATEGORIES} categories, separated by tabs"
_UNLABELLED = "the file may be Kaggle's test.txt, which has no labels: use a part of train.txt instead"

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def read(files: Files, rows: int, *, index: int = 0, count: int = 1) -> tf.data.Dataset:
    """Reads the examples of a shard from files, plain or gzipped.

    If there are at least as many files as shards, a shard is every `count`-th file; otherwise, every `count`-th line.

    Args:
        files: a path, a pattern such as `clicks/day_*.gz`, or a list of these. A leading `~` is the home folder. The
            files have the same path on the chief and on every worker. Also in a storage service: `s3://bucket/day_*`.
        rows: the rows of the embedding table that the categories' ids refer to.
        index: the shard's index, from 0.
        count: the number of shards.

    Returns:
        A dataset of `({"numbers": float32 (13,), "categories": int64 (26,)}, label float32 ())`, of unknown length.

        A number is log(1 + max(integer, 0)), or −1 if the integer is missing. The id of a missing category is the
        number of its column, from 0. The id of any other category is a hash of column and text, from 26 to `rows` − 1.

        At a malformed line, its iterator raises `tf.errors.InvalidArgumentError` with the file and the line. A category
        may be any text.

    Raises:
        UsageError: there is no such file, or `rows` is too small.
        TrainingError: a file cannot be read, is empty, or its first line is malformed.
    """
    _check_rows(rows)
    paths = find(files)
    gzipped = [_check_first_line(path) for path in paths]
    by_file, remote = len(paths) >= count, any(isinstance(path, Url) for path in paths)
    if by_file:
        paths, gzipped = paths[index::count], gzipped[index::count]

    def of_file(path: tf.Tensor, compression: tf.Tensor) -> tf.data.Dataset:
        lines = read_lines(path) if remote else tf.data.TextLineDataset(path, compression)
        if by_file:
            return _parsed(lines, rows, path, 0, 1)
        return _parsed(lines.shard(count, index), rows, path, index, count)

    compressions = ["GZIP" if each else "" for each in gzipped]
    return tf.data.Dataset.from_tensor_slices(([str(path) for path in paths], compressions)).flat_map(of_file)


def from_lines(
    lines: Sequence[bytes], rows: int, *, index: int = 0, count: int = 1, name: str = "lines"
) -> tf.data.Dataset:
    """Returns the examples of a shard from lines in memory: every `count`-th line.

    Args:
        lines: without line ends.
        rows: the rows of the embedding table.
        index: the shard's index, from 0.
        count: the number of shards.
        name: the name of the lines in error messages.

    Returns:
        A dataset like that of `read`, of known length.

    Raises:
        UsageError: `rows` is too small.
    """
    _check_rows(rows)
    own = lines[index::count]
    slices = tf.data.Dataset.from_tensor_slices(tf.constant(own, tf.string, shape=[len(own)]))
    examples = _parsed(slices, rows, tf.constant(name), index, count)
    return examples.apply(tf.data.experimental.assert_cardinality(len(own)))


def find(files: Files) -> list[Location]:
    """Returns the files that paths and patterns match; those of a pattern are sorted by name.

    Raises:
        UsageError: one matches no file.
    """
    given = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    if not given:
        raise UsageError(
            "the list of files is empty",
            code="invalid-argument",
            hint="give a file of clicks, or a pattern such as clicks/day_*",
        )
    found: list[Location] = []
    for one in given:
        at = checked_location(os.fspath(one))
        if isinstance(at, Url):
            found += map(Url, list_files(at))
            continue
        path = at.expanduser()
        matches = [path] if path.is_file() else [Path(match) for match in sorted(glob.glob(str(path)))]  # noqa: PTH207 - Path.glob refuses absolute patterns
        matches = [match for match in matches if match.is_file()]
        if not matches:
            raise UsageError(
                f"there is no file {path}",
                code="no-such-file",
                hint=f"give a file of clicks, or a pattern that matches several: {_FORMAT}",
            )
        found += matches
    return found


def _check_rows(rows: int) -> None:
    if rows <= CATEGORIES:
        raise UsageError(
            f"rows must be more than {CATEGORIES}, since each column has a row for missing categories, got {rows}",
            code="invalid-argument",
            hint="use several times as many rows as there are categories, such as 100000",
        )


def _check_first_line(path: Location) -> bool:
    """Checks the first line of a file, before the training starts. Returns whether the file is gzipped.

    Raises:
        TrainingError: the file cannot be read, is empty, or its first line is malformed.
    """
    try:
        with open_location(path) as file:
            gzipped = file.read(2) == _GZIP
            file.seek(0)
            first = (gzip.GzipFile(fileobj=file) if gzipped else file).readline(_LONG_LINE)
    except (OSError, EOFError, zlib.error) as error:
        raise TrainingError(f"{path} cannot be read: {error}", code="unreadable-file") from error
    if not first:
        raise TrainingError(f"{path} is empty", code="data-malformed", hint=_FORMAT)
    columns = first.count(b"\t") + 1
    if columns != COLUMNS:
        raise TrainingError(
            f"{path}, line 1, has {columns} columns, expected {COLUMNS}",
            code="data-malformed",
            hint=_UNLABELLED if columns == COLUMNS - 1 else _FORMAT,
        )
    return gzipped


def _parsed(lines: tf.data.Dataset, rows: int, name: tf.Tensor, index: int, count: int) -> tf.data.Dataset:
    """Parses every `count`-th line, from line `index` on."""

    def parse(batch: tf.Tensor, texts: tf.Tensor) -> Any:
        number = batch * _PARSE_BATCH + tf.range(tf.size(texts, tf.int64), dtype=tf.int64)
        return _parse(texts, rows, name, number * count + index + 1)

    batches = lines.batch(_PARSE_BATCH).enumerate()
    return batches.map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).unbatch()


def _parse(texts: tf.Tensor, rows: int, name: tf.Tensor, numbers: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Parses lines.

    Args:
        texts: the lines, string, shape (n,).
        rows: the rows of the embedding table.
        name: the file, string, shape ().
        numbers: the lines' numbers in the file, int64, shape (n,).
    """
    ragged = tf.strings.split(texts, "\t")
    widths = ragged.row_lengths()

    # The messages quote with `, since TensorFlow puts a backslash before other quotation marks.
    def check(good: tf.Tensor, fault: Any) -> tf.Operation:
        first = tf.argmin(tf.cast(good, tf.int8))
        message = tf.strings.join([name, ", line ", tf.strings.as_string(numbers[first]), ", ", fault(first)])
        return tf.debugging.Assert(tf.reduce_all(good), [message])

    def width(line: tf.Tensor) -> tf.Tensor:
        return tf.strings.join(["has ", tf.strings.as_string(widths[line]), f" columns, expected {COLUMNS}"])

    with tf.control_dependencies([check(tf.equal(widths, COLUMNS), width)]):
        fields = tf.reshape(ragged.flat_values, [-1, COLUMNS])
    labels, integers, categories = fields[:, 0], fields[:, 1 : 1 + NUMBERS], fields[:, 1 + NUMBERS :]
    are_labels = tf.strings.regex_full_match(labels, "[01]")
    are_integers = tf.strings.regex_full_match(integers, "-?[0-9]+|")

    def label(line: tf.Tensor) -> tf.Tensor:
        return tf.strings.join(["has the label `", labels[line], "`, expected 0 or 1"])

    def integer(line: tf.Tensor) -> tf.Tensor:
        column = tf.argmin(tf.cast(are_integers[line], tf.int8))
        return tf.strings.join(
            ["has `", integers[line, column], "` in column ", tf.strings.as_string(column + 2), ", expected an integer"]
        )

    with tf.control_dependencies([check(are_labels, label), check(tf.reduce_all(are_integers, axis=1), integer)]):
        features = {"numbers": _numbers(tf.identity(integers)), "categories": _ids(categories, rows)}
        return features, tf.strings.to_number(tf.identity(labels))


def _numbers(integers: tf.Tensor) -> tf.Tensor:
    missing = tf.equal(integers, "")
    known = tf.strings.to_number(tf.where(missing, "0", integers))
    return tf.where(missing, MISSING_NUMBER, tf.math.log1p(tf.maximum(known, 0.0)))


def _ids(categories: tf.Tensor, rows: int) -> tf.Tensor:
    """Returns the categories' ids in one table for all columns; its first rows are for missing categories."""
    columns = tf.range(CATEGORIES, dtype=tf.int64)
    # The same text has another meaning in another column, so the column's number is hashed with it.
    hashed = tf.strings.to_hash_bucket_fast(tf.strings.as_string(columns) + ":" + categories, rows - CATEGORIES)
    return tf.where(tf.equal(categories, ""), columns, hashed + CATEGORIES)
