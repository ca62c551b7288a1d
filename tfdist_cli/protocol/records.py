"""What a task tells its launcher: JSON records in its standard error, each behind an ASCII record separator.

The form is RFC 7464's: `RS {json} LF`. A record is one write of fewer than PIPE_BUF bytes, so that lines of other
threads cannot cut it in two, and it crosses whatever carries the task's output: a pipe, ssh, srun, a container's log.

The kinds, with their keys beside `kind`:

* `beat`: `computed`: a sign of life, and the seconds of processor time that the process has used. `held`: true when the
  process beside the task gives it, while a call keeps the interpreter from every thread of Python.
* `started`: `pid`, `host`: of a task that a scheduler has started; `exited`: `code`, by the process that waits for it.
* `state`: `state`, one of `STATES`.
* `placement`: `bytes` {"ps:0": n} of all that is kept there, `variables` {"ps:0": n}: how many of the model's.
* `progress`: `step`, `total` (null when unknown), `epoch`, `epochs`, `steps_per_second`, `metrics` {name: value},
  `workers` {"worker:0": steps per second}.
* `checkpoint`: `step`, `path`, `took`: seconds until it was on the disk, `paused`: those of them without training.
* `checkpoint_failed`: `step`, `reason`: training goes on without it.
* `metrics_failed`: `reason`: metrics could not be written; training goes on.
* `checkpoint_damaged`: `step`, `reason`: it is left out.
* `resumed`: `step`, `path`: the checkpoint that training goes on from.
* `evaluation`: `step`, `final`, `metrics`: an evaluator's score of a checkpoint.
* `result`: `step`, `metrics`, `seconds`, `examples`, `worker_steps` {"worker:0": n}.
* `exported`: `paths`.
* `error`: `type`, `message`, `hint`, `traceback` (a string; empty for a user's mistake), and `retry`: false
  where starting the task again cannot help.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Iterator
from typing import Any

from tfdist_cli.protocol.run_files import parse_object

RECORD_SEPARATOR = "\x1e"
ENABLED = "TFDIST_RECORDS"
"""Set by a launcher that reads records; without it a task keeps its standard error for people."""
TASK_DIR = "TFDIST_TASK_DIR"
"""Where a launcher wants a task's error.json."""
TASK_FILE = "task.json"
"""In that folder: what the task was given, where only its own machine knows that; an entry of the plan's `tasks`."""
LAUNCHER_PID = "TFDIST_LAUNCHER_PID"
"""The launcher that a task ends with."""
OUTLASTS = "TFDIST_OUTLASTS"
"""Set where SIGTERM reaches all tasks of a job at once: those that only serve others end when their chief has."""
STATES = ("starting", "waiting", "serving", "training", "evaluating", "saving", "done")
_LIMIT = select.PIPE_BUF if hasattr(select, "PIPE_BUF") else 512


def records_enabled() -> bool:
    """Whether a launcher listens."""
    return os.environ.get(ENABLED) == "1"


def emit(kind: str, **fields: Any) -> None:
    """Sends one record, if a launcher listens; what is too long for one write loses the ends of its longest parts."""
    if not records_enabled():
        return
    sys.stderr.flush()
    os.write(2, _encode({"kind": kind, **fields}))


def _encode(record: dict[str, Any]) -> bytes:
    data = _line(record)
    while len(data) > _LIMIT:
        # A text, list or map of n characters or items is worth about as many bytes per item as its JSON is long.
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
    """Parts one line of output, without its line feed, into text and records, in order.

    A record that is no JSON object, or nested as none of ours is, is text: it comes from the user's program.
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
