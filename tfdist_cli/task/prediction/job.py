"""A job of `tfdist predict`: its model, its data, and the folder with the parts that are done."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.export_formats import EXPORT_FORMATS, VERSIONS
from tfdist_cli.spec.path_scheme import Location, Url, checked_location
from tfdist_cli.storage.remote import RemoteFolder

_JOB, _ROWS = "job.json", "rows.json"
_LAST_OF_MODEL = "saved_model.pb"
"""The file of a SavedModel that is uploaded last."""
_SEALED = re.compile(r"step-[0-9]{8,18}/state\.json")


@dataclass(frozen=True)
class Shard:
    """Which parts a process predicts: those whose number modulo `count` is `index`."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Reads `INDEX/COUNT`.

        Raises:
            UsageError: it is something else.
        """
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise UsageError(
                f"--shard must be INDEX/COUNT, with an index from 0 to COUNT - 1, got {text!r}",
                code="invalid-shard",
                hint="for the first of 4 processes write --shard 0/4",
            )
        return cls(int(index), int(count))

    def takes(self, part: int) -> bool:
        """Returns whether this process predicts a part."""
        return part % self.count == self.index


@dataclass(frozen=True)
class PredictionJob:
    """What is predicted, and where the result goes.

    Args:
        model: the exported model, or the folder of a checkpoint.
        step: the step of the checkpoint; None for an export.
        data: a file, or the name of a split of the recipe.
        columns: the columns of the file that are inputs; () for all.
        output: the file that is written at the end.
        part_size: examples in a part.
    """

    model: Location
    step: int | None
    data: str
    columns: tuple[str, ...]
    output: Path
    part_size: int

    @property
    def folder(self) -> Path:
        """The folder of the parts."""
        return self.output.with_name(f"{self.output.name}.parts")

    def path_of(self, part: int) -> Path:
        """Returns the file of a part; it exists once the part is complete."""
        return self.folder / f"part-{part:06d}{self.output.suffix}"

    def done(self) -> set[int]:
        """Returns the parts that are complete."""
        return {int(path.stem.removeprefix("part-")) for path in self.folder.glob(f"part-*{self.output.suffix}")}

    @property
    def parts(self) -> int | None:
        """How many parts there are; None until the end of the data was seen."""
        path = self.folder / _ROWS
        if not path.exists():
            return None
        return -(-int(json.loads(path.read_text(encoding="utf-8"))["rows"]) // self.part_size)

    def open(self) -> None:
        """Makes the folder of the parts, or continues in it.

        Raises:
            UsageError: the output exists, or the folder has parts of other predictions.
        """
        if self.output.exists():
            raise UsageError(
                f"{self.output} exists", code="output-exists", hint="remove it, or choose another --output"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        written = json.dumps(self._identity(), indent=2)
        temporary = self.folder / f".{_JOB}.{os.getpid()}"
        temporary.write_text(written, encoding="utf-8")
        try:
            os.link(temporary, self.folder / _JOB)
        except FileExistsError:
            self._check_continues(written)
        finally:
            temporary.unlink()

    def _check_continues(self, written: str) -> None:
        before, now = json.loads((self.folder / _JOB).read_text(encoding="utf-8")), json.loads(written)
        different = [key for key in now if before.get(key) != now[key]]
        if different:
            raise UsageError(
                f"{self.folder} has parts of predictions with other values of {', '.join(different)}",
                code="other-predictions",
                hint="give the same arguments to continue them; or remove the folder to start again",
            )

    def _identity(self) -> dict[str, Any]:
        """What all parts must have in common: with the same files, not only the same names."""
        fields = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}
        files = {"data files": checked_location(self.data)}
        if self.step is None or isinstance(self.model, Path):
            files["model files"] = _sealed(self.model)
        return json.loads(json.dumps(fields)) | {key: _stamp(path) for key, path in files.items()}

    def set_rows(self, rows: int) -> None:
        """Records how many examples the data has."""
        temporary = self.folder / f".{_ROWS}.{os.getpid()}"
        temporary.write_text(json.dumps({"rows": rows}), encoding="utf-8")
        temporary.replace(self.folder / _ROWS)


def _stamp(path: Location) -> list[Any]:
    """Returns the size and the time of the last change of a file; of a folder, the time; of an object, its version."""
    if not isinstance(path, Path):
        try:
            return list(astuple(RemoteFolder(path.parent).describe(path.name)))
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            raise UsageError(
                f"{path} cannot be read: {error.strerror or error}",
                code="no-data-file" if missing else "storage-unreachable",
                hint="check the address and the credentials",
            ) from error
    if not path.exists():
        return []
    found = path.stat()
    return [found.st_mtime_ns] if path.is_dir() else [found.st_size, found.st_mtime_ns]


def model_of(
    run: Location, checkpoints: Location, step: int | None, *, saves: bool = False
) -> tuple[Location, int | None]:
    """Returns the newest form of a run's model: its export, unless a checkpoint was written after it.

    Args:
        run: the run's directory, or its address.
        checkpoints: the folder of its checkpoints.
        step: the step of a checkpoint to use instead.
        saves: whether its recipe saves checkpoints.

    Returns:
        The export and None, or the checkpoint and its step.

    Raises:
        UsageError: the run has neither.
    """
    saved = _checkpoints(checkpoints)
    exports = _exports(run / "export")
    newest = step if step is not None else max(saved, default=None)
    if step is not None and step not in saved:
        raise UsageError(
            f"no checkpoint of step {step} exists",
            code="checkpoint-not-found",
            hint=f"the checkpoints in {checkpoints} are of steps {', '.join(map(str, sorted(saved))) or 'none'}",
        )
    if newest is None and not exports and saves:
        raise UsageError(
            f"{run} has no export, and the run ended before its first checkpoint, or has not reached it yet",
            code="no-model-in-run",
            hint="if it has ended, launch it again with the same --run-dir, with more frequent checkpoints",
        )
    if newest is None and not exports:
        raise UsageError(
            f"{run} has no export and no checkpoint",
            code="no-model-in-run",
            hint="give the recipe 'export: {}' or 'checkpoint: {every_seconds: 60}', and launch it",
        )
    if newest is None or (step is None and exports and max(exports)[0] >= saved[newest]):
        return max(exports)[1], None
    return checkpoints / f"step-{newest:08d}", newest


def _exports(folder: Location) -> list[tuple[float, Location]]:
    """Returns a run's exports that predict, and when they were written: SavedModels, or else the `.keras` file."""
    served, whole = EXPORT_FORMATS["saved_model"].file_name, EXPORT_FORMATS["keras"].file_name
    if isinstance(folder, Path):
        times = {
            path: _changed(path) for path in (folder / served, *(folder / VERSIONS).glob("[0-9]*")) if path.exists()
        }
        times = times or {path: _changed(path) for path in (folder / whole,) if path.exists()}
        return [(time, path) for path, time in times.items()]
    with _reading(f"the exports in {folder}"):
        remote = RemoteFolder(folder)
        names = remote.sizes()
        found = [name for name in names if re.fullmatch(rf"({served}|{VERSIONS}/[0-9]+)/{_LAST_OF_MODEL}", name)]
        found = found or [name for name in names if name == whole]
        return [(remote.modified(name), folder / name.removesuffix(f"/{_LAST_OF_MODEL}")) for name in found]


def _sealed(model: Location) -> Location:
    """Returns what changes when a model is written anew: of a SavedModel in a service, the file that is sent last."""
    return model / _LAST_OF_MODEL if isinstance(model, Url) and not model.endswith(".keras") else model


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Translates errors of a storage service."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{what} cannot be read: {error.strerror or error}",
            code="storage-unreachable",
            hint="check the address and the credentials",
        ) from error


def _checkpoints(folder: Location) -> dict[int, float]:
    """Returns the steps of the checkpoints in a folder, and when they were written.

    Raises:
        UsageError: the storage service cannot be used.
    """
    if isinstance(folder, Path):
        return {int(path.name.removeprefix("step-")): _changed(path) for path in folder.glob("step-*")}
    with _reading(f"the checkpoints in {folder}"):
        remote = RemoteFolder(folder)
        found = [name for name in remote.sizes() if _SEALED.fullmatch(name)]
        return {int(name[len("step-") :].partition("/")[0]): remote.modified(name) for name in found}


def _changed(path: Path) -> float:
    return path.stat().st_mtime
