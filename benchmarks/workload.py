"""What every program trains, and how it is timed: the only things that peers share."""

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
"""Numbers that an example of `embedding` looks up."""
WIDTH = 32
"""Values in a row of its tables."""
BATCHES = 100
"""Different batches, all of them in memory."""


@dataclass(frozen=True)
class Workload:
    """How much is trained and how it is cut.

    Args:
        result: the file that the reporting task writes its `Timing` to.
        steps: steps in an epoch.
        epochs: timed epochs; one more goes ahead of them to trace and warm up.
        batch_size: examples in a worker's step.
        steps_per_execution: steps between two reports of a worker.
        model: `mlp`, of which the network is the larger part of a step; `cnn`, of which computing is; or `embedding`,
            whose tables are much larger than what a step needs of them.
        rows: rows of all tables of `embedding` together.
        tables: how many these are.
        updates: tfdist's rule of updates, as in a recipe.
        wire: the type in which tfdist's gradients cross the network.
    """

    result: str
    steps: int = 300
    epochs: int = 3
    batch_size: int = 64
    steps_per_execution: int = 10
    model: Literal["mlp", "cnn", "embedding"] = "mlp"
    rows: int = 1_000_000
    tables: int = 1
    updates: dict[str, Any] = field(default_factory=dict)
    wire: Literal["float32", "bfloat16", "float16"] = "float32"

    @classmethod
    def read(cls) -> Workload:
        """The workload that this program was started for."""
        return cls(**json.loads(os.environ[ENVIRONMENT]))

    def as_environment(self) -> dict[str, str]:
        """What `read` reads."""
        return {ENVIRONMENT: json.dumps(asdict(self))}


class Stopwatch:
    """The end of each epoch, by the clock of the task that runs the callbacks."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._ends: list[float] = []
        self._logs: dict[str, float] = {}

    def epoch_ended(self, _epoch: int, logs: dict[str, Any] | None = None) -> None:
        """An `on_epoch_end` callback, for Keras 2 and 3 alike."""
        self._ends.append(time.perf_counter())
        self._logs = {name: float(value) for name, value in (logs or {}).items()}

    def write(self) -> None:
        """Writes what was timed where the driver finds it: steps per second of the timed epochs, and the last logs."""
        if len(self._ends) != self._workload.epochs + 1:
            raise RuntimeError(f"{len(self._ends)} epochs ended instead of {self._workload.epochs + 1}")
        rate = self._workload.epochs * self._workload.steps / (self._ends[-1] - self._ends[0])
        path = Path(self._workload.result)
        beside = path.with_suffix(".writing")
        beside.write_text(json.dumps({"steps_per_second": rate, "logs": self._logs}), encoding="utf-8")
        beside.replace(path)
