"""`tfdist.ray`: trains on a `ray.data.Dataset`, in actors of the Ray cluster that the program uses."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.integrations.model_function import ModelFunction
from tfdist_cli.integrations.table import Features, TableColumns
from tfdist_cli.integrations.training import (
    TRAIN,
    VALIDATION,
    TableTraining,
    TrainedModel,
    check_table,
    parquet_pattern,
    training_folder,
)
from tfdist_cli.spec.path_scheme import Location

__all__ = ["fit"]


def fit(  # noqa: PLR0913 named as in Keras's and tfdist's fit
    model_fn: Callable[..., Any] | str,
    dataset: Any,
    *,
    features: Features,
    label: str,
    model_args: Mapping[str, Any] | None = None,
    workers: int = 2,
    ps: int = 0,
    epochs: int = 1,
    batch_size: int = 32,
    validation_data: Any = None,
    shuffle: bool = True,
    store: str | Path = "runs",
    address: str | None = None,
    set: Mapping[str, Any] | None = None,  # noqa: A002 as in tfdist.launch
    max_restarts: int | None = None,
) -> TrainedModel:
    """Trains a Keras model on a dataset of Ray, in actors of a placement group. Nothing is collected on the driver.

    Ray's workers write the columns to Parquet files in `store`, and each worker of the training reads its own rows from
    there. If a node is lost, the training resumes from a checkpoint.

    Args:
        model_fn: returns the compiled model. Each task imports it, so that it has to be a function of a module, or the
            name of one: `package.module:function`.
        dataset: the `ray.data.Dataset` to train on, or a folder of Parquet files, which are read where they are.
        features: the columns of the model's input, of shape (batch, width): numbers, booleans, and arrays of them with
            one length, one beside the other. For several inputs a dictionary of the columns of each by its name.
        label: the column of the targets: numbers, or arrays of them.
        model_args: keyword arguments of `model_fn`: numbers, texts, lists, and dictionaries of them.
        workers: the number of workers, each of which trains on its own rows.
        ps: the number of parameter servers; one more actor is the chief's then. With 0 the workers are mirrored.
        epochs: the number of passes over the rows.
        batch_size: rows in a batch of one worker.
        validation_data: rows to evaluate on after each epoch.
        shuffle: whether Ray mixes the rows before it writes them. The training also shuffles what it reads.
        store: a folder that all nodes and this program reach by the same path, or an address such as
            `s3://bucket/trainings`. It gets the run's directory and the model; the copies of rows are removed at the
            end.
        address: the Ray cluster; by default the one that this program uses.
        set: other keys of the cluster file and the recipe, such as `{"roles.worker.cpus": 4, "train.seed": 3}`.
        max_restarts: the maximum number of restarts, by default 3.

    Returns:
        The trained model and the run.

    Raises:
        UsageError: an argument is invalid, or a column cannot be trained on.
        SpecError: a key of `set` is invalid.
        RunFailed: the training has failed; the code is that of its failure.
    """
    columns = TableColumns(features, label)
    tables = {TRAIN: dataset, **({} if validation_data is None else {VALIDATION: validation_data})}
    training = TableTraining(
        ModelFunction.of(model_fn, model_args),
        columns,
        "ray",
        {"address": address or _address()},
        workers=workers,
        ps=ps,
        epochs=epochs,
        batch_size=batch_size,
        changes=set or {},
    )
    for table in tables.values():
        _check(table, columns)
    with training_folder(store, "ray") as folder:
        data = {split: _files(table, columns, folder / "data" / split, shuffle) for split, table in tables.items()}
        return training.run(folder, data, max_restarts)


def _address() -> str:
    """Returns the address of the cluster that this program uses.

    Raises:
        UsageError: ray is not installed, or the program uses Ray Client, which does not tell.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            "tfdist.ray needs the package ray, which is not installed",
            code="package-missing",
            hint="pip install 'tfdist-cli[ray,cpu]'",
        )
    import ray  # noqa: PLC0415 an extra

    if _is_client():
        raise UsageError(
            "this program uses Ray Client, which does not tell the address of its server",
            code="ray-client-address",
            hint='pass the address of ray.init to tfdist.ray.fit, too: address="ray://HOST:10001"',
        )
    return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else "auto"


def _is_client() -> bool:
    """Returns whether this program uses a cluster by way of Ray Client."""
    client = sys.modules.get("ray.util.client")  # a program with a ray:// address has it
    return bool(client and client.ray.is_connected())


def _check(table: Any, columns: TableColumns) -> None:
    """Checks that a table is one, and has the columns; those of Parquet files are checked later.

    Raises:
        UsageError: it is none, or has not, or cannot be read.
    """
    if isinstance(table, (str, Path)):
        return
    if _is_client():
        raise UsageError(
            "this program uses Ray Client, with which Ray computes no dataset",
            code="ray-client-dataset",
            hint="run the program on the cluster, such as with `ray job submit`, or pass a folder of Parquet files",
        )
    if not all(hasattr(table, name) for name in ("columns", "select_columns", "random_shuffle", "write_parquet")):
        raise UsageError(
            f"{type(table).__module__}.{type(table).__name__} is no dataset of Ray",
            code="not-a-dataset",
            hint="pass a ray.data.Dataset, or a folder of Parquet files",
        )
    names = table.columns()
    if not names:  # Ray knows no columns of a dataset without rows
        raise _no_rows()
    columns.check_in(names, "the dataset")


def _files(table: Any, columns: TableColumns, folder: Location, shuffle: bool) -> str:
    """Returns the pattern of a table's Parquet files, which are written unless they exist.

    Raises:
        UsageError: the table has no rows, or a column cannot be trained on.
    """
    if isinstance(table, (str, Path)):
        folder = table  # type: ignore[assignment]
    else:
        chosen = table.select_columns(columns.names)
        (chosen.random_shuffle() if shuffle else chosen).write_parquet(str(folder))
        if isinstance(folder, Path) and not any(folder.glob("*.parquet")):  # Ray writes no file without rows
            raise _no_rows()
    pattern = parquet_pattern(folder)
    check_table(pattern, columns)
    return pattern


def _no_rows() -> UsageError:
    return UsageError(
        "the dataset has no rows", code="no-rows", hint="check what its filters leave, such as with dataset.count()"
    )
