"""What the run directory of one training says of its measured epoch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist_cli.bench.variants import EPOCHS
from tfdist_cli.errors import TfdistError
from tfdist_cli.protocol.phases import PHASES, TRAFFIC


@dataclass(frozen=True)
class Rate:
    """How fast one training was.

    Args:
        steps: global steps per second.
        examples: examples per second, of all workers together.
    """

    steps: float
    examples: float


@dataclass(frozen=True)
class Split:
    """Where the time of a worker's step went, on average over all workers and measured steps.

    Args:
        step: how long a step took, in ms.
        phases: how long each of its phases took, in ms, by the worker's own clock.
        traffic: bytes that crossed in a step.
        steps_per_second: the rate of this training, whose functions took the time.
    """

    step: float
    phases: Mapping[str, float]
    traffic: Mapping[str, float] = field(default_factory=dict)
    steps_per_second: float = 0.0

    @property
    def rest(self) -> float:
        """What is between a worker's functions, in ms: results on their way to the chief, and the next one from it."""
        return self.step - sum(self.phases.values())


def read_rate(run_dir: Path, result: Mapping[str, Any]) -> Rate:
    """The rate of a training's measured epoch.

    Args:
        run_dir: the run's directory.
        result: the chief's `result` record.

    Raises:
        TfdistError: the training has no such epoch.
    """
    seconds, warm, measured = _epoch(run_dir)
    steps = measured["step"] - warm["step"]
    # Batches are full, and each epoch has as many of them.
    return Rate(steps / seconds, result["examples"] / result["step"] * steps / seconds)


def read_split(run_dir: Path) -> Split:
    """Where the time of a training's measured epoch went; its tasks have taken it.

    Raises:
        TfdistError: the training has no such epoch.
    """
    seconds, warm, measured = _epoch(run_dir)
    tasks = measured["phases"]
    steps = sum(measured["worker_steps"][task] - warm["worker_steps"][task] for task in tasks)

    def per_step(column: str) -> float:
        return float(sum(tasks[task][column] - warm["phases"][task][column] for task in tasks) / steps)

    return Split(
        1000 * seconds * len(tasks) / steps,
        {name: 1000 * spent for name in PHASES if (spent := per_step(name))},
        {name: size for name in TRAFFIC if (size := per_step(name))},
        (measured["step"] - warm["step"]) / seconds,
    )


def _epoch(run_dir: Path) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """The seconds between the end of the first epoch and that of the second, and what had been counted at both."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    ends = [line for line in lines if line["split"] == "train" and line["epoch_done"]]
    if len(ends) != EPOCHS or ends[1]["step"] != EPOCHS * ends[0]["step"]:
        raise TfdistError(
            "the training ended before the steps to be measured were done",
            hint="leave out the recipe's callback that stopped it",
        )
    return ends[1]["seconds"] - ends[0]["seconds"], ends[0], ends[1]
