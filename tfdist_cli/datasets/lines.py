"""Lines of handwritten digits: several of the digits that come with tfdist, side by side in one image."""

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
"""The label that stands for no digit: after a line's last one, and wherever a reader sees none. Digit d is d + 1."""
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
    """Writes the lines of one split.

    A line has any number of digits in `length`, drawn from the split's own: no digit of a test line stands in a
    training line. They stand where chance puts them, in order and without overlap, each at a height of its own.

    Args:
        split: `train` or `test`, as `digits.load` has them.
        count: how many lines.
        length: the fewest and the most digits of a line.
        height: of each image, in pixels; 8 or more.
        width: of each image, in pixels; 8 or more for each digit.
        seed: which lines; the same on every machine and in every version of NumPy.

    Returns:
        Images, float32 of shape (count, height, width, 1) from 0 (paper) to 1 (ink); and the labels, int32 of shape
        (count, most digits), from left to right, `BLANK` after the last: what `keras.losses.CTC` takes.

    Raises:
        UsageError: there is no such split, no such line, or no room for it.
    """
    import numpy as np  # noqa: PLC0415 - a command that reads no data should not wait for it

    _check(count, length, height, width)
    images, values = digits.load(split)
    fewest, most = length
    # NumPy keeps what RandomState draws as it is, from version to version.
    draw = np.random.RandomState([seed, SPLITS.index(split)])
    lengths = draw.randint(fewest, most + 1, (count, 1), np.int64)
    written = np.arange(most) < lengths
    chosen = draw.randint(len(images), size=(count, most), dtype=np.int64)
    tops = draw.randint(height - _SIDE + 1, size=(count, most), dtype=np.int64)
    # The pixels left over are dealt out by sorted shares of them; a digit that isn't written sorts last.
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
        raise UsageError(f"{count} lines were asked for, expected 1 or more")
    if not 1 <= fewest <= most:
        raise UsageError(f"lines of {fewest} to {most} digits were asked for", hint="name the fewest, then the most")
    if height < _SIDE or width < _SIDE * most:
        raise UsageError(
            f"{most} digits do not fit into {width} × {height} pixels, width × height: "
            f"they take {_SIDE * most} × {_SIDE}"
        )
