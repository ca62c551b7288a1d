"""The data that all programs read: generated once, in files without headers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.sizes import BATCHES, CLASSES, FEATURES, IDS, LENGTH, NUMBERS, SEEN, Size

TARGET = "target"
"""The field that a model learns from the others."""


def fields(size: Size) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the type and the shape of each field of an example; the target is the last."""
    match size.kind:
        case "mlp" | "cnn":
            return {"pixels": ("float32", (FEATURES,)), TARGET: ("int64", ())}
        case "transformer":
            return {"words": ("int32", (LENGTH,)), TARGET: ("int64", (LENGTH,))}
        case "two_tower":
            return {"user": ("int32", (1,)), "item": ("int32", (1,)), TARGET: ("float32", (1,))}
        case "wide_deep":
            ids = ("int32", (len(size.rows),))
            return {"numbers": ("float32", (NUMBERS,)), "ids": ids, TARGET: ("float32", (1,))}
        case "table":
            return {"ids": ("int32", (IDS,)), TARGET: ("int64", ())}


def write(folder: Path, size: Size) -> None:
    """Writes one file for each field: `BATCHES` batches, the same at each call."""
    for name, values in _generate(size, BATCHES * size.batch).items():
        dtype, shape = fields(size)[name]
        values.astype(dtype).reshape(-1, *shape).tofile(folder / name)


def _generate(size: Size, count: int) -> dict[str, NDArray[np.generic]]:
    """Returns examples whose target follows from their other fields, so that a model that does not learn is noticed."""
    random = np.random.default_rng(0)
    match size.kind:
        case "mlp" | "cnn":
            return _images(random, count, pattern=size.kind == "cnn")
        case "transformer":
            words = random.integers(SEEN, size=(count, LENGTH))
            return {"words": words, TARGET: (words + 1) % SEEN}
        case "two_tower":
            users, items = (_zipf(random, rows, count) for rows in size.rows)
            tastes = [random.normal(size=(rows, 4)) for rows in size.rows]
            return {"user": users, "item": items, TARGET: (tastes[0][users] * tastes[1][items]).sum(1) > 0}
        case "wide_deep":
            ids = np.stack([_zipf(random, rows, count) for rows in size.rows], axis=1)
            numbers = random.normal(size=(count, NUMBERS))
            score = np.stack([random.normal(size=rows)[ids[:, n]] for n, rows in enumerate(size.rows)], axis=1)
            return {"numbers": numbers, "ids": ids, TARGET: score.sum(1) + numbers.sum(1) > 0}
        case "table":
            # The label follows from the first id, of a thousand; the others are random.
            ids = random.integers(min(size.rows), size=(count, IDS))
            ids[:, 0] %= 1000
            return {"ids": ids, TARGET: ids[:, 0] % CLASSES}


def _images(random: np.random.Generator, count: int, *, pattern: bool) -> dict[str, NDArray[np.generic]]:
    """The label follows from the pixels, or is a pattern in them."""
    judge = random.normal(size=(FEATURES, CLASSES)).astype(np.float32)
    pixels = random.random(size=(count, FEATURES), dtype=np.float32) - 0.5
    labels = (pixels @ judge).argmax(axis=1)
    if pattern:
        pixels += 0.2 * judge.T[labels]
    return {"pixels": pixels, TARGET: labels}


def _zipf(random: np.random.Generator, rows: int, count: int) -> NDArray[np.int64]:
    """Ids of which the k-th most frequent one has a frequency in proportion to 1/k, at random places of the table."""
    cumulated = np.cumsum(1 / np.arange(1, rows + 1))
    ranks = np.searchsorted(cumulated, random.random(count) * cumulated[-1])
    found: NDArray[np.int64] = random.permutation(rows)[ranks]
    return found
