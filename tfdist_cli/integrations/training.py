"""A training on a table: its Parquet files, the recipe and the cluster file, the run, and the trained model."""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from tfdist_cli.errors import UsageError
from tfdist_cli.integrations.model_function import ModelFunction
from tfdist_cli.integrations.table import TableColumns
from tfdist_cli.launch.run.directory import new_name, new_run_dir
from tfdist_cli.runs.handle import Run, launch
from tfdist_cli.spec.export_formats import EXPORT_FORMATS
from tfdist_cli.spec.path_scheme import Location, Url, checked_location
from tfdist_cli.storage.listing import matches
from tfdist_cli.storage.parquet import ParquetTable
from tfdist_cli.storage.remote import RemoteFolder
from tfdist_cli.storage.remote_file import open_location

TRAIN, VALIDATION = "train", "validation"
_CHECKPOINT_SECONDS = 60
_NO_NAME = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True)
class TrainedModel:
    """The result of a training on a table.

    Args:
        run: the run: its metrics, logs and state.
        path: the path or address of the trained model, a `.keras` file.
    """

    run: Run
    path: Location

    def read(self) -> bytes:
        """Returns the content of the `.keras` file.

        Raises:
            OSError: it cannot be read.
        """
        with open_location(self.path) as file:
            return file.read()

    def load(self) -> Any:
        """Returns the trained Keras model. This process needs TensorFlow for it."""
        from tfdist_cli.task.table_prediction import load_model  # noqa: PLC0415 it imports TensorFlow

        return load_model(self.read())


@dataclass(frozen=True)
class TableTraining:
    """What is trained, and on how many tasks.

    Args:
        function: returns the compiled model.
        columns: the columns of the tables.
        launcher: the launcher.
        engine: the launcher's section of the cluster file.
        workers: the number of workers, each of which trains on its own rows.
        ps: the number of parameter servers; with 0 the workers are mirrored.
        epochs: the number of passes over the table.
        batch_size: rows in a batch of one worker.
        cpus: the cores of each task.
        changes: further keys of the cluster file and the recipe, such as `{"train.seed": 3}`.
    """

    function: ModelFunction
    columns: TableColumns
    launcher: str
    engine: Mapping[str, Any]
    workers: int = 2
    ps: int = 0
    epochs: int = 1
    batch_size: int = 32
    cpus: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("ps", 0), ("epochs", 1), ("batch_size", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UsageError(
                    f"{name} is {value!r}, and has to be at least {least}",
                    code="out-of-range",
                    hint=f"pass a whole number as {name}",
                )

    @property
    def tasks(self) -> int:
        """The number of tasks: slots that the training needs."""
        return self.workers + self.ps + (1 if self.ps else 0)

    def cluster(self, name: str) -> dict[str, Any]:
        """Returns the cluster file."""
        worker = {"replicas": self.workers, "cpus": self.cpus}
        roles: dict[str, Any] = {"worker": worker}
        if self.ps:
            roles |= {"chief": {"cpus": self.cpus}, "ps": {"replicas": self.ps, "cpus": self.cpus}}
        return {
            "name": name,
            "strategy": "parameter_server" if self.ps else "multi_worker_mirrored",
            "launcher": self.launcher,
            self.launcher: dict(self.engine),
            "roles": roles,
            "recipe": "recipe.yaml",
        }

    def recipe(self, data: Mapping[str, str], folder: Location) -> dict[str, Any]:
        """Returns the recipe.

        Args:
            data: the pattern of the files of each split.
            folder: the training's folder; one in a storage service gets the checkpoints and the model.
        """
        checkpoint: dict[str, Any] = {"every_seconds": _CHECKPOINT_SECONDS}
        export: dict[str, Any] = {"format": "keras"}
        if isinstance(folder, Url):
            checkpoint["dir"] = str(folder / "checkpoints")
            export["upload"] = str(folder / "export")
        return {
            "module": "tfdist_cli.task.table_recipe",
            "params": {
                **self.function.as_params(),
                "data": dict(data),
                "features": self.columns.features,
                "label": self.columns.label,
            },
            "train": {"epochs": self.epochs, "batch_size": self.batch_size},
            "evaluate": {"split": VALIDATION} if VALIDATION in data else None,
            "checkpoint": checkpoint,
            "export": export,
        }

    def run(self, folder: Location, data: Mapping[str, str], max_restarts: int | None) -> TrainedModel:
        """Trains until the end.

        Args:
            folder: the training's folder.
            data: the pattern of the files of each split.
            max_restarts: the maximum number of restarts.

        Raises:
            SpecError: a key of `changes` is invalid.
            UsageError: the run directory cannot be used.
            RunFailed: the training has failed; the code is that of its failure.
        """
        with tempfile.TemporaryDirectory(prefix="tfdist-fit-") as files:
            _write(Path(files, "cluster.yaml"), self.cluster(folder.name))
            _write(Path(files, "recipe.yaml"), self.recipe(data, folder))
            run_dir = folder / "run" if isinstance(folder, Path) else new_run_dir(Path("runs"), folder.name, _now())
            cluster = Path(files, "cluster.yaml")
            with launch(cluster, set=self.changes, run_dir=run_dir, max_restarts=max_restarts) as run:
                run.wait()
        name = EXPORT_FORMATS["keras"].file_name
        return TrainedModel(run, run.path / "export" / name if isinstance(folder, Path) else folder / "export" / name)


@contextmanager
def training_folder(store: str | Path, name: str) -> Iterator[Location]:
    """Yields a new folder of a store. The copies of data in it are removed at the end.

    Args:
        store: a folder that all tasks reach by the same path, or an address in a storage service.
        name: what the first part of the folder's name is made of.

    Raises:
        UsageError: the store cannot be used.
    """
    at, name = checked_location(store), _NO_NAME.sub("-", name).strip("-") or "fit"
    folder: Location
    if isinstance(at, Url):
        folder = at / f"{new_name(name, _now())}-{secrets.token_hex(4)}"
    else:
        folder = new_run_dir(at.expanduser().absolute(), name, _now())
    try:
        yield folder
    finally:
        if isinstance(folder, Url):
            data = RemoteFolder(folder / "data")
            data.delete(data.sizes())
        else:
            shutil.rmtree(folder / "data", ignore_errors=True)
            with suppress(OSError):  # it has a run
                folder.rmdir()


def parquet_pattern(folder: str | Path) -> str:
    """Returns the pattern of the Parquet files in a folder."""
    at = checked_location(folder)
    return str(at / "*.parquet" if isinstance(at, Url) else at.expanduser().absolute() / "*.parquet")


def check_table(pattern: str, columns: TableColumns) -> None:
    """Checks the footers of Parquet files: names, types, lengths of lists, and empty values.

    Raises:
        UsageError: a column cannot be trained on.
    """
    ParquetTable.of(matches(pattern), columns.names)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")


def _now() -> datetime:
    return datetime.now().astimezone()
