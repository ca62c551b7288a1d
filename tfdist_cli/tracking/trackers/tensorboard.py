"""TensorBoard's event files, written without TensorFlow. Each series is a folder: charts compare workers and splits."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from tfdist_cli.tracking.description import Description
from tfdist_cli.tracking.measurements import SOURCES, Measurement

_RUN = "run"
"""The series of the text with the parameters."""
_VERSION = "brain.Event:2"


class TensorBoardTracker:
    """Writes scalars.

    Args:
        folder: the folder of the event files, which holds nothing else.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Path] = {}
        """The event file of each series."""
        self._series: dict[str, set[str]] = {source: set() for source in SOURCES}

    def open(self, run: Description) -> None:  # noqa: ARG002 the folder is the run's
        """Removes the files of an earlier process: they are written again."""
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def describe(self, run: Description) -> None:
        """Writes the parameters, and the facts of the run, as tables for the Text tab."""
        for name, values in (("parameters", run.parameters), ("facts", run.facts)):
            rows = [f"| `{key}` | `{json.dumps(value, default=str)}` |" for key, value in values.items()]
            table = "\n".join(("| name | value |", "|---|---|", *rows))
            value = Summary.Value(
                tag=name,
                metadata=create_summary_metadata(name, ""),
                tensor=TensorProto(dtype="DT_STRING", string_val=[table.encode()]),
            )
            self._write(_RUN, [Event(wall_time=time.time(), step=0, summary=Summary(value=[value]))])

    def clear(self, source: str) -> None:
        """Removes the files of the source's series. The new ones tell a reader to forget what it has read."""
        for series in self._series[source]:
            path = self._files.pop(series, None)
            if path:
                path.unlink()
            self._begin(series)

    def log(self, source: str, measurements: Sequence[Measurement]) -> None:
        """Appends scalars."""
        groups: dict[str, list[Event]] = {}
        for each in measurements:
            value = Summary.Value(tag=each.name, simple_value=each.value)
            event = Event(wall_time=each.time, step=each.step, summary=Summary(value=[value]))
            groups.setdefault(each.series, []).append(event)
        for series, events in groups.items():
            self._series[source].add(series)
            self._write(series, events)

    def close(self, exit_code: int | None) -> None:
        """No file is kept open."""

    def _write(self, series: str, events: list[Event]) -> None:
        if series not in self._files:
            self._begin(series)
        _append(self._files[series], events)

    def _begin(self, series: str) -> None:
        folder = self._folder / series
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        path = folder / f"events.out.tfevents.{int(now * 1000)}.tfdist"
        start = Event(wall_time=now, step=0, session_log=SessionLog(status=SessionLog.START))
        _append(path, [Event(wall_time=now, file_version=_VERSION), start])
        self._files[series] = path


def _append(path: Path, events: list[Event]) -> None:
    """Appends events; all or none."""
    with path.open("ab") as file:
        size = file.tell()
        try:
            writer = RecordWriter(file)
            for event in events:
                writer.write(event.SerializeToString())
            file.flush()
        except OSError:
            file.truncate(size)
            raise


def make(folder: Path) -> TensorBoardTracker:
    """Returns the tracker of a run."""
    return TensorBoardTracker(folder)
