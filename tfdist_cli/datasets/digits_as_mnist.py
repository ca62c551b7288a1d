"""Writes the included digits in MNIST's size and format: four IDX files, for recipes that read MNIST.

Run `python -m tfdist_cli.datasets.digits_as_mnist FOLDER`. Each image is one of the 1,797 digits, enlarged from 8 × 8
to 20 × 20 pixels, and placed in the middle of 28 × 28, up to a pixel off. The test part has test digits only.
"""

from __future__ import annotations

import argparse
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist_cli.datasets import digits

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SMALL, _LARGE, _SIDE = 8, 20, 28
_OFF = 1
_UNSIGNED_BYTE = 8


def write(folder: Path, *, train: int = 60_000, test: int = 10_000, seed: int = 0) -> None:
    """Writes `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and the same two for `t10k`.

    Args:
        folder: created if it is missing.
        train: the number of training images; `mnist.load` takes the first 5,000 as the `validation` split.
        test: the number of test images.
        seed: of the choice of digits and of their positions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split, name, count in (("train", "train", train), ("test", "t10k", test)):
        images, labels = _images(split, count, seed)
        _write_idx(folder / f"{name}-images-idx3-ubyte", images)
        _write_idx(folder / f"{name}-labels-idx1-ubyte", labels)


def _images(split: str, count: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    import numpy as np  # noqa: PLC0415 - commands that read no data should not wait for this import

    small, labels = digits.load(split)
    # Bilinear: each pixel of the large image is a mean of neighbours, weighted by their distance.
    at = np.linspace(0, _SMALL - 1, _LARGE)
    weights = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(_SMALL)))
    large = np.rint(255 * (weights @ small.reshape(-1, _SMALL, _SMALL) @ weights.T)).astype(np.uint8)
    # RandomState draws the same numbers in every version of NumPy.
    draw = np.random.RandomState([seed, digits.SPLITS.index(split)])
    chosen = draw.randint(len(labels), size=count)
    middle = (_SIDE - _LARGE) // 2
    tops, lefts = draw.randint(middle - _OFF, middle + _OFF + 1, size=(2, count))
    images = np.zeros((count, _SIDE, _SIDE), np.uint8)
    rows, columns = (start[:, None] + np.arange(_LARGE) for start in (tops, lefts))
    images[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]] = large[chosen]
    return images, labels[chosen].astype(np.uint8)


def _write_idx(path: Path, values: NDArray[Any]) -> None:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, _UNSIGNED_BYTE, values.ndim, *values.shape)
    path.write_bytes(header + values.tobytes())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes the included digits in MNIST's size and format.")
    parser.add_argument("folder", type=Path, help="the folder for the four files")
    write(parser.parse_args().folder)
