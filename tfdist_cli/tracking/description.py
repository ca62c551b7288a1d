"""What a run consists of: the settings of both files, the commit, and the versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tfdist_cli.protocol.run_files import is_nested, read_bytes, read_lines

_FILES = ("cluster.yaml", "recipe.yaml")
_EVENTS = "events.jsonl"
_FACTS = {
    "launch": ("commit", "modified", "tfdist", "python", "host"),
    "versions": ("tensorflow", "keras"),
}
"""The events that have facts of the run, and their keys."""
_PRIVATE = "env"
"""Maps of this name may contain passwords: their values are left out."""


@dataclass(frozen=True)
class Description:
    """A run.

    Args:
        name: the name of its directory.
        project: the cluster's name, under which trackers group runs.
        parameters: the keys of both files, as `--set` takes them.
        facts: `commit`, `modified`, `host` and the versions of `tfdist`, `python`, `tensorflow` and `keras`.
    """

    name: str
    project: str
    parameters: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


class Describer:
    """Reads the description of a run whenever its files have changed.

    Args:
        run: the run's directory.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._versions: list[tuple[int, int] | None] = []
        self._read = Description(run.name, run.name)

    def read(self) -> Description:
        """Returns the description. What is missing or damaged is left out."""
        versions = [_version(self._run / name) for name in (*_FILES, _EVENTS)]
        if versions != self._versions:
            self._read, self._versions = _describe(self._run), versions
        return self._read


def _version(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size


def _describe(run: Path) -> Description:
    parameters: dict[str, Any] = {}
    for name in _FILES:
        try:
            value = yaml.safe_load(read_bytes(run / name))
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            continue
        if isinstance(value, dict) and not is_nested(value):
            parameters |= dict(_flat(value, ""))
    facts: dict[str, str] = {}
    for line in read_lines(run / _EVENTS):
        keys = _FACTS.get(str(line.get("event")), ())
        facts |= {key: str(line[key]) for key in keys if line.get(key) is not None}
    return Description(run.name, str(parameters.get("name") or run.name), parameters, facts)


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value and path.rsplit(".", maxsplit=1)[-1] != _PRIVATE:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, dict) and value:
        yield path, sorted(map(str, value))
    else:
        yield path, value
