"""Made-up clicks in the form of Criteo's files, of which it is known how well they can be told: nothing to download.

`python -m tfdist_cli.datasets.click_generator FOLDER --rows 100000` writes them as files.

A label is drawn from a logistic model: it is 1 with the probability 1 / (1 + exp(−z)), where z is a constant, plus a
weight times each integer's standardized logarithm, plus a weight for each category. No model can be expected to rank
lines better than these probabilities do, so their AUC is the best possible one, up to the luck of the draw.
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
"""Lines that are drawn together, with a seed of their own: the first lines are the same, however many follow."""
_NUMBERS = 13
_VOCABULARIES = np.geomspace(4, 10_000, 26).astype(int)
"""How many categories each column has."""
_ZIPF = 1.3
"""In each column, the r-th category's probability is proportional to r to the power of −1.3."""
_OFTEN_MISSING = 4
"""In each fourth column, the most frequent category is written as a missing one."""
_CONSTANT = -1.4
_NUMBER_WEIGHT = 0.25
_CATEGORY_WEIGHT = 0.4
"""The standard deviations of the weights."""


class Clicks(NamedTuple):
    """Lines, and what is known of them.

    Args:
        lines: in Criteo's form, without the end of the line.
        labels: int64 of shape (n,), 1 for a click.
        probabilities: that each is a click, float64 of shape (n,).
    """

    lines: list[bytes]
    labels: NDArray[np.int64]
    probabilities: NDArray[np.float64]

    @property
    def best_auc(self) -> float:
        """The AUC of the true probabilities on these labels."""
        return auc(self.labels, self.probabilities)


def generate(rows: int, split: str, *, seed: int = 0) -> Clicks:
    """Draws the first lines of a split.

    Args:
        rows: how many.
        split: `train` or `test`: other lines from the same model.
        seed: of model and lines.

    Raises:
        UsageError: there is no such split, or `rows` is none.
    """
    check_split(split, SPLITS, data="the generator of clicks")
    _check_rows(rows)
    lines, labels, probabilities = zip(*_blocks(rows, split, seed), strict=True)
    return Clicks(list(chain.from_iterable(lines)), np.concatenate(labels), np.concatenate(probabilities))


def auc(labels: NDArray[np.int64], scores: NDArray[np.float64]) -> float:
    """The area under the ROC curve: how often a click scores higher than a line without one; a tie counts half.

    It is the statistic of Mann and Whitney (1947) divided by the number of pairs. NaN when all labels are the same.
    """
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    clicks = int(labels.sum())
    pairs = clicks * (len(labels) - clicks)
    return float((ranks[labels == 1].sum() - clicks * (clicks + 1) / 2) / pairs) if pairs else float("nan")


def write(folder: Path, *, rows: int, test_rows: int, seed: int = 0, compress: bool = False) -> dict[Path, float]:
    """Writes `train.tsv` and `test.tsv`, or `train.tsv.gz` and `test.tsv.gz`, into a folder.

    Returns:
        Each file's best possible AUC.

    Raises:
        UsageError: a file of that name is there already, or cannot be written, or is to have no lines.
    """
    wanted = {"train": rows, "test": test_rows}
    paths = {split: folder / (f"{split}.tsv.gz" if compress else f"{split}.tsv") for split in wanted}
    for split, path in paths.items():
        _check_rows(wanted[split])
        if path.exists():
            raise UsageError(f"{path} is there already", hint="remove it, or name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return {path: _write(path, _blocks(wanted[split], split, seed)) for split, path in paths.items()}
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to: {error}") from error


def _write(path: Path, blocks: Iterator[Clicks]) -> float:
    """Writes lines as they are drawn, and returns their best possible AUC."""
    known = []
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        for block in blocks:
            file.write(b"\n".join(block.lines) + b"\n")
            known.append((block.labels, block.probabilities))
    labels, probabilities = zip(*known, strict=True)
    return auc(np.concatenate(labels), np.concatenate(probabilities))


class _Column(NamedTuple):
    """A column of categories, the most frequent first.

    Args:
        texts: how each is written, bytes, shape (n,).
        ends: the probability of each and of all before it, float64, shape (n,).
        weights: what each adds to z, float64, shape (n,).
    """

    texts: NDArray[np.object_]
    ends: NDArray[np.float64]
    weights: NDArray[np.float64]


class _Model:
    """The true model of a seed.

    All numbers are from NumPy's RandomState, which gives the same ones in each of NumPy's versions.
    """

    def __init__(self, seed: int) -> None:
        random = np.random.RandomState(seed)
        self._means = random.uniform(1, 4, _NUMBERS)
        self._spreads = random.uniform(0.8, 1.6, _NUMBERS)
        self._missing = random.uniform(0, 0.5, _NUMBERS)
        self._weights = random.standard_normal(_NUMBERS) * _NUMBER_WEIGHT
        self._columns = [_column(random, number, size) for number, size in enumerate(_VOCABULARIES)]

    def draw(self, rows: int, random: np.random.RandomState) -> Clicks:
        """Draws lines."""
        logarithms = self._means + self._spreads * random.standard_normal((rows, _NUMBERS))
        integers = np.floor(np.expm1(logarithms)).astype(np.int64)  # of a negative logarithm: −1
        missing = random.random_sample((rows, _NUMBERS)) < self._missing
        standardized = (np.log1p(np.maximum(integers, 0)) - self._means) / self._spreads
        z = _CONSTANT + np.where(missing, 0, standardized) @ self._weights
        fields = [_texts(*column) for column in zip(integers.T, missing.T, strict=True)]
        for column in self._columns:
            chosen = np.searchsorted(column.ends, random.random_sample(rows), side="right")
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
    if number % _OFTEN_MISSING == 0:
        texts[0] = b""
    ends = np.cumsum(frequencies)
    ends[-1] = 1.0
    return _Column(texts, ends, weights - frequencies @ weights)


def _texts(integers: NDArray[np.int64], missing: NDArray[np.bool_]) -> list[bytes]:
    pairs = zip(integers.tolist(), missing.tolist(), strict=True)
    return [b"" if gone else b"%d" % integer for integer, gone in pairs]


_model = lru_cache(maxsize=1)(_Model)


def _check_rows(rows: int) -> None:
    if rows < 1:
        raise UsageError(f"{rows} lines of clicks: expected 1 or more")


def _blocks(rows: int, split: str, seed: int) -> Iterator[Clicks]:
    for number, first in enumerate(range(0, rows, BLOCK)):
        block = _model(seed).draw(BLOCK, np.random.RandomState([seed, SPLITS.index(split), number]))
        kept = slice(rows - first)
        yield Clicks(block.lines[kept], block.labels[kept], block.probabilities[kept])


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes files of clicks, and says the best AUC that a model can have on them."""
    parser = argparse.ArgumentParser(
        prog="python -m tfdist_cli.datasets.click_generator", description="Write made-up clicks in Criteo's format."
    )
    parser.add_argument("folder", type=Path, help="where train.tsv and test.tsv are written")
    parser.add_argument("--rows", type=int, default=100_000, help="lines of train.tsv (default: %(default)s)")
    parser.add_argument("--test-rows", type=int, default=20_000, help="lines of test.tsv (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of model and lines (default: %(default)s)")
    parser.add_argument("--gzip", action="store_true", help="write train.tsv.gz and test.tsv.gz")
    wanted = parser.parse_args(arguments)
    try:
        written = write(
            wanted.folder, rows=wanted.rows, test_rows=wanted.test_rows, seed=wanted.seed, compress=wanted.gzip
        )
    except UsageError as error:
        parser.error(f"{error}; {error.hint}" if error.hint else str(error))
    for path, best in written.items():
        print(f"{path}: best possible AUC {best:.4f}")  # noqa: T201 - its result
    return 0


if __name__ == "__main__":
    sys.exit(main())
