"""The 1,797 handwritten digits of UCI's "Optical Recognition of Handwritten Digits", included in tfdist.

DIGITS.md beside the file has its source and licence (CC BY 4.0).
"""

from __future__ import annotations

import gzip
import hashlib
from importlib import resources
from typing import TYPE_CHECKING

from tfdist_cli.datasets.split import check_split

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SPLITS = ("train", "test")
PIXELS = 64
CLASSES = 10
_TEST_DIGITS = 360
_INK = 16


def load(split: str, *, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Reads the digits of one split.

    Args:
        split: `train`, 1,437 digits, or `test`, the other 360.
        seed: of the division into splits, which is the same on every machine and with every version of NumPy.

    Returns:
        Images, float32 of shape (n, 64) from 0 (paper) to 1 (ink), 8 rows of 8; and the digits, int64 of shape (n,).

    Raises:
        UsageError: there is no such split.
    """
    import numpy as np  # noqa: PLC0415 - commands that read no data should not wait for this import

    check_split(split, SPLITS, data="the digits")
    text = gzip.decompress(resources.files(__package__).joinpath("digits.csv.gz").read_bytes()).decode("ascii")
    table = np.array([line.split(",") for line in text.split()], dtype=np.int64)
    order = _order(len(table), seed)
    rows = table[order[:_TEST_DIGITS] if split == "test" else order[_TEST_DIGITS:]]
    return (rows[:, :PIXELS] / _INK).astype(np.float32), rows[:, PIXELS]


def _order(count: int, seed: int) -> list[int]:
    """Returns the numbers below `count` sorted by their hash: NumPy's generators may differ between versions."""
    return sorted(range(count), key=lambda row: hashlib.sha256(f"{seed}:{row}".encode()).digest())
