"""Lines of handwritten digits: several of the included digits side by side in one image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfdist_cli.datasets import digits
from tfdist_cli.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SPLITS = digits.SPLITS
CLASSES = digits.CLASSES + 1
"""The ten digits, and the blank of connectionist temporal classification."""
BLANK = 0
"""The label for no digit: after the last digit of a line, and in a model's output. The label of digit d is d + 1."""
_SIDE = 8


def load(
    split: str,
    *,
    count: int,
    length: tuple[int, int] = (3, 6),
    height: int = 12,
    width: int = 64,
    seed: int = 0,
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Generates the lines of one split.

    A line has a random number of digits within `length`, drawn from the digits of the split: a digit image of a test
    line is never part of a training line. Their horizontal positions are random, in order and without overlap; so is
    each digit's vertical position.

    Args:
        split: `train` or `test`, as in `digits.load`.
        count: the number of lines.
        length: the minimum and the maximum number of digits of a line.
        height: the height of an image in pixels; at least 8.
        width: the width of an image in pixels; at least 8 for each digit.
        seed: of the lines, which are the same on every machine and with every version of NumPy.

    Returns:
        Images, float32 of shape (count, height, width, 1) from 0 (paper) to 1 (ink); and the labels, int32 of shape
        (count, maximum digits), from left to right, `BLANK` after the last, as `keras.losses.CTC` expects them.

    Raises:
        UsageError: there is no such split, or an argument is invalid.
    """
    import numpy as np  # noqa: PLC0415 - commands that read no data should not wait for this import

    _check(count, length, height, width)
    images, values = digits.load(split)
    fewest, most = length
    # RandomState draws the same numbers in every version of NumPy.
    draw = np.random.RandomState([seed, SPLITS.index(split)])
    lengths = draw.randint(fewest, most + 1, (count, 1), np.int64)
    written = np.arange(most) < lengths
    chosen = draw.randint(len(images), size=(count, most), dtype=np.int64)
    tops = draw.randint(height - _SIDE + 1, size=(count, most), dtype=np.int64)
    # Sorted shares divide the free pixels among the digits; digits beyond the line's length sort last.
    shares = np.sort(np.where(written, draw.random_sample((count, most)), 1), axis=1)
    lefts = (shares * (width - _SIDE * lengths + 1)).astype(np.int64) + _SIDE * np.arange(most)

    paper = np.zeros((count, height, width, 1), np.float32)
    line, place = np.nonzero(written)
    rows = tops[line, place][:, None, None] + np.arange(_SIDE)[:, None]
    columns = lefts[line, place][:, None, None] + np.arange(_SIDE)
    paper[line[:, None, None], rows, columns, 0] = images[chosen[line, place]].reshape(-1, _SIDE, _SIDE)
    return paper, np.where(written, values[chosen] + 1, BLANK).astype(np.int32)


def _check(count: int, length: tuple[int, int], height: int, width: int) -> None:
    fewest, most = length
    if count < 1:
        raise UsageError(f"count must be at least 1, got {count}", code="invalid-argument")
    if not 1 <= fewest <= most:
        raise UsageError(
            f"length must be the minimum and the maximum number of digits, at least 1, got {fewest} and {most}",
            code="invalid-argument",
        )
    if height < _SIDE or width < _SIDE * most:
        raise UsageError(
            f"{most} digits do not fit into {width} × {height} pixels (width × height): "
            f"they need {_SIDE * most} × {_SIDE}",
            code="invalid-argument",
        )
