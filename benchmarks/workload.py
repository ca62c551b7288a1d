"""The workload and the stopwatch that all programs share."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.sizes import SIZES, Size

ENVIRONMENT = "TFDIST_BENCHMARK"
"""The variable that carries a workload to a program, as JSON."""
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
"""TensorFlow's variable. PyTorch's interpreter, which reads this module, need not have the packages of `tfdist_cli`."""
FOREVER = 1_000_000
"""Epochs: a program trains until it is killed."""


@dataclass(frozen=True)
class Workload:
    """A training: what, and with which settings.

    Args:
        model: a key of `SIZES`.
        batch_size: examples in a step of one worker.
        steps: steps in an epoch, of all workers together where they take turns.
        steps_per_execution: steps between two reports of a worker.
        record: the file that the reporting task writes each epoch's end to.
        data: the folder with the model's data.
        seed: of the first weights.
        spread: `shard.min_bytes` of tfdist; None for its default.
        updates: tfdist's rule of updates, as in a recipe.
        wire: the type in which gradients cross the network: tfdist's `wire`, or PyTorch's hook.
        jit: whether tfdist and Keras 3 compile the step with XLA.
        onednn: whether TensorFlow uses oneDNN, or Eigen alone. Its default depends on the processor.
        micro_batches: the parts of a batch that tfdist sends through the stages of a model.
        balance: what these stages have equal amounts of; None for tfdist's default.
        apart: whether each task of tfdist trains a model of its own, as each process of Keras does.
    """

    model: str
    batch_size: int
    steps: int
    steps_per_execution: int
    record: str = ""
    data: str = ""
    seed: int = 0
    spread: int | None = None
    updates: dict[str, Any] = field(default_factory=dict)
    wire: Literal["float32", "bfloat16", "float16"] = "float32"
    jit: bool = False
    onednn: bool = True
    micro_batches: int = 1
    balance: Literal["bytes", "time"] | None = None
    apart: bool = False

    @property
    def size(self) -> Size:
        """The model and its size."""
        return SIZES[self.model]

    @classmethod
    def read(cls) -> Workload:
        """Reads the workload from the environment."""
        return cls(**json.loads(os.environ[ENVIRONMENT]))

    def as_environment(self) -> dict[str, str]:
        """Returns the variable that `read` reads, and that of TensorFlow's kernels."""
        return {ENVIRONMENT: json.dumps(asdict(self)), ONEDNN: str(int(self.onednn))}


def take_task_index() -> int:
    """Returns this task's index, and lets TensorFlow and tfdist know of no cluster."""
    return int(json.loads(os.environ.pop("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"])


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
