"""The models and sizes that are measured, without importing TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

FEATURES, CLASSES = 784, 10
WORDS, LENGTH = 5_000, 64
"""The vocabulary of a transformer, and the words in a text."""
SEEN = 100
"""Words that occur in its texts: so few that it learns within a round which word follows each."""
HEADS, DROPOUT = 4, 0.1
IDS = 16
"""Ids in an example of `table`."""
NUMBERS = 13
"""Numbers in an example of `wide_deep`, beside its ids."""
BATCHES = 64
"""Different batches of a worker, all of them in memory."""


@dataclass(frozen=True)
class Size:
    """A model, the size of its batches, and how it is measured.

    Args:
        title: its name in tables.
        kind: which model it is.
        batch: examples in a worker's step.
        steps: steps in an epoch; twice as many of two asynchronous workers together. An epoch takes a second or two.
        steps_per_execution: steps of a worker between two reports, on both sides, divides `steps`.
        ps: parameter servers.
        widths: of hidden layers, or of a transformer's blocks.
        rows: of each table.
        width: values in a row of a table.
        pooled: the layer that looks up a `table`, and the rows of an example are averaged; by default, they are not.
        dynamic: whether a `table` is tfdist's `DynamicEmbedding`, and which rows are replaced when it is full.
    """

    title: str
    kind: Literal["mlp", "cnn", "transformer", "two_tower", "wide_deep", "table"]
    batch: int
    steps: int = 100
    steps_per_execution: int = 20
    ps: int = 1
    widths: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    width: int = 0
    pooled: Literal["", "Embedding", "DistributedEmbedding"] = ""
    dynamic: Literal["", "kept", "lru"] = ""

    @property
    def sparse(self) -> bool:
        """Whether it has tables of which a batch looks up only a few rows."""
        return bool(self.rows)


def _table(title: str, rows: int, tables: int = 1, **layer: Any) -> Size:
    return Size(title, "table", 256, ps=2, rows=(rows // tables,) * tables, width=32, **layer)


SIZES = {
    "mlp": Size("MLP 784-500-500-10, batch 64", "mlp", 64, widths=(500, 500)),
    "mlp_large": Size("MLP 784-1024-1024-10, batch 256", "mlp", 256, steps=40, widths=(1024, 1024)),
    "mlp_deep": Size(
        "MLP 784-6 × 1024-10, batch 256", "mlp", 256, steps=20, steps_per_execution=10, widths=(1024,) * 6
    ),
    "mlp_deep_1024": Size(
        "MLP 784-6 × 1024-10, batch 1024", "mlp", 1024, steps=6, steps_per_execution=3, widths=(1024,) * 6
    ),
    "mlp_deep_4096": Size(
        "MLP 784-6 × 1024-10, batch 4096", "mlp", 4096, steps=2, steps_per_execution=2, widths=(1024,) * 6
    ),
    "transformer_64": Size(
        "transformer 4 × 256, batch 64", "transformer", 64, steps=2, steps_per_execution=2, widths=(256,) * 4
    ),
    "cnn": Size("CNN, batch 64", "cnn", 64),
    "cnn_1024": Size("CNN, batch 1024", "cnn", 1024, steps=6, steps_per_execution=3),
    "transformer": Size(
        "transformer 2 × 128, batch 32", "transformer", 32, steps=5, steps_per_execution=5, widths=(128,) * 2
    ),
    "transformer_large": Size(
        "transformer 4 × 256, batch 16", "transformer", 16, steps=4, steps_per_execution=4, widths=(256,) * 4
    ),
    "two_tower": Size(
        "two-tower, Zipf ids, tables 300k and 100k × 16, batch 512",
        "two_tower",
        512,
        widths=(64, 32),
        rows=(300_000, 100_000),
        width=16,
    ),
    "wide_deep": Size(
        "wide & deep, 26 tables of 20k × 16, batch 256",
        "wide_deep",
        256,
        steps=40,
        steps_per_execution=4,
        widths=(256, 128),
        rows=(20_000,) * 26,
        width=16,
    ),
    "table": _table("1 table of 1M × 32, batch 256", 1_000_000),
    "table_8": _table("8 tables of 125k × 32, batch 256", 1_000_000, 8),
    "bag": _table("1 table of 1M × 32, mean of 16 rows, batch 256", 1_000_000, pooled="Embedding"),
    "bag_rs": _table("the same with KerasRS", 1_000_000, pooled="DistributedEmbedding"),
    "dynamic": _table("1 dynamic table of up to 1M × 32, batch 256", 1_000_000, dynamic="kept"),
    "dynamic_lru": _table("the same, which replaces rows", 1_000_000, dynamic="lru"),
    "table_100k": _table("1 table of 100k × 32, batch 256", 100_000),
    "table_10m": _table("1 table of 10M × 32, batch 256", 10_000_000),
}
"""All models; the grid has those that are not of the kind `table`, except for `grid.STAGED`."""
