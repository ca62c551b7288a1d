"""Trains a Keras model on a DataFrame, in barrier stages of its SparkSession."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from pyspark.sql import DataFrame, SparkSession

from tfdist_cli.errors import UsageError
from tfdist_cli.integrations.model_function import ModelFunction
from tfdist_cli.integrations.spark.frames import check_classic, write_frame
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
from tfdist_cli.launch.spark.session import SessionServer
from tfdist_cli.spec.path_scheme import Location

Table: TypeAlias = DataFrame | str | Path
"""A DataFrame, or a folder of Parquet files."""
_WAIT_SECONDS = 120


def fit(  # noqa: PLR0913 named as in Keras's and tfdist's fit
    model_fn: Callable[..., Any] | str,
    dataframe: Table,
    *,
    features: Features,
    label: str,
    model_args: Mapping[str, Any] | None = None,
    workers: int = 2,
    ps: int = 0,
    epochs: int = 1,
    batch_size: int = 32,
    validation_data: Table | None = None,
    shuffle: bool = True,
    store: str | Path = "runs",
    set: Mapping[str, Any] | None = None,  # noqa: A002 as in tfdist.launch
    max_restarts: int | None = None,
) -> TrainedModel:
    """Trains a Keras model on a DataFrame, in the executors of its SparkSession. Nothing is collected on the driver.

    The executors write the columns to Parquet files in `store`, and each worker reads its own rows from there. The
    tasks run in one barrier stage, with one task in each slot. If an executor is lost, the training resumes from a
    checkpoint.

    Args:
        model_fn: returns the compiled model. Each task imports it, so that it has to be a function of a module, or the
            name of one: `package.module:function`.
        dataframe: the rows to train on, or a folder of Parquet files, which are read where they are.
        features: the columns of the model's input, of shape (batch, width): numbers, booleans, arrays of numbers with
            one length, and vectors, one beside the other. For several inputs a dictionary of the columns of each by
            its name.
        label: the column of the targets: numbers, or arrays of them.
        model_args: keyword arguments of `model_fn`: numbers, texts, lists, and dictionaries of them.
        workers: the number of workers, each of which trains on its own rows.
        ps: the number of parameter servers; one more slot is the chief's then. With 0 the workers are mirrored.
        epochs: the number of passes over the rows.
        batch_size: rows in a batch of one worker.
        validation_data: rows to evaluate on after each epoch.
        shuffle: whether Spark mixes the rows as it writes them. The training also shuffles what it reads.
        store: a folder that all executors and this program reach by the same path, or an address such as
            `s3://bucket/trainings`. It gets the run's directory and the model; the copies of rows are removed at the
            end.
        set: other keys of the cluster file and the recipe, such as `{"train.seed": 3}`.
        max_restarts: the maximum number of restarts, by default 3.

    Returns:
        The trained model and the run.

    Raises:
        UsageError: an argument is invalid, or a column cannot be trained on.
        SpecError: a key of `set` is invalid.
        RunFailed: the training has failed; the code is that of its failure.
    """
    columns, function = TableColumns(features, label), ModelFunction.of(model_fn, model_args)
    tables = {TRAIN: dataframe, **({} if validation_data is None else {VALIDATION: validation_data})}
    context = {split: _session(table) for split, table in tables.items()}[TRAIN].sparkContext
    engine = {"wait_seconds": _WAIT_SECONDS, "address": context.getConf().get("spark.driver.host")}
    with (
        training_folder(store, context.appName) as folder,
        SessionServer(context, partial(_count_slots, context)) as session,
    ):
        training = TableTraining(
            function,
            columns,
            "spark",
            {**engine, "session": str(session.path)},
            workers=workers,
            ps=ps,
            epochs=epochs,
            batch_size=batch_size,
            cpus=int(context.getConf().get("spark.task.cpus", "1")),
            changes=set or {},
        )
        data = {
            split: _files(table, columns, folder / "data" / split, workers if shuffle else 0)
            for split, table in tables.items()
        }
        with _own_interrupts():
            return training.run(folder, data, max_restarts)


def _count_slots(context: Any) -> int:
    """Returns the number of tasks that the executors can run at the same time, as Spark counts them for a stage."""
    spark = context._jsc.sc()
    return int(spark.maxNumConcurrentTasks(spark.resourceProfileManager().defaultResourceProfile()))


@contextmanager
def _own_interrupts() -> Iterator[None]:
    """Lets Ctrl-C end the training, which saves a checkpoint: pyspark's handler cancels the stage with its tasks."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not _is_of_pyspark(handler):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _is_of_pyspark(handler: Any) -> bool:
    return str(getattr(handler, "__module__", "")).startswith("pyspark.")


def _session(dataframe: Table) -> SparkSession:
    """Returns the session of a DataFrame, or of the program that reads a folder.

    Raises:
        UsageError: it is no DataFrame, or the session has no executors of its own in which a stage could run.
    """
    check_classic(dataframe)
    if isinstance(dataframe, DataFrame):
        return dataframe.sparkSession
    if isinstance(dataframe, (str, Path)):
        session = SparkSession.builder.getOrCreate()
        check_classic(session)
        return session
    raise UsageError(
        f"{type(dataframe).__module__}.{type(dataframe).__name__} is no DataFrame of Spark",
        code="not-a-dataframe",
        hint="pass a pyspark.sql.DataFrame, or a folder of Parquet files",
    )


def _files(table: Table, columns: TableColumns, folder: Location, partitions: int) -> str:
    """Returns the pattern of a table's Parquet files, which are written unless they exist."""
    if isinstance(table, DataFrame):
        write_frame(table, columns, folder, partitions)
    pattern = parquet_pattern(folder if isinstance(table, DataFrame) else table)
    check_table(pattern, columns)
    return pattern
