"""Records that a task sends to its launcher: JSON in its standard error, each after an ASCII record separator.

The format is that of RFC 7464: `RS {json} LF`. A record is one write of at most PIPE_BUF bytes, so that the lines of
other threads cannot split it. It passes through everything that carries the task's output: a pipe, ssh, srun, a log.

The kinds, with their keys beside `kind`:

* `beat`: a heartbeat. `computed`: the seconds of processor time that the process has used. `held`: true if the liveness
  probe sends it while a call holds the interpreter lock. `usage`: what the process used in the last `seconds`: `cpu` in
  cores, `memory` in bytes (resident, now), `sent` and `received` in bytes per second of its TCP connections, `gpus`
  {"0": [percent in use, bytes in use]} of whole GPUs.
* `versions`: `python`, `tensorflow`, `keras`, `tfdist`: those that a task runs.
* `started`: `pid`, `host`, for a task that a scheduler has started; `exited`: `code`, from the process that waits for
  it.
* `state`: `state`, one of `STATES`.
* `elastic`: `joins`: whether workers may join the training that runs, and leave it; `reason` and `code` if not.
* `joined`: `worker`, `step`: that many were done when its first ones were, `took`: seconds since it asked to join.
* `join_refused`: `worker`, `reason`, `code`.
* `left`: `worker`, `step`: its last step is among so many.
* `limit`: `role`, `most`: the most tasks of a role with which the model can be trained, and the `reason`.
* `placement`: `bytes` {"ps:0": n} of all variables there, `variables` {"ps:0": n}: how many of the model's.
* `progress`: `step`, `total` (null when unknown), `epoch`, `epochs`, `steps_per_second`, `metrics` {name: value},
  `workers` {"worker:0": steps per second} of the first 50 workers.
* `rates`: `workers` of the next 50 workers, just after `progress`.
* `checkpoint`: `step`, `path`, `took`: seconds until it was on the disk, `paused`: seconds of these without training.
* `tables_pushed`: `step`, `sequence`, `base`, `rows`, `bytes`: the rows of dynamic tables are in their folder.
* `tables_not_pushed`: `step`, `reason`: the training continues, and the next push has these rows, too.
* `checkpoint_failed`: `step`, `reason`: the training continues without it.
* `metrics_failed`: `reason`: metrics could not be written; the training continues.
* `checkpoint_damaged`: `step`, `reason`: it is skipped.
* `resumed`: `step`, `path`: the checkpoint from which the training resumes.
* `evaluated`: `batches`, `total` (null when unknown): how far an evaluation is.
* `evaluation`: `step`, `final`, `metrics`: an evaluator's score of a checkpoint.
* `profiled`: `request`, `recorded`: for how many seconds, `bytes` of the file, `took`: seconds to save it.
* `profile_failed`: `request`, `reason`, `code`, `hint`: no profile was taken; the training continues.
* `workers`: `workers` {"worker:0": [steps, examples, steps per second]} of the whole training, the rate null if it was
  not measured. Before the `result`, in as many records as they need.
* `result`: `step`, `metrics`, `seconds`, `examples`.
* `exported`: `paths`.
* `error`: `type`, `message`, `code` (of tfdist's own errors), `hint`, `traceback` (a string; empty for a user's
  mistake), and `retry`: false if a restart of the task cannot help.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from tfdist_cli.protocol.masking import Mask
from tfdist_cli.protocol.run_files import parse_object

RECORD_SEPARATOR = "\x1e"
ENABLED = "TFDIST_RECORDS"
"""Set by a launcher that reads records; without it a task writes none."""
TASK_DIR = "TFDIST_TASK_DIR"
"""The folder for a task's error.json."""
TASK_EVENTS = "TFDIST_TASK_EVENTS"
"""The file to which a task appends its records as events, if no launcher has started it."""
FREQUENT = ("progress", "rates", "beat", "evaluated")
"""Kinds that are no events, because they are frequent."""
TASK_FILE = "task.json"
"""In that folder: the task's resources, if they are known only on its machine; an entry of the plan's `tasks`."""
LAUNCHER_PID = "TFDIST_LAUNCHER_PID"
"""The process id of the launcher; the task exits with it."""
OUTLASTS = "TFDIST_OUTLASTS"
"""Set if SIGTERM reaches all tasks of a job at once: tasks that only serve others then exit after their chief."""
LEAVE_SIGNAL = signal.SIGUSR1
"""The signal to such a task alone, which leaves the training if it can."""
STOP_FILE = "stop"
"""In a task's folder, where its launcher is on another machine: the name of the signal that the task is to get."""
STATES = ("starting", "waiting", "serving", "counting", "training", "evaluating", "saving", "done", "leaving", "left")
_LIMIT = select.PIPE_BUF if hasattr(select, "PIPE_BUF") else 512


def records_enabled() -> bool:
    """Whether a launcher reads records."""
    return os.environ.get(ENABLED) == "1"


def emit(kind: str, **fields: Any) -> None:
    """Sends one record to the launcher; a task that was started without one appends it to its own file of events.

    Values that are too long for one write are truncated.
    """
    path = os.environ.get(TASK_EVENTS)
    if records_enabled():
        sys.stderr.flush()
        os.write(2, _encode({"kind": kind, **fields}))
    elif path and kind not in FREQUENT:
        append_event(path, {**fields, "event": kind})


def append_event(path: str | os.PathLike[str], line: Mapping[str, Any]) -> None:
    """Appends an event to a task's own file, with the time. The task goes on without it if the disk is full."""
    stamp = {"time": datetime.now(timezone.utc).isoformat(timespec="milliseconds")}
    text = Mask.from_environment().text(json.dumps({**stamp, **line}, default=str))
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, f"{text}\n".encode())
        finally:
            os.close(descriptor)


def _encode(record: dict[str, Any]) -> bytes:
    data = _line(record)
    while len(data) > _LIMIT:
        # The longest value is truncated. Each character or item counts for the same share of the length of its JSON.
        sizes = {key: len(_line({key: value})) for key, value in record.items() if key != "kind" and _cuttable(value)}
        if not sizes:
            return _line({"kind": record["kind"]})
        longest = max(sizes, key=lambda key: sizes[key])
        value = record[longest]
        keep = max(0, min(len(value) - 1, len(value) * (sizes[longest] - (len(data) - _LIMIT)) // sizes[longest]))
        record = {**record, longest: dict(list(value.items())[:keep]) if isinstance(value, dict) else value[:keep]}
        data = _line(record)
    return data


def _line(record: dict[str, Any]) -> bytes:
    return f"{RECORD_SEPARATOR}{json.dumps(record, separators=(',', ':'))}\n".encode()


def _cuttable(value: Any) -> bool:
    return isinstance(value, str | list | tuple | dict) and len(value) > 0


def split(line: str) -> Iterator[str | dict[str, Any]]:
    """Splits one line of output, without its line feed, into text and records, in order.

    A record that is not a JSON object, or is nested too deep, counts as text: it comes from the user's program.
    """
    text, *candidates = line.split(RECORD_SEPARATOR)
    if text or not candidates:
        yield text
    for candidate in candidates:
        try:
            record = parse_object(candidate)
        except ValueError:
            record = {}
        yield record if isinstance(record.get("kind"), str) else candidate
