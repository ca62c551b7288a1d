"""A trained model as a function of arrays: from an export, or from a checkpoint of its run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.spec.path_scheme import Location
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.storage.tree import fetched
from tfdist_cli.task.export import restored
from tfdist_cli.task.module import RecipeModule
from tfdist_cli.task.prediction.inputs import ONLY, Arrays, bound
from tfdist_cli.task.prediction.job import PredictionJob
from tfdist_cli.train.model.train_step import last_build_spec
from tfdist_cli.train.tf_compat.keras_model import structure_of
from tfdist_cli.train.trainer.checks import data_errors_explained

_ID = re.compile(
    r"indices\[[\d,]*\] = (?P<id>-?\d+) is not in \[0, (?P<rows>\d+)\)\s+"
    r"\[\[\{\{node (?:[^}]*/)?(?P<scope>[^/}]+)/[^/}]+\}\}"
)
OUTPUT = "prediction"
"""The name of an output that has none."""


@dataclass(frozen=True)
class TrainedModel:
    """A model that predicts.

    Args:
        call: a batch of inputs → the predictions.
        inputs: the `tf.TensorSpec`s of a batch, in the structure of the inputs.
        owner: what has the variables: a function of a SavedModel does not keep them.
    """

    call: Callable[[Any], Any]
    inputs: Any
    owner: Any

    def bind(self, arrays: Arrays) -> Any:
        """Returns the columns of some examples as inputs; see `inputs.bound`.

        Raises:
            UsageError: the columns do not fit.
            TrainingError: the inputs are not known.
        """
        if self.inputs == ():
            raise TrainingError(
                "the inputs of the model are not known: it is a .keras file of a class of its own",
                code="model-inputs-unknown",
                hint="export it with format saved_model: `tfdist export RUN`; or predict a split of the recipe",
            )
        specs = tf.nest.flatten(self.inputs)
        named = dict(zip(self._names(specs), specs, strict=True))
        shapes = {name: (tuple(spec.shape[1:]), spec.dtype.as_numpy_dtype) for name, spec in named.items()}
        return tf.nest.pack_sequence_as(self.inputs, list(bound(arrays, shapes).values()))

    def _names(self, specs: list[Any]) -> list[str]:
        if isinstance(self.inputs, dict):
            return sorted(self.inputs)  # the order in which TensorFlow flattens a dict
        if len(specs) == 1:
            return [ONLY]
        return [spec.name or f"{ONLY}_{number}" for number, spec in enumerate(specs)]

    def _data_errors_explained(self) -> AbstractContextManager[None]:
        return data_errors_explained(self.owner) if isinstance(self.owner, keras.Model) else nullcontext()

    def predict(self, inputs: Any, batch_size: int) -> dict[str, np.ndarray]:
        """Predicts some examples, batch by batch.

        Raises:
            TrainingError: a prediction is not an array of the examples, or the model cannot take a value.
        """
        rows = len(tf.nest.flatten(inputs)[0])
        batches = []
        for first in range(0, rows, batch_size):
            batch = tf.nest.map_structure(lambda array, at=first: array[at : at + batch_size], inputs)
            with self._data_errors_explained(), _ids_explained(self.owner):
                batches.append(self.call(tf.nest.map_structure(tf.convert_to_tensor, batch)))
        columns = zip(*map(tf.nest.flatten, batches), strict=True)
        arrays = [np.concatenate([each.numpy() for each in column]) for column in columns]
        if any(len(array) != rows for array in arrays):
            raise TrainingError(
                "the model's predictions have another number of examples than its inputs",
                code="prediction-not-an-array",
                hint="return tensors whose first dimension is that of the batch",
            )
        return dict(zip(_output_names(batches[0]), arrays, strict=True))


@contextmanager
def _ids_explained(owner: Any) -> Iterator[None]:
    """Names the id that a table does not have, and the layer, also of a SavedModel, which has variables only.

    Raises:
        TrainingError: there is one.
    """
    try:
        yield
    except tf.errors.OpError as error:
        match = _ID.search(str(error))
        if match is None:
            raise
        number, rows = int(match["id"]), int(match["rows"])
        number -= rows if number < 0 else 0  # Keras counts negative ids from the end
        layer = _layer(owner, match["scope"], rows)
        raise TrainingError(
            f"{ONLY} has the id {number}, and the layer {layer} has the ids 0 to {rows - 1}",
            code="id-out-of-range",
            hint="remove this id from the data, or predict with a model that has it",
        ) from error


def _layer(owner: Any, scope: str, rows: int) -> str:
    """Returns the name of the layer with so many rows that an op belongs to, or several names.

    TensorFlow numbers scopes of one name: that of the layer `embedding` may be `embedding_1`, as that of another layer.
    """
    tables = [variable for variable in owner.variables if variable.shape and variable.shape[0] == rows]
    names = [(getattr(table, "path", None) or table.name).split("/")[-2:][0] for table in tables]
    found = [name for name in names if re.fullmatch(rf"{re.escape(name)}(_\d+)?", scope)]
    return " or ".join(map(repr, found or [scope]))


def _output_names(outputs: Any) -> list[str]:
    if isinstance(outputs, dict) and not any(map(tf.nest.is_nested, outputs.values())):
        return sorted(outputs)
    count = len(tf.nest.flatten(outputs))
    return [OUTPUT] if count == 1 else [f"{OUTPUT}_{number}" for number in range(count)]


def load(job: PredictionJob, recipe: Recipe, run: Location) -> TrainedModel:
    """Loads the model of a job."""
    if job.step is not None:
        model = restored(recipe, run, job.step)[0].model
        return _of_keras(model, keras.utils.unpack_x_y_sample_weight(last_build_spec(model))[0])
    with fetched(job.model) as path:
        if path.suffix != ".keras":
            loaded = tf.saved_model.load(str(path))
            (inputs,), _ = loaded.serve.concrete_functions[0].structured_input_signature
            return TrainedModel(loaded.serve, inputs, loaded)
        with suppress(UsageError):  # the file may need the classes that the module registers, or none of them
            RecipeModule.load(recipe)
        model = keras.saving.load_model(path, compile=False)
        return _of_keras(model, structure_of(model, "inputs"))


def _of_keras(model: keras.Model, inputs: Any) -> TrainedModel:
    @tf.function(autograph=False, reduce_retracing=True)
    def call(batch: Any) -> Any:
        return model.predict_step((batch,))

    def spec(one: Any) -> tf.TensorSpec:
        return tf.TensorSpec([None, *one.shape[1:]], one.dtype, getattr(one, "name", None))

    return TrainedModel(call, tf.nest.map_structure(spec, inputs), model)
