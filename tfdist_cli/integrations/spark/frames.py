"""Writes the columns of a DataFrame that a model trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 as everyone calls it
from pyspark.sql import types as T  # noqa: N812

from tfdist_cli.errors import UsageError
from tfdist_cli.integrations.table import TableColumns, not_numbers
from tfdist_cli.spec.path_scheme import Location, Url

_NUMBERS = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.FloatType, T.DoubleType, T.BooleanType)


def check_classic(value: Any) -> None:
    """Checks that a session or a DataFrame is not one of Spark Connect.

    Raises:
        UsageError: it is. Its client has no SparkContext, which runs barrier stages. Since Spark 4 its DataFrames are
            instances of `pyspark.sql.DataFrame`, too.
    """
    if type(value).__module__.startswith("pyspark.sql.connect."):
        raise UsageError(
            "this program uses Spark Connect, which runs no barrier stages",
            code="spark-connect",
            hint="run the program with spark-submit, or make the session with SparkSession.builder.master(…), without "
            "the variable SPARK_REMOTE and with spark.api.mode=classic",
        )


def write_frame(frame: DataFrame, columns: TableColumns, folder: Location, partitions: int) -> None:
    """Writes the columns to Parquet files, by the executors.

    Args:
        frame: the rows.
        columns: the columns.
        folder: the new folder.
        partitions: the number of files at least, among which the rows are mixed; 0 keeps the partitions as they are.

    Raises:
        UsageError: a column is missing, or has no numbers.
    """
    columns.check_in(frame.columns, "the DataFrame")
    chosen = frame.select(numbers(frame, columns.names, columns.label))
    if partitions:
        chosen = chosen.repartition(max(partitions, frame.rdd.getNumPartitions()))
    chosen.write.parquet(hadoop_address(frame, folder))


def numbers(frame: DataFrame, names: Sequence[str], label: str = "") -> list[Column]:
    """Returns columns of numbers and of arrays: vectors become arrays of float32.

    Args:
        frame: the rows.
        names: the columns.
        label: the column of the targets.

    Raises:
        UsageError: a column has no numbers.
    """
    found = []
    for name in names:
        kind = frame.schema[name].dataType
        column = F.col(f"`{name}`")
        if isinstance(kind, VectorUDT):
            column = _vector_to_array(frame, column).alias(name)
        elif not isinstance(kind.elementType if isinstance(kind, T.ArrayType) else kind, _NUMBERS):
            raise not_numbers(name, kind.simpleString(), label)
        found.append(column)
    return found


def _vector_to_array(frame: DataFrame, column: Column) -> Column:
    """Returns a column of vectors as arrays of float32: `pyspark.ml.functions.vector_to_array`, which needs pandas."""
    functions = frame.sparkSession.sparkContext._jvm.org.apache.spark.ml.functions
    return Column(functions.vector_to_array(column._jc, "float32"))


def hadoop_address(frame: DataFrame, at: Location) -> str:
    """Returns the address of a folder for Spark, whose S3 file system is usually called s3a."""
    if not isinstance(at, Url):
        return f"file://{at}"  # Hadoop takes it as it is, without escapes
    if at.scheme == "s3" and not _configuration(frame).get("fs.s3.impl"):
        return f"s3a{at.removeprefix('s3')}"
    return str(at)


def _configuration(frame: DataFrame) -> Any:
    return frame.sparkSession.sparkContext._jsc.hadoopConfiguration()
