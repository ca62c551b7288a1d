"""Clicks in the line format of Criteo's display advertising data, as a `tf.data.Dataset` of single examples.

A line has 40 columns with a tab between two of them: the label, 1 for a click and 0 for none; 13 integers, some of them
negative; and 26 categories, 8 hexadecimal digits each. An integer or a category that is not known is empty.
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

NUMBERS = 13
CATEGORIES = 26
COLUMNS = 1 + NUMBERS + CATEGORIES
MISSING_NUMBER = -1.0
"""Below the logarithm of every integer that is known, so that a model can tell it from a zero."""
_AT_ONCE = 1024
"""Lines that are parsed together: enough that starting an operation costs nothing beside its work."""
_LONG_LINE = 1 << 16
_GZIP = b"\x1f\x8b"
_FORM = f"a line is a label, {NUMBERS} integers and {CATEGORIES} categories, with tabs between them"
_UNLABELLED = "it may be Kaggle's test.txt, which has no labels: hold out a part of train.txt instead"

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def read(files: Files, rows: int, *, index: int = 0, count: int = 1) -> tf.data.Dataset:
    """Reads the examples of a shard from files, plain or gzipped.

    Where there are at least as many files as shards, a shard is every `count`-th file; else every `count`-th line.

    Args:
        files: a path, a pattern such as `clicks/day_*.gz`, or a list of these. A leading `~` is the home folder. The
            chief and every worker find them at the same path.
        rows: the rows of the embedding table that the categories' ids are for.
        index: which shard, from 0.
        count: how many shards there are.

    Returns:
        A dataset of `({"numbers": float32 (13,), "categories": int64 (26,)}, label float32 ())`, of unknown length.

        A number is log(1 + max(integer, 0)), and −1 where it is missing. A category's id is `c`, its column's number
        from 0, where it is missing; else it is 26 or more, below `rows`, by a hash of column and text.

        Its iterator fails with `tf.errors.InvalidArgumentError`, which names file and line, at a line that is not as
        said above. Any text is taken for a category.

    Raises:
        UsageError: there is no such file, or `rows` is too small.
        TrainingError: a file cannot be read, is empty, or does not begin with such a line.
    """
    _check_rows(rows)
    paths = find(files)
    packed = [_check_beginning(path) for path in paths]
    whole = len(paths) >= count
    if whole:
        paths, packed = paths[index::count], packed[index::count]

    def of_file(path: tf.Tensor, compression: tf.Tensor) -> tf.data.Dataset:
        lines = tf.data.TextLineDataset(path, compression)
        if whole:
            return _parsed(lines, rows, path, 0, 1)
        return _parsed(lines.shard(count, index), rows, path, index, count)

    compressions = ["GZIP" if gzipped else "" for gzipped in packed]
    return tf.data.Dataset.from_tensor_slices(([str(path) for path in paths], compressions)).flat_map(of_file)


def from_lines(
    lines: Sequence[bytes], rows: int, *, index: int = 0, count: int = 1, name: str = "lines"
) -> tf.data.Dataset:
    """The same examples from lines in memory, every `count`-th of them; their number is known.

    Args:
        lines: without the end of the line.
        rows: the rows of the embedding table.
        index: which shard, from 0.
        count: how many shards there are.
        name: what to call them where a line is at fault.

    Returns:
        As `read` does, with a length.

    Raises:
        UsageError: `rows` is too small.
    """
    _check_rows(rows)
    own = lines[index::count]
    slices = tf.data.Dataset.from_tensor_slices(tf.constant(own, tf.string, shape=[len(own)]))
    examples = _parsed(slices, rows, tf.constant(name), index, count)
    return examples.apply(tf.data.experimental.assert_cardinality(len(own)))


def find(files: Files) -> list[Path]:
    """The files that paths and patterns stand for, those of a pattern sorted by name.

    Raises:
        UsageError: one stands for no file.
    """
    given = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    if not given:
        raise UsageError("the list of files is empty", hint="name a file of clicks, or a pattern such as clicks/day_*")
    found: list[Path] = []
    for one in given:
        path = Path(one).expanduser()
        matches = [path] if path.is_file() else [Path(match) for match in sorted(glob.glob(str(path)))]  # noqa: PTH207 - Path.glob refuses absolute patterns
        matches = [match for match in matches if match.is_file()]
        if not matches:
            raise UsageError(f"no file at {path}", hint=f"name a file of clicks, or a pattern of several: {_FORM}")
        found += matches
    return found


def _check_rows(rows: int) -> None:
    if rows <= CATEGORIES:
        raise UsageError(
            f"{rows} rows are too few: each of the {CATEGORIES} columns has one for what is missing",
            hint="take some times as many rows as there are categories, 100000 or more",
        )


def _check_beginning(path: Path) -> bool:
    """Whether a file is gzipped; refuses one that does not begin as it should, before anything is started."""
    try:
        with path.open("rb") as file:
            gzipped = file.read(2) == _GZIP
        with gzip.open(path) if gzipped else path.open("rb") as file:
            first = file.readline(_LONG_LINE)
    except (OSError, EOFError, zlib.error) as error:
        raise TrainingError(f"{path} cannot be read: {error}") from error
    if not first:
        raise TrainingError(f"{path} is empty", hint=_FORM)
    columns = first.count(b"\t") + 1
    if columns != COLUMNS:
        raise TrainingError(
            f"{path}, line 1, has {columns} columns, expected {COLUMNS}",
            hint=_UNLABELLED if columns == COLUMNS - 1 else _FORM,
        )
    return gzipped


def _parsed(lines: tf.data.Dataset, rows: int, name: tf.Tensor, index: int, count: int) -> tf.data.Dataset:
    """Parses each `count`-th line of something, from its line `index` on."""

    def parse(batch: tf.Tensor, texts: tf.Tensor) -> Any:
        place = batch * _AT_ONCE + tf.range(tf.size(texts, tf.int64), dtype=tf.int64)
        return _parse(texts, rows, name, place * count + index + 1)

    batches = lines.batch(_AT_ONCE).enumerate()
    return batches.map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).unbatch()


def _parse(texts: tf.Tensor, rows: int, name: tf.Tensor, places: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Parses lines.

    Args:
        texts: the lines, string, shape (n,).
        rows: the rows of the embedding table.
        name: the file, string, shape ().
        places: each line's number in it, int64, shape (n,).
    """
    ragged = tf.strings.split(texts, "\t")
    widths = ragged.row_lengths()

    # TensorFlow would put a backslash before other quotation marks than `.
    def check(good: tf.Tensor, fault: Any) -> tf.Operation:
        first = tf.argmin(tf.cast(good, tf.int8))
        message = tf.strings.join([name, ", line ", tf.strings.as_string(places[first]), ", ", fault(first)])
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
    """Rows of one table for all columns, the first of which are for what is missing."""
    columns = tf.range(CATEGORIES, dtype=tf.int64)
    # The same text means something else in another column, so the column's number is part of what is hashed.
    hashed = tf.strings.to_hash_bucket_fast(tf.strings.as_string(columns) + ":" + categories, rows - CATEGORIES)
    return tf.where(tf.equal(categories, ""), columns, hashed + CATEGORIES)
