"""A user's program: trains a pipeline on a DataFrame in Spark, and predicts with it.

Arguments: the master, the store, and the number of epochs. It prints what it has found as JSON.
"""

import json
import sys

import numpy as np
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 as everyone calls it

import tfdist_cli as tfdist
from tests.support.table_models import four_classes

master, store, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3])
builder = SparkSession.builder.master(master).appName("four classes").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.host", "127.0.0.1").config("spark.sql.shuffle.partitions", "4").getOrCreate()


def frame(seed):
    """2001 rows: eight numbers in a vector and a list, their class, a text, a time, and columns that are refused."""
    x = np.random.default_rng(seed).random((2001, 8))
    rows = [(Vectors.dense(row[:6]), [*map(float, row[6:])], int(row[:4].argmax()), "text") for row in x]
    found = spark.createDataFrame(spark.sparkContext.parallelize(rows, 1), ["vector", "list", "y", "name"])
    found = found.withColumn("when", F.timestamp_seconds(F.lit(1730000000) + F.col("y")))
    found = found.withColumn("null", F.when(F.col("y") > 0, 1.0))
    return found.withColumn(
        "ragged", F.when(F.col("y") > 0, F.array(F.lit(1.0))).otherwise(F.array(F.lit(1.0), F.lit(2.0)))
    )


def refused(feature, label="y"):
    """The code of the error for a column."""
    try:
        tfdist.spark.fit(four_classes, rows, features=[feature], label=label, store=store)
    except tfdist_errors.TfdistError as error:
        return error.code
    return None


if __name__ == "__main__":
    import tfdist_cli.errors as tfdist_errors

    rows = frame(0).cache()
    codes = {name: refused(name) for name in ("none", "name", "when", "null", "ragged")}
    options = {"epochs": epochs, "batch_size": 16, "store": store, "set": {"checkpoint.every_steps": 100}}
    estimator = tfdist.spark.KerasEstimator(
        modelFn=four_classes,
        modelArgs={"units": 16},
        features=["vector", "list"],
        labelCol="y",
        predictionType="class",
        fitOptions={**options, "validation_data": frame(1)},
    )
    trained = Pipeline(stages=[estimator]).fit(rows)
    predictions = trained.transform(frame(2)).cache()
    trained.save(f"file://{store}-saved")
    loaded = PipelineModel.load(f"file://{store}-saved").stages[0]
    again = loaded.copy({loaded.predictionType: "array", loaded.predictionCol: "p"}).transform(predictions).collect()
    evaluator = MulticlassClassificationEvaluator(labelCol="y", metricName="accuracy")
    kept = predictions.drop("prediction")
    print(
        json.dumps(
            {
                "refused": codes,
                "accuracy": evaluator.evaluate(predictions),
                "kept": kept.dtypes == frame(2).dtypes and kept.collect() == frame(2).collect(),
                "saved": all(int(np.argmax(row.p)) == row.prediction for row in again),
            }
        )
    )
    spark.stop()
