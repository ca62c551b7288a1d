"""An MLflow run. The server is that of `MLFLOW_TRACKING_URI`, the experiment that of `MLFLOW_EXPERIMENT_NAME`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tfdist_cli.protocol.run_files import read_object
from tfdist_cli.tracking.description import Description
from tfdist_cli.tracking.measurements import Measurement

os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

_INVALID = re.compile(r"[^\w./ -]")
"""What some versions refuse in names."""
_LONGEST = 500
"""Characters of a value that every version takes."""
_PARAMS, _METRICS = 100, 1000
"""Entries that a request may have."""
T = TypeVar("T")


class MlflowTracker:
    """Writes an MLflow run.

    Args:
        folder: the folder of the file that keeps the run's id.
        client: writes to the server.
    """

    def __init__(self, folder: Path, client: Any) -> None:
        self._state = folder / "run.json"
        self._client = client
        self._run = ""
        self._params: dict[str, str] = {}
        """MLflow's parameters, which cannot be changed."""

    def open(self, run: Description) -> None:
        """Creates the run, or continues the one whose id is kept."""
        try:
            self._run = str(read_object(self._state)["run_id"])
        except (OSError, ValueError, KeyError):
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            self._run = self._client.create_run(experiment, run_name=run.name).info.run_id
            self._state.write_text(json.dumps({"run_id": self._run, "experiment_id": experiment}), encoding="utf-8")
        self._client.update_run(self._run, status="RUNNING")
        self._params = dict(self._client.get_run(self._run).data.params)

    def describe(self, run: Description) -> None:
        """Writes parameters. A value that a later launch changed is a tag, since MLflow does not change parameters."""
        values = {_name(key): _text(value) for key, value in run.parameters.items()}
        new = {key: value for key, value in values.items() if key not in self._params}
        tags = {f"tfdist.{key}": value[:_LONGEST] for key, value in run.facts.items()}
        tags |= {f"changed.{key}": value for key, value in values.items() if self._params.get(key, value) != value}
        if "commit" in run.facts:
            tags["mlflow.source.git.commit"] = run.facts["commit"]
        for part in _parts([Param(key, value) for key, value in new.items()], _PARAMS):
            self._client.log_batch(self._run, params=part)
        for some in _parts([RunTag(key, value) for key, value in tags.items()], _PARAMS):
            self._client.log_batch(self._run, tags=some)
        self._params |= new

    def log(self, source: str, measurements: Sequence[Measurement]) -> None:  # noqa: ARG002 all go to one run
        """Writes metrics `series/name`."""
        metrics = [
            Metric(_name(f"{each.series}/{each.name}"), each.value, int(each.time * 1000), each.step)
            for each in measurements
        ]
        for part in _parts(metrics, _METRICS):
            self._client.log_batch(self._run, metrics=part)

    def close(self, exit_code: int | None) -> None:
        """Sets the status of the run."""
        status = "FINISHED" if exit_code == 0 else "KILLED" if exit_code in (None, 130, 143) else "FAILED"
        self._client.set_terminated(self._run, status)


def make(folder: Path) -> MlflowTracker:
    """Returns the tracker of a run."""
    return MlflowTracker(folder, MlflowClient())


def _name(text: str) -> str:
    return _INVALID.sub("_", text)


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:_LONGEST]


def _parts(items: Iterable[T], size: int) -> Iterator[list[T]]:
    values = list(items)
    for begin in range(0, len(values), size):
        yield values[begin : begin + size]
