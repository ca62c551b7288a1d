"""Metrics in JSON Lines files: a training appends lines, and one that resumes removes the lines of lost steps.

A full or failing disk does not end a training: it is reported once, as a warning.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from tfdist_cli.protocol.records import emit
from tfdist_cli.protocol.run_files import number, parse_object

log = logging.getLogger("tfdist")


class MetricsFile:
    """One file of metrics.

    Args:
        path: the file, created with its first line. Its folder exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False

    def append(self, line: dict[str, Any]) -> None:
        """Appends one line, whole or not at all."""
        data = f"{json.dumps(line, separators=(',', ':'))}\n".encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                try:
                    while data:
                        data = data[file.write(data) :]
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            self._report(error)

    def truncate(self, step: int, epochs_recorded: int) -> None:
        """Removes the lines that will be written again: of later steps, and of the end of an epoch at this step.

        They are moved to a file beside it, `metrics_lost.jsonl`, if there is room for them. A line that was cut off
        when its writer died is removed too.

        Args:
            step: the step that the training resumes from.
            epochs_recorded: epochs whose end is recorded by then.
        """
        try:
            self._truncate(step, epochs_recorded)
        except FileNotFoundError:
            return
        except OSError as error:
            self._report(error)

    def _truncate(self, step: int, epochs_recorded: int) -> None:
        with self._path.open("rb") as file:
            lines = file.readlines()
        whole = len(lines) - (bool(lines) and not lines[-1].endswith(b"\n"))
        kept = next((n for n in range(whole) if _is_lost(lines[n], step, epochs_recorded)), whole)
        if kept == len(lines):
            return
        new = self._path.with_name(f".{self._path.name}.new")
        try:
            if lost := [line for line in lines[kept:whole] if _parse(line)]:
                with self._path.with_name(f"{self._path.stem}_lost{self._path.suffix}").open("ab") as lost_file:
                    lost_file.writelines(lost)
            # Programs that follow the file detect that it was replaced.
            new.write_bytes(b"".join(lines[:kept]))
            new.replace(self._path)
        except OSError:
            with suppress(OSError):
                new.unlink()
            # Truncating the file takes no room. Steps that are counted twice would be worse than lines that are lost.
            os.truncate(self._path, sum(map(len, lines[:kept])))
            raise

    def _report(self, error: OSError) -> None:
        if self._failed:
            return
        self._failed = True
        reason = f"{self._path} is not complete: {error.strerror}"
        log.error("%s; training continues", reason)
        emit("metrics_failed", reason=reason)


def _parse(line: bytes) -> dict[str, Any]:
    """Returns the object in a line; an empty one if the line is damaged."""
    try:
        return parse_object(line)
    except ValueError:
        return {}


def _is_lost(line: bytes, step: int, epochs_recorded: int) -> bool:
    """Returns whether a training that resumes from `step` writes a line again."""
    entry = _parse(line)
    own, epoch = number(entry.get("step")), number(entry.get("epoch"))
    ends_epoch = entry.get("epoch_done") is True or entry.get("split") != "train"
    return own is not None and (own > step or (own == step and ends_epoch and (epoch or 0) > epochs_recorded))
