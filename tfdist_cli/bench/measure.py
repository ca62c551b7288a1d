"""Reads the measured epoch of a training from its run directory."""

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
    """The rate of one training.

    Args:
        steps: global steps per second.
        examples: examples per second, of all workers together.
    """

    steps: float
    examples: float


@dataclass(frozen=True)
class Split:
    """The phases of a worker's step, averaged over all workers and measured steps.

    Args:
        step: duration of a step in ms.
        phases: duration of each phase in ms, by the worker's clock.
        traffic: bytes transferred in a step.
        steps_per_second: the rate of this training, which measured its phases.
    """

    step: float
    phases: Mapping[str, float]
    traffic: Mapping[str, float] = field(default_factory=dict)
    steps_per_second: float = 0.0

    @property
    def rest(self) -> float:
        """Time between a worker's functions in ms: its result goes to the chief, and the next closure comes back."""
        return self.step - sum(self.phases.values())


def read_rate(run_dir: Path, result: Mapping[str, Any]) -> Rate:
    """Returns the rate of the measured epoch.

    Args:
        run_dir: the run directory.
        result: the chief's `result` record.

    Raises:
        TfdistError: the training ended before that epoch was complete.
    """
    seconds, warm, measured = _epoch(run_dir)
    steps = measured["step"] - warm["step"]
    # Batches are full, and both epochs have the same number of them.
    return Rate(steps / seconds, result["examples"] / result["step"] * steps / seconds)


def read_split(run_dir: Path) -> Split:
    """Returns the phases of the measured epoch, as its tasks have measured them.

    Raises:
        TfdistError: the training ended before that epoch was complete.
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
    """Returns the duration of the second epoch in seconds, and the metrics at the end of both epochs."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists():
        raise TfdistError(
            "the training ended before the measured steps were complete: no step was reported",
            code="measurement-incomplete",
            hint=f"look for what ends the process, such as sys.exit() in the module; its logs are in {run_dir}",
        )
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    ends = [line for line in lines if line["split"] == "train" and line["epoch_done"]]
    if len(ends) != EPOCHS or ends[1]["step"] != EPOCHS * ends[0]["step"]:
        raise TfdistError(
            "the training ended before the measured steps were complete",
            code="measurement-incomplete",
            hint=f"remove the callback of the recipe that stops the training; its logs are in {run_dir}",
        )
    return ends[1]["seconds"] - ends[0]["seconds"], ends[0], ends[1]
