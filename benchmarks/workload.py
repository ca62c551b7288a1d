"""The workload and the stopwatch that all programs share."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

ENVIRONMENT = "TFDIST_BENCHMARK"
"""The variable that carries a workload to a program, as JSON."""
FEATURES = 784
HIDDEN = (500, 500)
CLASSES = 10
IDS = 16
"""Ids in an example of `embedding`."""
WIDTH = 32
"""Values in a row of its tables."""
WORDS, LENGTH = 5_000, 64
"""The vocabulary of `transformer`, and the words in a text."""
SEEN = 100
"""Words that occur in its texts: so few that it learns within a round which word follows each."""
BLOCKS, HEADS, MODEL_WIDTH, DROPOUT = 2, 4, 128, 0.1
"""Its blocks, attention heads, width and dropout rate."""
FOREVER = 1_000_000
"""Epochs: a program trains until it is killed."""
BATCHES = 100
"""Different batches, all of them in memory."""


@dataclass(frozen=True)
class Workload:
    """The model, the data and the sizes of a training.

    Args:
        record: the file that the reporting task writes each epoch's end to.
        steps: steps in an epoch.
        batch_size: examples in a worker's step.
        steps_per_execution: steps between two reports of a worker.
        model: `mlp`, whose step is mostly network; `cnn`, whose step is mostly computation; `embedding`, whose tables
            are much larger than the rows of a step; or `transformer`, a language model.
        rows: rows of all tables of `embedding` together.
        tables: the number of tables.
        spread: `shard.min_bytes` of tfdist; None for its default.
        updates: tfdist's rule of updates, as in a recipe.
        wire: the type in which tfdist's gradients cross the network.
    """

    record: str
    steps: int = 200
    batch_size: int = 64
    steps_per_execution: int = 10
    model: Literal["mlp", "cnn", "embedding", "transformer"] = "mlp"
    rows: int = 1_000_000
    tables: int = 1
    spread: int | None = None
    updates: dict[str, Any] = field(default_factory=dict)
    wire: Literal["float32", "bfloat16", "float16"] = "float32"

    @classmethod
    def read(cls) -> Workload:
        """Reads the workload from the environment."""
        return cls(**json.loads(os.environ[ENVIRONMENT]))

    def as_environment(self) -> dict[str, str]:
        """Returns the variable that `read` reads."""
        return {ENVIRONMENT: json.dumps(asdict(self))}


@dataclass(frozen=True)
class Lap:
    """The end of an epoch.

    Args:
        moment: seconds of the machine's monotonic clock, which all processes share.
        logs: the epoch's loss and metrics.
    """

    moment: float
    logs: dict[str, float]


class Stopwatch:
    """Records the end of each epoch.

    Args:
        workload: what is trained.
        reports: whether this task records the ends of epochs.
    """

    def __init__(self, workload: Workload, *, reports: bool) -> None:
        self._record = Path(workload.record) if reports else None

    def epoch_ended(self, _epoch: int, logs: dict[str, Any] | None = None) -> None:
        """An `on_epoch_end` callback, for Keras 2 and 3 alike."""
        moment = time.monotonic()
        if self._record:
            lap = Lap(moment, {name: float(value) for name, value in (logs or {}).items()})
            with self._record.open("a", encoding="utf-8") as record:
                record.write(f"{json.dumps(asdict(lap))}\n")
