"""Metrics in JSON Lines files: lines are added during the training, and those of lost steps are taken out again.

A disk that is full, or that fails, ends no training: what could not be written is told once, as a warning.
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
        path: the file; made when the first line is added. Its folder is there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False

    def append(self, line: dict[str, Any]) -> None:
        """Adds one line, whole or not at all."""
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
            self._tell(error)

    def take_back(self, step: int, ended: int) -> None:
        """Takes out the lines of what is done once more: of later steps, and of the end of an epoch at this step.

        They are kept in a file beside it, `metrics_lost.jsonl`, where there is room for them. A line that was cut off
        when its writer died goes too.

        Args:
            step: the step that the training goes on from.
            ended: how many epochs' ends have been dealt with by then.
        """
        try:
            self._take_back(step, ended)
        except FileNotFoundError:
            return
        except OSError as error:
            self._tell(error)

    def _take_back(self, step: int, ended: int) -> None:
        with self._path.open("rb") as file:
            lines = file.readlines()
        whole = len(lines) - (bool(lines) and not lines[-1].endswith(b"\n"))
        kept = next((n for n in range(whole) if _comes_again(lines[n], step, ended)), whole)
        if kept == len(lines):
            return
        new = self._path.with_name(f".{self._path.name}.new")
        try:
            if lost := [line for line in lines[kept:whole] if _said(line)]:
                with self._path.with_name(f"{self._path.stem}_lost{self._path.suffix}").open("ab") as beside:
                    beside.writelines(lost)
            # Whoever follows the file sees that it is another one.
            new.write_bytes(b"".join(lines[:kept]))
            new.replace(self._path)
        except OSError:
            with suppress(OSError):
                new.unlink()
            # Shortening it takes no room; steps that are counted twice would be worse than lines that are lost.
            os.truncate(self._path, sum(map(len, lines[:kept])))
            raise

    def _tell(self, error: OSError) -> None:
        if self._failed:
            return
        self._failed = True
        reason = f"{self._path} is not complete: {error.strerror}"
        log.error("%s; training goes on", reason)
        emit("metrics_failed", reason=reason)


def _said(line: bytes) -> dict[str, Any]:
    """What a line says; nothing for one that is damaged."""
    try:
        return parse_object(line)
    except ValueError:
        return {}


def _comes_again(line: bytes, step: int, ended: int) -> bool:
    """Whether what a line tells of is done once more by a training that goes on from a step."""
    said = _said(line)
    own, epoch = number(said.get("step")), number(said.get("epoch"))
    at_the_end = said.get("epoch_done") is True or said.get("split") != "train"
    return own is not None and (own > step or (own == step and at_the_end and (epoch or 0) > ended))
