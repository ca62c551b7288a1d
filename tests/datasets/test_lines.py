"""Tests of lines of digits: their content, order and reproducibility."""

import hashlib
from itertools import pairwise

import numpy as np
import pytest

from tests.support.codes import raises
from tfdist_cli.datasets import digits, lines
from tfdist_cli.errors import UsageError

SIDE = 8


def known(split):
    """Returns the value of each digit of a split by its pixels."""
    images, values = digits.load(split)
    return {image.tobytes(): value for image, value in zip(images, values, strict=True)}


def squares_of(image):
    """Yields the top, left and pixels of each square of an image in which a digit could be, from left to right."""
    height, width = image.shape
    return [
        (top, left, np.ascontiguousarray(image[top : top + SIDE, left : left + SIDE]).tobytes())
        for left in range(width - SIDE + 1)
        for top in range(height - SIDE + 1)
    ]


def test_shapes_types_and_ranges():
    x, y = lines.load("train", count=50)
    assert (x.shape, x.dtype) == ((50, 12, 64, 1), np.float32)
    assert (y.shape, y.dtype) == ((50, 6), np.int32)
    assert (x.min(), x.max()) == (0.0, 1.0)


def test_labels_are_digits_from_one_to_ten_then_blanks():
    _, y = lines.load("train", count=400, length=(2, 5))
    lengths = (y != lines.BLANK).sum(axis=1)
    assert set(lengths) == {2, 3, 4, 5}
    assert set(y[y != lines.BLANK]) == set(range(1, lines.CLASSES))
    np.testing.assert_array_equal(y != lines.BLANK, np.arange(5) < lengths[:, None])


@pytest.mark.parametrize("split", lines.SPLITS)
def test_lines_have_their_digits_from_left_to_right(split):
    values, others = known(split), known(({*lines.SPLITS} - {split}).pop())
    for image, label in zip(*lines.load(split, count=20), strict=True):
        squares = squares_of(image[..., 0])
        read = [(left, values[pixels]) for _, left, pixels in squares if pixels in values]
        assert [value + 1 for _, value in read] == [value for value in label if value != lines.BLANK]
        assert all(after - before >= SIDE for (before, _), (after, _) in pairwise(read))
        assert not any(pixels in others for _, _, pixels in squares)


def test_digits_are_at_all_positions():
    x, _ = lines.load("train", count=600, length=(1, 1), height=10, width=20)
    values = known("train")
    places = {(top, left) for image in x for top, left, pixels in squares_of(image[..., 0]) if pixels in values}
    assert places == {(top, left) for top in range(3) for left in range(13)}


def test_digits_that_just_fit_have_no_space_between_them():
    images, _ = digits.load("test")
    pixels = {image.tobytes() for image in images}
    x, _ = lines.load("test", count=5, length=(3, 3), height=SIDE, width=3 * SIDE)
    for image in x[..., 0]:
        assert all(np.ascontiguousarray(part).tobytes() in pixels for part in np.split(image, 3, axis=1))


def test_lines_are_the_same_everywhere():
    x, y = lines.load("test", count=100)
    assert hashlib.sha256(x.tobytes() + y.astype("<i4").tobytes()).hexdigest()[:16] == "09c0bb6bee410bfc"


def test_another_seed_gives_other_lines():
    (x, _), (other, _) = lines.load("test", count=5), lines.load("test", count=5, seed=1)
    assert not np.array_equal(x, other)


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        ({"split": "tset"}, "unknown-split", "'tset'"),
        ({"count": 0}, "invalid-argument", "0"),
        ({"length": (4, 3)}, "invalid-argument", "4 and 3"),
        ({"length": (0, 3)}, "invalid-argument", "0 and 3"),
        ({"height": 7}, "invalid-argument", "64 × 7 "),
        ({"width": 47}, "invalid-argument", "48 × 8"),
    ],
)
def test_invalid_lines(changes, code, named):
    with raises(UsageError, code) as caught:
        lines.load(**{"split": "train", "count": 5} | changes)
    assert named in caught.value.message
