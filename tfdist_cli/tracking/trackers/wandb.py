"""A Weights & Biases run. Its settings are those of the environment: `WANDB_API_KEY`, `WANDB_PROJECT`, `WANDB_MODE`."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wandb

from tfdist_cli.protocol.run_files import read_object
from tfdist_cli.tracking.description import Description
from tfdist_cli.tracking.measurements import SYSTEM, Measurement

STEP, SECONDS = "global_step", "seconds"
"""The horizontal axes: steps of the training, and for what tasks use, seconds."""


class WandbTracker:
    """Writes a Weights & Biases run.

    Args:
        folder: the folder of the run's id and files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: Any = None

    def open(self, run: Description) -> None:
        """Creates the run, or continues the one whose id is kept."""
        state = self._folder / "run.json"
        try:
            found = str(read_object(state)["run_id"])
        except (OSError, ValueError, KeyError):
            found = uuid.uuid4().hex[:16]
            state.write_text(json.dumps({"run_id": found}), encoding="utf-8")
        self._run = wandb.init(
            id=found,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT") or run.project,
            name=run.name,
            dir=str(self._folder),
            settings=wandb.Settings(console="off", x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric=STEP)
        self._run.define_metric(f"{SYSTEM}*", step_metric=SECONDS)

    def describe(self, run: Description) -> None:
        """Writes the configuration."""
        self._run.config.update({**run.parameters, "tfdist": run.facts}, allow_val_change=True)

    def log(self, source: str, measurements: Sequence[Measurement]) -> None:  # noqa: ARG002 all go to one run
        """Writes a row of history for each step."""
        rows: dict[tuple[bool, int, float], dict[str, float]] = {}
        for each in measurements:
            key = (each.series.startswith(SYSTEM), each.step, each.time)
            rows.setdefault(key, {})[f"{each.series}/{each.name}"] = each.value
        for (is_system, step, _), values in rows.items():
            self._run.log({**values, SECONDS if is_system else STEP: step})

    def close(self, exit_code: int | None) -> None:
        """Uploads the rest."""
        self._run.finish(exit_code=1 if exit_code is None else exit_code)


def make(folder: Path) -> WandbTracker:
    """Returns the tracker of a run."""
    return WandbTracker(folder)
