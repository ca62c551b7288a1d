"""Generated clicks in the format of Criteo's files, with a known best possible AUC. Nothing is downloaded.

`python -m tfdist_cli.datasets.click_generator FOLDER --rows 100000` writes them to files.

Labels are drawn from a logistic model: a label is 1 with probability 1 / (1 + exp(−z)), where z is the sum of a
constant, a weight times each integer's standardized logarithm, and a weight for each category. No model can be expected
to rank lines better than these probabilities, so their AUC is the best possible one, apart from random variation.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tfdist_cli.datasets.split import check_split
from tfdist_cli.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPLITS = ("train", "test")
BLOCK = 10_000
"""Lines that are drawn together, with their own seed: the first lines do not depend on how many follow."""
_NUMBERS = 13
_VOCABULARIES = np.geomspace(4, 10_000, 26).astype(int)
"""The number of categories of each column."""
_ZIPF = 1.3
"""In each column, the probability of the r-th category is proportional to r to the power of −1.3."""
_MISSING_EVERY = 4
"""In every fourth column, the most frequent category is written as missing."""
_CONSTANT = -1.4
_NUMBER_WEIGHT = 0.25
_CATEGORY_WEIGHT = 0.4
"""The standard deviations of the weights."""


class Clicks(NamedTuple):
    """Generated lines.

    Args:
        lines: in Criteo's format, without line ends.
        labels: int64 of shape (n,), 1 for a click.
        probabilities: the probability that each line is a click, float64 of shape (n,).
    """

    lines: list[bytes]
    labels: NDArray[np.int64]
    probabilities: NDArray[np.float64]

    @property
    def best_auc(self) -> float:
        """The AUC of the true probabilities for these labels."""
        return auc(self.labels, self.probabilities)


def generate(rows: int, split: str, *, seed: int = 0) -> Clicks:
    """Generates the first lines of a split.

    Args:
        rows: the number of lines.
        split: `train` or `test`: different lines from the same model.
        seed: of the model and the lines.

    Raises:
        UsageError: there is no such split, or `rows` is less than 1.
    """
    check_split(split, SPLITS, data="the click generator")
    _check_rows(rows)
    lines, labels, probabilities = zip(*_blocks(rows, split, seed), strict=True)
    return Clicks(list(chain.from_iterable(lines)), np.concatenate(labels), np.concatenate(probabilities))


def auc(labels: NDArray[np.int64], scores: NDArray[np.float64]) -> float:
    """Returns the area under the ROC curve: how often a click scores higher than a non-click; a tie counts half.

    It is the statistic of Mann and Whitney (1947) divided by the number of pairs; NaN if all labels are equal.
    """
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    clicks = int(labels.sum())
    pairs = clicks * (len(labels) - clicks)
    return float((ranks[labels == 1].sum() - clicks * (clicks + 1) / 2) / pairs) if pairs else float("nan")


def write(folder: Path, *, rows: int, test_rows: int, seed: int = 0, compress: bool = False) -> dict[Path, float]:
    """Writes `train.tsv` and `test.tsv`, or `train.tsv.gz` and `test.tsv.gz`, into a folder.

    Returns:
        Each file's best possible AUC.

    Raises:
        UsageError: a file exists, or cannot be written, or a number of lines is less than 1.
    """
    counts = {"train": rows, "test": test_rows}
    paths = {split: folder / (f"{split}.tsv.gz" if compress else f"{split}.tsv") for split in counts}
    for split, path in paths.items():
        _check_rows(counts[split])
        if path.exists():
            raise UsageError(f"{path} exists", code="file-exists", hint="remove it, or choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return {path: _write(path, _blocks(counts[split], split, seed)) for split, path in paths.items()}
    except OSError as error:
        raise UsageError(f"{folder} is not writable: {error}", code="folder-not-writable") from error


def _write(path: Path, blocks: Iterator[Clicks]) -> float:
    """Writes lines as they are generated. Returns their best possible AUC."""
    drawn = []
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        for block in blocks:
            file.write(b"\n".join(block.lines) + b"\n")
            drawn.append((block.labels, block.probabilities))
    labels, probabilities = zip(*drawn, strict=True)
    return auc(np.concatenate(labels), np.concatenate(probabilities))


class _Column(NamedTuple):
    """A column of categories, the most frequent first.

    Args:
        texts: the text of each category, bytes, shape (n,).
        cumulative: the sum of the probabilities up to each category, float64, shape (n,).
        weights: the weight of each category in z, float64, shape (n,).
    """

    texts: NDArray[np.object_]
    cumulative: NDArray[np.float64]
    weights: NDArray[np.float64]


class _Model:
    """The true model of a seed.

    All numbers are from NumPy's RandomState, which draws the same ones in every version of NumPy.
    """

    def __init__(self, seed: int) -> None:
        random = np.random.RandomState(seed)
        self._means = random.uniform(1, 4, _NUMBERS)
        self._spreads = random.uniform(0.8, 1.6, _NUMBERS)
        self._missing = random.uniform(0, 0.5, _NUMBERS)
        self._weights = random.standard_normal(_NUMBERS) * _NUMBER_WEIGHT
        self._columns = [_column(random, number, size) for number, size in enumerate(_VOCABULARIES)]

    def draw(self, rows: int, random: np.random.RandomState) -> Clicks:
        """Generates lines."""
        logarithms = self._means + self._spreads * random.standard_normal((rows, _NUMBERS))
        integers = np.floor(np.expm1(logarithms)).astype(np.int64)  # −1 for a negative logarithm
        missing = random.random_sample((rows, _NUMBERS)) < self._missing
        standardized = (np.log1p(np.maximum(integers, 0)) - self._means) / self._spreads
        z = _CONSTANT + np.where(missing, 0, standardized) @ self._weights
        fields = [_texts(*column) for column in zip(integers.T, missing.T, strict=True)]
        for column in self._columns:
            chosen = np.searchsorted(column.cumulative, random.random_sample(rows), side="right")
            z += column.weights[chosen]
            fields.append(column.texts[chosen].tolist())
        probabilities = 1 / (1 + np.exp(-z))
        labels = (random.random_sample(rows) < probabilities).astype(np.int64)
        texts = [b"1" if label else b"0" for label in labels]
        return Clicks([b"\t".join(line) for line in zip(texts, *fields, strict=True)], labels, probabilities)


def _column(random: np.random.RandomState, number: int, size: int) -> _Column:
    frequencies = np.arange(1, size + 1) ** -_ZIPF
    frequencies /= frequencies.sum()
    weights = random.standard_normal(size) * _CATEGORY_WEIGHT
    codes = random.randint(0, 1 << 32, size, dtype=np.uint32)
    texts = np.array([f"{code:08x}".encode() for code in codes], dtype=object)
    if number % _MISSING_EVERY == 0:
        texts[0] = b""
    cumulative = np.cumsum(frequencies)
    cumulative[-1] = 1.0
    return _Column(texts, cumulative, weights - frequencies @ weights)


def _texts(integers: NDArray[np.int64], missing: NDArray[np.bool_]) -> list[bytes]:
    pairs = zip(integers.tolist(), missing.tolist(), strict=True)
    return [b"" if is_missing else b"%d" % integer for integer, is_missing in pairs]


_model = lru_cache(maxsize=1)(_Model)


def _check_rows(rows: int) -> None:
    if rows < 1:
        raise UsageError(f"the number of lines must be at least 1, got {rows}", code="invalid-argument")


def _blocks(rows: int, split: str, seed: int) -> Iterator[Clicks]:
    for number, first in enumerate(range(0, rows, BLOCK)):
        block = _model(seed).draw(BLOCK, np.random.RandomState([seed, SPLITS.index(split), number]))
        kept = slice(rows - first)
        yield Clicks(block.lines[kept], block.labels[kept], block.probabilities[kept])


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes files of clicks, and prints the best possible AUC of each."""
    parser = argparse.ArgumentParser(
        prog="python -m tfdist_cli.datasets.click_generator", description="Generate clicks in Criteo's format."
    )
    parser.add_argument("folder", type=Path, help="the folder to write train.tsv and test.tsv to")
    parser.add_argument(
        "--rows", type=int, default=100_000, help="the number of lines of train.tsv (default: %(default)s)"
    )
    parser.add_argument(
        "--test-rows", type=int, default=20_000, help="the number of lines of test.tsv (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="the seed of the model and the lines (default: %(default)s)"
    )
    parser.add_argument("--gzip", action="store_true", help="write train.tsv.gz and test.tsv.gz")
    options = parser.parse_args(arguments)
    try:
        written = write(
            options.folder, rows=options.rows, test_rows=options.test_rows, seed=options.seed, compress=options.gzip
        )
    except UsageError as error:
        parser.error(f"{error}; {error.hint}" if error.hint else str(error))
    for path, best in written.items():
        print(f"{path}: best possible AUC {best:.4f}")  # noqa: T201 - its result
    return 0


if __name__ == "__main__":
    sys.exit(main())
