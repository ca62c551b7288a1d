"""An estimator of `pyspark.ml` that trains a Keras model, and the model that predicts a column."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from pyspark.ml import Estimator, Model
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasLabelCol, HasPredictionCol
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import DataFrame
from pyspark.sql import types as T  # noqa: N812 as everyone calls it

from tfdist_cli.errors import UsageError
from tfdist_cli.integrations.spark.frames import check_classic, numbers
from tfdist_cli.integrations.spark.training import fit
from tfdist_cli.integrations.table import Features, feature_names

_MODEL = "model"
_COPY = "__tfdist_"
"""The first part of the names of the columns that the model reads, beside those that are kept."""
_OUTPUTS = {
    "array": T.ArrayType(T.FloatType(), containsNull=False),
    "class": T.DoubleType(),
    "value": T.DoubleType(),
}
"""The forms of predictions, and their types."""


class _HasColumns(HasLabelCol, HasPredictionCol):
    """The parameters of the estimator that its model has, too."""

    features = Param(Params._dummy(), "features", "the columns of the model's input, or of each named input")
    predictionType = Param(
        Params._dummy(),
        "predictionType",
        "array: all outputs; class: the number of the largest; value: the only one",
        TypeConverters.toString,
    )


class KerasEstimator(Estimator, _HasColumns):
    """Trains a Keras model on a DataFrame, as `tfdist.spark.fit` does.

    Args:
        modelFn: returns the compiled model: a function of a module, or its name, `package.module:function`.
        modelArgs: keyword arguments of `modelFn`, such as `{"units": 64}`.
        features: the columns of the model's input, or a dictionary of the columns of each input.
        labelCol: the column of the targets.
        predictionCol: the column that the model adds.
        predictionType: `array` adds all outputs as an array of floats; `class` the number of the largest, and `value`
            the only output, both as a double, for `pyspark.ml.evaluation`.
        fitOptions: further arguments of `tfdist.spark.fit`, such as `{"workers": 4, "epochs": 10}`.
    """

    modelFn = Param(Params._dummy(), "modelFn", "returns the compiled Keras model")
    modelArgs = Param(Params._dummy(), "modelArgs", "keyword arguments of modelFn")
    fitOptions = Param(Params._dummy(), "fitOptions", "further arguments of tfdist.spark.fit")

    def __init__(
        self,
        *,
        modelFn: Callable[..., Any] | str | None = None,
        modelArgs: Mapping[str, Any] | None = None,
        features: Features | None = None,
        labelCol: str = "label",
        predictionCol: str = "prediction",
        predictionType: str = "array",
        fitOptions: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(predictionType="array", modelArgs={}, fitOptions={})
        given = {
            "modelFn": modelFn,
            "modelArgs": modelArgs,
            "features": features,
            "labelCol": labelCol,
            "predictionCol": predictionCol,
            "predictionType": predictionType,
            "fitOptions": fitOptions,
        }
        self._set(**{name: value for name, value in given.items() if value is not None})

    def _fit(self, dataset: DataFrame) -> KerasModel:
        get = self.getOrDefault
        for name in ("modelFn", "features"):
            if not self.isDefined(name):
                raise UsageError(f"{name} is not set", code="missing-param", hint=f"pass KerasEstimator({name}=…)")
        _check_output(get("predictionType"))
        _require_pandas()  # before the training
        trained = fit(
            get("modelFn"),
            dataset,
            features=get("features"),
            label=get("labelCol"),
            model_args=get("modelArgs"),
            **dict(get("fitOptions")),
        )
        model = KerasModel(trained.read())
        return self._copyValues(model)


class KerasModel(Model, _HasColumns, MLWritable, MLReadable):
    """A trained Keras model, which adds a column of predictions.

    Args:
        content: the bytes of the `.keras` file.
    """

    def __init__(self, content: bytes = b"") -> None:
        super().__init__()
        self._setDefault(predictionType="array")
        self.content = content

    def keras_model(self) -> Any:
        """Returns the Keras model; its classes have to be registered here, as always in Keras."""
        from tfdist_cli.task.table_prediction import load_model  # noqa: PLC0415 it imports TensorFlow

        return load_model(self.content)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        check_classic(dataset)
        _require_pandas()
        get = self.getOrDefault
        features, kind, name = get("features"), _check_output(get("predictionType")), get("predictionCol")
        used = list(dict.fromkeys(feature_names(features)))
        missing = [column for column in used if column not in dataset.columns]
        if missing:
            raise UsageError(
                f"the DataFrame has no column {missing[0]!r}", code="no-such-column", hint="check features"
            )
        copies = [column.alias(f"{_COPY}{each}") for each, column in zip(used, numbers(dataset, used), strict=True)]
        schema = T.StructType([field for field in dataset.schema.fields if field.name != name])
        kept = [field.name for field in schema.fields]
        content = dataset.sparkSession.sparkContext.broadcast(self.content)
        schema = schema.add(name, _OUTPUTS[kind], nullable=False)
        with_copies = dataset.select(*(f"`{each}`" for each in kept), *copies)
        return with_copies.mapInArrow(partial(_predict, content, features, kind, [*kept, name]), schema)

    def write(self) -> MLWriter:
        """Returns the writer of `save`."""
        return _ModelWriter(self)

    @classmethod
    def read(cls) -> MLReader:
        """Returns the reader of `load`."""
        return _ModelReader(cls)


class _ModelWriter(MLWriter):
    """Writes a model: Spark's metadata, and a Parquet file with the bytes of the `.keras` file."""

    def __init__(self, model: KerasModel) -> None:
        super().__init__()
        self._model = model

    def saveImpl(self, path: str) -> None:
        DefaultParamsWriter.saveMetadata(self._model, path, self.sparkSession.sparkContext)
        row = [(bytearray(self._model.content),)]
        self.sparkSession.createDataFrame(row, f"{_MODEL} binary").coalesce(1).write.parquet(f"{path}/{_MODEL}")


class _ModelReader(DefaultParamsReader):
    """Reads what `_ModelWriter` has written."""

    def load(self, path: str) -> KerasModel:
        model: KerasModel = super().load(path)
        (content,) = self.sparkSession.read.parquet(f"{path}/{_MODEL}").first()
        model.content = bytes(content)
        return model


def _require_pandas() -> None:
    """Checks for the packages that pyspark's `mapInArrow` needs.

    Raises:
        UsageError: one is not installed.
    """
    for name in ("pandas", "pyarrow"):
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"pyspark's mapInArrow, which predicts, needs the package {name}, which is not installed",
                code="package-missing",
                hint="pip install 'tfdist-cli[spark]' here and for the executors' Python",
            )


def _check_output(kind: str) -> str:
    if kind not in _OUTPUTS:
        raise UsageError(
            f"predictionType is {kind!r}", code="invalid-prediction-type", hint=f"write one of {', '.join(_OUTPUTS)}"
        )
    return kind


def _predict(content: Any, features: Features, kind: str, names: list[str], batches: Iterator[Any]) -> Iterator[Any]:
    """Yields record batches with a column of predictions, on an executor."""
    from tfdist_cli.task.table_prediction import batch_predictor, with_predictions  # noqa: PLC0415 TensorFlow

    *kept, name = names
    predict = batch_predictor(content.value, features, _COPY)
    for batch in batches:
        yield with_predictions(batch.select(kept), predict(batch), kind, name)
